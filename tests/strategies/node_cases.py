"""One node of any operator that has a row rule, with random ranks, sizes, axes and data.

``CASES`` maps (domain, operator) to a function that draws a :class:`NodeCase`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CASES", "NodeCase", "node_cases"]

MS = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class NodeCase:
    """A node.

    Attributes:
        op: operator.
        inputs: arrays, None for what is left out.
        known: inputs whose contents are known before it runs (axes, shapes, pads).
        attributes: of the node.
        outputs: how many it has.
        domain: of the operator.
        opset: of the default domain.
    """

    op: str
    inputs: tuple[np.ndarray | None, ...]
    known: frozenset[int] = frozenset()
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: int = 1
    domain: str = ""
    opset: int = 20


Draw: TypeAlias = "Callable[[st.SearchStrategy[Any]], Any]"
Maker: TypeAlias = "Callable[[Draw, str, str], NodeCase]"


def _shape(draw: Draw, low: int = 1, high: int = 4) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([2, 3, 4, 1]), min_size=low, max_size=high)))


def _rng(draw: Draw) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 999)))


def _floats(draw: Draw, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(_rng(draw).uniform(0.1, 0.9, shape), dtype)


def _bytes(draw: Draw, shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
    return np.asarray(_rng(draw).integers(0, 100, shape), dtype)


def _part(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to ``shape``."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(size if draw(st.booleans()) else 1 for size in kept)


def _axis(draw: Draw, rank: int) -> int:
    axis: int = draw(st.integers(0, rank - 1))
    return axis - rank if draw(st.booleans()) else axis


def _i64(*items: int) -> np.ndarray:
    return np.array(items, np.int64)


# ---- element-wise -------------------------------------------------------------------------------------------------

_BOOLEAN = {"Not", "And", "Or", "Xor"}
_WHOLE = {"BitwiseNot", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift", "Mod"}
_NEWER = {"Swish": 24, "Gelu": 20, "Mish": 18}


def _typed(draw: Draw, op: str, shape: tuple[int, ...]) -> np.ndarray:
    if op in _BOOLEAN:
        return np.asarray(_rng(draw).random(shape) > 0.5)
    if op in _WHOLE:
        return np.asarray(_rng(draw).integers(1, 7, shape), np.uint32 if op == "BitShift" else np.int32)
    return _floats(draw, shape)


def _unary(draw: Draw, domain: str, op: str) -> NodeCase:
    value = _typed(draw, op, _shape(draw))
    if op == "Acosh":
        value = value + 1
    rest: tuple[np.ndarray | None, ...] = ()
    attributes: dict[str, Any] = {}
    match op:
        case "Cast":
            attributes = {"to": onnx.TensorProto.FLOAT16}
        case "CastLike":
            rest = (np.array([1.0], np.float64),)
        case "Clip":
            rest = (np.array(0.3, np.float32), None)
        case "QLinearSigmoid" | "QLinearLeakyRelu":
            value = _bytes(draw, value.shape)
            scale, zero = np.array(0.05, np.float32), np.array(9, np.uint8)
            rest = (scale, zero, scale, zero)
    return NodeCase(op, (value, *rest), attributes=attributes, domain=domain, opset=_NEWER.get(op, 20))


def _broadcast(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    first = shape if op in ("PRelu", "BiasGelu", "FastGelu") or draw(st.booleans()) else _part(draw, shape)
    second = shape[-1:] if op in ("BiasGelu", "FastGelu") else _part(draw, shape)
    values = [_typed(draw, op, first), _typed(draw, op, second)]
    if op in ("Sum", "Max", "Min", "Mean"):
        values.append(_typed(draw, op, _part(draw, shape)))
    if op == "Where":
        values.insert(0, np.asarray(_rng(draw).random(_part(draw, shape)) > 0.5))
    attributes = {"direction": "LEFT"} if op == "BitShift" else {}
    return NodeCase(op, tuple(values), attributes=attributes, domain=domain)


def _quantized_binary(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    scale, zero = np.array(0.05, np.float32), np.array(9, np.uint8)
    left, right = _bytes(draw, shape), _bytes(draw, _part(draw, shape))
    return NodeCase(op, (left, scale, zero, right, scale, zero, scale, zero), domain=domain)


def _quantize(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    axis = _axis(draw, len(shape))
    size = () if draw(st.booleans()) else (shape[axis],)
    scale, zero = _floats(draw, size), _bytes(draw, size)
    value = _floats(draw, shape) * 10 if op == "QuantizeLinear" else _bytes(draw, shape)
    return NodeCase(op, (value, scale, zero), attributes={"axis": axis}, domain=domain)


# ---- products -----------------------------------------------------------------------------------------------------


def _operands(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lead = _shape(draw, 0, 2)
    left = (*(lead if draw(st.booleans()) else _part(draw, lead)), draw(st.integers(1, 4)), 3)
    right = (*(_part(draw, lead) if draw(st.booleans()) else ()), 3, draw(st.integers(2, 4)))
    if draw(st.integers(0, 9)) == 0:
        right = (3,)
    return left, right


def _matmul(draw: Draw, domain: str, op: str) -> NodeCase:
    left, right = _operands(draw)
    return NodeCase(op, (_floats(draw, left), _floats(draw, right)), domain=domain)


def _fused_matmul(draw: Draw, domain: str, op: str) -> NodeCase:
    left, right = _operands(draw)
    attributes = {"transA": 0, "transB": draw(st.integers(0, 1)) if len(right) > 1 else 0}
    if attributes["transB"]:
        right = (*right[:-2], right[-1], right[-2])
    values = (_floats(draw, left), _floats(draw, right))
    return NodeCase(op, values, attributes=attributes, domain=domain)


def _attention(draw: Draw, domain: str, op: str) -> NodeCase:
    rows, columns, groups = draw(st.integers(2, 4)), draw(st.integers(2, 4)), draw(st.sampled_from([1, 2]))
    query: tuple[int, ...] = (2, 2 * groups, rows, 4)
    keys: tuple[int, ...] = (2, groups, columns, 4)
    attributes = {"is_causal": draw(st.sampled_from([0, 0, 1]))}
    if draw(st.booleans()):
        query, keys = (2, rows, 8 * groups), (2, columns, 4 * groups)
        attributes |= {"q_num_heads": 2 * groups, "kv_num_heads": groups}
    masks = [None, (rows, columns), (2, 1, rows, columns), (1, 2 * groups, rows, columns)]
    mask = draw(st.sampled_from(masks))
    values = (_floats(draw, query), _floats(draw, keys), _floats(draw, keys))
    added = (_floats(draw, mask),) if mask is not None else ()
    return NodeCase(op, (*values, *added), attributes=attributes, opset=23)


def _integer_matmul(draw: Draw, domain: str, op: str) -> NodeCase:
    rows, columns = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    left, right = _bytes(draw, (2, rows, 4)), _bytes(draw, (4, columns))
    zero = np.array(7, np.uint8)
    per_column = draw(st.booleans())
    zeros = _bytes(draw, (columns,)) if per_column else zero
    scale = np.array(0.05, np.float32)
    scales = _floats(draw, (columns,)) if per_column else scale
    values: tuple[np.ndarray | None, ...]
    if op == "MatMulInteger":
        values = (left, right, zero, zeros)
    elif op == "QLinearMatMul":
        values = (left, scale, zero, right, scales, zeros, np.array(0.5, np.float32), zero)
    else:
        values = (left, right, scale, scales, zero, zeros, _floats(draw, (columns,)))
    return NodeCase(op, values, domain=domain)


def _gemm(draw: Draw, domain: str, op: str) -> NodeCase:
    m, n = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    turn = [draw(st.integers(0, 1)) for _ in range(2)]
    left, right = ((3, m) if turn[0] else (m, 3)), ((n, 3) if turn[1] else (3, n))
    attributes: dict[str, Any] = {"transA": turn[0], "transB": turn[1]}
    bias = draw(st.sampled_from([(n,), (1, n), (m, 1), (m, n)]))
    if op == "QGemm":
        scale, zero = np.array(0.05, np.float32), np.array(9, np.uint8)
        values: tuple[np.ndarray | None, ...] = (_bytes(draw, left), scale, zero, _bytes(draw, right), scale, zero)
        return NodeCase(op, values, attributes=attributes, domain=domain)
    if op == "FusedGemm":
        attributes["activation"] = "Relu"
    values = (_floats(draw, left), _floats(draw, right), _floats(draw, bias))
    return NodeCase(op, values, attributes=attributes, domain=domain)


def _packed(draw: Draw, domain: str, op: str) -> NodeCase:
    rows = _shape(draw, 1, 2)
    value, packed = _floats(draw, (*rows, 32)), _bytes(draw, (6, 2, 8))
    if op == "MatMulNBits":
        values: tuple[np.ndarray | None, ...] = (value, packed, _floats(draw, (12,)))
        attributes = {"K": 32, "N": 6, "bits": 4, "block_size": 16}
    else:
        values = (value, _bytes(draw, (96,)), _floats(draw, (12,)))
        attributes = {"K": 32, "N": 6, "block_size": 16}
        attributes |= {"quant_type": 1} if op == "MatMulBnb4" else {"blk_quant_type": 1}
    return NodeCase(op, values, attributes=attributes, domain=domain)


def _dynamic(draw: Draw, domain: str, op: str) -> NodeCase:
    if op == "DynamicQuantizeLinear":
        return NodeCase(op, (_floats(draw, _shape(draw, 2)),), outputs=3)
    values = (_floats(draw, (2, 3, 4)), _bytes(draw, (4, 5)), np.array(0.1, np.float32), np.array(3, np.uint8))
    return NodeCase(op, values, domain=domain)


def _einsum(draw: Draw, domain: str, op: str) -> NodeCase:
    equation, *shapes = draw(
        st.sampled_from(
            [
                ("bsh,vh->bsv", (2, 3, 4), (5, 4)),
                ("bsh, hv -> bvs", (2, 3, 4), (4, 5)),
                ("...h,vh->...v", (2, 3, 4), (5, 4)),
                ("...h,vh->v...", (2, 3, 4), (5, 4)),
                ("bhsd,bhtd->bhst", (2, 3, 2, 4), (2, 3, 5, 4)),
                ("ij,jk", (3, 4), (4, 2)),
                ("...j,...j", (2, 3, 4), (2, 3, 4)),
                ("bsh->bhs", (2, 3, 4)),
                ("bsh,bsh->bs", (2, 3, 4), (2, 3, 4)),
            ]
        )
    )
    values = tuple(_floats(draw, shape) for shape in shapes)
    return NodeCase(op, values, attributes={"equation": equation})


def _conv(draw: Draw, domain: str, op: str) -> NodeCase:
    kernel = draw(st.sampled_from([(1, 1), (1, 3), (2, 1)]))
    value, weight = _floats(draw, (2, 4, 3, 5)), _floats(draw, (6, 4, *kernel))
    attributes = draw(st.sampled_from([{}, {"strides": [1, 2]}, {"pads": [0, 1, 0, 1]}, {"auto_pad": "SAME_UPPER"}]))
    return NodeCase(op, (value, weight, _floats(draw, (6,))), attributes=dict(attributes))


# ---- along an axis ------------------------------------------------------------------------------------------------


def _softmax(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    attributes = {"axis": _axis(draw, len(shape))} if draw(st.booleans()) else {}
    return NodeCase(op, (_floats(draw, shape),), attributes=attributes, opset=draw(st.sampled_from([11, 12, 13, 20])))


def _along(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    axis = _axis(draw, len(shape))
    value, attributes = _floats(draw, shape), {"axis": axis}
    if op == "TopK":
        return NodeCase(op, (value, _i64(1)), frozenset({1}), attributes, outputs=2)
    if op == "Split":
        value = np.repeat(value, 2, axis=axis)
        return NodeCase(op, (value,), attributes=attributes | {"num_outputs": 2}, outputs=2)
    if op == "CumSum":
        return NodeCase(op, (value, np.array(axis, np.int64)), frozenset({1}))
    return NodeCase(op, (value,), attributes=attributes)


def _normalize(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = (*_shape(draw, 1, 3), 4)
    value, weight = _floats(draw, shape), _floats(draw, (4,))
    match op:
        case "SkipSimplifiedLayerNormalization" | "SkipLayerNormalization":
            shape = (2, *shape[-2:])
            value, skip = _floats(draw, shape), _floats(draw, draw(st.sampled_from([shape, (1, *shape[1:])])))
            values: tuple[np.ndarray | None, ...] = (value, skip, weight)
            return NodeCase(op, values, outputs=4, domain=domain)
        case "LayerNormalization":
            axis = draw(st.sampled_from([-1, -2])) if len(shape) > 1 else -1
            scale = draw(st.sampled_from([shape[axis:], (4,), (*shape[:-1], 4)])) if axis == -1 else shape[axis:]
            values = (value, _floats(draw, scale), _floats(draw, shape[axis:]))
            return NodeCase(op, values, attributes={"axis": axis}, outputs=1)
        case "RMSNormalization":
            return NodeCase(op, (value, weight), opset=23)
    return NodeCase(op, (value, weight), domain=domain)


def _reduce(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    value, keep = _floats(draw, shape), {"keepdims": draw(st.integers(0, 1))}
    axis = _axis(draw, len(shape))
    if op.startswith("Arg"):
        return NodeCase(op, (value,), attributes=keep | {"axis": axis})
    form = draw(st.sampled_from(["operand", "attribute", "none", "noop"]))
    if form == "attribute":
        return NodeCase(op, (value,), attributes=keep | {"axes": [axis]}, opset=11)
    if form == "operand":
        return NodeCase(op, (value, _i64(axis)), frozenset({1}), keep)
    return NodeCase(op, (value,), attributes=keep | {"noop_with_empty_axes": int(form == "noop")})


# ---- layout -------------------------------------------------------------------------------------------------------


def _relabel(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    value = _floats(draw, shape)
    old = draw(st.booleans())
    if op == "Flatten":
        return NodeCase(op, (value,), attributes={"axis": draw(st.integers(0, len(shape)))})
    if op == "Reshape":
        target = draw(st.sampled_from(_targets(shape)))
        return NodeCase(op, (value, _i64(*target)), frozenset({1}))
    if op == "Unsqueeze":
        rank = len(shape) + 1
        axes = [_axis(draw, rank)]
    else:
        value = np.expand_dims(value, draw(st.integers(0, len(shape))))
        ones = [axis for axis, size in enumerate(value.shape) if size == 1]
        axes = [draw(st.sampled_from(ones))]
        if len(ones) == value.ndim or draw(st.integers(0, 3)) == 0:
            return NodeCase(op, (value,), opset=13)
    if old:
        return NodeCase(op, (value,), attributes={"axes": axes}, opset=11)
    return NodeCase(op, (value, _i64(*axes)), frozenset({1}))


def _targets(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes that a tensor of ``shape`` can be given."""
    whole, lead = int(np.prod(shape)), shape[0] * shape[1]
    found = [(whole,), (lead, *shape[2:]), (-1, *shape[2:]), (0, -1), (*shape, 1), (1, *shape), shape, (1, -1)]
    found += [(shape[0], 1, *shape[1:]), (0, 0, *shape[2:])]
    if shape[-1] == 4:
        found.append((*shape[:-1], 2, 2))
    return found


def _transpose(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    perm = draw(st.permutations(range(len(shape))))
    attributes = {"perm": list(perm)} if draw(st.booleans()) else {}
    return NodeCase(op, (_floats(draw, shape),), attributes=attributes)


def _expand(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    value = _floats(draw, _part(draw, shape))
    target = shape if draw(st.booleans()) else tuple(size if draw(st.booleans()) else 1 for size in shape)
    return NodeCase(op, (value, _i64(*target)), frozenset({1}))


def _constant_of_shape(draw: Draw, domain: str, op: str) -> NodeCase:
    return NodeCase(op, (_i64(*_shape(draw, 1)),), frozenset({0}))


def _concat(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    axis = _axis(draw, len(shape))
    return NodeCase(op, (_floats(draw, shape), _floats(draw, shape)), attributes={"axis": axis})


def _slice(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    axis = draw(st.integers(0, len(shape) - 1))
    start = draw(st.sampled_from([0, 1, -1]))
    end = draw(st.sampled_from([2**63 - 1, 2**31 - 1, shape[axis], -1, 1]))
    value = _floats(draw, shape)
    if draw(st.integers(0, 3)) == 0:
        attributes = {"starts": [start], "ends": [min(end, 2**31 - 1)], "axes": [axis]}
        return NodeCase(op, (value,), attributes=attributes, opset=9)
    step = draw(st.sampled_from([None, 1, 2, -1]))
    if step == -1:
        start, end = -1, -(2**63) + 1
    operands = [_i64(start), _i64(end), _i64(axis)] + ([] if step is None else [_i64(step)])
    return NodeCase(op, (value, *operands), frozenset(range(1, 1 + len(operands))))


def _tile(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    repeats = [draw(st.integers(1, 2)) for _ in shape]
    return NodeCase(op, (_floats(draw, shape), _i64(*repeats)), frozenset({1}))


def _pad(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2)
    value, axis = _floats(draw, shape), draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        axes = (value, _i64(0, 1), None, _i64(axis))
        return NodeCase(op, axes, frozenset({1, 3}))
    pads = [0] * (2 * len(shape))
    pads[axis] = draw(st.integers(0, 1))
    pads[axis + len(shape)] = 2
    return NodeCase(op, (value, _i64(*pads)), frozenset({1}))


# ---- indexing -----------------------------------------------------------------------------------------------------


def _indices(draw: Draw, shape: tuple[int, ...], limit: int) -> np.ndarray:
    return np.asarray(_rng(draw).integers(0, limit, shape))


def _gather(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2, 3)
    axis = _axis(draw, len(shape))
    indices = _indices(draw, _shape(draw, 0, 2), shape[axis])
    return NodeCase(op, (_floats(draw, shape), indices), attributes={"axis": axis})


def _gather_nd(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = (3, 4, 2, 3)
    lead, depth = draw(st.integers(0, 1)), draw(st.integers(1, 2))
    limit = min(shape[lead : lead + depth])
    inner = (3, *_shape(draw, 1, 1)) if lead else _shape(draw, 1, 2)
    return NodeCase(op, (_floats(draw, shape), _indices(draw, (*inner, depth), limit)), attributes={"batch_dims": lead})


def _elements(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 2, 3)
    axis = _axis(draw, len(shape))
    if op == "GatherElements":
        size = list(shape) if draw(st.booleans()) else [max(1, size - 1) for size in shape]
        size[axis] = draw(st.integers(1, 3))
        return NodeCase(op, (_floats(draw, shape), _indices(draw, tuple(size), shape[axis])), attributes={"axis": axis})
    # Each index once: which of two writes wins is not defined.
    size = list(shape) if draw(st.booleans()) else [max(1, size - 1) for size in shape]
    size[axis] = 1
    indices = _indices(draw, tuple(size), shape[axis])
    values = (_floats(draw, shape), indices, _floats(draw, tuple(size)))
    return NodeCase(op, values, attributes={"axis": axis}, opset=9 if op == "Scatter" else 20)


def _scatter_nd(draw: Draw, domain: str, op: str) -> NodeCase:
    shape, depth = (3, 4, 2, 3), draw(st.integers(1, 2))
    indices = _indices(draw, (2, depth), 3)
    indices[1] = (indices[0] + 1) % 3
    return NodeCase(op, (_floats(draw, shape), indices, _floats(draw, (2, *shape[depth:]))))


def _one_hot(draw: Draw, domain: str, op: str) -> NodeCase:
    shape = _shape(draw, 1, 3)
    values = (_indices(draw, shape, 5), np.array(5, np.int64), np.array([0, 1], np.float32))
    return NodeCase(op, values, frozenset({1}), {"axis": _axis(draw, len(shape) + 1)})


# ---- the table ----------------------------------------------------------------------------------------------------


def _table(domain: str, names: str, maker: Maker) -> dict[tuple[str, str], Maker]:
    return {(domain, name): maker for name in names.split()}


_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid "
    "HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
    "Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu CastLike Clip Dropout"
)
_BINARY = (
    "Add Sub Mul Div Pow Mod Min Max Mean Sum And Or Xor Equal Greater GreaterOrEqual Less LessOrEqual Where PRelu "
    "BitShift BitwiseAnd BitwiseOr BitwiseXor"
)
_REDUCTIONS = (
    "ReduceMean ReduceSum ReduceSumSquare ReduceL1 ReduceL2 ReduceMax ReduceMin ReduceProd ReduceLogSum "
    "ReduceLogSumExp ArgMax ArgMin"
)


def _experts(draw: Draw, domain: str, op: str) -> NodeCase:
    """Three experts, of which one or two are chosen."""
    batch, length, hidden, experts = draw(st.integers(1, 3)), draw(st.integers(1, 4)), 16, 3
    packed = draw(st.booleans())
    tokens = _floats(draw, (length, hidden) if packed else (batch, length, hidden))
    scores = np.asarray(_rng(draw).permuted(np.arange(length * (1 if packed else batch) * experts)), np.float32)
    stack = (experts, hidden, hidden)
    operands: tuple[np.ndarray | None, ...] = (_floats(draw, stack), None, _floats(draw, stack))
    attributes: dict[str, Any] = {"k": draw(st.integers(1, 2)), "activation_type": "silu"}
    if op == "QMoE":
        scales = [_floats(draw, stack[:2]) / 100 for _ in range(2)]
        operands = (_bytes(draw, stack), scales[0], None, _bytes(draw, stack), scales[1])
        attributes["expert_weight_bits"] = 8
    return NodeCase(op, (tokens, scores.reshape(-1, experts) / 10, *operands), frozenset(), attributes, domain=domain)


CASES: dict[tuple[str, str], Maker] = {
    **_table("", _UNARY, _unary),
    **_table("", _BINARY, _broadcast),
    **_table("", _REDUCTIONS, _reduce),
    **_table("", "Reshape Flatten Squeeze Unsqueeze", _relabel),
    **_table("", "Softmax LogSoftmax Hardmax", _softmax),
    **_table("", "LpNormalization TopK CumSum Split", _along),
    **_table("", "LayerNormalization RMSNormalization SimplifiedLayerNormalization", _normalize),
    **_table("", "MatMul", _matmul),
    **_table("", "Attention", _attention),
    **_table("", "MatMulInteger QLinearMatMul", _integer_matmul),
    **_table("", "Gemm", _gemm),
    **_table("", "Einsum", _einsum),
    **_table("", "Conv", _conv),
    **_table("", "QuantizeLinear DequantizeLinear", _quantize),
    **_table("", "DynamicQuantizeLinear", _dynamic),
    **_table("", "Transpose", _transpose),
    **_table("", "Expand", _expand),
    **_table("", "ConstantOfShape", _constant_of_shape),
    **_table("", "Concat", _concat),
    **_table("", "Slice", _slice),
    **_table("", "Tile", _tile),
    **_table("", "Pad", _pad),
    **_table("", "Gather", _gather),
    **_table("", "GatherND", _gather_nd),
    **_table("", "GatherElements ScatterElements Scatter", _elements),
    **_table("", "ScatterND", _scatter_nd),
    **_table("", "OneHot", _one_hot),
    **_table(MS, "Gelu QuickGelu QLinearSigmoid QLinearLeakyRelu", _unary),
    **_table(MS, "BiasGelu FastGelu", _broadcast),
    **_table(MS, "QLinearAdd QLinearMul", _quantized_binary),
    **_table(MS, "QuantizeLinear DequantizeLinear", _quantize),
    **_table(MS, "SimplifiedLayerNormalization SkipSimplifiedLayerNormalization SkipLayerNormalization", _normalize),
    **_table(MS, "FusedMatMul", _fused_matmul),
    **_table(MS, "FusedGemm QGemm", _gemm),
    **_table(MS, "MatMulNBits MatMulBnb4 MatMulFpQ4", _packed),
    **_table(MS, "MatMulIntegerToFloat", _integer_matmul),
    **_table(MS, "DynamicQuantizeMatMul", _dynamic),
    **_table(MS, "MoE QMoE", _experts),
}


@st.composite
def node_cases(draw: Draw, domain: str, op: str) -> NodeCase:
    """A node of one operator."""
    return CASES[domain, op](draw, domain, op)
