"""The report as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from graphsurgery.comparison.words import bytes_text, count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from graphsurgery.comparison.diff_report import DiffReport, ModelDiff

__all__ = ["render"]

_LINES = 8  # of one list, unless all are asked for
_STYLES = {
    "none": "green",
    "minor": "blue",
    "moderate": "yellow",
    "major": "red",
    "warning": "yellow",
    "blocking": "red",
    "improvement": "green",
    "neutral": "",
}


def render(report: DiffReport, console: Console, *, verbose: bool) -> None:
    """A table with one row a model, then what changed in each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "sub-model", "changes", "nodes", "graph", "weights", "status"):
        table.add_column(column, overflow="fold")
    for model in report.models:
        cells = [Text(model.model), Text(model.submodel or "-"), Text(model.changes())]
        for name, form in (("nodes", count_text), ("graph_bytes", bytes_text), ("weight_bytes", bytes_text)):
            size = model.sizes.get(name)
            text = "-" if size is None else size_text(size, form)
            cells.append(Text(text, style="" if size is None else _STYLES[size.growth]))
        status = Text(model.severity, style=_STYLES[model.severity])
        if model.growth in ("warning", "blocking"):
            status.append(f", {model.growth}", style=_STYLES[model.growth])
        table.add_row(*cells, status)
    console.print(table)
    for model in report.models:
        for line in _details(model, len(report.models) > 1, verbose=verbose):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"severity: {report.severity}", highlight=False, markup=False)


def _details(model: ModelDiff, named: bool, *, verbose: bool) -> list[str]:
    lines: list[str] = []
    for heading, listing in model.lists():
        shown = listing.items if verbose else listing.items[:_LINES]
        lines.append(f"{heading} ({listing.count}):")
        lines += [f"  {item}" for item in shown]
        if listing.count > len(shown):
            lines.append(f"  and {listing.count - len(shown)} more")
    operators = [f"{name} {ours} -> {theirs}" for name, (ours, theirs) in model.operators.items() if ours != theirs]
    if operators:
        lines.append(f"operators: {', '.join(operators if verbose else operators[:12])}")
    if model.affected_outputs:
        more = len(model.affected_outputs) - _LINES
        shown_names = model.affected_outputs if verbose or more <= 0 else model.affected_outputs[:_LINES]
        tail = "" if verbose or more <= 0 else f" and {more} more"
        lines.append(f"outputs affected: {', '.join(shown_names)}{tail}")
    lines += [f"note: {note}" for note in model.notes]
    if named and lines:
        lines.insert(0, f"{model.title}:")
    return lines
