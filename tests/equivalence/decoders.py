"""Models that decode, read as the verifier reads them, and what they give when they are fed the whole sequence at once.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from graphsurgery.equivalence.contestants import Contestants, Files, read_contestants
from graphsurgery.equivalence.drawing import Draw
from graphsurgery.equivalence.feeds import Sizes
from graphsurgery.equivalence.generation import Job, Trace, run_party
from graphsurgery.equivalence.layouts import Plan, Prompt, make_plan
from graphsurgery.equivalence.roles import Role

if TYPE_CHECKING:
    from pathlib import Path

    from graphsurgery.equivalence.decoding import Decoder
    from graphsurgery.equivalence.running import Session


def contestants(path: Path, other: Path | None = None, **files: Path) -> Contestants:
    with contextlib.ExitStack() as stack:
        return read_contestants(Files(path, other or path, **files), None, stack)


def decoder_of(path: Path) -> Decoder:
    return contestants(path).parties[0].prompt


def plan_of(both: Contestants, prompt: Prompt, tokens: int) -> Plan:
    parties = tuple(party.with_buffers() for party in both.parties) if prompt.buffered else both.parties
    plan = make_plan(prompt, (parties[0], parties[1]), tokens)
    assert isinstance(plan, Plan), plan
    return plan


def decode(both: Contestants, prompt: Prompt, tokens: int) -> Trace:
    """Greedily, with the reference."""
    party = both.parties[0].with_buffers() if prompt.buffered else both.parties[0]
    plan = plan_of(both, prompt, tokens)
    job = Job(0, prompt, party, plan.layouts[0], tokens, vocabulary=party.prompt.vocabulary)
    models = both.models(0, traced=False)
    return run_party([job], models, both.settings, frozenset(), lambda _: None)[0]


def at_once(decoder: Decoder, session: Session, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits ``[S, V]`` of one row that is fed in one call, with empty caches, by arrays drawn for a single call."""
    signature, length = decoder.signature, len(ids)
    arrays = Draw(signature, Sizes(1, length, 0, "none", length + 4), 0, 0, None)()
    for spec in signature.having(Role.TOKENS):
        arrays[spec.name] = np.array([ids])
    for cache in decoder.fed:
        assert cache.input is not None
        if cache.input.role is not Role.WINDOW:
            arrays[cache.input.name] = np.zeros_like(arrays[cache.input.name])
    logits: np.ndarray[Any, Any] = session.run(arrays)[decoder.logits.name][0]
    return logits
