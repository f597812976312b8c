"""What a mask lets a query see, as far as the graph tells: earlier keys only, a window or a chunk of them, or any.

Read from the comparisons between row numbers and column numbers that the mask is made of: a column that may be at most
the row is causal; a column that must be more than the row less something is a window; a column that must be in the same
chunk as the row, by numbers divided by the size of a chunk, is chunked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.slices import runs_along
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["mask_kinds"]

_COMPARISONS = {"Less": -1, "LessOrEqual": -1, "Greater": 1, "GreaterOrEqual": 1}
_BODY = frozenset(
    {
        *("And", "Or", "Not", "Where", "Cast", "Identity", "Expand", "Unsqueeze", "Squeeze", "Reshape", "Slice"),
        *("Mul", "Add", "Sub", "Concat", "Transpose", "Gather", "GatherND", "Max", "Min"),
    }
)
_MAX_NODES = 200
_MAX_STEPS = 12


def mask_kinds(operands: Sequence[ir.Value], length: Dim, total: Dim, body: Body) -> tuple[str, ...]:
    """``causal`` or not, and ``sliding``, ``chunked`` or ``full``, from the operands of a chain that have columns.

    Where a function gets its mask from its callers, what all calls have in common.

    Args:
        operands: what the chain takes from outside.
        length: S.
        total: T.
        body: the graph or function body that holds the chain.
    """
    found = [_kinds_of(operands, length, total, body, call) for call in range(max(1, len(body.calls)))]
    return tuple(kind for kind in found[0] if all(kind in other for other in found))


def _kinds_of(operands: Sequence[ir.Value], length: Dim, total: Dim, body: Body, call: int) -> tuple[str, ...]:
    """The kinds for one call of the body."""
    above = below = chunked = False
    pending = [(value, *_sizes(value, length, total, body), body) for value in operands]
    seen = set[object]()
    while pending and len(seen) < _MAX_NODES:
        value, rows, columns, place = pending.pop()
        node = value.producer()
        if node is None and value not in seen:
            seen.add(value)
            handed = place.arguments(value)
            if handed:
                given, caller = handed[call if place is body else 0]
                shape = caller.view.shape(given) or ()
                if len(shape) > 1:
                    pending.append((given, shape[-2], shape[-1], caller))
        if node is None or node in seen or node.domain:
            continue
        seen.add(node)
        if node.op_type in _COMPARISONS:
            side = _bound(node, rows, columns, place.view)
            above |= side > 0
            below |= side < 0
        elif is_op(node, "Equal"):
            sides = [_axis(item, rows, columns, place.view) for item in node.inputs if item is not None]
            chunked |= sorted(sides) == ["columns", "rows"] and all(_is_divided(item) for item in node.inputs)
        elif node.op_type in _BODY:
            pending += [(item, rows, columns, place) for item in node.inputs if item is not None]
        elif is_op(node, "Trilu"):
            above = True
    causal = ("causal",) if above else ()
    return (*causal, "sliding" if below else "chunked" if chunked else "full")


def _is_divided(value: ir.Value | None) -> bool:
    """Whether a division is among the last steps that make ``value``."""
    pending, seen = [value], set[object]()
    while pending and len(seen) < _MAX_STEPS:
        item = pending.pop(0)
        node = item.producer() if item is not None else None
        if node is None or node in seen:
            continue
        if is_op(node, "Div"):
            return True
        seen.add(node)
        pending += node.inputs
    return False


def _sizes(value: ir.Value, length: Dim, total: Dim, body: Body) -> tuple[Dim, Dim]:
    """How many rows and columns ``value`` has where it is not broadcast.

    They are those of the scores, and may go by another name: where each layer's cache has a symbol of its own, one mask
    for all layers has that of the first.
    """
    shape = body.view.shape(value) or ()
    rows = shape[-2] if len(shape) > 1 and shape[-2] != 1 else length
    columns = shape[-1] if shape and shape[-1] != 1 else total
    return rows, columns


def _bound(node: ir.Node, length: Dim, total: Dim, view: ShapeView) -> int:
    """1 where the comparison bounds columns from above by rows, -1 from below, 0 where it is something else."""
    left, right = node.inputs[0], node.inputs[1]
    if left is None or right is None:
        return 0
    sides = [_axis(item, length, total, view) for item in (left, right)]
    direction = _COMPARISONS[node.op_type]
    if sides == ["columns", "rows"]:
        return -direction
    if sides == ["rows", "columns"]:
        return direction
    return 0


def _axis(value: ir.Value, length: Dim, total: Dim, view: ShapeView) -> str:
    shape = view.shape(value)
    if shape is None or not shape:
        return ""
    if shape[-1] != 1 and runs_along(shape[-1], total):
        return "columns" if len(shape) < 2 or shape[-2] == 1 else ""
    return "rows" if len(shape) >= 2 and shape[-1] == 1 and runs_along(shape[-2], length) else ""
