"""Following the axes of a value through layout operators: which axis of the source ended up where.

A chain of Reshape, Transpose, Unsqueeze, Squeeze, Expand and Identity only moves, splits, merges and repeats axes.
:class:`AxisTrace` plays such a chain on *factors*: every axis of a value is a list of factors, each a labelled axis of
the source, or a repetition that Expand made. So ``[B, G, T, D] -> [B, G*R, D, T]`` is known for what it is, whatever
shape arithmetic the exporter wrote it with.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import product
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["AxisTrace", "Factor", "trace_axes"]

LAYOUT_OPS = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Identity", "Flatten", "Tile")


@dataclasses.dataclass(frozen=True)
class Factor:
    """A part of an axis.

    Attributes:
        axis: the axis of the source that it is, or -1 for a repetition.
        size: its size.
    """

    axis: int
    size: Dim


AxisTrace = tuple[tuple[Factor, ...], ...]
"""For each axis of a value, its factors from the slowest to the fastest; axes of size 1 have none."""


def trace_axes(source: ir.Value, nodes: Sequence[ir.Node], view: ShapeView) -> AxisTrace | None:
    """Where the axes of ``source`` are behind ``nodes``, a chain of layout operators in execution order.

    Returns:
        The factors of each axis of the last value; None where a Reshape cannot be followed or a shape is not known.
    """
    shape = view.shape(source)
    if shape is None:
        return None
    trace: AxisTrace = tuple(() if size == 1 else (Factor(axis, size),) for axis, size in enumerate(shape))
    for node in nodes:
        stepped = _step(node, trace, view)
        if stepped is None:
            return None
        trace = stepped
    return trace


def _step(node: ir.Node, trace: AxisTrace, view: ShapeView) -> AxisTrace | None:
    after = view.shape(node.outputs[0])
    if after is None:
        return None
    if is_op(node, "Identity"):
        return trace
    if is_op(node, "Transpose"):
        attribute = node.attributes.get("perm")
        perm = attribute.as_ints() if attribute is not None else range(len(trace) - 1, -1, -1)
        return tuple(trace[axis] for axis in perm)
    if is_op(node, "Expand"):
        return _expand(trace, after)
    if is_op(node, "Tile"):
        return _tile(node, trace, view)
    if is_op(node, "Reshape", "Flatten", "Squeeze", "Unsqueeze"):
        return _regroup([factor for axis in trace for factor in axis], after)
    return None


def _expand(trace: AxisTrace, after: tuple[Dim, ...]) -> AxisTrace | None:
    padded: AxisTrace = (*((),) * (len(after) - len(trace)), *trace)
    axes: list[tuple[Factor, ...]] = []
    for factors, size in zip(padded, after, strict=True):
        if not factors and size != 1:
            axes.append((Factor(-1, size),))
        elif factors and product([factor.size for factor in factors]) != size:
            return None
        else:
            axes.append(factors)
    return tuple(axes)


def _tile(node: ir.Node, trace: AxisTrace, view: ShapeView) -> AxisTrace | None:
    """A repeated axis is a repetition in front of what was there: ``[x] -> [r, x]``."""
    repeats = view.shape_value(node.inputs[1]) if node.inputs[1] is not None else None
    if repeats is None:
        return None
    pairs = zip(trace, repeats.items, strict=True)
    return tuple(factors if times == 1 else (Factor(-1, times), *factors) for factors, times in pairs)


def _regroup(factors: list[Factor], after: tuple[Dim, ...]) -> AxisTrace | None:
    """Deal the factors out to the new axes, front to back, splitting a factor where an axis ends inside it."""
    axes: list[tuple[Factor, ...]] = []
    pending = list(factors)
    for size in after:
        taken: list[Factor] = []
        while product([factor.size for factor in taken]) != size:
            if not pending:
                return None
            taken.append(pending.pop(0))
            if len(taken) > len(factors):
                return None
        axes.append(tuple(taken))
    return tuple(axes) if not pending else None
