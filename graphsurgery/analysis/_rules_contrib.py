"""Shape rules of the ``com.microsoft`` ops (other than attention) that fused and quantised exports hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis._facts import Fact, normal_axis, rule_table
from graphsurgery.analysis._rules_elementwise import broadcast_shapes, same
from graphsurgery.analysis._rules_linear import TABLE as LINEAR
from graphsurgery.analysis._rules_linear import matmul_shape

if TYPE_CHECKING:
    from graphsurgery.analysis._facts import Call, Shape

__all__ = ["TABLE"]

_FLOAT = ir.DataType.FLOAT


def _weight_only_matmul(call: Call) -> Fact:
    """MatMulNBits and kin: ``[..., K]`` times a packed ``[K, N]`` with N as attribute."""
    shape = call.shape(0)
    columns = call.attribute("N")
    if shape is None:
        return Fact(None, call.dtype(0))
    return Fact(shape[:-1] + (call.fresh() if columns is None else int(columns),), call.dtype(0))


def _fused_matmul(call: Call) -> Fact:
    if call.number("transBatchA", 0) or call.number("transBatchB", 0):
        left = call.shape(0)
        return Fact(None if left is None else call.fresh_shape(len(left)), call.dtype(0))
    left = _turned(call.shape(0), call.number("transA", 0))
    right = _turned(call.shape(1), call.number("transB", 0))
    return Fact(matmul_shape(left, right), call.dtype(0))


def _turned(shape: Shape | None, turn: int) -> Shape | None:
    if shape is None or not turn or len(shape) < 2:
        return shape
    return shape[:-2] + (shape[-1], shape[-2])


def _skip_normalization(call: Call) -> list[Fact]:
    shape, dtype = call.shape(0), call.dtype(0)
    statistics = Fact(None if shape is None else shape[:-1] + (1,), _FLOAT)
    return [Fact(shape, dtype), statistics, statistics, Fact(shape, dtype)]


def _quantized_to_float(call: Call) -> Fact:
    return Fact(matmul_shape(call.shape(0), call.shape(1)), call.dtype(2) or _FLOAT)


def _dynamic_quantize_matmul(call: Call) -> Fact:
    return Fact(matmul_shape(call.shape(0), call.shape(1)), call.dtype(0))


def _gather_block_quantized(call: Call) -> Fact:
    data, indices, dtype = call.shape(0), call.shape(1), call.dtype(2)
    axis = None if data is None else normal_axis(call.number("gather_axis", 0), len(data))
    if data is None or indices is None or axis is None:
        return Fact(None, dtype)
    if call.dtype(0) == ir.DataType.UINT8:
        # Several elements are packed in each byte of the last axis.
        data = data[:-1] + (data[-1] * (8 // call.number("bits", 4)),)
    return Fact(data[:axis] + indices + data[axis + 1 :], dtype)


def _quantized_binary(call: Call) -> Fact:
    return Fact(broadcast_shapes((call.shape(0), call.shape(3))), call.dtype(0))


_MS = "com.microsoft"

TABLE = rule_table(
    (_MS, "MatMulNBits MatMulBnb4 MatMulFpQ4", _weight_only_matmul),
    (_MS, "FusedMatMul TransposeMatMul FusedMatMulActivation", _fused_matmul),
    (_MS, "SkipLayerNormalization SkipSimplifiedLayerNormalization", _skip_normalization),
    (_MS, "Gelu BiasGelu FastGelu QuickGelu MoE QMoE Inverse Trilu GroupNorm QLinearSigmoid QLinearLeakyRelu", same),
    (_MS, "DynamicQuantizeMatMul", _dynamic_quantize_matmul),
    (_MS, "MatMulIntegerToFloat", _quantized_to_float),
    (_MS, "GatherBlockQuantized", _gather_block_quantized),
    (_MS, "QLinearAdd QLinearMul", _quantized_binary),
    (_MS, "FusedGemm", LINEAR["", "Gemm"]),
    (_MS, "FusedConv", LINEAR["", "Conv"]),
    (_MS, "QuantizeLinear", LINEAR["", "QuantizeLinear"]),
    (_MS, "DequantizeLinear", LINEAR["", "DequantizeLinear"]),
)
