"""Leaving out columns behind a bound: of keys, values and masks together, from as far up as they can be followed.

What is made from bounds that are known at the start of the graph goes as far up as what it is made of allows, so that
everything further down may share it, in whatever order it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.slices import Blocked, RowAxis, lift
from graphsurgery.editing.shape_patches import restore_size
from graphsurgery.editing.slice_pushing import Cuts, cut
from graphsurgery.editing.spans import Sizes, Span, as_value, least
from graphsurgery.patterns.function_bodies import body_view

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.rewrite import Rewrite

__all__ = ["Bounds", "ColumnCutter", "part_name"]

_INT64 = ir.DataType.INT64


class ColumnCutter:
    """Slices of columns, made from slices of the caches and of the one-dimensional sources of masks.

    The exporter's own nodes are replayed on the slices, products and reads by index included; a value above which that
    cannot be done is sliced itself. The same slice of the same value is made once.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the model before the edit.
        stops: values that are sliced themselves: caches after the write.
        bounds: where the spans come from.
    """

    def __init__(self, rewrite: Rewrite, shapes: ShapeView, stops: Container[ir.Value], bounds: Bounds) -> None:
        self._rewrite = rewrite
        self._shapes = shapes
        self._stops = stops
        self._bounds = bounds
        self._made: dict[tuple[ir.Value, Cuts], ir.Value] = {}
        self._bodies: dict[ir.Node, _BodyCutter] = {}

    def get(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        """``value`` with only the positions of ``cuts``; all of it where there are none."""
        if not cuts:
            return self.whole(value)
        if (value, cuts) not in self._made:
            self._made[value, cuts] = self._make(value, cuts)
        return self._made[value, cuts]

    def whole(self, value: ir.Value) -> ir.Value:
        """All of ``value``, where nodes are inserted."""
        return value

    def in_reach(self, node: ir.Node) -> bool:
        """Whether ``node`` is where this one replays nodes."""
        return node.graph is self._rewrite.graph

    def at_node(self, node: ir.Node) -> None:
        """Insert what follows where ``node`` is."""
        self._rewrite.before(node)

    def behind(self, value: ir.Value) -> None:
        """Insert what follows right behind ``value``."""
        self._rewrite.after(value)

    def patched(self, node: ir.Node, axis: int, span: Span) -> None:
        """Let ``node``, whose input has lost the columns of ``axis`` behind ``span``, give its output without them."""
        step = lift(node, 0, RowAxis(axis), self._shapes, self._rewrite.model)
        assert not isinstance(step, Blocked)
        for patch in step.patches:
            operand = node.inputs[patch.input]
            assert operand is not None
            made = self._operand(operand, {patch.position: span})
            assert made is not None
            self._rewrite.reroute(node, patch.input, made)

    def _make(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        node = value.producer()
        name = part_name(value)
        early = all(self._bounds.is_at_start(span) for _, span in cuts)
        if node is not None and value not in self._stops and self.in_reach(node):
            inputs = self._lifted(node, value, cuts, early=early)
            if inputs is not None:
                return self._rewrite.clone(node, inputs, name=name)
            body = self._body(node)
            if body is not None:
                return body.of_output(value.index() or 0, cuts)
        whole = self.whole(value)
        if early:
            self.behind(value)
        return cut(self._rewrite, whole, cuts, name=name)

    def _body(self, call: ir.Node) -> _BodyCutter | None:
        """The body of the function that ``call`` calls, for replaying in its place what depends on the columns."""
        if call not in self._bodies:
            view = body_view(call, self._shapes, self._rewrite.model)
            if view is None:
                return None
            function = self._rewrite.model.functions[call.op_identifier()]
            self._bodies[call] = _BodyCutter(self._rewrite, view, self, call, function, self._bounds)
        return self._bodies[call]

    def _lifted(self, node: ir.Node, value: ir.Value, cuts: Cuts, *, early: bool) -> list[ir.Value | None] | None:
        """The inputs of a copy of ``node`` that computes the slice; None where it cannot be replayed."""
        if len(node.outputs) != 1:
            return None
        needs: dict[int, list[tuple[int, Span]]] = {}
        lengths: dict[int, dict[int, Span]] = {}
        for axis, span in cuts:
            step = lift(node, value.index() or 0, RowAxis(axis), self._shapes, self._rewrite.model)
            if isinstance(step, Blocked) or any(need.flat for need in step.rows.values()):
                return None
            for position, need in step.rows.items():
                needs.setdefault(position, []).append((need.axis, span))
            for patch in step.patches:
                lengths.setdefault(patch.input, {})[patch.position] = span
            if not step.rows and not lengths:
                return None
        operands = {position: node.inputs[position] for position in lengths}
        if any(item is not None and self._shapes.shape_value(item) is None for item in operands.values()):
            return None
        inputs: list[ir.Value | None] = []
        for position, item in enumerate(node.inputs):
            made = item
            if item is not None and position not in lengths:
                made = self.get(item, tuple(sorted(needs.get(position, ()), key=lambda pair: pair[0])))
            inputs.append(made)
        if early:
            self.at_node(node)
        for position, item in operands.items():
            inputs[position] = None if item is None else self._operand(item, lengths[position])
        return inputs

    def _operand(self, operand: ir.Value, lengths: dict[int, Span]) -> ir.Value | None:
        """A shape operand with the lengths of spans in place of some entries; None where it is not known."""
        contents = self._shapes.shape_value(operand)
        if contents is None:
            return None
        entries: list[int | ir.Value] = []
        for position, item in enumerate(contents.items):
            if position in lengths:
                entries.append(lengths[position].length)
            elif self._bounds.tells(item):
                # Not asked of the operand, which may read the size of what is no longer needed as a whole.
                entries.append(self._bounds.size(item))
            else:
                place = ((0, Span(position, position + 1, 1)),)
                entries.append(cut(self._rewrite, self.whole(operand), place, name="shape_entry"))
        values = [as_value(self._rewrite, item) for item in entries]
        if len(values) == 1:
            return values[0]
        return self._rewrite.emit("Concat", values, {"axis": 0}, name="shape", dtype=_INT64, shape=[len(values)])


class _BodyCutter(ColumnCutter):
    """The same for values of a function's body in one call, whose nodes are copied to where the call is."""

    def __init__(
        self,
        rewrite: Rewrite,
        view: ShapeView,
        outer: ColumnCutter,
        call: ir.Node,
        function: ir.Function,
        bounds: Bounds,
    ) -> None:
        super().__init__(rewrite, view, (), bounds)
        self._outer = outer
        self._call = call
        self._function = function
        self._arguments = dict(zip(function.inputs, call.inputs, strict=False))
        self._copies: dict[ir.Value, ir.Value] = {}

    def get(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        """See :meth:`ColumnCutter.get`; parameters are what the call passes."""
        argument = self._arguments.get(value)
        return self._outer.get(argument, cuts) if argument is not None else super().get(value, cuts)

    def of_output(self, index: int, cuts: Cuts) -> ir.Value:
        """Slices of an output of the call."""
        return self.get(self._function.outputs[index], cuts)

    def whole(self, value: ir.Value) -> ir.Value:
        """See :meth:`ColumnCutter.whole`: a copy of what the body computes."""
        argument = self._arguments.get(value)
        if argument is not None:
            return self._outer.whole(argument)
        node = value.producer()
        assert node is not None
        if value not in self._copies:
            inputs = [None if item is None else self.whole(item) for item in node.inputs]
            with self._rewrite.aside():
                # Where the call is: whatever else wants it may read it there.
                self.at_node(node)
                self._copies[value] = self._rewrite.clone(node, inputs, name=(value.name or "copy").replace("/", "_"))
        return self._copies[value]

    def in_reach(self, node: ir.Node) -> bool:
        """See :meth:`ColumnCutter.in_reach`."""
        return node.graph is self._function.graph

    def at_node(self, node: ir.Node) -> None:  # noqa: ARG002
        """See :meth:`ColumnCutter.at_node`: all of the body is where the call is."""
        self._outer.at_node(self._call)

    def behind(self, value: ir.Value) -> None:  # noqa: ARG002
        """See :meth:`ColumnCutter.behind`."""
        self._outer.at_node(self._call)


def part_name(value: ir.Value) -> str:
    """What the first columns of ``value`` are called."""
    return f"{(value.name or 'columns').rsplit('/', 1)[-1].replace('.', '_')}_part"


class Bounds:
    """The first C columns of N, for one C and several N: ``min(C, N)`` of each.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the model before the edit.
        bound: gives C, int64 ``[1]``, made at the start of the graph.
    """

    def __init__(self, rewrite: Rewrite, shapes: ShapeView, bound: Callable[[], ir.Value]) -> None:
        self._rewrite = rewrite
        self._shapes = shapes
        self._bound = bound
        self._sizes = Sizes(rewrite, shapes)
        self._spans: dict[Dim, Span] = {}
        self._at_start: set[ir.Value] = set()

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
            end = least(self._rewrite, self._bound(), as_value(self._rewrite, size))
            return Span(0, end, end)
        with self._rewrite.prologue():
            end = least(self._rewrite, self._bound(), as_value(self._rewrite, size))
        self._spans[slots] = Span(0, end, end)
        self._at_start.add(end)
        return self._spans[slots]

    def tells(self, size: Dim) -> bool:
        """Whether ``size`` is known at the start of the graph."""
        return self._sizes.is_shared(size)

    def size(self, size: Dim) -> int | ir.Value:
        """A size that is known at the start of the graph."""
        if isinstance(size, int):
            return size
        return self._sizes.known(size)

    def is_at_start(self, span: Span) -> bool:
        """Whether ``span`` is known at the start of the graph."""
        return not isinstance(span.end, ir.Value) or span.end in self._at_start

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
