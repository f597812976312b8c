"""Shape operands of a graph that computes fewer rows: the entry that held S, or B*S, becomes N, or B*N."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.analysis.slices import Patch
    from graphsurgery.rewrite import Rewrite

__all__ = ["patch_operand"]

_INT64_MAX = int(np.iinfo(np.int64).max)


def patch_operand(rewrite: Rewrite, node: ir.Node, patch: Patch, count: int | None, view: ShapeView) -> None:
    """Give ``node`` a shape operand with ``count`` in place of the number of rows.

    The new operand is a constant where the other entries are known or can be left to the operator (0 and -1 of
    Reshape, 1 of Expand); else it is put together from the old one.

    Args:
        rewrite: where nodes are inserted.
        node: a Reshape, Expand or ConstantOfShape.
        patch: which entry of which operand.
        count: N; None where it is only known at run time (B*N, or rows of a packed stream): -1 then stands for it.
        view: shapes before the edit.
    """
    operand = node.inputs[patch.input]
    assert operand is not None
    entries = _known_entries(node, operand, patch, view)
    own = count if count is not None else -1
    if node.op_type == "Expand":
        # The input already has the rows; 1 leaves them as they are.
        own = 1
    if entries is not None and own in (-1, 1) and entries.count(-1) and own == -1:
        entries = None
    if entries is not None and not (own == -1 and node.op_type != "Reshape"):
        entries[patch.position] = own
        rewrite.reroute(node, patch.input, rewrite.constant(entries, "shape"))
        return
    rewrite.after(operand)
    pieces = []
    shape = view.shape(operand)
    length = shape[0] if shape and isinstance(shape[0], int) else None
    if patch.position > 0:
        pieces.append(_piece(rewrite, operand, 0, patch.position))
    pieces.append(rewrite.constant([own], "rows"))
    if length is None or patch.position + 1 < length:
        pieces.append(_piece(rewrite, operand, patch.position + 1, _INT64_MAX))
    joined = rewrite.emit("Concat", pieces, {"axis": 0}, name="shape", dtype=ir.DataType.INT64)
    rewrite.reroute(node, patch.input, joined)


def _piece(rewrite: Rewrite, operand: ir.Value, start: int, end: int) -> ir.Value:
    bounds = [rewrite.constant([item], "bound") for item in (start, end, 0)]
    return rewrite.emit("Slice", [operand, *bounds], name="shape_part", dtype=ir.DataType.INT64)


def _known_entries(node: ir.Node, operand: ir.Value, patch: Patch, view: ShapeView) -> list[int] | None:
    """The operand's entries as numbers, symbolic ones as what lets the operator find them; None where that fails.

    The entry that is patched may hold anything.
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
            stand_in = _stand_in(node, position, len(contents.items), item, before, after)
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
) -> int | None:
    """A number that makes the operator compute the size ``item`` by itself."""
    if before is None or after is None:
        return None
    allow_zero = node.attributes.get("allowzero")
    if node.op_type == "Reshape" and not (allow_zero is not None and allow_zero.as_int()):
        return 0 if position < len(before) and before[position] == after[position] == item else None
    if node.op_type == "Expand":
        axis = position - count + len(before)
        return 1 if axis >= 0 and before[axis] == item else None
    return None
