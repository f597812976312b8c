"""Where a saved model goes, and whether it may go there."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from graphsurgery.errors import UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.model_files.source import Source

__all__ = ["Namer", "Target", "check_not_data", "check_output", "default_output", "plan_output", "relative_path"]


def default_output(source: Source) -> Path:
    """Where the result goes if nothing is said: beside the input, ``model.surgery.onnx`` for ``model.onnx``."""
    return source.path.with_name(f"{source.path.name.removesuffix('.onnx')}.surgery.onnx")


@dataclasses.dataclass(frozen=True)
class Target:
    """Where the output goes.

    Attributes:
        directory: the output directory; for a single file, its directory.
        relative: the .onnx relative to it.
        companions: whether the input's other files come along.
        whole: whether ``directory`` is to appear as a whole.
    """

    directory: Path
    relative: str
    companions: bool
    whole: bool

    @property
    def path(self) -> Path:
        """The .onnx that will be there."""
        return self.directory / self.relative


class Namer:
    """Gives names of data files that neither exist nor were given or reserved before."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._given: set[str] = set()

    def reserve(self, location: str) -> None:
        """Keep ``location`` for data that is yet to be brought there."""
        self._given.add(PurePosixPath(location).as_posix())

    def fresh(self, former: str | None) -> str:
        """A location relative to the .onnx; in a directory output a copy keeps its ``former`` location if that is free."""
        name = self._target.path.name
        if former is not None and self._target.companions and self._is_free(former):
            location = former
        else:
            names = (f"{name}{'' if not number else f'.{number}'}.data" for number in range(10**6))
            location = next(candidate for candidate in names if self._is_free(candidate))
        self.reserve(location)
        return location

    def _is_free(self, location: str) -> bool:
        path = self._target.path
        taken = PurePosixPath(location).as_posix() in self._given
        return not taken and location != path.name and not os.path.lexists(path.parent / location)


def plan_output(
    source: Source | None, path: str | os.PathLike[str] | None, *, as_directory: bool, file_name: str | None
) -> Target:
    """Where a save goes: the default place, one file, or a directory with companions."""
    if path is None:
        if source is None:
            raise UsageError("this model was not loaded from a file, so that there is no default output: give a path.")
        output = default_output(source)
        return Target(output.parent, output.name, companions=False, whole=False)
    text = os.fspath(path)
    if not text or "\0" in text:
        raise UsageError(f"the output {text!r} is not a path: give the name of an .onnx file or a directory.")
    output = Path(text)
    if not (as_directory or text.endswith(("/", os.sep)) or output.is_dir()):
        if file_name is not None:
            raise UsageError(f"a file name was given and the output {output} is not a directory: leave it out.")
        return Target(output.parent, output.name, companions=False, whole=False)
    if os.path.lexists(output) and not output.is_dir():
        raise UsageError(f"the output {output} is to be a directory and a file has that name: choose another.")
    relative = "model.onnx" if source is None else relative_path(source.path, source.root)
    if file_name is not None:
        if PurePosixPath(file_name).name != file_name:
            raise UsageError(f"the file name {file_name!r} has a directory in it: give the name alone.")
        relative = str(PurePosixPath(relative).with_name(file_name))
    if source is not None and output.exists() and os.path.samefile(output, source.root):
        return Target(output, relative, companions=False, whole=False)
    return Target(output, relative, companions=True, whole=not output.exists())


def relative_path(path: Path, root: Path) -> str:
    """``path`` as seen from ``root``, with forward slashes as data locations have them."""
    return Path(os.path.relpath(path, root)).as_posix()


def check_output(target: Target, source: Source | None, *, force: bool) -> None:
    """Refuse a target that cannot be written, or that exists and may not be replaced."""
    directory = target.directory.absolute().parent if target.whole else target.directory
    if not directory.is_dir():
        raise UsageError(f"the output's directory {directory} does not exist: make it first.")
    path = target.path
    if path.is_dir():
        raise UsageError(f"the output {path} is a directory: choose another name.")
    if not os.path.lexists(path):
        return
    if path.exists() and not path.is_file():
        raise UsageError(f"the output {path} is not a regular file: choose another.")
    if force:
        return
    if source is not None and source.path.exists() and path.exists() and os.path.samefile(path, source.path):
        raise UsageError(f"the output {path} is the input itself: choose another, or replace it with --force.")
    raise UsageError(f"the output {path} exists: choose another, or replace it with --force.")


def check_not_data(path: Path, tensors: list[ir.ExternalTensor], default: Path) -> None:
    """The output must not take the name of a data file, be it there or yet to be brought."""
    for location in dict.fromkeys((os.fspath(t.base_dir) or default, os.fspath(t.location)) for t in tensors):
        data = Path(*location)
        same = path.exists() and data.exists() and os.path.samefile(path, data)
        if same or (os.path.realpath(path.parent) == os.path.realpath(data.parent) and path.name == data.name):
            raise UsageError(f"the output {path} is a data file of the model: choose another name.")
