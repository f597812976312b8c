"""Following one axis through a Reshape, on symbolic sizes.

A Reshape splits its axes into groups of equal product, from the front. An axis can be followed where its group keeps
it apart, merges it with the batch axis in front of it, or takes it apart from the batch again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis._row_types import RowAxis, same_size
from graphsurgery.analysis.dims import product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis.dims import Dim

__all__ = ["reshape_axis", "reshape_groups"]


def reshape_groups(before: Sequence[Dim], after: Sequence[Dim]) -> list[tuple[range, range]]:
    """The smallest groups of axes whose sizes multiply to the same, in order; axes of size 1 join the group at hand.

    Axes of equal size at the end are groups of their own. What cannot be matched in front of them (sizes that are not
    known) is one last group.

    Example:
        >>> reshape_groups((2, 3, 4), (6, 2, 2))
        [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    same = 0
    while same < min(len(before), len(after)) - 1 and before[-1 - same] == after[-1 - same] != 0:
        same += 1
    front = _front_groups(before[: len(before) - same], after[: len(after) - same])
    tail = range(same, 0, -1)
    return front + [(_one(len(before) - item), _one(len(after) - item)) for item in tail]


def _one(axis: int) -> range:
    return range(axis, axis + 1)


def _front_groups(before: Sequence[Dim], after: Sequence[Dim]) -> list[tuple[range, range]]:
    groups: list[tuple[range, range]] = []
    start_before = start_after = 0
    end_before = 0
    while start_before < len(before) or start_after < len(after):
        matched = None
        for end_before in range(start_before + 1, len(before) + 1):
            size = product(before[start_before:end_before])
            matched = next(
                (
                    end_after
                    for end_after in range(start_after + 1, len(after) + 1)
                    if product(after[start_after:end_after]) == size
                ),
                None,
            )
            if matched is not None:
                break
        if matched is None:
            groups.append((range(start_before, len(before)), range(start_after, len(after))))
            break
        groups.append((range(start_before, end_before), range(start_after, matched)))
        start_before, start_after = end_before, matched
    return groups


def reshape_axis(rows: RowAxis, before: Sequence[Dim], after: Sequence[Dim]) -> RowAxis | None:
    """Where the rows of ``after`` are in ``before``; None where they are merged with something but the batch.

    Args:
        rows: the axis of the reshaped tensor.
        before: sizes of the input.
        after: sizes of the output.
    """
    before = [next((other for other in after if same_size(size, other)), size) for size in before]
    group = next((pair for pair in reshape_groups(before, after) if rows.axis in pair[1]), None)
    if group is None:
        return None
    sources = [axis for axis in group[0] if before[axis] != 1]
    targets = [axis for axis in group[1] if after[axis] != 1]
    size = after[rows.axis]
    if len(sources) == 1 and len(targets) == 1 and targets[0] == rows.axis:
        return RowAxis(sources[0], rows.flat)
    if size == 1 and not sources and not targets:
        return RowAxis(group[0][0], rows.flat) if len(group[0]) else None
    if rows.flat and targets == [rows.axis] and len(sources) == 2:
        # [B, S] -> [B*S]
        return RowAxis(sources[1])
    if not rows.flat and len(targets) == 2 and targets[1] == rows.axis and len(sources) == 1:
        # [B*S] -> [B, S]
        return RowAxis(sources[0], flat=True)
    if len(sources) == len(targets) and [before[axis] for axis in sources] == [after[axis] for axis in targets]:
        return RowAxis(sources[targets.index(rows.axis)], rows.flat) if rows.axis in targets else None
    return None
