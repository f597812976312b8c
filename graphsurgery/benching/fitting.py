"""Whether a model takes the sizes of a point, and if not, why.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.benching.points import Point
from graphsurgery.equivalence.feeds import Sizes
from graphsurgery.equivalence.roles import Role

if TYPE_CHECKING:
    from graphsurgery.equivalence.roles import Signature

__all__ = ["fit", "own_points"]


def fit(point: Point, signature: Signature) -> Sizes | str:
    """The sizes of a feed for ``point``; a reason where the model does not take them."""
    fixed = signature.fixed
    total = point.past + point.length
    if signature.sequence is None:
        return "no input takes token ids or hidden states"
    if point.batch != 1 and "B" not in fixed and "B" not in signature.letters.values():
        return "it takes no batch"
    has_slots = bool(signature.having(Role.SLOTS))
    has_cache = bool(signature.having(Role.CACHE))
    if point.past and not (has_slots or has_cache):
        return "it takes no cache"
    wanted = {"B": point.batch, "S": point.length} | ({"P": point.past} if has_cache else {}) | {"T": total}
    words = {"B": "batch", "S": "length S", "P": "past P", "T": "number of keys T"}
    for letter, size in wanted.items():
        if fixed.get(letter, size) != size:
            return f"its {words[letter]} is fixed at {fixed[letter]}"
    slots = fixed.get("N", total if has_slots else 0)
    if has_slots and total > slots:
        return f"its caches have {slots} slots"
    if signature.positions is not None and total > signature.positions:
        return f"it has {signature.positions} positions"
    return Sizes(point.batch, point.length, point.past, "none", slots)


def own_points(signature: Signature, batch: int) -> tuple[Point, ...]:
    """The one point of a model whose S is fixed; none where it is free."""
    fixed = signature.fixed
    length = fixed.get("S")
    if length is None:
        return ()
    past = fixed.get("P", fixed["T"] - length if "T" in fixed else 0)
    if not signature.having(Role.CACHE):
        past = 0
    return (Point("decode" if length == 1 and past else "prefill", fixed.get("B", batch), length, past),)
