"""Prompts drawn from a seed: lengths and batches that the files of both sides can be fed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.equivalence.layouts import Plan, Prompt, make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphsurgery.equivalence.layouts import Party
    from graphsurgery.equivalence.tape import Side

__all__ = ["draw_prompts"]

# Rows of the drawn prompts, in how many calls they are fed where that is free, and on which side they are padded where
# either will do: a short one, a single token, batches of unequal and of equal rows, one in chunks, and one of a few hundred.
_DRAWN: tuple[tuple[tuple[int, ...], int, Side | None], ...] = (
    ((5,), 1, None),
    ((1,), 1, None),
    ((7, 4), 1, "left"),
    ((6, 3, 2), 1, "right"),
    ((3, 3), 1, None),
    ((40,), 2, None),
    ((200,), 1, None),
)
# What a model with buffers that are larger than what is in them is fed besides.
_BUFFERED = 9


def draw_prompts(parties: tuple[Party, Party], seed: int, vocabulary: int, tokens: int) -> list[Prompt]:
    """Draw prompts that the files of both parties can take, each length once.

    Args:
        parties: reference and rewritten.
        seed: every prompt follows from it and its number.
        vocabulary: ids are below.
        tokens: to be decoded behind each prompt.
    """
    prompts: list[Prompt] = []
    told: set[tuple[object, ...]] = set()
    for number, (lengths, pieces, side) in enumerate(_DRAWN):
        fitted = _fitted(Prompt("", _blank(lengths), pieces, seed, side=side), parties, tokens)
        if fitted is None or (key := _told(*fitted, alone=len(lengths) == 1)) in told:
            continue
        told.add(key)
        prompts.append(_with_ids(*fitted, number, vocabulary))
    if all(party.buffered for party in parties):
        wish = Prompt("", _blank((_BUFFERED,)), 1, seed, buffered=True)
        fitted = _fitted(wish, (parties[0].with_buffers(), parties[1].with_buffers()), tokens)
        if fitted is not None:
            prompts.append(_with_ids(*fitted, len(_DRAWN), vocabulary))
    return prompts


def _blank(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple((0,) * length for length in lengths)


def _told(prompt: Prompt, plan: Plan, *, alone: bool) -> tuple[object, ...]:
    """What a prompt tells: lengths and calls where a single row was asked for, else how the batch is padded."""
    if alone or len(prompt.rows) == 1:
        return ("row", prompt.lengths, plan.layouts[0].cuts, plan.layouts[1].cuts)
    if len(set(prompt.lengths)) == 1:
        return ("batch",)
    return ("batch", *[layout.side for layout in plan.layouts])


def _with_ids(prompt: Prompt, plan: Plan, number: int, vocabulary: int) -> Prompt:
    generator = np.random.default_rng([prompt.seed or 0, number])
    rows = tuple(tuple(generator.integers(0, vocabulary, length).tolist()) for length in prompt.lengths)
    ragged = f"-{plan.layouts[0].side}" if len(set(prompt.lengths)) > 1 else ""
    calls = len(plan.layouts[0].cuts)
    name = f"b{len(rows)}-s{max(prompt.lengths)}{ragged}" + (f"-in-{calls}" if calls > 1 else "")
    return dataclasses.replace(prompt, name=name + ("-buffer" if prompt.buffered else ""), rows=rows)


def _fitted(wish: Prompt, parties: tuple[Party, Party], tokens: int) -> tuple[Prompt, Plan] | None:
    """The prompt, or the nearest that can be fed, and how; None where none can."""
    fallback: tuple[Prompt, Plan] | None = None
    for lengths in _candidates(wish.lengths, parties, tokens):
        prompt = dataclasses.replace(wish, rows=_blank(lengths))
        plan = make_plan(prompt, parties, tokens)
        if isinstance(plan, Plan) and plan.tokens == tokens:
            return prompt, plan
        if isinstance(plan, Plan) and fallback is None:
            fallback = prompt, plan
    return fallback


def _candidates(lengths: tuple[int, ...], parties: tuple[Party, Party], tokens: int) -> Iterator[tuple[int, ...]]:
    files = [file for party in parties for file in (party.prompt, party.step)]
    batch = next((file.batch for file in files if file.batch is not None), len(lengths))
    rows = tuple(lengths[place % len(lengths)] for place in range(batch))
    longest = max(rows)
    yield rows
    yield (longest,) * batch
    capacity = min((file.capacity for file in files if file.capacity is not None), default=longest + tokens)
    room = max(1, capacity - tokens)
    chunk = next((party.prompt.length for party in parties if party.prompt.length is not None), 1)
    # Whole calls, the fewest that hold it and still leave room; then one call, however little room is left.
    whole = min(-(-longest // chunk), max(1, room // chunk)) * chunk
    shorter = min(longest, room)
    yield tuple(min(row, shorter) for row in rows)
    yield (shorter,) * batch
    yield (whole,) * batch
    yield (chunk,) * batch
    for file in files:
        if file.past:
            yield (file.past,) * batch
