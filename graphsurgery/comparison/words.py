"""Sizes and percentages as reports write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.comparison.diff_report import Size

__all__ = ["bytes_text", "count_text", "size_text"]


def bytes_text(size: int) -> str:
    """``512 B``, ``14.1 KiB``, ``96.0 GiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def count_text(count: int) -> str:
    """The number."""
    return str(count)


def size_text(size: Size, form: Callable[[int], str]) -> str:
    """``118 -> 120 (+1.7 %)``; the value alone where nothing changed or one side is not known."""
    if size.before is None and size.after is None:
        return "-"
    if size.before is None or size.after is None:
        return form(size.after if size.before is None else size.before)  # type: ignore[arg-type]
    if size.before == size.after:
        return form(size.before)
    percent = size.percent
    growth = "new" if percent is None else f"{percent:+.1f} %"
    return f"{form(size.before)} -> {form(size.after)} ({growth})"
