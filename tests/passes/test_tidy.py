"""tidy: what nothing reads goes, everything else is bitwise the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphsurgery.errors import UsageError
from graphsurgery.model_io import load, save
from graphsurgery.passes.tidy import Tidy
from graphsurgery.pipeline import EXACT_OUTPUTS_KEY, Pipeline, provenance
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
