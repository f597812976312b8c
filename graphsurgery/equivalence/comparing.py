"""Comparing two values of one output: tolerances, NaN and infinities, rows that are left out.

The error of an output is ``max|a - b| / max(1, max|a|)`` over its finite elements, a the reference.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from graphsurgery.equivalence.feeds import Array

__all__ = ["Comparison", "compare", "scale_of", "tolerance"]

# Relative to max(1, max|reference|), with graph optimisations disabled and at ONNX Runtime's default level.
_PLAIN = {2: 2e-3, 4: 1e-5, 8: 1e-5}
_OPTIMIZED = {2: 2e-3, 4: 1e-4, 8: 1e-4}

# Magnitude from which a value that both models agree on is taken for a mask.
_MASKING = 1e4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How one output of the rewritten model compares with the reference on one feed.

    Attributes:
        error: see the module; 0 for equal, inf for what has no distance (shapes, NaN at other places, text).
        tolerance: the largest error that passes; 0 where every bit must be equal.
        dtype: of the reference.
        index: where the error is largest; None where the output as a whole differs.
        problem: one clause that says what is wrong; None where the error is within tolerance.
    """

    error: float
    tolerance: float
    dtype: str
    index: tuple[int, ...] | None = None
    problem: str | None = None


def tolerance(dtype: np.dtype[Any], *, half: bool, optimized: bool) -> float:
    """The tolerance of a dtype: 0 for integers, booleans and text.

    Args:
        dtype: of the reference output.
        half: the model computes in float16, whatever the output is cast to.
        optimized: the models run at ONNX Runtime's default level.
    """
    if dtype.kind != "f":
        return 0.0
    table = _OPTIMIZED if optimized else _PLAIN
    return table[2] if half else table.get(dtype.itemsize, table[4])


def compare(reference: Any, got: Any, limit: float, *, excluded: Array | None = None) -> Comparison:
    """Compare two values of one output.

    Args:
        reference: a tensor, a sequence of tensors, or None.
        got: the same of the rewritten model.
        limit: largest error that passes; 0 asks for the same bits.
        excluded: booleans of the shape of ``reference`` (or broadcast to it), True where elements are not compared.
    """
    if isinstance(reference, list) and isinstance(got, list):
        return _compare_sequences(reference, got, limit)
    if not isinstance(reference, np.ndarray) or not isinstance(got, np.ndarray):
        same = type(reference) is type(got) and reference == got
        name = type(reference).__name__
        problem = None if same else f"holds {type(got).__name__} {got!r:.40}, not {name} {reference!r:.40}"
        return Comparison(0.0 if same else math.inf, 0.0, name, None, problem)
    dtype = str(reference.dtype)
    if reference.dtype != got.dtype:
        return Comparison(math.inf, limit, dtype, None, f"is {got.dtype}, not {dtype}")
    if reference.shape != got.shape:
        return Comparison(math.inf, limit, dtype, None, f"has shape {list(got.shape)}, not {list(reference.shape)}")
    if reference.size == 0:
        return Comparison(0.0, limit, dtype)
    keep = None if excluded is None else ~np.broadcast_to(excluded, reference.shape)
    if keep is not None and not keep.any():
        return Comparison(0.0, limit, dtype)
    if reference.dtype.kind == "f" and limit > 0:
        return _compare_floats(reference, got, limit, keep)
    return _compare_bits(reference, got, keep)


def _compare_sequences(reference: list[Any], got: list[Any], limit: float) -> Comparison:
    if len(reference) != len(got):
        return Comparison(math.inf, limit, "sequence", None, f"holds {len(got)} tensors, not {len(reference)}")
    worst = Comparison(0.0, limit, "sequence")
    for position, (first, second) in enumerate(zip(reference, got, strict=True)):
        each = compare(first, second, limit)
        if each.problem is not None or each.error > worst.error:
            index = (position, *(each.index or ()))
            worst = dataclasses.replace(each, index=index)
            if each.problem is not None:
                break
    return worst


def _compare_bits(reference: Array, got: Array, keep: Array | None) -> Comparison:
    dtype = str(reference.dtype)
    if reference.dtype.kind in "OUS":
        differs = reference != got
    else:
        width = f"V{reference.dtype.itemsize}"
        differs = np.ascontiguousarray(reference).view(width) != np.ascontiguousarray(got).view(width)
    if keep is not None:
        differs = differs & keep
    count = int(np.count_nonzero(differs))
    if not count:
        return Comparison(0.0, 0.0, dtype)
    first = np.unravel_index(int(np.argmax(differs)), reference.shape)
    index = tuple(int(place) for place in first)
    error = math.inf
    if reference.dtype.kind in "fiu":
        with np.errstate(invalid="ignore"):
            distance = np.abs(reference.astype(np.float64) - got.astype(np.float64))
        finite = distance[differs & np.isfinite(distance)]
        error = float(finite.max()) if finite.size else math.inf
    return Comparison(
        error, 0.0, dtype, index, f"differs in {count} of {reference.size} elements that must be bitwise equal"
    )


def _compare_floats(reference: Array, got: Array, limit: float, keep: Array | None) -> Comparison:
    dtype = str(reference.dtype)
    wide = reference.dtype if reference.dtype.itemsize >= 4 else np.dtype(np.float32)
    first, second = reference.astype(wide, copy=False), got.astype(wide, copy=False)
    finite = np.isfinite(first)
    both = finite & np.isfinite(second)
    # Infinities and NaN are equal to themselves: by sign, and at the same place.
    with np.errstate(invalid="ignore"):
        odd = ~both & ~((first == second) | (np.isnan(first) & np.isnan(second)))
    if keep is not None:
        odd, both, finite = odd & keep, both & keep, finite & keep
    if odd.any():
        index = tuple(int(place) for place in np.unravel_index(int(np.argmax(odd)), reference.shape))
        what = f"is {second[index]}, not {first[index]}, at {list(index)} ({int(np.count_nonzero(odd))} such elements)"
        return Comparison(math.inf, limit, dtype, index, what)
    if not both.any():
        return Comparison(0.0, limit, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(both, np.abs(first - second), 0)
    scale = scale_of(first, second, finite)
    place = int(np.argmax(distance))
    index = tuple(int(axis) for axis in np.unravel_index(place, reference.shape))
    error = float(distance.reshape(-1)[place]) / scale
    problem = None
    if not error <= limit:
        problem = f"differs by {error:.2e} relative to max(1, max|reference|), above {limit:.0e}, at {list(index)}"
    return Comparison(error, limit, dtype, index, problem)


def scale_of(reference: Array, got: Array, counted: Array) -> float:
    """``max(1, max|reference|)`` over the elements ``counted``, which errors are relative to.

    Constants that mask (-1e9, the least float) are no measure of the rest: equal and huge, they do not count.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        masking = (reference == got) & (np.abs(reference) >= _MASKING)
        return max(1.0, float(np.abs(np.where(counted & ~masking, reference, 0)).max()))
