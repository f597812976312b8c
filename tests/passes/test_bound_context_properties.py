"""bound-context against ONNX Runtime on generated attention over static caches: every write, read, mask and bound."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from graphsurgery.passes.bound_context import BoundContext
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.strategies.static_caches import StaticSpec, build, feeds_of, static_specs

# Shrinking runs whole models hundreds of times; the drawn spec says enough.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
SLOTS = 12


def _check(data: st.DataObject, *, functions: bool = False) -> None:
    spec: StaticSpec = data.draw(static_specs())
    if functions:
        # Scores that a function returns are refused.
        spec = dataclasses.replace(spec, shape_reader=False)
    multiple = data.draw(st.sampled_from([0, 1, 4]))
    bounding = BoundContext(source="positions", multiple=multiple) if multiple else BoundContext()
    proto = build(spec)
    model = ir.from_proto(proto)
    if functions:
        Pipeline(["extract-functions"], check=True)(model)
    layers = 1 if any(function.domain == "graphsurgery" for function in model.functions.values()) else 2
    report = Pipeline([bounding], check=True)(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten"] * layers, [site.reason for site in report.sites]
    bounded = ir.to_proto(model)
    if functions:
        # Read with the bodies in the place of the calls, compared as it is.
        Pipeline(["inline-functions"], check=True)(model)
    scores = _returned_scores(model)
    before, after = session(proto), session(model)
    called = session(bounded) if functions else after
    for _ in range(2):
        length = 1 if spec.write == "where" else data.draw(st.integers(1, 4))
        most = (spec.window or SLOTS) - length
        past = data.draw(st.integers(0, most))
        feeds = feeds_of(spec, data.draw(st.integers(1, 3)), length, past, SLOTS, data.draw(st.integers(0, 2**16)))
        used = past + length
        bound = -(-used // multiple) * multiple if multiple else data.draw(st.integers(used, SLOTS + 2))
        reference = run(before, feeds)
        found = run(after, feeds | {"comp_ctx_lengths": np.full(bound, 7)})
        for name, value in reference.items():
            if name == "scores_shape" or ".0_Retained" in name:
                assert np.array_equal(value, found[name]), name
            error = np.abs(value - found[name]).max() / max(1.0, np.abs(value).max())
            assert error <= 1e-5, (name, error, bound, feeds["position_ids"])
        if functions:
            as_called = run(called, feeds | {"comp_ctx_lengths": np.full(bound, 7)})
            assert all(np.array_equal(as_called[name], found[name], equal_nan=True) for name in reference)
        columns = [min(bound, size) for size in (spec.window or SLOTS, SLOTS)]
        assert [found[name].shape[-1] for name in scores] == columns


def _returned_scores(model: ir.Model) -> list[str]:
    """Return the product of queries and keys of each layer too; the operator's keys where it is fused."""
    found = []
    for node in model.graph:
        if node.op_type == "Softmax":
            value = node.inputs[0]
            while value is not None and (maker := value.producer()) is not None and maker.op_type != "MatMul":
                value = maker.inputs[1 if maker.op_type == "Where" else 0]
            found.append(value)
        elif node.op_type == "Attention":
            moved = ir.Node("", "Transpose", [node.inputs[1]], [ir.AttrInt64s("perm", [0, 1, 3, 2])])
            moved.outputs[0].name = f"keys_{len(found)}"
            model.graph.insert_before(node, moved)
            found.append(moved.outputs[0])
    for value in found:
        assert value is not None
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), None
        model.graph.outputs.append(value)
    return [value.name or "" for value in found if value is not None]


@settings(max_examples=20, phases=PHASES)
@given(st.data())
def test_generated_static_caches(data: st.DataObject) -> None:
    _check(data)


@pytest.mark.full
@settings(max_examples=1000, phases=PHASES)
@given(st.data())
def test_generated_static_caches_at_length(data: st.DataObject) -> None:
    _check(data)


@settings(max_examples=30, phases=PHASES)
@given(st.data())
def test_generated_static_caches_in_functions(data: st.DataObject) -> None:
    _check(data, functions=True)


@pytest.mark.full
@settings(max_examples=500, phases=PHASES)
@given(st.data())
def test_generated_static_caches_in_functions_at_length(data: st.DataObject) -> None:
    _check(data, functions=True)
