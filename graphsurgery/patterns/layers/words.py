"""Splitting the word that the regions of a stack form into layers.

A layer is a run of regions that mix positions and the regions behind it that do not (attention, feed-forward); norms and
casts between regions count for neither. Where all regions are of one sort, the shortest period of the word tells. What follows the last layer (norm, head) or stands
between layers (features added to the first few) is cut off: a layer ends where others of its kind end.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

__all__ = ["Factor", "Letter", "split_word"]

_ALIKE = 0.6  # share of operators that two regions have in common, of all that they have
_MANY = 256  # different letters: no stack has so many kinds
_LONGEST_PERIOD = 12


@dataclasses.dataclass(frozen=True)
class Letter:
    """One region between two cuts.

    Attributes:
        kind: equal for regions that compute the same.
        mixes: whether it mixes positions.
        multiplies: whether it holds a matrix product.
        size: number of nodes.
        operators: how often each operator occurs.
    """

    kind: Hashable
    mixes: bool
    multiplies: bool
    size: int
    operators: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class Factor:
    """One layer: its letters ``start`` to ``end`` (not included), and what layers of its kind have in common."""

    start: int
    end: int
    word: tuple[Hashable, ...]


def split_word(letters: Sequence[Letter], *, mixing: bool) -> list[Factor]:
    """The layers of a stack, in order.

    Args:
        letters: the regions.
        mixing: whether the source has layers that mix positions: what repeats without mixing is then no layer.
    """
    if not letters or (mixing and not any(letter.mixes for letter in letters)):
        return []
    names = _names(letters)
    best: tuple[int, list[tuple[int, int]]] = (0, [])
    starts = _starts(letters, names)
    for shift in range(min(4, _shortest(starts, len(letters)))):
        moved = [start - shift for start in starts if start >= shift]
        if shift and all(letters[start].mixes for start in starts) and any(_feeds_forward(letters[at]) for at in moved):
            break  # what feeds forward ends the layer before
        factors = list(itertools.pairwise([*moved, len(letters)]))
        chosen = _trimmed(factors, letters, names)
        score = _score(chosen, letters, names)
        if score > best[0]:
            best = (score, chosen)
    apart = _trimmed(list(itertools.pairwise([*_each_alone(letters), len(letters)])), letters, names)
    # Names are guesses at what is alike: of two divisions that explain as much, that which is right of more letters, or
    # else that of the smaller layers.
    kinds = [letter.kind for letter in letters]
    if (_score(apart, letters, names), _score(apart, letters, kinds)) >= (best[0], _score(best[1], letters, kinds)):
        best = (0, apart or best[1])
    return [Factor(start, end, tuple(names[start:end])) for start, end in best[1]]


def _shortest(starts: Sequence[int], length: int) -> int:
    return min((end - start for start, end in itertools.pairwise([*starts, length])), default=0)


def _names(letters: Sequence[Letter]) -> list[Hashable]:
    """The kind of each letter, where one that occurs once is taken for the most similar other: proof comes later."""
    counts = collections.Counter(letter.kind for letter in letters)
    first = {letter.kind: letter for letter in reversed(letters)}
    alias: dict[Hashable, Hashable] = {}
    if len(first) <= _MANY:
        for kind, count in counts.items():
            if count > 1:
                continue
            others = [other for other in first if other != kind and first[other].mixes == first[kind].mixes]
            rated = [(_similarity(first[kind], first[other]), counts[other], other) for other in others]
            likeness, _, other = max(rated, key=lambda item: item[:2], default=(0.0, 0, None))
            if likeness >= _ALIKE:
                alias[kind] = alias.get(other, other)
                if counts[other] == 1:
                    # Of two single ones both take one name.
                    alias.setdefault(other, alias[kind])
    return [_end(alias, letter.kind) for letter in letters]


def _end(alias: Mapping[Hashable, Hashable], kind: Hashable) -> Hashable:
    """What ``kind`` is taken for, which may be taken for another itself."""
    seen: set[Hashable] = set()
    while kind not in seen and kind in alias:
        seen.add(kind)
        kind = alias[kind]
    return kind


def _similarity(one: Letter, other: Letter) -> float:
    common = (one.operators & other.operators).total()
    return common / max(1, (one.operators | other.operators).total())


def _starts(letters: Sequence[Letter], names: Sequence[Hashable]) -> list[int]:
    if any(letter.mixes for letter in letters) and any(_feeds_forward(letter) for letter in letters):
        starts: list[int] = []
        closed = True
        counts = collections.Counter(names)
        for at, letter in enumerate(letters):
            # What mixes in front of all layers, such as the convolutions of a stem, is no layer.
            if letter.mixes and closed and (starts or counts[names[at]] > 1):
                starts.append(at)
                closed = False
            closed = closed or _feeds_forward(letter)
        # The head multiplies too: it does not make layers of what mixes only.
        if len(starts) > 1:
            return starts
    return _by_period(letters, names)


def _each_alone(letters: Sequence[Letter]) -> list[int]:
    """Starts of layers where each is one region: attention and feed-forward side by side, of several kinds perhaps."""
    mixing = [at for at, letter in enumerate(letters) if letter.mixes]
    if len(mixing) < 2 or any(map(_feeds_forward, letters[mixing[0] : mixing[-1]])):
        return []
    return mixing


def _feeds_forward(letter: Letter) -> bool:
    return letter.multiplies and not letter.mixes


def _by_period(letters: Sequence[Letter], names: Sequence[Hashable]) -> list[int]:
    """Starts of layers where letters alone tell: those of the longest stretch with the shortest period."""
    alike = _coarse(letters)
    best = (0, 0, 1)
    for period in range(1, min(_LONGEST_PERIOD, len(letters) // 2) + 1):
        for word in (alike, names):
            run = 0
            for at in range(period, len(letters)):
                run = run + 1 if word[at] == word[at - period] else 0
                # A longer period must explain more than what shorter ones do.
                least = best[0] if best[2] == period else best[0] * 1.2 + 1
                if run >= period and run + period > least:
                    best = (run + period, at - run - period + 1, period)
    covered, start, period = best
    return list(range(start, start + covered, period))[: covered // period] if covered else []


def _coarse(letters: Sequence[Letter]) -> list[Hashable]:
    """Letters by rough likeness: sliding and full attention are one, attention and feed-forward are not."""
    leaders: list[Letter] = []
    known: dict[Hashable, int] = {}
    for letter in letters:
        if letter.kind in known:
            continue
        alike = (number for number, leader in enumerate(leaders) if _similarity(letter, leader) >= _ALIKE)
        number = next(alike, None)
        if number is None:
            number = len(leaders)
            if len(leaders) < _MANY:
                leaders.append(letter)
        known[letter.kind] = number
    return [known[letter.kind] for letter in letters]


def _trimmed(
    factors: Sequence[tuple[int, int]], letters: Sequence[Letter], names: Sequence[Hashable]
) -> list[tuple[int, int]]:
    """Each factor up to where most others like it end."""
    words = [tuple(names[start:end]) for start, end in factors]
    whole = collections.Counter(words)
    found: list[tuple[int, int]] = []
    for (start, end), word in zip(factors, words, strict=True):
        least = next((at for at in range(start, end) if _feeds_forward(letters[at])), end - 1) - start + 1
        candidates = {len(word)} if whole[word] > 1 else set()
        for other in whole:
            if other == word:
                continue
            common = _common(word, other)
            if common == len(other) or common >= least:
                candidates.add(common)
        rated = [(_support(word[:length], whole) * _size(letters, start, length), length) for length in candidates]
        best = max(rated, default=(0, len(word)))
        found.append((start, start + best[1]))
    return found


def _support(prefix: tuple[Hashable, ...], whole: collections.Counter[tuple[Hashable, ...]]) -> int:
    return sum(count for word, count in whole.items() if word[: len(prefix)] == prefix)


def _size(letters: Sequence[Letter], start: int, length: int) -> int:
    return sum(letter.size for letter in letters[start : start + length])


def _common(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _score(factors: Sequence[tuple[int, int]], letters: Sequence[Letter], names: Sequence[Hashable]) -> int:
    groups: collections.Counter[tuple[Hashable, ...]] = collections.Counter(
        tuple(names[start:end]) for start, end in factors
    )
    return sum(_size(letters, start, end - start) for start, end in factors if groups[tuple(names[start:end])] > 1)
