"""Limits of ratios: ``latency=1.05,memory=1.10``."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from graphsurgery.benching.bench_report import METRICS
from graphsurgery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphsurgery.benching.bench_report import Row

__all__ = ["Gate", "parse_gates"]

_WORDS = {"latency": "median latency", "memory": "peak memory", "over": "memory over the loaded model"}


@dataclasses.dataclass(frozen=True)
class Gate:
    """B may take at most ``limit`` times what A takes, in every row."""

    metric: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric}={self.limit:g}"

    def worst(self, rows: Iterable[Row]) -> Row | None:
        """The row with the largest ratio; None where there is no ratio."""
        return max((row for row in rows if self.ratio(row) is not None), key=self._of, default=None)

    def ratio(self, row: Row) -> float | None:
        """The ratio of ``row`` that is held against the limit."""
        return row.ratio(self.metric)

    def _of(self, row: Row) -> float:
        return self.ratio(row) or 0.0

    def failure(self, rows: Iterable[Row]) -> str | None:
        """What is wrong with the worst row; None where it is within the limit."""
        row = self.worst(rows)
        if row is None or self._of(row) <= self.limit:
            return None
        noisy = ", a noisy row" if row.noisy else ""
        return (
            f"{row.model}, {row.point.name}: {_WORDS[self.metric]} of B is {self._of(row):.3f} times that of A "
            f"(gate {self.limit:g}{noisy})"
        )

    def to_data(self, rows: Iterable[Row]) -> dict[str, Any]:
        """For JSON."""
        row = self.worst(rows)
        return {
            "metric": self.metric,
            "limit": self.limit,
            "worst": None if row is None else round(self._of(row), 4),
            "model": None if row is None else row.model,
            "row": None if row is None else row.point.name,
            "holds": None if row is None else self._of(row) <= self.limit,
        }


def parse_gates(text: str) -> tuple[Gate, ...]:
    """Read ``latency=1.05,memory=1.10``.

    Raises:
        UsageError: something is no gate.

    Example:
        >>> parse_gates("latency=1.05")
        (Gate(metric='latency', limit=1.05),)
    """
    gates: dict[str, Gate] = {}
    for item in text.split(","):
        metric, equals, limit = (part.strip() for part in item.partition("="))
        if metric not in METRICS or not equals:
            raise UsageError(
                f"{item.strip()!r} is no gate: write one of {', '.join(METRICS)} and a ratio, as latency=1.05."
            )
        try:
            number = float(limit)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise UsageError(f"{limit!r} is no limit of a ratio: write a number above 0, as {metric}=1.05.")
        if metric in gates:
            raise UsageError(f"The gate {metric} is given twice: give it once.")
        gates[metric] = Gate(metric, number)
    return tuple(gates.values())
