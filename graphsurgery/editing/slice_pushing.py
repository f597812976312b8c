"""Slices of a value, made from slices of its sources.

A mask of S rows and T columns is hardly ever needed whole: a block of it can be computed from ranges of its
one-dimensional sources (a Range, positions, a padding mask) by replaying the exporter's own nodes on them.
:class:`SlicePusher` does that with :func:`graphsurgery.analysis.slices.lift`, one axis after the other, and falls back
to slicing a finished value where a node cannot be replayed. The same slice of the same value is made once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.analysis.slices import Blocked, RowAxis, lift, runs_along
from graphsurgery.editing.spans import Span, as_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.rewrite import Rewrite

__all__ = ["Cuts", "SlicePusher", "cut"]

Cuts: TypeAlias = tuple[tuple[int, Span], ...]
"""Which span of which axis, in the order of the axes."""

_MAX_DEPTH = 40


def cut(rewrite: Rewrite, value: ir.Value, cuts: Cuts, *, name: str) -> ir.Value:
    """One Slice of ``value`` on several axes; ``value`` itself where there is nothing to cut."""
    cuts = tuple((axis, span) for axis, span in cuts if not span.everything)
    if not cuts:
        return value
    starts = [item.start for _, item in cuts]
    ends = [item.end for _, item in cuts]
    axes = [axis for axis, _ in cuts]
    operands = [_bounds(rewrite, starts), _bounds(rewrite, ends), rewrite.constant(axes, "axes")]
    return rewrite.emit("Slice", [value, *operands], name=name, dtype=value.dtype)


def _bounds(rewrite: Rewrite, bounds: Sequence[int | ir.Value]) -> ir.Value:
    if all(isinstance(item, int) for item in bounds):
        return rewrite.constant([item for item in bounds if isinstance(item, int)], "bounds")
    values = [as_value(rewrite, item) for item in bounds]
    if len(values) == 1:
        return values[0]
    return rewrite.emit("Concat", values, {"axis": 0}, name="bounds", dtype=ir.DataType.INT64, shape=[len(values)])


class SlicePusher:
    """Makes slices of values that have rows and columns.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the model before the edit.
        length: S, the number of rows.
        total: T, the number of columns.

    Attributes:
        finished: values with rows and columns that had to be sliced as a whole.
    """

    def __init__(self, rewrite: Rewrite, shapes: Shapes, length: Dim, total: Dim) -> None:
        self._rewrite = rewrite
        self._shapes = shapes
        self._length = length
        self._total = total
        self._made: dict[tuple[ir.Value, Cuts, ir.Graph], ir.Value] = {}
        self._wide: dict[ir.Value, bool] = {}
        self.finished: dict[ir.Value, None] = {}

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

    def is_wide(self, value: ir.Value) -> bool:
        """Whether ``value`` has rows and columns, or is computed from something that has by what can be replayed."""
        if value not in self._wide:
            self._wide[value] = False
            self._wide[value] = self._find_wide(value, 0)
        return self._wide[value]

    def _find_wide(self, value: ir.Value, depth: int) -> bool:
        shape = self._shapes.shape(value)
        if shape is not None and self._has_both(shape):
            return True
        node = value.producer()
        if node is None or depth > _MAX_DEPTH or node.op_type not in _LIGHT or node.domain:
            return False
        return any(item is not None and self.is_wide(item) for item in node.inputs)

    def _has_both(self, shape: tuple[Dim, ...]) -> bool:
        rows = [axis for axis, size in enumerate(shape) if runs_along(size, self._length)]
        columns = [axis for axis, size in enumerate(shape) if runs_along(size, self._total)]
        return any(row != column for row in rows for column in columns) and self._length != 1

    def _make(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        node = value.producer()
        wide = self.is_wide(value)
        if node is not None and wide:
            inputs = self._lifted(node, value, cuts)
            if inputs is not None:
                return self._rewrite.clone(node, inputs, name=f"{_short(value)}_part")
            self.finished.setdefault(value)
        return cut(self._rewrite, value, cuts, name=f"{_short(value)}_part")

    def _lifted(self, node: ir.Node, value: ir.Value, cuts: Cuts) -> list[ir.Value | None] | None:
        """The inputs of a copy of ``node`` that computes the slice; None where it cannot be replayed."""
        if len(node.outputs) != 1 or node.graph is not self._rewrite.model.graph:
            return None
        needs: dict[int, list[tuple[int, Span]]] = {}
        lengths: dict[int, dict[int, Span]] = {}
        for axis, span in cuts:
            step = lift(node, value.index() or 0, RowAxis(axis), self._shapes, self._rewrite.model)
            if isinstance(step, Blocked) or step.contracts:
                return None
            for position, need in step.rows.items():
                if need.flat:
                    return None
                needs.setdefault(position, []).append((need.axis, span))
            for patch in step.patches:
                if patch.flat:
                    return None
                lengths.setdefault(patch.input, {})[patch.position] = span
            if not step.rows and not lengths:
                return None
        inputs: list[ir.Value | None] = []
        for position, item in enumerate(node.inputs):
            if item is None:
                inputs.append(None)
            elif position in lengths:
                operand = self._operand(item, lengths[position])
                if operand is None:
                    return None
                inputs.append(operand)
            else:
                inputs.append(self.get(item, tuple(sorted(needs.get(position, ()), key=lambda pair: pair[0]))))
        return inputs

    def _operand(self, operand: ir.Value, lengths: dict[int, Span]) -> ir.Value | None:
        """A shape operand with the lengths of spans in place of some entries."""
        contents = self._shapes.shape_value(operand)
        if contents is None:
            return None
        entries: list[int | ir.Value] = []
        for position, item in enumerate(contents.items):
            if position in lengths:
                entries.append(lengths[position].length)
            elif isinstance(item, int):
                entries.append(item)
            else:
                piece = cut(self._rewrite, operand, ((0, Span(position, position + 1, 1)),), name="shape_entry")
                entries.append(piece)
        return _bounds(self._rewrite, entries)


_LIGHT = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Where", "Cast", "Identity", "Not", "And", "Or", "Xor", "Neg", "Abs"),
        *("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Min", "Max", "Clip", "IsNaN"),
        *("ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd"),
        *("Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice", "Concat"),
    }
)


def _short(value: ir.Value) -> str:
    return (value.name or "mask").rsplit("/", 1)[-1].replace(".", "_")
