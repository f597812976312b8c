"""What is measured: prompts of several lengths, and single tokens behind several pasts.

Alphabet: B batch, S query length, P past.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from graphsurgery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DECODE", "PREFILL", "Phase", "Point", "make_points"]

Phase = Literal["prefill", "decode"]

PREFILL = (128, 512)
"""Lengths S of prompts where none are asked for."""
DECODE = (512, 4096)
"""Pasts P of single tokens where none are asked for."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Sizes of one row of the report: a prompt of S tokens without a past, or one token behind P."""

    phase: Phase
    batch: int
    length: int
    past: int

    @property
    def name(self) -> str:
        """Such as ``prefill S=128`` or ``decode P=512``."""
        return f"prefill S={self.length}" if self.phase == "prefill" else f"decode P={self.past}"

    @property
    def size(self) -> int:
        """What the phase varies: S of a prompt, P of a decode step."""
        return self.length if self.phase == "prefill" else self.past

    @property
    def tokens(self) -> int:
        """Tokens of one run, B*S."""
        return self.batch * self.length


def make_points(prefill: Sequence[int], decode: Sequence[int], batch: int) -> tuple[Point, ...]:
    """Prompts first, each phase from small to large, none twice.

    Raises:
        UsageError: a size is none, or there is nothing to measure.
    """
    if batch < 1:
        raise UsageError(f"A batch of {batch} cannot be run: give 1 or more.")
    for length in prefill:
        if length < 1:
            raise UsageError(f"A prompt of {length} tokens cannot be run: give lengths of 1 or more.")
    for past in decode:
        if past < 1:
            raise UsageError(f"A past of {past} tokens is none: give pasts of 1 or more.")
    points = [Point("prefill", batch, length, 0) for length in sorted({*prefill})]
    points += [Point("decode", batch, 1, past) for past in sorted({*decode})]
    if not points:
        raise UsageError("There is nothing to measure: give prefill lengths or decode pasts.")
    return tuple(points)
