"""Saving: the output is planned, staged beside its place, and committed by a rename."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import shutil
import typing
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.errors import SaveError, UsageError
from graphsurgery.garbage import paused_gc
from graphsurgery.model_files.copying import Meter, copy_range, write_runs
from graphsurgery.model_files.directories import find_companions, rename_decoder
from graphsurgery.model_files.output import Namer, Target, check_not_data, check_output, plan_output, relative_path
from graphsurgery.model_files.placement import FileCopy, FileLink, Placement, WeightsMode, place
from graphsurgery.model_files.serialising import Serialised, serialise
from graphsurgery.model_files.source import InterfaceNames, Source, source_of
from graphsurgery.model_files.staging import Staging, write_durably
from graphsurgery.model_files.survey import Survey, survey
from graphsurgery.weights.tensors import WeightTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphsurgery.model_files.placement import Job

__all__ = ["SaveResult", "Staged", "save", "stage"]

_MODES = typing.get_args(WeightsMode)


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """What a save made.

    Attributes:
        path: the .onnx file.
        data_files: the data files that it refers to and that exist, shared ones first.
        weights: how the data was placed: ``reference``, ``copy``, ``hardlink`` or ``repack``.
        bytes_copied: bytes of data written; 0 where the data is shared.
        notes: sentences that the user should read, such as what is absent.
    """

    path: Path
    data_files: tuple[Path, ...]
    weights: str
    bytes_copied: int
    notes: tuple[str, ...]


class Staged:
    """A model that is written and has not taken its name yet; see :func:`stage`.

    Attributes:
        model_path: the temporary .onnx, which ONNX Runtime loads in place.
        path: the name that it will take.
        notes: sentences that the user should read.
    """

    def __init__(self, staging: Staging, result: SaveResult, *, replace: bool) -> None:
        self.model_path = staging.model_path
        self.path = result.path
        self.notes = result.notes
        self._staging = staging
        self._result = result
        self._replace = replace
        self._committed = False

    def commit(self) -> SaveResult:
        """Put the output in place; the rename of the .onnx is the last step.

        Raises:
            SaveError: it could not be put in place; what existed before is untouched.
            UsageError: it was committed before.
        """
        if self._committed:
            raise UsageError(f"{self.path} was committed before: stage the model again.")
        with _save_errors(self.path):
            self._staging.commit(replace=self._replace)
        self._committed = True
        return self._result


def save(
    model: ir.Model,
    path: str | os.PathLike[str] | None = None,
    *,
    weights: WeightsMode = "auto",
    force: bool = False,
    as_directory: bool = False,
    file_name: str | None = None,
    data_progress: Callable[[int, int], None] | None = None,
) -> SaveResult:
    """Save ``model``; the arguments and errors are those of :func:`stage`."""
    with stage(
        model,
        path,
        weights=weights,
        force=force,
        as_directory=as_directory,
        file_name=file_name,
        data_progress=data_progress,
    ) as staged:
        return staged.commit()


@contextlib.contextmanager
def stage(
    model: ir.Model,
    path: str | os.PathLike[str] | None = None,
    *,
    weights: WeightsMode = "auto",
    force: bool = False,
    as_directory: bool = False,
    file_name: str | None = None,
    data_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Staged]:
    """Write ``model`` under a temporary name in the output's directory, to be committed or dropped.

    The input's data file is never modified, and no existing file is ever written to: new data gets a name that no file
    has. Leaving the context without a commit removes what was written.

    Args:
        model: the model, which stays as it is.
        path: the .onnx to make; by default what ``default_output`` says. An existing directory, or a path with a trailing
            slash, is a directory output: the model keeps its name there and the other files of the input's model
            directory come along.
        weights: ``reference`` shares the data files (zero bytes copied), ``copy`` copies them, ``hardlink`` links them,
            ``repack`` writes one new file with only the bytes that the model still uses, ``auto`` is ``reference``
            beside the input where runtimes accept that, else ``copy``.
        force: an existing output may be replaced. A symbolic link is replaced itself; what it points to stays.
        as_directory: ``path`` is a directory even if it does not exist yet.
        file_name: name of the model in a directory output, if not that of the input.
        data_progress: called with the bytes of data written and the bytes to write in all.

    Yields:
        The staged model.

    Raises:
        UsageError: the output exists and ``force`` is not given, its directory does not exist, or ``weights`` cannot be
            honoured there.
        SaveError: writing failed; what existed before is untouched.
    """
    if weights not in _MODES:
        close = difflib.get_close_matches(str(weights), _MODES, n=1, cutoff=0.0)
        raise UsageError(f"weights={weights!r} is not one of {', '.join(_MODES)}: did you mean {close[0]!r}?")
    source = source_of(model)
    target = plan_output(source, path, as_directory=as_directory, file_name=file_name)
    check_output(target, source, force=force)
    namer = Namer(target)
    walked = survey(model)
    tensors = [slot.tensor for slot in walked.external]
    default_directory = source.directory if source is not None else Path()
    with _save_errors(target.path):
        placement = place(tensors, default_directory, target.path.parent, weights, namer)
        check_not_data(target.path, [*tensors, *_read_at_save(walked)], default_directory)
        with paused_gc():
            content = serialise(model, walked, placement.places, namer.fresh)
    staging = Staging(
        target.directory,
        target.relative,
        whole=target.whole,
        shares_data=bool(placement.shared) or placement.mode == "reference",
    )
    try:
        with _save_errors(target.path):
            names = InterfaceNames.of(model)
            result = _write(
                staging, target, placement, content, source, names=names, force=force, progress=data_progress
            )
        yield Staged(staging, result, replace=force)
    finally:
        staging.discard()


@contextlib.contextmanager
def _save_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and Path(error.filename) != path else ""
        reason = error.strerror or str(error)
        raise SaveError(f"{path} could not be written: {reason}{where}; what was there before is untouched.") from error


def _write(
    staging: Staging,
    target: Target,
    placement: Placement,
    content: Serialised,
    source: Source | None,
    *,
    names: InterfaceNames,
    force: bool,
    progress: Callable[[int, int], None] | None,
) -> SaveResult:
    notes = list(placement.notes)
    to_write = sum(0 if isinstance(job, FileLink) else job.nbytes for job in placement.jobs) + content.new_data.nbytes
    meter = Meter(to_write, progress)
    if target.companions and source is not None:
        notes += _bring_companions(staging, target, placement, source, names=names, force=force)
    for job in placement.jobs:
        _make_data(staging.new_data(job.location), job, meter)
    locations = [job.location for job in placement.jobs]
    if content.location is not None:
        locations.append(content.location)
        with write_durably(staging.new_data(content.location)) as descriptor:
            write_runs(descriptor, content.new_data.runs, meter)
        notes += content.notes
    with write_durably(staging.model_path) as descriptor, open(descriptor, "wb", closefd=False) as out:
        out.write(content.data)
    data_files = (*placement.shared, *(target.path.parent / location for location in locations))
    if locations:
        notes += _stale_notes(target.path, data_files, source)
    return SaveResult(target.path, data_files, placement.mode, meter.done, tuple(notes))


def _read_at_save(walked: Survey) -> list[ir.ExternalTensor]:
    """What weights that surgery made are laid out from."""
    made = (value.const_value for value in walked.made)
    sources = (source for tensor in made if isinstance(tensor, WeightTensor) for source in tensor.sources.values())
    return [source for source in sources if isinstance(source, ir.ExternalTensor)]


def _stale_notes(path: Path, data_files: tuple[Path, ...], source: Source | None) -> list[str]:
    """Tell of data that an earlier output of this name had: it may be large, and something else may use it."""
    known = {*data_files, *(file.path for file in (source.data_files if source is not None else ()))}
    numbered = re.compile(re.escape(path.name) + r"(\.\d+)?\.data")
    siblings = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    stale = [item for item in siblings if numbered.fullmatch(item.name) and path.parent / item.name not in known]
    return [f"{item} is left from an earlier output: delete it if nothing else uses it" for item in stale]


def _make_data(path: Path, job: Job, meter: Meter) -> None:
    if isinstance(job, FileLink):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(job.path, path)
        except OSError as error:
            message = f"{job.path} cannot be hard-linked from {path.parent} ({error.strerror}): use --weights copy."
            raise UsageError(message) from error
        return
    ranges = ((job.path, 0, job.nbytes),) if isinstance(job, FileCopy) else job.ranges
    with write_durably(path) as target:
        opened: tuple[Path, int] | None = None
        try:
            for source, start, length in ranges:
                if opened is None or opened[0] != source:
                    if opened is not None:
                        os.close(opened[1])
                        opened = None
                    opened = (source, os.open(source, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
                copy_range(opened[1], target, start, length, meter, source)
        finally:
            if opened is not None:
                os.close(opened[1])


def _bring_companions(
    staging: Staging,
    target: Target,
    placement: Placement,
    source: Source,
    *,
    names: InterfaceNames,
    force: bool,
) -> tuple[str, ...]:
    """Stage the other files of the model directory; notes on what was left out."""
    # Data that is shared stays where it is, and what is copied was taken care of.
    exclude = {source.path, *(file.path for file in source.data_files)}
    companions = find_companions(source.root, exclude, target.directory)
    notes = list(companions.notes)
    taken = {(PurePosixPath(target.relative).parent / job.location).as_posix() for job in placement.jobs}
    for name, path in companions.files:
        final = target.directory / name
        if name == target.relative or name in taken:
            raise UsageError(f"the output's {name} would take the place of {path}: choose another file name.")
        if os.path.lexists(final) and (not force or final.is_dir()):
            raise UsageError(f"{final} exists: choose another output directory, or replace its files with --force.")
        staged = staging.new_file(name)
        staged.parent.mkdir(parents=True, exist_ok=True)
        config = None
        if source.config_path is not None and path == source.config_path:
            former = relative_path(source.path, source.root)
            config = rename_decoder(path, former, target.relative, names.inputs, names.outputs, notes)
        if config is not None:
            staged.write_text(config, encoding="utf-8", newline="")
        else:
            shutil.copyfile(path, staged)
        with open(staged, "rb") as file:
            os.fsync(file.fileno())
    return tuple(notes)
