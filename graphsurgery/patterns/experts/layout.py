"""Which axis of a value counts what, inside an expert block.

Labels of axes: ``t`` tokens, ``b`` and ``s`` where they are kept apart, ``c`` copies of a token's row (the K choices,
or all E experts), ``tc`` and ``ct`` both in one axis (token-major, copy-major), ``r`` rows in an order of their own
(sorted by expert, or those of one expert), ``f`` features, ``1`` an axis of one that is broadcast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import exact_div, product

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphsurgery.analysis.dims import Dim

__all__ = ["ROWS", "Labels", "atoms", "has_copies", "regroup", "same_axes"]

Labels = tuple[str, ...]
ROWS = frozenset({"t", "b", "s", "c", "tc", "ct", "r"})
_ATOMS = {"tc": ("t", "c"), "ct": ("c", "t"), "1": ()}
_MERGED = {
    (): "1",
    ("t", "c"): "tc",
    ("c", "t"): "ct",
    ("b", "s"): "t",
    ("b", "s", "c"): "tc",
    ("c", "b", "s"): "ct",
}


def atoms(labels: Sequence[str]) -> Labels:
    """The labels with merged axes taken apart and axes of one dropped."""
    return tuple(atom for label in labels for atom in _ATOMS.get(label, (label,)))


def same_axes(labels: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two values count the same things in the same order, whatever is merged."""
    first, second = (
        tuple(a for label in atoms(x) for a in (("b", "s") if label == "t" else (label,))) for x in (labels, others)
    )
    return first == second


def has_copies(labels: Sequence[str]) -> bool:
    """Whether a value has a row for each (token, copy), in any arrangement."""
    return any(label in ("c", "tc", "ct", "r") for label in labels)


def regroup(
    labels: Sequence[str], sizes: Sequence[Dim | None], to: Sequence[Dim | None], copies: int = 0
) -> Labels | None:
    """The labels of a value of sizes ``to`` that holds the same elements in the same order.

    Args:
        labels: what the axes of the one value count.
        sizes: their sizes.
        to: sizes of the axes of the other.
        copies: size of ``c``, where it is known.

    Returns:
        Its labels; None where they cannot be told.
    """
    known: dict[str, Dim | None] = {"c": copies} if copies else {}
    for label, size in zip(labels, sizes, strict=True):
        known[label] = size
        if label in ("tc", "ct") and copies and size is not None:
            known["t"] = exact_div(size, copies)
    wanted = atoms(labels)
    for variant in (wanted, tuple(a for label in wanted for a in (("b", "s") if label == "t" else (label,)))):
        best: tuple[int, Labels] | None = None
        for grouping in _groupings(variant, len(to)):
            score = _score(grouping, known, to)
            if score is not None and (best is None or score > best[0]):
                merged = tuple(group[0] if len(group) == 1 else _MERGED.get(group, "") for group in grouping)
                if "" not in merged:
                    best = (score, merged)
        if best is not None:
            return best[1]
    return None


def _groupings(items: Labels, parts: int) -> Iterator[tuple[Labels, ...]]:
    if parts == 0:
        if not items:
            yield ()
        return
    for count in range(len(items) + 1):
        for rest in _groupings(items[count:], parts - 1):
            yield (items[:count], *rest)


def _score(grouping: Sequence[Labels], known: dict[str, Dim | None], to: Sequence[Dim | None]) -> int | None:
    score = 0
    for group, size in zip(grouping, to, strict=True):
        if not group and size != 1:
            return None
        score -= len(group) > 1
        parts = [known.get(label) for label in group]
        if any(part is None for part in parts):
            if isinstance(size, int) and size == 1:
                score -= 1
            continue
        whole = product(part for part in parts if part is not None)
        if size is not None and whole == size:
            score += 4
        elif isinstance(whole, int) and isinstance(size, int):
            return None
        elif size is None or not (isinstance(whole, int) or isinstance(size, int)):
            continue
        else:
            score -= 1
    return score
