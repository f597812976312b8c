"""The report as one SVG file: latency and peak memory over S, and over P for decode steps, both axes logarithmic.

Colours are legible on light and on dark ground, and follow the reader's preference where the viewer knows it; the models
differ in their marks too. Nothing is loaded from elsewhere.

Alphabet: S query length, P past.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape

from graphsurgery.benching.bench_report import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.benching.bench_report import BenchReport, Row
    from graphsurgery.benching.points import Phase

__all__ = ["svg"]

_WIDTH, _HEIGHT = 400, 280  # of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 16, 34, 44  # its margins
_HEAD = 76  # title and legend

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-size: 15px; font-weight: 600 }
.panel { font-weight: 600 }
.grid { stroke: #888; stroke-opacity: .25 }
.frame { stroke: #888; fill: none }
.a { stroke: #1f6feb; fill: #1f6feb }
.b { stroke: #d1540b; fill: #d1540b }
polyline { fill: none !important; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  svg { background: #16191d }
  text { fill: #ddd }
  .a { stroke: #6cb0ff; fill: #6cb0ff }
  .b { stroke: #ff9d57; fill: #ff9d57 }
}
"""

_Letter = Literal["a", "b"]


@dataclasses.dataclass(frozen=True)
class _Dot:
    """A value and the range of its runs."""

    x: float
    y: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class _Panel:
    """One diagram."""

    title: str
    across: str
    unit: str
    series: dict[_Letter, list[_Dot]]

    def span(self, axis: Literal["x", "y"]) -> tuple[float, float]:
        """Ends of an axis, around everything that is drawn."""
        dots = [dot for dots in self.series.values() for dot in dots]
        found = [dot.x for dot in dots] if axis == "x" else [end for dot in dots for end in (dot.low, dot.high)]
        low, high = min(found), max(found)
        room = 1.1 if axis == "x" else 1.15
        if high / low < 1.5:
            room = 1.5
        return low / room, high * room


def svg(report: BenchReport) -> str:
    """A panel for latency and one for peak memory in each line: one line for each model and phase that was measured."""
    lines: list[list[_Panel]] = []
    models = list(dict.fromkeys(row.model for row in report.rows))
    for model in models:
        for phase in ("prefill", "decode"):
            rows = [row for row in report.rows if row.model == model and row.point.phase == phase]
            who = model if len(models) > 1 else ""
            panels = [panel for panel in _panels(rows, phase, who) if any(panel.series.values())]
            lines += [panels] if panels else []
    width = 2 * _WIDTH
    height = _HEAD + _HEIGHT * len(lines) if lines else _HEAD + 30
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(_title(report))}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="16" y="24">{escape(_title(report))}</text>',
        *_legend(report),
    ]
    if not lines:
        parts.append(f'<text x="16" y="{_HEAD + 14}">nothing was measured</text>')
    for down, panels in enumerate(lines):
        for along, panel in enumerate(panels):
            parts.append(f'<g transform="translate({along * _WIDTH} {_HEAD + down * _HEIGHT})">')
            parts += [*_draw(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(report: BenchReport) -> str:
    settings = report.settings
    return f"Latency and peak memory: {settings['provider']}, {settings['threads']} threads, batch {settings['batch']}"


def _legend(report: BenchReport) -> list[str]:
    names: dict[_Letter, str] = {"a": report.a} if report.b is None else {"a": report.a, "b": report.b}
    lines = []
    for number, (letter, name) in enumerate(names.items()):
        y = 46 + 18 * number
        lines.append(_mark(letter, 24, y - 4))
        lines.append(f'<text x="36" y="{y}">{letter.upper()} {escape(name)}</text>')
    return lines


def _panels(rows: Sequence[Row], phase: Phase, who: str) -> list[_Panel]:
    what = f"{who}, {phase}" if who else phase
    across = "S, tokens" if phase == "prefill" else "P, tokens"
    latency: dict[_Letter, list[_Dot]] = {"a": [], "b": []}
    memory: dict[_Letter, list[_Dot]] = {"a": [], "b": []}
    for row in rows:
        sides: dict[_Letter, object] = {"a": row.a, "b": row.b}
        for letter, side in sides.items():
            if not isinstance(side, Measurement) or side.latency.low <= 0:
                continue
            times = [1000 * value for value in (side.latency.median, side.latency.low, side.latency.high)]
            latency[letter].append(_Dot(row.point.size, *times))
            if side.peak_bytes:
                size = side.peak_bytes / 2**20
                memory[letter].append(_Dot(row.point.size, size, size, size))
    return [
        _Panel(f"Latency, {what}", across, "ms", latency),
        _Panel(f"Peak memory, {what}", across, "MiB", memory),
    ]


def _draw(panel: _Panel) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    spans = {"x": panel.span("x"), "y": panel.span("y")}

    def x(value: float) -> float:
        return _LEFT + _share(value, spans["x"]) * (right - _LEFT)

    def y(value: float) -> float:
        return bottom - _share(value, spans["y"]) * (bottom - _TOP)

    parts = [f'<text class="panel" x="{_LEFT}" y="{_TOP - 10}">{escape(panel.title)}</text>']
    for value in sorted({dot.x for dots in panel.series.values() for dot in dots}):
        parts.append(f'<line class="grid" x1="{x(value):.1f}" y1="{_TOP}" x2="{x(value):.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(*spans["y"]):
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}"/>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text x="{(_LEFT + right) / 2:.1f}" y="{bottom + 34}" text-anchor="middle">{panel.across}</text>')
    parts.append(f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">{panel.unit}</text>')
    for letter, dots in panel.series.items():
        line = sorted(dots, key=lambda dot: dot.x)
        if line:
            joined = " ".join(f"{x(dot.x):.1f},{y(dot.y):.1f}" for dot in line)
            parts.append(f'<polyline class="{letter}" points="{joined}"/>')
        for dot in line:
            if dot.low != dot.high:
                ends = f'y1="{y(dot.low):.1f}" y2="{y(dot.high):.1f}"'
                parts.append(f'<line class="{letter}" x1="{x(dot.x):.1f}" x2="{x(dot.x):.1f}" {ends}/>')
            parts.append(_mark(letter, x(dot.x), y(dot.y), f"{letter.upper()}: {dot.y:.4g} {panel.unit} at {dot.x:g}"))
    return parts


def _share(value: float, span: tuple[float, float]) -> float:
    low, high = (math.log(end) for end in span)
    return (math.log(value) - low) / (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within the axis, between two and eight where it can be."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits in (
        (1,),
        (1, 3),
        (1, 2, 5),
        tuple(n / 10 for n in range(10, 100, 5)),
        tuple(n / 20 for n in range(20, 200)),
    ):
        found = [
            value
            for power in range(first, last + 1)
            for digit in digits
            if low <= (value := float(f"{digit * 10.0**power:.6g}")) <= high
        ]
        if len(found) >= 3:
            return found[:: math.ceil(len(found) / 8)]
    return found


def _mark(letter: _Letter, x: float, y: float, told: str = "") -> str:
    """A disc for A, a square for B."""
    hint = f"<title>{escape(told)}</title>" if told else ""
    if letter == "a":
        return f'<circle class="a" cx="{x:.1f}" cy="{y:.1f}" r="4">{hint}</circle>'
    return f'<rect class="b" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">{hint}</rect>'
