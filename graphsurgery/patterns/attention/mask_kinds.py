"""What a mask lets a query see, as far as the graph tells: earlier keys only, a window or a chunk of them, or any.

Read from the comparisons between row numbers and column numbers that the mask is made of (or from the corners of a
stored table, or from the name of a mask that is fed): a column that may be at most
the row is causal; a column that must be more than the row less something is a window; a column that must be in the same
chunk as the row, by numbers divided by the size of a chunk, is chunked. A comparison may say what is seen or what is
hidden: which of both is followed down from the scores, through negations, selections and products with something low.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.constants import constant_of, corners_of
from graphsurgery.analysis.slices import runs_along
from graphsurgery.patterns.attention.masks import LOW, MaskValues
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["mask_kinds", "signed_operands"]

_COMPARISONS = {"Less": -1, "LessOrEqual": -1, "Greater": 1, "GreaterOrEqual": 1}
_BODY = frozenset(
    {
        *("And", "Or", "Not", "Where", "Cast", "Identity", "Expand", "Unsqueeze", "Squeeze", "Reshape", "Slice"),
        *("Mul", "Add", "Sub", "Concat", "Transpose", "Gather", "GatherND", "Max", "Min", "Neg", "Equal"),
    }
)
_SLIDING = re.compile("sliding|local|window", re.IGNORECASE)
_CHUNKED = re.compile("chunk", re.IGNORECASE)
_MAX_NODES = 200
_MAX_STEPS = 12


def mask_kinds(operands: Sequence[tuple[ir.Value, int]], length: Dim, total: Dim, body: Body) -> tuple[str, ...]:
    """``causal`` or not, and ``sliding``, ``chunked`` or ``full``, from the operands of a chain that have columns.

    Where a function gets its mask from its callers, what all calls have in common.

    Args:
        operands: what the chain takes from outside, each with 1 where more of it is a higher score, else -1.
        length: S.
        total: T.
        body: the graph or function body that holds the chain.
    """
    found = [_kinds_of(operands, length, total, body, call) for call in range(max(1, len(body.calls)))]
    return tuple(kind for kind in found[0] if all(kind in other for other in found))


def signed_operands(scores: ir.Node, chain: Sequence[ir.Node], body: Body) -> list[tuple[ir.Value, int]]:
    """What the chain between a score product and its softmax takes from outside, with signs as above."""
    inside = {output for node in (scores, *chain) for output in node.outputs}
    values = MaskValues(body)
    return [(item, sign) for node in chain for item, sign in _signed(node, values, inside) if item not in inside]


def _kinds_of(
    operands: Sequence[tuple[ir.Value, int]], length: Dim, total: Dim, body: Body, call: int
) -> tuple[str, ...]:
    """The kinds for one call of the body."""
    above = below = chunked = False
    pending = [(value, sign, *_sizes(value, length, total, body), body) for value, sign in operands]
    seen = set[object]()
    while pending and len(seen) < _MAX_NODES:
        value, sign, rows, columns, place = pending.pop()
        node = value.producer()
        if value not in seen and (node is None or is_op(node, "Constant")):
            seen.add(value)
            seen_of_later, seen_of_earlier = _seen_in_table(value, sign)
            above |= seen_of_later is False
            below |= seen_of_earlier is False
            if value.is_graph_input() and place.function is None:
                below |= _SLIDING.search(value.name or "") is not None
                chunked |= _CHUNKED.search(value.name or "") is not None
            handed = place.arguments(value)
            if handed:
                given, caller = handed[call if place is body else 0]
                shape = caller.view.shape(given) or ()
                if len(shape) > 1:
                    pending.append((given, sign, shape[-2], shape[-1], caller))
        if node is None or node in seen or node.domain:
            continue
        seen.add(node)
        side = sign * _bound(node, rows, columns, place.view) if node.op_type in _COMPARISONS else 0
        above |= side > 0
        below |= side < 0 or sign * _nearness(node, rows, columns, place.view) > 0
        if is_op(node, "Trilu"):
            above = True
        elif is_op(node, "Equal") and _are_numbers(node, rows, columns, place.view):
            chunked |= all(_is_divided(item) for item in node.inputs)
        elif not side and (node.op_type in _BODY or node.op_type in _COMPARISONS):
            pending += [(item, sign * own, rows, columns, place) for item, own in _signed(node, MaskValues(place))]
    causal = ("causal",) if above else ()
    return (*causal, "sliding" if below else "chunked" if chunked else "full")


def _seen_in_table(value: ir.Value, sign: int) -> tuple[bool | None, bool | None]:
    """Whether the first row of a stored mask sees the last column, and the last row the first; None where unknown."""
    corners = corners_of(value)
    if corners is None:
        return None, None
    later, earlier, own = (number * sign for number in corners)
    if value.dtype == ir.DataType.BOOL:
        return later >= own, earlier >= own
    return later - own > LOW, earlier - own > LOW


def _signed(node: ir.Node, values: MaskValues, inside: Collection[ir.Value] = ()) -> list[tuple[ir.Value, int]]:
    """The operands of ``node``, each with 1 where more of it is more of the result, and -1 where it is less."""
    items = [item for item in node.inputs if item is not None]
    operator = node.op_type
    if operator in ("Not", "Neg"):
        return [(item, -1) for item in items]
    if operator == "Cast" and _is_hidden(node, values):
        return [(items[0], -1)]
    if operator == "Sub" and len(items) == 2:
        return [(items[0], 1), (items[1], -1)]
    if operator == "Mul" and len(items) == 2:
        return [(item, -1 if values.low(other) else 1) for item, other in zip(items, reversed(items), strict=True)]
    if operator in _COMPARISONS and len(items) == 2:
        direction = _COMPARISONS[operator]
        return [(items[0], direction), (items[1], -direction)]
    if operator == "Equal" and len(items) == 2:
        # Equal to nothing, and that is not what a mask adds for a key that is seen; equal to something low.
        pairs = zip(items, reversed(items), strict=True)
        return [
            (item, -1 if values.low(one) or (_is_zero(one, values) and not values.zero_or_low(item)) else 1)
            for item, one in pairs
        ]
    if operator == "Where" and len(items) == 3:
        condition, yes, no = items
        return [(condition, _side_of_condition(yes, no, values, inside)), (yes, 1), (no, 1)]
    return [(item, 1) for item in items]


def _is_hidden(node: ir.Node, values: MaskValues) -> bool:
    """Whether a mask that is zero or low becomes a condition: true is what is low."""
    to = node.attributes.get("to")
    if to is None or to.is_ref() or to.as_int() != ir.DataType.BOOL or values.numbers(node.inputs[0]) is not None:
        return False
    return values.zero_or_low(node.inputs[0])


def _is_zero(value: ir.Value, values: MaskValues) -> bool:
    return values.numbers(value) == [0]


def _side_of_condition(yes: ir.Value, no: ir.Value, values: MaskValues, inside: Collection[ir.Value]) -> int:
    """1 where a true condition selects what is more, -1 where it selects what is less."""
    if yes in inside or no in inside:
        return 1 if yes in inside else -1
    numbers = [values.numbers(item) for item in (yes, no)]
    if numbers[0] and numbers[1]:
        return 1 if numbers[0][0] >= numbers[1][0] else -1
    # A number on one side alone: the other is a mask of its own.
    if any((array := constant_of(item)) is not None and array.dtype.kind == "b" for item in (yes, no)):
        return -1 if numbers[0] == [0] or numbers[1] == [1] else 1
    return -1 if values.low(yes) or (numbers[1] and not values.low(no)) else 1


def _are_numbers(node: ir.Node, length: Dim, total: Dim, view: ShapeView) -> bool:
    """Whether a node compares numbers of rows with numbers of columns."""
    sides = [_axis(item, length, total, view) for item in node.inputs if item is not None]
    return sorted(sides) == ["columns", "rows"]


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


def _nearness(node: ir.Node, length: Dim, total: Dim, view: ShapeView) -> int:
    """1 where what is compared is that a row and a column are near, whichever is first; -1 that they are far, else 0."""
    for position, value in enumerate(node.inputs if node.op_type in _COMPARISONS else ()):
        distance = value.producer() if value is not None else None
        if distance is None or not is_op(distance, "Abs") or distance.inputs[0] is None:
            continue
        difference = distance.inputs[0].producer()
        if difference is not None and is_op(difference, "Sub") and _are_numbers(difference, length, total, view):
            return _COMPARISONS[node.op_type] * (1 if position else -1)
    return 0


def _axis(value: ir.Value, length: Dim, total: Dim, view: ShapeView) -> str:
    shape = view.shape(value)
    if shape is None or not shape:
        return ""
    if shape[-1] != 1 and runs_along(shape[-1], total):
        return "columns" if len(shape) < 2 or shape[-2] == 1 else ""
    return "rows" if len(shape) >= 2 and shape[-1] == 1 and runs_along(shape[-2], length) else ""
