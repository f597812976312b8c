"""Between which blocks an attention is divided at a sample length, and which scores are computed.

Read from what ``block-attention`` reports of a site: numbers of blocks, or their sizes (``of 256``), and how keys that the
mask leaves to no query are passed over. Blocks are as long as the first of them; the last may be shorter. Which keys are
needed is known to the cell of the sample, so that a block whose border lies within a cell may be told a little larger.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.picture.parts import MaskDivision, MaskPicture, QueryBlock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphsurgery.picture.parts import MaskSample
    from graphsurgery.site_report import PassReport, SiteReport

__all__ = ["BLOCKING", "with_divisions"]

BLOCKING = "block-attention"
"""The pass that divides attentions."""

_MAX_SPANS = 4096

_Span = tuple[int, int]


def with_divisions(masks: Iterable[MaskPicture], reports: Iterable[PassReport]) -> tuple[MaskPicture, ...]:
    """``masks`` with the division of the first attention of each that was rewritten."""
    sites = {site.id: site for report in reports if report.name == BLOCKING for site in report.sites}
    return tuple(dataclasses.replace(mask, division=_division(mask, sites)) for mask in masks)


def _division(mask: MaskPicture, sites: dict[str, SiteReport]) -> MaskDivision | None:
    sample = mask.sample
    done = [sites[name] for name in mask.sites if name in sites and sites[name].status == "rewritten"]
    if sample is None or not done or "q_blocks" not in done[0].detail:
        return None
    detail = done[0].detail
    skip = str(detail.get("skip", "none"))
    rows = _spans((0, sample.length), detail.get("q_blocks"))
    blocks: list[QueryBlock] = []
    for row in rows:
        blocks.append(QueryBlock(row, tuple(_keys(sample, row, detail.get("kv_blocks"), skip))))
        if sum(len(block.keys) for block in blocks) > _MAX_SPANS:
            return None
    computed = sum(
        (block.queries[1] - block.queries[0]) * (stop - start) for block in blocks for start, stop in block.keys
    )
    return MaskDivision(skip, tuple(blocks), computed)


def _keys(sample: MaskSample, row: _Span, told: object, skip: str) -> list[_Span]:
    """The key blocks that a query block computes."""
    whole = (0, sample.total)
    bands = range(row[0] // sample.row_step, -(-row[1] // sample.row_step))
    if skip == "trim":
        used = [sample.needed[band] for band in bands if sample.needed[band][1]]
        # What is left is divided, from the first needed key to the last.
        whole = (min((low for low, _ in used), default=0), max((high for _, high in used), default=0))
    spans = _spans(whole, told)
    if skip != "if":
        return spans
    step = sample.column_step
    return [
        (start, stop)
        for start, stop in spans
        if any(any(sample.cells[band][start // step : -(-stop // step)]) for band in bands)
    ]


def _spans(whole: _Span, told: object) -> list[_Span]:
    """``whole`` in a number of blocks, or in blocks ``of N``."""
    start, stop = whole
    text = str(told)
    if text.startswith("of ") and text[3:].isdecimal():
        step = int(text[3:])
    else:
        step = -(-(stop - start) // max(int(text) if text.isdecimal() else 1, 1))
    return [(first, min(first + step, stop)) for first in range(start, stop, max(step, 1))]
