"""Judging what two models decoded: tokens and their near-ties, logits, caches, and the choices of experts.

Alphabet: B batch, S query length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from graphsurgery.equivalence.comparing import Comparison, compare, scale_of, tolerance
from graphsurgery.equivalence.generation_report import TokenDifference, TopTwo
from graphsurgery.equivalence.handover import Manner
from graphsurgery.equivalence.judging import too_many_ties
from graphsurgery.equivalence.routers import Flips, compare_choices
from graphsurgery.equivalence.verify_report import OutputReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphsurgery.equivalence.decoding import Decoder
    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.generation import CallRecord, Trace
    from graphsurgery.equivalence.kept import Kept
    from graphsurgery.equivalence.layouts import Party, Plan, Prompt
    from graphsurgery.equivalence.routers import Router

__all__ = ["GenerationJudge", "RouterPairs"]

RouterPairs = tuple["Sequence[tuple[Router, Router]]", "Sequence[tuple[Router, Router]]"]
"""Matched routers of the files for the prompt, and of the files for the steps."""

Level = Literal["disabled", "default"]


class GenerationJudge:
    """Gathers the verdict on one level, prompt by prompt.

    Attributes:
        outputs: for each output the prompt on which it fared worst.
        differences: where tokens first differ, ties included.
        problems: what is wrong besides outputs, one clause each.
        tie_flips: rows whose choice of experts flipped at a tie; a row of the same tokens counts once.
        routed_rows: rows whose choice was compared.
        excluded_rows: token rows left out because they depend on a tie flip.
        shift: how far ONNX Runtime's own fusions move the reference where that explains a difference.
        unrouted: prompts whose choices of experts could not be compared, for the calls are not alike.
    """

    def __init__(self, parties: tuple[Party, Party], routers: RouterPairs, *, optimized: bool, half: bool) -> None:
        self._parties, self._routers = parties, routers
        self._optimized, self._half = optimized, half
        self._level: Level = "default" if optimized else "disabled"
        self._worst: dict[str, tuple[tuple[bool, float], OutputReport]] = {}
        self.differences: list[TokenDifference] = []
        self.problems: list[str] = []
        self.tie_flips = self.routed_rows = self.excluded_rows = 0
        self._flipped: set[tuple[int, ...]] = set()
        self.shift = 0.0
        self.unrouted: list[str] = []

    @property
    def outputs(self) -> list[OutputReport]:
        """See above."""
        return [report for _, report in self._worst.values()]

    @property
    def reasons(self) -> list[str]:
        """What is wrong, one sentence each."""
        found = list(self.problems)
        many = too_many_ties(self.tie_flips, self.routed_rows)
        found += [many] if many else []
        found += [_token_reason(each) for each in self.differences if not each.tie][:3]
        behind = " at ONNX Runtime's default level" if self._optimized else ""
        for report in self.outputs:
            if report.problem is not None:
                seed = "" if report.seed is None else f", seed {report.seed}"
                found.append(f"output {report.rewritten} {report.problem} (prompt {report.feed}{seed}){behind}")
        return found

    def take(self, prompt: Prompt, plan: Plan, traces: tuple[Trace, Trace], plain: Trace | None = None) -> None:
        """Compare what both decoded behind one prompt.

        Args:
            prompt: the prompt.
            plan: how it was fed.
            traces: of the reference and of the rewritten model.
            plain: at the default level, what the reference computes with graph optimisations disabled.
        """
        depends = self._choices(prompt, plan, traces)
        first, second = traces
        for number, (ours, theirs) in enumerate(zip(first.logits, second.logits, strict=True)):
            excluded = first.picked[number] >= depends
            limit = tolerance(ours.dtype, half=self._half, optimized=self._optimized)
            found = compare(ours, theirs, limit, excluded=excluded[:, None])
            # Whatever the runtime's own fusions move proves nothing.
            shifted = self._excused(found, None if plain is None else plain.logits[number], ours)
            found = dataclasses.replace(found, problem=None) if shifted else found
            self._note(self._names(None), found, prompt, f"token {number}")
            if ours.shape == theirs.shape:
                self._tokens(prompt, number, (first, second), limit, excluded | shifted)
        self._caches(prompt, plan, traces, depends, plain)

    # ---- tokens -------------------------------------------------------------------------------------------------------

    def _tokens(self, prompt: Prompt, number: int, traces: tuple[Trace, Trace], limit: float, skip: Array) -> None:
        first, second = traces
        ours, theirs = first.logits[number], second.logits[number]
        told = {(each.prompt, each.row, each.tie) for each in self.differences}
        for row in np.flatnonzero((first.own[number] != second.own[number]) & ~skip).tolist():
            ranked = _top_two(ours[row]), _top_two(theirs[row])
            a, b = int(first.own[number][row]), int(second.own[number][row])
            gap = float(ours[row, a]) - float(ours[row, b])
            finite = np.isfinite(ours[row])
            bound = limit * scale_of(ours[row].astype(np.float64), theirs[row].astype(np.float64), finite)
            tie = bool(gap < bound)
            # The first of each row, and the first that is no tie.
            if (prompt.name, row, tie) in told or (tie and (prompt.name, row, False) in told):
                continue
            self.differences.append(TokenDifference(prompt.name, row, number, self._level, *ranked, gap, bound, tie))

    # ---- caches -------------------------------------------------------------------------------------------------------

    def _caches(
        self, prompt: Prompt, plan: Plan, traces: tuple[Trace, Trace], depends: Array, plain: Trace | None
    ) -> None:
        first, second = (trace.kept for trace in traces)
        anew = any(party.anew for party in self._parties)
        manners = {
            cache.key: cache.manner for party in self._parties for cache in (*party.prompt.caches, *party.step.caches)
        }
        for key, ours in first.items():
            if manners[key] in (Manner.COUNTER, Manner.CONSTANT) and not plan.alike:
                continue
            theirs = second.get(key)
            if theirs is None:
                if not anew:
                    self.problems.append(f"the rewritten model hands on no {key} (prompt {prompt.name})")
                continue
            limit = tolerance(ours.array.dtype, half=self._half, optimized=self._optimized)
            found = _compare_kept(ours, theirs, limit, depends)
            before = plain.kept.get(key) if plain is not None else None
            if self._excused(found, before.array if before is not None else None, ours.array):
                found = dataclasses.replace(found, problem=None)
            self._note(self._names(key), found, prompt, "the end")

    def _names(self, key: str | None) -> tuple[str, str]:
        """Names of an output in both parties; of the logits for None."""
        names: list[str] = []
        for party in self._parties:
            files = (party.step, party.prompt)
            found = [cache.output for file in files for cache in file.caches if cache.key == key]
            names.append(found[0] if found else party.prompt.logits.name)
        return names[0], names[1]

    def _note(self, names: tuple[str, str], found: Comparison, prompt: Prompt, where: str) -> None:
        rank = (found.problem is not None, found.error)
        if names[0] in self._worst and rank <= self._worst[names[0]][0]:
            return
        problem = None if found.problem is None else f"{found.problem}, at {where}"
        report = OutputReport(
            *names,
            self._level,
            found.error,
            found.tolerance,
            found.dtype,
            prompt.name,
            prompt.seed,
            found.index,
            problem,
        )
        self._worst[names[0]] = (rank, report)

    def _excused(self, found: Comparison, plain: Array | None, ours: Array) -> bool:
        if found.problem is None or plain is None or not math.isfinite(found.error):
            return False
        shift = compare(plain, ours, 1e-30).error
        if not math.isfinite(shift) or 2 * shift < found.error:
            return False
        self.shift = max(self.shift, shift)
        return True

    # ---- experts ------------------------------------------------------------------------------------------------------

    def _choices(self, prompt: Prompt, plan: Plan, traces: tuple[Trace, Trace]) -> Array:
        """For each batch row the first column that depends on a choice flipped at a tie; a large number without one."""
        first, second = traces
        depends = np.full(len(prompt.rows), np.iinfo(np.int64).max)
        if not any(self._routers):
            return depends
        if not _calls_alike(first.calls, second.calls):
            self.unrouted.append(prompt.name)
            return depends
        layout = plan.layouts[0]
        behind = len(layout.cuts)

        def context(row: int, column: int) -> tuple[int, ...]:
            """The tokens of a row up to a column."""
            ids = [*prompt.rows[row], *(int(own[row]) for own in first.own)]
            gap = layout.width - len(prompt.rows[row])
            before = gap if layout.side == "left" or column >= layout.width else 0
            return tuple(ids[: column - before + 1])

        for number, (ours, theirs) in enumerate(zip(first.calls, second.calls, strict=True)):
            stepping = number >= behind
            file = self._parties[1].step if stepping else self._parties[1].prompt
            self._one_call(self._routers[stepping], file, (ours, theirs), depends, prompt, context)
        return depends

    def _one_call(
        self,
        routers: Sequence[tuple[Router, Router]],
        file: Decoder,
        calls: tuple[CallRecord, CallRecord],
        depends: Array,
        prompt: Prompt,
        context: Callable[[int, int], tuple[int, ...]],
    ) -> None:
        ours, theirs = calls
        batch, length = ours.columns.shape
        never = np.iinfo(np.int64).max
        known = {int(row): 0 for row in np.flatnonzero(depends < never)}
        padded = {int(row): int(np.argmax(ours.columns[row] < 0)) for row in np.flatnonzero(ours.columns[:, -1] < 0)}
        flips = Flips(first={**padded, **known})
        selection = file.contracts[-1] if file.contracts else None
        for router, other in routers:
            if router.scores not in ours.routed or other.indices not in theirs.routed:
                continue
            scores = ours.routed[router.scores]
            compare_choices(
                flips,
                router,
                scores,
                ours.routed[router.indices],
                theirs.routed[other.indices],
                {"B": batch, "S": length},
                tolerance(scores.dtype, half=self._half, optimized=self._optimized),
                (selection, theirs.feed),
            )
        self.routed_rows += flips.rows
        if flips.problem:
            self.problems.append(f"{flips.problem} (prompt {prompt.name})")
        for row, position in flips.first.items():
            columns = ours.columns[row, position:]
            columns = columns[columns >= 0]
            if row not in known and len(columns):
                depends[row] = columns[0]
                # The same tokens flip the same choice in every prompt that they begin.
                self._flipped.add(context(row, int(columns[0])))
        self.tie_flips = len(self._flipped)
        self.excluded_rows += int(np.count_nonzero(ours.columns >= depends[:, None]))


def _calls_alike(first: Sequence[CallRecord], second: Sequence[CallRecord]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(ours.columns, theirs.columns) for ours, theirs in zip(first, second, strict=True)
    )


def _compare_kept(ours: Kept, theirs: Kept, limit: float, depends: Array) -> Comparison:
    excluded = (ours.columns >= depends[ours.rows]).reshape(-1, *[1] * (ours.array.ndim - 1))
    return compare(ours.array, theirs.array, limit, excluded=excluded)


def _top_two(logits: Array) -> TopTwo:
    ranked = np.argsort(-logits.astype(np.float64), kind="stable")[:2]
    best, second = int(ranked[0]), int(ranked[-1])
    return TopTwo(
        best,
        float(logits[best]),
        second,
        float(logits[second]),
        float(logits[best]) - float(logits[second]),
    )


def _token_reason(each: TokenDifference) -> str:
    level = " at ONNX Runtime's default level" if each.level == "default" else ""
    return (
        f"tokens first differ at token {each.token} of row {each.row}: {each.rewritten.best}, not"
        f" {each.reference.best}, which is {each.gap:.1e} ahead in the reference (prompt {each.prompt}){level}"
    )
