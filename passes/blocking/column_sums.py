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
        self, rewrite: Rewrite, shapes: ShapeView, pusher: SlicePusher, total: Dim, parts: Cuts, columns: Sequence[Span]
    ) -> None:
        """See the class.

        Args:
            rewrite: where nodes are emitted.
            shapes: shapes of the values.
            pusher: cuts what the value is made of.
            total: T.
            parts: rows and heads that are wanted, by axes counted from the last (-2 the rows, -3 the heads).
            columns: the blocks.
        """
        self._rewrite, self._shapes, self._pusher = rewrite, shapes, pusher
        self._total, self._parts, self._columns = total, parts, columns

    def get(self, value: ir.Value) -> ir.Value:
        """``value`` for the rows and heads."""
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
        """The parts as cuts of ``value``, as far as it has these axes and is not the same all along them."""
        shape = self._shapes.shape(value)
        if shape is None:
            return ()
        rank = len(shape)
        return tuple((rank + axis, span) for axis, span in self._parts if rank + axis >= 0 and shape[axis] != 1)

    def _reduced(self, node: ir.Node, source: ir.Value, span: Span) -> ir.Value:
        rank = self._shapes.rank(source) or 0
        part = self._pusher.get(source, (*self._cuts(source), (rank - 1, span)))
        return self._rewrite.clone(node, [part, *node.inputs[1:]], name="over_block")
