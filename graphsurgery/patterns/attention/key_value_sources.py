"""Keys and values traced back, through scaling, transposition and expansion over query heads, to the unexpanded cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import product
from graphsurgery.patterns.attention.axes import LAYOUT_OPS, AxisTrace, trace_axes
from graphsurgery.patterns.attention.sites import KeyValueSource
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["UnreadableError", "broadcast_heads", "find_source", "regroups_heads"]

_MAX_CHAIN = 24


class UnreadableError(Exception):
    """Why a softmax that looks like attention cannot be read."""


def regroups_heads(node: ir.Node, view: ShapeView) -> bool:
    """Whether a Reshape only puts batch and heads on one axis, ``[B, H, ..] -> [B*H, ..]``, or apart again."""
    source = node.inputs[0] if node.inputs else None
    if not is_op(node, "Reshape") or source is None:
        return False
    before, after = view.shape(source), view.shape(node.outputs[0])
    if before is None or after is None:
        return False
    longer, shorter = (before, after) if len(before) > len(after) else (after, before)
    return len(longer) == 4 and len(shorter) == 3 and product(longer[:2]) == shorter[0] and longer[2:] == shorter[1:]


def find_source(operand: ir.Value, length: int, feature: int, view: ShapeView, what: str, batch: Dim) -> KeyValueSource:
    """Trace an operand ``[B, H, ...]`` or ``[B*H, ...]``, with T and D on the given axes, to the unexpanded cache."""
    chain: list[ir.Node] = []
    scales: set[ir.Node] = set()
    value = operand
    stops = [operand]
    while len(chain) < _MAX_CHAIN:
        node = value.producer()
        if node is None or (value is not operand and value.is_graph_output()):
            break
        step = _layout_step(node, view)
        if step is None:
            break
        if step is not node.inputs[0] or node.op_type in ("Mul", "Div"):
            scales.add(node)
        chain.append(node)
        value = step
        stops.append(value)
    # The highest place that still has heads and features apart: nothing of it is laid out anew as a whole.
    found = (
        _describe(base, tuple(reversed(chain[:position])), scales, (length, feature), view, batch)
        for position, base in reversed(list(enumerate(stops)))
    )
    best = next((source for source in found if source is not None), None)
    if best is None:
        raise UnreadableError(f"the {what} {operand.name!r} cannot be traced to a cache [B, G, T, D]")
    return best


def broadcast_heads(source: KeyValueSource, heads: Dim) -> KeyValueSource:
    """One key head that the product broadcasts serves all query heads."""
    if source.heads == 1 and source.repeats == 1 and heads != 1:
        return dataclasses.replace(source, repeats=heads)
    return source


def _layout_step(node: ir.Node, view: ShapeView) -> ir.Value | None:
    """The value that ``node`` only lays out anew or multiplies by one number."""
    if node.domain or any(attribute.is_ref() for attribute in node.attributes.values()):
        return None
    if node.op_type in LAYOUT_OPS:
        return node.inputs[0]
    if node.op_type == "Mul":
        left, right = node.inputs[0], node.inputs[1]
        if left is not None and right is not None:
            if _is_number(right, view):
                return left
            if _is_number(left, view):
                return right
    if node.op_type == "Div" and node.inputs[1] is not None and _is_number(node.inputs[1], view):
        return node.inputs[0]
    return None


def _is_number(value: ir.Value, view: ShapeView) -> bool:
    shape = view.shape(value)
    return shape is not None and all(size == 1 for size in shape) and len(shape) <= 1


def _describe(
    base: ir.Value,
    steps: tuple[ir.Node, ...],
    scales: set[ir.Node],
    axes: tuple[int, int],
    view: ShapeView,
    batch: Dim,
) -> KeyValueSource | None:
    layout = [node for node in steps if node not in scales]
    trace = trace_axes(base, layout, view)
    if trace is not None and len(trace) == 3:
        # Batch and heads on one axis: the batch is its first factor, where it is not 1.
        merged = trace[0]
        apart = 1 if merged and batch != 1 and merged[0].size == batch else 0
        trace = (merged[:apart], merged[apart:], *trace[1:])
    if trace is None or len(trace) != 4:
        return None
    length, feature = axes
    batch_axis = _only_axis(trace[0])
    length_axis, feature_axis = _only_axis(trace[length]), _only_axis(trace[feature])
    if length_axis is None or length_axis < 0 or feature_axis is None or feature_axis < 0:
        return None
    heads = _head_axes(trace)
    if heads is None or (trace[0] and (batch_axis is None or batch_axis < 0)):
        return None
    head_axis, count, repeats = heads
    used = {batch_axis, length_axis, feature_axis, head_axis}
    shape = view.shape(base)
    if shape is None or len(shape) > 4 or any(axis not in used and size != 1 for axis, size in enumerate(shape)):
        return None
    return KeyValueSource(
        base=base,
        steps=steps,
        scales=tuple(node for node in steps if node in scales),
        batch_axis=batch_axis,
        head_axis=head_axis,
        length_axis=length_axis,
        feature_axis=feature_axis,
        heads=count,
        repeats=repeats,
    )


def _only_axis(factors: tuple[object, ...]) -> int | None:
    """The source axis that makes up an axis alone; -1 for a repetition; None where there are none or several."""
    if len(factors) != 1:
        return None
    axis: int = factors[0].axis  # type: ignore[attr-defined]
    return axis


def _head_axes(trace: AxisTrace) -> tuple[int | None, Dim, Dim] | None:
    """The head axis of the source, G and R, from the factors ``(g)``, ``(g, r)``, ``(r)`` or ``()`` of the head axis."""
    factors = trace[1]
    if not factors:
        return None, 1, 1
    if len(factors) == 1:
        single = factors[0]
        return (None, 1, single.size) if single.axis < 0 else (single.axis, single.size, 1)
    if len(factors) == 2 and factors[0].axis >= 0 and factors[1].axis < 0:
        return factors[0].axis, factors[0].size, factors[1].size
    return None
