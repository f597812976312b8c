"""Symbolic sizes under new names: alone, in expressions, exchanged."""

from __future__ import annotations

import onnx_ir as ir

from graphsurgery.symbol_names import declared_symbols, rename_symbols
from tests.small_models import parse

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[B,P] past, float[B,S] x, float[B2,4] other) => (float[B,T] y, float[B,S] z)
{
    y = Concat <axis = 1> (past, x)
    z = Relu (x)
}
"""


def shapes(model) -> list[str]:
    return [str(value.shape) for value in (*model.graph.inputs, *model.graph.outputs)]


def test_names_are_replaced_everywhere_at_once():
    model = parse(MODEL)
    model.graph.outputs[0].shape = ir.Shape(["B", "P + S"])
    # Values may share a shape, and that of inputs is frozen.
    model.graph.outputs[1].shape = model.graph.inputs[1].shape
    assert declared_symbols(model) == {"B", "P", "S", "P + S", "B2"}
    assert rename_symbols(model, {"P": "S", "S": "P", "B": "batch"}) == 8
    assert shapes(model) == ["[batch,S]", "[batch,P]", "[B2,4]", "[batch,S + P]", "[batch,P]"]
    assert rename_symbols(model, {"S": "P", "P": "S", "batch": "B"}) == 8
    assert shapes(model) == ["[B,P]", "[B,S]", "[B2,4]", "[B,P + S]", "[B,S]"]
    assert rename_symbols(model, {"nothing": "else"}) == 0
