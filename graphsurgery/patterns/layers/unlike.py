"""What tells a layer that is like no other from the one that it is nearest to, for the report."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import onnx_ir as ir

    from graphsurgery.patterns.layers.chains import Segment

__all__ = ["unlike"]

_MOST = 4
"""Operators that are named."""


def unlike(segment: Segment, cores: Mapping[Segment, Sequence[ir.Node]], numbers: Mapping[Segment, int]) -> str:
    """By which operators ``segment`` differs from the layer that has most of them in common.

    Args:
        segment: a layer.
        cores: the nodes of every layer between its hidden state and the next.
        numbers: what each layer is called.

    Returns:
        A clause; empty where there is no other layer, or the nearest has the same operators.
    """
    counts = {other: _operators(nodes) for other, nodes in cores.items()}
    own = counts[segment]
    others = [other for other in cores if other is not segment]
    if not others:
        return ""
    nearest = min(others, key=lambda other: (_apart(own, counts[other]), numbers[other]))
    more, fewer = own - counts[nearest], counts[nearest] - own
    parts = [f"{_listed(found)} {word}" for found, word in ((more, "more"), (fewer, "less")) if found]
    return f"next to layer {numbers[nearest]} it has {' and '.join(parts)}" if parts else ""


def _operators(nodes: Iterable[ir.Node]) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in nodes)


def _apart(one: collections.Counter[str], other: collections.Counter[str]) -> int:
    return ((one - other) + (other - one)).total()


def _listed(found: collections.Counter[str]) -> str:
    """``3 Mul, 1 Add``, the most frequent first."""
    named = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in named[_MOST:])
    text = ", ".join(f"{count} {name}" for name, count in named[:_MOST])
    return f"{text} and {rest} others" if rest else text
