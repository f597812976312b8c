"""Finding which cell of B stands for which cell of A, by structure alone.

First the outputs are followed back in step on both sides. Outputs have names and inputs of nodes have positions, so that
this finds *the* one-to-one correspondence wherever there is one (but for attributes and initializers), and what is left
is code that no output depends on. Otherwise cells are paired from what is certain outwards:

1. the same expression, where it occurs once on each side, and the same weights, read by the same operator at the same
   places; what the named inputs and outputs lead to;
2. from each pair to the makers of its inputs, then to the readers of its outputs, nearest first;
3. equal expressions that occur several times, then equal neighbourhoods of shrinking radius, each followed by 2.

Every step is linear in cells and edges.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Literal

from graphsurgery.comparison.cells import ABSENT, Formal, Made, Stored
from graphsurgery.comparison.dead_code import match_dead_code
from graphsurgery.comparison.matching import Matching
from graphsurgery.comparison.neighbourhoods import neighbourhoods

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from graphsurgery.comparison.cells import View
    from graphsurgery.comparison.numbering import Numbers
    from graphsurgery.comparison.references import Keys

__all__ = ["match_views"]


@dataclasses.dataclass(frozen=True)
class _Round:
    """By what cells are paired that no pair leads to.

    Attributes:
        radius: edges within which the operators around must be the same; None for no matter what is around.
        expression: whether they must be the same expression.
        where: ``equally`` where as many are left on both sides, ``alone`` where one is, ``any`` for as many as there are.
    """

    radius: int | None
    expression: bool
    where: Literal["alone", "equally", "any"]


_ROUNDS = (
    _Round(2, expression=True, where="equally"),
    _Round(None, expression=True, where="equally"),
    _Round(4, expression=False, where="equally"),
    _Round(3, expression=False, where="equally"),
    _Round(2, expression=False, where="equally"),
    _Round(None, expression=True, where="any"),
    # So near, operators decide almost alone: only where nothing else can be meant.
    _Round(1, expression=False, where="alone"),
    _Round(0, expression=False, where="alone"),
)


def match_views(
    views: tuple[View, View],
    numbers: tuple[Numbers, Numbers],
    keys: tuple[Keys, Keys],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
) -> Matching:
    """Pair the cells of two models.

    Args:
        views: A and B.
        numbers: their expressions.
        keys: of their tensors.
        inputs: name in B of each input of A that has a counterpart.
        outputs: the same of the outputs.
    """
    a, b = views
    given = dict(b.outputs)
    roots = [(value, given[outputs[name]]) for name, value in a.outputs if name in outputs]
    matching = Matching(a, b, inputs)
    if matching.follow_back(roots):
        match_dead_code(matching, numbers)
    else:
        matching = Matching(a, b, inputs)
    if -1 in matching.of_a and -1 in matching.of_b:
        _Outwards(matching, numbers, keys).run(roots)
    return matching


class _Outwards:
    """Pairs cells from what is certain outwards, one pair of scopes after the other."""

    def __init__(self, matching: Matching, numbers: tuple[Numbers, Numbers], keys: tuple[Keys, Keys]) -> None:
        self._matching = matching
        self._views = (matching.a, matching.b)
        self._numbers = numbers
        self._keys = keys
        self._queue: collections.deque[tuple[int, int]] = collections.deque()
        # Values that stand for each other and whose readers are yet to be looked at.
        self._results: collections.deque[tuple[int, int]] = collections.deque()
        self._members = tuple(_by_scope(view) for view in self._views)
        self._formals = (_formals(matching.a), _formals(matching.b))
        # Subgraphs of new pairs wait until their own scope is done.
        self._waiting: collections.deque[tuple[int, int, list[tuple[int, int]]]] = collections.deque()

    def run(self, roots: list[tuple[int, int]]) -> None:
        matching = self._matching
        for one, other in enumerate(matching.of_a):
            if other >= 0:
                self._found(one, other)
        self._waiting.appendleft((0, 0, roots))
        while self._waiting:
            self._scope(*self._waiting.popleft())

    def _scope(self, one: int, other: int, roots: list[tuple[int, int]]) -> None:
        members = (self._members[0].get(one, []), self._members[1].get(other, []))
        self._pair_unique(members, self._expression)
        self._pair_unique(members, self._weights)
        for ours, theirs in roots:
            self._try(self._matching.a.maker(ours), self._matching.b.maker(theirs))
        self._results += self._given(one, other)
        self._spread()
        for kind in _ROUNDS:
            left = self._left(members)
            if not left[0] or not left[1]:
                return
            self._pair_in_turn(left, self._keys_for(kind, left), kind.where)

    def _keys_for(self, kind: _Round, left: tuple[list[int], list[int]]) -> Callable[[int, int], Hashable]:
        if kind.radius is None:
            return self._expression
        around = neighbourhoods(self._matching, left, kind.radius)
        if not kind.expression:
            return lambda side, cell: around[side][cell]
        return lambda side, cell: (around[side][cell], self._expression(side, cell))

    def _given(self, one: int, other: int) -> list[tuple[int, int]]:
        """The inputs of a pair of scopes."""
        if one or other:
            return list(zip(self._formals[0].get(one, []), self._formals[1].get(other, []), strict=False))
        a, b = self._views
        return [
            (value, b.inputs[twin]) for name, value in a.inputs.items() if (twin := self._matching.inputs.get(name))
        ]

    def _left(self, members: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
        of_a, of_b = self._matching.of_a, self._matching.of_b
        return [cell for cell in members[0] if of_a[cell] < 0], [cell for cell in members[1] if of_b[cell] < 0]

    def _found(self, one: int, other: int) -> None:
        self._queue.append((one, other))
        bodies = {body.label: body for body in self._matching.b.cells[other].bodies}
        for body in self._matching.a.cells[one].bodies:
            twin = bodies.get(body.label)
            if twin is not None:
                pairs = list(zip(body.outputs, twin.outputs, strict=False))
                self._waiting.append((body.scope, twin.scope, pairs))

    def _try(self, one: int | None, other: int | None) -> None:
        if one is not None and other is not None and self._matching.may_pair(one, other):
            self._matching.pair(one, other)
            self._found(one, other)

    # What is certain

    def _expression(self, side: int, cell: int) -> Hashable:
        return self._numbers[side].of_cell[cell]

    def _weights(self, side: int, cell: int) -> Hashable:
        """The operator and its initializers with their positions; None where it reads none."""
        view, keys = self._views[side], self._keys[side]
        found = []
        for slot, value in enumerate(view.cells[cell].inputs):
            source = view.sources[value] if value != ABSENT else None
            if isinstance(source, Stored):
                found.append((slot, keys.tensor(source.value.const_value)))
        return (view.cells[cell].op, *found) if found else None

    def _groups(
        self, members: tuple[list[int], list[int]], key_of: Callable[[int, int], Hashable]
    ) -> list[tuple[list[int], list[int]]]:
        groups: dict[Hashable, tuple[list[int], list[int]]] = {}
        for side, cells in enumerate(self._left(members)):
            self._views[side].visits += len(cells)
            for cell in cells:
                key = key_of(side, cell)
                if key is not None:
                    groups.setdefault(key, ([], []))[side].append(cell)
        return list(groups.values())

    def _pair_unique(self, members: tuple[list[int], list[int]], key_of: Callable[[int, int], Hashable]) -> None:
        for ours, theirs in self._groups(members, key_of):
            if len(ours) == len(theirs) == 1:
                self._try(ours[0], theirs[0])

    def _pair_in_turn(
        self,
        members: tuple[list[int], list[int]],
        key_of: Callable[[int, int], Hashable],
        where: Literal["alone", "equally", "any"],
    ) -> None:
        """Pair cells of one key in order, each with all that follows from it.

        Readers come before what they read, since the makers of inputs follow for certain, and readers do not.
        """
        for ours, theirs in reversed(self._groups(members, key_of)):
            if where != "any" and len(ours) != len(theirs):
                continue
            if where == "alone" and len(ours) > 1:
                continue
            free = collections.deque(theirs)
            for one in ours:
                while free and self._matching.of_b[free[0]] >= 0:
                    free.popleft()
                if not free:
                    break
                if self._matching.of_a[one] < 0:
                    self._try(one, free.popleft())
                    self._spread()

    # Outwards

    def _spread(self) -> None:
        """Follow all pairs: makers of inputs before readers of outputs, of which several may look alike."""
        a, b = self._views
        while self._queue or self._results:
            if not self._queue:
                self._try_readers(*self._results.popleft())
                continue
            one, other = self._queue.popleft()
            ours, theirs = a.cells[one], b.cells[other]
            a.visits += len(ours.inputs) + len(ours.outputs)
            for value, twin in zip(ours.inputs, theirs.inputs, strict=False):
                self._try_makers(value, twin)
            self._results += zip(ours.outputs, theirs.outputs, strict=False)

    def _try_makers(self, value: int, twin: int) -> None:
        a, b = self._views
        if value == ABSENT or twin == ABSENT:
            return
        ours, theirs = a.sources[value], b.sources[twin]
        if isinstance(ours, Made) and isinstance(theirs, Made) and ours.index == theirs.index:
            self._try(ours.cell, theirs.cell)

    def _try_readers(self, value: int, twin: int) -> None:
        """Pair the readers that are alone with their operator and position."""
        found: dict[Hashable, tuple[list[int], list[int]]] = {}
        matched = (self._matching.of_a, self._matching.of_b)
        for side, (view, number) in enumerate(zip(self._views, (value, twin), strict=True)):
            readers = view.readers[number]
            view.visits += len(readers)
            for cell, slot in readers:
                if matched[side][cell] < 0:
                    found.setdefault((view.cells[cell].op, slot), ([], []))[side].append(cell)
        for ours, theirs in found.values():
            if len(ours) == len(theirs) == 1 and not self._contradicted(ours[0], theirs[0]):
                self._try(ours[0], theirs[0])

    def _contradicted(self, one: int, other: int) -> bool:
        """Whether an input of one is made by a cell that stands for another than the maker of the other's input."""
        a, b = self._views
        of_a, of_b = self._matching.of_a, self._matching.of_b
        for value, twin in zip(a.cells[one].inputs, b.cells[other].inputs, strict=False):
            ours, theirs = a.maker(value), b.maker(twin)
            if ours is not None and of_a[ours] >= 0 and of_a[ours] != theirs:
                return True
            if theirs is not None and of_b[theirs] >= 0 and of_b[theirs] != ours:
                return True
        return False


def _by_scope(view: View) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for cell in view.order:
        members.setdefault(view.cells[cell].scope, []).append(cell)
    return members


def _formals(view: View) -> dict[int, list[int]]:
    """The inputs of each subgraph, in order."""
    found: dict[int, list[int]] = {}
    for value, source in enumerate(view.sources):
        if isinstance(source, Formal):
            found.setdefault(source.scope, []).append(value)
    return found
