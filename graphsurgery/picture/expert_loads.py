"""Tokens by expert of a drawn sample, and rows that each form of an expert block computes for it.

Which experts a router chooses is known only where it runs. The samples say so: in one every expert is as likely as
the others, in the other likelihood falls as 1 / number, as harsh as trained routers get.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.picture.parts import ExpertLoad, ExpertPicture

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphsurgery.site_report import PassReport, SiteReport

__all__ = ["TOKENS", "expert_pictures"]

TOKENS = 512
"""T of the samples."""

_CHUNK = 256
_MAX_EXPERTS = 4096


def expert_pictures(reports: Iterable[PassReport]) -> tuple[ExpertPicture, ...]:
    """One entry for each kind of expert block that passes rewrote: sites whose details name ``experts`` and ``top_k``."""
    kinds: dict[tuple[int, int, str, str, int, bool], list[SiteReport]] = {}
    for site in (site for report in reports for site in report.sites):
        if site.status != "rewritten":
            continue
        experts, top_k = site.detail.get("experts"), site.detail.get("top_k")
        if not isinstance(experts, int) or not isinstance(top_k, int) or not 0 < top_k <= experts <= _MAX_EXPERTS:
            continue
        chunk = site.detail.get("chunk_size")
        unrolled = site.detail.get("lowering") == "unroll"
        texts = (str(site.detail.get("form", "?")), str(site.detail.get("strategy", "?")))
        key = (experts, top_k, *texts, chunk if isinstance(chunk, int) and chunk > 0 else _CHUNK, unrolled)
        kinds.setdefault(key, []).append(site)
    return tuple(_picture(*key, sites) for key, sites in kinds.items())


def _picture(
    experts: int, top_k: int, form: str, strategy: str, chunk: int, unrolled: bool, sites: list[SiteReport]
) -> ExpertPicture:
    skews = {"even": np.zeros(experts), "skewed": -np.log(np.arange(experts) + 1.0)}
    loads = []
    for name, likelihood in skews.items():
        tokens = _draw(likelihood, top_k)
        rows = {
            "dense": experts * TOKENS,
            "gather": TOKENS * top_k,
            "grouped": TOKENS * top_k,
            "packed": _packed(tokens, chunk, unrolled=unrolled),
        }
        loads.append(ExpertLoad(name, tokens, rows))
    layers = tuple(dict.fromkeys(site.layer for site in sites if site.layer is not None))
    ids = tuple(dict.fromkeys(site.id for site in sites))
    return ExpertPicture(ids, layers, form, strategy, experts, top_k, TOKENS, chunk, TOKENS * top_k, tuple(loads))


def _draw(likelihood: np.ndarray, top_k: int) -> tuple[int, ...]:
    """Tokens by expert where each token takes K different ones: the K largest of log likelihood plus Gumbel noise."""
    noise = np.random.default_rng(0).gumbel(size=(TOKENS, len(likelihood)))
    chosen = np.argsort(-(likelihood + noise), axis=1, kind="stable")[:, :top_k]
    return tuple(np.bincount(chosen.reshape(-1), minlength=len(likelihood)).tolist())


def _packed(tokens: tuple[int, ...], chunk: int, *, unrolled: bool) -> int:
    if unrolled:
        # Written out without branches, every expert has every chunk.
        return len(tokens) * -(-TOKENS // chunk) * chunk
    return sum(-(-count // chunk) * chunk for count in tokens)
