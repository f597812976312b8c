"""Pairing of what no output depends on, once all that outputs depend on is paired.

Dead code has no names to start from. Its *ends*, cells that nothing reads, are told apart by the structure above them,
down to what is paired already; those that stand alone go first, since each pair tells more of the others apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.comparison.cells import ABSENT, Formal, Given, Made
from graphsurgery.comparison.numbering import Interner

if TYPE_CHECKING:
    from collections.abc import Hashable

    from graphsurgery.comparison.cells import View
    from graphsurgery.comparison.matching import Matching
    from graphsurgery.comparison.numbering import Numbers

__all__ = ["match_dead_code"]

_ROUNDS = 8
"""How often pairs may tell others apart; what is left then is paired like any changed code."""


def match_dead_code(matching: Matching, numbers: tuple[Numbers, Numbers]) -> None:
    """Pair the free ends of both sides that have the same structure, and all that they depend on.

    Args:
        matching: in which every cell that an output depends on is paired.
        numbers: the expressions of both sides: of several ends alike, those of one expression belong together.
    """
    for _ in range(_ROUNDS):
        if -1 not in matching.of_a or -1 not in matching.of_b:
            return
        groups = list(_groups(matching).values())
        alone = [group for group in groups if len(group[0]) == len(group[1]) == 1]
        chosen = alone or [group for group in groups if group[0] and group[1]]
        if not chosen:
            return
        for ours, theirs in chosen:
            for one, other in _couples(ours, theirs, numbers):
                if matching.of_a[one] < 0 and matching.of_b[other] < 0:
                    matching.follow_back([(matching.a.cells[one].outputs[0], matching.b.cells[other].outputs[0])])


def _couples(ours: list[int], theirs: list[int], numbers: tuple[Numbers, Numbers]) -> list[tuple[int, int]]:
    """Each with one of the same expression where there is one, the others in order."""
    waiting: dict[int, list[int]] = {}
    for other in reversed(theirs):
        waiting.setdefault(numbers[1].of_cell[other], []).append(other)
    couples = []
    others = []
    for one in ours:
        same = waiting.get(numbers[0].of_cell[one])
        if same:
            couples.append((one, same.pop()))
        else:
            others.append(one)
    taken = {other for _, other in couples}
    return couples + list(zip(others, (other for other in theirs if other not in taken), strict=False))


def _groups(matching: Matching) -> dict[Hashable, tuple[list[int], list[int]]]:
    """The free ends of both sides by scope and structure."""
    intern = Interner()
    of_a, of_b = matching.of_a, matching.of_b
    ours = [cell if other >= 0 else -1 for cell, other in enumerate(of_a)]
    sides = (
        (matching.a, ours, {scope: scope for scope in matching.scopes}, {name: name for name in matching.inputs}),
        (
            matching.b,
            of_b,
            {theirs: scope for scope, theirs in matching.scopes.items()},
            {theirs: name for name, theirs in matching.inputs.items()},
        ),
    )
    groups: dict[Hashable, tuple[list[int], list[int]]] = {}
    for side, (view, landmarks, scopes, inputs) in enumerate(sides):
        structure = _structure(view, landmarks, scopes, inputs, intern)
        read = {value for cell in structure for value in view.cells[cell].reads()}
        for cell, number in structure.items():
            item = view.cells[cell]
            if item.scope in scopes and item.outputs and read.isdisjoint(item.outputs):
                groups.setdefault((scopes[item.scope], number), ([], []))[side].append(cell)
    return groups


def _structure(
    view: View, landmarks: list[int], scopes: dict[int, int], inputs: dict[str, str], intern: Interner
) -> dict[int, int]:
    """A number for each free cell: operators and edges above it, down to landmarks and leaves."""
    found: dict[int, int] = {}

    def leaf(value: int) -> Hashable:
        if value == ABSENT:
            return "absent"
        source = view.sources[value]
        if isinstance(source, Made):
            if landmarks[source.cell] >= 0:
                return ("pair", landmarks[source.cell], source.index)
            return (found[source.cell], source.index)
        if isinstance(source, Given):
            return ("input", inputs.get(source.name))
        if isinstance(source, Formal):
            depth, label = view.scopes[source.scope].depth, view.scopes[source.scope].label
            return ("formal", scopes.get(source.scope, -1), depth, label, source.position)
        return type(source).__name__

    for number in view.order:
        if landmarks[number] >= 0:
            continue
        cell = view.cells[number]
        view.visits += 1 + len(cell.inputs)
        bodies = tuple((body.label, tuple(leaf(value) for value in body.outputs)) for body in cell.bodies)
        reads = tuple(leaf(value) for value in cell.inputs)
        found[number] = intern((cell.op, len(cell.outputs), reads, bodies))
    return found
