"""Who reads how many rows a value has: following the output of a Shape node.

Exporters ask a tensor for its shape and use one entry of it: the batch size here, the number of rows there. When the
tensor gets fewer rows, only readers of that one entry are concerned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis._row_helpers import attribute, entries, input_at, ints

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis._row_types import Context

__all__ = ["follows_sizes", "is_size", "row_entry", "row_picks", "row_sinks"]

# Operators that make a shape out of shapes.
_ARITHMETIC = frozenset(
    [
        "Gather",
        "Slice",
        "Concat",
        "Unsqueeze",
        "Squeeze",
        "Cast",
        "Identity",
        "Mul",
        "Add",
        "Sub",
        "Div",
        "Mod",
        "Max",
        "Min",
        "Where",
    ]
)
_MAX_NODES = 64


def is_size(node: ir.Node) -> bool:
    """Whether ``node`` reads the shape of its input and none of its elements."""
    return node.op_type == "Shape" and not node.domain


def row_entry(node: ir.Node, axis: int, rank: int) -> int | None:
    """The entry of the Shape node's output that holds the size of ``axis``; None where it leaves that out."""
    start = attribute(node, "start", 0)
    start = max(start + rank if start < 0 else start, 0)
    end = attribute(node, "end", rank)
    end = min(end + rank if end < 0 else end, rank)
    return axis - start if start <= axis < end else None


def row_picks(value: ir.Value, entry: int, context: Context) -> list[tuple[ir.Node, int]]:
    """The uses of the shape ``value`` that may take its entry number ``entry``, as (node, input)."""
    return [(use.node, use.idx) for use in value.uses() if _may_pick(use.node, use.idx, entry, context)]


def _may_pick(node: ir.Node, index: int, entry: int, context: Context) -> bool:
    if index != 0 or node.domain or node.op_type not in ("Gather", "Slice"):
        return True
    value = node.inputs[0]
    assert value is not None
    shape = context.shape(value)
    length = shape[0] if shape else None
    if not isinstance(length, int):
        return True
    if node.op_type == "Gather":
        indices = ints(input_at(node, 1), context)
        return indices is None or entry in [item % length for item in indices]
    bounds = _bounds(node, context)
    return bounds is None or entry in range(length)[bounds]


def _bounds(node: ir.Node, context: Context) -> slice | None:
    """The range that a Slice of a list takes; None where it is not known."""
    if "starts" in node.attributes:
        return slice(node.attributes["starts"].as_ints()[0], node.attributes["ends"].as_ints()[0])
    starts, ends = ints(input_at(node, 1), context), ints(input_at(node, 2), context)
    steps = (1,) if input_at(node, 4) is None else ints(input_at(node, 4), context)
    return None if starts is None or ends is None or steps is None else slice(starts[0], ends[0], steps[0])


def row_sinks(node: ir.Node, axis: int, rank: int, context: Context) -> list[tuple[ir.Node, int]] | None:
    """Where the number of rows ends that a Shape node reads: inputs of nodes that do no arithmetic on shapes.

    Returns:
        (node, input) pairs; None where they are too many to tell, or one is an output of the graph.
    """
    entry = row_entry(node, axis, rank)
    if entry is None:
        return []
    sinks: list[tuple[ir.Node, int]] = []
    pending = row_picks(node.outputs[0], entry, context)
    if node.outputs[0].is_graph_output():
        return None
    seen: set[ir.Node] = set()
    while pending:
        current, index = pending.pop()
        if current.domain or current.op_type not in _ARITHMETIC:
            sinks.append((current, index))
            continue
        if current in seen:
            continue
        seen.add(current)
        if len(seen) > _MAX_NODES or any(value.is_graph_output() for value in current.outputs):
            return None
        pending += [(use.node, use.idx) for value in current.outputs for use in value.uses()]
    return sinks


def follows_sizes(value: ir.Value, entry: int, reduced: set[ir.Value], context: Context) -> bool:
    """Whether entry number ``entry`` of a shape operand follows the rows by itself.

    That is so where it is symbolic and everything that it is computed from is a constant or the shape of a value
    in ``reduced``: the same computation then gives the number of rows that are left.
    """
    items = entries(value, context)
    if items is None or isinstance(items[entry], int):
        return False
    pending, seen = [value], set[object]()
    while pending:
        node = pending.pop().producer()
        if node is None:
            return False
        if node in seen or node.op_type == "Constant":
            continue
        seen.add(node)
        if is_size(node):
            if node.inputs[0] not in reduced:
                return False
            continue
        if node.domain or node.op_type not in _ARITHMETIC or len(seen) > _MAX_NODES:
            return False
        pending += [item for item in node.inputs if item is not None and not item.is_initializer()]
    return True
