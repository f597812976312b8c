"""What drawings share: a titled SVG, the marks of a status, legends."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from graphsurgery.html_report.markup import Html, el

if TYPE_CHECKING:
    from graphsurgery.html_report.markup import Child
    from graphsurgery.site_report import Status

__all__ = ["GLYPHS", "STATUSES", "Ids", "badge", "drawing", "key", "legend"]

STATUSES: tuple[Status, ...] = ("rewritten", "skipped", "refused")
GLYPHS = {"rewritten": "\u2713", "skipped": "\u2013", "refused": "\u2715", "mixed": "\u00b1"}
"""Shapes besides colours, so that a status is told without either."""


class Ids:
    """Ids that are unique in one page."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def new(self, what: str) -> str:
        """An id that begins with ``what``."""
        return f"{what}-{next(self._numbers)}"


def drawing(ids: Ids, width: float, height: float, title: str, text: str, parts: list[Html]) -> Html:
    """An SVG with a title and a description, which say in words what it shows."""
    name, told = ids.new("title"), ids.new("desc")
    return el(
        "svg",
        el("title", title, id=name),
        el("desc", text, id=told),
        list(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_labelledby=f"{name} {told}",
    )


def badge(status: str) -> Html:
    """A status as a mark and a word."""
    glyph = {**GLYPHS, "equal": "\u2713", "different": "\u2715", "unchecked": "?"}.get(status, "")
    return el("span", el("span", glyph, aria_hidden="true"), f" {status}", class_=f"badge {status}")


def key(shape: Html, words: Child) -> Html:
    """An entry of a legend."""
    swatch = el("svg", shape, viewBox="0 0 16 16", width=16, height=16, aria_hidden="true", focusable="false")
    return el("li", swatch, el("span", words))


def legend(*entries: Html) -> Html:
    """A legend."""
    return el("ul", list(entries), class_="legend")
