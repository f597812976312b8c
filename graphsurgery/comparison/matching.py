"""Which cell of B stands for which cell of A, and when two values stand for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.comparison.cells import ABSENT, Dangling, Formal, Given, Made, Stored

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from graphsurgery.comparison.cells import Cell, View

__all__ = ["Matching"]


class Matching:
    """Pairs of cells, and of the scopes that they hold.

    Attributes:
        a: one side.
        b: the other.
        inputs: name in B of each graph input of A that has a counterpart.
        of_a: for each cell of A its cell of B, or -1.
        of_b: for each cell of B its cell of A, or -1.
        scopes: for each scope of A its scope of B.
    """

    def __init__(self, a: View, b: View, inputs: Mapping[str, str]) -> None:
        self.a = a
        self.b = b
        self.inputs = inputs
        self.of_a = [-1] * len(a.cells)
        self.of_b = [-1] * len(b.cells)
        self.scopes = {0: 0}

    def may_pair(self, one: int, other: int) -> bool:
        """Whether the cells are free, in scopes that are paired, and of one operator."""
        ours, theirs = self.a.cells[one], self.b.cells[other]
        return (
            self.of_a[one] < 0
            and self.of_b[other] < 0
            and ours.op == theirs.op
            and self.scopes.get(ours.scope) == theirs.scope
        )

    def pair(self, one: int, other: int) -> None:
        """Pair two cells and their subgraphs of one label."""
        self.of_a[one], self.of_b[other] = other, one
        bodies = {body.label: body.scope for body in self.b.cells[other].bodies}
        for body in self.a.cells[one].bodies:
            if body.label in bodies:
                self.scopes[body.scope] = bodies[body.label]

    def same_value(self, one: int, other: int) -> bool:
        """Whether two values come from what stands for each other; two initializers always do."""
        if one == ABSENT or other == ABSENT:
            return one == other
        ours, theirs = self.a.sources[one], self.b.sources[other]
        if isinstance(ours, Made) and isinstance(theirs, Made):
            return self.of_a[ours.cell] == theirs.cell and ours.index == theirs.index
        return self._same_leaf(one, other)

    def _same_leaf(self, one: int, other: int) -> bool:
        ours, theirs = self.a.sources[one], self.b.sources[other]
        if isinstance(ours, Given) and isinstance(theirs, Given):
            return self.inputs.get(ours.name) == theirs.name
        if isinstance(ours, Formal) and isinstance(theirs, Formal):
            return self.scopes.get(ours.scope) == theirs.scope and ours.position == theirs.position
        if isinstance(ours, Dangling) and isinstance(theirs, Dangling):
            return ours.name == theirs.name
        return isinstance(ours, Stored) and isinstance(theirs, Stored)

    def follow_back(self, roots: Iterable[tuple[int, int]]) -> bool:
        """Pair all that the values ``roots`` depend on; False, with some of it paired, where the graphs differ."""
        stack = list(roots)
        while stack:
            one, other = stack.pop()
            self.a.visits += 1
            if one == ABSENT or other == ABSENT:
                if one != other:
                    return False
                continue
            ours, theirs = self.a.sources[one], self.b.sources[other]
            if not isinstance(ours, Made) or not isinstance(theirs, Made):
                if not self._same_leaf(one, other):
                    return False
                continue
            if ours.index != theirs.index:
                return False
            if self.of_a[ours.cell] == theirs.cell:
                continue
            cell, twin = self.a.cells[ours.cell], self.b.cells[theirs.cell]
            if not self.may_pair(ours.cell, theirs.cell) or _form(self.a, cell) != _form(self.b, twin):
                return False
            self.pair(ours.cell, theirs.cell)
            stack += zip(cell.inputs, twin.inputs, strict=True)
            for body, counterpart in zip(cell.bodies, twin.bodies, strict=True):
                stack += zip(body.outputs, counterpart.outputs, strict=True)
        return True


def _form(view: View, cell: Cell) -> Hashable:
    """What must be equal of two cells for their inputs and outputs to stand for each other by position."""
    bodies = tuple((body.label, view.scopes[body.scope].inputs, len(body.outputs)) for body in cell.bodies)
    return (cell.op, len(cell.inputs), len(cell.outputs), bodies)
