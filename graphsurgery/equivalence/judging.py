"""Judging the outputs of both models over all feeds: contracts, assumed rows, routers and their ties.

Alphabet: B batch, S query length, P past, T = P + S keys.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graphsurgery.equivalence.comparing import Comparison, compare, tolerance
from graphsurgery.equivalence.pairing import apply_contracts, candidates, excluded_elements, row_axes
from graphsurgery.equivalence.routers import Flips, compare_choices
from graphsurgery.equivalence.verify_report import OutputReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.contracts import RowSelection
    from graphsurgery.equivalence.feeds import Array, Feed
    from graphsurgery.equivalence.pairing import Pair
    from graphsurgery.equivalence.roles import Signature
    from graphsurgery.equivalence.routers import Router
    from graphsurgery.equivalence.running import Store

__all__ = ["Bench", "Judgement", "excuse", "judge", "too_many_ties"]

# Score gaps below which a flipped choice is a tie, relative to max(1, |score|): the tolerances of the scores.
_TIE_SHARE = 1e-3


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is judged.

    Attributes:
        signature: of what is fed.
        feeds: all feeds; stores keep outputs by their position here.
        numbers: positions of the feeds that both models ran on.
        pairs: outputs.
        reference: outputs of the reference.
        rewritten: outputs of the rewritten model.
        optimized: both ran at ONNX Runtime's default level.
        half: the reference computes in float16.
        routers: matched routers whose scores and choices are in the stores.
    """

    signature: Signature
    feeds: Sequence[Feed]
    numbers: Sequence[int]
    pairs: Sequence[Pair]
    reference: Store
    rewritten: Store
    optimized: bool
    half: bool
    routers: Sequence[tuple[Router, Router]] = ()


@dataclasses.dataclass
class Judgement:
    """The verdict on one level: the worst of each output, choices of experts that differ, what was assumed."""

    outputs: list[OutputReport] = dataclasses.field(default_factory=list)
    choices: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    tie_flips: int = 0
    routed_rows: int = 0
    excluded_rows: int = 0

    @property
    def reasons(self) -> list[str]:
        """What is wrong, one sentence each."""
        return self.choices + [_reason(report) for report in self.outputs if report.problem is not None]


def _reason(report: OutputReport) -> str:
    seed = "" if report.seed is None else f", seed {report.seed}"
    level = " at ONNX Runtime's default level" if report.level == "default" else ""
    return f"output {report.rewritten} {report.problem} (feed {report.feed}{seed}){level}"


def judge(bench: Bench) -> Judgement:
    """Compare every pair on every feed."""
    verdict = Judgement()
    assumed = {pair.reference: _candidates(bench, pair) for pair in bench.pairs if not pair.contracts}
    flips = _judge_routers(bench, [row for found in assumed.values() for row in found], verdict)
    for pair in bench.pairs:
        choices: list[tuple[RowSelection, ...]] = [(row,) for row in assumed.get(pair.reference, ())]
        results = [_judge_pair(bench, pair, contracts, flips) for contracts in choices or [pair.contracts]]
        best = next((place for place, report in enumerate(results) if report.problem is None), 0)
        report = results[best]
        verdict.outputs.append(report)
        if choices and report.problem is None:
            row = choices[best][0]
            source = f" of {row.source}" if row.source else ""
            verdict.notes.append(f"assumed index={row.index}{source} for {pair.rewritten}, which has fewer rows")
    return verdict


def excuse(verdict: Judgement, bench: Bench, plain: Store) -> str | None:
    """Take back what ONNX Runtime's own fusions explain; one sentence that tells so, None where nothing is taken back.

    At its default level the runtime computes some models otherwise (8-bit activations for quantised weights). Where
    that alone moves the reference at least half as far as the two models are apart, the level proves nothing.

    Args:
        verdict: at the default level; its outputs are changed in place.
        bench: what it was made from.
        plain: outputs of the reference with graph optimisations disabled.
    """
    names: list[str] = []
    most = 0.0
    for place, report in enumerate(verdict.outputs):
        if report.problem is None:
            continue
        number = next(number for number in bench.numbers if bench.feeds[number].name == report.feed)
        before, after = plain.value(number, report.name), bench.reference.value(number, report.name)
        # A tolerance above 0 asks for the distance, not for equal bits.
        shift = compare(before, after, 1e-30).error
        if math.isfinite(shift) and 2 * shift >= report.error:
            names.append(report.rewritten)
            most = max(most, shift)
            verdict.outputs[place] = dataclasses.replace(report, problem=None)
    if not names:
        return None
    if all(report.problem is None for report in verdict.outputs):
        verdict.choices.clear()
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"at ONNX Runtime's default level outputs differ ({listed}), but its fusions alone move the reference by"
        f" {most:.1e}: nothing can be said at that level"
    )


def _candidates(bench: Bench, pair: Pair) -> list[RowSelection]:
    shapes = []
    for number in bench.numbers:
        a = bench.reference.value(number, pair.reference)
        b = bench.rewritten.value(number, pair.rewritten)
        if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
            return []
        shapes.append((a.shape, b.shape, bench.feeds[number].sizes.letters()))
    return candidates(pair, bench.signature, shapes)


def _judge_pair(bench: Bench, pair: Pair, contracts: tuple[RowSelection, ...], flips: dict[int, Flips]) -> OutputReport:
    worst: tuple[tuple[bool, float], Comparison, Feed] | None = None
    for number in bench.numbers:
        feed = bench.feeds[number]
        compared = _judge_one(bench, pair, contracts, flips.get(number), number)
        rank = (compared.problem is not None, compared.error)
        if worst is None or rank > worst[0]:
            worst = (rank, compared, feed)
    assert worst is not None
    _, compared, feed = worst
    level: Literal["disabled", "default"] = "default" if bench.optimized else "disabled"
    return OutputReport(
        pair.reference,
        pair.rewritten,
        level,
        compared.error,
        compared.tolerance,
        compared.dtype,
        feed.name,
        feed.seed,
        compared.index,
        compared.problem,
    )


def _judge_one(
    bench: Bench, pair: Pair, contracts: tuple[RowSelection, ...], flips: Flips | None, number: int
) -> Comparison:
    reference: Any = bench.reference.value(number, pair.reference)
    got: Any = bench.rewritten.value(number, pair.rewritten)
    excluded: Array | None = None
    limit = 0.0
    if isinstance(reference, np.ndarray):
        if not (pair.exact and not bench.optimized):
            limit = tolerance(reference.dtype, half=bench.half, optimized=bench.optimized)
        sizes = bench.feeds[number].sizes.letters()
        if pair.reference in bench.signature.rings and reference.ndim == 4:
            # Slots that hold no position yet are not written.
            excluded = np.arange(reference.shape[2])[None, None, :, None] >= sizes["T"]
        if flips is not None and flips.first:
            dims = next((output.dims for output in bench.signature.outputs if output.name == pair.reference), None)
            axes = row_axes(dims, reference.shape, bench.signature, sizes)
            depending = excluded_elements(reference.shape, axes, flips.first, sizes)
            excluded = depending if excluded is None else excluded | depending
    elif isinstance(reference, list) and reference and isinstance(reference[0], np.ndarray):
        limit = tolerance(reference[0].dtype, half=bench.half, optimized=bench.optimized)
    if contracts:
        arrays = bench.feeds[number].build()
        try:
            reference = apply_contracts(contracts, reference, arrays)
            excluded = None if excluded is None else apply_contracts(contracts, excluded, arrays)
        except (IndexError, KeyError, ValueError) as error:
            problem = f"does not fit its row contract ({type(error).__name__}: {error})"
            return Comparison(float("inf"), limit, str(reference.dtype), None, problem)
    return compare(reference, got, limit, excluded=excluded)


def _judge_routers(bench: Bench, assumed: list[RowSelection], verdict: Judgement) -> dict[int, Flips]:
    """Flips by feed number; problems and counts go into the verdict."""
    if not bench.routers:
        return {}
    stated = [contract for pair in bench.pairs for contract in pair.contracts[-1:]]
    found: dict[int, Flips] = {}
    selections: list[RowSelection | None] = [*(stated or assumed)] or [None]
    for selection in selections:
        found = {number: _flips(bench, number, selection) for number in bench.numbers}
        if all(flips.problem is None for flips in found.values()):
            break
    for number, flips in found.items():
        if flips.problem:
            verdict.choices.append(f"{flips.problem} (feed {bench.feeds[number].name})")
            break
    verdict.tie_flips = sum(flips.flipped for flips in found.values())
    verdict.routed_rows = sum(flips.rows for flips in found.values())
    verdict.excluded_rows = sum(
        bench.feeds[number].sizes.length - position
        for number, flips in found.items()
        for position in flips.first.values()
    )
    many = too_many_ties(verdict.tie_flips, verdict.routed_rows)
    if many:
        verdict.choices.append(many)
    return found


def too_many_ties(flips: int, rows: int) -> str | None:
    """A sentence where more choices of experts flipped at a tie than chance explains."""
    # One tie proves nothing on a handful of rows.
    if flips <= max(1.0, _TIE_SHARE * rows):
        return None
    return f"{flips} of {rows} choices of experts flipped at a tie, more than 0.1 %"


def _flips(bench: Bench, number: int, selection: RowSelection | None) -> Flips:
    feed = bench.feeds[number]
    flips = Flips()
    arrays = feed.build() if selection is not None else {}
    for ours, theirs in bench.routers:
        scores: Array = bench.reference.value(number, ours.scores)
        compare_choices(
            flips,
            ours,
            scores,
            bench.reference.value(number, ours.indices),
            bench.rewritten.value(number, theirs.indices),
            feed.sizes.letters(),
            tolerance(scores.dtype, half=bench.half, optimized=bench.optimized),
            (selection, arrays),
        )
    return flips
