"""Heads that quantise their activation inside the product: DynamicQuantizeMatMul.

The fused operator takes one scale from all rows, so its rows cannot be chosen in front of it. What it was fused from
(DynamicQuantizeLinear, MatMulInteger, a product of scales) can be written out, and rows chosen in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.slices import Blocked, Lift, RowAxis, lift

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["is_dynamic_product", "lift_head"]

# DynamicQuantizeLinear came with it.
_LOWEST_OPSET = 11


def is_dynamic_product(node: ir.Node, model: ir.Model) -> bool:
    """Whether ``node`` is a fused product that can be written out where it stands."""
    known = node.domain == "com.microsoft" and node.op_type == "DynamicQuantizeMatMul"
    return known and node.graph is model.graph and model.opset_imports.get("", 1) >= _LOWEST_OPSET


def lift_head(node: ir.Node, output: int, rows: RowAxis, view: ShapeView, model: ir.Model) -> Lift | Blocked:
    """What a node of a head needs: as :func:`graphsurgery.analysis.slices.lift`, and products that can be written out."""
    shape = view.shape(node.outputs[output])
    if is_dynamic_product(node, model) and shape is not None and rows.axis < len(shape) - 1:
        return Lift({0: rows}, contracts=True)
    return lift(node, output, rows, view, model)
