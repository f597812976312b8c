"""The report as a table for a terminal and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from graphsurgery.benching.bench_report import Measurement

if TYPE_CHECKING:
    from rich.console import Console

    from graphsurgery.benching.bench_report import BenchReport, Creation, Row, Side
    from graphsurgery.benching.samples import Sample

__all__ = ["markdown", "render"]

_NONE = "-"


def _header(report: BenchReport) -> list[str]:
    sides = [""] if report.b is None else ["A ", "B "]
    header = ["model", "phase", "S", "P"]
    header += [f"{side}{what}" for side in sides for what in ("ms", "spread")]
    header += ["ratio"] if report.b is not None else []
    header += [f"{side}tok/s" for side in sides]
    header += [f"{side}over MiB" for side in sides] + [f"{side}peak MiB" for side in sides]
    return header + (["peak ratio"] if report.b is not None else []) + [""]


def _cells(row: Row) -> list[str]:
    sides = list(row.sides().values())
    cells = [row.model, row.point.phase, str(row.point.length), str(row.point.past)]
    for side in sides:
        cells += [_milliseconds(side), _spread(side)]
    cells += [_ratio(row.ratio("latency"))] if row.b is not None else []
    rates = [row.tokens_per_second(side) for side in sides]
    cells += [_NONE if rate is None else f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" for rate in rates]
    cells += [_mebibytes(side.over_bytes) if isinstance(side, Measurement) else _NONE for side in sides]
    cells += [_mebibytes(side.peak_bytes) if isinstance(side, Measurement) else _NONE for side in sides]
    cells += [_ratio(row.ratio("memory"))] if row.b is not None else []
    return [*cells, "noisy" if row.noisy else _absence(row)]


def _absence(row: Row) -> str:
    states = [side.status for side in row.sides().values() if not isinstance(side, Measurement)]
    return "failed" if "failed" in states else "n/a" if states else ""


def _milliseconds(side: Side) -> str:
    if not isinstance(side, Measurement):
        return _NONE
    value = side.latency.median * 1000
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}"


def _spread(side: Side) -> str:
    return f"{side.latency.spread:.0%}" if isinstance(side, Measurement) else _NONE


def _mebibytes(size: int | None) -> str:
    return _NONE if size is None else f"{size / 2**20:.1f}"


def _ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f}"


def _reasons(report: BenchReport) -> list[str]:
    """One line for each reason, with the points that have it."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for row in report.rows:
        for letter, side in row.sides().items():
            if not isinstance(side, Measurement):
                which = "" if row.b is None else f" ({letter.upper()})"
                found.setdefault((row.model, which, side.status, side.reason), []).append(row.point.name)
    return [
        f"{status}: {model}{which} at {', '.join(points)}: {reason}"
        for (model, which, status, reason), points in found.items()
    ]


def _creation(creation: Creation, several: bool) -> str:
    def told(sample: Sample | None) -> str:
        return _NONE if sample is None else f"{sample.median * 1000:.1f} ms (n={len(sample.values)})"

    who = f" of {creation.model}" if several else ""
    if creation.b is None:
        return f"session creation{who}: {told(creation.a)}"
    return f"session creation{who}: A {told(creation.a)}, B {told(creation.b)}, ratio {_ratio(creation.ratio)}"


def _remarks(report: BenchReport) -> list[str]:
    several = len(report.creations) > 1
    lines = [_creation(creation, several) for creation in report.creations]
    lines += _reasons(report)
    lines += [f"note: {note}" for note in report.notes]
    if report.interrupted:
        lines.append(f"interrupted: {len(report.rows)} of {report.planned} rows were measured")
    return lines


def _how(report: BenchReport) -> str:
    settings = report.settings
    return (
        f"{settings['provider']}, {settings['threads']} threads, batch {settings['batch']}, median of "
        f"{settings['runs']} runs after {settings['warmup']}"
    )


def render(report: BenchReport, console: Console) -> None:
    """A table with one row a point, then session creation and what was not measured."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(header := _header(report)):
        right = 2 <= number < len(header) - 1
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=number > 0)
    for row in report.rows:
        table.add_row(*(Text(cell) for cell in _cells(row)), style="yellow" if row.noisy else "")
    if report.b is not None:
        console.print(f"A {report.a}\nB {report.b}", soft_wrap=True)
    console.print(_how(report), soft_wrap=True)
    console.print(table)
    for line in _remarks(report):
        console.print(line, soft_wrap=True)


def markdown(report: BenchReport) -> str:
    """A heading, how it was measured, a table, and remarks."""
    names = f"`{report.a}`" if report.b is None else f"A `{report.a}`, B `{report.b}`"
    header = _header(report)
    last = len(header) - 1
    rule = ["---:" if 2 <= number < last else "---" for number in range(len(header))]
    lines = ["## Benchmark", "", f"{names}: {_how(report)}.", ""]
    lines += [f"| {' | '.join(header[:-1])} | |", f"|{'|'.join(rule)}|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(row))} |" for row in report.rows]
    remarks = [f"* {line}" for line in _remarks(report)]
    return "\n".join([*lines, *([""] if remarks else []), *remarks]) + "\n"
