"""Parameters of experts: from the value that a product reads up to what is stored, and E copies made one.

Dequantisation, casts and transposes of a weight become steps; what cannot be followed is taken as it is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.constants import const_int, const_ints, constant_of
from graphsurgery.patterns.experts.sites import RowInput
from graphsurgery.patterns.experts.terms import Part, Stack, Step, Term, UnreadableError, attribute_key, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["ParameterReader", "unify"]

_ELEMENTWISE = frozenset({"Mul", "Add", "Sub", "Div"})


class ParameterReader:
    """Follows parameters up; each value once."""

    def __init__(self, shapes: ShapeView) -> None:
        self._shapes = shapes
        self._stacks: dict[tuple[ir.Value, int], Term] = {}
        self._parts: dict[ir.Value, Term] = {}

    # ---- all experts in one value ---------------------------------------------------------------------------------

    def stack(self, value: ir.Value, experts: int) -> Term:
        """The term of ``value``, whose axis 0 counts the experts."""
        key = (value, experts)
        if key not in self._stacks:
            self._stacks[key] = self._read_stack(value, experts)
        return self._stacks[key]

    def _read_stack(self, value: ir.Value, experts: int) -> Term:
        node = value.producer()
        shape = self.static_shape(value)
        if shape is None or not shape or shape[0] != experts:
            raise UnreadableError(f"parameter {value.name!r} has no axis 0 of {experts} experts")
        if node is not None and not node.domain:
            if node.op_type == "Identity" and node.inputs[0] is not None:
                return self.stack(node.inputs[0], experts)
            step = self._stacked_step(node, value, experts)
            if step is not None:
                return step
        return Stack((value,), True, shape[1:], experts)

    def _stacked_step(self, node: ir.Node, value: ir.Value, experts: int) -> Term:
        kind, source = node.op_type, node.inputs[0] if node.inputs else None
        if source is None:
            return None
        if kind == "Cast":
            return Step(node, (self.stack(source, experts),), per_row=False, value=value)
        if kind == "Transpose":
            order = node.attributes.get("perm")
            moved = order.as_ints() if order is not None else ()
            if not moved or moved[0] != 0:
                return None
            axes = tuple(place - 1 for place in moved[1:])
            return Step(node, (self.stack(source, experts),), per_row=False, axes=axes, value=value)
        if kind == "Unsqueeze":
            places = const_ints(node.inputs[1]) if len(node.inputs) > 1 else None
            # A row axis in front of a bias's features: the part broadcasts against rows without it just as well.
            return self.stack(source, experts) if places == (1,) else None
        if kind == "DequantizeLinear":
            return self._dequantised(node, value, experts)
        if kind in _ELEMENTWISE and len(node.inputs) == 2:
            rank = len(self.static_shape(value) or ())
            operands = [self._stacked_operand(item, rank, experts) for item in node.inputs if item is not None]
            if any(isinstance(item, Stack | Step) for item in operands) and all(item is not None for item in operands):
                return Step(node, tuple(operands), per_row=False, value=value)
        return None

    def _stacked_operand(self, value: ir.Value, rank: int, experts: int) -> Term:
        shape = self.static_shape(value)
        if shape is None:
            return None
        if len(shape) == rank and shape[0] == experts and experts > 1:
            return self.stack(value, experts)
        return value if len(shape) < rank else None

    def _dequantised(self, node: ir.Node, value: ir.Value, experts: int) -> Term:
        source, scale = node.inputs[0], node.inputs[1]
        shape, scale_shape = self.static_shape(source), self.static_shape(scale)
        if source is None or scale is None or shape is None or scale_shape is None:
            return None
        operands: list[Term] = [self.stack(source, experts)]
        axis = node.attributes.get("axis")
        place = 1 if axis is None else axis.as_int()
        place += len(shape) if place < 0 else 0
        for item in node.inputs[1:]:
            if item is None:
                operands.append(None)
            elif len(scale_shape) == len(shape) or (len(scale_shape) == 1 and place == 0):
                operands.append(self.stack(item, experts))
            else:
                operands.append(item)
        whole = len(scale_shape) == 0 or (len(scale_shape) == 1 and place == 0)
        if len(scale_shape) == len(shape) and place == 0:
            return None
        return Step(node, tuple(operands), per_row=False, axes=() if whole else (place - 1,), value=value)

    # ---- the parameter of one expert ------------------------------------------------------------------------------

    def part(self, value: ir.Value) -> Term:
        """The term of ``value``, a parameter in the copy of one expert (or one that all of them share)."""
        if value not in self._parts:
            self._parts[value] = self._read_part(value)
        return self._parts[value]

    def _read_part(self, value: ir.Value) -> Term:
        node = value.producer()
        if node is None or node.domain or not node.inputs or node.inputs[0] is None:
            return value
        source, kind = node.inputs[0], node.op_type
        if kind == "Identity":
            return self.part(source)
        cut = self._cut(value)
        if cut is not None:
            return cut
        if kind == "Cast":
            return Step(node, (self.part(source),), per_row=False, value=value)
        if kind == "Transpose":
            order = node.attributes.get("perm")
            rank = len(self.static_shape(value) or ())
            axes = tuple(order.as_ints()) if order is not None else tuple(range(rank))[::-1]
            return Step(node, (self.part(source),), per_row=False, axes=axes, value=value)
        if kind == "DequantizeLinear":
            shape, scale = self.static_shape(source), self.static_shape(node.inputs[1])
            if shape is None or scale is None:
                return value
            axis = node.attributes.get("axis")
            place = 1 if axis is None else axis.as_int()
            place += len(shape) if place < 0 else 0
            operands = tuple(None if item is None else self.part(item) for item in node.inputs)
            return Step(node, operands, per_row=False, axes=(place,) if scale else (), value=value)
        if kind in _ELEMENTWISE and all(item is not None for item in node.inputs):
            return Step(
                node, tuple(self.part(item) for item in node.inputs if item is not None), per_row=False, value=value
            )
        return value

    def _cut(self, value: ir.Value) -> Part | None:
        """``value`` as one expert's part of a parameter of all of them."""
        node, squeezed = value.producer(), False
        shape = self.static_shape(value)
        if node is None or node.domain or shape is None:
            return None
        if node.op_type in ("Squeeze", "Reshape"):
            inner = node.inputs[0]
            above = self.static_shape(inner)
            if inner is None or above != (1, *shape):
                return None
            value, squeezed, node = inner, True, inner.producer()
        if node is None or node.domain or node.inputs[0] is None:
            return None
        whole, place = node.inputs[0], _place(node, value)
        stacked = self.static_shape(whole)
        if place is None or stacked is None or len(stacked) != len(shape) + 1 or stacked[1:] != shape:
            return None
        dropped = node.op_type == "Gather" and self.static_shape(node.inputs[1]) == ()
        if dropped == squeezed:
            return None
        place += stacked[0] if place < 0 else 0
        return Part(self.stack(whole, stacked[0]), place)

    def static_shape(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """The shape of ``value`` where all its sizes are numbers."""
        shape = self._shapes.shape(value) if value is not None else None
        if shape is None or not all(isinstance(size, int) for size in shape):
            return None
        return tuple(size for size in shape if isinstance(size, int))


def _place(node: ir.Node, value: ir.Value) -> int | None:
    """Which element along axis 0 ``node`` takes to make ``value``."""
    axis = node.attributes.get("axis")
    if node.op_type in ("Split", "Gather") and axis is not None and axis.as_int() != 0:
        return None
    if node.op_type == "Split":
        return node.outputs.index(value)
    if node.op_type == "Gather":
        return const_int(node.inputs[1])
    if node.op_type == "Slice" and len(node.inputs) >= 4 and const_ints(node.inputs[3]) == (0,):
        start, end = const_int(node.inputs[1]), const_int(node.inputs[2])
        steps = const_ints(node.inputs[4]) if len(node.inputs) > 4 else (1,)
        if start is not None and end is not None and steps == (1,):
            return start
    return None


# ---- E copies made one --------------------------------------------------------------------------------------------


def unify(copies: Sequence[Term], shapes: ShapeView) -> Term:
    """The one term of which ``copies`` are the cases for experts 0, 1, ...

    Raises:
        UnreadableError: the copies do not all do the same.
    """
    return _Unifier(shapes).unify(tuple(copies))


class _Unifier:
    def __init__(self, shapes: ShapeView) -> None:
        self._shapes = shapes
        self._done: dict[tuple[int, ...], Term] = {}

    def unify(self, copies: tuple[Term, ...]) -> Term:
        key = tuple(id(item) for item in copies)
        if key not in self._done:
            self._done[key] = self._unified(copies)
        return self._done[key]

    def _unified(self, copies: tuple[Term, ...]) -> Term:
        first = copies[0]
        if all(item is first for item in copies):
            if isinstance(first, Part):
                raise UnreadableError("all experts use the part of one expert")
            if isinstance(first, Step) and not first.per_row and first.value is not None:
                return first.value
            return first
        if all(isinstance(item, Part) for item in copies):
            return self._parts([item for item in copies if isinstance(item, Part)])
        if all(isinstance(item, Step) for item in copies):
            return self._steps([item for item in copies if isinstance(item, Step)])
        if all(isinstance(item, ir.Value) for item in copies):
            return self._values([item for item in copies if isinstance(item, ir.Value)])
        raise UnreadableError(
            f"the experts do not all do the same: {_describe(first)} in one and "
            f"{_describe(next(item for item in copies if type(item) is not type(first)))} in another"
        )

    def _parts(self, copies: list[Part]) -> Term:
        whole = copies[0].whole
        if any(item.whole is not whole for item in copies):
            raise UnreadableError("the experts take their parts from different parameters")
        numbers = [item.number for item in copies]
        if numbers == list(range(len(copies))) and _experts(whole) == len(copies):
            return whole
        raise UnreadableError(f"expert numbers and parts of {_describe(whole)} do not agree")

    def _steps(self, copies: list[Step]) -> Term:
        first, key = copies[0], attribute_key(copies[0].node)
        for other in copies[1:]:
            same = (other.output, other.per_row, other.axes, len(other.operands)) == (
                first.output,
                first.per_row,
                first.axes,
                len(first.operands),
            )
            if not same or attribute_key(other.node) != key:
                reason = f"{label(first.node)} and {label(other.node)}"
                raise UnreadableError(f"the experts do not all do the same: {reason} differ")
        operands = tuple(
            self.unify(tuple(copy.operands[place] for copy in copies)) for place in range(len(first.operands))
        )
        return Step(first.node, operands, first.output, first.per_row, first.axes)

    def _values(self, copies: list[ir.Value]) -> Term:
        first = copies[0]
        constants = [self._contents(item) for item in copies]
        known = [item for item in constants if item is not None]
        if len(known) == len(copies) and all(
            item.dtype == known[0].dtype and np.array_equal(item, known[0], equal_nan=item.dtype.kind == "f")
            for item in known
        ):
            return first
        shape, dtype = self._shapes.shape(first), self._shapes.dtype(first)
        for other in copies[1:]:
            if shape is None or self._shapes.shape(other) != shape or self._shapes.dtype(other) != dtype:
                raise UnreadableError(f"parameters {first.name!r} and {other.name!r} have different shapes or types")
        assert shape is not None
        sizes = tuple(size for size in shape if isinstance(size, int))
        if len(sizes) != len(shape) or (known and known[0].dtype.kind == "i" and known[0].size < 3):
            raise UnreadableError(f"the experts do not all do the same: {first.name!r} and {copies[1].name!r} differ")
        return Stack(tuple(copies), False, sizes, len(copies))

    def _contents(self, value: ir.Value) -> np.ndarray | None:
        """What ``value`` holds: a constant, or integers that nodes compute from shapes (the bounds of a cut)."""
        stored = constant_of(value)
        contents = self._shapes.shape_value(value) if stored is None and value.producer() is not None else None
        if contents is None or not all(isinstance(item, int) for item in contents.items):
            return stored
        numbers = np.array([int(item) for item in contents.items if isinstance(item, int)], dtype=np.int64)
        return numbers.reshape(()) if self._shapes.rank(value) == 0 else numbers


def _experts(whole: Term) -> int:
    """E of a stacked parameter."""
    while isinstance(whole, Step):
        whole = next(item for item in whole.operands if isinstance(item, Stack | Step))
    assert isinstance(whole, Stack)
    return whole.count


def _describe(term: Term) -> str:
    if isinstance(term, Step):
        return label(term.node)
    if isinstance(term, Part):
        return f"a part of {_describe(term.whole)}"
    if isinstance(term, Stack):
        return repr(term.values[0].name)
    if isinstance(term, RowInput):
        return "the token as it is" if term is RowInput.TOKEN else "the route weight"
    return repr(term.name) if isinstance(term, ir.Value) else str(term)
