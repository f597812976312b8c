"""The experts' parameters in the layouts that the strategies need: one expert's view, a stack, the rows of vectors.

Nothing is read here, and no byte is moved for a view or for a stack of neighbours in one file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.weights import Expression, Stack, Transpose, View, bytes_moved, obstacle, sources_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.patterns.experts.sites import ExpertTensor
    from graphsurgery.rewrite import Rewrite
    from graphsurgery.weights import Part, SourceName

__all__ = ["Parameters", "one_expert", "some_experts", "stacked", "vectors", "why_not"]


def one_expert(tensor: ExpertTensor, expert: int) -> Part:
    """The part of one expert, as it is stored."""
    if not tensor.stacked:
        return tensor.values[expert]
    return View(tensor.values[0], expert * math.prod(tensor.shape), tensor.shape)


def stacked(tensor: ExpertTensor) -> Part:
    """All experts' parts, ``[E, *shape]``."""
    if not tensor.stacked:
        return Stack(tensor.values)
    held = tensor.values[0].shape
    whole = tuple(held.dims) if held is not None else ()
    if len(whole) == len(tensor.shape) + 1 and whole[1:] == tensor.shape:
        return tensor.values[0]
    if not whole or not isinstance(whole[0], int):
        return tensor.values[0]
    # Read with other axes than it is stored with.
    return View(tensor.values[0], 0, (whole[0], *tensor.shape))


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
    """Makes the initializers of one site; each once. A function gets them as parameters, one for each of its calls.

    Attributes:
        moved: bytes that a save has to lay out anew.
    """

    def __init__(self, rewrite: Rewrite, home: Body | None = None) -> None:
        self._rewrite = rewrite
        self._home = home
        self._made: dict[Part, ir.Value] = {}
        self.moved = 0

    def get(self, part: Part, name: str) -> ir.Value:
        """The initializer that holds ``part``; the value itself where it is one."""
        if not isinstance(part, Expression):
            return part  # type: ignore[return-value]
        if part not in self._made:
            handed = _by_call(part, self._home)
            made = [self._rewrite.weight(item, name) for item in handed]
            self.moved += sum(bytes_moved(item) for item in dict.fromkeys(handed))
            function = self._home is not None and self._home.function is not None
            self._made[part] = self._rewrite.parameter(made, name) if function else made[0]
        return self._made[part]


def why_not(part: Part, home: Body | None = None) -> str | None:
    """Why ``part`` cannot be had in ``home``; None where it can. A value that is there needs nothing."""
    if not isinstance(part, Expression):
        return None
    if home is not None and home.function is not None:
        named = f"function {home.function.name!r}"
        if not home.closed:
            return f"{named} is called from a function that is never called itself, so that it can get no other weights"
        if any(call.caller.function is not None for call in home.calls):
            return f"{named} is called from another function, whose weights are its parameters"
    return next((reason for item in _by_call(part, home) if (reason := obstacle(item)) is not None), None)


def _by_call(part: Part, home: Body | None) -> list[Part]:
    """What each call of ``home`` hands over for ``part``; the part itself in the main graph."""
    if home is None or home.function is None:
        return [part]
    found = []
    for place in range(len(home.calls)):
        given = {}
        for source in sources_of(part):
            handed = home.arguments(source) if isinstance(source, ir.Value) else ()
            given[source] = handed[place][0] if handed else source
        found.append(_replaced(part, given))
    return found


def _replaced(part: Part, given: Mapping[ir.Value | SourceName, ir.Value | SourceName]) -> Part:
    if isinstance(part, View):
        return View(_replaced(part.source, given), part.start, part.shape)
    if isinstance(part, Stack):
        return Stack(tuple(_replaced(item, given) for item in part.parts))
    if isinstance(part, Transpose):
        return Transpose(_replaced(part.part, given), part.perm)
    return given[part]
