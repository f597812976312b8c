"""Which external data locations are safe, and what the files they name hold."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_files.reading import is_lfs_pointer
from graphsurgery.model_files.source import DataFile, DataProblem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Need", "data_file", "find_problems", "is_linked", "unsafe_location"]

_DRIVE = re.compile(r"[A-Za-z]:")


@dataclasses.dataclass(frozen=True)
class Need:
    """The bytes ``offset : offset + length`` of a data file that the tensor ``name`` is made of."""

    name: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte behind it; 0 for a tensor without bytes, which needs no file."""
        return self.offset + self.length if self.length else 0


def unsafe_location(location: str) -> str | None:
    """Why ``location`` must not be followed; None where it stays within the model's directory.

    The text alone is judged: ``..`` is refused even where it would lead back inside, since a link before it could lead
    elsewhere, and so is what another operating system would read as absolute.
    """
    if not location:
        return "is empty"
    if "\0" in location:
        return "holds a zero byte"
    if "\\" in location:
        return "holds a backslash, which some systems read as a directory separator"
    if os.path.isabs(location) or location.startswith("/") or _DRIVE.match(location):
        return "is absolute"
    parts = location.split("/")
    if ".." in parts:
        return "leaves the model's directory"
    if parts[-1] in ("", "."):
        return "names a directory"
    return None


def is_linked(directory: Path, location: str) -> bool:
    """Whether a symbolic link lies on the way from ``directory`` to the file at ``location``."""
    path = directory
    for part in Path(location).parts:
        path = path / part
        if path.is_symlink():
            return True
    return False


def data_file(directory: Path, location: str) -> DataFile:
    """Look at the data file at ``location``.

    Raises:
        InputRefusedError: it is there and is not a regular file (a directory, a device, a pipe).
    """
    path = directory / location
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return DataFile(location, path, None, linked=False)
    if not stat.S_ISREG(status.st_mode):
        raise InputRefusedError(f"the data file {path} is not a regular file: put the model's data file in its place.")
    return DataFile(location, path, status.st_size, linked=is_linked(directory, location))


def find_problems(
    files: Iterable[DataFile], needs: Mapping[str, Iterable[Need]], model: Path
) -> tuple[DataProblem, ...]:
    """What is wrong with ``files``, one entry a file.

    Args:
        files: the data files.
        needs: what tensors ask of them, by location.
        model: the .onnx file.
    """
    problems = []
    for file in files:
        wanted = tuple(needs[file.location])
        end = max((need.end for need in wanted), default=0)
        if file.size is None:
            problems.append(DataProblem(file.path, "missing", _names(wanted), end, None, _missing_hint(model, file)))
            continue
        lacking = tuple(need for need in wanted if need.end > file.size)
        if lacking:
            hint = "it is a Git LFS pointer: run `git lfs pull`" if is_lfs_pointer(file.path) else ""
            problems.append(DataProblem(file.path, "short", _names(lacking), end, file.size, hint))
    return tuple(problems)


def _names(needs: Iterable[Need]) -> tuple[str, ...]:
    return tuple(need.name for need in needs)


def _missing_hint(model: Path, file: DataFile) -> str:
    """A link to a model does not bring its data along; say where it is."""
    if model.is_symlink():
        beside_target = Path(os.path.realpath(model)).parent / file.location
        if beside_target.is_file():
            return f"{model} is a link and its target has the data beside it: give the path of the target"
    return ""
