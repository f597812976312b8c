"""Row rules, one for each kind of operator: see :mod:`graphsurgery.analysis.slices`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.analysis._row_reshape import reshape_axis
from graphsurgery.analysis._row_types import Blocked, Lift, Patch, RowAxis, View, same_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim

    Rule: TypeAlias = Callable[[ir.Node, int, RowAxis, View], Lift | Blocked]

__all__ = ["find"]

_STANDARD = ""
_CONTRIB = "com.microsoft"


def find(node: ir.Node) -> Rule | None:
    """The rule of the node's operator; None where there is none."""
    return _RULES.get((node.domain, node.op_type))


# ---- helpers ------------------------------------------------------------------------------------------------------


def _named(node: ir.Node) -> str:
    return (
        f"{node.op_type} node {node.name!r}" if node.name else f"the {node.op_type} that makes {node.outputs[0].name!r}"
    )


def _attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _entries(value: ir.Value | None, view: View) -> tuple[object, ...] | None:
    """The elements of a small integer operand: numbers, and expressions where they are computed."""
    contents = None if value is None else view.shape_value(value)
    return None if contents is None else contents.items


def _ints(value: ir.Value | None, view: View) -> tuple[int, ...] | None:
    """The elements of a small integer operand where all are known numbers."""
    items = _entries(value, view)
    if items is None or not all(isinstance(item, int) for item in items):
        return None
    return tuple(item for item in items if isinstance(item, int))


def _axes(node: ir.Node, index: int, rank: int, view: View) -> tuple[int, ...] | None:
    """Axes given as an attribute (old opsets) or as input ``index``; None where they are not known."""
    attribute = node.attributes.get("axes")
    if attribute is not None:
        axes: Iterable[int] = attribute.as_ints()
    else:
        value = _input(node, index)
        if value is None:
            return ()
        known = _ints(value, view)
        if known is None:
            return None
        axes = known
    return tuple(axis % rank for axis in axes)


def _broadcast(node: ir.Node, rows: RowAxis, view: View, inputs: Iterable[int], rank: int, size: Dim) -> Lift | Blocked:
    """Inputs that broadcast to an output of ``rank``: those that really have the rows are reduced."""
    needs: dict[int, RowAxis] = {}
    for index in inputs:
        value = _input(node, index)
        if value is None:
            continue
        shape = view.shape(value)
        if shape is None:
            return Blocked(f"the shape of {value.name!r}, which {_named(node)} reads, is not known")
        axis = rows.axis - (rank - len(shape))
        if axis < 0 or shape[axis] == 1:
            continue
        if not same_size(shape[axis], size):
            return Blocked(f"{_named(node)} broadcasts {value.name!r} of size {shape[axis]} to {size} rows")
        needs[index] = RowAxis(axis, rows.flat)
    return Lift(needs)


def _output(node: ir.Node, output: int, view: View) -> tuple[Dim, ...]:
    shape = view.shape(node.outputs[output])
    assert shape is not None
    return shape


# ---- element-wise -------------------------------------------------------------------------------------------------


def _elementwise(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    shape = _output(node, output, view)
    return _broadcast(node, rows, view, range(len(node.inputs)), len(shape), shape[rows.axis])


def _first(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    return Lift({0: rows})


# ---- products -----------------------------------------------------------------------------------------------------


def _product(left_index: int = 0, right_index: int = 1, per_row: tuple[int, ...] = (), bias: int | None = None) -> Rule:
    """Matrix products: where the operands are, and which scales and zero points must be the same for all rows."""

    def rule(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
        shape = _output(node, output, view)
        left, right = node.inputs[left_index], node.inputs[right_index]
        assert left is not None
        assert right is not None
        left_shape, right_shape = view.shape(left), view.shape(right)
        if left_shape is None and right_shape is not None and len(right_shape) == 2:
            # Behind an operator that nobody knows; a product with a matrix keeps the rank.
            left_shape = shape
        if left_shape is None or right_shape is None:
            return Blocked(f"the operand shapes of {_named(node)} are not known")
        if min(len(left_shape), len(right_shape)) < 2:
            return Blocked(f"{_named(node)} multiplies a vector")
        uneven = _varying(node, per_row, view)
        if uneven is not None:
            return Blocked(f"{_named(node)} has a scale or zero point {uneven.name!r} for each row")
        rank = len(shape)
        if rows.axis == rank - 2:
            return Lift({left_index: RowAxis(len(left_shape) - 2, rows.flat)}, contracts=True)
        if rows.axis == rank - 1 and bias is not None:
            return Blocked(f"{_named(node)} has the rows as columns")
        if rows.axis == rank - 1:
            return Lift({right_index: RowAxis(len(right_shape) - 1, rows.flat)}, contracts=True)
        # A batch axis of the product: every row has a matrix of its own.
        batch = _broadcast(node, rows, view, (left_index, right_index), rank, shape[rows.axis])
        return batch if isinstance(batch, Blocked) else Lift(batch.rows, contracts=True)

    return rule


def _varying(node: ir.Node, indices: tuple[int, ...], view: View) -> ir.Value | None:
    """The first of these operands that does not hold one number."""
    for index in indices:
        value = _input(node, index)
        shape = None if value is None else view.shape(value)
        if value is not None and (shape is None or any(size != 1 for size in shape)):
            return value
    return None


def _fused_matmul(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    if any(_attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return Blocked(f"{_named(node)} transposes its rows")
    if rows.axis == len(_output(node, output, view)) - 1:
        return Blocked(f"{_named(node)} has the rows as columns")
    return _product()(node, output, rows, view)


def _whole_tensor_scale(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    return Blocked(f"{_named(node)} computes one scale from all rows")


def _gemm(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    shape = _output(node, output, view)
    bias = _broadcast(node, rows, view, (2,), len(shape), shape[rows.axis])
    if isinstance(bias, Blocked):
        return bias
    if rows.axis == 0:
        return Lift({0: RowAxis(_attribute(node, "transA", 0), rows.flat), **bias.rows}, contracts=True)
    transposed = _attribute(node, "transB", 0)
    return Lift({1: RowAxis(1 - transposed, rows.flat), **bias.rows}, contracts=True)


def _packed_weight(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    """The weight is an operand in a form of its own; activation times it, over the last axis."""
    if rows.axis == len(_output(node, output, view)) - 1:
        return Blocked(f"{_named(node)} has the rows as columns")
    return Lift({0: rows}, contracts=True)


def _einsum(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    if "." in equation or "->" not in equation:
        return Blocked(f"{_named(node)} has equation {equation!r}, which is not spelled out")
    terms, result = equation.split("->")
    label = result[rows.axis]
    needs = {index: term.index(label) for index, term in enumerate(terms.split(",")) if label in term}
    if any(term.count(label) > 1 for term in terms.split(",")):
        return Blocked(f"{_named(node)} takes a diagonal over the rows")
    return Lift({index: RowAxis(axis, rows.flat) for index, axis in needs.items()}, contracts="," in terms)


# ---- over one axis ------------------------------------------------------------------------------------------------


def _along_axis(default: int, *, to_end: bool = False, inputs: tuple[int, ...] = (0,)) -> Rule:
    """Operators that work along ``axis``: rows pass where they are another axis."""

    def rule(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
        rank = len(_output(node, output, view))
        axis = _attribute(node, "axis", default) % rank
        if rows.axis == axis or (to_end and rows.axis > axis):
            return Blocked(f"{_named(node)} works along the rows")
        return Lift({index: rows for index in inputs if _input(node, index) is not None})

    return rule


def _softmax(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    # Before opset 13 the operator flattens everything from its axis on, and its default axis is 1.
    version = node.version if node.version is not None else _imported(node)
    old = version is not None and version < 13
    return _along_axis(1 if old else -1, to_end=old)(node, output, rows, view)


def _imported(node: ir.Node) -> int | None:
    graph = node.graph
    return None if graph is None else graph.opset_imports.get("")


def _normalize(inputs: tuple[int, ...]) -> Rule:
    """Normalisation over the last axes; ``inputs`` carry rows, scales and biases do not."""

    def rule(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
        shape = _output(node, output, view)
        if rows.axis >= _attribute(node, "axis", -1) % len(shape):
            return Blocked(f"{_named(node)} normalises over the rows")
        return _broadcast(node, rows, view, inputs, len(shape), shape[rows.axis])

    return rule


def _reduce(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    value = node.inputs[0]
    assert value is not None
    shape = view.shape(value)
    if shape is None:
        return Blocked(f"the shape of {value.name!r}, which {_named(node)} reads, is not known")
    rank = len(shape)
    if node.op_type in ("ArgMax", "ArgMin"):
        axes: tuple[int, ...] | None = (_attribute(node, "axis", 0) % rank,)
    else:
        axes = _axes(node, 1, rank, view)
        if axes == () and not _attribute(node, "noop_with_empty_axes", 0):
            axes = tuple(range(rank))
    if axes is None:
        return Blocked(f"the axes of {_named(node)} are not known")
    kept = range(rank) if _attribute(node, "keepdims", 1) else [axis for axis in range(rank) if axis not in axes]
    source = kept[rows.axis]
    if source in axes:
        return Blocked(f"{_named(node)} reduces over the rows")
    return Lift({0: RowAxis(source, rows.flat)})


def _quantize(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    for index in (1, 2):
        value = _input(node, index)
        shape = None if value is None else view.shape(value)
        if value is None or (shape is not None and all(size == 1 for size in shape)):
            continue
        rank = len(_output(node, output, view))
        if shape is None or len(shape) != 1 or _attribute(node, "axis", 1) % rank == rows.axis:
            return Blocked(f"{_named(node)} has a scale for each row or block")
    return Lift({0: rows})


# ---- layout -------------------------------------------------------------------------------------------------------


def _transpose(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    rank = len(_output(node, output, view))
    attribute = node.attributes.get("perm")
    perm = tuple(attribute.as_ints()) if attribute is not None else tuple(reversed(range(rank)))
    return Lift({0: RowAxis(perm[rows.axis], rows.flat)})


def _relabel(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    """Reshape, Flatten, Squeeze and Unsqueeze: where the axis was before."""
    value = node.inputs[0]
    assert value is not None
    before, after = view.shape(value), view.shape(node.outputs[output])
    if before is None or after is None:
        return Blocked(f"the shapes around {_named(node)} are not known")
    source = _moved_axis(node, rows, before, after, view)
    if source is None:
        return Blocked(f"{_named(node)} merges the rows with other axes")
    if node.op_type != "Reshape":
        return Lift({0: source})
    entries = _entries(_input(node, 1), view)
    entry = None if entries is None else entries[rows.axis]
    keeps = entry == 0 and source.axis == rows.axis and not _attribute(node, "allowzero", 0)
    if entry == -1 or keeps:
        return Lift({0: source})
    return Lift({0: source}, (Patch(1, rows.axis, rows.flat),))


def _moved_axis(
    node: ir.Node, rows: RowAxis, before: tuple[Dim, ...], after: tuple[Dim, ...], view: View
) -> RowAxis | None:
    if node.op_type in ("Squeeze", "Unsqueeze"):
        longer = len(after) if node.op_type == "Unsqueeze" else len(before)
        axes = _axes(node, 1, longer, view)
        if axes is None:
            return reshape_axis(rows, before, after)
        if node.op_type == "Unsqueeze":
            kept = [axis for axis in range(longer) if axis not in axes]
            return RowAxis(kept.index(rows.axis), rows.flat) if rows.axis in kept else None
        gone = axes or tuple(axis for axis, size in enumerate(before) if size == 1)
        return RowAxis([axis for axis in range(longer) if axis not in gone][rows.axis], rows.flat)
    return reshape_axis(rows, before, after)


def _expand(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    shape = _output(node, output, view)
    needs = _broadcast(node, rows, view, (0,), len(shape), shape[rows.axis])
    operand = _input(node, 1)
    if isinstance(needs, Blocked) or operand is None:
        return needs
    entries = _entries(operand, view)
    operand_shape = view.shape(operand)
    if operand_shape is None or not operand_shape or not isinstance(operand_shape[0], int):
        return Blocked(f"the length of the shape operand of {_named(node)} is not known")
    position = rows.axis - (len(shape) - operand_shape[0])
    if position < 0 or (entries is not None and entries[position] == 1):
        return needs
    return Lift(needs.rows, (Patch(1, position, rows.flat),))


def _constant_of_shape(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    return Lift({}, (Patch(0, rows.axis, rows.flat),))


def _concat(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    rank = len(_output(node, output, view))
    if _attribute(node, "axis", 0) % rank == rows.axis:
        return Blocked(f"{_named(node)} joins rows")
    return Lift(dict.fromkeys(range(len(node.inputs)), rows))


def _slice(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    rank = len(_output(node, output, view))
    if "starts" in node.attributes:
        count = len(node.attributes["starts"].as_ints())
        attribute = node.attributes.get("axes")
        axes: tuple[int, ...] | None = tuple(range(count)) if attribute is None else _axes(node, -1, rank, view)
    elif _input(node, 3) is None:
        starts = node.inputs[1]
        shape = view.shape(starts) if starts is not None else None
        length = shape[0] if shape else None
        axes = tuple(range(length)) if isinstance(length, int) else None
    else:
        axes = _axes(node, 3, rank, view)
    if axes is None:
        return Blocked(f"the axes of {_named(node)} are not known")
    if rows.axis in axes:
        return Blocked(f"{_named(node)} cuts the rows")
    return Lift({0: rows})


def _tile(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    repeats = _ints(_input(node, 1), view)
    if repeats is None or repeats[rows.axis] != 1:
        return Blocked(f"{_named(node)} repeats the rows")
    return Lift({0: rows})


def _pad(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    attribute = node.attributes.get("pads")
    pads = attribute.as_ints() if attribute is not None else _ints(_input(node, 1), view)
    rank = len(_output(node, output, view))
    if pads is None or len(pads) != 2 * rank or pads[rows.axis] or pads[rows.axis + rank]:
        return Blocked(f"{_named(node)} pads the rows")
    return Lift({0: rows})


# ---- indexing -----------------------------------------------------------------------------------------------------


def _gather(node: ir.Node, output: int, rows: RowAxis, view: View) -> Lift | Blocked:
    data, indices = node.inputs[0], node.inputs[1]
    assert data is not None
    assert indices is not None
    data_shape, index_shape = view.shape(data), view.shape(indices)
    if data_shape is None or index_shape is None:
        return Blocked(f"the shapes around {_named(node)} are not known")
    axis = _attribute(node, "axis", 0) % len(data_shape)
    if rows.axis < axis:
        return Lift({0: rows})
    if rows.axis < axis + len(index_shape):
        return Lift({1: RowAxis(rows.axis - axis, rows.flat)})
    return Lift({0: RowAxis(rows.axis - len(index_shape) + 1, rows.flat)})


def _rowwise_index(inputs: tuple[int, ...]) -> Rule:
    """GatherElements and ScatterElements: all operands have the rows, on an axis that is not indexed."""
    return _along_axis(0, inputs=inputs)


# ---- the table ----------------------------------------------------------------------------------------------------

_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid "
    "HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
    "Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu CastLike Clip Dropout"
)
_BROADCAST = (
    "Add Sub Mul Div Pow Mod Min Max Mean Sum And Or Xor Equal Greater GreaterOrEqual Less LessOrEqual Where PRelu "
    "BitShift BitwiseAnd BitwiseOr BitwiseXor"
)
_REDUCE = (
    "ReduceMean ReduceSum ReduceSumSquare ReduceL1 ReduceL2 ReduceMax ReduceMin ReduceProd ReduceLogSum "
    "ReduceLogSumExp ArgMax ArgMin"
)


def _table(domain: str, names: str, rule: Rule) -> dict[tuple[str, str], Rule]:
    return {(domain, name): rule for name in names.split()}


_RULES: dict[tuple[str, str], Rule] = {
    **_table(_STANDARD, _UNARY, _first),
    **_table(_STANDARD, _BROADCAST, _elementwise),
    **_table(_STANDARD, _REDUCE, _reduce),
    **_table(_STANDARD, "Reshape Flatten Squeeze Unsqueeze", _relabel),
    **_table(_STANDARD, "Softmax LogSoftmax Hardmax", _softmax),
    **_table(_STANDARD, "LpNormalization", _along_axis(-1)),
    **_table(_STANDARD, "CumSum TopK", _along_axis(-1)),
    **_table(_STANDARD, "Split", _along_axis(0)),
    **_table(_STANDARD, "LayerNormalization RMSNormalization SimplifiedLayerNormalization", _normalize((0,))),
    **_table(_STANDARD, "MatMul", _product()),
    **_table(_STANDARD, "MatMulInteger", _product(per_row=(2,))),
    **_table(_STANDARD, "QLinearMatMul", _product(0, 3, per_row=(1, 2, 6, 7))),
    **_table(_STANDARD, "Gemm", _gemm),
    **_table(_STANDARD, "Einsum", _einsum),
    **_table(_STANDARD, "QuantizeLinear DequantizeLinear", _quantize),
    **_table(_STANDARD, "DynamicQuantizeLinear", _whole_tensor_scale),
    **_table(_STANDARD, "Transpose", _transpose),
    **_table(_STANDARD, "Expand", _expand),
    **_table(_STANDARD, "ConstantOfShape", _constant_of_shape),
    **_table(_STANDARD, "Concat", _concat),
    **_table(_STANDARD, "Slice", _slice),
    **_table(_STANDARD, "Tile", _tile),
    **_table(_STANDARD, "Pad", _pad),
    **_table(_STANDARD, "Gather", _gather),
    **_table(_STANDARD, "GatherElements", _rowwise_index((0, 1))),
    **_table(_STANDARD, "ScatterElements", _rowwise_index((0, 1, 2))),
    **_table(_CONTRIB, "Gelu QuickGelu", _first),
    **_table(_CONTRIB, "BiasGelu FastGelu", _elementwise),
    **_table(_CONTRIB, "SimplifiedLayerNormalization", _normalize((0,))),
    **_table(_CONTRIB, "SkipSimplifiedLayerNormalization SkipLayerNormalization", _normalize((0, 1))),
    **_table(_CONTRIB, "FusedMatMul", _fused_matmul),
    **_table(_CONTRIB, "FusedGemm", _gemm),
    **_table(_CONTRIB, "MatMulNBits MatMulBnb4 MatMulFpQ4", _packed_weight),
    **_table(_CONTRIB, "MatMulIntegerToFloat", _product(per_row=(2, 4), bias=6)),
    **_table(_CONTRIB, "DynamicQuantizeMatMul", _whole_tensor_scale),
}
