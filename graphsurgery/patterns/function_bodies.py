"""Bodies of local functions whose nodes would do the same outside of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.patterns.matcher import subgraphs

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["body_view"]


def body_view(call: ir.Node, view: ShapeView, model: ir.Model) -> ShapeView | None:
    """The shapes inside the function that ``call`` calls.

    None where it calls none, where the shapes are not known, or where a node of the body means something else outside:
    it refers to attributes of the call, holds a subgraph, has several outputs, or is of another opset.
    """
    function = model.functions.get(call.op_identifier())
    if function is None or len(call.inputs) != len(function.inputs):
        return None
    for domain, version in function.opset_imports.items():
        if model.opset_imports.get("" if domain == "ai.onnx" else domain, version) != version:
            return None
    for node in function:
        plain = not any(attribute.is_ref() for attribute in node.attributes.values())
        if not plain or len(node.outputs) != 1 or any(True for _ in subgraphs(node)):
            return None
    try:
        return view.in_call(call)
    except ValueError:
        return None
