"""The vocabulary of row liveness, shared by the rules and by the walk."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from graphsurgery.analysis._dim_ops import is_nonnegative
from graphsurgery.analysis._expr import Call, Expr, product

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis._facts import ShapeValue
    from graphsurgery.analysis.dims import Dim

__all__ = ["Blocked", "Context", "Lift", "Patch", "RowAxis", "View", "is_cut_to", "runs_along", "same_size"]

# Two or three broadcasts of two sizes each: what inputs with a name of their own for every size lead to.
_MAX_ALTERNATIVES = 16


@dataclasses.dataclass(frozen=True)
class RowAxis:
    """The axis of a value that carries the rows.

    Attributes:
        axis: counted from the front.
        flat: the rows of all batches lie behind one another on it (size B*S).
    """

    axis: int
    flat: bool = False


@dataclasses.dataclass(frozen=True)
class Patch:
    """Entry ``position`` of the shape operand at ``input`` holds the number of rows (``flat``: of all batches)."""

    input: int
    position: int
    flat: bool


@dataclasses.dataclass(frozen=True)
class Lift:
    """What a node needs to give only chosen rows.

    Attributes:
        rows: inputs that may be reduced, and where they carry the rows; every other input is needed whole.
        patches: shape operands that must change.
        contracts: the node multiplies rows with a matrix: what comes out of it are other features.
    """

    rows: dict[int, RowAxis]
    patches: tuple[Patch, ...] = ()
    contracts: bool = False


@dataclasses.dataclass(frozen=True)
class Blocked:
    """The node mixes rows, or is not known; ``reason`` is a clause that names it."""

    reason: str


class View(Protocol):
    """Shapes of the values of one scope."""

    def shape(self, value: ir.Value) -> tuple[Dim, ...] | None:
        """Sizes of ``value``; None where not even the rank is known."""

    def shape_value(self, value: ir.Value) -> ShapeValue | None:
        """Contents of a small integer tensor, where they are known."""

    def in_call(self, node: ir.Node) -> View:
        """The values of a function's body, for one call."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What a rule sees around a node.

    Attributes:
        view: shapes of the values of the scope.
        opset: version of the default domain there.
    """

    view: View
    opset: int

    def shape(self, value: ir.Value) -> tuple[Dim, ...] | None:
        """See :class:`View`."""
        return self.view.shape(value)

    def shape_value(self, value: ir.Value) -> ShapeValue | None:
        """See :class:`View`."""
        return self.view.shape_value(value)


def runs_along(size: Dim, length: Dim) -> bool:
    """Whether an axis of ``size`` that is broadcast against one of ``length`` carries its positions.

    It does where both are the same; and where it cannot be shorter (``P + S`` against ``S``), for then it is as long
    in every run in which the broadcast is legal. What is cut off from a table, such as the mask of all positions, is as
    long as the table allows: ``min(T, 256)`` against ``T``, ``min(T, 256) - min(P, 256)`` against ``T - P``.
    """
    if size == 1:
        return False
    if is_cut_to(size, length):
        return True
    return not isinstance(size, int) and is_nonnegative(size - length)


def is_cut_to(size: Dim, length: Dim) -> bool:
    """Whether ``size`` is ``length``, or what a table of a fixed length leaves of it: ``min(S, 256)`` against ``S``."""
    return same_size(size, length) or (not isinstance(size, int) and _without_tables(size) == length)


def _without_tables(size: Expr) -> Dim:
    """``size`` where no table of a fixed length is at its end."""
    found: Dim = size
    for monomial, _ in size.terms:
        for atom in monomial:
            if isinstance(atom, Call) and atom.op == "min" and len(atom.args) == 2 and not isinstance(found, int):
                sizes = [item for item in atom.args if not isinstance(item, int)]
                found = _put(found, atom, sizes[0]) if len(sizes) == 1 and 1 not in atom.args else found
    return found


def same_size(one: Dim, other: Dim) -> bool:
    """Whether two sizes are the same in every run that the model allows.

    Where broadcasting of two sizes that look different could not be settled (``broadcast(T, S)``), the result is the
    same as each of them in any run in which that broadcast is legal and neither is 1.
    """
    return one == other or bool(_alternatives(one) & _alternatives(other))


def _alternatives(size: Dim) -> set[Dim]:
    """``size`` with each unsettled broadcast in it settled one way or the other."""
    settled: set[Dim] = set()
    pending = [size]
    while pending and len(settled) + len(pending) <= _MAX_ALTERNATIVES:
        item = pending.pop()
        atom = _unsettled(item)
        if atom is None or isinstance(item, int):
            settled.add(item)
        else:
            pending += [_put(item, atom, argument) for argument in atom.args]
    return settled


def _unsettled(size: Dim) -> Call | None:
    if isinstance(size, int):
        return None
    atoms = (atom for monomial, _ in size.terms for atom in monomial)
    return next((atom for atom in atoms if isinstance(atom, Call) and atom.op == "broadcast"), None)


def _put(size: Expr, atom: Call, replacement: Dim) -> Dim:
    total: Dim = 0
    for monomial, coefficient in size.terms:
        factors = [replacement if item == atom else Expr((((item,), 1),)) for item in monomial]
        total = total + coefficient * product(factors)
    return total
