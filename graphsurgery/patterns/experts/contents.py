"""What integers of an expert block may mean: experts, rows, bounds of rows, pairs of numbers.

Axes are labelled as in :mod:`graphsurgery.patterns.experts.layout`; ``root`` is always the value with the chosen experts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

    from graphsurgery.patterns.experts.layout import Labels

__all__ = ["Bounds", "Content", "Numbers", "OneHot", "Pairs", "Run", "Slots", "Space"]


@dataclasses.dataclass(frozen=True)
class Space:
    """An order of rows: ``sorted`` by expert, those of expert ``number`` in it (``run``), ``selected`` by a mask."""

    kind: str
    root: ir.Value
    number: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of experts (``chosen``) or of (token, choice) pairs (``position``), or what is computed from them.

    Attributes:
        root: the chosen experts ``[T, K]``.
        kind: what ``samples`` run over.
        samples: the number for each expert, or for each position ``t * K + k``.
        axes: what the value's axes count.
        space: the order of its rows; None where they are in the order of the tokens.
    """

    root: ir.Value
    kind: str
    samples: np.ndarray
    axes: Labels
    space: Space | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class OneHot:
    """Whether expert ``e`` is the one chosen; axes as :class:`Numbers`, ``e`` for the experts."""

    root: ir.Value
    axes: Labels
    experts: int


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Where each (token, choice), in the order of the tokens, is among the rows sorted by expert."""

    root: ir.Value
    axes: Labels


@dataclasses.dataclass(frozen=True, eq=False)
class Bounds:
    """Element ``i`` is the number of rows of experts 0..``i + offset``; or of expert ``i`` alone (``counts``)."""

    root: ir.Value
    offset: int
    length: int
    counts: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The rows of expert ``number`` among those sorted by expert."""

    root: ir.Value
    number: int
    axes: Labels


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Several numbers of each row side by side, along the axis ``d``."""

    root: ir.Value
    parts: tuple[Numbers, ...]
    axes: Labels


Content = Numbers | OneHot | Slots | Bounds | Run | Pairs
