"""Figures over several runs."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

__all__ = ["NOISY", "Sample"]

NOISY = 0.25
"""A sample whose spread is larger than this is marked as noisy."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The values of one figure over several runs, in the order in which they were measured; at least one."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)

    @property
    def spread(self) -> float:
        """Distance between the smallest and the largest, relative to the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    @property
    def noisy(self) -> bool:
        """Whether the spread is more than :data:`NOISY`."""
        return self.spread > NOISY

    def ratio(self, other: Sample) -> float:
        """Median over median."""
        return self.median / other.median

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "median": self.median,
            "min": self.low,
            "max": self.high,
            "spread": round(self.spread, 4),
            "noisy": self.noisy,
            "values": list(self.values),
        }
