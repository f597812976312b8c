"""Shape operands of a graph that computes fewer rows: the entry that held S, or B*S, becomes N, or B*N.

Sizes that are read off a value with fewer rows and used elsewhere get their old number back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis._row_sizes import row_entry, row_picks
from graphsurgery.analysis._row_types import Context
from graphsurgery.editing.versioned_ops import INT64_MAX, slice_axis

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.analysis.cones import Cone
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.analysis.slices import Patch, RowAxis
    from graphsurgery.rewrite import Rewrite

__all__ = ["patch_operand", "replace_entry", "restore_size"]


def patch_operand(
    rewrite: Rewrite,
    node: ir.Node,
    patch: Patch,
    count: int | None,
    count_value: Callable[[], ir.Value],
    cone: Cone,
    view: ShapeView,
) -> None:
    """Give ``node`` a shape operand with the number of rows that are left in place of what it was.

    The new operand is a constant where the other entries are known or can be left to the operator (0 and -1 of
    Reshape, 1 of Expand); else it is put together from the old one.

    Args:
        rewrite: where nodes are inserted.
        node: a Reshape, Expand, ConstantOfShape or Slice.
        patch: which entry of which operand.
        count: N; None where it is only known at run time (B*N, or rows of a packed stream).
        count_value: makes it an int64 ``[1]``.
        cone: what computes fewer rows.
        view: shapes before the edit.
    """
    operand = node.inputs[patch.input]
    assert operand is not None
    if node.op_type == "Expand" and (node, 0) in cone.edges:
        # The input already has the rows; 1 leaves them as they are.
        count = 1
    elif node.op_type == "Slice":
        count = INT64_MAX
    entries = _known_entries(node, operand, patch, view, _reduced_axis(node, cone))
    if entries is not None and count is None and node.op_type == "Reshape" and -1 not in entries:
        count = -1
    if entries is not None and count is not None:
        entries[patch.position] = count
        rewrite.reroute(node, patch.input, rewrite.constant(entries, "shape"))
        return
    rows = rewrite.constant([count], "rows") if count is not None else count_value()
    rewrite.after(operand)
    rewrite.reroute(node, patch.input, replace_entry(rewrite, operand, patch.position, rows, view))


def restore_size(
    rewrite: Rewrite, node: ir.Node, value: ir.Value, rows: RowAxis, full: Callable[[], ir.Value], view: ShapeView
) -> None:
    """Let what reads the number of rows from a Shape node go on reading the old one.

    Args:
        rewrite: where nodes are inserted.
        node: the Shape node.
        value: what it reads, with fewer rows now.
        rows: where ``value`` carries them.
        full: makes the old number an int64 ``[1]``.
        view: shapes before the edit.
    """
    sizes = node.outputs[0]
    shape = view.shape(value)
    assert shape is not None
    entry = row_entry(node, rows.axis, len(shape))
    if entry is None:
        return
    picks = row_picks(sizes, entry, Context(view, rewrite.opset))
    if not picks and not sizes.is_graph_output():
        return
    count = full()
    rewrite.after(sizes)
    restored = replace_entry(rewrite, sizes, entry, count, view)
    for reader, index in picks:
        rewrite.reroute(reader, index, restored)
    if sizes.is_graph_output():
        rewrite.replace_output(sizes, restored, f"{sizes.name}/fewer_rows")


def replace_entry(rewrite: Rewrite, operand: ir.Value, position: int, entry: ir.Value, view: ShapeView) -> ir.Value:
    """The list ``operand`` with another entry at ``position``."""
    shape = view.shape(operand)
    length = shape[0] if shape else None
    pieces = [entry]
    if position > 0:
        pieces.insert(0, slice_axis(rewrite, operand, (0, position), 0, name="shape_part", dtype=ir.DataType.INT64))
    if length != position + 1:
        bounds = (position + 1, INT64_MAX)
        pieces.append(slice_axis(rewrite, operand, bounds, 0, name="shape_part", dtype=ir.DataType.INT64))
    if len(pieces) == 1:
        return entry
    known = [length] if isinstance(length, int) else None
    return rewrite.emit("Concat", pieces, {"axis": 0}, name="shape", dtype=ir.DataType.INT64, shape=known)


def _reduced_axis(node: ir.Node, cone: Cone) -> int | None:
    """The axis of its first input on which ``node`` will read fewer rows."""
    value = node.inputs[0]
    rows = cone.values.get(value) if value is not None else None
    if rows is not None and (node, 0) in cone.edges:
        return rows.axis
    return next((edge.rows.axis for edge in cone.frontier if edge.node is node and edge.index == 0), None)


def _known_entries(
    node: ir.Node, operand: ir.Value, patch: Patch, view: ShapeView, reduced: int | None
) -> list[int] | None:
    """The operand's entries as numbers, symbolic ones as what lets the operator find them; None where that fails.

    The entry that is patched may hold anything. No other entry is taken from the axis ``reduced`` of the input.
    """
    contents = view.shape_value(operand)
    if contents is None:
        return None
    before = view.shape(node.inputs[0]) if node.op_type != "ConstantOfShape" and node.inputs[0] is not None else None
    after = view.shape(node.outputs[0])
    entries: list[int] = []
    for position, item in enumerate(contents.items):
        if position == patch.position:
            entries.append(1)
        elif isinstance(item, int):
            entries.append(item)
        else:
            stand_in = _stand_in(node, position, len(contents.items), item, before, after, reduced)
            if stand_in is None:
                return None
            entries.append(stand_in)
    return entries if entries.count(-1) <= 1 else None


def _stand_in(
    node: ir.Node,
    position: int,
    count: int,
    item: Dim,
    before: tuple[Dim, ...] | None,
    after: tuple[Dim, ...] | None,
    reduced: int | None,
) -> int | None:
    """A number that makes the operator compute the size ``item`` by itself."""
    if before is None or after is None:
        return None
    allow_zero = node.attributes.get("allowzero")
    if node.op_type == "Reshape" and not (allow_zero is not None and allow_zero.as_int()):
        if position == reduced or position >= len(before):
            return None
        return 0 if before[position] == after[position] == item else None
    if node.op_type == "Expand":
        axis = position - count + len(before)
        return 1 if axis >= 0 and axis != reduced and before[axis] == item else None
    return None
