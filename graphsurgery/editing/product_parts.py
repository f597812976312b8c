"""DynamicQuantizeMatMul, written out: its scale is computed from all rows, its product from the wanted ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.editing.row_numbers import dim_name

if TYPE_CHECKING:
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.editing.row_selection import Placement, RowSelector
    from graphsurgery.rewrite import Rewrite

__all__ = ["write_out"]

_FLOAT, _UINT8 = ir.DataType.FLOAT, ir.DataType.UINT8


def write_out(rewrite: Rewrite, node: ir.Node, at: Placement, selector: RowSelector, view: ShapeView) -> ir.Value:
    """Replace ``node`` by its parts, with only the wanted rows multiplied.

    Args:
        rewrite: where nodes are inserted.
        node: inputs A float ``[..., K]``, B int8 or uint8 ``[K, N]``, scale of B (one, or ``[N]``), and optionally its
            zero point and a bias ``[N]``.
        at: where A carries the rows.
        selector: takes them.
        view: shapes before the edit.

    Returns:
        The selected rows of the quantised A.
    """
    source, matrix, scale, zero, bias = (*node.inputs, None, None)[:5]
    assert source is not None
    old = node.outputs[0]
    rewrite.after(source)
    made = rewrite.emit_holder("DynamicQuantizeLinear", [source], {}, name="quantized", outputs=3)
    quantized, source_scale, source_zero = made
    shape = view.shape(source)
    quantized.type = ir.TensorType(_UINT8)
    quantized.shape = None if shape is None else ir.Shape([dim_name(size) for size in shape])
    rows = selector.select(quantized, at)
    rewrite.after(old)
    inputs = [rows, matrix, source_zero, zero]
    summed = rewrite.emit("MatMulInteger", inputs, name="product_int32", dtype=ir.DataType.INT32)
    floats = rewrite.emit("Cast", [summed], {"to": int(_FLOAT)}, name="product_float", dtype=_FLOAT)
    scales = rewrite.emit("Mul", [source_scale, scale], name="scales", dtype=_FLOAT)
    product = rewrite.emit("Mul", [floats, scales], name="product", dtype=_FLOAT)
    if bias is not None:
        product = rewrite.emit("Add", [product, bias], name="product_with_bias", dtype=_FLOAT)
    product.shape = old.shape
    rewrite.replace_all_uses(old, product)
    return rows
