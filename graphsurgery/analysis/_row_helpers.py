"""What row rules share: reading attributes and small operands, and broadcasting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis._row_types import Blocked, Lift, RowAxis, is_cut_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx_ir as ir

    from graphsurgery.analysis._row_types import Context
    from graphsurgery.analysis.dims import Dim

__all__ = ["attribute", "axes_of", "broadcast", "entries", "input_at", "ints", "named", "output_shape", "varying"]


def named(node: ir.Node) -> str:
    """The node, for a message."""
    return (
        f"{node.op_type} node {node.name!r}" if node.name else f"the {node.op_type} that makes {node.outputs[0].name!r}"
    )


def attribute(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute, or what it is where it is left out."""
    item = node.attributes.get(name)
    return default if item is None else item.as_int()


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """Input ``index``; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def entries(value: ir.Value | None, context: Context) -> tuple[Dim, ...] | None:
    """The elements of a small integer operand: numbers, and expressions where they are computed."""
    contents = None if value is None else context.shape_value(value)
    return None if contents is None else contents.items


def ints(value: ir.Value | None, context: Context) -> tuple[int, ...] | None:
    """The elements of a small integer operand where all are known numbers."""
    items = entries(value, context)
    if items is None or not all(isinstance(item, int) for item in items):
        return None
    return tuple(item for item in items if isinstance(item, int))


def axes_of(node: ir.Node, index: int, rank: int, context: Context) -> tuple[int, ...] | None:
    """Axes given as an attribute (old opsets) or as input ``index``; None where they are not known."""
    given = node.attributes.get("axes")
    if given is not None:
        axes: Iterable[int] = given.as_ints()
    else:
        value = input_at(node, index)
        if value is None:
            return ()
        known = ints(value, context)
        if known is None:
            return None
        axes = known
    return tuple(axis % rank for axis in axes)


def output_shape(node: ir.Node, output: int, context: Context) -> tuple[Dim, ...]:
    """The sizes of an output; :func:`graphsurgery.analysis.slices.lift` has made sure that they are known."""
    shape = context.shape(node.outputs[output])
    assert shape is not None
    return shape


def broadcast(
    node: ir.Node, rows: RowAxis, context: Context, inputs: Iterable[int], rank: int, size: Dim
) -> Lift | Blocked:
    """Inputs that broadcast to an output of ``rank``: those that really have the rows are reduced."""
    needs: dict[int, RowAxis] = {}
    for index in inputs:
        value = input_at(node, index)
        if value is None:
            continue
        shape = context.shape(value)
        if shape is None:
            return Blocked(f"the shape of {value.name!r}, which {named(node)} reads, is not known")
        axis = rows.axis - (rank - len(shape))
        if axis < 0 or shape[axis] == 1:
            continue
        if not is_cut_to(shape[axis], size):
            return Blocked(f"{named(node)} broadcasts {value.name!r} of size {shape[axis]} to {size} rows")
        needs[index] = RowAxis(axis, rows.flat)
    return Lift(needs)


def varying(node: ir.Node, indices: Iterable[int], context: Context) -> ir.Value | None:
    """The first of these operands that does not hold one number."""
    for index in indices:
        value = input_at(node, index)
        shape = None if value is None else context.shape(value)
        if value is not None and (shape is None or any(size != 1 for size in shape)):
            return value
    return None
