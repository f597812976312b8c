"""To which slots a cache of a fixed size is written in a call: the integers that say so, as near to the inputs as they are.

Alphabet: B batch, S query length, N slots, K indexed axes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.analysis.constants import constant_of
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.kv_cache import CacheSite

__all__ = ["WrittenSlots", "write_of", "written_slots"]

_LAYOUT = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "QuantizeLinear"})
_KEEPS_ELEMENTS = frozenset({"Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Cast", "Tile"})
# Inputs of the vendor's write that are positions, whether or not the model defines it as a function.
_VENDOR = {"CtxScatter": 1, "CtxScatterCB": 2}
_FAR = 2**31 - 1
"""What padding is sent to, so that it is not written."""
_MAX_STEPS = 24


@dataclasses.dataclass(frozen=True)
class WrittenSlots:
    """The slots that a call writes.

    Attributes:
        value: int32 or int64 of any shape, each element a slot (or less than 0: none); or the first slot of each row.
        updates: where ``value`` holds first slots: what is written, and its axis of size S.
    """

    value: ir.Value
    updates: tuple[ir.Value, int] | None = None


def write_of(cache: CacheSite) -> ir.Node | None:
    """The node that writes into ``cache``, behind layout operators."""
    node = cache.output.producer()
    while node is not None and not node.domain and node.op_type in _LAYOUT and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node


def written_slots(cache: CacheSite, shapes: Shapes) -> WrittenSlots | None:
    """The slots that ``cache`` is written to; None where the write does not tell."""
    node = write_of(cache)
    if node is None:
        return None
    if node.op_type in _VENDOR and len(node.inputs) > _VENDOR[node.op_type]:
        return _plain(node.inputs[_VENDOR[node.op_type]])
    if is_op(node, "ScatterElements", "Scatter"):
        return _plain(node.inputs[1])
    if is_op(node, "ScatterND"):
        return _plain(_last_component(node.inputs[1], shapes))
    if is_op(node, "TensorScatter"):
        return _tensor_scatter(node, shapes)
    return None


def _tensor_scatter(node: ir.Node, shapes: Shapes) -> WrittenSlots | None:
    first = node.inputs[2] if len(node.inputs) > 2 else None
    mode = node.attributes.get("mode")
    if first is None or (mode is not None and mode.as_string() == "circular"):
        return None
    updates = node.inputs[1]
    rank = shapes.rank(updates) if updates is not None else None
    if updates is None or rank is None:
        return None
    attribute = node.attributes.get("axis")
    axis = attribute.as_int() if attribute is not None else -2
    return WrittenSlots(first, (updates, axis % rank))


def _last_component(indices: ir.Value | None, shapes: Shapes) -> ir.Value | None:
    """Of indices ``[.., K]`` that point to K axes, those to the last, which counts slots; None where they are mixed."""
    steps = 0
    while indices is not None and steps < _MAX_STEPS:
        steps += 1
        depth = shapes.dim(indices, -1)
        if depth == 1:
            return indices
        node = indices.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "Concat":
            rank = shapes.rank(indices)
            axis = node.attributes["axis"].as_int()
            if rank is None or axis % rank != rank - 1:
                return None
            indices = node.inputs[-1]
        elif node.op_type in ("Identity", "Cast"):
            indices = node.inputs[0]
        else:
            return None
    return None


def _plain(value: ir.Value | None) -> WrittenSlots | None:
    """``value`` without the nodes that only repeat its elements, or send those that are not wanted away."""
    steps = 0
    while value is not None and steps < _MAX_STEPS:
        steps += 1
        node = value.producer()
        if node is None or node.domain:
            break
        if node.op_type in _KEEPS_ELEMENTS:
            value = node.inputs[0]
        elif node.op_type == "Where":
            kept = [item for item in node.inputs[1:] if not _is_away(item)]
            if len(kept) != 1:
                break
            value = kept[0]
        else:
            break
    return WrittenSlots(value) if value is not None else None


def _is_away(value: ir.Value | None) -> bool:
    while value is not None:
        array = constant_of(value)
        if array is not None:
            return bool(array.size) and bool(np.all(array >= _FAR))
        node = value.producer()
        if not is_op(node, "Cast", "Expand", "Identity", "Unsqueeze"):
            return False
        assert node is not None
        value = node.inputs[0]
    return False
