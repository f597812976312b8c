"""What a cache holds after decoding, told in the same way whatever the convention, so that two models can be compared.

Alphabet: B batch, T columns.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.equivalence.handover import Manner

if TYPE_CHECKING:
    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.handover import Cache
    from graphsurgery.equivalence.tape import Side, Tape

__all__ = ["Kept", "kept_of"]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What one cache holds at the end, whatever the convention: an array ``[n, ..]``, and whose each of the n is.

    Attributes:
        array: entries of real tokens in the order of rows and columns; states by row; scalars alone.
        rows: batch row of each entry.
        columns: column of each entry; the last one for states.
    """

    array: Array
    rows: Array
    columns: Array


def kept_of(cache: Cache, array: Array, tape: Tape, packed: Side | None) -> Kept:
    """The entries of real tokens, in the order of rows and columns.

    Args:
        cache: what was handed on.
        array: what it holds, as :func:`~graphsurgery.equivalence.handover.columns_of` gives it.
        tape: what was decoded.
        packed: the cache holds each row's tokens without gaps, padded on this side; None where it holds columns.
    """
    stop, batch = tape.width, tape.batch
    if cache.batch_axis is None:
        return Kept(array.reshape(1, *array.shape), np.zeros(1, np.int64), np.full(1, -1))
    by_row = np.moveaxis(array, cache.batch_axis, 0)
    if cache.axis is None:
        return Kept(by_row, np.arange(batch), np.full(batch, stop - 1))
    axis = cache.axis if cache.axis > cache.batch_axis else cache.axis + 1
    by_column = np.moveaxis(by_row, axis, 1)
    held = by_column.shape[1]
    rows: list[Array] = []
    columns: list[Array] = []
    entries: list[Array] = []
    for row in range(batch):
        real = np.flatnonzero(tape.real[row])
        if cache.manner is Manner.RING or (packed is not None and held < len(real)):
            # Which token is where is the model's own affair: all depends on the last.
            places = np.arange(min(held, len(real)))
            real = np.full(len(places), stop - 1)
        elif packed is not None:
            places = np.arange(len(real)) + (held - len(real) if packed == "left" else 0)
        else:
            # Of a cache that is cut the last columns are there.
            real = real[real >= stop - held]
            places = real - (stop - held)
        entries.append(by_column[row, places])
        rows.append(np.full(len(places), row))
        columns.append(real)
    return Kept(np.concatenate(entries), np.concatenate(rows), np.concatenate(columns))
