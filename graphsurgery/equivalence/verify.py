"""``verify``: hold a rewritten model against the model as exported, at one of several depths."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from graphsurgery.equivalence.bisecting import bisect as run_bisect
from graphsurgery.equivalence.bisecting import passes_between
from graphsurgery.equivalence.contestants import Files
from graphsurgery.equivalence.preparing import cannot_run_whole
from graphsurgery.equivalence.regions.verify_regions import verify_regions
from graphsurgery.equivalence.running import require_runtime
from graphsurgery.equivalence.verify_generate import verify_generation
from graphsurgery.equivalence.verify_outputs import verify_outputs
from graphsurgery.equivalence.verify_report import VerifyReport
from graphsurgery.errors import CannotCheckError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphsurgery.equivalence.feeds import Array

__all__ = ["DEPTHS", "Progress", "verify_models"]

DEPTHS = ("auto", "outputs", "generate", "regions")

_STEPS = 10


class Progress(Protocol):
    """Told after each step: what is being done, steps done, steps in all."""

    def __call__(self, what: str, done: int, total: int, /) -> None:
        """Take note of a step."""


def verify_models(
    a: Path | str,
    b: Path | str,
    *,
    depth: str = "outputs",
    seed: int = 0,
    feeds: Path | Mapping[str, Array] | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
    opt_level_check: bool = True,
    steps: int | None = None,
    prompts: Sequence[str | Path | Sequence[int]] | None = None,
    decode: Path | str | None = None,
    decode_reference: Path | str | None = None,
    real_weights: bool = False,
    bisect: bool = False,
) -> VerifyReport:
    """Hold a rewritten model against the model as exported.

    Both run with graph optimisations disabled, then at ONNX Runtime's default level, one model at a time. Contracts in
    the metadata of ``b`` say which outputs mean less than they did.

    At depth ``generate`` both decode greedily, each by its own convention, and the cache is handed from call to call;
    the rewritten model is fed the reference's tokens, so that its logits and caches can be compared behind a token
    that it would have chosen otherwise.

    At depth ``regions`` only what differs between the graphs is lifted out of both and run on random data, one of each
    kind; neither data file nor memory for the whole models is needed. Where the graphs have too little in common for
    that, whole models are run if they can be, and the report says so.

    Args:
        a: the reference, as exported.
        b: the rewritten model.
        depth: ``outputs``: whole models, every output; ``generate``: decoding; ``regions``: what differs; ``auto``:
            ``outputs`` where the data is there and both models fit into memory, else ``regions``.
        seed: what feeds and prompts are drawn from.
        feeds: an .npz file or arrays by name, in place of drawn feeds.
        memory: bytes that may be used; None for what is available.
        progress: told after each feed or prompt.
        opt_level_check: run both at the default level too.
        steps: tokens to decode behind each prompt, 10 if None.
        prompts: in place of drawn ones: token ids, text for the tokenizer.json beside ``a``, or files of either.
        decode: the file that decodes behind the prompts that ``b`` has read.
        decode_reference: the same for ``a``.
        real_weights: at depth ``regions``, read weights from the data files in place of drawing them.
        bisect: run the passes that made ``b`` again, one by one, and tell the first whose result differs from ``a``.

    Raises:
        UsageError: an unknown depth, options of another depth, feeds or prompts that do not fit, or ``bisect`` where
            the metadata of ``b`` tells of no pass.
        InputRefusedError: a file is no model.
        CannotCheckError: ONNX Runtime is not installed.
    """
    _check_options(depth, feeds, steps, steps, prompts, decode, decode_reference)
    if real_weights and depth not in ("regions", "auto"):
        raise UsageError(f"Real weights are what depth {depth} runs on anyway: leave the option out.")
    require_runtime()
    a, b = Path(a), Path(b)
    if bisect and depth == "generate":
        raise UsageError("--bisect compares one file after each pass, not decoding: choose depth outputs or regions.")
    specs = passes_between(a, b) if bisect else ()
    notes: tuple[str, ...] = ()
    if depth == "auto":
        depth, why = chosen_depth(a, b, memory)
        notes = (f"depth {depth} was taken: {why}",)
    found = _verified(
        a,
        b,
        depth,
        seed,
        feeds,
        memory,
        progress,
        opt_level_check,
        steps,
        prompts,
        decode,
        decode_reference,
        real_weights,
    )
    if depth == "regions" and found.status == "unchecked" and cannot_run_whole(a, b, memory) is None:
        # Whole models can tell what regions cannot.
        notes += (f"regions could not be checked ({found.reasons[0].rstrip('.')}): whole models were run instead",)
        found = _verified(a, b, "outputs", seed, feeds, memory, progress, opt_level_check)
    found = dataclasses.replace(found, notes=(*notes, *found.notes))
    if not bisect:
        return found

    def verify(result: Path) -> VerifyReport:
        return _verified(
            a, result, found.depth, seed, feeds, memory, progress, opt_level_check, real_weights=real_weights
        )

    return dataclasses.replace(found, bisected=run_bisect(a, specs, verify))


def _verified(
    a: Path,
    b: Path,
    depth: str,
    seed: int,
    feeds: Path | Mapping[str, Array] | None,
    memory: int | None,
    progress: Progress | None,
    opt_level_check: bool,
    steps: int | None = None,
    prompts: Sequence[str | Path | Sequence[int]] | None = None,
    decode: Path | str | None = None,
    decode_reference: Path | str | None = None,
    real_weights: bool = False,
) -> VerifyReport:
    report = VerifyReport(str(a), str(b), "unchecked", depth=depth, seed=seed)
    with contextlib.ExitStack() as stack:
        try:
            if depth == "generate":
                files = Files(a, b, _path(decode_reference), _path(decode))
                report = dataclasses.replace(
                    report,
                    steps=_STEPS if steps is None else steps,
                    decode_reference=None if decode_reference is None else str(decode_reference),
                    decode=None if decode is None else str(decode),
                )
                return verify_generation(
                    files,
                    report,
                    prompts,
                    memory=memory,
                    stack=stack,
                    progress=progress,
                    opt_level_check=opt_level_check,
                )
            if depth == "regions":
                return verify_regions(a, b, report, feeds, memory=memory, real=real_weights, progress=progress)
            return verify_outputs(
                a,
                b,
                report,
                feeds,
                memory=memory,
                stack=stack,
                progress=progress,
                opt_level_check=opt_level_check,
            )
        except CannotCheckError as error:
            return dataclasses.replace(report, reasons=(str(error),))


def chosen_depth(a: Path, b: Path, memory: int | None) -> tuple[str, str]:
    """The depth at which two models are best compared, and why: whole where they can be run."""
    obstacle = cannot_run_whole(a, b, memory)
    return ("outputs", "both models fit into memory") if obstacle is None else ("regions", obstacle)


def _path(given: Path | str | None) -> Path | None:
    return None if given is None else Path(given)


def _check_options(depth: str, feeds: object, steps: int | None, *generating: object) -> None:
    if depth not in DEPTHS:
        raise UsageError(f"Depth {depth!r} is not known: choose {' or '.join(DEPTHS)}.")
    if depth == "generate" and feeds is not None:
        raise UsageError("Feeds are inputs of single calls, for depth outputs: give prompts to depth generate.")
    if depth != "generate" and any(value is not None for value in generating):
        raise UsageError(
            "Steps, prompts and files to decode with belong to depth generate: ask for it, or leave them out."
        )
    if steps is not None and steps < 1:
        raise UsageError(f"{steps} steps are too few: the prompt itself gives the first token, so 1 or more.")
