"""What lies around a cell, as a number: operators and edges, without attributes and initializers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.comparison.cells import ABSENT, Made
from graphsurgery.comparison.numbering import Interner

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from graphsurgery.comparison.cells import View
    from graphsurgery.comparison.matching import Matching

__all__ = ["neighbourhoods"]


def neighbourhoods(
    matching: Matching, members: tuple[list[int], list[int]], radius: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Numbers for what lies within ``radius`` edges, shared by both sides.

    Args:
        matching: what is paired already: landmarks, which both sides know.
        members: the cells of A and of B to look at.
        radius: in edges.

    Returns:
        For each side the number of each of its cells.
    """
    intern = Interner()
    of_a, of_b = matching.of_a, matching.of_b
    # Both sides know a landmark by its number in A.
    ours = _Near(matching.a, intern, lambda cell: cell if of_a[cell] >= 0 else -1)
    theirs = _Near(matching.b, intern, of_b.__getitem__)
    return ours.grow(members[0], radius), theirs.grow(members[1], radius)


class _Near:
    """What one side knows of its cells; ``landmark`` gives the number of a paired cell, else -1."""

    def __init__(self, view: View, intern: Interner, landmark: Callable[[int], int]) -> None:
        self._view = view
        self._intern = intern
        self._landmark = landmark
        self._known: dict[int, int] = {}

    def grow(self, cells: list[int], radius: int) -> dict[int, int]:
        self._known = {cell: self._of(cell) for cell in cells}
        for _ in range(radius):
            self._known.update({cell: self._intern(self._around(cell)) for cell in cells})
        return self._known

    def _of(self, cell: int) -> int:
        known = self._known.get(cell)
        if known is not None:
            return known
        landmark = self._landmark(cell)
        return self._intern(self._view.cells[cell].op if landmark < 0 else ("pair", landmark))

    def _around(self, number: int) -> Hashable:
        view, cell = self._view, self._view.cells[number]
        reads: list[Hashable] = []
        for value in cell.inputs:
            source = view.sources[value] if value != ABSENT else None
            if isinstance(source, Made):
                reads.append((source.index, self._of(source.cell)))
            else:
                reads.append(type(source).__name__)
        readers = []
        for index, value in enumerate(cell.outputs):
            view.visits += len(view.readers[value])
            readers += [(index, slot, self._of(reader)) for reader, slot in view.readers[value]]
        view.visits += 1 + len(cell.inputs)
        return (cell.op, tuple(reads), tuple(sorted(readers)))
