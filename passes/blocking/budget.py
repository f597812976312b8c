"""Block sizes from a memory budget."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import evaluate
from graphsurgery.errors import UsageError
from graphsurgery.sizes import parse_size

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.patterns.attention.sites import AttentionSite

__all__ = ["BlockSizes", "Budget"]

_BUFFERS = 3
"""Buffers of one block that are alive at a time: the scores, a step of the chain, the weights (measured: 2 to 4)."""
_SMALLEST, _LARGEST = 16, 1024
_ENTRY = re.compile(r"\s*([SPB])\s*=\s*(\d+)\s*")


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """What fits.

    Attributes:
        rows: rows of a query block; None where all rows fit.
        columns: columns of a key block; None where all columns fit.
        predicted: bytes that the buffers and running statistics of one block take, at the assumed lengths.
    """

    rows: int | None
    columns: int | None
    predicted: int


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes that the scores of one site may take, and the lengths at which that is to hold."""

    limit: int
    length: int
    past: int
    batch: int

    @classmethod
    def read(cls, limit: str, assume: str) -> Budget:
        """From the options ``memory_budget`` and ``assume``.

        Raises:
            UsageError: one of them cannot be read.
        """
        found = {"P": 0, "B": 1}
        for entry in assume.split(","):
            match = _ENTRY.fullmatch(entry)
            if match is None:
                raise UsageError(
                    f"Option assume={assume!r} of pass block-attention: write lengths as 'S=4096,P=0,B=1'."
                )
            found[match[1]] = int(match[2])
        if found.get("S", 0) < 1 or found["B"] < 1:
            raise UsageError(f"Option assume={assume!r} of pass block-attention needs S and B of 1 or more.")
        return cls(parse_size(limit, "memory_budget"), found["S"], found["P"], found["B"])

    def blocks(self, site: AttentionSite) -> BlockSizes:
        """The largest query blocks that fit, over all keys; else the smallest, over the largest key blocks that fit.

        Raises:
            UsageError: not even the smallest blocks fit.
        """
        heads = _number(site.heads, 1)
        batch = _number(site.batch, self.batch)
        length = _number(site.length, self.length)
        total = site.total if isinstance(site.total, int) else self.length + self.past
        if self._bytes(batch * heads, length, total) <= self.limit:
            return BlockSizes(None, None, self._bytes(batch * heads, length, total))
        rows = _LARGEST
        while rows > _SMALLEST and (rows >= length or self._bytes(batch * heads, rows, total) > self.limit):
            rows //= 2
        if self._bytes(batch * heads, rows, total) <= self.limit:
            return BlockSizes(rows, None, self._bytes(batch * heads, rows, total))
        columns = _LARGEST
        while columns > _SMALLEST and self._bytes(batch * heads, rows, columns) > self.limit:
            columns //= 2
        predicted = self._bytes(batch * heads, rows, columns)
        if predicted > self.limit:
            raise UsageError(
                f"memory_budget={self.limit} bytes of pass block-attention is less than the {predicted} that the smallest "
                f"blocks of {site.id} take ({rows} rows and {columns} columns of {batch * heads} heads)."
            )
        return BlockSizes(rows, columns, predicted)

    def _bytes(self, heads: int, rows: int, columns: int) -> int:
        """Buffers of float32 scores, and a maximum and a sum for each row."""
        return heads * rows * (columns * _BUFFERS + 2) * 4


def _number(size: Dim, assumed: int) -> int:
    number = evaluate(size, {})
    return assumed if number is None else number
