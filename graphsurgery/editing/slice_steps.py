"""One step of slicing: what a copy of a node reads to compute a slice, and which values are worth the copy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.analysis.slices import Blocked, RowAxis, lift, runs_along
from graphsurgery.editing.spans import Span, as_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.rewrite import Rewrite

__all__ = ["Cuts", "SliceNeeds", "Wideness", "cut", "shape_operand", "short_name", "slice_needs"]

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


class Wideness:
    """Tells values with rows and columns.

    Args:
        view: shapes.
        length: S, the number of rows.
        total: T, the number of columns.
    """

    def __init__(self, view: ShapeView, length: Dim, total: Dim) -> None:
        self._view = view
        self._length = length
        self._total = total
        self._known: dict[ir.Value, bool] = {}

    def __call__(self, value: ir.Value) -> bool:
        """Whether ``value`` has rows and columns, or is computed from something that has by what can be replayed."""
        if value not in self._known:
            self._known[value] = False
            self._known[value] = self._find(value, 0)
        return self._known[value]

    def _find(self, value: ir.Value, depth: int) -> bool:
        shape = self._view.shape(value)
        if shape is not None and self._has_both(shape):
            return True
        node = value.producer()
        if node is None or depth > _MAX_DEPTH or node.op_type not in _LIGHT or node.domain:
            return False
        return any(item is not None and self(item) for item in node.inputs)

    def _has_both(self, shape: tuple[Dim, ...]) -> bool:
        rows = [axis for axis, size in enumerate(shape) if runs_along(size, self._length)]
        columns = [axis for axis, size in enumerate(shape) if runs_along(size, self._total)]
        return any(row != column for row in rows for column in columns) and self._length != 1


@dataclasses.dataclass(frozen=True)
class SliceNeeds:
    """What a copy of a node reads to compute a slice of its output.

    Attributes:
        cuts: for each input that is cut, the spans of its axes.
        lengths: for each input that is a shape, the spans whose lengths stand at some of its positions.
    """

    cuts: dict[int, list[tuple[int, Span]]]
    lengths: dict[int, dict[int, Span]]

    def cuts_of(self, position: int) -> Cuts:
        """The cuts of one input, in the order of its axes."""
        return tuple(sorted(self.cuts.get(position, ()), key=lambda pair: pair[0]))


def slice_needs(node: ir.Node, output: int, cuts: Cuts, view: ShapeView, model: ir.Model) -> SliceNeeds | None:
    """What a copy of ``node`` reads to compute a slice of its one output; None where it cannot be replayed."""
    if len(node.outputs) != 1:
        return None
    found = SliceNeeds({}, {})
    for axis, span in cuts:
        step = lift(node, output, RowAxis(axis), view, model)
        if isinstance(step, Blocked) or step.contracts:
            return None
        for position, need in step.rows.items():
            if need.flat:
                return None
            found.cuts.setdefault(position, []).append((need.axis, span))
        for patch in step.patches:
            if patch.flat:
                return None
            found.lengths.setdefault(patch.input, {})[patch.position] = span
        if not step.rows and not found.lengths:
            return None
    return found


def shape_operand(
    rewrite: Rewrite, contents: Sequence[Dim | None], operand: ir.Value, lengths: dict[int, Span]
) -> ir.Value:
    """The shape operand ``operand``, with ``contents``, with the lengths of spans in place of some entries."""
    entries: list[int | ir.Value] = []
    for position, item in enumerate(contents):
        if position in lengths:
            entries.append(lengths[position].length)
        elif isinstance(item, int):
            entries.append(item)
        else:
            piece = cut(rewrite, operand, ((0, Span(position, position + 1, 1)),), name="shape_entry")
            entries.append(piece)
    return _bounds(rewrite, entries)


_LIGHT = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Where", "Cast", "Identity", "Not", "And", "Or", "Xor", "Neg", "Abs"),
        *("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Min", "Max", "Clip", "IsNaN"),
        *("ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd"),
        *("Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice", "Concat"),
    }
)


def short_name(value: ir.Value) -> str:
    """The last part of the name of ``value``, for the names of its slices."""
    return (value.name or "mask").rsplit("/", 1)[-1].replace(".", "_")
