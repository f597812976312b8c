"""``verify`` at depth ``regions``: what differs between the graphs is lifted out of both models and compared."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.equivalence.meeting import Meeting
from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.regions.checking import Checker, Found, fed_shapes
from graphsurgery.equivalence.regions.cutting import Surgeon
from graphsurgery.equivalence.regions.likeness import likeness
from graphsurgery.equivalence.regions.numbering import Matching, match
from graphsurgery.equivalence.regions.sides import Side, reads
from graphsurgery.equivalence.regions.sources import Sources, misplaced, miswritten
from graphsurgery.equivalence.running import Settings, available_memory, has_racing_scatter
from graphsurgery.equivalence.verify_report import FeedReport
from graphsurgery.errors import CannotCheckError
from graphsurgery.garbage import paused_gc
from graphsurgery.weight_spec import restored_proto

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from pathlib import Path

    import onnx_ir as ir

    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.regions.cutting import Region
    from graphsurgery.equivalence.verify import Progress
    from graphsurgery.equivalence.verify_report import VerifyReport

__all__ = ["verify_regions"]

_ASSUMED_MEMORY = 4 << 30
_ROUNDS = 12
_SUPPOSITIONS = 4
"""Rounds in which a difference behind a node without a name is taken to mean that it is another node."""


def verify_regions(
    reference: Path,
    rewritten: Path,
    report: VerifyReport,
    given: Path | Mapping[str, Array] | None = None,
    *,
    memory: int | None,
    real: bool,
    progress: Progress | None,
) -> VerifyReport:
    """Find what differs, run it, compare, report.

    Args:
        reference: the model as exported; its data file may be absent.
        rewritten: the model held against it.
        report: with paths and seed; the rest is filled in.
        given: feeds; None for drawn ones.
        memory: bytes that may be used; None for what is available.
        real: read the weights of regions from the data files.
        progress: told after each region.

    Raises:
        UsageError: feeds do not fit.
        InputRefusedError: a file is no model.
        CannotCheckError: the models take no common feed.
    """
    with paused_gc():
        return _Check(reference, rewritten, report, given, memory, real, progress).run()


class _Check:
    def __init__(
        self,
        reference: Path,
        rewritten: Path,
        report: VerifyReport,
        given: Path | Mapping[str, Array] | None,
        memory: int | None,
        real: bool,
        progress: Progress | None,
    ) -> None:
        protos = tuple(restored_proto(proto) or proto for proto in map(read_proto, (reference, rewritten)))
        self.report, self.progress, self.real = report, progress, real
        self.meeting = Meeting((protos[0], protos[1]), report.seed, given)
        racing = any(has_racing_scatter(proto) for proto in protos)
        self.settings = Settings(threads=1 if racing else 2)
        self.sides = (Side(reference, {}), Side(rewritten, self.meeting.renamed))
        budget = memory if memory is not None else available_memory() or _ASSUMED_MEMORY
        self.checker = Checker(
            self.meeting.signature,
            self.meeting.feeds,
            Sources(*self.sides, report.seed, real=real),
            self.settings,
            report.seed,
            budget,
        )
        self.known: dict[Hashable, Found] = {}

    def run(self) -> VerifyReport:
        meeting = self.meeting
        changed = meeting.changed_inputs()
        if changed:
            return dataclasses.replace(self.report, status="different", reasons=(*meeting.reasons, *changed))
        if not meeting.feeds:
            raise CannotCheckError("No feed fits the model's inputs, so that no region can be run.")
        shapes = [fed_shapes(feed, meeting.signature) for feed in meeting.feeds]
        for side in self.sides:
            side.bind(shapes)
        regions, found = self._rounds()
        reports = [item.report for item in found]
        reasons = [*meeting.reasons, *misplaced(*self.sides), *miswritten(*self.sides, real=self.real)]
        reasons += [item.message for item in reports if item.status == "different"]
        reasons += self._inexact(regions)
        unchecked = [item.message for item in reports if item.status == "unchecked"]
        warnings = list(meeting.warnings)
        warnings += [
            f"{item.report.where}: {item.report.rewritten!r} is zero or no number on every feed, which proves little"
            for item in found
            if item.vacuous and item.report.status == "equal"
        ]
        return dataclasses.replace(
            self.report,
            status="different" if reasons else "unchecked" if unchecked else "equal",
            reasons=tuple(reasons) or tuple(unchecked),
            threads=self.settings.threads,
            regions=tuple(reports),
            feeds=tuple(
                FeedReport(feed.name, feed.sizes.batch, feed.sizes.length, feed.sizes.past, feed.sizes.padding)
                for feed in meeting.feeds
            ),
            left_out=tuple(meeting.left_out),
            warnings=tuple(warnings),
            notes=(*meeting.notes, *self._notes()),
        )

    def _notes(self) -> list[str]:
        drawn = "read from the data files" if self.real else "random numbers where they are in data files"
        return [f"regions: weights are {drawn}"]

    def _rounds(self) -> tuple[dict[Hashable, list[Region]], list[Found]]:
        """Match, cut and run; where values turn out not to be counterparts, once more without taking them for such."""
        banned: set[tuple[str, str]] = set()
        closed: set[Hashable] = set()
        activations = self.sides[0].activations(self.meeting.signature)
        for number in range(_ROUNDS):
            # A chain of sizes would be told link by link: after a few, no integers are taken for counterparts.
            integers = number < _ROUNDS // 2
            matching = match(*self.sides, self.meeting.pairing.pairs, frozenset(banned), integers=integers)
            surgeon = Surgeon(self.sides, matching, activations)
            regions: dict[Hashable, list[Region]] = {}
            for obligation in matching.obligations:
                region = surgeon.region(obligation)
                regions.setdefault(likeness(region, matching), []).append(region)
            found: list[Found] = []
            again = False
            for done, (key, alike) in enumerate(regions.items()):
                if key not in self.known:
                    self.known[key] = self.checker.check(alike[0], matching, alike)
                each = self.known[key]
                if each.report.status == "different" and key not in closed:
                    closed.add(key)
                    each = self.known[key] = self._closed(each, alike, surgeon, matching, activations)
                each = dataclasses.replace(each, report=dataclasses.replace(each.report, alike=len(alike)))
                found.append(each)
                outputs = {value for side in self.sides for value in side.model.graph.outputs}
                if self._mistaken(each, alike[0], activations, number) and not any(
                    item.obligation.rewritten in outputs for item in alike
                ):
                    again = True
                    banned |= {
                        (item.obligation.reference.name or "", item.obligation.rewritten.name or "") for item in alike
                    }
                if self.progress is not None:
                    self.progress("regions", done + 1, len(regions))
            if not again:
                break
        return regions, found

    def _closed(
        self,
        found: Found,
        alike: list[Region],
        surgeon: Surgeon,
        matching: Matching,
        activations: frozenset[ir.Value],
    ) -> Found:
        """What comes of a region that differs once nothing in it is fed that the rest of it tells."""
        if found.other_shape or alike[0].obligation.supposed:
            return found
        region = surgeon.closed(alike[0], (activations, self.sides[1].activations(self.meeting.signature)))
        return found if region is None else self.checker.check(region, matching, alike)

    @staticmethod
    def _mistaken(found: Found, region: Region, activations: frozenset[ir.Value], number: int) -> bool:
        """Whether two values are no counterparts: of other shapes, sizes of what has other shapes, or not known to be.

        What reads them is compared in their place, so that an error in them is found there.
        """
        if found.other_shape:
            return True
        if region.obligation.supposed and found.report.status == "different" and number < _SUPPOSITIONS:
            return True
        root = region.obligation.reference
        return found.report.status == "different" and found.report.tolerance == 0 and root not in activations

    def _inexact(self, regions: Mapping[Hashable, list[Region]]) -> list[str]:
        """Outputs that are promised to be bitwise equal and depend on a region that is not."""
        loose: set[ir.Value] = {
            region.obligation.rewritten
            for key, alike in regions.items()
            if self.known[key].report.error and self.known[key].report.status == "equal"
            for region in alike
        }
        side = self.sides[1]
        for node in side.nodes:
            if any(value in loose for value in reads(node)):
                loose.update(node.outputs)
        outputs = {value.name: value for value in side.model.graph.outputs}
        return [
            f"output {pair.rewritten} is promised to be bitwise equal, and a region above it is only within tolerance"
            for pair in self.meeting.pairing.pairs
            if pair.exact and outputs[pair.rewritten] in loose
        ]
