"""extract-functions on models that break surgery tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.compare import diff_models
from graphsurgery.model_io import load
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session

CASES = Path(__file__).parents[1] / "cases"

# Calls and parameters of the function; None where the one layer, or a call of a function, is left as it is.
FOUND = {
    "a08_static_cache_scatter_ctx16": (2, 3),
    "f01_deduplicated_weights_across_layers": (3, 3),
    "f02_layers_differ_only_in_scalars": (4, 3),
    "f04_model_already_has_functions": None,
    "s05_unnamed_unsorted_nodes": (2, 3),
    "s06_names_the_tool_would_invent": None,
    "s07_weights_are_also_graph_inputs": (2, 3),
    "s09_metadata_symbols_ir_version": (2, 3),
    "s11_opset11_old_semantics": None,
    "s12_weights_behind_identity_cast_dq": None,
}


def outputs_hold(case: str, model: ir.Model) -> None:
    with np.load(CASES / f"{case}.feeds.npz") as stored:
        arrays = dict(stored)
    opened = session(model, CASES)
    numbers = sorted({name.split("|")[0] for name in arrays})
    for number in numbers:
        feed = {name.split("|", 2)[2]: item for name, item in arrays.items() if name.startswith(f"{number}|in|")}
        for name, array in run(opened, feed).items():
            assert np.array_equal(array, arrays[f"{number}|out|{name}"], equal_nan=True), name
    assert numbers


@pytest.mark.parametrize("case", FOUND)
def test_cases(case: str) -> None:
    model = load(CASES / f"{case}.onnx")
    before = list(model.functions)
    Pipeline(["extract-functions"], check=True)(model)
    assert list(model.functions)[: len(before)] == before
    new = [function for key, function in model.functions.items() if key not in before]
    expected = FOUND[case]
    if expected is None:
        assert not new
    else:
        (function,) = new
        assert sum(node.op_type == function.name for node in model.graph) == expected[0]
        assert len(function.outputs) == expected[1]
    outputs_hold(case, model)
    original = load(CASES / f"{case}.onnx")
    assert diff_models(original, model).severity == "none"
    Pipeline(["inline-functions"], check=True)(model)
    assert not model.functions
    outputs_hold(case, model)
    assert diff_models(original, model).severity == "none"


def test_an_operator_that_nobody_knows_is_kept() -> None:
    model = load(CASES / "s13_missing_contrib_opset_and_unknown_domain.onnx")
    report = Pipeline(["extract-functions"], check=True)(model)
    assert not report.changed
    assert [node.domain for node in model.graph].count("vendor.ops") == 1


def test_an_old_model_is_raised_to_the_first_version_with_functions() -> None:
    model = load(CASES / "a08_static_cache_scatter_ctx16.onnx")
    model.ir_version = 7
    report = Pipeline(["extract-functions"], check=True)(model)
    assert model.ir_version == 8
    assert report.passes[0].warnings == ["The IR version was raised from 7 to 8, the first that has functions."]
    outputs_hold("a08_static_cache_scatter_ctx16", model)


def test_a_taken_name_is_not_used_again() -> None:
    model = load(CASES / "f01_deduplicated_weights_across_layers.onnx")
    graph = ir.Graph([], [], nodes=[], name="DecoderLayer")
    model.functions["graphsurgery", "DecoderLayer", ""] = ir.Function(
        "graphsurgery", "DecoderLayer", "", graph=graph, attributes={}
    )
    report = Pipeline(["extract-functions"])(model).passes[0]
    assert [site.detail["function"] for site in report.sites] == ["graphsurgery::DecoderLayer_2"]
