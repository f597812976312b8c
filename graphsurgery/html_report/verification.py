"""What the verifier found: the verdict, how far each output is from its limit, and what was fed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from graphsurgery.html_report.drawing import badge, drawing
from graphsurgery.html_report.markup import Html, el, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphsurgery.html_report.drawing import Ids

__all__ = ["verification"]

_SHOWN = 12
_BAR = 150
_DECADES = 6
_SHARE = "error against its limit (logarithmic)"
_OUTPUT = ("output", "level", "worst feed", "error", "limit", _SHARE)
_REGION = ("region", "status", "nodes", "error", "limit", _SHARE)
_NUMBERS = frozenset({"nodes", "error", "limit"})


def verification(ids: Ids, found: Mapping[str, Any] | None) -> Html:
    """The verifier's report, from its JSON form."""
    if found is None:
        return el("p", "The result was not verified: run with ", el("code", "--verify"), ".", class_="lede")
    outputs = list(found.get("outputs", ()))
    # The worst first: whoever looks for trouble finds it at once.
    outputs.sort(key=lambda item: -_ratio(item))
    rows = [_row(ids, item) for item in outputs]
    rest = rows[_SHOWN:]
    depth = {
        "outputs": "whole models, output by output",
        "generate": "decoding, step by step",
        "regions": "each rewritten region on its own",
    }
    facts = f"Depth {found.get('depth')} ({depth.get(str(found.get('depth')), '')}), seed {found.get('seed')}, {plural(len(found.get('feeds', ())), 'feed')}, {plural(len(found.get('prompts', ())), 'prompt')}, {plural(int(found.get('tie_flips', 0)), 'tie flip')}."
    return el(
        "div",
        el("p", badge(str(found.get("status", "unchecked"))), " ", facts, class_="lede"),
        _listed("Why", found.get("reasons", ()), opened=True),
        _table(rows[:_SHOWN]) if rows else None,
        el("details", el("summary", plural(len(rest), "more output")), el("div", _table(rest), class_="inner"))
        if rest
        else None,
        _regions(ids, found.get("regions", ())),
        _listed("Tokens that differ", [_token(item) for item in found.get("token_differences", ())], opened=True),
        _listed("Warnings", found.get("warnings", ()), opened=True),
        _listed("Feeds", [_feed(item) for item in found.get("feeds", ())]),
        _listed("Left out", [f"{item.get('feed')}: {item.get('reason')}" for item in found.get("left_out", ())]),
        _listed("Assumed", found.get("notes", ())),
    )


def _regions(ids: Ids, found: Sequence[Mapping[str, Any]]) -> Html | None:
    """The regions that were lifted out of both models, worst first."""
    if not found:
        return None
    rows = [_region(ids, item) for item in sorted(found, key=lambda item: -_ratio(item))]
    rest = rows[_SHOWN:]
    more = el(
        "details", el("summary", plural(len(rest), "more region")), el("div", _table(rest, _REGION), class_="inner")
    )
    return el("div", _table(rows[:_SHOWN], _REGION), more if rest else None)


def _region(ids: Ids, item: Mapping[str, Any]) -> Html:
    before, after = item.get("nodes") or ("?", "?")
    sites = [str(name) for name in item.get("sites", ())]
    alike = f"{plural(int(item.get('alike', 1)), 'region')} alike: " if item.get("alike", 1) > 1 else ""
    return el(
        "tr",
        el(
            "td",
            el("code", str(item.get("rewritten"))),
            el("div", alike, ", ".join(sites[:_SHOWN]), class_="note"),
            class_="name",
        ),
        el("td", badge(str(item.get("status", "unchecked")))),
        el("td", f"{before} \u2192 {after}", class_="n"),
        el("td", _told(item.get("error")), class_="n"),
        el("td", _told(item.get("tolerance")), class_="n"),
        _bar(ids, item, str(item.get("rewritten"))),
    )


def _token(item: Mapping[str, Any]) -> str:
    kind = "a tie" if item.get("tie") else "no tie"
    where = f"{item.get('prompt')}, row {item.get('row')}, token {item.get('token')}"
    return f"{where}: {kind}, a gap of {_told(item.get('gap'))} where {_told(item.get('limit'))} is the limit"


def _feed(item: Mapping[str, Any]) -> str:
    return f"{item.get('name')}: batch {item.get('batch')}, S {item.get('length')}, P {item.get('past')}, padding {item.get('padding')}"


def _listed(title: str, texts: Sequence[str], *, opened: bool = False) -> Html | None:
    if not texts:
        return None
    items = el("ul", [el("li", text) for text in texts], class_="plain")
    return el(
        "details", el("summary", f"{title} ", el("small", len(texts))), el("div", items, class_="inner"), open=opened
    )


def _table(rows: list[Html], titles: Sequence[str] = _OUTPUT) -> Html:
    head = el("tr", [el("th", name, scope="col", class_="n" if name in _NUMBERS else None) for name in titles])
    table = el("table", el("thead", head), el("tbody", list(rows)))
    return el("div", table, class_="scroll", tabindex=0, role="region", aria_label="outputs compared")


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type] # numbers that are none are text
    except (TypeError, ValueError):
        return math.nan


def _ratio(item: Mapping[str, Any]) -> float:
    error, limit = _number(item.get("error")), _number(item.get("tolerance"))
    if item.get("problem") or math.isnan(error):
        return math.inf
    return error / limit if limit > 0 else (math.inf if error > 0 else 0.0)


def _row(ids: Ids, item: Mapping[str, Any]) -> Html:
    name = str(item.get("name"))
    shown = [el("code", name)]
    if item.get("rewritten") not in (name, None, ""):
        shown.append(el("div", "now ", el("code", str(item.get("rewritten"))), class_="note"))
    return el(
        "tr",
        el("td", list(shown), class_="name"),
        el("td", str(item.get("level", ""))),
        el("td", str(item.get("feed", ""))),
        el("td", _told(item.get("error")), class_="n"),
        el("td", "every bit" if _number(item.get("tolerance")) == 0 else _told(item.get("tolerance")), class_="n"),
        _bar(ids, item, name),
    )


def _bar(ids: Ids, item: Mapping[str, Any], name: str) -> Html:
    """A cell with the error as a bar, the limit as a mark, and both in words."""
    if item.get("error") is None:
        return el("td", str(item.get("problem") or "not measured"))
    ratio = _ratio(item)
    bitwise = _number(item.get("tolerance")) == 0
    over = ratio > 1
    share = 1.12 if over else 0.0 if ratio <= 0 else max(0.02, 1 + math.log10(ratio) / _DECADES)
    limit = _BAR / 1.2
    parts = [
        el(
            "rect", x=0, y=5, width=max(min(share, 1.16) * limit, 2), height=8, rx=2, class_="over" if over else "under"
        ),
        el("line", x1=limit, x2=limit, y1=1, y2=17, class_="limit"),
    ]
    words = item.get("problem") or (
        "bitwise equal" if bitwise else "equal" if ratio <= 0 else f"{ratio:.2g} of its limit"
    )
    picture = drawing(ids, _BAR, 18, f"Error of {name}", f"{words}.", parts)
    return el("td", picture, el("span", str(words), class_="note"))


def _told(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else "\u2013" if value is None else str(value)
