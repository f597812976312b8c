"""The report as Markdown for a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.comparison.words import bytes_text, count_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphsurgery.comparison.diff_report import DiffReport, Growth, ModelDiff, Severity

__all__ = ["markdown"]

_LINES = 20  # of one list
_DETAILED = 25  # models with lists: a comment on a pull request holds 65 thousand characters

_SEVERITY_MARKS: dict[Severity, str] = {"none": "⚪", "minor": "🔵", "moderate": "🟡", "major": "🔴"}
_GROWTH_MARKS: dict[Growth, str] = {"improvement": "🟢", "neutral": "", "warning": "⚠️", "blocking": "⛔"}


def markdown(report: DiffReport) -> str:
    """A heading, a table with one row a model, and folded lists of what changed."""
    lines = [
        f"## Graph diff: {_SEVERITY_MARKS[report.severity]} {report.severity}",
        "",
        f"{_code(report.a)} -> {_code(report.b)}",
        "",
        "| Model | Sub-model | Changes | Nodes | Graph | Weights | Status |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(model) for model in report.models]
    lines += ["", _verdict(report)]
    changed = [model for model in report.models if any(model.lists()) or model.notes]
    for model in changed[:_DETAILED]:
        lines += _details(model)
    if len(changed) > _DETAILED:
        lines += ["", f"Lists of {len(changed) - _DETAILED} more models were left out."]
    return "\n".join(lines) + "\n"


def _row(model: ModelDiff) -> str:
    cells = [_cell(model.model), _cell(model.submodel or "-"), _cell(model.changes())]
    for name, form in (("nodes", count_text), ("graph_bytes", bytes_text), ("weight_bytes", bytes_text)):
        size = model.sizes.get(name)
        text = "-" if size is None else size_text(size, form)
        mark = "" if size is None else _GROWTH_MARKS[size.growth]
        cells.append(f"{mark} {text}".strip())
    status = f"{_SEVERITY_MARKS[model.severity]} {model.severity}"
    if model.growth in ("warning", "blocking"):
        status += f", {_GROWTH_MARKS[model.growth]} {model.growth}"
    return f"| {' | '.join([*cells, status])} |"


def _verdict(report: DiffReport) -> str:
    for growth, what in (
        ("blocking", "⛔ Blocking: 10 % or more growth"),
        ("warning", "⚠️ Warning: 5 % or more growth"),
    ):
        names = [_cell(model.title) for model in report.models if model.growth == growth]
        if names:
            return f"{what} in {', '.join(names)}."
    return "No size or node count grew by 5 % or more."


def _details(model: ModelDiff) -> Iterator[str]:
    yield ""
    yield f"<details><summary>{_cell(model.title)}: {_cell(model.changes())}</summary>"
    for heading, listing in model.lists():
        yield ""
        yield f"**{heading}** ({listing.count})"
        yield ""
        for item in listing.items[:_LINES]:
            yield f"- {_code(str(item))}"
        if listing.count > _LINES:
            yield f"- and {listing.count - _LINES} more"
    if model.affected_outputs:
        yield ""
        yield f"Outputs affected: {', '.join(_code(name) for name in model.affected_outputs[:_LINES])}"
    if model.notes:
        yield ""
        for note in model.notes:
            yield f"- {_cell(note)}"
    yield ""
    yield "</details>"


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def _cell(text: str) -> str:
    """Text that neither ends a table cell nor starts markup."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    for mark in "\\|*_`[":
        plain = plain.replace(mark, f"\\{mark}")
    return plain
