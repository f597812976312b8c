"""Which blocks of (query, key) pairs a mask leaves, and between which blocks the attention is divided.

Alphabet: S query length, P past, T = P + S keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.html_report.drawing import drawing, key, legend
from graphsurgery.html_report.markup import Html, el, percent, plural, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.html_report.drawing import Ids
    from graphsurgery.picture.parts import MaskDivision, MaskPicture, MaskSample

__all__ = ["attention"]

_LEFT, _TOP, _SIDE = 44, 30, 262
_CLASSES = ("none", "part", "all")
_SHOWN = 12
_SHOWN_BLOCKS = 64
_SMALLEST = 4


def attention(ids: Ids, masks: Sequence[MaskPicture]) -> Html:
    """A figure for each mask."""
    if not masks:
        return el("p", "No attention was found.", class_="lede")
    figures = [_figure(ids, mask) for mask in masks]
    rest = figures[_SHOWN:]
    told = any(mask.sample for mask in masks)
    entries = [
        key(el("rect", x=1, y=1, width=14, height=14, class_="c-all"), "every pair attended"),
        key(el("rect", x=1, y=1, width=14, height=14, class_="c-part"), "some pairs attended"),
        key(el("rect", x=1, y=1, width=14, height=14, class_="c-none"), "none: the mask leaves nothing"),
    ]
    if any(mask.division for mask in masks):
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


def _figure(ids: Ids, mask: MaskPicture) -> Html:
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
    division = mask.division
    return el("figure", heading, _grid(ids, name, mask.sample, division), _caption(readers, mask.sample, division))


def _caption(readers: Html, sample: MaskSample, division: MaskDivision | None) -> Html:
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
        lines += _divided(sample, division)
    return el("figcaption", list(lines))


def _divided(sample: MaskSample, division: MaskDivision) -> list[Html]:
    """Blocks in words, and the keys of each in a folded table."""
    blocks = division.blocks
    keys = max((len(block.keys) for block in blocks), default=0)
    what = f"{plural(len(blocks), 'query block')}, at most {plural(keys, 'key block')} for each: "
    done = f"{percent(division.computed / sample.pairs)} of all scores are computed"
    lines = [el("p", what, el("b", done), f" (skip={division.skip}).")]
    if len(blocks) == 1 and keys <= 1:
        return lines
    rows = [
        el(
            "tr",
            el("td", _span(block.queries), class_="n"),
            el("td", ", ".join(map(_span, block.keys[:_SHOWN_BLOCKS])) or "none", class_="why"),
        )
        for block in blocks[:_SHOWN_BLOCKS]
    ]
    head = el("tr", el("th", "queries", scope="col", class_="n"), el("th", "keys", scope="col"))
    table = el(
        "div",
        el("table", el("thead", head), el("tbody", rows)),
        class_="scroll inner",
        tabindex=0,
        role="region",
        aria_label="keys of each query block",
    )
    return [*lines, el("details", el("summary", "Keys that each query block reads"), table)]


def _runs(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        found.append((found.pop()[0], stop) if found and found[-1][1] == start else (start, stop))
    return found


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]}\u2013{span[1] - 1}"


def _grid(ids: Ids, name: str, sample: MaskSample, division: MaskDivision | None) -> Html:
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
    for block in division.blocks if division is not None else ():
        top, bottom = y(block.queries[0]), y(block.queries[1])
        if block.queries[0]:
            parts.append(el("line", x1=_LEFT, x2=_LEFT + _SIDE, y1=top, y2=top, class_="blocks"))
        parts += [
            el("line", x1=x(start), x2=x(start), y1=top, y2=bottom, class_="blocks") for start, _ in block.keys if start
        ]
        for start, stop in _runs(block.keys):
            box = {"x": x(start) + 1, "y": top + 1, "width": x(stop) - x(start) - 2, "height": bottom - top - 2}
            if min(box["width"], box["height"]) > _SMALLEST:
                parts.append(el("rect", **box, class_="needed"))
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
