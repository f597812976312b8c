"""Generated attention whose operands have their axes in any order: products as Einsum or MatMul, any softmax axis."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

__all__ = ["SpelledSpec", "build_spelled", "spelled_feeds", "spelled_specs"]

HEADS, FEATURES = 3, 4
_SIZES: dict[str, int | str] = {"b": "B", "h": HEADS, "s": "S", "t": "T", "d": FEATURES}


@dataclasses.dataclass(frozen=True)
class SpelledSpec:
    """The order of the axes of each value, by letters: batch b, heads h, rows s, keys t, features d.

    Attributes:
        query: of the queries.
        key: of the keys.
        value: of the values.
        scores: of the score product, the mask beside it and the softmax.
        turned: of the scores in front of the softmax, and of the probabilities; None where nothing transposes them.
        out: of what is attended.
        swapped: the operands of both products change places.
        by_matmul: which products are a MatMul where the order of the axes allows it: scores, values.
        mask: what is added or selected: nothing, a mask of rows and columns, of columns, or a bias of the heads.
    """

    query: str
    key: str
    value: str
    scores: str
    turned: str | None
    out: str
    swapped: bool
    by_matmul: tuple[bool, bool]
    mask: str


def _orders(letters: str) -> st.SearchStrategy[str]:
    return st.permutations(list(letters)).map("".join)


@st.composite
def spelled_specs(draw: st.DrawFn) -> SpelledSpec:
    """Any order; half of the time one in which the products can be MatMul."""
    turned = draw(st.one_of(st.none(), _orders("bhst")))
    mask = draw(st.sampled_from(["none", "rows", "columns", "bias", "where"]))
    by_matmul = (draw(st.booleans()), draw(st.booleans()))
    swapped = draw(st.booleans())
    query, key, value = draw(_orders("bhsd")), draw(_orders("bhtd")), draw(_orders("bhtd"))
    scores, out = draw(_orders("bhst")), draw(_orders("bhsd"))
    if by_matmul[0]:
        query, key, scores = ("bhds", "bhtd", "bhts") if swapped else ("bhsd", "bhdt", "bhst")
    weights = turned or scores
    if by_matmul[1] and weights == "bhst" and not swapped:
        value, out = "bhtd", "bhsd"
    elif by_matmul[1] and weights == "bhts" and swapped:
        value, out = "bhdt", "bhds"
    else:
        by_matmul = (by_matmul[0], False)
    return SpelledSpec(query, key, value, scores, turned, out, swapped, by_matmul, mask)


def _shape(axes: str) -> list[int | str]:
    return [_SIZES[axis] for axis in axes]


def _product(
    left: str, right: str, names: tuple[str, str], axes: str, result: str, spec: SpelledSpec, matmul: bool
) -> onnx.NodeProto:
    operands, letters = list(names), [left, right]
    if spec.swapped:
        operands, letters = operands[::-1], letters[::-1]
    if matmul:
        return helper.make_node("MatMul", operands, [result], name=f"make_{result}")
    return helper.make_node(
        "Einsum", operands, [result], name=f"make_{result}", equation=f"{','.join(letters)}->{axes}"
    )


def build_spelled(spec: SpelledSpec) -> onnx.ModelProto:
    """The model: inputs ``query``, ``key``, ``value`` and, but for ``none``, ``mask``; output ``attended``."""
    info = helper.make_tensor_value_info
    inputs = [info(name, TensorProto.FLOAT, _shape(getattr(spec, name))) for name in ("query", "key", "value")]
    nodes = [_product(spec.query, spec.key, ("query", "key"), spec.scores, "raw", spec, spec.by_matmul[0])]
    constants = [onnx.numpy_helper.from_array(np.asarray(0.4, np.float32), "scale")]
    nodes.append(helper.make_node("Mul", ["raw", "scale"], ["scaled"], name="scale_scores"))
    masked = "scaled"
    if spec.mask != "none":
        kept = {"rows": "bst", "where": "bst", "columns": "bt", "bias": "h"}[spec.mask]
        sizes = [_SIZES[axis] if axis in kept else 1 for axis in spec.scores]
        while sizes and sizes[0] == 1:
            sizes.pop(0)
        kind = TensorProto.BOOL if spec.mask == "where" else TensorProto.FLOAT
        inputs.append(info("mask", kind, sizes))
        masked = "masked"
        if spec.mask == "where":
            constants.append(onnx.numpy_helper.from_array(np.asarray(-1e9, np.float32), "low"))
            nodes.append(helper.make_node("Where", ["mask", "scaled", "low"], [masked], name="mask_scores"))
        else:
            nodes.append(helper.make_node("Add", ["scaled", "mask"], [masked], name="mask_scores"))
    axes = spec.scores
    if spec.turned is not None:
        perm = [axes.index(axis) for axis in spec.turned]
        nodes.append(helper.make_node("Transpose", [masked], ["turned"], name="turn", perm=perm))
        masked, axes = "turned", spec.turned
    nodes.append(helper.make_node("Softmax", [masked], ["weights"], name="softmax", axis=axes.index("t")))
    nodes.append(_product(axes, spec.value, ("weights", "value"), spec.out, "attended", spec, spec.by_matmul[1]))
    outputs = [info("attended", TensorProto.FLOAT, _shape(spec.out))]
    graph = helper.make_graph(nodes, "spelled", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def spelled_feeds(spec: SpelledSpec, batch: int, length: int, total: int, seed: int) -> dict[str, np.ndarray]:
    """Random inputs; a mask that leaves each row at least one key."""
    generator = np.random.default_rng(seed)
    sizes = {"b": batch, "h": HEADS, "s": length, "t": total, "d": FEATURES}
    feeds = {
        name: generator.standard_normal([sizes[axis] for axis in getattr(spec, name)]).astype(np.float32)
        for name in ("query", "key", "value")
    }
    if spec.mask == "none":
        return feeds
    kept = {"rows": "bst", "where": "bst", "columns": "bt", "bias": "h"}[spec.mask]
    shape = [sizes[axis] if axis in kept else 1 for axis in spec.scores]
    letters = list(spec.scores)
    while letters and letters[0] not in kept:
        letters.pop(0)
        shape.pop(0)
    if spec.mask == "bias":
        return feeds | {"mask": generator.standard_normal(shape).astype(np.float32)}
    allowed = generator.random(shape) < 0.6
    allowed[tuple(0 if axis == "t" else slice(None) for axis in letters)] = True
    return feeds | {"mask": allowed if spec.mask == "where" else np.where(allowed, 0, -1e9).astype(np.float32)}
