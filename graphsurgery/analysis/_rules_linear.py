"""Shape rules of products: matrix products, convolution, pooling, Einsum, and their quantised forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis import dims
from graphsurgery.analysis._facts import Fact, rule_table
from graphsurgery.analysis._rules_elementwise import agreed, broadcast_shapes, same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis._facts import Call, Rule, Shape
    from graphsurgery.analysis.dims import Dim

__all__ = ["TABLE", "gemm_shape", "matmul_shape"]

_UINT8 = ir.DataType.UINT8
_FLOAT = ir.DataType.FLOAT
_INT32 = ir.DataType.INT32


def matmul_shape(left: Shape | None, right: Shape | None) -> Shape | None:
    """The shape of ``numpy.matmul``; None where a rank is unknown or 0."""
    if not left or not right:
        return None
    if len(left) == 1 and len(right) == 1:
        return ()
    if len(right) == 1:
        return left[:-1]
    if len(left) == 1:
        return right[:-2] + right[-1:]
    batch = broadcast_shapes((left[:-2], right[:-2]))
    if batch is None:
        return None
    shape = batch + (left[-2], right[-1])
    if left[-1] == right[-2]:
        return shape
    # The product exists only where the inner sizes are equal, so a doubtful one among them is settled from here on.
    plain = agreed((left[-1], right[-2]))
    return tuple(plain if size in (left[-1], right[-2]) and not isinstance(size, int) else size for size in shape)


def _matmul(dtype: ir.DataType | None, right: int = 1) -> Rule:
    def rule(call: Call) -> Fact:
        return Fact(matmul_shape(call.shape(0), call.shape(right)), dtype or call.dtype(0))

    return rule


def _qlinear_matmul(call: Call) -> Fact:
    return Fact(matmul_shape(call.shape(0), call.shape(3)), call.dtype(7))


def gemm_shape(call: Call) -> Shape:
    """``[M, N]`` of a Gemm, from whichever operands are known."""
    left, right = call.shape(0), call.shape(1)
    rows: Dim | None = None
    columns: Dim | None = None
    if left is not None and len(left) == 2:
        rows = left[1 if call.number("transA", 0) else 0]
    if right is not None and len(right) == 2:
        columns = right[0 if call.number("transB", 0) else 1]
    return (call.fresh() if rows is None else rows, call.fresh() if columns is None else columns)


def _gemm(call: Call) -> Fact:
    return Fact(gemm_shape(call), call.dtype(0))


def _quantize(call: Call) -> Fact:
    target = call.number("output_dtype", 0)
    dtype = ir.DataType(target) if target else call.dtype(2) if call.has(2) else _UINT8
    return Fact(call.shape(0), dtype)


def _dequantize(call: Call) -> Fact:
    target = call.number("output_dtype", 0)
    return Fact(call.shape(0), ir.DataType(target) if target else call.dtype(1))


def _dynamic_quantize(call: Call) -> list[Fact]:
    return [Fact(call.shape(0), _UINT8), Fact((), _FLOAT), Fact((), _UINT8)]


def _convolution(weight: int, result: int | None) -> Rule:
    """A rule for Conv-like ops: position of the weight, and of the input that has the result's type (None: int32)."""

    def rule(call: Call) -> Fact:
        data, kernel = call.shape(0), call.shape(weight)
        dtype = _INT32 if result is None else call.dtype(result)
        if data is None or len(data) < 3:
            return Fact(None, dtype)
        channels = call.fresh() if kernel is None else kernel[0]
        window: Sequence[Dim] | None = call.numbers("kernel_shape") or (None if kernel is None else kernel[2:])
        if window is None or len(window) != len(data) - 2:
            return Fact((data[0], channels, *call.fresh_shape(len(data) - 2)), dtype)
        return Fact((data[0], channels, *_windows(call, data[2:], window)), dtype)

    return rule


def _windows(call: Call, sizes: Shape, window: Sequence[Dim]) -> Shape:
    """How often a window fits on each spatial axis."""
    count = len(sizes)
    strides = call.numbers("strides") or (1,) * count
    dilations = call.numbers("dilations") or (1,) * count
    pads = call.numbers("pads") or (0,) * (2 * count)
    mode = call.text("auto_pad", "NOTSET")
    result: list[Dim] = []
    for axis, size in enumerate(sizes):
        if mode in {"SAME_UPPER", "SAME_LOWER"}:
            result.append(-dims.floordiv(-size, strides[axis]))
            continue
        padding = 0 if mode == "VALID" else pads[axis] + pads[axis + count]
        reach = (window[axis] - 1) * dilations[axis] + 1
        free = size + padding - reach
        if call.number("ceil_mode", 0):
            result.append(_ceil_windows(free, strides[axis], size + pads[axis]))
        else:
            result.append(dims.floordiv(free, strides[axis]) + 1)
    return tuple(result)


def _ceil_windows(free: Dim, stride: int, last_start: Dim) -> Dim:
    # A window that would start in the padding behind the data is left out.
    count = -dims.floordiv(-free, stride) + 1
    return dims.minimum(count, -dims.floordiv(-last_start, stride))


def _conv_transpose(call: Call) -> Fact:
    data, kernel = call.shape(0), call.shape(1)
    if data is None or kernel is None or len(data) != len(kernel):
        return Fact(None if data is None else call.fresh_shape(len(data)), call.dtype(0))
    channels = kernel[1] * call.number("group", 1)
    count = len(data) - 2
    listed = call.numbers("output_shape")
    if listed is not None:
        return Fact((data[0], channels, *listed[-count:]), call.dtype(0))
    strides = call.numbers("strides") or (1,) * count
    if call.text("auto_pad", "NOTSET").startswith("SAME"):
        scaled = [size * stride for size, stride in zip(data[2:], strides, strict=True)]
        return Fact((data[0], channels, *scaled), call.dtype(0))
    dilations = call.numbers("dilations") or (1,) * count
    pads = call.numbers("pads") or (0,) * (2 * count)
    extra = call.numbers("output_padding") or (0,) * count
    sizes = [
        strides[axis] * (data[axis + 2] - 1)
        + extra[axis]
        + (kernel[axis + 2] - 1) * dilations[axis]
        + 1
        - pads[axis]
        - pads[axis + count]
        for axis in range(count)
    ]
    return Fact((data[0], channels, *sizes), call.dtype(0))


def _pool(call: Call) -> list[Fact]:
    data, window = call.shape(0), call.numbers("kernel_shape")
    shape: Shape | None = None
    if data is not None and len(data) >= 3:
        fits = window is not None and len(window) == len(data) - 2
        spatial = _windows(call, data[2:], window) if fits and window is not None else call.fresh_shape(len(data) - 2)
        shape = data[:2] + spatial
    return [Fact(shape, call.dtype(0)), Fact(shape, ir.DataType.INT64)]


def _global_pool(call: Call) -> Fact:
    data = call.shape(0)
    return Fact(None if data is None else data[:2] + (1,) * (len(data) - 2), call.dtype(0))


def _einsum(call: Call) -> Fact:
    shapes = [fact.shape for fact in call.inputs]
    equation = call.text("equation", "").replace(" ", "")
    operands, arrow, result = equation.partition("->")
    terms = operands.split(",")
    known = [shape for shape in shapes if shape is not None]
    if len(known) != len(shapes) or len(terms) != len(shapes):
        return Fact(None, call.dtype(0))
    sizes: dict[str, Dim] = {}
    dots: list[Shape] = []
    for term, shape in zip(terms, known, strict=True):
        before, ellipsis, after = term.partition("...")
        hidden = len(shape) - len(before) - len(after)
        if hidden < 0 or (hidden and not ellipsis):
            return Fact(None, call.dtype(0))
        if ellipsis:
            dots.append(shape[len(before) : len(before) + hidden])
        named = shape[: len(before)] + shape[len(before) + hidden :]
        for letter, size in zip(before + after, named, strict=True):
            sizes[letter] = dims.broadcast(sizes[letter], size) if letter in sizes else size
    hidden_shape = broadcast_shapes(dots) if dots else ()
    if not arrow:
        letters = operands.replace(",", "").replace("...", "")
        once = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
        result = ("..." if dots else "") + once
    before, ellipsis, after = result.partition("...")
    if hidden_shape is None or any(letter not in sizes for letter in before + after):
        return Fact(None, call.dtype(0))
    middle = hidden_shape if ellipsis else ()
    return Fact((*(sizes[x] for x in before), *middle, *(sizes[x] for x in after)), call.dtype(0))


def _det(call: Call) -> Fact:
    shape = call.shape(0)
    return Fact(None if shape is None else shape[:-2], call.dtype(0))


TABLE = rule_table(
    ("", "MatMul", _matmul(None)),
    ("", "MatMulInteger", _matmul(_INT32)),
    ("", "QLinearMatMul", _qlinear_matmul),
    ("", "Gemm", _gemm),
    ("", "QuantizeLinear", _quantize),
    ("", "DequantizeLinear", _dequantize),
    ("", "DynamicQuantizeLinear", _dynamic_quantize),
    ("", "Conv", _convolution(1, 0)),
    ("", "ConvInteger", _convolution(1, None)),
    ("", "QLinearConv", _convolution(3, 7)),
    ("", "ConvTranspose", _conv_transpose),
    ("", "MaxPool AveragePool LpPool", _pool),
    ("", "GlobalMaxPool GlobalAveragePool GlobalLpPool", _global_pool),
    ("", "Einsum", _einsum),
    ("", "Det", _det),
    ("", "Inverse", same),
)
