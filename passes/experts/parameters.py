"""The experts' parameters in the layouts that the strategies need: one expert's view, a stack, the rows of vectors.

Nothing is read here, and no byte is moved for a view or for a stack of neighbours in one file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphsurgery.weights import Expression, Stack, View, bytes_moved, obstacle

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.patterns.expert_sites import ExpertTensor
    from graphsurgery.rewrite import Rewrite
    from graphsurgery.weights import Part

__all__ = ["Parameters", "one_expert", "some_experts", "stacked", "vectors", "why_not"]


def one_expert(tensor: ExpertTensor, expert: int) -> Part:
    """The part of one expert, as it is stored."""
    if not tensor.stacked:
        return tensor.values[expert]
    return View(tensor.values[0], expert * math.prod(tensor.shape), tensor.shape)


def stacked(tensor: ExpertTensor) -> Part:
    """All experts' parts, ``[E, *shape]``."""
    return tensor.values[0] if tensor.stacked else Stack(tensor.values)


def some_experts(tensor: ExpertTensor, first: int, count: int) -> Part:
    """The parts of ``count`` experts from ``first`` on, ``[count, *shape]``."""
    if not tensor.stacked:
        return Stack(tensor.values[first : first + count])
    return View(tensor.values[0], first * math.prod(tensor.shape), (count, *tensor.shape))


def vectors(tensor: ExpertTensor, experts: int) -> Part:
    """Parts that are one row each, as a matrix ``[E, F]``."""
    size = math.prod(tensor.shape)
    if tensor.stacked:
        return View(tensor.values[0], 0, (experts, size))
    return Stack(tuple(View(value, 0, (size,)) for value in tensor.values))


class Parameters:
    """Makes the initializers of one site; each once.

    Attributes:
        moved: bytes that a save has to lay out anew.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self._made: dict[Part, ir.Value] = {}
        self.moved = 0

    def get(self, part: Part, name: str) -> ir.Value:
        """The initializer that holds ``part``; the value itself where it is one."""
        if not isinstance(part, Expression):
            return part  # type: ignore[return-value]
        if part not in self._made:
            self.moved += bytes_moved(part)
            self._made[part] = self._rewrite.weight(part, name)
        return self._made[part]


def why_not(part: Part) -> str | None:
    """Why ``part`` cannot be had; None where it can. A value that is there needs nothing."""
    return obstacle(part) if isinstance(part, Expression) else None
