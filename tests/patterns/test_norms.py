"""The final normalisation, in every spelling."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.analysis.slices import RowAxis
from graphsurgery.patterns.matcher import GraphIndex
from graphsurgery.patterns.norms import Norm, norm_above
from tests.small_models import parse, value_of
from tests.strategies.decoders import Decoder, build

ROWS = RowAxis(1)


def norm_of(model: ir.Model, value: str, rows: RowAxis = ROWS) -> Norm | None:
    return norm_above(value_of(model, value), rows, Shapes(model), GraphIndex(model), model)


def head_input(model: ir.Model, op_type: str = "MatMul") -> str:
    """What the head multiplies."""
    node = [node for node in model.graph if node.op_type == op_type][-1]
    assert node.inputs[0] is not None
    return node.inputs[0].name or ""


@pytest.mark.parametrize(
    ("spelling", "nodes"),
    [
        ("rms", 7),
        ("rms_pow", 6),
        ("rms_square", 7),
        ("rms_div", 7),
        ("rms_casts", 9),
        ("layer", 9),
        ("layer_op", 1),
        ("simplified", 1),
        ("function", 1),
    ],
)
def test_a_spelling_is_recognised_from_its_end_to_its_entry(spelling: str, nodes: int):
    model = ir.from_proto(build(Decoder(norm=spelling)))
    norm = norm_of(model, head_input(model))
    assert norm is not None
    assert [value.name for value in norm.entries] == ["residual"]
    assert len(norm.nodes) == nodes


def test_an_operator_that_adds_the_residual_has_two_entries():
    model = ir.from_proto(build(Decoder(norm="skip")))
    norm = norm_of(model, head_input(model))
    assert norm is not None
    assert len(norm.entries) == 2
    assert norm.entries[0].name == "residual"


def test_its_sum_is_no_normalisation():
    model = ir.from_proto(build(Decoder(norm="skip")))
    node = next(node for node in model.graph if node.op_type == "SkipSimplifiedLayerNormalization")
    assert norm_of(model, node.outputs[3].name or "") is None


@pytest.mark.parametrize("layout", ["flat_const", "flat_of_hidden", "flatten_op"])
def test_it_is_seen_through_a_head_that_is_flattened(layout: str):
    model = ir.from_proto(build(Decoder(norm="rms", layout=layout, head="gemm")))
    norm = norm_of(model, head_input(model, "Gemm"), RowAxis(0, flat=True))
    assert norm is not None
    assert [value.name for value in norm.entries] == ["residual"]
    assert len(norm.nodes) == 8


def test_it_is_seen_through_quantisation_of_the_activation():
    model = ir.from_proto(build(Decoder(norm="rms", head="qdq_all")))
    norm = norm_of(model, head_input(model))
    assert norm is not None
    assert len(norm.nodes) == 9


def test_no_norm_is_made_up():
    model = ir.from_proto(build(Decoder(norm="none")))
    assert norm_of(model, head_input(model)) is None
    model = parse(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[B,S,4] x, float[4,4] w) => (float[B,S,4] y) '
        "{ p = MatMul(x, w) c = Cast <to = 1> (p) y = Identity(c) }"
    )
    assert norm_of(model, "y") is None


def test_a_mean_over_rows_is_no_normalisation():
    model = parse(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[B,S,4] x) => (float[B,S,4] y) <int64[1] axes = {1}> '
        "{ h = Relu(x) m = ReduceMean(h, axes) y = Sub(h, m) }"
    )
    assert norm_of(model, "y") is None
