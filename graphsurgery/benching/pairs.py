"""Which files are measured against which: one, two, or those of two directories by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.model_files.finding import find_models

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Pair", "find_pairs"]


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
    ours = find_models(a)
    if b is None:
        return tuple(Pair(name, ours[name], None) for name in sorted(ours)), ()
    theirs = find_models(b)
    common = sorted({*ours} & {*theirs})
    if not common:
        raise InputRefusedError(f"No model in {a} has a namesake in {b}: give the files themselves.")
    notes = [f"{name} is only in {a}: not measured" for name in sorted({*ours} - {*theirs})]
    notes += [f"{name} is only in {b}: not measured" for name in sorted({*theirs} - {*ours})]
    return tuple(Pair(name, ours[name], theirs[name]) for name in common), tuple(notes)
