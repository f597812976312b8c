"""Files that an output brings besides its data: the spec of a skeleton's weights, and the specialisations file."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import TYPE_CHECKING

from graphsurgery.errors import SaveError, UsageError
from graphsurgery.specializations import bind_specializations, parse_specializations, specializations_text
from graphsurgery.weight_spec import read_weights, spec_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import onnx_ir as ir

    from graphsurgery.model_files.source import Source
    from graphsurgery.specializations import Specialization

__all__ = [
    "SideFile",
    "check_side_files",
    "parse_request",
    "skeleton_note",
    "specializations_file",
    "weights_file",
    "write_side_files",
]


@dataclasses.dataclass(frozen=True)
class SideFile:
    """A text file to be written once the model is in place."""

    path: Path
    text: str


def parse_request(path: Path | None, texts: Sequence[str]) -> list[Specialization]:
    """What ``--specializations`` and ``--specialize`` ask for.

    Raises:
        UsageError: one is given without the other, or a text cannot be read.
    """
    if path is None and not texts:
        return []
    if path is None:
        raise UsageError("--specialize says what is to be in a file: name it with --specializations F.json.")
    if not texts:
        raise UsageError("--specializations needs sizes: add --specialize seq=128,ctx=4096 (a prefill and a decode).")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"The directory {path.absolute().parent} of --specializations does not exist: make it first.")
    return parse_specializations(texts)


def specializations_file(model: ir.Model, path: Path, wanted: Sequence[Specialization]) -> SideFile:
    """The specialisations file of the finished model.

    Raises:
        UsageError: the sizes do not fit the model.
    """
    return SideFile(path, specializations_text(bind_specializations(model, wanted)))


def weights_file(model: ir.Model, source: Source, output: Path) -> SideFile | None:
    """The spec of a skeleton's weights, ``<output>.weights.json``; None for a model that holds its weights."""
    entries = read_weights(model)
    if not entries:
        return None
    path = output.with_name(f"{output.name}.weights.json")
    return SideFile(path, spec_text(entries, output.name, source.directory, output.parent))


def skeleton_note(source: Source, output: Path) -> str | None:
    """Where the weights of a skeleton stay, if not beside it; None where they do lie there."""
    directory = os.path.realpath(source.directory)
    if directory == os.path.realpath(output.parent):
        return None
    return f"{output} is a skeleton, and its weights stay in {directory}: {output.name}.weights.json says where."


def check_side_files(files: Sequence[SideFile], output: Path, *, force: bool) -> None:
    """Refuse, before the model is in place, what could not be written after it.

    Raises:
        UsageError: a file exists and may not be replaced, or would take the place of the model.
    """
    for file in files:
        if file.path.absolute() == output.absolute() or file.path.suffix == ".onnx":
            raise UsageError(f"{file.path} is the name of a model: give the file another.")
        if file.path.is_dir():
            raise UsageError(f"{file.path} is a directory: choose another name.")
        if os.path.lexists(file.path) and not force:
            raise UsageError(f"{file.path} exists: choose another, or replace it with --force.")


def write_side_files(files: Sequence[SideFile]) -> None:
    """Write the files, each by a rename.

    Raises:
        SaveError: one cannot be written.
    """
    for file in files:
        temporary = file.path.with_name(f".{file.path.name}.graphsurgery-{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_text(file.text, encoding="utf-8", newline="\n")
            temporary.replace(file.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise SaveError(f"Cannot write {file.path}: {error.strerror}; choose another place.") from error
