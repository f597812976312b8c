"""Leaving out columns behind a bound: of keys, values and masks together, from as far up as they can be followed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.slices import Blocked, RowAxis, lift
from graphsurgery.editing.shape_patches import restore_size
from graphsurgery.editing.slice_pushing import SlicePusher
from graphsurgery.editing.spans import Sizes, Span, as_value, least
from graphsurgery.patterns.function_bodies import body_view

if TYPE_CHECKING:
    from collections.abc import Container

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes, ShapeView
    from graphsurgery.editing.slice_pushing import Cuts
    from graphsurgery.rewrite import Rewrite

__all__ = ["Bounds", "ColumnCutter"]

_INT64 = ir.DataType.INT64


class ColumnCutter(SlicePusher):
    """Slices of columns, made from slices of the caches and of the one-dimensional sources of masks.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the model before the edit.
        stops: values that are sliced themselves: caches after the write.
    """

    through_products = True

    def __init__(self, rewrite: Rewrite, shapes: ShapeView, stops: Container[ir.Value]) -> None:
        super().__init__(rewrite, shapes, 1, 1)
        self._stops = stops
        self._bodies: dict[ir.Node, _BodyCutter] = {}

    def is_wide(self, value: ir.Value) -> bool:
        """Whether the nodes above ``value`` are to be replayed where they can be."""
        return value not in self._stops

    def _make(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        node = value.producer()
        function = self._rewrite.model.functions.get(node.op_identifier()) if node is not None else None
        if node is None or function is None or not self.is_wide(value):
            return super()._make(value, cuts)
        steps = [lift(node, value.index() or 0, RowAxis(axis), self._shapes, self._rewrite.model) for axis, _ in cuts]
        if not any(isinstance(step, Blocked) for step in steps) and len(node.outputs) == 1:
            return super()._make(value, cuts)
        view = body_view(node, self._shapes, self._rewrite.model)
        if view is None:
            return super()._make(value, cuts)
        # What the function reads by number of columns is replayed outside of it.
        if node not in self._bodies:
            self._bodies[node] = _BodyCutter(self._rewrite, view, self, node, function)
        return self._bodies[node].get(function.outputs[value.index() or 0], cuts)

    def patched(self, node: ir.Node, axis: int, span: Span) -> str | None:
        """Let ``node``, whose input has lost the columns of ``axis`` behind ``span``, give its output without them.

        Returns:
            Why it cannot; None where it does.
        """
        step = lift(node, 0, RowAxis(axis), self._shapes, self._rewrite.model)
        if isinstance(step, Blocked):
            return step.reason
        for patch in step.patches:
            operand = node.inputs[patch.input]
            assert operand is not None
            made = self.operand(operand, {patch.position: span})
            if made is None:
                return f"the shape operand {operand.name!r} of node {node.name!r} is not known"
            self._rewrite.reroute(node, patch.input, made)
        return None


class _BodyCutter(ColumnCutter):
    """The same for values of a function's body in one call, whose nodes are copied to where the call is."""

    def __init__(
        self, rewrite: Rewrite, view: ShapeView, outer: ColumnCutter, call: ir.Node, function: ir.Function
    ) -> None:
        super().__init__(rewrite, view, ())
        self._outer = outer
        self._function = function
        self._arguments = dict(zip(function.inputs, call.inputs, strict=False))
        self._copies: dict[ir.Value, ir.Value] = {}

    def get(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        """See :meth:`SlicePusher.get`; parameters are what the call passes."""
        argument = self._arguments.get(value)
        return self._outer.get(argument, cuts) if argument is not None else super().get(value, cuts)

    def whole(self, value: ir.Value) -> ir.Value:
        """See :meth:`SlicePusher.whole`: a copy of what the body computes."""
        argument = self._arguments.get(value)
        if argument is not None:
            return self._outer.whole(argument)
        node = value.producer()
        assert node is not None
        if value not in self._copies:
            inputs = [None if item is None else self.whole(item) for item in node.inputs]
            self._copies[value] = self._rewrite.clone(node, inputs, name=(value.name or "copy").replace("/", "_"))
        return self._copies[value]

    def in_reach(self, node: ir.Node) -> bool:
        """See :meth:`SlicePusher.in_reach`."""
        return node.graph is self._function.graph


class Bounds:
    """The first C columns of N, for one C and several N: ``min(C, N)`` of each.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the model before the edit.
        bound: C, int64 ``[1]``, made at the start of the graph.
    """

    def __init__(self, rewrite: Rewrite, shapes: Shapes, bound: ir.Value) -> None:
        self._rewrite = rewrite
        self._shapes = shapes
        self._bound = bound
        self._sizes = Sizes(rewrite, shapes)
        self._spans: dict[Dim, Span] = {}

    def share(self, slots: Dim, seen_on: tuple[ir.Value, int]) -> None:
        """Make the bound for ``slots`` now where it can be made at the start of the graph: it belongs to no one site."""
        if self._sizes.is_shared(slots):
            self.span(slots, seen_on)

    def span(self, slots: Dim, seen_on: tuple[ir.Value, int]) -> Span:
        """The columns that are left of ``slots``, which axis ``seen_on`` has."""
        if slots in self._spans:
            return self._spans[slots]
        size = self._sizes.bound(slots, seen_on)
        if not self._sizes.is_shared(slots):
            end = least(self._rewrite, self._bound, as_value(self._rewrite, size))
            return Span(0, end, end)
        with self._rewrite.prologue():
            end = least(self._rewrite, self._bound, as_value(self._rewrite, size))
        self._spans[slots] = Span(0, end, end)
        return self._spans[slots]

    def keep_sizes(self, value: ir.Value, slots: Dim, seen_on: tuple[ir.Value, int]) -> None:
        """Let Shape nodes that read ``value``, whose last axis has lost columns, go on telling N."""
        shape = self._shapes.shape(value)
        if shape is None:
            return
        for use in list(value.uses()):
            if use.node.op_type == "Shape" and not use.node.domain:
                rows = RowAxis(len(shape) - 1)
                self._rewrite.before(use.node)
                restore_size(self._rewrite, use.node, value, rows, lambda: self._whole(slots, seen_on), self._shapes)

    def _whole(self, slots: Dim, seen_on: tuple[ir.Value, int]) -> ir.Value:
        return as_value(self._rewrite, self._sizes.bound(slots, seen_on))
