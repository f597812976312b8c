"""What operators ask of the sizes of their inputs: as strict as ONNX Runtime and never stricter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.analysis.agreement import demands, find_contradiction
from graphsurgery.analysis.folding import plan_folding
from graphsurgery.analysis.shapes import Shapes
from tests.oracle import REFUSALS
from tests.passes.bound_runs import run
from tests.small_models import node_of, parse

if TYPE_CHECKING:
    import onnx

_SIZE = st.sampled_from([1, 2, 3, 4])


def model_of(op: str, *shapes: list[int], constants: str = "") -> ir.Model:
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] x{number}" for number, shape in enumerate(shapes))
    return parse(
        f'<ir_version: 9, opset_import: ["" : 18]> g ({inputs}) => (float[{"A"}] y) {constants} {{ y = {op} }}'
    )


def fails(model: ir.Model) -> bool:
    proto: onnx.ModelProto = ir.to_proto(model)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {
        value.name: np.ones([dim.dim_value for dim in value.type.tensor_type.shape.dim], np.float32)
        for value in proto.graph.input
    }
    try:
        run(proto, feeds)
    except REFUSALS:
        return True
    return False


def broken(model: ir.Model) -> bool:
    return any(demand.broken for demand in demands(node_of(model, "y"), Shapes(model)))


@given(
    st.lists(st.lists(_SIZE, max_size=3), min_size=2, max_size=2),
    st.sampled_from(["Add(x0, x1)", "Mul(x0, x1)", "Max(x0, x1)"]),
)
def test_broadcasting(shapes, op):
    model = model_of(op, *shapes)
    assert broken(model) == fails(model)


@given(st.lists(_SIZE, min_size=1, max_size=3), st.lists(_SIZE, min_size=1, max_size=3))
def test_products(left, right):
    model = model_of("MatMul(x0, x1)", left, right)
    assert broken(model) == fails(model)


@given(st.lists(st.lists(_SIZE, min_size=2, max_size=2), min_size=2, max_size=3))
def test_joining(shapes):
    model = model_of(f"Concat<axis = 1>({', '.join(f'x{number}' for number in range(len(shapes)))})", *shapes)
    assert broken(model) == fails(model)


@given(st.lists(_SIZE, min_size=1, max_size=3), st.lists(st.sampled_from([-1, 1, 2, 3, 4, 6]), min_size=1, max_size=3))
def test_reshaping(shape, target):
    if target.count(-1) > 1:
        return
    model = model_of("Reshape(x0, t)", shape, constants=f"<int64[{len(target)}] t = {{{', '.join(map(str, target))}}}>")
    assert broken(model) == fails(model)


@given(st.lists(_SIZE, min_size=1, max_size=3), st.lists(_SIZE, min_size=1, max_size=3))
def test_expanding(shape, target):
    model = model_of("Expand(x0, t)", shape, constants=f"<int64[{len(target)}] t = {{{', '.join(map(str, target))}}}>")
    assert broken(model) == fails(model)


@given(st.lists(_SIZE, min_size=2, max_size=2), st.lists(_SIZE, min_size=2, max_size=2))
def test_splitting(shape, parts):
    text = f"""<ir_version: 9, opset_import: ["" : 18]> g (float[{shape[0]},{shape[1]}] x0) => (float[N,M] y)
        <int64[2] t = {{{parts[0]}, {parts[1]}}}> {{ y, z = Split<axis = 1>(x0, t) }}"""
    assert broken(parse(text)) == fails(parse(text))


@pytest.mark.parametrize(("rows", "fits"), [(2, True), (3, False)])
def test_scattering(rows, fits):
    text = f"""<ir_version: 9, opset_import: ["" : 18]> g (float[4,5] x0, float[{rows},5] x1) => (float[4,5] y)
        <int64[2,1] at = {{0, 1}}> {{ y = ScatterND(x0, at, x1) }}"""
    model = parse(text)
    assert broken(model) is not fits
    assert fails(model) is not fits


def test_a_contradiction_names_the_node_and_both_sizes():
    model = parse("""
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[B,S,4] x, float[64,4] table) => (float[B,S,4] y) { y = Add(x, table) }
    """)
    shapes = Shapes(model)
    found = find_contradiction(plan_folding(model, shapes, {"S": 16}), shapes)
    assert str(found) == "node 'y' (Add) needs equal sizes for axis -2 of its inputs and gets S = 16 and 64"
    assert found is not None
    assert found.names == {"S"}
    assert find_contradiction(plan_folding(model, shapes, {"S": 64}), shapes) is None
    assert find_contradiction(plan_folding(model, shapes, {"S": 1}), shapes) is None


def test_what_is_broken_anyway_is_nobodys_contradiction():
    model = parse("""
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[B,3] x, float[4] z) => (float[B,4] y) { y = Add(x, z) }
    """)
    shapes = Shapes(model)
    assert find_contradiction(plan_folding(model, shapes, {"B": 2}), shapes) is None


def test_inside_of_a_function():
    model = parse("""
        <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[B,S,4] x) => (float[B,S,4] y) { y = local.shift(x) }
        <domain: "local", opset_import: ["" : 18]>
        shift (v) => (w) {
            table = Constant<value = float[2,4] {1, 2, 3, 4, 5, 6, 7, 8}>()
            w = Add(v, table)
        }
    """)
    shapes = Shapes(model)
    found = find_contradiction(plan_folding(model, shapes, {"S": 3}), shapes)
    assert str(found) == "node 'w' (Add) needs equal sizes for axis -2 of its inputs and gets S = 3 and 2"
    assert find_contradiction(plan_folding(model, shapes, {"S": 2}), shapes) is None
