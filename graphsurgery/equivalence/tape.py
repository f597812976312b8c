"""What the rows of a batch hold while they are decoded: token ids, column by column, and which columns are padding.

Alphabet: B batch, S query length, T columns so far.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.equivalence.feeds import Array

__all__ = ["Side", "Tape"]

Side = Literal["left", "right"]


@dataclasses.dataclass(frozen=True)
class Tape:
    """Rows of tokens side by side.

    Attributes:
        tokens: int64 ``[B, T]``, 0 where a column is padding.
        real: bool ``[B, T]``, False where a column is padding.
    """

    tokens: Array
    real: Array

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], width: int, side: Side) -> Tape:
        """Rows of token ids in ``width`` columns, padded on one side."""
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        real = np.zeros((len(rows), width), dtype=np.bool_)
        for number, row in enumerate(rows):
            place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
            tokens[number, place] = row
            real[number, place] = True
        return cls(tokens, real)

    @property
    def batch(self) -> int:
        """B."""
        return int(self.tokens.shape[0])

    @property
    def width(self) -> int:
        """T."""
        return int(self.tokens.shape[1])

    def then(self, tokens: Array) -> Tape:
        """One more real token ``[B]`` for each row."""
        column = np.ones((self.batch, 1), dtype=np.bool_)
        return Tape(
            np.concatenate([self.tokens, tokens.astype(np.int64)[:, None]], axis=1),
            np.concatenate([self.real, column], axis=1),
        )

    def relaid(self, stop: int, width: int, side: Side) -> Tape:
        """The real tokens among the first ``stop`` columns, without gaps, in ``width`` columns."""
        rows = [self.tokens[row, :stop][self.real[row, :stop]].tolist() for row in range(self.batch)]
        return Tape.of(rows, width, side)

    def counts(self, stop: int) -> Array:
        """Real tokens of each row among the first ``stop`` columns, int64 ``[B]``."""
        counts: Array = self.real[:, :stop].sum(axis=1, dtype=np.int64)
        return counts

    def last_real(self, stop: int) -> Array:
        """The last real column of each row before ``stop``, int64 ``[B]``."""
        last: Array = stop - 1 - np.argmax(self.real[:, :stop][:, ::-1], axis=1).astype(np.int64)
        return last
