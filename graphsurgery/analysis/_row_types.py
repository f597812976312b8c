"""The vocabulary of row liveness, shared by the rules and by the walk."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from graphsurgery.analysis._expr import Call

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis._facts import ShapeValue
    from graphsurgery.analysis.dims import Dim

__all__ = ["Blocked", "Lift", "Patch", "RowAxis", "View", "same_size"]


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


def same_size(one: Dim, other: Dim) -> bool:
    """Whether two sizes are the same in every run that the model allows.

    Where broadcasting of two sizes that look different could not be settled (``broadcast(T, S)``), the result is the
    same as each of them in any run in which that broadcast is legal and neither is 1.
    """
    return one == other or bool(_alternatives(one) & _alternatives(other))


def _alternatives(size: Dim) -> set[Dim]:
    atom = None if isinstance(size, int) else size.atom
    if isinstance(atom, Call) and atom.op == "broadcast":
        return {item for argument in atom.args for item in _alternatives(argument)}
    return {size}
