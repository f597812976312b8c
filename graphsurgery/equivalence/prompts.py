"""Prompts to decode: token ids or text that users give, and ids drawn from a seed.

A prompt is given as ids (``1,2,3``), as text, or as a file: .npz or .json with ids, anything else with text. Text needs
the package tokenizers and the tokenizer.json beside the model.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphsurgery.equivalence.layouts import Party, Plan, make_plan
from graphsurgery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Prompt", "draw_prompts", "given_prompts"]

_IDS = re.compile(r"\s*-?\d+\s*(,\s*-?\d+\s*)*,?\s*")
_REMEDY = "or give token ids, such as 1,2,3"

# Rows of the drawn prompts, and in how many calls they are fed where that is free: a short one, a single token, a batch
# of unequal rows, one of equal rows, one in chunks, and one of a few hundred.
_DRAWN: tuple[tuple[tuple[int, ...], int], ...] = (
    ((5,), 1),
    ((1,), 1),
    ((7, 4), 1),
    ((3, 3), 1),
    ((40,), 2),
    ((200,), 1),
)
# What a model with buffers that are larger than what is in them is fed besides.
_BUFFERED = (9,)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Rows of token ids that are decoded together.

    Attributes:
        name: short and unique, as reports print it.
        rows: token ids of each row.
        pieces: calls for the prompt, where that is free.
        seed: what it was drawn from; None where it was given.
        buffered: growing caches are fed as buffers larger than what is in them.
    """

    name: str
    rows: tuple[tuple[int, ...], ...]
    pieces: int = 1
    seed: int | None = None
    buffered: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(len(row) for row in self.rows)


# ---- given ------------------------------------------------------------------------------------------------------------


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
    if batch is not None:
        filled = rows + [rows[place % len(rows)] for place in range(-len(rows) % batch)]
        groups = [tuple(filled[place : place + batch]) for place in range(0, len(filled), batch)]
        return [Prompt(f"prompts-{number}", group) for number, group in enumerate(groups)]
    prompts = [Prompt(f"prompt-{number}", (row,)) for number, row in enumerate(rows)]
    if len(rows) > 1:
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
        if isinstance(item, Path) or path.suffix in {".npz", ".json"}:
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


# ---- drawn ------------------------------------------------------------------------------------------------------------


def draw_prompts(parties: tuple[Party, Party], seed: int, vocabulary: int, tokens: int) -> list[Prompt]:
    """Draw prompts that the files of both parties can take, each length once.

    Args:
        parties: reference and rewritten.
        seed: every prompt follows from it and its number.
        vocabulary: ids are below.
        tokens: to be decoded behind each prompt.
    """
    prompts: list[Prompt] = []
    for number, (lengths, pieces) in enumerate(_DRAWN):
        fitted = _fitted(lengths, pieces, parties, tokens)
        if fitted is not None and (fitted, pieces) not in [(each.lengths, each.pieces) for each in prompts]:
            prompts.append(_drawn(fitted, pieces, seed, number, vocabulary))
    if all(party.buffered for party in parties):
        fitted = _fitted(_BUFFERED, 1, parties, tokens)
        if fitted is not None:
            drawn = _drawn(fitted, 1, seed, len(_DRAWN), vocabulary)
            prompts.append(dataclasses.replace(drawn, name=f"{drawn.name}-buffer", buffered=True))
    return prompts


def _drawn(lengths: tuple[int, ...], pieces: int, seed: int, number: int, vocabulary: int) -> Prompt:
    generator = np.random.default_rng([seed, number])
    rows = tuple(tuple(generator.integers(0, vocabulary, length).tolist()) for length in lengths)
    ragged = "-ragged" if len(set(lengths)) > 1 else ""
    chunks = f"-in-{pieces}" if pieces > 1 else ""
    return Prompt(f"b{len(lengths)}-s{max(lengths)}{ragged}{chunks}", rows, pieces, seed)


def _fitted(lengths: tuple[int, ...], pieces: int, parties: tuple[Party, Party], tokens: int) -> tuple[int, ...] | None:
    """The lengths, or the nearest that can be fed; None where none can."""
    fallback: tuple[int, ...] | None = None
    for candidate in _candidates(lengths, parties, tokens):
        plan = make_plan(candidate, pieces, parties, tokens)
        if isinstance(plan, Plan) and plan.tokens == tokens:
            return candidate
        if isinstance(plan, Plan) and fallback is None:
            fallback = candidate
    return fallback


def _candidates(lengths: tuple[int, ...], parties: tuple[Party, Party], tokens: int) -> Iterator[tuple[int, ...]]:
    files = [file for party in parties for file in (party.prompt, party.step)]
    batch = next((file.batch for file in files if file.batch is not None), len(lengths))
    rows = tuple(lengths[place % len(lengths)] for place in range(batch))
    longest = max(rows)
    yield rows
    yield (longest,) * batch
    capacity = min((file.capacity for file in files if file.capacity is not None), default=longest + tokens)
    room = max(1, capacity - tokens)
    chunk = next((party.prompt.length for party in parties if party.prompt.length is not None), 1)
    # Whole calls, the fewest that hold it and still leave room; then one call, however little room is left.
    whole = min(-(-longest // chunk), max(1, room // chunk)) * chunk
    shorter = min(longest, room)
    yield tuple(min(row, shorter) for row in rows)
    yield (shorter,) * batch
    yield (whole,) * batch
    yield (chunk,) * batch
    for file in files:
        if file.past:
            yield (file.past,) * batch
