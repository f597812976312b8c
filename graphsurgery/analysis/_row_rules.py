"""Row rules, one for each kind of operator: see :mod:`graphsurgery.analysis.slices`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.analysis import _row_layout as layout
from graphsurgery.analysis import _row_products as products
from graphsurgery.analysis._row_helpers import (
    attribute,
    axes_of,
    broadcast,
    input_at,
    ints,
    named,
    output_shape,
    varying,
)
from graphsurgery.analysis._row_types import Blocked, Lift, RowAxis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import onnx_ir as ir

    from graphsurgery.analysis._row_types import Context

    Rule: TypeAlias = Callable[[ir.Node, int, RowAxis, Context], Lift | Blocked]

__all__ = ["find", "operators"]

_STANDARD = ""
_CONTRIB = "com.microsoft"


def find(node: ir.Node) -> Rule | None:
    """The rule of the node's operator; None where there is none."""
    return _RULES.get((node.domain, node.op_type))


def operators() -> frozenset[tuple[str, str]]:
    """Domain and name of every operator that has a rule."""
    return frozenset(_RULES)


# ---- element-wise -------------------------------------------------------------------------------------------------


def _elementwise(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    shape = output_shape(node, output, context)
    return broadcast(node, rows, context, range(len(node.inputs)), len(shape), shape[rows.axis])


def _first(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    return Lift({0: rows})


def _experts(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """MoE and QMoE: tokens ``[T, H]`` or ``[B, S, H]``, and the router's scores ``[T, E]``."""
    scores = input_at(node, 1)
    if scores is None or context.shape(scores) is None:
        return Blocked(f"the shape of the scores that {named(node)} reads is not known")
    flat = len(output_shape(node, output, context)) == 3
    if rows.axis != (1 if flat else 0):
        return Blocked(f"{named(node)} mixes what is along axis {rows.axis}")
    return Lift({0: rows, 1: RowAxis(0, flat=True) if flat else rows})


def _quantized_binary(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """QLinearAdd and QLinearMul: a scale and a zero point behind each operand and the result."""
    shape = output_shape(node, output, context)
    return broadcast(node, rows, context, (0, 3), len(shape), shape[rows.axis])


def _quantize(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    value = varying(node, (1, 2), context)
    if value is None:
        return Lift({0: rows})
    shape, rank = context.shape(value), len(output_shape(node, output, context))
    if shape is None or len(shape) != 1 or attribute(node, "axis", 1) % rank == rows.axis:
        return Blocked(f"{named(node)} has a scale for each row or block")
    return Lift({0: rows})


# ---- over one axis ------------------------------------------------------------------------------------------------


def _along_axis(default: int) -> Rule:
    """Operators that work along ``axis``: rows pass where they are another axis."""

    def rule(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
        rank = len(output_shape(node, output, context))
        if rows.axis == attribute(node, "axis", default) % rank:
            return Blocked(f"{named(node)} works along the rows")
        return Lift({0: rows})

    return rule


def _softmax(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    # Before opset 13 the operator flattens everything from its axis on, and its default axis is 1.
    old = (node.version or context.opset) < 13
    rank = len(output_shape(node, output, context))
    axis = attribute(node, "axis", 1 if old else -1) % rank
    if rows.axis == axis or (old and rows.axis > axis):
        return Blocked(f"{named(node)} works along the rows")
    return Lift({0: rows})


def _cum_sum(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    axes = ints(input_at(node, 1), context)
    if axes is None or axes[0] % len(output_shape(node, output, context)) == rows.axis:
        return Blocked(f"{named(node)} may work along the rows")
    return Lift({0: rows})


def _normalize(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Normalisation over the last axes; scales and biases may be different for each row."""
    shape = output_shape(node, output, context)
    if rows.axis >= attribute(node, "axis", -1) % len(shape):
        return Blocked(f"{named(node)} normalises over the rows")
    return broadcast(node, rows, context, range(len(node.inputs)), len(shape), shape[rows.axis])


def _reduce(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    value = node.inputs[0]
    assert value is not None
    shape = context.shape(value)
    if shape is None:
        return Blocked(f"the shape of {value.name!r}, which {named(node)} reads, is not known")
    rank = len(shape)
    axes: tuple[int, ...] | None
    if node.op_type in ("ArgMax", "ArgMin"):
        axes = (attribute(node, "axis", 0) % rank,)
    else:
        axes = axes_of(node, 1, rank, context)
        if axes == () and not attribute(node, "noop_with_empty_axes", 0):
            axes = tuple(range(rank))
    if axes is None:
        return Blocked(f"the axes of {named(node)} are not known")
    kept: Iterable[int] = range(rank)
    if not attribute(node, "keepdims", 1):
        kept = [axis for axis in range(rank) if axis not in axes]
    source = list(kept)[rows.axis]
    if source in axes:
        return Blocked(f"{named(node)} reduces over the rows")
    return Lift({0: RowAxis(source, rows.flat)})


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
    **_table(_STANDARD, "Reshape Flatten Squeeze Unsqueeze", layout.relabel),
    **_table(_STANDARD, "Softmax LogSoftmax Hardmax", _softmax),
    **_table(_STANDARD, "LpNormalization TopK", _along_axis(-1)),
    **_table(_STANDARD, "CumSum", _cum_sum),
    **_table(_STANDARD, "Split", _along_axis(0)),
    **_table(_STANDARD, "LayerNormalization RMSNormalization SimplifiedLayerNormalization", _normalize),
    **_table(_STANDARD, "MatMul", products.product()),
    **_table(_STANDARD, "Attention", products.attention),
    **_table(_STANDARD, "MatMulInteger", products.product(per_row=(2,), per_column=(3,))),
    **_table(_STANDARD, "QLinearMatMul", products.product(0, 3, per_row=(1, 2, 6, 7), per_column=(4, 5))),
    **_table(_STANDARD, "Gemm", products.gemm),
    **_table(_STANDARD, "Einsum", products.einsum),
    **_table(_STANDARD, "Conv", products.conv),
    **_table(_STANDARD, "QuantizeLinear DequantizeLinear", _quantize),
    **_table(_STANDARD, "DynamicQuantizeLinear", products.whole_tensor_scale),
    **_table(_STANDARD, "Transpose", layout.transpose),
    **_table(_STANDARD, "Expand", layout.expand),
    **_table(_STANDARD, "ConstantOfShape", layout.constant_of_shape),
    **_table(_STANDARD, "Concat", layout.concat),
    **_table(_STANDARD, "Slice", layout.slice_),
    **_table(_STANDARD, "Tile", layout.tile),
    **_table(_STANDARD, "Pad", layout.pad),
    **_table(_STANDARD, "Gather", layout.gather),
    **_table(_STANDARD, "GatherND", layout.gather_nd),
    **_table(_STANDARD, "GatherElements", layout.gather_elements),
    **_table(_STANDARD, "ScatterElements Scatter", layout.scatter_elements),
    **_table(_STANDARD, "ScatterND", layout.scatter_nd),
    **_table(_STANDARD, "OneHot", layout.one_hot),
    **_table(_CONTRIB, "Gelu QuickGelu QLinearSigmoid QLinearLeakyRelu", _first),
    **_table(_CONTRIB, "BiasGelu FastGelu", _elementwise),
    **_table(_CONTRIB, "QLinearAdd QLinearMul", _quantized_binary),
    **_table(_CONTRIB, "QuantizeLinear DequantizeLinear", _quantize),
    **_table(
        _CONTRIB, "SimplifiedLayerNormalization SkipSimplifiedLayerNormalization SkipLayerNormalization", _normalize
    ),
    **_table(_CONTRIB, "FusedMatMul", products.fused_matmul),
    **_table(_CONTRIB, "MoE QMoE", _experts),
    **_table(_CONTRIB, "FusedGemm", products.gemm),
    **_table(_CONTRIB, "QGemm", products.quantized_gemm),
    **_table(_CONTRIB, "MatMulNBits MatMulBnb4 MatMulFpQ4", products.packed_weight),
    **_table(_CONTRIB, "MatMulIntegerToFloat", products.product(per_row=(2, 4), per_column=(3, 5, 6))),
    **_table(_CONTRIB, "DynamicQuantizeMatMul", products.whole_tensor_scale),
}
