"""A bound that follows from the positions: the largest slot that a call writes, plus one, rounded up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.dims import free_names
from graphsurgery.editing.replaying import Replayer, nodes_above
from graphsurgery.editing.spans import Sizes, as_value, input_sizes
from graphsurgery.patterns.interface import find_position_ids
from graphsurgery.patterns.write_positions import written_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.cache_reads import CacheRead
    from graphsurgery.rewrite import Rewrite

__all__ = ["PositionBound", "find_position_bound"]

_INT64 = ir.DataType.INT64


@dataclasses.dataclass(frozen=True)
class PositionBound:
    """What the bound is the largest of.

    Attributes:
        slots: integers of any shape: slots that are written, or the first slot of each row with the number of those
            that are written behind it (S; 1 for single slots).
        shapes: of the model before the edit.
    """

    slots: tuple[tuple[ir.Value, Dim], ...]
    shapes: Shapes

    def write(self, rewrite: Rewrite, multiple: int) -> ir.Value:
        """Emit C, int64 ``[1]``, at the start of the graph: at least 1, and a multiple of ``multiple``."""
        replayer, sizes = Replayer(rewrite), Sizes(rewrite, self.shapes)
        ends = []
        for value, behind in self.slots:
            replayed = replayer.at_start(value)
            assert replayed is not None
            length = as_value(rewrite, sizes.bound(behind, (value, 0)))
            with rewrite.prologue():
                largest = _largest(rewrite, replayed, self.shapes.dtype(value), self.shapes.rank(value))
                ends.append(_binary(rewrite, "Add", largest, length, "end"))
        with rewrite.prologue():
            end = ends[0]
            if len(ends) > 1:
                joined = rewrite.emit("Concat", ends, {"axis": 0}, name="ends", dtype=_INT64, shape=[len(ends)])
                end = _largest(rewrite, joined, _INT64, 1)
            up = _binary(rewrite, "Add", end, rewrite.constant([multiple - 1], "round_up"), "padded")
            size = rewrite.constant([multiple], "multiple")
            return _binary(rewrite, "Mul", _binary(rewrite, "Div", up, size, "multiples"), size, "bound")


def find_position_bound(model: ir.Model, shapes: Shapes, reads: Sequence[CacheRead]) -> PositionBound | None:
    """What tells the slots in use; None where nothing does.

    The writes into full caches tell it: those of sliding layers may count modulo the window. Where no write tells, the
    positions of the tokens do, which are slots in the exports that write by them.
    """
    found: dict[ir.Value, Dim] = {}
    named = input_sizes(model, shapes)
    for read in reads:
        for cache in read.caches if not read.sliding else ():
            if cache.sliding:
                continue
            slots = written_slots(cache, shapes, model)
            above = nodes_above(slots.value) if slots is not None else None
            if slots is None or above is None:
                return _by_positions(model, shapes)
            if any(node.op_type == "Mod" for node in above):
                # Slots that are taken again: the largest of this call says nothing of those that are in use.
                continue
            size = slots.length
            if size is None or not (isinstance(size, int) or free_names(size) <= named):
                return _by_positions(model, shapes)
            found.setdefault(slots.value, size)
    return PositionBound(tuple(found.items()), shapes) if found else _by_positions(model, shapes)


def _by_positions(model: ir.Model, shapes: Shapes) -> PositionBound | None:
    positions = find_position_ids(model, shapes)
    return PositionBound(((positions, 1),), shapes) if positions is not None else None


def _largest(rewrite: Rewrite, value: ir.Value, dtype: ir.DataType | None, rank: int | None) -> ir.Value:
    """The largest element, at least 0 where none is negative, as int64 ``[1]``."""
    emit = rewrite.emit
    if dtype != _INT64:
        value = emit("Cast", [value], {"to": int(_INT64)}, name="slots", dtype=_INT64)
    if rank != 1:
        value = emit("Reshape", [value, rewrite.constant([-1], "flat")], name="slots", dtype=_INT64, shape=[None])
    # One slot more than there is, so that a call that writes none still has a bound.
    value = emit("Concat", [value, rewrite.constant([0], "zero")], {"axis": 0}, name="slots", dtype=_INT64)
    if rewrite.opset < 18:
        return emit("ReduceMax", [value], {"axes": [0], "keepdims": 1}, name="last_slot", dtype=_INT64, shape=[1])
    axes = rewrite.constant([0], "axes")
    return emit("ReduceMax", [value, axes], {"keepdims": 1}, name="last_slot", dtype=_INT64, shape=[1])


def _binary(rewrite: Rewrite, op_type: str, left: ir.Value, right: ir.Value, name: str) -> ir.Value:
    return rewrite.emit(op_type, [left, right], name=name, dtype=_INT64, shape=[1])
