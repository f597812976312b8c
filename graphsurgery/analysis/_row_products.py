"""Row rules of matrix products: plain, fused, integer, packed, and as a convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.analysis._row_helpers import attribute, broadcast, named, output_shape, varying
from graphsurgery.analysis._row_types import Blocked, Lift, RowAxis, same_size

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from graphsurgery.analysis._row_types import Context

    Rule: TypeAlias = Callable[[ir.Node, int, RowAxis, Context], Lift | Blocked]
    Labels: TypeAlias = tuple[str, ...]

__all__ = [
    "attention",
    "conv",
    "einsum",
    "fused_matmul",
    "gemm",
    "packed_weight",
    "product",
    "quantized_gemm",
    "whole_tensor_scale",
]


def attention(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Attention of opset 23 and later: rows of the queries and of the mask ``[.., S, T]``; keys and values stay whole."""
    shape = output_shape(node, output, context)
    if output != 0 or rows.flat:
        return Blocked(f"only queries have the rows of {named(node)}, apart from the batch")
    if attribute(node, "is_causal", 0):
        return Blocked(f"{named(node)} is causal by the number of each row")
    if rows.axis != len(shape) - 2:
        return Blocked(f"{named(node)} works along axis {rows.axis}")
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    if mask is None:
        return Lift({0: rows}, contracts=True)
    mask_shape = context.shape(mask)
    if mask_shape is None:
        return Blocked(f"the shape of {mask.name!r}, which {named(node)} reads, is not known")
    axis = len(mask_shape) - 2
    if axis < 0 or mask_shape[axis] == 1:
        return Lift({0: rows}, contracts=True)
    if not same_size(mask_shape[axis], shape[rows.axis]):
        return Blocked(f"{named(node)} has {shape[rows.axis]} rows and a mask {mask.name!r} of {mask_shape[axis]}")
    return Lift({0: rows, 3: RowAxis(axis)}, contracts=True)


def product(
    left_index: int = 0, right_index: int = 1, per_row: tuple[int, ...] = (), per_column: tuple[int, ...] = ()
) -> Rule:
    """Matrix products.

    Args:
        left_index: where the left operand is.
        right_index: where the right one is.
        per_row: scales and zero points that may differ from row to row of the left operand.
        per_column: scales, zero points and biases that may differ from column to column of the right one.
    """

    def rule(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
        shape = output_shape(node, output, context)
        left, right = node.inputs[left_index], node.inputs[right_index]
        assert left is not None
        assert right is not None
        left_shape, right_shape = context.shape(left), context.shape(right)
        if left_shape is None and right_shape is not None and len(right_shape) == 2:
            # Behind an operator that nobody knows; a product with a matrix keeps the rank.
            left_shape = shape
        if left_shape is None or right_shape is None:
            return Blocked(f"the operand shapes of {named(node)} are not known")
        uneven = varying(node, per_row, context)
        if uneven is not None:
            return Blocked(f"{named(node)} has a scale or zero point {uneven.name!r} for each row")
        if len(left_shape) < 2 or not right_shape:
            return Blocked(f"{named(node)} multiplies a vector")
        if len(right_shape) == 1:
            return Lift({left_index: rows}, contracts=True)
        rank = len(shape)
        if rows.axis == rank - 2:
            return Lift({left_index: RowAxis(len(left_shape) - 2, rows.flat)}, contracts=True)
        if rows.axis == rank - 1:
            if varying(node, per_column, context) is not None:
                return Blocked(f"{named(node)} has the rows as columns")
            return Lift({right_index: RowAxis(len(right_shape) - 1, rows.flat)}, contracts=True)
        # A batch axis of the product: every row has a matrix of its own.
        batch = broadcast(node, rows, context, (left_index, right_index), rank, shape[rows.axis])
        return batch if isinstance(batch, Blocked) else Lift(batch.rows, contracts=True)

    return rule


def fused_matmul(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """FusedMatMul: operands may be transposed."""
    if any(attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return Blocked(f"{named(node)} transposes its rows")
    if rows.axis == len(output_shape(node, output, context)) - 1:
        return Blocked(f"{named(node)} has the rows as columns")
    return product()(node, output, rows, context)


def whole_tensor_scale(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Dynamic quantisation: the scale depends on every row."""
    return Blocked(f"{named(node)} computes one scale from all rows")


def gemm(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Gemm, ``[M, N]``."""
    return _gemm(node, output, rows, context, right_index=1, bias_index=2)


def quantized_gemm(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """QGemm: a scale and a zero point behind each operand and the result."""
    if varying(node, (1, 2) if rows.axis == 0 else (4, 5), context) is not None:
        return Blocked(f"{named(node)} has a scale for each row")
    return _gemm(node, output, rows, context, right_index=3, bias_index=6)


def _gemm(
    node: ir.Node, output: int, rows: RowAxis, context: Context, *, right_index: int, bias_index: int
) -> Lift | Blocked:
    shape = output_shape(node, output, context)
    bias = broadcast(node, rows, context, (bias_index,), len(shape), shape[rows.axis])
    if isinstance(bias, Blocked):
        return bias
    if rows.axis == 0:
        return Lift({0: RowAxis(attribute(node, "transA", 0), rows.flat), **bias.rows}, contracts=True)
    transposed = attribute(node, "transB", 0)
    return Lift({right_index: RowAxis(1 - transposed, rows.flat), **bias.rows}, contracts=True)


def packed_weight(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """The weight is an operand in a form of its own; activation times it, over the last axis."""
    if rows.axis == len(output_shape(node, output, context)) - 1:
        return Blocked(f"{named(node)} has the rows as columns")
    return Lift({0: rows}, contracts=True)


def conv(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """A convolution ``[B, C, ...]`` that looks at one position of the row axis at a time: a product over C."""
    weight = node.inputs[1]
    kernel = None if weight is None else context.shape(weight)
    if rows.axis == 0:
        return Lift({0: rows}, contracts=True)
    if rows.axis == 1 or kernel is None or kernel[rows.axis] != 1:
        return Blocked(f"{named(node)} works along the rows")
    spatial = rows.axis - 2
    count = len(kernel) - 2
    strides = _listed(node, "strides") or (1,) * count
    pads = _listed(node, "pads") or (0,) * 2 * count
    padding = node.attributes.get("auto_pad")
    if strides[spatial] != 1 or pads[spatial] or pads[spatial + count]:
        return Blocked(f"{named(node)} works along the rows")
    if padding is not None and padding.as_string() not in ("NOTSET", "VALID"):
        return Blocked(f"{named(node)} pads the rows")
    return Lift({0: rows}, contracts=True)


def _listed(node: ir.Node, name: str) -> tuple[int, ...] | None:
    item = node.attributes.get(name)
    return None if item is None else tuple(item.as_ints())


# ---- Einsum -------------------------------------------------------------------------------------------------------


def einsum(node: ir.Node, output: int, rows: RowAxis, context: Context) -> Lift | Blocked:
    """Einsum: an operand has the rows where it has their label."""
    shapes = [None if item is None else context.shape(item) for item in node.inputs]
    equation = node.attributes["equation"].as_string()
    if any(shape is None for shape in shapes):
        return Blocked(f"the operand shapes of {named(node)} are not known")
    terms, result = _labels(equation, [len(shape) for shape in shapes if shape is not None])
    label = result[rows.axis]
    if any(term.count(label) > 1 for term in terms):
        return Blocked(f"{named(node)} takes a diagonal over the rows")
    needs: dict[int, RowAxis] = {}
    for index, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        assert shape is not None
        if label in term and shape[term.index(label)] != 1:
            needs[index] = RowAxis(term.index(label), rows.flat)
    return Lift(needs, contracts=len(terms) > 1)


def _labels(equation: str, ranks: list[int]) -> tuple[list[Labels], Labels]:
    """The labels of each operand's axes and of the result's; those that an ellipsis stands for are numbers."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    written = left.split(",")
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(written, ranks, strict=True)]
    widest = max((count for term, count in zip(written, hidden, strict=True) if "..." in term), default=0)
    terms = [_spelled(term, count, widest) for term, count in zip(written, hidden, strict=True)]
    if arrow:
        return terms, _spelled(right, widest, widest)
    # Without an arrow the result has what the ellipsis stands for, then the labels that occur once, by name.
    letters = [label for label in left if label.isalpha()]
    once = sorted(label for label in set(letters) if letters.count(label) == 1)
    return terms, (*_spelled("...", widest, widest), *once)


def _spelled(term: str, count: int, widest: int) -> Labels:
    before, dots, after = term.partition("...")
    inner = [str(number) for number in range(widest - count, widest)] if dots else []
    return (*before, *inner, *after)
