"""Feeds that the user gives: an .npz file or arrays by name.

Keys are input names for one feed, or ``f<i>|in|<name>`` for several.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from graphsurgery.equivalence.feeds import Feed, Sizes
from graphsurgery.equivalence.roles import Role, cache_axis
from graphsurgery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.roles import Signature

__all__ = ["given_feeds"]

_KEY = re.compile(r"f(\d+)\|in\|(.+)", re.DOTALL)


def given_feeds(source: Path | str | Mapping[str, Array], signature: Signature, drawn: frozenset[str]) -> list[Feed]:
    """Read feeds and check that every input is fed.

    Args:
        source: see the module; keys ``f<i>|out|<name>`` are passed over.
        signature: of what must be fed.
        drawn: inputs that need not be given because only the rewritten model has them; 0 is fed.

    Raises:
        UsageError: the file cannot be read, holds no feed, or an input is missing.
    """
    if isinstance(source, str | Path):
        try:
            with np.load(source) as archive:
                arrays: dict[str, Array] = {key: archive[key] for key in archive.files}
        except (OSError, ValueError) as error:
            raise UsageError(f"{source} cannot be read as .npz feeds: {error}.") from error
    else:
        arrays = {key: np.asarray(array) for key, array in source.items()}
    groups: dict[int, dict[str, Array]] = {}
    for key, array in arrays.items():
        match = _KEY.fullmatch(key)
        if match:
            groups.setdefault(int(match[1]), {})[match[2]] = array
        elif "|out|" not in key:
            groups.setdefault(0, {})[key] = array
    if not groups:
        raise UsageError("No feeds were given: name arrays by input, or f0|in|<input> for several feeds.")
    return [_given(number, groups[number], signature, drawn) for number in sorted(groups)]


def _given(number: int, arrays: dict[str, Array], signature: Signature, drawn: frozenset[str]) -> Feed:
    missing = [spec.name for spec in signature.inputs if spec.name not in arrays and spec.name not in drawn]
    if missing:
        raise UsageError(f"Feed f{number} has no array for input {missing[0]}: give every input of the model.")
    for spec in signature.inputs:
        if spec.name in arrays and arrays[spec.name].ndim != len(spec.dims):
            raise UsageError(
                f"Feed f{number} gives input {spec.name} {arrays[spec.name].ndim} axes: the model has {len(spec.dims)}."
            )
    sizes = _sizes(arrays, signature)
    letters = sizes.letters()
    for spec in signature.inputs:
        if spec.name not in arrays and spec.role is Role.BOUND:
            arrays[spec.name] = np.zeros(
                _slots(arrays, signature), onnx.helper.tensor_dtype_to_np_dtype(spec.elem_type)
            )
        elif spec.name not in arrays:
            shape = [
                dim if isinstance(dim, int) else letters.get(signature.letters.get(dim, ""), sizes.batch)
                for dim in spec.dims
            ]
            arrays[spec.name] = np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(spec.elem_type))
    return Feed(f"f{number}", sizes, None, lambda: dict(arrays))


def _slots(arrays: Mapping[str, Array], signature: Signature) -> int:
    """N of the largest fixed-size cache: all of it is read, as it is not told how much is in use."""
    caches = [spec for spec in signature.having(Role.SLOTS) if spec.name in arrays]
    return max((arrays[spec.name].shape[cache_axis(spec)] for spec in caches), default=1)


def _sizes(arrays: Mapping[str, Array], signature: Signature) -> Sizes:
    sequence = signature.sequence
    if sequence is None:
        return Sizes(1, 1, 0)
    spec, axis = sequence
    shape = arrays[spec.name].shape
    length = int(shape[axis])
    past = next(
        (
            int(arrays[cache.name].shape[place])
            for cache in signature.having(Role.CACHE)
            for place, dim in enumerate(cache.dims)
            if isinstance(dim, str) and signature.letters.get(dim) == "P" and cache.name in arrays
        ),
        0,
    )
    return Sizes(int(shape[0]) if axis else 1, length, past)
