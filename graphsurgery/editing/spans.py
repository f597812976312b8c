"""Ranges on an axis, fixed or known at run time only, and how an axis is divided into blocks.

A bound is an ``int`` where it is known, else an int64 value ``[1]``. What is computed at run time is computed once a
graph, at its start, from the sizes of the inputs of the model or of the function.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.analysis._expr import Expr, Symbol

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes, ShapeView
    from graphsurgery.rewrite import Rewrite

__all__ = ["TO_END", "Bound", "Sizes", "Span", "as_value", "blocks_of", "input_sizes", "least", "legal_blocks"]

Bound: TypeAlias = "int | ir.Value"

_INT64 = ir.DataType.INT64
TO_END = 2**63 - 1
"""An end that is never reached."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Positions ``start`` (inclusive) to ``end`` (exclusive) of an axis; ``length`` is their number."""

    start: Bound
    end: Bound
    length: Bound

    @property
    def everything(self) -> bool:
        """Whether nothing is left out: cutting by it changes nothing, and is not written."""
        return self.start == 0 and self.end == TO_END


def input_sizes(model: ir.Model, shapes: Shapes) -> frozenset[str]:
    """Names of sizes that are an axis of a graph input by themselves, which :class:`Sizes` can compute from."""
    atoms = (size.atom for value in model.graph.inputs for size in shapes.shape(value) or () if isinstance(size, Expr))
    return frozenset(atom.name for atom in atoms if isinstance(atom, Symbol))


def legal_blocks(size: int, count: int) -> int:
    """The number of equal blocks that really hold something: ``ceil(size / ceil(size / count))``."""
    if size <= 0:
        return 1
    width = -(-size // max(1, min(count, size)))
    return -(-size // width)


class Sizes:
    """Sizes as bounds: numbers, or values computed once from the shapes of the inputs of the model or function.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the body before the edit.
    """

    def __init__(self, rewrite: Rewrite, shapes: ShapeView) -> None:
        self._rewrite = rewrite
        self._shapes = shapes
        self._known: dict[Dim, ir.Value] = {}
        self._places: dict[str, tuple[ir.Value, int]] = {}
        for value in rewrite.inputs:
            for axis, size in enumerate(shapes.shape(value) or ()):
                atom = size.atom if isinstance(size, Expr) else None
                if isinstance(atom, Symbol):
                    self._places.setdefault(atom.name, (value, axis))

    def bound(self, size: Dim, seen_on: tuple[ir.Value, int]) -> Bound:
        """``size`` as a bound.

        Args:
            size: a number or an expression.
            seen_on: a value and an axis of it that has this size: asked at run time where the size is no sum and
                product of input sizes.
        """
        if isinstance(size, int):
            return size
        if size not in self._known and not self._computable(size):
            # Not shared: it must not be asked for before its value exists.
            return self._ask(*seen_on)
        return self.known(size)

    def known(self, size: Expr) -> ir.Value:
        """``size``, which is shared, as a value that is made at the start of the graph."""
        if size not in self._known:
            with self._rewrite.prologue():
                self._known[size] = self._compute(size)
        return self._known[size]

    def is_shared(self, size: Dim) -> bool:
        """Whether ``size`` is known at the start of the graph."""
        return isinstance(size, int) or self._computable(size)

    def _computable(self, size: Expr) -> bool:
        return all(
            isinstance(atom, Symbol) and atom.name in self._places for monomial, _ in size.terms for atom in monomial
        )

    def _compute(self, size: Expr) -> ir.Value:
        emit = self._rewrite.emit
        total: ir.Value | None = None
        for monomial, coefficient in size.terms:
            term: ir.Value | None = None
            for atom in monomial:
                assert isinstance(atom, Symbol)
                factor = self._symbol(atom)
                term = factor if term is None else emit("Mul", [term, factor], name="size", dtype=_INT64, shape=[1])
            number = self._rewrite.constant([coefficient], "number")
            if term is None:
                term = number
            elif coefficient != 1:
                term = emit("Mul", [term, number], name="size", dtype=_INT64, shape=[1])
            total = term if total is None else emit("Add", [total, term], name="size", dtype=_INT64, shape=[1])
        assert total is not None
        return total

    def _symbol(self, atom: Symbol) -> ir.Value:
        size = Expr((((atom,), 1),))
        if size not in self._known:
            self._known[size] = self._ask(*self._places[atom.name])
        return self._known[size]

    def _ask(self, value: ir.Value, axis: int) -> ir.Value:
        emit, constant = self._rewrite.emit, self._rewrite.constant
        sizes = emit("Shape", [value], name="shape", dtype=_INT64)
        return emit("Gather", [sizes, constant([axis], "axis")], {"axis": 0}, name="size", dtype=_INT64, shape=[1])


def blocks_of(rewrite: Rewrite, span: Span, count: int) -> list[Span]:
    """Divide ``span`` into ``count`` blocks of equal length but the last; at run time later ones may be empty.

    Known spans give fewer blocks where equal ones would leave some empty.
    """
    if count == 1:
        return [span]
    if isinstance(span.start, int) and isinstance(span.end, int):
        size = span.end - span.start
        count = legal_blocks(size, count)
        step = -(-size // count)
        edges = [min(span.start + step * number, span.end) for number in range(count + 1)]
        return [Span(first, last, last - first) for first, last in itertools.pairwise(edges)]
    constant = rewrite.constant
    length = as_value(rewrite, span.length)
    padded = _emit(rewrite, "Add", length, constant([count - 1], "round_up"), "padded")
    width = _emit(rewrite, "Div", padded, constant([count], "blocks"), "width")
    start, end = as_value(rewrite, span.start), as_value(rewrite, span.end)
    bounds = [start]
    for place in range(1, count):
        offset = width if place == 1 else _emit(rewrite, "Mul", width, constant([place], "block"), "offset")
        edge = offset if span.start == 0 else _emit(rewrite, "Add", start, offset, "edge")
        bounds.append(least(rewrite, edge, end))
    bounds.append(end)
    spans = []
    for lower, upper in itertools.pairwise(bounds):
        spans.append(Span(lower, upper, _emit(rewrite, "Sub", upper, lower, "length")))
    if span.start == 0:
        spans[0] = Span(0, spans[0].end, spans[0].end)
    return spans


def as_value(rewrite: Rewrite, bound: Bound) -> ir.Value:
    """A bound as an int64 value ``[1]``."""
    return rewrite.constant([bound], "bound") if isinstance(bound, int) else bound


def _emit(rewrite: Rewrite, op_type: str, left: ir.Value, right: ir.Value, name: str) -> ir.Value:
    return rewrite.emit(op_type, [left, right], name=name, dtype=_INT64, shape=[1])


def least(rewrite: Rewrite, left: ir.Value, right: ir.Value) -> ir.Value:
    """The smaller of two int64 values ``[1]``, in the form of the model's opset."""
    if rewrite.opset >= 12:
        return _emit(rewrite, "Min", left, right, "edge")
    # Before opset 12 Min takes floats only.
    less = rewrite.emit("Less", [left, right], name="less", dtype=ir.DataType.BOOL, shape=[1])
    return rewrite.emit("Where", [less, left, right], name="edge", dtype=_INT64, shape=[1])
