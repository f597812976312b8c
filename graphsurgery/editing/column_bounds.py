"""Leaving out columns behind a bound: of keys, values and masks together, from as far up as they can be followed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.slices import Blocked, RowAxis, lift
from graphsurgery.editing.shape_patches import restore_size
from graphsurgery.editing.slice_pushing import SlicePusher
from graphsurgery.editing.spans import Sizes, Span, as_value, least

if TYPE_CHECKING:
    from collections.abc import Container

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
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

    def __init__(self, rewrite: Rewrite, shapes: Shapes, stops: Container[ir.Value]) -> None:
        super().__init__(rewrite, shapes, 1, 1)
        self._stops = stops

    def is_wide(self, value: ir.Value) -> bool:
        """Whether the nodes above ``value`` are to be replayed where they can be."""
        return value not in self._stops

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
