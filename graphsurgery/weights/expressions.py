"""Weight expressions: what a new weight is made of, and their simplest form."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Expression",
    "Part",
    "SourceName",
    "Stack",
    "Transpose",
    "View",
    "dtype_of",
    "shape_of",
    "simplify",
    "sources_of",
]


@dataclasses.dataclass(frozen=True)
class SourceName:
    """A source that is known by name only, as in a record that was read from a file.

    Attributes:
        name: the initializer of the model that surgery began with.
        shape: its sizes.
        dtype: its element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: ir.DataType


@dataclasses.dataclass(frozen=True)
class View:
    """The elements ``start : start + prod(shape)`` of ``source``, in row-major order, read as ``shape``."""

    source: Part
    start: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


@dataclasses.dataclass(frozen=True)
class Stack:
    """``parts``, n of equal shape, along a new first axis: ``[n, *shape]``."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))


@dataclasses.dataclass(frozen=True)
class Transpose:
    """``part`` with its axes in the order ``perm``, as the operator has it."""

    part: Part
    perm: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "perm", tuple(self.perm))


Expression: TypeAlias = View | Stack | Transpose
Part: TypeAlias = "ir.Value | SourceName | View | Stack | Transpose"


def shape_of(part: Part) -> tuple[int, ...]:
    """The shape of what ``part`` gives.

    Raises:
        InternalError: a source has no constant value, or a stack no parts.
    """
    if isinstance(part, View | SourceName):
        return part.shape
    if isinstance(part, Stack):
        if not part.parts:
            raise InternalError("a stack of weights has no parts.")
        return (len(part.parts), *shape_of(part.parts[0]))
    if isinstance(part, Transpose):
        inner = shape_of(part.part)
        return tuple(inner[axis] for axis in part.perm)
    held = part.const_value
    shape = held.shape if held is not None else part.shape
    if shape is None:
        raise InternalError(f"{part.name!r} has no constant value, so that no weight can be made of it.")
    # A source that has become an input since keeps its shape.
    return shape.dims  # type: ignore[return-value]


def dtype_of(part: Part) -> ir.DataType:
    """The element type of what ``part`` gives: that of its (first) source."""
    if isinstance(part, View):
        return dtype_of(part.source)
    if isinstance(part, Stack):
        return dtype_of(part.parts[0])
    if isinstance(part, Transpose):
        return dtype_of(part.part)
    held = part.const_value if isinstance(part, ir.Value) else None
    dtype = part.dtype if held is None else held.dtype
    if dtype is None:
        raise InternalError(f"{part.name!r} has no constant value, so that no weight can be made of it.")
    return dtype


def sources_of(part: Part) -> tuple[ir.Value | SourceName, ...]:
    """The sources of ``part``, each once, in order of first use."""
    found: dict[ir.Value | SourceName, None] = {}
    pending: list[Part] = [part]
    while pending:
        item = pending.pop()
        if isinstance(item, View):
            pending.append(item.source)
        elif isinstance(item, Stack):
            pending += reversed(item.parts)
        elif isinstance(item, Transpose):
            pending.append(item.part)
        else:
            found[item] = None
    return tuple(found)


def tensor_of(value: ir.Value | SourceName) -> ir.TensorProtocol:
    """The tensor of a source."""
    tensor = value.const_value if isinstance(value, ir.Value) else None
    if tensor is None:
        raise InternalError(f"{value.name!r} has no constant value, so that no weight can be made of it.")
    return tensor


def simplify(part: Part) -> Part:
    """The simplest expression of the same value: views of views are one, stacks of neighbours are views.

    A source that is itself made by an expression, and not yet written, is replaced by that expression.
    """
    if isinstance(part, View):
        return _view(simplify(part.source), part.start, part.shape)
    if isinstance(part, Stack):
        return _stack(tuple(simplify(item) for item in part.parts))
    if isinstance(part, Transpose):
        return _transpose(simplify(part.part), part.perm)
    return getattr(part.const_value, "expression", part) if isinstance(part, ir.Value) else part


def _view(source: Part, start: int, shape: tuple[int, ...]) -> Part:
    count = math.prod(shape)
    inner = shape_of(source)
    if start == 0 and shape == inner:
        return source
    if isinstance(source, View):
        return _view(source.source, source.start + start, shape)
    if isinstance(source, Stack) and count:
        return _view_of_stack(source, start, shape)
    if isinstance(source, Transpose) and count:
        return _view_of_transpose(source, start, shape)
    return View(source, start, shape)


def _view_of_stack(source: Stack, start: int, shape: tuple[int, ...]) -> Part:
    each = math.prod(shape_of(source)[1:])
    first, last = start // each, (start + math.prod(shape) - 1) // each
    if first == last:
        return _view(source.parts[first], start - first * each, shape)
    if start % each == 0 and math.prod(shape) == (last - first + 1) * each:
        parts = source.parts[first : last + 1]
        if shape[0] == len(parts):
            return _stack(tuple(_view(item, 0, shape[1:]) for item in parts))
    return View(source, start, shape)


def _view_of_transpose(source: Transpose, start: int, shape: tuple[int, ...]) -> Part:
    """A view of one entry of axes that the transposition leaves in front is the transposition of a view."""
    inner = shape_of(source.part)
    kept = next((axis for axis, old in enumerate(source.perm) if axis != old), len(inner))
    for front in range(1, kept + 1):
        each = math.prod(inner[front:])
        if math.prod(shape) == each and start % each == 0:
            part = _view(source.part, start, inner[front:])
            return _view(_transpose(part, tuple(axis - front for axis in source.perm[front:])), 0, shape)
    return View(source, start, shape)


def _stack(parts: tuple[Part, ...]) -> Part:
    if not parts:
        return Stack(parts)
    shape = shape_of(parts[0])
    if len(parts) == 1:
        return _view(parts[0], 0, (1, *shape))
    count = math.prod(shape)
    first, start = _place(parts[0])
    if first is not None and count:
        neighbours = all(_place(item) == (first, start + number * count) for number, item in enumerate(parts))
        if neighbours and all(shape_of(item) == shape for item in parts):
            return _view(first, start, (len(parts), *shape))
    return Stack(parts)


def _place(part: Part) -> tuple[Part | None, int]:
    """The source that ``part`` is a view of, and where it begins; a source that is taken whole has no neighbours."""
    return (part.source, part.start) if isinstance(part, View) else (None, 0)


def _transpose(part: Part, perm: Sequence[int]) -> Part:
    if isinstance(part, Transpose):
        return _transpose(part.part, tuple(part.perm[axis] for axis in perm))
    inner = shape_of(part)
    # Axes of size 1 may go anywhere without a byte being moved.
    moving = [axis for axis in perm if inner[axis] != 1]
    if moving == sorted(moving):
        return _view(part, 0, tuple(inner[axis] for axis in perm))
    if isinstance(part, Stack) and perm[0] == 0:
        return _stack(tuple(_transpose(item, tuple(axis - 1 for axis in perm[1:])) for item in part.parts))
    return Transpose(part, tuple(perm))
