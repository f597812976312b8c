"""Numbers of expressions: equal in A and B exactly where two values are the same expression of the same inputs.

A number stands for the operator and its version, the attributes, and the numbers of what is read, down to graph inputs
and initializers. It is interned rather than hashed, so that unequal expressions never share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.comparison.cells import ABSENT, Dangling, Formal, Given, Stored

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from graphsurgery.comparison.cells import Cell, View
    from graphsurgery.comparison.references import Keys

__all__ = ["Interner", "Numbers", "number_cells"]


class Interner:
    """Small integers for keys, shared by both sides."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def __call__(self, key: Hashable) -> int:
        """The number of ``key``."""
        return self._known.setdefault(key, len(self._known))


class Numbers:
    """The expression number of every cell and of every value of one side.

    Attributes:
        of_cell: by number of the cell.
        of_value: by number of the value.
    """

    def __init__(self, of_cell: list[int], of_value: list[int]) -> None:
        self.of_cell = of_cell
        self.of_value = of_value


def number_cells(view: View, keys: Keys, intern: Interner, inputs: Mapping[str, str]) -> Numbers:
    """Number the cells and values of ``view``.

    Args:
        view: the model.
        keys: of its tensors and attributes.
        intern: shared with the other side.
        inputs: for each graph input what both sides call it.
    """
    of_cell = [-1] * len(view.cells)
    of_value = [-1] * len(view.sources)
    for value, source in enumerate(view.sources):
        if isinstance(source, Given):
            default = keys.tensor(source.value.const_value)
            of_value[value] = intern(("input", inputs.get(source.name, source.name), default))
        elif isinstance(source, Stored):
            of_value[value] = intern(("stored", keys.tensor(source.value.const_value)))
        elif isinstance(source, Formal):
            scope = view.scopes[source.scope]
            of_value[value] = intern(("formal", scope.depth, scope.label, source.position))
        elif isinstance(source, Dangling):
            of_value[value] = intern(("dangling", source.name))
    absent = intern("absent")
    for number in view.order:
        cell = view.cells[number]
        view.visits += 1 + len(cell.inputs)
        reads = tuple(absent if value == ABSENT else of_value[value] for value in cell.inputs)
        bodies = tuple((body.label, tuple(of_value[value] for value in body.outputs)) for body in cell.bodies)
        of_cell[number] = intern((cell.op, cell.version, _attributes(cell, keys), reads, bodies, len(cell.outputs)))
        for index, value in enumerate(cell.outputs):
            of_value[value] = intern((of_cell[number], index))
    return Numbers(of_cell, of_value)


def _attributes(cell: Cell, keys: Keys) -> Hashable:
    return tuple((name, keys.attribute(attribute)) for name, attribute in cell.attributes.items())
