"""What a benchmark found, and what it is as JSON.

Alphabet: B batch, S query length, P past.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from graphsurgery.benching.gates import Gate
    from graphsurgery.benching.points import Point
    from graphsurgery.benching.samples import Sample

__all__ = ["METRICS", "SCHEMA", "BenchReport", "Creation", "Measurement", "NotMeasured", "Row", "Side"]

SCHEMA = 1

METRICS = ("latency", "memory", "over")
"""What is compared: median latency, peak memory, and peak memory over the loaded model."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of one model at one point; bytes are None where the system does not tell.

    Attributes:
        latency: seconds of each run.
        creation_seconds: how long its session took to be made.
        loaded_bytes: resident memory with the model loaded, before the inputs are there.
        load_peak_bytes: the most while it was loaded.
        peak_bytes: the most while it ran, inputs and outputs included.
        anonymous_bytes: memory behind the runs that no file backs.
        peak_of_runs: whether the peaks count the runs alone; else they are those of the process from its beginning.
        first_peak_bytes: the most while it ran once, before ONNX Runtime has planned its memory; not in the report.
    """

    latency: Sample
    creation_seconds: float
    loaded_bytes: int | None
    load_peak_bytes: int | None
    peak_bytes: int | None
    anonymous_bytes: int | None
    peak_of_runs: bool
    first_peak_bytes: int | None = None

    @property
    def over_bytes(self) -> int | None:
        """What running takes beyond the loaded model; None where the peak may be that of loading."""
        return self._over(self.peak_bytes)

    @property
    def first_over_bytes(self) -> int | None:
        """What the first run takes beyond the loaded model; None where the peak may be that of loading."""
        return self._over(self.first_peak_bytes)

    def _over(self, peak: int | None) -> int | None:
        if self.loaded_bytes is None or peak is None or not self.peak_of_runs:
            return None
        return max(peak - self.loaded_bytes, 0)

    def metric(self, name: str) -> float | None:
        """One of :data:`METRICS`."""
        return {"latency": self.latency.median, "memory": self.peak_bytes, "over": self.over_bytes}[name]


@dataclasses.dataclass(frozen=True)
class NotMeasured:
    """Why there is no measurement: the model does not take these sizes, or it failed."""

    status: Literal["not applicable", "failed"]
    reason: str


Side = Measurement | NotMeasured


@dataclasses.dataclass(frozen=True)
class Row:
    """One point of one model, or of one pair of models; ``b`` is None where one model is measured alone."""

    model: str
    point: Point
    a: Side
    b: Side | None = None

    def sides(self) -> dict[str, Side]:
        """By the letter of the model."""
        return {"a": self.a} if self.b is None else {"a": self.a, "b": self.b}

    @property
    def noisy(self) -> bool:
        """Whether any latency spreads too far to be trusted."""
        return any(isinstance(side, Measurement) and side.latency.noisy for side in self.sides().values())

    def ratio(self, metric: str) -> float | None:
        """B over A; None where one of them is not known or A is 0."""
        if not isinstance(self.a, Measurement) or not isinstance(self.b, Measurement):
            return None
        ours, theirs = self.a.metric(metric), self.b.metric(metric)
        return theirs / ours if ours and theirs is not None else None

    def tokens_per_second(self, side: Side) -> float | None:
        """B*S over the median latency."""
        if not isinstance(side, Measurement) or not side.latency.median:
            return None
        return self.point.tokens / side.latency.median

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {metric: _rounded(self.ratio(metric)) for metric in METRICS}
        return {
            "model": self.model,
            "phase": self.point.phase,
            "batch": self.point.batch,
            "length": self.point.length,
            "past": self.point.past,
            "noisy": self.noisy,
            "a": self._side(self.a),
            "b": None if self.b is None else self._side(self.b),
            "ratios": None if self.b is None else ratios,
        }

    def _side(self, side: Side) -> dict[str, Any]:
        measured = side if isinstance(side, Measurement) else None
        return {
            "status": "measured" if isinstance(side, Measurement) else side.status,
            "reason": "" if isinstance(side, Measurement) else side.reason,
            "latency": measured.latency.to_data() if measured else None,
            "tokens_per_second": _rounded(self.tokens_per_second(side)),
            "creation_seconds": measured.creation_seconds if measured else None,
            "loaded_bytes": measured.loaded_bytes if measured else None,
            "load_peak_bytes": measured.load_peak_bytes if measured else None,
            "peak_bytes": measured.peak_bytes if measured else None,
            "over_bytes": measured.over_bytes if measured else None,
            "anonymous_bytes": measured.anonymous_bytes if measured else None,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclasses.dataclass(frozen=True)
class Creation:
    """How long sessions of one model, or of a pair, took to be made, in seconds, each in a new process."""

    model: str
    a: Sample | None
    b: Sample | None = None

    @property
    def ratio(self) -> float | None:
        """B over A."""
        return self.b.median / self.a.median if self.a and self.b and self.a.median else None

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        a, b = (None if sample is None else sample.to_data() for sample in (self.a, self.b))
        return {"model": self.model, "a": a, "b": b, "ratio": _rounded(self.ratio)}


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """What was measured, how, and whether the gates hold.

    Attributes:
        a: the path that was given first.
        b: the second; None where there is one.
        settings: provider, threads, runs, warmup, batch, seed and row.
        environment: date, machine and versions.
        rows: in the order in which they were measured.
        creations: session creation, one a model.
        gates: limits of ratios.
        notes: what was assumed or left out.
        planned: how many rows there were to be.
        interrupted: whether the user stopped it: ``rows`` are those done by then.
    """

    a: str
    b: str | None
    settings: dict[str, Any]
    environment: dict[str, Any]
    rows: tuple[Row, ...] = ()
    creations: tuple[Creation, ...] = ()
    gates: tuple[Gate, ...] = ()
    notes: tuple[str, ...] = ()
    planned: int = 0
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """130 interrupted, 1 a gate failed, 5 something could not be measured, else 0."""
        if self.interrupted:
            return 130
        if self.failure is not None:
            return 1
        return 5 if self.problem is not None else 0

    @property
    def failure(self) -> str | None:
        """One sentence about the gates that failed, with the worst row of each; None where all hold."""
        found = [text for gate in self.gates if (text := gate.failure(self.rows)) is not None]
        return f"{'; '.join(found)}." if found else None

    @property
    def problem(self) -> str | None:
        """One sentence about what could not be measured; None where everything was that the models take."""
        for row in self.rows:
            for letter, side in row.sides().items():
                if isinstance(side, NotMeasured) and side.status == "failed":
                    return f"{row.model} ({letter.upper()}), {row.point.name}, could not be measured: {side.reason}."
        for model in dict.fromkeys(row.model for row in self.rows):
            rows = [row for row in self.rows if row.model == model]
            for letter in rows[0].sides():
                sides = [row.sides()[letter] for row in rows]
                if not any(isinstance(side, Measurement) for side in sides):
                    side = sides[-1]
                    assert isinstance(side, NotMeasured)
                    return f"Nothing was measured of {model} ({letter.upper()}): {side.reason}; choose other sizes."
        for gate in self.gates:
            if all(row.ratio(gate.metric) is None for row in self.rows):
                return f"The gate {gate} could not be checked: no row has that ratio."
        return None

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "kind": "bench",
            "a": self.a,
            "b": self.b,
            "settings": self.settings,
            "environment": self.environment,
            "interrupted": self.interrupted,
            "planned": self.planned,
            "rows": [row.to_data() for row in self.rows],
            "creation": [creation.to_data() for creation in self.creations],
            "gates": [gate.to_data(self.rows) for gate in self.gates],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The document of docs/reports.md."""
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False) + "\n"

    def to_csv(self) -> str:
        """One line for each model and point."""
        from graphsurgery.benching.csv_form import csv_text

        return csv_text(self)

    def to_markdown(self) -> str:
        """For a pull request."""
        from graphsurgery.benching.tables import markdown

        return markdown(self)

    def to_svg(self) -> str:
        """Latency and peak memory over S, and over P for decode steps."""
        from graphsurgery.benching.plotting import svg

        return svg(self)

    def to_html(self) -> str:
        """The plot and the rows as one page for a person (:mod:`graphsurgery.html_report`)."""
        from graphsurgery.html_report import bench_page

        return bench_page(self)

    def render(self, console: Console) -> None:
        """Print a table."""
        from graphsurgery.benching.tables import render

        render(self, console)
