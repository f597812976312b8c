"""The report as CSV: one line for each model and point, with the ratios on the lines of B."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from graphsurgery.benching.bench_report import METRICS, SCHEMA

if TYPE_CHECKING:
    from graphsurgery.benching.bench_report import BenchReport

__all__ = ["COLUMNS", "csv_text"]

COLUMNS = (
    "schema",
    "model",
    "side",
    "phase",
    "batch",
    "length",
    "past",
    "status",
    "reason",
    "latency_median",
    "latency_min",
    "latency_max",
    "latency_spread",
    "noisy",
    "tokens_per_second",
    "creation_seconds",
    "loaded_bytes",
    "load_peak_bytes",
    "peak_bytes",
    "over_bytes",
    "anonymous_bytes",
    "latency_ratio",
    "memory_ratio",
    "over_ratio",
)


def csv_text(report: BenchReport) -> str:
    """Columns as in :data:`COLUMNS`; empty where something is not known."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in report.rows:
        data = row.to_data()
        for letter in row.sides():
            side = data[letter]
            latency = side.pop("latency") or {}
            line = {key: data[key] for key in ("model", "phase", "batch", "length", "past")} | side
            line |= {f"latency_{key}": latency.get(key) for key in ("median", "min", "max", "spread")}
            ratios = data["ratios"] or {} if letter == "b" else {}
            line |= {f"{metric}_ratio": ratios.get(metric) for metric in METRICS}
            noisy = latency.get("noisy")
            writer.writerow(
                line | {"schema": SCHEMA, "side": letter, "noisy": "" if noisy is None else str(noisy).lower()}
            )
    return stream.getvalue()
