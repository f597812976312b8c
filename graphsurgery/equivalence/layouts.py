"""How the rows of a prompt are laid out in columns and cut into calls, so that the files of both models can take them.

Alphabet: B batch, S query length, P past, N slots of a fixed-size cache.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.equivalence.handover import Manner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.equivalence.decoding import Decoder
    from graphsurgery.equivalence.tape import Side

__all__ = ["Layout", "Party", "Plan", "Prompt", "make_plan"]

# Free slots behind the last token in caches whose size is free.
_SPARE_SLOTS = 3


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Rows of token ids that are decoded together.

    Attributes:
        name: short and unique, as reports print it.
        rows: token ids of each row.
        pieces: calls for the prompt, where that is free.
        seed: what it was drawn from; None where it was given.
        buffered: growing caches are fed as buffers larger than what is in them.
        side: where rows are padded, where the models leave the choice.
    """

    name: str
    rows: tuple[tuple[int, ...], ...]
    pieces: int = 1
    seed: int | None = None
    buffered: bool = False
    side: Side | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(len(row) for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Party:
    """The files that decode for one side: one for the prompt, one for the steps behind it; often the same."""

    prompt: Decoder
    step: Decoder

    @property
    def split(self) -> bool:
        """Whether the cache goes from one file to another."""
        return self.step is not self.prompt

    @property
    def anew(self) -> bool:
        """Whether every step is the whole sequence anew, for want of a cache."""
        return not self.split and self.prompt.whole

    @property
    def sides(self) -> tuple[Side, ...]:
        """On which sides rows may be padded."""
        return tuple(side for side in self.prompt.sides if side in self.step.sides)

    @property
    def buffered(self) -> bool:
        """Whether all its growing caches may be buffers that are larger than what is in them."""
        growing = [cache for file in (self.prompt, self.step) for cache in file.fed if cache.manner is Manner.GROW]
        return bool(growing) and all(cache.fused for cache in growing)

    def with_buffers(self) -> Party:
        """The same with growing caches fed as buffers, as runtimes do that share one between past and present."""
        prompt = _buffers(self.prompt)
        return Party(prompt, _buffers(self.step) if self.split else prompt)


def _buffers(decoder: Decoder) -> Decoder:
    caches = tuple(
        dataclasses.replace(cache, manner=Manner.SLOTS) if cache.manner is Manner.GROW and cache.input else cache
        for cache in decoder.caches
    )
    return dataclasses.replace(decoder, caches=caches)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one party is fed a prompt.

    Attributes:
        side: of padding.
        width: columns of the prompt.
        cuts: first column, and the one behind the last, of each call.
        slots: N of fixed-size caches whose size is free.
    """

    side: Side
    width: int
    cuts: tuple[tuple[int, int], ...]
    slots: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How both parties decode a prompt.

    Attributes:
        layouts: of the reference and of the rewritten model.
        tokens: how many each row gets.
        shortened: a clause that says why they are fewer than asked for.
    """

    layouts: tuple[Layout, Layout]
    tokens: int
    shortened: str | None

    @property
    def alike(self) -> bool:
        """Whether both are fed the same columns in the same calls."""
        return self.layouts[0] == self.layouts[1]


def make_plan(prompt: Prompt, parties: tuple[Party, Party], tokens: int) -> Plan | str:
    """Lay a prompt out for both parties, alike where they can be.

    Args:
        prompt: the prompt.
        parties: reference and rewritten.
        tokens: to be decoded for each row.

    Returns:
        The plan, or a sentence that says why there is none.
    """
    lengths = prompt.lengths
    own = [None if party.anew else party.prompt.length for party in parties]
    wished = {length for length in own if length is not None}
    widths: list[int] = []
    chunks: list[int | None] = []
    for party, fixed in zip(parties, own, strict=True):
        chunk = fixed
        if fixed is None and len(wished) == 1 and not party.anew:
            chunk = next(iter(wished))
        widths.append(-(-max(lengths) // chunk) * chunk if chunk else max(lengths))
        chunks.append(chunk)
    sides = _sides(lengths, widths, parties, prompt.side)
    if isinstance(sides, str):
        return sides
    total = max(widths) + tokens
    layouts: list[Layout] = []
    for party, chunk, width, side in zip(parties, chunks, widths, sides, strict=True):
        cuts = _cuts(party, width, chunk, prompt.pieces)
        layouts.append(Layout(side, width, cuts, total + _SPARE_SLOTS))
        for start, stop in cuts:
            why = _refusal(party, party.prompt, start, stop)
            if why is not None:
                return f"{party.prompt.path} {why}"
    possible, why = _steps(parties, layouts, tokens)
    return Plan((layouts[0], layouts[1]), possible, why)


def _refusal(party: Party, decoder: Decoder, start: int, stop: int) -> str | None:
    if not party.anew:
        return decoder.takes(start, stop)
    # The whole sequence, padded to whatever length a call has.
    capacity = decoder.capacity
    return f"holds {capacity} positions" if capacity is not None and stop > capacity else None


def _cuts(party: Party, width: int, chunk: int | None, pieces: int) -> tuple[tuple[int, int], ...]:
    if party.anew or party.prompt.whole:
        return ((0, width),)
    size = chunk or -(-width // pieces)
    if party.prompt.past is not None and party.prompt.length is None:
        size = width
    return tuple((start, min(start + size, width)) for start in range(0, width, size))


def _sides(
    lengths: Sequence[int], widths: Sequence[int], parties: tuple[Party, Party], wish: Side | None
) -> tuple[Side, Side] | str:
    needy = [any(length != width for length in lengths) for width in widths]
    both = [side for side in parties[0].sides if side in parties[1].sides]
    both.sort(key=lambda side: side != wish)
    chosen: list[Side] = []
    for party, needs, width in zip(parties, needy, widths, strict=True):
        if not needs:
            chosen.append("left")
        elif not party.sides:
            what = "rows of unequal length" if len(set(lengths)) > 1 else f"{lengths[0]} tokens in {width} columns"
            return f"{party.prompt.path} does not tell padding from tokens, so it cannot be fed {what}"
        else:
            chosen.append(both[0] if both and all(needy) else party.sides[0])
    return chosen[0], chosen[1]


def _steps(parties: tuple[Party, Party], layouts: Sequence[Layout], tokens: int) -> tuple[int, str | None]:
    """How many tokens both can decode, the one that the prompt gives included, and why not all."""
    for done in range(1, tokens):
        for party, layout in zip(parties, layouts, strict=True):
            stop = layout.width + done
            why = _refusal(party, party.step, stop - 1, stop)
            if why is not None:
                return done, f"{party.step.path} {why}"
    return tokens, None
