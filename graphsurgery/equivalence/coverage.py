"""Which kinds of feeds were to be compared and were not: what ``equal`` says nothing about.

Alphabet: B batch, S query length, P past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphsurgery.equivalence.feeds import Sizes

__all__ = ["coverage_warning", "uncovered_kinds"]

_KINDS: dict[str, Callable[[Sizes], bool]] = {
    "batch above 1": lambda sizes: sizes.batch > 1,
    "past": lambda sizes: sizes.past > 0,
    "several tokens at once": lambda sizes: sizes.length > 1,
    "single token": lambda sizes: sizes.length == 1,
    "several tokens behind a past": lambda sizes: sizes.length > 1 and sizes.past > 0,
    "batch above 1 behind a past": lambda sizes: sizes.batch > 1 and sizes.past > 0,
}
# Kinds that tell nothing new where one of these is among them.
_IMPLIED = {
    "several tokens behind a past": {"past", "several tokens at once"},
    "batch above 1 behind a past": {"past", "batch above 1"},
}


def uncovered_kinds(compared: Iterable[Sizes], left_out: Iterable[Sizes]) -> tuple[str, ...]:
    """Kinds of feeds of which every one was left out, such as ``batch above 1`` or ``past``."""
    done, lost = list(compared), list(left_out)
    missing = [kind for kind, has in _KINDS.items() if any(map(has, lost)) and not any(map(has, done))]
    return tuple(kind for kind in missing if not _IMPLIED.get(kind, set()) & set(missing))


def coverage_warning(kinds: tuple[str, ...]) -> str | None:
    """One sentence; None where every kind was compared."""
    if not kinds:
        return None
    return f"every feed of these kinds was left out, so nothing was compared there: {', '.join(kinds)}"
