"""HTML and SVG elements as text, in which whatever is not markup already is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Child", "Html", "el", "joined", "percent", "plural", "ranges"]

# Characters that a page must not hold, and those that turn the direction of what follows.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
_VOID = frozenset({"meta", "link", "br", "hr", "img"})
_SVG_EMPTY = frozenset({"rect", "line", "path", "circle", "polyline"})


class Html(str):
    """Text that is markup."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Sequence[Child] | None"


def _text(child: Child) -> str:
    if isinstance(child, Html):
        return child
    if isinstance(child, Sequence) and not isinstance(child, str):
        return "".join(_text(item) for item in child)
    if child is None:
        return ""
    return _HIDDEN.sub(_shown, str(child)).translate(_ESCAPES)


def _shown(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def el(name: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. Attributes: ``class_`` for ``class``, ``aria_label`` for ``aria-label``; None and False leave one out."""
    told = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-") if key not in ("viewBox",) else key
        told.append(f" {shown}" if value is True else f' {shown}="{_text(_number(value))}"')
    start = f"<{name}{''.join(told)}"
    if name in _VOID:
        return Html(f"{start}>")
    if name in _SVG_EMPTY and not children:
        return Html(f"{start}/>")
    return Html(f"{start}>{_text(list(children))}</{name}>")


def _number(value: str | float | bool) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def joined(parts: list[Html], between: str = "") -> Html:
    """Markup behind markup."""
    return Html(between.join(parts))


def percent(share: float) -> str:
    """A share for people: 0 % and 100 % only where it is so."""
    if 0 < share < 0.01:
        return "under 1\u00a0%"
    if 0.99 < share < 1:
        return "over 99\u00a0%"
    return f"{100 * share:.0f}\u00a0%"


def plural(count: int, word: str) -> str:
    """``1 site``, ``2 sites``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}".replace(",", "\u202f")


def ranges(numbers: list[int]) -> str:
    """``0-3, 7``, for a list of layers."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}\u2013{last}" for first, last in runs)
