"""Solving for symbolic sizes: from what is said of sizes and of their sums to a number for each name.

An :class:`Equation` says that two sizes are equal and who says so. :class:`DimSolver` takes them in any order, finds the
names that follow, and explains a contradiction by the two who contradict each other.

Example::

    >>> from graphsurgery.analysis.dims import parse_dim
    >>> past, seq = parse_dim("past"), parse_dim("seq")
    >>> solver = DimSolver([Equation(past + seq, 24, "total=24"), Equation(seq, 8, "seq=8")])
    >>> solver.numbers
    {'seq': 8, 'past': 16}
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import Expr, Symbol, Unknown, evaluate, free_names, substitute
from graphsurgery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphsurgery.analysis.dims import Dim

__all__ = ["DimSolver", "Equation"]


@dataclasses.dataclass(frozen=True)
class Equation:
    """Two sizes that are equal.

    Attributes:
        size: a size of the model.
        value: what it is equal to.
        said: who says so, as users wrote it (``seq=128``).
        place: where ``size`` stands, for sizes without a name (``axis 1 of input 'input_ids'``).
    """

    size: Dim
    value: Dim
    said: str
    place: str = ""


class DimSolver:
    """Numbers of names, as far as equations determine them.

    Attributes:
        numbers: the number of each name that is determined; sizes without a name are called ``?7``, as in ``Unknown``.
        pending: equations that leave more than one name open.
    """

    def __init__(self, equations: Iterable[Equation] = ()) -> None:
        """See :meth:`add`."""
        self.numbers: dict[str, int] = {}
        self.pending: list[Equation] = []
        self._said: dict[str, str] = {}
        self.add(equations)

    def add(self, equations: Iterable[Equation]) -> None:
        """Take ``equations`` too.

        Raises:
            UsageError: they contradict each other or those before: the sentence names the dim and both values.
        """
        self.pending += equations
        progress = True
        while progress:
            progress = False
            waiting, self.pending = self.pending, []
            for equation in waiting:
                if self._settle(equation):
                    progress = True
                else:
                    self.pending.append(equation)

    def said(self, name: str) -> str:
        """Who determined ``name``."""
        return self._said[name]

    def _settle(self, equation: Equation) -> bool:
        """Check ``equation`` or learn a name from it; False where it leaves more than one name open."""
        difference = substitute(equation.size, self.numbers) - substitute(equation.value, self.numbers)
        if isinstance(difference, int):
            if difference:
                raise UsageError(self._contradiction(equation))
            return True
        names = free_names(difference)
        if len(names) != 1:
            return False
        (name,) = names
        at_zero, at_one = evaluate(difference, {name: 0}), evaluate(difference, {name: 1})
        if at_zero is None or at_one is None or at_zero == at_one or not _is_linear(difference):
            return False
        number, rest = divmod(-at_zero, at_one - at_zero)
        if rest or number < 0:
            raise UsageError(self._no_size(equation, name))
        self.numbers[name] = number
        self._said[name] = equation.said
        return True

    def _contradiction(self, equation: Equation) -> str:
        ours, theirs = (evaluate(side, self.numbers) for side in (equation.size, equation.value))
        named = free_names(equation.size) and not any(name.startswith("?") for name in free_names(equation.size))
        what = f"dim {str(equation.size)!r}" if named else equation.place
        why = equation.said
        if not isinstance(equation.value, int):
            why += self._where(equation.value)
        return (
            f"{what[:1].upper()}{what[1:]} cannot be both {theirs} ({why}) and {ours} ({self._reason(equation.size)})."
        )

    def _no_size(self, equation: Equation, name: str) -> str:
        number = evaluate(equation.value, self.numbers)
        target = f"{equation.value}" if number is None else f"{number}"
        return (
            f"No size of dim {name!r} makes {equation.size} equal to {target} ({equation.said})"
            f"{self._where(equation.size, equation.value)}."
        )

    def _reason(self, size: Dim) -> str:
        if isinstance(size, int):
            return "its fixed size"
        if size.atom is not None:
            return "; ".join(self._said[name] for name in free_names(size))
        return self._where(size).removeprefix(", ")

    def _where(self, *sizes: Dim) -> str:
        """The numbers of the names in ``sizes`` that are known, and who said so."""
        names = sorted({name for size in sizes for name in free_names(size)})
        said = dict.fromkeys(self._said[name] for name in names if name in self._said)
        return f", with {' and '.join(said)}" if said else ""


def _is_linear(difference: Expr) -> bool:
    """Whether there is nothing but multiples of plain names: no products and no opaque functions."""
    return all(
        len(monomial) <= 1 and all(isinstance(atom, Symbol | Unknown) for atom in monomial)
        for monomial, _ in difference.terms
    )
