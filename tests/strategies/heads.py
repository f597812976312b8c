"""Products with the vocabulary matrix, in every form that exporters and quantisers write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from tests.strategies.graphs import Builder, H, V

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HEADS", "product"]


def _matmul(g: Builder, x: str, name: str, rank: int) -> str:
    return g.op("MatMul", x, g.weight(H, V, name=name))


def _tied(g: Builder, x: str, name: str, rank: int) -> str:
    return g.op("MatMul", x, g.op("Transpose", "embed", perm=[1, 0]))


def _gemm(g: Builder, x: str, name: str, rank: int) -> str:
    return g.op("Gemm", x, g.weight(H, V, name=name), alpha=0.5)


def _gemm_trans(g: Builder, x: str, name: str, rank: int) -> str:
    return g.op("Gemm", x, g.weight(V, H, name=name), g.weight(V), transB=1, beta=2.0)


def _fused_matmul(g: Builder, x: str, name: str, rank: int) -> str:
    return g.op("FusedMatMul", x, g.weight(V, H, name=name), domain="com.microsoft", transB=1, alpha=0.5)


def _nbits(g: Builder, x: str, name: str, rank: int) -> str:
    packed = g.const(g.rng.integers(0, 256, (V, 2, 8)), name, np.uint8)
    scales = g.const(g.rng.random(V * 2) * 0.1, dtype=np.float32)
    return g.op("MatMulNBits", x, packed, scales, domain="com.microsoft", K=H, N=V, bits=4, block_size=16)


def _quantized(g: Builder, name: str) -> tuple[str, str, str]:
    """An unsigned matrix, its scale and its zero point."""
    stored = g.const(g.rng.integers(0, 200, (H, V)), name, np.uint8)
    return stored, g.const(0.02, dtype=np.float32), g.const(100, dtype=np.uint8)


def _integer(g: Builder, x: str, name: str, rank: int) -> str:
    stored, scale, zero = _quantized(g, name)
    seen = g.op("DynamicQuantizeLinear", x, outputs=3)
    summed = g.op("Cast", g.op("MatMulInteger", seen, stored, f"{seen}.2", zero), to=TensorProto.FLOAT)
    return g.op("Mul", summed, g.op("Mul", f"{seen}.1", scale))


def _integer_to_float(g: Builder, x: str, name: str, rank: int) -> str:
    stored, scale, zero = _quantized(g, name)
    seen = g.op("DynamicQuantizeLinear", x, outputs=3)
    inputs = (seen, stored, f"{seen}.1", scale, f"{seen}.2", zero)
    return g.op("MatMulIntegerToFloat", *inputs, domain="com.microsoft")


def _dynamic_matmul(g: Builder, x: str, name: str, rank: int) -> str:
    stored, scale, zero = _quantized(g, name)
    return g.op("DynamicQuantizeMatMul", x, stored, scale, zero, g.weight(V), domain="com.microsoft")


def _qdq_weight(g: Builder, x: str, name: str, rank: int) -> str:
    scales = g.const(g.rng.random(V) * 0.02 + 0.01, dtype=np.float32)
    stored = g.const(g.rng.integers(-100, 100, (V, H)), name, np.int8)
    plain = g.op("DequantizeLinear", stored, scales, g.const(np.zeros(V), dtype=np.int8), axis=0)
    return g.op("MatMul", x, g.op("Transpose", plain, perm=[1, 0]))


def _qdq_all(g: Builder, x: str, name: str, rank: int) -> str:
    scale, zero = g.const(0.05, dtype=np.float32), g.const(120, dtype=np.uint8)
    seen = g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero), scale, zero)
    stored = g.const(g.rng.integers(-100, 100, (H, V)), name, np.int8)
    plain = g.op("DequantizeLinear", stored, g.const(0.02, dtype=np.float32), g.const(0, dtype=np.int8))
    # The result is not quantised: which way a tie is rounded depends on the order of the sums in the product.
    return g.op("MatMul", seen, plain)


def _qlinear(g: Builder, x: str, name: str, rank: int) -> str:
    scale, zero = g.const(0.05, dtype=np.float32), g.const(120, dtype=np.uint8)
    stored = g.const(g.rng.integers(0, 200, (H, V)), name, np.uint8)
    seen = g.op("QuantizeLinear", x, scale, zero)
    product = g.op("QLinearMatMul", seen, scale, zero, stored, scale, zero, scale, zero)
    return g.op("DequantizeLinear", product, scale, zero)


def _einsum(g: Builder, x: str, name: str, rank: int) -> str:
    letters = "bkts"[: rank - 1]
    return g.op("Einsum", x, g.weight(V, H, name=name), equation=f"{letters}h,vh->{letters}v")


def _einsum_dots(g: Builder, x: str, name: str, rank: int) -> str:
    return g.op("Einsum", x, g.weight(V, H, name=name), equation="...h,vh->...v")


def _chunks(g: Builder, x: str, name: str, rank: int) -> str:
    parts = [g.op("MatMul", x, g.weight(H, size)) for size in (5, V - 5)]
    return g.op("Concat", *parts, axis=-1)


def _lora(g: Builder, x: str, name: str, rank: int) -> str:
    down = g.op("MatMul", x, g.weight(H, 4))
    up = g.op("MatMul", g.op("Mul", down, g.scalar(0.5)), g.weight(4, V))
    return g.op("Add", g.op("MatMul", x, g.weight(H, V, name=name)), up)


def _swapped(g: Builder, x: str, name: str, rank: int) -> str:
    axes = [*range(rank - 2), rank - 1, rank - 2]
    turned = g.op("MatMul", g.weight(V, H, name=name), g.op("Transpose", x, perm=axes))
    return g.op("Transpose", turned, perm=axes)


def _conv(g: Builder, x: str, name: str, rank: int) -> str:
    columns = g.with_axes("Unsqueeze", g.op("Transpose", x, perm=[0, 2, 1]), [2])
    made = g.op("Conv", columns, g.weight(V, H, 1, 1, name=name))
    return g.op("Transpose", g.with_axes("Squeeze", made, [2]), perm=[0, 2, 1])


def _half_cast(g: Builder, x: str, name: str, rank: int) -> str:
    stored = g.const(g.rng.standard_normal((H, V)) * 0.4, name, np.float16)
    return g.op("Cast", g.op("MatMul", g.op("Cast", x, to=TensorProto.FLOAT16), stored), to=TensorProto.FLOAT)


_PRODUCTS: dict[str, Callable[[Builder, str, str, int], str]] = {
    "matmul": _matmul,
    "tied": _tied,
    "gemm": _gemm,
    "gemm_trans": _gemm_trans,
    "fused_matmul": _fused_matmul,
    "nbits": _nbits,
    "integer": _integer,
    "integer_to_float": _integer_to_float,
    "dynamic_matmul": _dynamic_matmul,
    "qdq_weight": _qdq_weight,
    "qdq_all": _qdq_all,
    "qlinear": _qlinear,
    "einsum": _einsum,
    "einsum_dots": _einsum_dots,
    "chunks": _chunks,
    "lora": _lora,
    "swapped": _swapped,
    "conv": _conv,
    "half_cast": _half_cast,
}
HEADS = tuple(_PRODUCTS)


def product(g: Builder, x: str, rank: int) -> str:
    """``x [..., H]`` times the vocabulary matrix: ``[..., V]``."""
    return _PRODUCTS[g.d.head](g, x, "lm_head.weight", rank)
