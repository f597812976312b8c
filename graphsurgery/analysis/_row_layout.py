"""Row rules of operators that move, join, cut and index elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis._row_helpers import attribute, axes_of, broadcast, entries, input_at, named, output_shape
from graphsurgery.analysis._row_reshape import reshape_axis
from graphsurgery.analysis._row_types import Blocked, Lift, Patch, RowAxis, same_size

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis._row_types import Context
    from graphsurgery.analysis.dims import Dim

__all__ = [
    "concat",
    "constant_of_shape",
    "expand",
    "gather",
    "gather_elements",
    "gather_nd",
    "one_hot",
    "pad",
    "relabel",
    "scatter_elements",
    "scatter_nd",
    "slice_",
    "tile",
    "transpose",
]

# An end of this or more means "to the end": exporters write INT32_MAX, INT64_MAX and their neighbours.
_FAR = 2**31 - 1


# ---- shape --------------------------------------------------------------------------------------------------------


def transpose(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Transpose: the axis that the permutation names."""
    rank = len(output_shape(node, output, context))
    given = node.attributes.get("perm")
    perm = tuple(given.as_ints()) if given is not None else tuple(reversed(range(rank)))
    return Lift({0: RowAxis(perm[rows.axis], rows.flat)})


def relabel(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Reshape, Flatten, Squeeze and Unsqueeze: where the axis was before."""
    value = node.inputs[0]
    assert value is not None
    before, after = context.shape(value), context.shape(node.outputs[output])
    if before is None or after is None:
        return Blocked(f"the shapes around {named(node)} are not known")
    if node.op_type == "Squeeze" and "axes" not in node.attributes and input_at(node, 1) is None:
        return Blocked(f"{named(node)} squeezes every axis of size 1, the rows too where one is left")
    source = _moved_axis(node, rows, before, after, context)
    if source is None:
        return Blocked(f"{named(node)} merges the rows with other axes")
    if node.op_type != "Reshape":
        return Lift({0: source})
    operand = input_at(node, 1)
    if operand is None:
        return Blocked(f"{named(node)} has its shape as an attribute")
    items = entries(operand, context)
    entry = None if items is None else items[rows.axis]
    keeps = entry == 0 and source.axis == rows.axis and not attribute(node, "allowzero", 0)
    if entry == -1 or keeps:
        return Lift({0: source})
    return Lift({0: source}, (Patch(1, rows.axis, rows.flat),))


def _moved_axis(
    node: ir.Node, rows: RowAxis, before: tuple[Dim, ...], after: tuple[Dim, ...], context: Context
) -> RowAxis | None:
    if node.op_type in ("Squeeze", "Unsqueeze"):
        longer = len(after) if node.op_type == "Unsqueeze" else len(before)
        axes = axes_of(node, 1, longer, context)
        if axes is None:
            return reshape_axis(rows, before, after)
        if node.op_type == "Unsqueeze":
            kept = [axis for axis in range(longer) if axis not in axes]
            return RowAxis(kept.index(rows.axis), rows.flat) if rows.axis in kept else None
        return RowAxis([axis for axis in range(longer) if axis not in axes][rows.axis], rows.flat)
    return reshape_axis(rows, before, after)


def expand(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Expand: the input where it has the rows itself; the operand where it names them."""
    shape = output_shape(node, output, context)
    needs = broadcast(node, rows, context, (0,), len(shape), shape[rows.axis])
    operand = input_at(node, 1)
    if isinstance(needs, Blocked) or operand is None:
        return needs
    items = entries(operand, context)
    operand_shape = context.shape(operand)
    if not operand_shape or not isinstance(operand_shape[0], int):
        return Blocked(f"the length of the shape operand of {named(node)} is not known")
    position = rows.axis - (len(shape) - operand_shape[0])
    if position < 0 or (items is not None and items[position] == 1):
        return needs
    return Lift(needs.rows, (Patch(1, position, rows.flat),))


def constant_of_shape(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """ConstantOfShape: all rows are alike."""
    return Lift({}, (Patch(0, rows.axis, rows.flat),))


# ---- joining and cutting ------------------------------------------------------------------------------------------


def concat(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Concat over another axis."""
    rank = len(output_shape(node, output, context))
    if attribute(node, "axis", 0) % rank == rows.axis:
        return Blocked(f"{named(node)} joins rows")
    return Lift(dict.fromkeys(range(len(node.inputs)), rows))


def slice_(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Slice over other axes, or over all rows."""
    rank = len(output_shape(node, output, context))
    starts, ends, axes, steps = _slice_bounds(node, rank, context)
    if axes is None:
        return Blocked(f"the axes of {named(node)} are not known")
    if rows.axis not in axes:
        return Lift({0: rows})
    value = node.inputs[0]
    assert value is not None
    before, after = context.shape(value), output_shape(node, output, context)
    position = axes.index(rows.axis)
    whole = before is not None and same_size(before[rows.axis], after[rows.axis])
    forward = steps is None or steps[position] == 1
    if starts is None or starts[position] != 0 or not forward or ends is None:
        return Blocked(f"{named(node)} cuts the rows")
    end = ends[position]
    if isinstance(end, int) and end >= _FAR:
        return Lift({0: rows})
    if not whole or "ends" in node.attributes:
        return Blocked(f"{named(node)} cuts the rows")
    return Lift({0: rows}, (Patch(2, position, rows.flat),))


def _slice_bounds(
    node: ir.Node, rank: int, context: Context
) -> tuple[tuple[Dim, ...] | None, tuple[Dim, ...] | None, tuple[int, ...] | None, tuple[Dim, ...] | None]:
    """Starts, ends, axes and steps, each None where it is not known (steps: where all are 1)."""
    if "starts" in node.attributes:
        starts = tuple(node.attributes["starts"].as_ints())
        ends = tuple(node.attributes["ends"].as_ints())
        axes = axes_of(node, -1, rank, context) if "axes" in node.attributes else tuple(range(len(starts)))
        return starts, ends, axes, None
    if input_at(node, 3) is not None:
        known = axes_of(node, 3, rank, context)
    else:
        operand = node.inputs[1]
        shape = context.shape(operand) if operand is not None else None
        length = shape[0] if shape else None
        known = tuple(range(length)) if isinstance(length, int) else None
    steps = input_at(node, 4)
    stepped = None if steps is None else entries(steps, context) or (0,) * rank
    return entries(node.inputs[1], context), entries(node.inputs[2], context), known, stepped


def tile(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Tile over other axes."""
    repeats = entries(input_at(node, 1), context)
    if repeats is None or repeats[rows.axis] != 1:
        return Blocked(f"{named(node)} repeats the rows")
    return Lift({0: rows})


def pad(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Pad over other axes."""
    given = node.attributes.get("pads")
    pads: tuple[Dim, ...] | None = tuple(given.as_ints()) if given is not None else entries(input_at(node, 1), context)
    rank = len(output_shape(node, output, context))
    axes: tuple[int, ...] | None = tuple(range(rank))
    if input_at(node, 3) is not None:
        axes = axes_of(node, 3, rank, context)
    if axes is not None and rows.axis not in axes:
        return Lift({0: rows})
    if axes is None or pads is None or len(pads) != 2 * len(axes):
        return Blocked(f"{named(node)} may pad the rows")
    position = axes.index(rows.axis)
    if pads[position] != 0 or pads[position + len(axes)] != 0:
        return Blocked(f"{named(node)} pads the rows")
    return Lift({0: rows})


# ---- indexing -----------------------------------------------------------------------------------------------------


def gather(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Gather: the axes of the indices stand in place of the axis that is indexed."""
    shapes = _data_and_indices(node, context)
    if isinstance(shapes, Blocked):
        return shapes
    data_rank, index_shape = shapes
    axis = attribute(node, "axis", 0) % data_rank
    if rows.axis < axis:
        return Lift({0: rows})
    if rows.axis < axis + len(index_shape):
        return Lift({1: RowAxis(rows.axis - axis, rows.flat)})
    return Lift({0: RowAxis(rows.axis - len(index_shape) + 1, rows.flat)})


def gather_nd(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """GatherND: batch axes, then the axes of the indices, then those of the data that are not indexed."""
    shapes = _data_and_indices(node, context)
    if isinstance(shapes, Blocked):
        return shapes
    _, index_shape = shapes
    depth, lead = index_shape[-1], attribute(node, "batch_dims", 0)
    if not isinstance(depth, int):
        return Blocked(f"the length of the indices of {named(node)} is not known")
    if rows.axis < lead:
        return Lift({0: rows, 1: rows})
    if rows.axis < len(index_shape) - 1:
        return Lift({1: rows})
    return Lift({0: RowAxis(rows.axis - (len(index_shape) - 1) + lead + depth, rows.flat)})


def _data_and_indices(node: ir.Node, context: Context) -> tuple[int, tuple[Dim, ...]] | Blocked:
    """The rank of the data and the sizes of the indices."""
    data, indices = node.inputs[0], node.inputs[1]
    assert data is not None
    assert indices is not None
    data_shape, index_shape = context.shape(data), context.shape(indices)
    if data_shape is None or index_shape is None:
        return Blocked(f"the shapes around {named(node)} are not known")
    return len(data_shape), index_shape


def gather_elements(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """GatherElements: data and indices have the rows, on an axis that is not indexed."""
    return _elements(node, output, rows, context, (0, 1))


def scatter_elements(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """ScatterElements: data, indices and updates have the rows, on an axis that is not indexed."""
    return _elements(node, output, rows, context, (0, 1, 2))


def _elements(node: ir.Node, output: int, rows: RowAxis, context: Context, inputs: tuple[int, ...]) -> Lift | Blocked:
    shape = output_shape(node, output, context)
    if attribute(node, "axis", 0) % len(shape) == rows.axis:
        return Blocked(f"{named(node)} works along the rows")
    for index in inputs:
        value = node.inputs[index]
        assert value is not None
        given = context.shape(value)
        # Indices may cover the first rows only.
        if given is None or given[rows.axis] != shape[rows.axis]:
            return Blocked(f"{named(node)} has {value.name!r} for other rows than {shape[rows.axis]}")
    return Lift(dict.fromkeys(inputs, rows))


def scatter_nd(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """ScatterND where the rows are behind the axes that are indexed: data and updates have them."""
    shapes = _data_and_indices(node, context)
    if isinstance(shapes, Blocked):
        return shapes
    _, index_shape = shapes
    depth = index_shape[-1]
    if not isinstance(depth, int) or rows.axis < depth:
        return Blocked(f"{named(node)} writes to rows by index")
    return Lift({0: rows, 2: RowAxis(len(index_shape) - 1 + rows.axis - depth, rows.flat)})


def one_hot(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """OneHot: the indices with one axis more."""
    axis = attribute(node, "axis", -1) % len(output_shape(node, output, context))
    if rows.axis == axis:
        return Blocked(f"{named(node)} makes the rows")
    return Lift({0: RowAxis(rows.axis - (rows.axis > axis), rows.flat)})
