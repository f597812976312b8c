"""The main job in one piece: load, run a pipeline, write, verify, and only then put the result in place."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from graphsurgery.errors import CannotCheckError, DifferenceError, NothingChangedError, UsageError
from graphsurgery.garbage import paused_gc
from graphsurgery.model_io import default_output, load, save, source_of, stage
from graphsurgery.pass_base import unknown_name
from graphsurgery.pipeline import SORTED, Pipeline, sort_nodes
from graphsurgery.side_files import (
    check_side_files,
    parse_request,
    skeleton_note,
    specializations_file,
    weights_file,
    write_side_files,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import onnx_ir as ir

    from graphsurgery.equivalence.verify_report import VerifyReport
    from graphsurgery.model_io import Staged, WeightsMode
    from graphsurgery.picture.painter import Painter
    from graphsurgery.pipeline import PassCallback
    from graphsurgery.side_files import SideFile
    from graphsurgery.site_report import PassReport, Report

__all__ = ["ApplyRequest", "ApplyResult", "Watcher", "apply_passes"]


class Watcher(Protocol):
    """Told about long work: what is going on, how much of it is done, and how much there is."""

    def __call__(self, what: str, done: int, total: int, /) -> None:
        """Take note of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApplyRequest:
    """What to do.

    Attributes:
        input: an .onnx file or a model directory.
        output: an .onnx file or a directory (one that exists, or with a trailing slash); None for ``<stem>.surgery.onnx`` beside the input.
        file: the model file in a directory.
        recipe: a recipe by name, or a TOML file; or
        specs: passes as text.
        verify: the depth at which the result is held against the input, ``auto`` for one that fits its size; None for not
            at all.
        dry_run: stop before anything is written.
        check: check the invariants of the model after each pass.
        force: an existing output may be replaced.
        weights: how data files are placed.
        require_change: it is an error when no pass changes anything.
        keep_unverified: keep an output that differs or could not be checked.
        dump_after: a directory in which the model is saved after each pass.
        seed: what the verifier's feeds are drawn from.
        specializations: write a specialisations file here; it needs
        specialize: sizes by role or symbol, ``NAME:ROLE=SIZE,...``.
        picture: add operators, masks and experts for a person to look at to the report.
    """

    input: Path
    output: str | Path | None = None
    file: str | None = None
    recipe: str | None = None
    specs: tuple[str, ...] = ()
    verify: str | None = None
    dry_run: bool = False
    check: bool = False
    force: bool = False
    weights: WeightsMode = "auto"
    require_change: bool = False
    keep_unverified: bool = False
    dump_after: Path | None = None
    seed: int = 0
    specializations: Path | None = None
    specialize: tuple[str, ...] = ()
    picture: bool = False


@dataclasses.dataclass(frozen=True)
class ApplyResult:
    """What was done.

    Attributes:
        report: of the passes.
        output: the file that was written; None after a dry run, or where verification failed.
        verification: the verifier's report, where it ran.
        failure: why the exit code is not 0: a difference, or a check that could not be made.
        side_files: what was written besides the model and its data.
    """

    report: Report
    output: Path | None
    verification: VerifyReport | None = None
    failure: DifferenceError | CannotCheckError | None = None
    side_files: tuple[Path, ...] = ()


def apply_passes(request: ApplyRequest, watcher: Watcher | None = None) -> ApplyResult:
    """Run a pipeline on a file.

    Raises:
        UsageError: the request contradicts itself, or an option cannot be honoured by the model as a whole.
        InputRefusedError: the input cannot be used.
        CannotCheckError: ``verify`` was asked for and ONNX Runtime is not installed.
        NothingChangedError: with ``require_change``, when no pass changed anything.
        SaveError: the output could not be written.
    """
    _check(request)
    wanted = parse_request(request.specializations, request.specialize)
    pipeline, painter = _pipeline(request)
    beside: list[SideFile] = []

    def copied(done: int, total: int) -> None:
        if watcher is not None:
            watcher("copying weights", done, total)

    with contextlib.ExitStack() as closing:
        # One pause from the file to the file: between two of them the collector would walk the whole model.
        with paused_gc():
            model = load(request.input, file=request.file)
            source = source_of(model)
            assert source is not None
            target = request.output if request.output is not None else default_output(source)
            was_sorted = painter is None or not sort_nodes(model)
            if painter is not None:
                painter.begin(model)
            report = pipeline(model)
            report.warnings += [] if was_sorted else [SORTED]
            report.picture = None if painter is None else painter.finish(report.passes)
            report.input = str(request.input)
            report.warnings += [f"Weights are incomplete: {problem.message}." for problem in source.problems]
            if request.require_change and not report.changed:
                raise _nothing_changed(request, report)
            if request.specializations is not None:
                beside.append(specializations_file(model, request.specializations, wanted))
            if request.dry_run:
                return ApplyResult(report, None)
            staging = stage(model, target, weights=request.weights, force=request.force, data_progress=copied)
            staged = closing.enter_context(staging)
        # As it was typed, so that the report is the same wherever the command runs.
        given = request.input
        reference = given / source.path.relative_to(source.root) if given.is_dir() else given
        spec = weights_file(model, source, staged.path)
        beside += [spec] if spec is not None else []
        check_side_files(beside, staged.path, force=request.force)
        verification, failure = _verify(request, reference, staged, watcher)
        if verification is not None:
            report.verification = verification.to_json()
        if failure is not None and not request.keep_unverified:
            return ApplyResult(report, None, verification, failure)
        saved = staged.commit()
        write_side_files(beside)
    report.warnings += saved.notes
    note = skeleton_note(source, saved.path) if spec is not None else None
    report.warnings += [note] if note is not None else []
    report.output = str(saved.path)
    return ApplyResult(report, saved.path, verification, failure, tuple(file.path for file in beside))


def _nothing_changed(request: ApplyRequest, report: Report) -> NothingChangedError:
    refused = [f"{site.id}: {site.reason}" for item in report.passes for site in item.sites if site.reason]
    why = f" ({'; '.join(refused)})" if refused else ""
    return NothingChangedError(f"No pass changed {request.input}{why}.")


def _check(request: ApplyRequest) -> None:
    """Refuse what cannot be done before any work is done."""
    if request.dry_run and (request.verify is not None or request.dump_after is not None):
        other = "--verify" if request.verify is not None else "--dump-after"
        raise UsageError(f"--dry-run writes nothing, so {other} has nothing to work on: leave one of them out.")
    if request.verify is None:
        if request.keep_unverified:
            raise UsageError("--keep-unverified says what becomes of an output that --verify rejects: give --verify.")
        return
    from graphsurgery.equivalence.running import require_runtime
    from graphsurgery.equivalence.verify import DEPTHS

    if request.verify not in DEPTHS:
        raise unknown_name("depth of --verify", request.verify, DEPTHS)
    if not request.keep_unverified:
        require_runtime()


def _pipeline(request: ApplyRequest) -> tuple[Pipeline, Painter | None]:
    """The pipeline, and who makes the picture where one is asked for."""
    if bool(request.recipe) == bool(request.specs):
        raise UsageError("Give either --recipe NAME or one or more -p SPEC: what is to be done?")
    passes: Sequence[Any] = request.specs
    if request.recipe:
        from graphsurgery.recipes import read_recipe

        passes = read_recipe(request.recipe).passes
    watching: list[PassCallback] = []
    if request.dump_after is not None:
        watching.append(_Dump(request.dump_after))
    pipeline = Pipeline(passes, callback=_All(watching), check=request.check)
    if not request.picture:
        return pipeline, None
    from graphsurgery.picture.painter import Painter

    painter = Painter([getattr(item, "name", "") for item in pipeline.passes])
    watching.append(painter)
    return pipeline, painter


class _All:
    """Callbacks as one."""

    def __init__(self, callbacks: Sequence[PassCallback]) -> None:
        self._callbacks = callbacks

    def __call__(self, position: int, model: ir.Model, report: PassReport) -> None:
        for callback in self._callbacks:
            callback(position, model, report)


class _Dump:
    """Saves the model after each pass as ``00-name.onnx``, ``01-name.onnx`` and so on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, position: int, model: ir.Model, report: PassReport) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        save(model, self._directory / f"{position:02}-{report.name}.onnx", force=True)


def _verify(
    request: ApplyRequest, reference: Path, staged: Staged, watcher: Watcher | None
) -> tuple[VerifyReport | None, DifferenceError | CannotCheckError | None]:
    if request.verify is None:
        return None, None
    from graphsurgery.equivalence.verify import verify_models

    try:
        found = verify_models(reference, staged.model_path, depth=request.verify, seed=request.seed, progress=watcher)
    except CannotCheckError as error:
        return None, error
    result = _as_named(found, staged)
    if result.status == "equal":
        return result, None
    kept = "" if request.keep_unverified else "; no output was written"
    reasons = "; ".join(reason.rstrip(".") for reason in result.reasons) or "see the table"
    if result.status == "different":
        return result, DifferenceError(f"The result does not compute the same as {reference}: {reasons}{kept}.")
    return result, CannotCheckError(f"The result could not be checked against {reference}: {reasons}{kept}.")


def _as_named(found: VerifyReport, staged: Staged) -> VerifyReport:
    """``found`` with the name that the model takes in place of its temporary one, which differs from run to run."""

    def named(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(text.replace(str(staged.model_path), str(staged.path)) for text in texts)

    regions = tuple(
        dataclasses.replace(region, problem=named((region.problem,))[0]) if region.problem else region
        for region in found.regions
    )
    return dataclasses.replace(
        found,
        rewritten=str(staged.path),
        regions=regions,
        reasons=named(found.reasons),
        warnings=named(found.warnings),
        notes=named(found.notes),
    )
