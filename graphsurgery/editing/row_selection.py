"""Selecting rows: where a value carries them, and the nodes that take the wanted ones.

A selection sits right behind the value that it selects from. Everything emitted is valid from opset 11 on (``last``
with ``keep=1`` from opset 1 on).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.slices import RowAxis
from graphsurgery.editing.row_numbers import dim_name
from graphsurgery.editing.versioned_ops import INT64_MAX, slice_axis, squeeze, unsqueeze
from graphsurgery.patterns.matcher import is_op
from graphsurgery.patterns.rows import batch_axis_of, may_be, merges_batch

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.cones import Edge
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.contracts import IndexMode
    from graphsurgery.editing.row_numbers import RowNumbers
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.rewrite import Rewrite

__all__ = ["Placement", "RowSelector", "frame_of", "lowest_opset", "place"]

_ATTENTION_MASK = 3
"""The input of the operator Attention that is its mask."""


def lowest_opset(index: IndexMode, keep: int, *, flat: bool) -> int:
    """The lowest opset of the default domain in which a selection can be written."""
    return 1 if index == "last" and keep == 1 and not flat else 11


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a value has its rows and its batch.

    Attributes:
        rows: the row axis.
        batch_axis: None where there is none (flat, packed, a batch of 1), or its rows are the same for all batches.
        shared: its rows are the same for all batches: the batch axis has size 1, or is not there.
        gap: where ``shared``, the number of axes that its reader has between batch and rows.
        kept: how many of these the value has too, such as its heads; 0 where they all have size 1.
        between: the sizes between batch and rows, where it has a batch axis.
        merged: its batch is on one axis with something else: rows can be followed through it, not selected.
    """

    rows: RowAxis
    batch_axis: int | None
    shared: bool = False
    gap: int = 0
    kept: int = 0
    between: tuple[Dim, ...] = ()
    merged: bool = False


def place(
    value: ir.Value,
    rows: RowAxis,
    view: ShapeView,
    tokens: TokenInput,
    reader: Placement | None = None,
    *,
    merged: bool = False,
) -> Placement | None:
    """Where ``value`` has its rows and its batch; None where rows cannot be selected for each batch row.

    Args:
        value: carries the rows on ``rows``.
        rows: see above.
        view: shapes.
        tokens: where B and S come from.
        reader: of the result of the node that reads ``value``, for values that are broadcast over the batch.
        merged: whether a batch on one axis with something else will do.
    """
    if rows.flat or tokens.batch is None or tokens.batch == 1:
        return Placement(rows, None)
    shape = view.shape(value)
    if shape is None:
        # Axes are brought in front of others only where it is known how many there are.
        return Placement(rows, 0) if rows.axis == 1 else None
    batch_axis = batch_axis_of(shape, rows, tokens)
    if batch_axis is not None:
        return Placement(rows, batch_axis, between=shape[batch_axis + 1 : rows.axis])
    if merged and merges_batch(shape, rows, tokens):
        return Placement(rows, None, merged=True)
    if reader is None or reader.batch_axis is None or reader.batch_axis > reader.rows.axis:
        return None
    gap = reader.rows.axis - reader.batch_axis - 1
    between = min(gap, rows.axis)
    if any(size != 1 for size in shape[: rows.axis - between]):
        return None
    own = shape[rows.axis - between : rows.axis]
    beside = reader.between[len(reader.between) - between :]
    if len(beside) == between and any(
        size != 1 and not may_be(size, other) for size, other in zip(own, beside, strict=True)
    ):
        # They are no axes of the reader's: batch and heads may be on one of them.
        return None
    kept = between if any(size != 1 for size in own) else 0
    return Placement(rows, None, shared=True, gap=gap, kept=kept)


def frame_of(edge: Edge, result: Placement, view: ShapeView) -> Placement:
    """What the value of an edge is broadcast against: the result of its node, but for the mask of an Attention.

    That operator's mask is ``[B, H, S, T]`` or less, also where its queries and its result are ``[B, S, H*D]``.
    """
    node = edge.node
    if not is_op(node, "Attention") or edge.index != _ATTENTION_MASK or view.rank(node.outputs[0]) != 3:
        return result
    heads = node.attributes.get("q_num_heads")
    between: tuple[Dim, ...] = () if heads is None or heads.is_ref() else (heads.as_int(),)
    return Placement(RowAxis(2), result.batch_axis, between=between)


class RowSelector:
    """Emits the selections of one plan into one model.

    Args:
        rewrite: where nodes are inserted.
        numbers: which rows.
        view: shapes and element types before the edit.

    Attributes:
        numbers: see above.
    """

    def __init__(self, rewrite: Rewrite, numbers: RowNumbers, view: ShapeView) -> None:
        self._rewrite = rewrite
        self._view = view
        self.numbers = numbers
        self._selected: dict[tuple[ir.Value, Placement], ir.Value] = {}

    def select(self, value: ir.Value, at: Placement) -> ir.Value:
        """The wanted rows of ``value``, emitted behind it; the same value is selected from once."""
        key = (value, at)
        if key not in self._selected:
            self._selected[key] = self._select(value, at)
        return self._selected[key]

    def _select(self, value: ir.Value, at: Placement) -> ir.Value:
        plan, dtype, shape = self.numbers.plan, self._view.dtype(value), self._view.shape(value)
        rows, rewrite = at.rows, self._rewrite
        kept: list[int | str | None] | None = None
        if shape is not None:
            kept = [dim_name(size) for size in shape]
            kept[rows.axis] = self.numbers.count(flat=rows.flat)
        if plan.index == "last" and plan.keep == 1 and not rows.flat:
            rewrite.after(value)
            return slice_axis(rewrite, value, (-1, INT64_MAX), rows.axis, name="rows", dtype=dtype, shape=kept)
        if at.batch_axis is None and not at.shared:
            indices = (
                self.numbers.flat_indices()
                if rows.flat and self.numbers.tokens.batch != 1
                else self.numbers.stream_indices()
            )
            rewrite.after(value)
            return rewrite.emit("Gather", [value, indices], {"axis": rows.axis}, name="rows", dtype=dtype, shape=kept)
        if at.shared:
            return self._select_shared(value, at, dtype)
        if (at.batch_axis, rows.axis) == (0, 1):
            return self._gather_batched(value, dtype, kept)
        assert shape is not None
        assert at.batch_axis is not None
        rest = [axis for axis in range(len(shape)) if axis not in (at.batch_axis, rows.axis)]
        order = [at.batch_axis, rows.axis, *rest]
        rewrite.after(value)
        front = rewrite.emit("Transpose", [value], {"perm": order}, name="batch_first", dtype=dtype)
        picked = self._gather_batched(front, dtype, None)
        back = [order.index(axis) for axis in range(len(order))]
        return rewrite.emit("Transpose", [picked], {"perm": back}, name="rows_in_place", dtype=dtype, shape=kept)

    def _select_shared(self, value: ir.Value, at: Placement, dtype: ir.DataType | None) -> ir.Value:
        """Rows that are the same for all batches, picked for each: ``[1, .., S, ...]`` becomes ``[B, .., N, ...]``."""
        rewrite, indices, kept = self._rewrite, self.numbers.indices(), at.kept
        shape = self._view.shape(value)
        rewrite.after(value)
        if at.rows.axis > kept:
            value = squeeze(rewrite, value, range(at.rows.axis - kept), name="rows_of_all")
        picked = rewrite.emit("Gather", [value, indices], {"axis": kept}, name="rows", dtype=dtype)
        if kept:
            # [H, B, N, ...] becomes [B, H, N, ...].
            assert shape is not None
            rest = range(kept + 1, kept + 2 + len(shape) - at.rows.axis - 1)
            order = [kept, *range(kept), *rest]
            picked = rewrite.emit("Transpose", [picked], {"perm": order}, name="batch_in_front", dtype=dtype)
        missing = at.gap - kept
        return unsqueeze(rewrite, picked, range(1, missing + 1), name="rows_in_place") if missing else picked

    def _gather_batched(
        self,
        value: ir.Value,
        dtype: ir.DataType | None,
        kept: list[int | str | None] | None,
    ) -> ir.Value:
        """``value[b, indices[b]]`` for a batch-first value ``[B, S, ...]``."""
        rewrite = self._rewrite
        if rewrite.opset >= 12:
            wide = self.numbers.wide_indices()
            rewrite.after(value)
            return rewrite.emit("GatherND", [value, wide], {"batch_dims": 1}, name="rows", dtype=dtype, shape=kept)
        # Before opset 12 GatherND has no batch axes: the batch number goes into the indices.
        pairs = self.numbers.batch_pairs()
        rewrite.after(value)
        return rewrite.emit("GatherND", [value, pairs], name="rows", dtype=dtype, shape=kept)
