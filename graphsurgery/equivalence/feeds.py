"""Feeds drawn from a signature: lengths, pasts and paddings that a language model meets, reproducible from a seed.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache, C slots that are read of it,
R replaced tokens, E what an encoder has read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from graphsurgery.equivalence.drawing import Array, Draw
from graphsurgery.equivalence.roles import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.equivalence.roles import Signature

__all__ = ["Array", "Feed", "LeftOut", "Padding", "Sizes", "draw_at", "make_feeds"]

Padding = Literal["none", "left", "right"]

# Free slots behind the last key in a fixed-size cache whose size is free.
_SPARE_SLOTS = 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a feed holds: B, S, P, how rows are padded, N for fixed-size caches, and E."""

    batch: int
    length: int
    past: int
    padding: Padding = "none"
    slots: int = 0
    encoder: int = 6

    def letters(self) -> dict[str, int]:
        """Sizes by letter."""
        return {
            "B": self.batch,
            "S": self.length,
            "P": self.past,
            "T": self.past + self.length,
            "N": self.slots,
            "R": self.batch * self.marked,
            "C": self.bound,
            "E": self.encoder,
        }

    @property
    def name(self) -> str:
        """Such as ``b2-s5-p0-left``."""
        padding = "" if self.padding == "none" else f"-{self.padding}"
        return f"b{self.batch}-s{self.length}-p{self.past}{padding}"

    @property
    def bound(self) -> int:
        """Slots of a fixed-size cache that are read: all in use, and in half of the feeds one more where there is one."""
        read = self.past + self.length + (self.past + self.length) % 2
        return min(read, self.slots) if self.slots else read

    @property
    def marked(self) -> int:
        """Replaced tokens in each row."""
        return max(1, self.length // 3)


@dataclasses.dataclass(frozen=True)
class Feed:
    """One set of inputs.

    Attributes:
        name: short and unique, as reports print it.
        sizes: B, S, P and padding.
        seed: what it is drawn from; None for feeds that were given.
        build: makes the arrays, the same each time (a long feed of a large model is not kept in memory).
    """

    name: str
    sizes: Sizes
    seed: int | None
    build: Callable[[], dict[str, Array]] = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A feed that was not compared, and why; its sizes where it is known what it holds."""

    feed: str
    reason: str
    sizes: Sizes | None = None


# Whole prompts, chunks behind a past, single tokens; lengths around block borders, and one of a few hundred. What an
# encoder has read is as long as neither the tokens nor the keys.
_PLANS: tuple[Sizes, ...] = (
    Sizes(1, 5, 0, encoder=7),
    Sizes(1, 1, 0, encoder=4),
    Sizes(2, 5, 0, "left", encoder=3),
    Sizes(3, 5, 0, "right", encoder=9),
    Sizes(1, 3, 4, encoder=6),
    Sizes(1, 1, 7, encoder=2),
    Sizes(2, 1, 6, "left", encoder=11),
    Sizes(2, 4, 6, "left", encoder=5),
    Sizes(2, 23, 9, "right", encoder=13),
    Sizes(1, 200, 0, encoder=17),
)


def make_feeds(signature: Signature, seed: int, *, pad_position: int | None = None) -> tuple[list[Feed], list[LeftOut]]:
    """Draw feeds for a signature.

    Args:
        signature: what is to be fed; sizes that it fixes are kept.
        seed: every array follows from it, the feed's number and the input's name.
        pad_position: position of right-padded columns; None continues the running count as masks do.

    Returns:
        The feeds, and plans that the model's own kernels are known not to take.
    """
    feeds: list[Feed] = []
    left_out: list[LeftOut] = []
    taken: set[Sizes] = set()
    for number, plan in enumerate(_PLANS):
        sizes = _fit(plan, signature)
        if sizes is None or sizes in taken:
            continue
        taken.add(sizes)
        name = f"{sizes.name}-e{sizes.encoder}" if _has_encoder(signature) else sizes.name
        reason = _unsupported(sizes, signature)
        if reason:
            left_out.append(LeftOut(name, reason, sizes))
            continue
        feeds.append(Feed(name, sizes, seed, Draw(signature, sizes, seed, number, pad_position)))
    return feeds, left_out


def draw_at(signature: Signature, sizes: Sizes, seed: int = 0) -> Draw | None:
    """One feed of about these sizes, as near as ``signature`` allows; None where it takes nothing near them."""
    fitted = _fit(sizes, signature)
    return None if fitted is None else Draw(signature, fitted, seed, 0, None)


def _fit(plan: Sizes, signature: Signature) -> Sizes | None:
    """The plan with the sizes that the signature fixes, or None where they do not go together."""
    fixed = signature.fixed
    batch, length, past = fixed.get("B", plan.batch), fixed.get("S", plan.length), fixed.get("P", plan.past)
    has_cache = bool(signature.having(Role.CACHE))
    has_slots = bool(signature.having(Role.SLOTS))
    carries_past = has_cache or has_slots
    if not carries_past:
        past = 0
    if "T" in fixed:
        if "S" in fixed or not carries_past:
            past = fixed["T"] - length if carries_past else 0
            length = length if carries_past else fixed["T"]
        else:
            length = fixed["T"] - past
    slots = fixed.get("N", past + length + _SPARE_SLOTS if has_slots else 0)
    if has_slots and length > slots:
        length = slots if "S" not in fixed else length
    if has_slots:
        # As many positions as slots that are read.
        readable = min(slots, fixed.get("C", slots))
        length = min(length, readable) if "S" not in fixed else length
        past = min(past, readable - length)
    if signature.positions is not None and "S" not in fixed:
        # No position beyond the table.
        length = min(length, signature.positions - past)
    if batch <= 0 or length <= 0 or past < 0:
        return None
    padding = plan.padding if batch > 1 and _can_pad(signature) else "none"
    if not any(letter == "B" for letter in signature.letters.values()) and "B" not in fixed:
        batch = 1
    if padding == "left" and has_slots and not signature.having(Role.MASK, Role.MASK_ND):
        # Without a mask the positions are the slots: two tokens of a row must not have one position.
        padding = "none"
    if padding == "left" and signature.bounded and not signature.having(Role.MASK_ND):
        # The mask that the graph makes leaves padding in front of all tokens no key to attend.
        padding = "none"
    if padding == "left" and signature.fused_attention and length == 1:
        # Rows that GroupQueryAttention does not take so are full instead: a batch behind a past is not to be missed.
        padding = "none"
    padding = padding if batch > 1 else "none"
    if not _has_encoder(signature):
        return Sizes(batch, length, past, padding, slots)
    return Sizes(batch, length, past, padding, slots, fixed.get("E", plan.encoder))


def _has_encoder(signature: Signature) -> bool:
    return bool(signature.having(Role.ENCODER_MASK, Role.ENCODER_STATES))


def _can_pad(signature: Signature) -> bool:
    return bool(signature.having(Role.MASK, Role.MASK_ND, Role.POSITIONS, Role.LAST_KEY))


def _unsupported(sizes: Sizes, signature: Signature) -> str | None:
    if not signature.fused_attention:
        return None
    if sizes.batch > 1 and sizes.length > 1 and sizes.past > 0:
        return "GroupQueryAttention takes no batch of several rows and columns behind a past"
    if sizes.padding == "left":
        return "GroupQueryAttention reads batches as right-padded"
    return None
