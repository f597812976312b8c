"""Where the data of a saved model comes to lie: shared, copied, linked or repacked."""

from __future__ import annotations

import bisect
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graphsurgery.errors import SaveError, UsageError
from graphsurgery.model_files.locations import Need, data_file, unsafe_location

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx_ir as ir

    from graphsurgery.model_files.output import Namer
    from graphsurgery.model_files.source import DataFile

__all__ = ["FileCopy", "FileLink", "FileRepack", "Job", "NewPlace", "Placement", "WeightsMode", "place"]

WeightsMode = Literal["auto", "reference", "copy", "hardlink", "repack"]


@dataclasses.dataclass(frozen=True)
class NewPlace:
    """What an external tensor must state in the output; None leaves a field as it is.

    ``repacked`` tells that the file is not a copy of the old one, so that its checksum no longer holds.
    """

    location: str
    offset: int | None = None
    length: int | None = None
    repacked: bool = False


@dataclasses.dataclass(frozen=True)
class FileCopy:
    """Make ``location`` a copy of ``path``."""

    location: str
    path: Path
    nbytes: int


@dataclasses.dataclass(frozen=True)
class FileLink:
    """Make ``location`` a hard link to ``path``."""

    location: str
    path: Path


@dataclasses.dataclass(frozen=True)
class FileRepack:
    """Make ``location`` of the byte ranges ``(path, start, length)``, one behind the other."""

    location: str
    ranges: tuple[tuple[Path, int, int], ...]

    @property
    def nbytes(self) -> int:
        """Size of the new file."""
        return sum(length for _, _, length in self.ranges)


Job = FileCopy | FileLink | FileRepack


@dataclasses.dataclass
class Placement:
    """How the external tensors of a model are placed.

    Attributes:
        mode: what was chosen; never ``auto``.
        jobs: new data files to make, relative to the output's directory.
        places: by number of the tensor; tensors that stay as they are have none.
        shared: data files that the output shares with others.
        notes: sentences that the user should read.
    """

    mode: Literal["reference", "copy", "hardlink", "repack"]
    jobs: list[Job] = dataclasses.field(default_factory=list)
    places: dict[int, NewPlace] = dataclasses.field(default_factory=dict)
    shared: list[Path] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Group:
    """A data file, the directory that its location is relative to, and the tensors in it by number."""

    file: DataFile
    directory: Path
    tensors: list[int]
    prefix: str | None
    """Path from the output's directory to ``directory``: empty where they are one, None where it is elsewhere."""

    @property
    def obstacle(self) -> str | None:
        """Why the output must not refer to the file where it is; None where it may."""
        if self.prefix is None:
            return "lies outside the output's directory"
        if self.file.linked:
            return "is reached through a symbolic link"
        if unsafe_location(self.file.location) is not None:
            return "is not named by a plain relative path"
        return None


def place(
    tensors: list[ir.ExternalTensor],
    default_directory: Path,
    out_directory: Path,
    weights: WeightsMode,
    namer: Namer,
) -> Placement:
    """Decide where the data of ``tensors`` comes to lie; nothing is written.

    Args:
        tensors: the external tensors, in order of serialisation.
        default_directory: what locations of tensors without a base directory are relative to.
        out_directory: the directory of the output .onnx, which need not exist yet.
        weights: what the user asked for.
        namer: gives the names of new data files.

    Raises:
        UsageError: ``reference`` of a file that runtimes would refuse there, ``hardlink`` of an absent one.
        SaveError: ``repack`` of absent bytes.
    """
    groups = _group(tensors, default_directory, out_directory)
    for group in groups:
        if group.file.size is None:
            namer.reserve((group.prefix or "") + group.file.location)
            namer.reserve(group.file.location)
    if weights == "auto":
        here = all(group.prefix == "" and group.obstacle is None for group in groups)
        weights = "reference" if here else "copy"
    if weights == "reference":
        return _reference(groups)
    if weights == "repack":
        return _repack(groups, tensors, namer)
    return _copy(groups, weights, out_directory, namer)


def _group(tensors: list[ir.ExternalTensor], default: Path, out_directory: Path) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    prefixes: dict[Path, str | None] = {}
    for number, tensor in enumerate(tensors):
        base, location = os.fspath(tensor.base_dir), os.fspath(tensor.location)
        group = groups.get((base, location))
        if group is None:
            directory = Path(base) if base else default
            if directory not in prefixes:
                prefixes[directory] = _prefix(directory, out_directory)
            group = _Group(data_file(directory, location), directory, [], prefixes[directory])
            groups[base, location] = group
        group.tensors.append(number)
    return list(groups.values())


def _prefix(directory: Path, out_directory: Path) -> str | None:
    way = os.path.relpath(os.path.realpath(directory), os.path.realpath(out_directory))
    if way == os.curdir:
        return ""
    parts = Path(way).parts
    return None if os.pardir in parts or os.path.isabs(way) else "/".join(parts) + "/"


def _reference(groups: list[_Group]) -> Placement:
    placement = Placement("reference")
    for group in groups:
        if group.obstacle is not None:
            message = (
                f"the output cannot share the data file {group.file.path}, which {group.obstacle}: use --weights copy."
            )
            raise UsageError(message)
        if group.prefix:
            place_ = NewPlace(group.prefix + group.file.location)
            placement.places.update(dict.fromkeys(group.tensors, place_))
        if group.file.size is None:
            placement.notes.append(f"the data file {group.file.path} is absent; the output refers to it")
        else:
            placement.shared.append(group.file.path)
    return placement


def _copy(
    groups: list[_Group],
    mode: Literal["copy", "hardlink"],
    out_directory: Path,
    namer: Namer,
) -> Placement:
    placement = Placement(mode)
    locations: dict[str, str] = {}
    for group in groups:
        file = group.file
        if file.size is None:
            _leave_absent(placement, group, out_directory)
            continue
        real = os.path.realpath(file.path)
        location = locations.get(real)
        if location is None:
            location = locations[real] = namer.fresh(file.location)
            # A link to a symbolic link would be refused as much as that is.
            job = FileCopy(location, file.path, file.size) if mode == "copy" else FileLink(location, Path(real))
            placement.jobs.append(job)
        placement.places.update(dict.fromkeys(group.tensors, NewPlace(location)))
    if mode == "hardlink" and placement.jobs:
        placement.notes.append("hard-linked data is read by ONNX Runtime but refused by onnx.load and onnx.checker")
    return placement


def _leave_absent(placement: Placement, group: _Group, out_directory: Path) -> None:
    location = group.file.location
    reason = unsafe_location(location)
    if reason is not None:
        message = f"the data file {group.file.path} is absent and its location {location!r} {reason}: bring it first."
        raise UsageError(message)
    target = out_directory / location
    if os.path.lexists(target):
        note = (
            f"the data file {group.file.path} is absent; the output will read {target}, which must hold the same bytes"
        )
    else:
        note = f"the data file {group.file.path} is absent; bring it to {target} before the output is used"
    placement.notes.append(note)


def _repack(groups: list[_Group], tensors: list[ir.ExternalTensor], namer: Namer) -> Placement:
    placement = Placement("repack")
    if not groups:
        return placement
    location = namer.fresh(None)
    ranges: list[tuple[Path, int, int]] = []
    position = 0
    for group in groups:
        needs = [need_of(tensors[number]) for number in group.tensors]
        merged = _merge(needs)
        _check_repackable(group, needs)
        # First byte of each merged range in the old file, and how far it moves.
        starts, moves = [], []
        for start, end in merged:
            starts.append(start)
            moves.append(position - start)
            ranges.append((group.file.path, start, end - start))
            position += end - start
        for number, need in zip(group.tensors, needs, strict=True):
            offset = need.offset + moves[bisect.bisect_right(starts, need.offset) - 1] if need.length else 0
            placement.places[number] = NewPlace(location, offset, need.length, repacked=True)
    placement.jobs.append(FileRepack(location, tuple(ranges)))
    return placement


def _check_repackable(group: _Group, needs: Iterable[Need]) -> None:
    file = group.file
    for need in needs:
        if need.end > (file.size or 0):
            what = "is absent" if file.size is None else f"ends before tensor {need.name!r} does"
            remedy = "bring the data, or use --weights reference"
            raise SaveError(f"the data file {file.path} {what}, so that it cannot be repacked: {remedy}.")


def _merge(needs: Iterable[Need]) -> list[tuple[int, int]]:
    """The ranges ``(start, end)`` that ``needs`` cover, in order; those that touch or overlap are one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((need.offset, need.end) for need in needs if need.length):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def need_of(tensor: ir.ExternalTensor) -> Need:
    """The bytes that ``tensor`` is made of; a length that is not stated follows from its shape and dtype."""
    length = tensor.length if tensor.length is not None else tensor.nbytes
    return Need(tensor.name or "(an unnamed constant)", tensor.offset or 0, length)
