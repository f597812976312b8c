"""``verify`` at depth ``generate``: both models decode the same prompts, each by its own convention."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.equivalence.contestants import Contestants, Files, read_contestants, takes_hidden_states
from graphsurgery.equivalence.generation import Job, Trace, run_party
from graphsurgery.equivalence.generation_judging import GenerationJudge
from graphsurgery.equivalence.generation_report import PromptReport
from graphsurgery.equivalence.layouts import Party, Plan, Prompt, make_plan
from graphsurgery.equivalence.prompt_drawing import draw_prompts
from graphsurgery.equivalence.prompts import given_prompts
from graphsurgery.equivalence.roles import Role
from graphsurgery.equivalence.running import LoadError
from graphsurgery.equivalence.verify_report import LeftOut, VerifyReport
from graphsurgery.errors import CannotCheckError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.running import Settings
    from graphsurgery.equivalence.verify import Progress

__all__ = ["verify_generation"]


def verify_generation(
    files: Files,
    report: VerifyReport,
    given: Sequence[str | Path | Sequence[int]] | None,
    *,
    memory: int | None,
    stack: ExitStack,
    progress: Progress | None,
    opt_level_check: bool,
) -> VerifyReport:
    """Decode, compare, report.

    Args:
        files: of both sides.
        report: with paths, seed and the number of tokens; the rest is filled in.
        given: prompts; None for drawn ones.
        memory: bytes that may be used; None for what is available.
        stack: keeps temporary files for as long as the models run.
        progress: told after each prompt.
        opt_level_check: decode at ONNX Runtime's default level too.

    Raises:
        UsageError: a prompt is no prompt.
        InputRefusedError: a file is no model.
        CannotCheckError: a file does not decode, or no prompt can be decoded by the reference.
    """
    contestants = read_contestants(files, memory, stack)
    return _Check(contestants, files, report, given, progress).run(opt_level_check=opt_level_check)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One prompt, how it is fed to both sides, and what the reference made of it."""

    number: int
    prompt: Prompt
    plan: Plan
    parties: tuple[Party, Party]
    reference: Trace | None = None

    @property
    def tokens(self) -> Array | None:
        """What the reference decoded, int64 ``[B, n]``."""
        return None if self.reference is None else np.stack(self.reference.own, axis=1)


class _Check:
    """One verification by decoding."""

    def __init__(
        self,
        contestants: Contestants,
        files: Files,
        report: VerifyReport,
        given: Sequence[str | Path | Sequence[int]] | None,
        progress: Progress | None,
    ) -> None:
        self.contestants, self.files, self.report, self.progress = contestants, files, report, progress
        self.notes, self.warnings = contestants.notes, contestants.warnings
        self.reasons: list[str] = []
        self.left_out: list[LeftOut] = []
        self.half = contestants.parties[0].prompt.signature.half
        self.vocabulary = self._vocabulary()
        self.table = self._table()
        self.notes += [
            f"input {name}: what it stands for is not known, fed small random values" for name in self._unknown()
        ]
        self.entries = self._entries(given)
        self.done = self.steps = 0

    # ---- what is fed --------------------------------------------------------------------------------------------------

    def _unknown(self) -> list[str]:
        unknown = [spec.name for file in self.contestants.decoders for spec in file.signature.having(Role.UNKNOWN)]
        handed = {cache.input.name for file in self.contestants.decoders for cache in file.fed if cache.input}
        return [name for name in dict.fromkeys(unknown) if name not in handed]

    def _vocabulary(self) -> int:
        sizes = [file.vocabulary for file in self.contestants.decoders]
        known = [size for size in sizes if size is not None]
        if known:
            return min(known)
        if any(map(takes_hidden_states, self.contestants.decoders)):
            raise CannotCheckError(
                f"{self.report.reference} takes hidden states and does not declare the size of its vocabulary, so"
                " nothing can be decoded: check it with --depth outputs."
            )
        # Ids that any table has.
        return 8

    def _table(self) -> Array | None:
        """What tokens stand for in models that take hidden states: drawn once, the same for all files."""
        files = [file for file in self.contestants.decoders if takes_hidden_states(file)]
        if not files:
            return None
        spec = files[0].signature.having(Role.EMBEDS)[0]
        width = spec.dims[-1]
        if not isinstance(width, int):
            raise CannotCheckError(
                f"Input {spec.name} of {files[0].path} does not declare its width, so no hidden states can be drawn:"
                " check it with --depth outputs."
            )
        self.notes.append(f"input {spec.name} takes hidden states: every token is given a drawn vector")
        generator = np.random.default_rng([self.report.seed, width])
        table: Array = generator.standard_normal((self.vocabulary, width))
        return table

    def _entries(self, given: Sequence[str | Path | Sequence[int]] | None) -> list[_Entry]:
        parties, tokens = self.contestants.parties, self.report.steps
        if given is None:
            prompts = draw_prompts(parties, self.report.seed, self.vocabulary, tokens)
        else:
            batches = [file.batch for file in self.contestants.decoders if file.batch is not None]
            prompts = given_prompts(given, self.files.reference, self.vocabulary, batches[0] if batches else None)
        entries: list[_Entry] = []
        for number, prompt in enumerate(prompts):
            fed = (parties[0].with_buffers(), parties[1].with_buffers()) if prompt.buffered else parties
            plan = make_plan(prompt, fed, tokens)
            if isinstance(plan, str):
                self.left_out.append(LeftOut(prompt.name, plan))
                continue
            entries.append(_Entry(number, prompt, plan, fed))
            if plan.shortened is not None:
                self.notes.append(f"prompt {prompt.name}: {plan.tokens} of {tokens} tokens, for {plan.shortened}")
        if not entries:
            raise CannotCheckError(self._nothing_decoded())
        return entries

    def _nothing_decoded(self) -> str:
        if not self.left_out:
            return f"No prompt can be made that {self.report.reference} and {self.report.rewritten} both take."
        last = self.left_out[-1]
        return f"No prompt could be decoded; the last, {last.feed}: {last.reason}."

    # ---- running ------------------------------------------------------------------------------------------------------

    def run(self, *, opt_level_check: bool) -> VerifyReport:
        """Decode, compare, report."""
        self.steps = len(self.entries) * (4 if opt_level_check else 2)
        settings = self.contestants.settings
        traces = self._decode(0, settings, traced=True)
        kept: list[_Entry] = []
        for entry, trace in zip(self.entries, traces, strict=True):
            if trace.failure is None:
                kept.append(dataclasses.replace(entry, reference=trace))
            else:
                self.left_out.append(LeftOut(entry.prompt.name, f"the reference fails: {trace.failure}"))
        self.entries = kept
        if not kept:
            raise CannotCheckError(self._nothing_decoded())
        judge = self._judge(settings, [entry.reference for entry in kept], traced=True)
        self.reasons += judge.reasons
        outputs, differences = judge.outputs, list(judge.differences)
        if judge.unrouted:
            self.warnings.append(
                f"choices of experts are not compared behind {', '.join(judge.unrouted)}: the files are not fed alike"
            )
        if opt_level_check and not self.reasons:
            behind = self._default_level()
            outputs += behind.outputs
            differences += behind.differences
        return dataclasses.replace(
            self.report,
            status="different" if self.reasons else "equal",
            reasons=tuple(self.reasons),
            threads=settings.threads,
            outputs=tuple(outputs),
            left_out=tuple(self.left_out),
            routers=tuple(dict.fromkeys(ours.name for pairs in self.contestants.routers for ours, _ in pairs)),
            tie_flips=judge.tie_flips,
            routed_rows=judge.routed_rows,
            excluded_rows=judge.excluded_rows,
            warnings=tuple(self.warnings),
            notes=tuple(self.notes),
            prompts=tuple(map(_prompt_report, self.entries)),
            token_differences=tuple(differences),
        )

    def _decode(self, place: int, settings: Settings, *, traced: bool) -> list[Trace]:
        """Decode all prompts with one side: with the reference's tokens, once these are known."""
        jobs = [
            Job(
                entry.number,
                entry.prompt,
                entry.parties[place],
                entry.plan.layouts[place],
                entry.plan.tokens,
                entry.tokens,
                self.table,
                self.report.seed,
                self.vocabulary,
            )
            for entry in self.entries
        ]
        side = ("reference", "rewritten")[place]

        def done(job: Job) -> None:
            self.done += 1
            if self.progress is not None:
                self.progress(f"{side} {job.prompt.name}", self.done, max(self.steps, self.done))

        routed = self.contestants.routed(place) if traced else frozenset()
        return run_party(jobs, self.contestants.models(place, traced=traced), settings, routed, done)

    def _judge(self, settings: Settings, reference: Sequence[Trace | None], *, traced: bool) -> GenerationJudge:
        """Decode with the rewritten model, and hold it against the reference."""
        routers = self.contestants.routers if traced else ((), ())
        judge = GenerationJudge(self.contestants.parties, routers, optimized=settings.optimized, half=self.half)
        try:
            traces = self._decode(1, settings, traced=traced)
        except LoadError as error:
            if error.missing_op:
                raise
            # The reference loads, so the rewrite is at fault.
            judge.problems.append(str(error).rstrip("."))
            return judge
        failed = [(e, trace.failure) for e, trace in zip(self.entries, traces, strict=True) if trace.failure]
        for entry, why in failed[:1]:
            more = f" (and on {len(failed) - 1} more prompts)" if len(failed) > 1 else ""
            judge.problems.append(f"the rewritten model fails on prompt {entry.prompt.name}: {why}{more}")
        for entry, ours, theirs in zip(self.entries, reference, traces, strict=True):
            if ours is not None and ours.failure is None and theirs.failure is None:
                plain = entry.reference if settings.optimized else None
                judge.take(entry.prompt, entry.plan, (ours, theirs), plain)
        return judge

    def _default_level(self) -> GenerationJudge:
        """Both at ONNX Runtime's default level, as users run them, fed the tokens decoded without optimisations."""
        settings = dataclasses.replace(self.contestants.settings, optimized=True)
        judge = GenerationJudge(self.contestants.parties, ((), ()), optimized=True, half=self.half)
        try:
            reference = self._decode(0, settings, traced=False)
            judge = self._judge(settings, reference, traced=False)
            if judge.reasons and any(self.contestants.routers):
                # A choice may have flipped at a tie: look at the choices, which costs some fusions.
                reference = self._decode(0, settings, traced=True)
                judge = self._judge(settings, reference, traced=True)
        except LoadError as error:
            self.warnings.append(f"not compared at ONNX Runtime's default level: {error}")
            return judge
        self.warnings += [
            f"at ONNX Runtime's default level prompt {entry.prompt.name} is left out: the reference fails: {trace.failure}"
            for entry, trace in zip(self.entries, reference, strict=True)
            if trace.failure is not None
        ]
        if judge.shift:
            self.warnings.append(
                "at ONNX Runtime's default level outputs differ, but its fusions alone move the reference by"
                f" {judge.shift:.1e}: nothing can be said at that level"
            )
        self.reasons += judge.reasons
        return judge


def _prompt_report(entry: _Entry) -> PromptReport:
    layout, tokens = entry.plan.layouts[0], entry.tokens
    assert tokens is not None
    padded = any(length != layout.width for length in entry.prompt.lengths)
    return PromptReport(
        entry.prompt.name,
        entry.prompt.lengths,
        layout.side if padded else "none",
        len(layout.cuts),
        tuple(tuple(row) for row in tokens.tolist()),
    )
