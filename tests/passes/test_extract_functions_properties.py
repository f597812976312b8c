"""Any stack of layers: one function for each kind, the same outputs, and the graph back."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import example, given, settings

from graphsurgery.compare import diff_models
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.strategies.layers import Layers, build, expected, feeds_of, layer_stacks

PLAIN = Layers(layers=(("softmax", "dense"),) * 3)


def hold(spec: Layers, options: str = "") -> ir.Model:
    proto = build(spec)
    model: ir.Model = ir.from_proto(proto)
    Pipeline([f"extract-functions{options}"], check=True)(model)
    original = ir.from_proto(proto)
    before, after = session(proto), session(model)
    for feed in feeds_of(spec):
        one, other = run(before, feed), run(after, feed)
        assert list(one) == list(other)
        assert all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)
    assert diff_models(original, model).severity == "none"
    back = ir.from_proto(ir.to_proto(model))
    Pipeline(["inline-functions"], check=True)(back)
    assert diff_models(original, back).severity == "none"
    again = Pipeline([f"extract-functions{options}"], check=True)(model)
    assert not again.changed
    return model


def calls(model: ir.Model) -> list[int]:
    return sorted(sum(node.op_type == function.name for node in model.graph) for function in model.functions.values())


@settings(max_examples=4)
@given(layer_stacks())
@example(dataclasses.replace(PLAIN, skip=True, merged=frozenset({1, 2})))
@example(Layers(layers=(("softmax", "dense"), ("softmax", "experts"), ("softmax", "experts"))))
@example(Layers(layers=(("softmax", "loop"), ("softcap", "loop")) * 2, exported=frozenset({0, 1, 3}), scalars=True))
@example(Layers(layers=(("parallel", "experts"), ("parallel", "branch"), ("parallel", "experts"))))
@example(Layers(layers=(("parallel", "branch"),) * 2, first_shares=True, shuffled=1, values=frozenset({0})))
def test_one_function_for_each_kind(spec: Layers) -> None:
    assert calls(hold(spec)) == expected(spec)


@pytest.mark.full
@given(layer_stacks())
@settings(max_examples=300)
def test_one_function_for_each_kind_of_many(spec: Layers) -> None:
    assert calls(hold(spec)) == expected(spec)


@given(layer_stacks(["experts"]))
@settings(max_examples=8)
def test_experts_inside(spec: Layers) -> None:
    hold(spec, "{inner=true}")


def test_scalars_that_differ_are_parameters() -> None:
    same, different = (hold(dataclasses.replace(PLAIN, scalars=scalars)) for scalars in (False, True))
    counts = [len(next(iter(model.functions.values())).inputs) for model in (same, different)]
    assert counts == [8, 9]
    (function,) = same.functions.values()
    assert [node.op_type for node in function].count("Constant") == 1


def test_a_merged_weight_has_one_parameter_for_each_use() -> None:
    merged = hold(dataclasses.replace(PLAIN, merged=frozenset({1})))
    (function,) = merged.functions.values()
    assert len(function.inputs) == 8
    norms = {value.name for node in merged.graph if node.op_type == function.name for value in node.inputs if value}
    assert {"norm0", "norm2"} <= norms
    assert "norm1" not in norms
