"""``verify`` at depth ``outputs``: both models run on the same feeds, and everything that they return is compared."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.equivalence.coverage import coverage_warning, uncovered_kinds
from graphsurgery.equivalence.declared import declared_warnings
from graphsurgery.equivalence.feeds import Feed, LeftOut
from graphsurgery.equivalence.judging import Bench, Judgement, excuse, judge
from graphsurgery.equivalence.meeting import Meeting
from graphsurgery.equivalence.preparing import Prepared, prepare
from graphsurgery.equivalence.roles import Role
from graphsurgery.equivalence.running import LoadError, Settings, Store, declares_wrong_dims, run_all
from graphsurgery.equivalence.verify_report import FeedReport, OutputReport, VerifyReport
from graphsurgery.errors import CannotCheckError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.running import Model
    from graphsurgery.equivalence.verify import Progress

__all__ = ["verify_outputs"]

_NOT_SHARED = (
    "the reference declares one size for values that differ in size, on which ONNX Runtime fails:"
    " both models were run without sharing memory between values"
)


def verify_outputs(
    reference: Path,
    rewritten: Path,
    report: VerifyReport,
    given: Path | Mapping[str, Array] | None,
    *,
    memory: int | None,
    stack: ExitStack,
    progress: Progress | None,
    opt_level_check: bool,
) -> VerifyReport:
    """Run, compare, report.

    Args:
        reference: the model as exported.
        rewritten: the model held against it.
        report: with paths and seed; the rest is filled in.
        given: feeds; None for drawn ones.
        memory: bytes that may be used; None for what is available.
        stack: keeps temporary files for as long as the models run.
        progress: told after each feed.
        opt_level_check: run both at ONNX Runtime's default level too.

    Raises:
        UsageError: feeds do not fit.
        InputRefusedError: a file is no model.
        CannotCheckError: a model cannot run, or the reference runs on no feed.
    """
    prepared = prepare(reference, rewritten, memory, stack)
    return _Check(prepared, report, given, progress, opt_level_check).run()


class _Check(Meeting):
    """One verification: what is fed, what came out at each level, and the verdict."""

    def __init__(
        self,
        prepared: Prepared,
        report: VerifyReport,
        given: Path | Mapping[str, Array] | None,
        progress: Progress | None,
        opt_level_check: bool,
    ) -> None:
        super().__init__(prepared.protos, report.seed, given, prepared.notes, prepared.warnings)
        self.prepared, self.report, self.progress = prepared, report, progress
        self.opt_level_check = opt_level_check
        self.steps, self.done = len(self.feeds) * (4 if opt_level_check else 2), 0

    def run(self) -> VerifyReport:
        """Run, compare, report."""
        settings = self.prepared.settings
        changed = self.changed_inputs()
        if changed:
            return dataclasses.replace(self.report, status="different", reasons=(*self.reasons, *changed))
        with Store(self.prepared.kept_bytes) as first, Store(self.prepared.kept_bytes) as second:
            numbers = self._run_both(self.prepared.traced, settings, first, second)
            if not numbers and not self.reasons:
                raise CannotCheckError(self._nothing_ran())
            verdict = Judgement()
            if numbers:
                verdict = judge(self._bench(numbers, first, second, optimized=False, routers=True))
                self.warnings += declared_warnings(
                    (self.reference, self.rewritten),
                    {**self.rewritten.letters, **self.signature.letters},
                    self.pairing.pairs,
                    [(number, self.feeds[number]) for number in numbers],
                    (first, second),
                )
            outputs = list(verdict.outputs)
            self.notes += verdict.notes
            self.reasons += verdict.reasons
            if self.opt_level_check and not self.reasons:
                outputs += self._default_level(first)
        uncovered = self._uncovered(numbers)
        return dataclasses.replace(
            self.report,
            status="different" if self.reasons else "equal",
            uncovered=uncovered,
            reasons=tuple(self.reasons),
            threads=settings.threads,
            outputs=tuple(outputs),
            feeds=tuple(_feed_report(self.feeds[number]) for number in numbers),
            left_out=tuple(self.left_out),
            routers=tuple(router.name for router, _ in self.prepared.routers),
            tie_flips=verdict.tie_flips,
            routed_rows=verdict.routed_rows,
            excluded_rows=verdict.excluded_rows,
            warnings=tuple(self.warnings),
            notes=tuple(self.notes),
        )

    def _uncovered(self, numbers: list[int]) -> tuple[str, ...]:
        lost = [each.sizes for each in self.left_out if each.sizes is not None]
        kinds = uncovered_kinds([self.feeds[number].sizes for number in numbers], lost) if numbers else ()
        warning = coverage_warning(kinds)
        if warning:
            self.warnings.append(warning)
        return kinds

    def _nothing_ran(self) -> str:
        if not self.left_out:
            return f"No feed can be made for {self.report.reference}: its fixed sizes do not go together."
        last = self.left_out[-1]
        return f"{self.report.reference} ran on no feed; the last, {last.feed}: {last.reason}."

    def _step(self, what: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(what, self.done, self.steps)

    def _run_both(self, models: tuple[Model, Model], settings: Settings, first: Store, second: Store) -> list[int]:
        """Run the reference, then the rewritten model; numbers of the feeds that both ran on."""
        ours = [self._as_reference(feed) for feed in self.feeds]

        def step(name: str) -> None:
            self._step(f"reference {name}")

        failed = run_all(models[0], settings, ours, first, step)
        stale = [number for number, why in failed.items() if declares_wrong_dims(why)]
        if stale:
            if _NOT_SHARED not in self.warnings:
                self.warnings.append(_NOT_SHARED)
            settings = dataclasses.replace(settings, reuse=False)
            self.steps += len(stale)
            again = run_all(models[0], settings, [ours[number] for number in stale], first, step, stale)
            failed = {number: why for number, why in failed.items() if number not in stale} | again
        self.left_out += [
            LeftOut(self.feeds[n].name, f"the reference fails: {why}", self.feeds[n].sizes) for n, why in failed.items()
        ]
        if len(failed) == len(self.feeds):
            return []
        kept = [number for number in range(len(self.feeds)) if number not in failed]
        try:
            broken = run_all(
                models[1],
                settings,
                [self._as_rewritten(self.feeds[number]) for number in kept],
                second,
                lambda name: self._step(f"rewritten {name}"),
                kept,
            )
        except LoadError as error:
            if error.missing_op:
                raise
            # The reference loads, so the rewrite is at fault.
            self.reasons.append(str(error).rstrip("."))
            return []
        for number, why in list(broken.items())[:1]:
            more = f" (and on {len(broken) - 1} more feeds)" if len(broken) > 1 else ""
            self.reasons.append(f"the rewritten model fails on feed {self.feeds[number].name}: {why}{more}")
        return [number for number in kept if number not in broken]

    def _as_reference(self, feed: Feed) -> Feed:
        """Contracts speak of all rows: an input that drops rows is fed 0, which keeps them."""
        kept = [spec.name for spec in self.signature.having(Role.KEEP)]
        if not kept or not any(pair.contracts for pair in self.pairing.pairs):
            return feed

        def build() -> dict[str, Array]:
            arrays = feed.build()
            return arrays | {name: np.zeros_like(arrays[name]) for name in kept}

        return dataclasses.replace(feed, build=build)

    def _as_rewritten(self, feed: Feed) -> Feed:
        if not self.renamed:
            return feed

        def build() -> dict[str, Array]:
            arrays = feed.build()
            return arrays | {new: arrays[old] for new, old in self.renamed.items() if old in arrays}

        return dataclasses.replace(feed, build=build)

    def _bench(self, numbers: list[int], first: Store, second: Store, *, optimized: bool, routers: bool) -> Bench:
        return Bench(
            self.signature,
            self.feeds,
            numbers,
            self.pairing.pairs,
            first,
            second,
            optimized,
            self.reference.half,
            self.prepared.routers if routers else (),
        )

    def _default_level(self, plain: Store) -> list[OutputReport]:
        """Both at ONNX Runtime's default level, as users run them."""
        settings = dataclasses.replace(self.prepared.settings, optimized=True)
        left_out = len(self.left_out)
        with Store(self.prepared.kept_bytes) as first, Store(self.prepared.kept_bytes) as second:
            try:
                both = self._run_both(self.prepared.models, settings, first, second)
                bench = self._bench(both, first, second, optimized=True, routers=False)
                verdict = judge(bench) if both else Judgement()
                if verdict.reasons and self.prepared.routers:
                    # A choice may have flipped at a tie: look at the choices, which costs some fusions.
                    self.steps += 2 * len(self.feeds)
                    both = self._run_both(self.prepared.traced, settings, first, second)
                    bench = self._bench(both, first, second, optimized=True, routers=True)
                    verdict = judge(bench)
            except LoadError as error:
                self.warnings.append(f"not compared at ONNX Runtime's default level: {error}")
                return []
            excused = excuse(verdict, bench, plain)
        # Feeds that the reference takes at neither level are told once.
        known = {each.feed for each in self.left_out[:left_out]}
        self.warnings += [
            f"at ONNX Runtime's default level feed {each.feed} is left out: {each.reason}"
            for each in self.left_out[left_out:]
            if each.feed not in known
        ]
        del self.left_out[left_out:]
        if excused:
            self.warnings.append(excused)
        self.reasons += verdict.reasons
        return verdict.outputs


def _feed_report(feed: Feed) -> FeedReport:
    sizes = feed.sizes
    return FeedReport(feed.name, sizes.batch, sizes.length, sizes.past, sizes.padding)
