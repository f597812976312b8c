"""tidy: what nothing reads goes, everything else is bitwise the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphsurgery
from graphsurgery.contracts import EXACT_OUTPUTS_KEY
from graphsurgery.errors import UsageError
from graphsurgery.model_io import load, save
from graphsurgery.passes.tidy import Tidy
from graphsurgery.pipeline import Pipeline, provenance
from tests.interface_helpers import assert_same_outputs
from tests.oracle import run, session
from tests.small_models import CHAIN, node_of, op_types, parse, value_of

LITTERED = """
<ir_version: 9, opset_import: ["" : 18]>
littered (float[4] x, bool flag, float[4] unused_input, float[4] given = {1, 2, 3, 4}) => (float[4] y)
<float[4] used = {1, 2, 3, 4}, float[4] unused = {1, 2, 3, 4}, float[4] chained = {1, 2, 3, 4}>
{
    a = Add(x, used)
    dead = Neg(x)
    dead_end = Mul(dead, chained)
    kept, dropped = Split <axis = 0, num_outputs = 2> (a)
    y = If (flag) <
        then_branch = then_part () => (float[4] t) { lost = Exp(a)  t = Concat <axis = 0> (kept, kept) },
        else_branch = else_part () => (float[4] e) { e = Abs(a) }
    >
}
"""

FUNCTION = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
g (float[4] x) => (float[4] y) { y = local.half(x) }
<domain: "local", opset_import: ["" : 18]>
half (v) => (w) { lost = Exp(v)  more = Neg(lost)  w = Abs(v) }
"""


def test_what_nothing_reads_is_removed_everywhere():
    model = parse(LITTERED)
    report = Pipeline([Tidy()], check=True)(model)
    assert op_types(model) == ["Add", "Split", "If"]
    assert [node.op_type for node in model.graph.all_nodes()] == ["Add", "Split", "Concat", "Abs", "If"] or [
        node.op_type for node in model.graph.all_nodes()
    ] == ["Add", "Split", "If", "Concat", "Abs"]
    # A default that the caller may override stays, and so does every input.
    assert set(model.graph.initializers) == {"used", "given"}
    assert [value.name for value in model.graph.inputs] == ["x", "flag", "unused_input", "given"]
    assert [(site.id, site.status, site.detail) for site in report.passes[0].sites] == [
        ("unused:main", "rewritten", {"nodes": 2, "initializers": 2}),
        ("unused:then_part", "rewritten", {"nodes": 1, "initializers": 0}),
    ]
    assert (report.passes[0].nodes_before, report.passes[0].nodes_after) == (8, 5)


def test_bodies_of_functions_are_tidied():
    model = parse(FUNCTION)
    report = Pipeline([Tidy()], check=True)(model)
    body = next(iter(model.functions.values()))
    assert [node.op_type for node in body] == ["Abs"]
    assert report.passes[0].sites[0].detail["nodes"] == 2


def test_a_second_run_finds_nothing():
    model = parse(LITTERED)
    Pipeline([Tidy()])(model)
    before = ir.to_proto(model).SerializeToString()
    report = Pipeline([Tidy()])(model)
    assert report.passes[0].sites == []
    assert not report.changed
    assert ir.to_proto(model).SerializeToString() == before
    assert len(provenance(model)) == 1


def test_a_clean_model_stays_as_it_is():
    model = parse(CHAIN)
    before = ir.to_proto(model).SerializeToString()
    assert not Tidy()(model).modified
    assert ir.to_proto(model).SerializeToString() == before


def test_places_can_be_chosen():
    model = parse(LITTERED)
    report = Tidy(exclude=("unused:main",))(model).report
    assert [(site.id, site.status) for site in report.sites] == [
        ("unused:main", "skipped"),
        ("unused:then_part", "rewritten"),
    ]
    assert "dead_end" in [value.name for node in model.graph for value in node.outputs]
    with pytest.raises(UsageError, match=r"^Selector 'attention' matches no site"):
        Tidy(sites=("attention",))(model)


def test_every_output_is_called_exact():
    model = parse(LITTERED)
    result = Tidy()(model)
    assert result.inexact == frozenset()
    model = parse(LITTERED)
    Pipeline([Tidy()])(model)
    assert model.metadata_props[EXACT_OUTPUTS_KEY] == '["y"]'


def test_outputs_are_bitwise_equal_in_onnx_runtime(tmp_path):
    model = parse(LITTERED)
    feeds = {"x": np.array([1, -2, 3, -4], np.float32), "unused_input": np.zeros(4, np.float32)}
    ir.save(model, tmp_path / "before.onnx")
    Pipeline([Tidy()])(model)
    save(model, tmp_path / "after.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for flag in (True, False):
        results = [
            ort.InferenceSession(tmp_path / name, options).run(None, feeds | {"flag": np.array(flag)})
            for name in ("before.onnx", "after.onnx")
        ]
        assert results[0][0].tobytes() == results[1][0].tobytes()


def test_no_tensor_is_read(cases_dir, monkeypatch):
    model = load(cases_dir / "s03_external_data_missing_or_short.onnx")

    def read(self):
        raise AssertionError(f"tensor {self.name} was read")

    monkeypatch.setattr(ir.ExternalTensor, "numpy", read)
    monkeypatch.setattr(ir.ExternalTensor, "_load", read)
    node_of(model, "logits").replace_input_with(1, value_of(model, "model.embed_tokens.weight"))
    result = Tidy()(model)
    assert result.modified
    assert "lm_head.weight" not in model.graph.initializers


# ---- duplicates, functions, identities ----------------------------------------------------------------------------

TWINS = """
<ir_version: 9, opset_import: ["" : 18]>
twins (float[4] x, bool flag, float[1] given = {1}) => (float[4] y, float[1] z)
<float[1] one = {1}, float[1] two = {2}, float[1] z = {1}, float[1] again = {1}, int32[1] whole = {1065353216}>
{
    a = Add (x, one)
    b = Add (a, again)
    c = Add (b, given)
    k = Constant <value = float[1] {2}> ()
    l = Constant <value_floats = [2.0]> ()
    m = Constant <value = int32[1] {1065353216}> ()
    d = Mul (c, k)
    e = Mul (d, l)
    f = Cast <to = 1> (m)
    g = Cast <to = 1> (whole)
    h = Sum (e, f, g, two)
    y = If (flag) <
        then_branch = then_part () => (float[4] t) { p = Constant <value = float[1] {3}> ()  q = Constant <value = float[1] {3}> ()
            r = Add (h, p)  t = Add (r, q) },
        else_branch = else_part () => (float[4] u) { u = Abs (h) }
    >
}
"""


def test_of_equal_constants_the_first_stays():
    model = parse(TWINS)
    report = Pipeline([Tidy()], check=True)(model)
    assert [(site.id, site.status, site.detail) for site in report.passes[0].sites] == [
        # `again` is `one`; k and l are `two`; m is `whole`, which is an int32 of the same bytes as a float 1.
        ("duplicates:main", "rewritten", {"nodes": 3, "initializers": 1, "external": 0}),
        ("duplicates:then_part", "rewritten", {"nodes": 1, "initializers": 0, "external": 0}),
    ]
    assert report.passes[0].sites[0].reason == "3 Constant nodes and 1 initializers were merged with equal ones"
    # An output and an input that may be fed keep their own.
    assert set(model.graph.initializers) == {"given", "one", "two", "z", "whole"}
    assert not Pipeline([Tidy()])(model).changed


def test_merged_constants_compute_the_same():
    model, tidied = parse(TWINS), parse(TWINS)
    Tidy()(tidied)
    for flag in (True, False):
        numbers = np.array([1, -2, 3, -4], np.float32)
        feeds = {"x": numbers, "flag": np.array(flag), "given": np.array([5], np.float32)}
        before, after = (run(session(item), feeds) for item in (model, tidied))
        assert {name: array.tobytes() for name, array in before.items()} == {
            name: array.tobytes() for name, array in after.items()
        }


def test_duplicates_may_stay():
    model = parse(TWINS)
    assert not Tidy(duplicates=False)(model).modified


def test_large_tensors_are_not_compared_and_external_ones_by_reference():
    model = parse(CHAIN)
    values = []
    for name, offset in (("a0", 0), ("a1", 0), ("b0", 4096)):
        tensor = ir.ExternalTensor("w.data", offset, 4096, ir.DataType.FLOAT, shape=ir.Shape([256, 4]), name=name)
        values.append(ir.Value(name=name, const_value=tensor))
    zeros = np.zeros((256, 4), np.float32)
    values += [ir.Value(name=name, const_value=ir.tensor(zeros, name=name)) for name in ("l0", "l1")]
    for value in values:
        model.graph.register_initializer(value)
        node = ir.node("Neg", [value])
        node.outputs[0].name = f"out_{value.name}"
        model.graph.append(node)
        model.graph.outputs.append(node.outputs[0])
    (site,) = Tidy()(model).report.sites
    assert (site.id, site.detail) == ("duplicates:main", {"nodes": 0, "initializers": 1, "external": 1})
    assert list(model.graph.initializers) == ["a0", "b0", "l0", "l1"]


FUNCTIONS = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
g (float[4] x, bool flag) => (float[4] y)
{
    y = If (flag) <
        then_branch = then_part () => (float[4] t) { t = local.used (x) },
        else_branch = else_part () => (float[4] e) { e = Abs (x) }
    >
}
<domain: "local", opset_import: ["" : 18, "local" : 1]>
used (v) => (w) { w = local.inner (v) }
<domain: "local", opset_import: ["" : 18]>
inner (v) => (w) { w = Neg (v) }
<domain: "local", opset_import: ["" : 18, "local" : 1]>
spare (v) => (w) { w = local.deep (v) }
<domain: "local", opset_import: ["" : 18]>
deep (v) => (w) { lost = Exp (v)  w = Neg (v) }
"""


def test_functions_that_nothing_calls_go():
    model = parse(FUNCTIONS)
    report = Pipeline([Tidy()], check=True)(model)
    assert [(site.id, site.reason, site.detail) for site in report.passes[0].sites] == [
        (
            "functions:uncalled",
            "2 functions that nothing calls were removed",
            {"functions": ["local::spare", "local::deep"]},
        )
    ]
    assert [function.name for function in model.functions.values()] == ["used", "inner"]
    assert model.opset_imports == {"": 18, "local": 1}


def test_functions_of_a_model_that_has_some_stay(cases_dir):
    model = load(cases_dir / "f04_model_already_has_functions.onnx")
    before = len(model.functions)
    Tidy()(model)
    assert len(model.functions) == before == 3


IDLE = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[4] x) => (float[4] y, float[4] z)
{
    a = Identity (x)
    b = Identity (a)
    c = Neg (b)
    y = Identity (c)
    d = Identity (y)
    z = Abs (d)
}
"""


def test_identities_go_on_request():
    model = parse(IDLE)
    assert not Tidy()(model).modified
    report = Pipeline([Tidy(identities=True)], check=True)(model)
    assert [(site.id, site.reason) for site in report.passes[0].sites] == [
        ("identities:main", "3 Identity nodes were passed over")
    ]
    assert op_types(model) == ["Neg", "Identity", "Abs"]
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    assert not Pipeline([Tidy(identities=True)])(model).changed


FIXTURES = Path(__file__).parents[2] / "fixtures"
SAMPLE = ("llama_qdq", "optimum_llama", "genai_gptoss")


def check_outputs(name: str) -> None:
    model, tidied = (load(FIXTURES / name / "model.onnx") for _ in range(2))
    report = Pipeline([Tidy(identities=True)], check=True)(tidied)
    assert_same_outputs(model, tidied, FIXTURES / name)
    assert not Pipeline([Tidy(identities=True)])(tidied).changed
    assert report.passes[0].nodes_after <= report.passes[0].nodes_before


@pytest.mark.parametrize("name", SAMPLE)
def test_exports_compute_the_same(name):
    check_outputs(name)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", sorted(p.parent.name for p in FIXTURES.glob("*/model.onnx") if p.parent.name not in SAMPLE)
)
def test_all_exports_compute_the_same(name):
    check_outputs(name)


DECLARED = """
<ir_version: 9, opset_import: ["" : 18, "vendor" : 1]>
declared (float[N,4] x, bool flag) => (float[N,4] y, float[N,4] z)
<float[N,4] a, float[N,4] made, float[N,4] t0, float[N,4] z>
{
    a = Relu(x)
    made = vendor.Own(a)
    y = If (flag) <
        then_branch = then_part () => (float[N,4] t) <float[N,4] t0> { t0 = Exp(a)  t = Neg(t0) },
        else_branch = else_part () => (float[N,4] e) { e = Abs(made) }
    >
    z = Neg(a)
}
"""


def test_declared_shapes_inside_the_graph_are_dropped_on_request():
    model = parse(DECLARED)
    assert not Pipeline([Tidy()])(model).passes[0].sites
    report = Pipeline([Tidy(intermediate_shapes="drop")], check=True)(model)
    assert [(site.id, site.status, site.detail) for site in report.passes[0].sites] == [
        ("shapes:main", "rewritten", {"shapes": 1}),
        ("shapes:then_part", "rewritten", {"shapes": 1}),
    ]
    assert report.passes[0].sites[0].reason == "1 shapes declared for values inside the graph were dropped"
    assert (value_of(model, "a").shape, value_of(model, "a").dtype) == (None, ir.DataType.FLOAT)
    # What a vendor's operator makes nobody else can tell; outputs are the interface.
    assert [str(value_of(model, name).shape) for name in ("made", "y", "z", "x")] == ["[N,4]"] * 4
    assert not Pipeline([Tidy(intermediate_shapes="drop")])(model).passes[0].sites


def test_a_model_without_intermediate_shapes_computes_the_same(tmp_path):
    model = load(FIXTURES / "llama/model.onnx")
    Pipeline(["block-attention{q_block_size=2}", "tidy{intermediate_shapes=drop}"])(model)
    save(model, tmp_path / "dropped.onnx")
    again = load(tmp_path / "dropped.onnx")
    kept = [value for node in again.graph for value in node.outputs if value.shape is not None]
    assert all(value.is_graph_output() for value in kept)
    assert {value.name for value in kept} == {value.name for value in again.graph.outputs}
    assert graphsurgery.verify(FIXTURES / "llama/model.onnx", tmp_path / "dropped.onnx").status == "equal"
