"""What was found of one region, and of all regions that are like it."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["RegionReport"]

_SITES = 3


@dataclasses.dataclass(frozen=True)
class RegionReport:
    """The feed on which a region fared worst.

    Attributes:
        reference: the value of the reference.
        rewritten: the value of the rewritten model that has to be equal.
        reader: what reads it: a node or an output.
        passes: the pass that made the last of its nodes that a pass made, then those that made others; where there are
            no such nodes, all passes that made the rewritten model.
        sites: the site for each of ``passes``; empty where no node tells.
        status: ``equal``, ``different`` or ``unchecked``.
        alike: number of regions that are like it, itself included: they were not run.
        nodes: nodes of the region in the reference and in the rewritten model.
        cuts: values that were fed random numbers.
        feeds: feeds that it ran on.
        error: max|a - b| / max(1, max|a|); inf where there is no distance.
        tolerance: largest error that passes; 0 where every bit must be equal.
        dtype: of the value.
        feed: the feed.
        index: the element; None where the value as a whole differs.
        problem: one clause; None where it is equal.
    """

    reference: str
    rewritten: str
    reader: str
    passes: tuple[str, ...]
    sites: tuple[str, ...]
    status: Literal["equal", "different", "unchecked"]
    alike: int
    nodes: tuple[int, int]
    cuts: int
    feeds: int
    error: float
    tolerance: float
    dtype: str
    feed: str
    index: tuple[int, ...] | None
    problem: str | None

    @property
    def where(self) -> str:
        """Pass and site, as far as they are known."""
        if not self.passes:
            return "no pass is known to have been here"
        if not self.sites:
            return " or ".join(self.passes)
        places = [f"{name} at {site}" for name, site in zip(self.passes, self.sites, strict=True)]
        if len(places) == 1:
            return places[0]
        more = f" and {len(places) - 1 - _SITES} others" if len(places) - 1 > _SITES else ""
        return f"{places[0]} (with nodes of {', '.join(places[1 : 1 + _SITES])}{more})"

    @property
    def message(self) -> str:
        """One sentence without its full stop: pass, site, values, and what is wrong."""
        more = f" (and {self.alike - 1} regions like it)" if self.alike > 1 else ""
        if self.status == "unchecked":
            return f"{self.where}: {self.rewritten!r} could not be checked: {self.problem}{more}"
        what = f"it {self.problem}"
        if self.index is not None and "at [" not in what:
            what = f"{what}, at {list(self.index)}"
        return (
            f"{self.where}: {self.rewritten!r}, read by {self.reader}, is not what {self.reference!r} is: "
            f"{what} on feed {self.feed}{more}"
        )
