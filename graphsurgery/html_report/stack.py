"""The layers from the first to the last, and what each pass did in each of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.html_report.drawing import GLYPHS, STATUSES, badge, drawing, key, legend
from graphsurgery.html_report.markup import Html, el, plural, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.html_report.drawing import Ids
    from graphsurgery.picture.parts import Picture
    from graphsurgery.site_report import PassReport, SiteReport

__all__ = ["site_lists", "stack"]

_WIDTH, _LEFT, _ROW, _GAP = 360, 132, 26, 5
_LONG_RUN = 3
_OPENED_GROUPS = 4
_SHOWN_GROUPS = 40
_SHOWN_IDS = 200


@dataclasses.dataclass(frozen=True)
class _Slab:
    """Layers behind one another that are alike.

    Attributes:
        layers: their numbers; none for what is outside the layers.
        kinds: of their attention.
        cells: for each pass how many sites of each layer ended as rewritten, skipped and refused.
    """

    layers: tuple[int, ...]
    kinds: tuple[str, ...]
    cells: tuple[tuple[int, int, int], ...]

    @property
    def label(self) -> str:
        if not self.layers:
            return "outside layers"
        word = "layer" if len(self.layers) == 1 else "layers"
        return f"{word} {ranges(list(self.layers))}"


def stack(ids: Ids, passes: Sequence[PassReport], picture: Picture | None) -> Html:
    """The drawing, its legend and, in words, the passes that found nothing."""
    shown = [item for item in passes if item.sites]
    slabs = _slabs(shown, picture)
    idle = [item.spec for item in passes if not item.sites]
    notes = [el("p", f"Found no site of their kind: {', '.join(idle)}.", class_="note")] if idle else []
    if not shown:
        return el("div", el("p", "No pass found a site.", class_="lede"), notes)
    columns = el("ol", [el("li", el("code", item.spec)) for item in shown], class_="plain")
    entries = [key(_mark(status, 8, 8), status) for status in STATUSES]
    entries.append(key(_mark("mixed", 8, 8), "some of each"))
    entries.append(key(el("rect", x=1, y=3, width=14, height=10, rx=3, class_="none"), "no site"))
    return el(
        "div",
        legend(*entries),
        el("div", _draw(ids, slabs, shown), class_="scroll"),
        el("p", "Columns, from left to right:", class_="note"),
        columns,
        notes,
    )


def _slabs(passes: Sequence[PassReport], picture: Picture | None) -> list[_Slab]:
    kinds = {layer.number: layer.kinds for layer in picture.layers} if picture is not None else {}
    layers = sorted({*kinds, *(site.layer for item in passes for site in item.sites if site.layer is not None)})
    found: list[_Slab] = []
    for layer in layers:
        slab = _Slab((layer,), kinds.get(layer, ()), tuple(_cell(item, layer) for item in passes))
        if found and (found[-1].kinds, found[-1].cells) == (slab.kinds, slab.cells):
            slab = dataclasses.replace(slab, layers=(*found.pop().layers, layer))
        found.append(slab)
    # Short runs are drawn layer by layer, long ones as one pile.
    slabs = [
        part
        for slab in found
        for part in (
            [slab]
            if len(slab.layers) > _LONG_RUN
            else [dataclasses.replace(slab, layers=(layer,)) for layer in slab.layers]
        )
    ]
    outside = tuple(_cell(item, None) for item in passes)
    return slabs + ([_Slab((), (), outside)] if any(map(any, outside)) else [])


def _cell(item: PassReport, layer: int | None) -> tuple[int, int, int]:
    statuses = [site.status for site in item.sites if site.layer == layer]
    return statuses.count("rewritten"), statuses.count("skipped"), statuses.count("refused")


def _state(cell: tuple[int, int, int]) -> str | None:
    there = [status for status, count in zip(STATUSES, cell, strict=True) if count]
    return None if not there else there[0] if len(there) == 1 else "mixed"


def _mark(state: str, x: float, y: float) -> Html:
    box = el("rect", x=x - 8, y=y - 8, width=16, height=16, rx=4, class_=f"s-{state}")
    return Html(box + el("text", GLYPHS[state], x=x, y=y + 4.2, text_anchor="middle", class_="on"))


def _draw(ids: Ids, slabs: list[_Slab], passes: Sequence[PassReport]) -> Html:
    step = (_WIDTH - _LEFT - 8) / max(len(passes), 1)
    width = _WIDTH if step >= 22 else _LEFT + 8 + 22 * len(passes)
    step = max(step, 22)
    parts = [
        el("text", number + 1, x=_LEFT + step * (number + 0.5), y=14, text_anchor="middle", class_="soft strong")
        for number in range(len(passes))
    ]
    y, words = 22.0, []
    for slab in slabs:
        pile = len(slab.layers) > 1
        if pile:
            parts += [
                el("rect", x=4 + 3 * back, y=y + 3 * back, width=width - 14, height=_ROW, rx=6, class_="slab")
                for back in (2, 1)
            ]
        parts.append(el("rect", x=4, y=y, width=width - 14, height=_ROW, rx=6, class_="slab"))
        what = next((kind for kind in slab.kinds if kind != "causal"), "")
        parts.append(el("text", slab.label, x=12, y=y + (12 if what else 17), class_="small strong"))
        if what:
            count = f" \u00d7 {len(slab.layers)}" if pile else ""
            parts.append(el("text", f"{' '.join(slab.kinds)}{count}", x=12, y=y + 22.5, class_="small soft"))
        for number, cell in enumerate(slab.cells):
            x, state = _LEFT + step * (number + 0.5), _state(cell)
            if state is None:
                parts.append(el("rect", x=x - 7, y=y + _ROW / 2 - 5, width=14, height=10, rx=3, class_="none"))
                continue
            told = ", ".join(f"{count} {status}" for status, count in zip(STATUSES, cell, strict=True) if count)
            parts.append(el("g", el("title", f"{slab.label}, {passes[number].name}: {told}"), _mark(state, x, y + 13)))
            words.append(f"{slab.label}: {passes[number].name} {told}")
        y += _ROW + _GAP + (6 if pile else 0)
    return drawing(ids, width, y + 2, "Layers and what each pass did in them", "; ".join(words) + ".", parts)


# ---- lists ------------------------------------------------------------------------------------------------------------


def site_lists(passes: Sequence[PassReport], unusable: dict[str, str]) -> Html:
    """A folded list for each pass; sites that share status and reason are one line."""
    parts = [_pass(item) for item in passes if item.sites]
    parts += [
        el(
            "details",
            el("summary", el("code", name), " ", badge("refused")),
            el("div", el("p", reason), class_="inner"),
        )
        for name, reason in unusable.items()
    ]
    return el("div", list(parts))


def _pass(item: PassReport) -> Html:
    counts = [f"{item.count(status)} {status}" for status in STATUSES if item.count(status)]
    groups: dict[tuple[str, str, tuple[str, ...]], list[SiteReport]] = {}
    for site in item.sites:
        groups.setdefault((site.status, site.reason, site.kinds), []).append(site)
    rows = [_group(*key, sites) for key, sites in groups.items()]
    rest = rows[_SHOWN_GROUPS:]
    more = (
        el(
            "details",
            el("summary", f"{plural(len(rest), 'more line')}"),
            el("div", _table(rest), class_="inner"),
        )
        if rest
        else None
    )
    warnings = el("ul", [el("li", text) for text in item.warnings], class_="plain") if item.warnings else None
    return el(
        "details",
        el("summary", el("code", item.spec), " ", el("small", ", ".join(counts))),
        el("div", warnings, _table(rows[:_SHOWN_GROUPS]), more, class_="inner"),
        open=len(rows) <= _OPENED_GROUPS,
    )


def _table(rows: list[Html]) -> Html:
    head = el("tr", [el("th", name, scope="col") for name in ("sites", "status", "what and why")])
    table = el("table", el("thead", head), el("tbody", list(rows)))
    return el("div", table, class_="scroll", tabindex=0, role="region", aria_label="sites of this pass")


def _group(status: str, reason: str, kinds: tuple[str, ...], sites: list[SiteReport]) -> Html:
    layers = [site.layer for site in sites if site.layer is not None]
    where = f"layers {ranges(layers)}" if len(set(layers)) > 1 else f"layer {layers[0]}" if layers else ""
    if len(sites) == 1:
        named = el("div", el("code", sites[0].id), el("div", where, class_="note"))
    else:
        listed = [el("li", el("code", site.id)) for site in sites[:_SHOWN_IDS]]
        listed += [el("li", f"and {len(sites) - _SHOWN_IDS} more")] if len(sites) > _SHOWN_IDS else []
        summary = el("summary", plural(len(sites), "site"), f", {where}" if where else "")
        named = el("details", summary, el("div", el("ul", list(listed), class_="plain"), class_="inner"))
    detail = sites[0].detail
    about = [el("p", f"Kind: {', '.join(kinds)}", class_="note")] if kinds else []
    if detail:
        terms = [
            el("li", el("code", name), ": ", str(value)) for name, value in detail.items() if value not in ([], "")
        ]
        title = "details" if len(sites) == 1 else f"details of {sites[0].id}"
        about.append(
            el("details", el("summary", title), el("div", el("ul", list(terms), class_="plain"), class_="inner"))
        )
    return el(
        "tr",
        el("td", named, class_="id"),
        el("td", badge(status)),
        el("td", reason or "\u2013", list(about), class_="why"),
    )
