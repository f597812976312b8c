"""Values that are reduced over all columns, computed without a tensor that has rows and columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.slices import runs_along

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.editing.slice_pushing import Cuts, SlicePusher
    from graphsurgery.editing.spans import Span
    from graphsurgery.rewrite import Rewrite

__all__ = ["ColumnSums"]


class ColumnSums:
    """A value without columns that is reduced from one with columns, computed block by block."""

    def __init__(
        self, rewrite: Rewrite, shapes: ShapeView, pusher: SlicePusher, total: Dim, rows: Cuts, columns: Sequence[Span]
    ) -> None:
        self._rewrite, self._shapes, self._pusher = rewrite, shapes, pusher
        self._total, self._rows, self._columns = total, rows, columns

    def get(self, value: ir.Value) -> ir.Value:
        """``value`` for the rows."""
        node = value.producer()
        combine = {"ReduceSum": "Add", "ReduceMax": "Max", "ReduceMin": "Min"}
        if node is None or not self._pusher.is_wide(value):
            return self._pusher.get(value, self._cuts(value))
        source = node.inputs[0]
        if node.op_type in combine and source is not None and self._has_columns(source):
            parts = [self._reduced(node, source, span) for span in self._columns]
            total = parts[0]
            for part in parts[1:]:
                total = self._rewrite.emit(combine[node.op_type], [total, part], name="over_blocks", dtype=value.dtype)
            return total
        inputs = [None if item is None else self.get(item) for item in node.inputs]
        return self._rewrite.clone(node, inputs, name="of_blocks")

    def _has_columns(self, value: ir.Value) -> bool:
        size = self._shapes.dim(value, -1)
        return size is not None and runs_along(size, self._total)

    def _cuts(self, value: ir.Value) -> Cuts:
        rank = self._shapes.rank(value)
        if not self._rows or rank is None or rank < 2 or self._shapes.dim(value, -2) == 1:
            return ()
        return ((rank - 2, self._rows[0][1]),)

    def _reduced(self, node: ir.Node, source: ir.Value, span: Span) -> ir.Value:
        rank = self._shapes.rank(source) or 0
        part = self._pusher.get(source, (*self._cuts(source), (rank - 1, span)))
        return self._rewrite.clone(node, [part, *node.inputs[1:]], name="over_block")
