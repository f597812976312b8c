"""What follows the product with the vocabulary matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.strategies.graphs import Builder, entry

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TAILS", "tail"]

_FAR = 2**63 - 1


def _where(g: Builder, x: str, rank: int, features: int) -> str:
    return g.op("Where", g.const(g.rng.random(features) > 0.3), x, g.scalar(-100.0))


def _expanded_mask(g: Builder, x: str, rank: int, features: int) -> str:
    allowed = g.op("Expand", g.const(g.rng.random(features) > 0.3), g.op("Shape", x))
    return g.op("Where", allowed, x, g.scalar(-100.0))


def _slice(g: Builder, x: str, rank: int, features: int) -> str:
    return g.op("Slice", x, g.ints(0), g.ints(features - 2), g.ints(-1))


def _slice_all(g: Builder, x: str, rank: int, features: int) -> str:
    """``x[:, :, :-1]`` as TorchScript writes it: a Slice for each axis."""
    for axis in range(rank):
        end = features - 1 if axis == rank - 1 else _FAR
        x = g.op("Slice", x, g.ints(0), g.ints(end), g.ints(axis), g.ints(1))
    return x


def _slice_to_size(g: Builder, x: str, rank: int, features: int) -> str:
    """All rows, by their number."""
    rows = entry(g, x, rank - 2)
    return g.op("Slice", x, g.ints(0), rows, g.ints(rank - 2), g.ints(1))


def _concat(g: Builder, x: str, rank: int, features: int) -> str:
    lead = g.op("Slice", g.op("Shape", x), g.ints(0), g.ints(-1), g.ints(0))
    shape = g.op("Concat", lead, g.ints(3), axis=0)
    filler = g.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.array([-9], g.dtype)))
    return g.op("Concat", x, filler, axis=-1)


def _pad(g: Builder, x: str, rank: int, features: int) -> str:
    return g.op("Pad", x, g.ints(*[0] * (2 * rank - 1), 2), g.scalar(-5.0))


def _row_scale(g: Builder, x: str, rank: int, features: int) -> str:
    return g.op("Mul", x, g.op("Sigmoid", g.mean("residual", -1)))


def _shared_row_scale(g: Builder, x: str, rank: int, features: int) -> str:
    """The same for all batch rows."""
    return g.op("Mul", x, g.op("Sigmoid", g.mean(g.mean("residual", -1), 0)))


def _if(g: Builder, x: str, rank: int, features: int) -> str:
    """On a fed flag: the logits times a constant, or as they are."""
    if not any(value.name == "sharpen" for value in g.inputs):
        g.input("sharpen", TensorProto.BOOL, [])
    name = g.fresh("if")
    then, other = f"{name}_then", f"{name}_else"
    branches = [
        helper.make_graph([node], output, [], [helper.make_tensor_value_info(output, g.elem, None)])
        for node, output in (
            (helper.make_node("Mul", [x, "cap"], [then]), then),
            (helper.make_node("Identity", [x], [other]), other),
        )
    ]
    return g.op("If", "sharpen", name=name, then_branch=branches[0], else_branch=branches[1])


_STEPS: dict[str, Callable[[Builder, str, int, int], str]] = {
    "bias": lambda g, x, _rank, features: g.op("Add", x, g.weight(features)),
    "mul": lambda g, x, _rank, _features: g.op("Mul", x, g.scalar(0.7)),
    "div": lambda g, x, _rank, _features: g.op("Div", x, g.scalar(1.7)),
    "softcap": lambda g, x, _rank, _features: g.op("Mul", g.op("Tanh", g.op("Div", x, "cap")), "cap"),
    "where": _where,
    "expanded_mask": _expanded_mask,
    "slice": _slice,
    "slice_all": _slice_all,
    "slice_to_size": _slice_to_size,
    "concat": _concat,
    "softmax": lambda g, x, rank, _features: g.op("Softmax", x, axis=rank - 1),
    "log_softmax": lambda g, x, rank, _features: g.op("LogSoftmax", x, axis=rank - 1),
    "identity": lambda g, x, _rank, _features: g.op("Identity", x),
    "if": _if,
    "pad": _pad,
    "row_scale": _row_scale,
    "shared_row_scale": _shared_row_scale,
    "tile": lambda g, x, rank, _features: g.op("Tile", x, g.ints(*[1] * (rank - 1), 2)),
    "cast": lambda g, x, _rank, _features: g.op("Cast", x, to=TensorProto.FLOAT),
}
TAILS = tuple(_STEPS)
_FEATURES: dict[str, Callable[[int], int]] = {
    "slice": lambda features: features - 2,
    "slice_all": lambda features: features - 1,
    "concat": lambda features: features + 3,
    "pad": lambda features: features + 2,
    "tile": lambda features: 2 * features,
}


def tail(g: Builder, x: str, rank: int, features: int) -> tuple[str, int]:
    """What follows the product: the logits, and how many there are for each row."""
    for step in g.d.tail:
        x = _STEPS[step](g, x, rank, features)
        features = _FEATURES[step](features) if step in _FEATURES else features
    return x, features
