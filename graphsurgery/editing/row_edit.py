"""The edit that makes a cone compute only the wanted rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.cones import size_readers
from graphsurgery.editing.product_parts import write_out
from graphsurgery.editing.row_numbers import dim_name
from graphsurgery.editing.row_pushing import RowPusher
from graphsurgery.editing.row_selection import frame_of, place
from graphsurgery.editing.shape_patches import patch_operand, replace_entry, restore_size
from graphsurgery.editing.versioned_ops import reshape
from graphsurgery.patterns.dynamic_products import is_dynamic_product

if TYPE_CHECKING:
    from graphsurgery.analysis.cones import Cone, Edge
    from graphsurgery.analysis.row_blocks import Recount, RowBlock
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.analysis.slices import RowAxis
    from graphsurgery.editing.row_selection import Placement, RowSelector
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.rewrite import Rewrite

__all__ = ["place_edge", "prune_cone", "unplaced"]


def place_edge(edge: Edge, cone: Cone, view: ShapeView, tokens: TokenInput) -> Placement | None:
    """Where the value of a frontier edge has its rows and its batch; None where rows cannot be selected on it."""
    reader = None
    for value in edge.node.outputs:
        if value in cone.values:
            reader = place(value, cone.values[value], view, tokens)
    return place(edge.value, edge.rows, view, tokens, frame_of(edge, reader, view) if reader is not None else None)


def unplaced(cone: Cone, view: ShapeView, tokens: TokenInput) -> str | None:
    """Why rows cannot be selected on some edge of the frontier; None where they can on all."""
    for edge in cone.frontier:
        if place_edge(edge, cone, view, tokens) is None:
            return f"rows cannot be selected from {edge.value.name!r}: where it carries the batch is not known"
    return None


def prune_cone(
    rewrite: Rewrite, cone: Cone, selector: RowSelector, view: ShapeView, tokens: TokenInput
) -> dict[ir.Value, ir.Value]:
    """Select rows on every edge of the frontier, mend shape operands and sizes, declare the new shapes.

    Returns:
        What rows were selected from, and the selections.
    """
    selected: dict[ir.Value, ir.Value] = {}
    pusher = RowPusher(rewrite, selector, view, tokens)
    fused = [edge for edge in cone.frontier if is_dynamic_product(edge.node, rewrite.model)]
    for edge in cone.frontier:
        at = place_edge(edge, cone, view, tokens)
        assert at is not None
        if edge in fused:
            continue
        selected[edge.value] = pusher.select(edge.value, at)
        rewrite.reroute(edge.node, edge.index, selected[edge.value])
    for node, patch in cone.patches:
        count = selector.numbers.count(flat=patch.flat)
        flat = patch.flat
        patch_operand(
            rewrite,
            node,
            patch,
            count if isinstance(count, int) else None,
            lambda flat=flat: selector.numbers.count_value(flat=flat),  # type: ignore[misc]
            cone,
            view,
        )
    for block in cone.blocks:
        _recount(rewrite, block, selector, view)
    # Shape nodes that only served the operands which have just been replaced are gone after this.
    rewrite.sweep()
    for node, value, rows in list(size_readers(cone)):
        restore_size(rewrite, node, value, rows, lambda rows=rows: selector.numbers.token_count(flat=rows.flat), view)  # type: ignore[misc]
    for value, rows in cone.values.items():
        _declare(value, rows, cone, selector, view)
    _forget_others(cone, rewrite.model)
    for edge in fused:
        at = place_edge(edge, cone, view, tokens)
        assert at is not None
        selected[edge.value] = write_out(rewrite, edge.node, at, selector, view)
    return selected


def _recount(rewrite: Rewrite, block: RowBlock, selector: RowSelector, view: ShapeView) -> None:
    """Tell the block how many rows are left, and forget the sizes that its values had."""
    for recount in block.recounts:
        old = recount.node.inputs[recount.index]
        assert old is not None
        new = _counted(rewrite, recount, selector) if recount.position is None else None
        if recount.position is not None:
            with rewrite.prologue():
                count = _times(rewrite, selector.numbers.count_value(flat=recount.flat), recount.factor)
            rewrite.before(recount.node)
            scalar = view.shape(old) == ()
            new = (
                reshape(rewrite, count, [], name="rows_scalar", shape=[])
                if scalar
                else replace_entry(rewrite, old, recount.position, count, view)
            )
        assert new is not None
        if old.dtype not in (None, ir.DataType.INT64):
            assert old.dtype is not None
            rewrite.before(recount.node)
            new = rewrite.emit("Cast", [new], {"to": int(old.dtype)}, name="row_numbers", dtype=old.dtype)
        rewrite.reroute(recount.node, recount.index, new)
    for node in block.nodes:
        # What is sorted, counted and cut up in a block belongs to other rows than before.
        rewrite.mark_changed(node)
        for value in node.outputs:
            if value is not block.result:
                value.shape = None


def _counted(rewrite: Rewrite, recount: Recount, selector: RowSelector) -> ir.Value:
    """0, 1, 2 and so on, one for each row that is left."""
    with rewrite.prologue():
        count = _times(rewrite, selector.numbers.count_value(flat=recount.flat), recount.factor)
        scalar = reshape(rewrite, count, [], name="rows_scalar", shape=[])
        zero, one = rewrite.constant(0, "zero"), rewrite.constant(1, "one")
        return rewrite.emit("Range", [zero, scalar, one], name="row_numbers", dtype=ir.DataType.INT64, shape=[None])


def _times(rewrite: Rewrite, count: ir.Value, factor: int) -> ir.Value:
    if factor == 1:
        return count
    operands = [count, rewrite.constant([factor], "copies")]
    return rewrite.emit("Mul", operands, name="copied_rows", dtype=ir.DataType.INT64, shape=[1])


def _declare(value: ir.Value, rows: RowAxis, cone: Cone, selector: RowSelector, view: ShapeView) -> None:
    """Correct the declared shape of a value that now holds fewer rows; outputs always have one."""
    inferred = view.shape(value)
    if value.shape is None and value not in cone.roots:
        return
    sizes: list[int | str | None] | None = None
    if value.shape is not None:
        sizes = [size if isinstance(size, int) else size.value for size in value.shape]
    if inferred is not None and (sizes is None or len(sizes) != len(inferred)):
        # Nothing was declared, or something else: what the file says is stale.
        sizes = [dim_name(size) for size in inferred]
    if sizes is not None:
        sizes[rows.axis] = selector.numbers.count(flat=rows.flat)
        value.shape = ir.Shape(sizes)


def _forget_others(cone: Cone, model: ir.Model) -> None:
    """Drop what is declared of values that change with the cone and that nobody reads, inside functions too."""
    for node in cone.nodes:
        for value in node.outputs:
            if value not in cone.values and not value.uses() and not value.is_graph_output():
                value.shape = None
        function = model.functions.get(node.op_identifier())
        for inner in function.graph.all_nodes() if function is not None else ():
            for value in inner.outputs:
                value.shape = None
