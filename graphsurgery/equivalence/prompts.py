"""Prompts that users give: token ids, text or files.

A prompt is given as ids (``1,2,3``), as text, or as a file: .npz or .json with ids, anything else with text. Text needs
the package tokenizers and the tokenizer.json beside the model.
"""

from __future__ import annotations

import importlib
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphsurgery.equivalence.layouts import Prompt
from graphsurgery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["given_prompts"]

_IDS = re.compile(r"\s*-?\d+\s*(,\s*-?\d+\s*)*,?\s*")
_REMEDY = "or give token ids, such as 1,2,3"


def given_prompts(
    given: Sequence[str | Path | Sequence[int]], model: Path, vocabulary: int | None, batch: int | None
) -> list[Prompt]:
    """Read prompts: each alone, and all together where there are several.

    Args:
        given: see the module; a sequence of integers is taken as ids.
        model: tokenizer.json is looked for beside it.
        vocabulary: ids must be below; None where the model does not tell.
        batch: B where it is fixed: prompts are then taken in groups of B, the last one filled up from the first.

    Raises:
        UsageError: a prompt cannot be read, is empty, or holds an id that is none.
    """
    rows: list[tuple[int, ...]] = []
    for item in given:
        rows += [tuple(row) for row in _read(item, model)]
    if not rows:
        raise UsageError("No prompt was given.")
    for row in rows:
        _check(row, model, vocabulary)
    if batch is not None and batch > 1:
        filled = rows + [rows[place % len(rows)] for place in range(-len(rows) % batch)]
        groups = [tuple(filled[place : place + batch]) for place in range(0, len(filled), batch)]
        return [Prompt(f"prompts-{number}", group) for number, group in enumerate(groups)]
    prompts = [Prompt(f"prompt-{number}", (row,)) for number, row in enumerate(rows)]
    if len(rows) > 1 and batch is None:
        prompts.append(Prompt("all-prompts", tuple(rows)))
    return prompts


def _check(row: Sequence[int], model: Path, vocabulary: int | None) -> None:
    if not row:
        raise UsageError("A prompt is empty: give at least one token.")
    wrong = next((token for token in row if token < 0 or (vocabulary is not None and token >= vocabulary)), None)
    if wrong is not None:
        known = f"0 to {vocabulary - 1}" if vocabulary is not None else "0 and up"
        raise UsageError(f"Prompt id {wrong} is no token of {model}, which takes {known}.")


def _read(item: str | Path | Sequence[int], model: Path) -> list[list[int]]:
    if not isinstance(item, str | Path):
        return [[int(token) for token in item]]
    if isinstance(item, str) and _IDS.fullmatch(item):
        return [[int(token) for token in item.split(",") if token.strip()]]
    path = Path(item)
    if not _is_file(path):
        if isinstance(item, Path) or path.suffix in {".npz", ".json", ".txt"}:
            raise UsageError(f"The prompt file {item} does not exist.")
        return [_encode(item, model)]
    if path.suffix == ".npz":
        return _from_npz(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The prompt file {path} cannot be read as text: {error}.") from error
    if path.suffix == ".json":
        return _from_json(path, text)
    return [
        [int(token) for token in text.split(",") if token.strip()] if _IDS.fullmatch(text) else _encode(text, model)
    ]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text too long for a name, or with a character that none can hold
        return False


def _from_npz(path: Path) -> list[list[int]]:
    try:
        with np.load(path) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"The prompt file {path} cannot be read as .npz: {error}.") from error
    rows: list[list[int]] = []
    for key, array in arrays.items():
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise UsageError(f"Array {key} of the prompt file {path} must hold integers, [S] or [B, S].")
        rows += np.atleast_2d(array).tolist()
    return rows


def _from_json(path: Path, text: str) -> list[list[int]]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"The prompt file {path} cannot be read as JSON: {error}.") from error
    rows = data if isinstance(data, list) and data and all(isinstance(row, list) for row in data) else [data]
    if not all(isinstance(row, list) and all(type(token) is int for token in row) for row in rows):
        raise UsageError(f"The prompt file {path} must hold a list of token ids, or a list of such lists.")
    return [list(row) for row in rows]


def _encode(text: str, model: Path) -> list[int]:
    """Token ids of a text, by the tokenizer beside the model."""
    path = model.parent / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"The prompt is text and there is no {path}: put the model's tokenizer there, {_REMEDY}.")
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UsageError(
            f"The prompt is text, which needs the package tokenizers: pip install tokenizers, {_REMEDY}."
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        raise UsageError(f"{path} is no tokenizer that the package tokenizers reads: {error}.") from error
    return [int(token) for token in tokenizer.encode(text).ids]
