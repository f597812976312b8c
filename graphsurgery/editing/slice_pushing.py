"""Slices of a value, made from slices of its sources.

A mask of S rows and T columns is hardly ever needed whole: a block of it can be computed from ranges of its
one-dimensional sources (a Range, positions, a padding mask) by replaying the exporter's own nodes on them.
:class:`SlicePusher` does that with :func:`graphsurgery.analysis.slices.lift`, one axis after the other, and falls back
to slicing a finished value where a node cannot be replayed. The same slice of the same value is made once.

In a function body the nodes that make a mask may be those of the callers: where all of them make it in the same way,
their nodes are replayed in the body, and what these start from becomes parameters of the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.editing.handed_over import HandedOver
from graphsurgery.editing.slice_steps import Cuts, Wideness, cut, shape_operand, short_name, slice_needs

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.rewrite import Rewrite

__all__ = ["Cuts", "SlicePusher", "cut"]


class SlicePusher:
    """Makes slices of values that have rows and columns.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the body before the edit.
        length: S, the number of rows.
        total: T, the number of columns.

    Attributes:
        is_wide: tells values that have rows and columns, or are computed from something that has.
        finished: values with rows and columns that had to be sliced as a whole.
    """

    def __init__(self, rewrite: Rewrite, shapes: ShapeView, length: Dim, total: Dim) -> None:
        self._rewrite = rewrite
        self._shapes = shapes
        self._length = length
        self._total = total
        self._made: dict[tuple[ir.Value, Cuts, ir.Graph], ir.Value] = {}
        self.is_wide = Wideness(shapes, length, total)
        self.finished: dict[ir.Value, None] = {}
        self._handed_over = HandedOver(rewrite, shapes, self.finished)

    def get(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        """``value`` with only the positions of ``cuts``; ``value`` itself where there are none."""
        if not cuts:
            return value
        main = self._made.get((value, cuts, self._rewrite.graph))
        if main is not None:
            return main
        key = (value, cuts, self._rewrite.place)
        if key not in self._made:
            self._made[key] = self._make(value, cuts)
        return self._made[key]

    def is_made(self, value: ir.Value) -> bool:
        """Whether some node makes ``value``, here or in the callers of the function that is edited."""
        return value.producer() is not None or self._handed_over.knows(value)

    def _make(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        node = value.producer()
        if not self.is_wide(value):
            return cut(self._rewrite, value, cuts, name=f"{short_name(value)}_part")
        if node is not None:
            inputs = self._lifted(node, value, cuts)
            if inputs is not None:
                return self._rewrite.clone(node, inputs, name=f"{short_name(value)}_part")
        else:
            part = self._handed_over.get(value, cuts)
            if part is not None:
                return part
        if node is not None or self._rewrite.is_parameter(value):
            self.finished.setdefault(value)
        return cut(self._rewrite, value, cuts, name=f"{short_name(value)}_part")

    def _lifted(self, node: ir.Node, value: ir.Value, cuts: Cuts) -> list[ir.Value | None] | None:
        """The inputs of a copy of ``node`` that computes the slice; None where it cannot be replayed."""
        needs = slice_needs(node, value.index() or 0, cuts, self._shapes, self._rewrite.model)
        if needs is None:
            return None
        inputs: list[ir.Value | None] = []
        for position, item in enumerate(node.inputs):
            if item is None:
                inputs.append(None)
            elif position in needs.lengths:
                contents = self._shapes.shape_value(item)
                if contents is None:
                    return None
                inputs.append(shape_operand(self._rewrite, contents.items, item, needs.lengths[position]))
            else:
                inputs.append(self.get(item, needs.cuts_of(position)))
        return inputs
