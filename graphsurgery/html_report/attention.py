"""Which blocks of (query, key) pairs a mask leaves, and between which blocks the attention is divided.

Alphabet: S query length, P past, T = P + S keys.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.html_report.drawing import drawing, key, legend
from graphsurgery.html_report.markup import Html, el, percent, plural, ranges
from graphsurgery.picture.painter import parse_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.html_report.drawing import Ids
    from graphsurgery.picture.parts import MaskPicture, MaskSample
    from graphsurgery.site_report import PassReport, SiteReport

__all__ = ["attention"]

_LEFT, _TOP, _SIDE = 44, 30, 262
_CLASSES = ("none", "part", "all")
_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class _Division:
    """Positions in a block of queries and of keys, and whether keys that the mask leaves to no query are not read."""

    rows: int
    columns: int
    skip: str


def attention(ids: Ids, masks: Sequence[MaskPicture], passes: Sequence[PassReport]) -> Html:
    """A figure for each mask."""
    if not masks:
        return el("p", "No attention was found.", class_="lede")
    sites = {site.id: site for item in passes if item.name == "block-attention" for site in item.sites}
    figures = [_figure(ids, mask, sites) for mask in masks]
    rest = figures[_SHOWN:]
    told = any(mask.sample for mask in masks)
    entries = [
        key(el("rect", x=1, y=1, width=14, height=14, class_="c-all"), "every pair attended"),
        key(el("rect", x=1, y=1, width=14, height=14, class_="c-part"), "some pairs attended"),
        key(el("rect", x=1, y=1, width=14, height=14, class_="c-none"), "none: the mask leaves nothing"),
    ]
    if any(_division(mask, sites) for mask in masks):
        entries.append(key(el("line", x1=8, y1=0, x2=8, y2=16, class_="blocks"), "border of a block"))
        entries.append(key(el("rect", x=2, y=2, width=12, height=12, class_="needed"), "keys that a query block reads"))
    return el(
        "div",
        legend(*entries) if told else None,
        el("div", figures[:_SHOWN], class_="grid"),
        el(
            "details",
            el("summary", plural(len(rest), "more mask")),
            el("div", el("div", list(rest), class_="grid"), class_="inner"),
        )
        if rest
        else None,
    )


def _division(mask: MaskPicture, sites: dict[str, SiteReport]) -> _Division | None:
    """How the first of the attentions that were rewritten is divided."""
    sample = mask.sample
    done = [sites[name] for name in mask.sites if name in sites and sites[name].status == "rewritten"]
    if sample is None or not done or "q_blocks" not in done[0].detail:
        return None
    detail = done[0].detail
    rows = parse_blocks(detail.get("q_blocks"), sample.length)
    columns = parse_blocks(detail.get("kv_blocks"), sample.total)
    return _Division(rows, columns, str(detail.get("skip", "none")))


def _figure(ids: Ids, mask: MaskPicture, sites: dict[str, SiteReport]) -> Html:
    special = [kind for kind in mask.kinds if kind not in ("attention", "decomposed")]
    layers = (
        f"layers {ranges(list(mask.layers))}"
        if len(mask.layers) > 1
        else f"layer {mask.layers[0]}"
        if mask.layers
        else ""
    )
    name = ", ".join([" ".join(special) or "attention", *([layers] if layers else [])])
    heading = el("h3", name)
    readers = (
        el(
            "p",
            f"{plural(len(mask.sites), 'attention')} read",
            "s" if len(mask.sites) == 1 else None,
            " ",
            el("code", mask.mask),
            ".",
        )
        if mask.mask
        else el("p", plural(len(mask.sites), "attention"), ".")
    )
    if mask.sample is None:
        why = el("p", "Which blocks it leaves cannot be told: ", mask.reason or "no reason is known", ".")
        return el("figure", heading, el("figcaption", readers, why))
    division = _division(mask, sites)
    return el("figure", heading, _grid(ids, name, mask.sample, division), _caption(readers, mask.sample, division))


def _caption(readers: Html, sample: MaskSample, division: _Division | None) -> Html:
    cells = [share for row in sample.cells for share in row]
    empty = sum(share == 0 for share in cells)
    fed = f", computed from {', '.join(sample.fed)}" if sample.fed else ", computed from sizes alone"
    lines = [
        readers,
        el(
            "p",
            f"At S = {sample.length}, P = {sample.past}, T = {sample.total} without padding{fed}: ",
            el("b", f"{percent(sample.live / sample.pairs)} of all pairs are attended"),
            f"; {empty} of {len(cells)} cells of {sample.row_step} \u00d7 {sample.column_step} hold nothing.",
        ),
    ]
    if division is not None:
        blocks = _blocks(sample, division)
        read = sum((stop - first) * (bottom - top) for top, bottom, first, stop in blocks)
        what = f"{plural(len(blocks), 'query block')} of {division.rows}, "
        columns = -(-sample.total // division.columns)
        what += f"{plural(columns, 'key block')} of {division.columns}: " if columns > 1 else "keys in one block: "
        done = f"{percent(read / sample.pairs)} of all scores are computed"
        lines.append(el("p", what, el("b", done), f" (skip={division.skip})."))
        if len(blocks) > 1:
            rows = [
                el(
                    "tr",
                    el("td", f"{top}\u2013{bottom - 1}", class_="n"),
                    el("td", f"{first}\u2013{stop - 1}" if stop > first else "none", class_="n"),
                )
                for top, bottom, first, stop in blocks[:64]
            ]
            head = el(
                "tr", el("th", "queries", scope="col", class_="n"), el("th", "keys read", scope="col", class_="n")
            )
            table = el("table", el("thead", head), el("tbody", list(rows)))
            lines.append(
                el("details", el("summary", "Keys that each query block reads"), el("div", table, class_="inner"))
            )
    return el("figcaption", list(lines))


def _blocks(sample: MaskSample, division: _Division) -> list[tuple[int, int, int, int]]:
    """First row, row behind the last, first key and key behind the last of each query block."""
    found = []
    for top in range(0, sample.length, division.rows):
        bottom = min(top + division.rows, sample.length)
        first, stop = 0, sample.total
        if division.skip != "none":
            bands = sample.needed[top // sample.row_step : -(-bottom // sample.row_step)]
            used = [(low, high) for low, high in bands if high > low]
            first, stop = (min(low for low, _ in used), max(high for _, high in used)) if used else (0, 0)
            if division.skip != "trim":
                # Whole key blocks are computed or not.
                first = first // division.columns * division.columns
                stop = min(-(-stop // division.columns) * division.columns, sample.total)
        found.append((top, bottom, first, stop))
    return found


def _grid(ids: Ids, name: str, sample: MaskSample, division: _Division | None) -> Html:
    high = _SIDE if sample.length > 1 else 24
    parts: list[Html] = []

    def x(column: float) -> float:
        return _LEFT + _SIDE * min(column, sample.total) / sample.total

    def y(row: float) -> float:
        return _TOP + high * min(row, sample.length) / sample.length

    for number, row in enumerate(sample.cells):
        top, bottom = y(number * sample.row_step), y((number + 1) * sample.row_step)
        start = 0
        states = [_CLASSES[(share > 0) + (share == 1)] for share in row]
        for column in range(1, len(states) + 1):
            if column < len(states) and states[column] == states[start]:
                continue
            left, right = x(start * sample.column_step), x(column * sample.column_step)
            # A hair wider, so that no seam shows between neighbours.
            parts.append(
                el(
                    "rect",
                    x=left,
                    y=top,
                    width=right - left + 0.3,
                    height=bottom - top + 0.3,
                    class_=f"c-{states[start]}",
                )
            )
            start = column
    if division is not None:
        parts += [
            el("line", x1=_LEFT, x2=_LEFT + _SIDE, y1=y(row), y2=y(row), class_="blocks")
            for row in range(division.rows, sample.length, division.rows)
        ]
        parts += [
            el("line", x1=x(column), x2=x(column), y1=_TOP, y2=_TOP + high, class_="blocks")
            for column in range(division.columns, sample.total, division.columns)
        ]
        if division.skip != "none":
            parts += [
                el(
                    "rect",
                    x=x(first) + 1,
                    y=y(top) + 1,
                    width=max(x(stop) - x(first) - 2, 1),
                    height=max(y(bottom) - y(top) - 2, 1),
                    class_="needed",
                )
                for top, bottom, first, stop in _blocks(sample, division)
                if stop > first
            ]
    parts += [
        el("text", "keys", x=_LEFT + _SIDE / 2, y=12, text_anchor="middle", class_="soft"),
        el("text", 0, x=_LEFT, y=25, text_anchor="middle", class_="small soft"),
        el("text", sample.total, x=_LEFT + _SIDE, y=25, text_anchor="end", class_="small soft"),
        el("text", 0, x=_LEFT - 6, y=_TOP + 9, text_anchor="end", class_="small soft"),
    ]
    if sample.length > 1:
        parts.append(el("text", sample.length, x=_LEFT - 6, y=_TOP + high, text_anchor="end", class_="small soft"))
        turned = f"translate(12 {_TOP + high / 2:g}) rotate(-90)"
        parts.append(el("text", "queries", transform=turned, text_anchor="middle", class_="soft"))
    told = f"{percent(sample.live / sample.pairs)} of {sample.length} by {sample.total} pairs are attended."
    return drawing(ids, _LEFT + _SIDE + 8, _TOP + high + 10, f"Block grid of the mask: {name}", told, parts)
