"""Which files are measured against which: one, two, or those of two directories by name."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.model_files.staging import is_temporary

__all__ = ["Pair", "find_pairs"]

_BOOKKEEPING = frozenset({".git", ".cache"})


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model under a name for the report; ``b`` is None where it is measured alone."""

    name: str
    a: Path
    b: Path | None


def find_pairs(a: Path, b: Path | None) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    """Pair the models of ``a`` and ``b``; files of two directories belong together by their relative names.

    Returns:
        The pairs by name, and a note for each model that has no partner.

    Raises:
        InputRefusedError: there is no such file, or no model in a directory, or no name that both have.
        UsageError: a file was given with a directory.
    """
    for path in (a, b):
        if path is not None and not path.exists():
            raise InputRefusedError(f"{path} does not exist: give an .onnx file or a directory of them.")
    if b is not None and a.is_dir() != b.is_dir():
        directory, file = (a, b) if a.is_dir() else (b, a)
        raise UsageError(f"{directory} is a directory and {file} is not: give two files or two directories.")
    if not a.is_dir():
        return (Pair(a.name, a, b),), ()
    ours = _models(a)
    if b is None:
        return tuple(Pair(name, ours[name], None) for name in sorted(ours)), ()
    theirs = _models(b)
    common = sorted({*ours} & {*theirs})
    if not common:
        raise InputRefusedError(f"No model in {a} has a namesake in {b}: give the files themselves.")
    notes = [f"{name} is only in {a}: not measured" for name in sorted({*ours} - {*theirs})]
    notes += [f"{name} is only in {b}: not measured" for name in sorted({*theirs} - {*ours})]
    return tuple(Pair(name, ours[name], theirs[name]) for name in common), tuple(notes)


def _models(directory: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}

    def refuse(error: OSError) -> None:
        message = f"{error.filename} cannot be listed ({error.strerror}): check the path and its permissions."
        raise InputRefusedError(message) from error

    for top, directories, names in os.walk(directory, onerror=refuse):
        directories[:] = [name for name in directories if name not in _BOOKKEEPING and not is_temporary(name)]
        for name in names:
            if name.endswith(".onnx") and not is_temporary(name):
                path = Path(top, name)
                found[path.relative_to(directory).as_posix()] = path
    if not found:
        raise InputRefusedError(f"{directory} holds no .onnx file: give the directory of a model, or an .onnx file.")
    return found
