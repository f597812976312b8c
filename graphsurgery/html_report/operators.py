"""Operators before and after, and nodes pass by pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.html_report.drawing import drawing, key, legend
from graphsurgery.html_report.markup import Html, el, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.html_report.drawing import Ids
    from graphsurgery.picture.parts import OperatorCounts
    from graphsurgery.site_report import PassReport

__all__ = ["operators"]

_SHOWN = 14
_BAR = 120


def operators(ids: Ids, counts: Sequence[OperatorCounts], passes: Sequence[PassReport]) -> Html:
    """A line for each operator, those first that changed most; the rest folded."""
    before, after = counts[0].counts, counts[-1].counts
    names = sorted({**before, **after}, key=lambda name: (-abs(after.get(name, 0) - before.get(name, 0)), name))
    names.sort(key=lambda name: after.get(name, 0) == before.get(name, 0))
    if len(counts) == 1 or before == after:
        names = list(before)
    most = max([*before.values(), *after.values(), 1])
    compared = len(counts) > 1
    rows = [_row(ids, name, before.get(name, 0), after.get(name, 0), most, compared=compared) for name in names]
    rest = rows[_SHOWN:]
    return el(
        "div",
        _steps(passes, counts) if compared else None,
        legend(
            key(el("rect", x=1, y=4, width=14, height=8, rx=2, class_="a"), "before"),
            key(el("rect", x=1, y=4, width=14, height=8, rx=2, class_="b"), "after"),
        )
        if compared
        else None,
        _table(rows[:_SHOWN], compared=compared),
        el(
            "details",
            el("summary", plural(len(rest), "more operator")),
            el("div", _table(rest, compared=compared), class_="inner"),
        )
        if rest
        else None,
    )


def _table(rows: list[Html], *, compared: bool) -> Html:
    titles = ("operator", "before", "after", "change", "") if compared else ("operator", "count", "")
    head = el(
        "tr", [el("th", name, scope="col", class_="n" if name not in ("operator", "") else None) for name in titles]
    )
    table = el("table", el("thead", head), el("tbody", list(rows)), class_="tight")
    return el("div", table, class_="scroll", tabindex=0, role="region", aria_label="operator counts")


def _row(ids: Ids, name: str, before: int, after: int, most: int, *, compared: bool) -> Html:
    pair = (("a", before), ("b", after)) if compared else (("b", before),)
    bars = [
        el(
            "rect",
            x=0,
            y=1 + 8 * line,
            width=max(_BAR * count / most, 1.5 if count else 0),
            height=7,
            rx=1.5,
            class_=side,
        )
        for line, (side, count) in enumerate(pair)
    ]
    told = f"{before} before, {after} after" if compared else f"{before}"
    picture = drawing(ids, _BAR, 8 * len(pair) + 2, name, told, bars)
    change = after - before
    sign = _signed(change)
    numbers = [el("td", number, class_="n") for number in ((before, after, sign) if compared else (before,))]
    return el("tr", el("td", el("code", name)), list(numbers), el("td", picture))


def _signed(change: int) -> str:
    return f"+{change}" if change > 0 else f"\u2212{-change}" if change else "0"


def _steps(passes: Sequence[PassReport], counts: Sequence[OperatorCounts]) -> Html:
    start = sum(counts[0].counts.values())
    rows = [el("tr", el("td", "as read"), el("td", start, class_="n"), el("td", "", class_="n"))]
    for item in passes:
        change = item.nodes_after - item.nodes_before
        sign = _signed(change)
        rows.append(
            el(
                "tr",
                el("td", el("code", item.spec)),
                el("td", item.nodes_after, class_="n"),
                el("td", sign, class_="n"),
            )
        )
    head = el(
        "tr",
        el("th", "behind", scope="col"),
        el("th", "nodes", scope="col", class_="n"),
        el("th", "change", scope="col", class_="n"),
    )
    table = el("table", el("thead", head), el("tbody", list(rows)), class_="tight")
    return el("div", table, class_="scroll", tabindex=0, role="region", aria_label="nodes behind each pass")
