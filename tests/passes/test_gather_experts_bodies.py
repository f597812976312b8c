"""Expert blocks in function bodies, branches and loops: rewritten once for all callers, where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.strategies.expert_forms import Spec
from tests.strategies.experts import build, expert_specs, feeds_of

if TYPE_CHECKING:
    from graphsurgery.site_report import SiteReport

STRATEGIES = {
    "grouped": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "dense": "gather-experts{strategy=dense}",
    "loop": "gather-experts{strategy=packed,chunk_size=3,lanes=2}",
    "npu": "gather-experts{target=npu,threshold=3,chunk_size=2}",
}
FORMS = ("batched", "grouped", "selected", "masked")


def spec_of(form: str) -> Spec:
    return Spec(form=form, experts=3, top_k=2, hidden=4, inner=5, bias=form != "masked")


def in_functions(model: onnx.ModelProto, *, weights_inside: bool = False) -> onnx.ModelProto:
    """``model`` as a function that is called twice, on inputs of its own; small constants are nodes of the body.

    The inputs and outputs of the second call end in ``_2``.
    """
    graph = model.graph
    weights = [item.name for item in graph.initializer if item.name.startswith(("w_", "q_"))]
    kept = [] if weights_inside else weights
    nodes = [
        helper.make_node("Constant", [], [item.name], value=item) for item in graph.initializer if item.name not in kept
    ]
    nodes += list(graph.node)
    formals = [*(value.name for value in graph.input), *kept]
    results = [value.name for value in graph.output]
    imports = list(model.opset_import)
    function = helper.make_function("local", "Block", formals, results, nodes, imports)
    calls: list[onnx.NodeProto] = []
    inputs: list[onnx.ValueInfoProto] = []
    outputs: list[onnx.ValueInfoProto] = []
    for suffix in ("", "_2"):
        given = [f"{value.name}{suffix}" for value in graph.input]
        made = [f"{name}{suffix}" for name in results]
        calls.append(helper.make_node("Block", [*given, *kept], made, name=f"call{suffix}", domain="local"))
        for values, names, listed in ((graph.input, given, inputs), (graph.output, made, outputs)):
            for value, name in zip(values, names, strict=True):
                copy = onnx.ValueInfoProto()
                copy.CopyFrom(value)
                copy.name = name
                for dim in copy.type.tensor_type.shape.dim:
                    if dim.dim_param:
                        dim.dim_param += suffix
                listed.append(copy)
    stored = [item for item in graph.initializer if item.name in kept]
    proto = helper.make_graph(calls, "calls", inputs, outputs, stored)
    imports.append(helper.make_opsetid("local", 1))
    return helper.make_model(proto, opset_imports=imports, functions=[function], ir_version=model.ir_version)


def in_subgraph(model: onnx.ModelProto, kind: str, *, stored_inside: bool = False) -> onnx.ModelProto:
    """``model`` in a branch of an If, or in a Loop that runs twice and goes on from its own result."""
    graph = model.graph
    info = helper.make_tensor_value_info
    constants = [] if stored_inside else list(graph.initializer)
    inner = list(graph.initializer) if stored_inside else []
    names = {"result": "result/inner"}
    if kind == "loop":
        names["hidden"] = "hidden/inner"
    nodes = []
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [names.get(name, name) for name in node.input]
        copy.output[:] = [names.get(name, name) for name in node.output]
        nodes.append(copy)
    inputs, (result,) = list(graph.input), [value for value in graph.output if value.name == "result"]
    if kind == "if":
        inputs.append(info("choose", TensorProto.BOOL, []))
        bare = [onnx.ValueInfoProto(name=name) for name in ("result/inner", "other")]
        then = helper.make_graph(nodes, "then", [], bare[:1], inner)
        other = helper.make_graph([helper.make_node("Identity", ["hidden"], ["other"])], "other", [], bare[1:])
        held = helper.make_node("If", ["choose"], ["result"], name="choice", then_branch=then, else_branch=other)
    else:
        constants += [numpy_helper.from_array(np.asarray(2, np.int64), "twice")]
        formals = [info("number", TensorProto.INT64, []), info("go_on", TensorProto.BOOL, [])]
        carried = onnx.ValueInfoProto()
        carried.CopyFrom(graph.input[0])
        carried.name = "hidden/inner"
        nodes.append(helper.make_node("Identity", ["go_on"], ["still"]))
        outs = [info("still", TensorProto.BOOL, []), onnx.ValueInfoProto(name="result/inner")]
        body = helper.make_graph(nodes, "body", [*formals, carried], outs, inner)
        held = helper.make_node("Loop", ["twice", "", "hidden"], ["result"], name="loop", body=body)
    proto = helper.make_graph([held], "held", inputs, [result], constants)
    return helper.make_model(proto, opset_imports=list(model.opset_import), ir_version=model.ir_version)


def rewritten(proto: onnx.ModelProto, strategy: str) -> tuple[ir.Model, SiteReport]:
    model = ir.from_proto(proto)
    before = set(violations(model))
    (site,) = Pipeline([STRATEGIES[strategy]])(model).passes[0].sites
    assert site.status == "rewritten", site.reason
    assert set(violations(model)) <= before
    return model, site


def assert_equal(proto: onnx.ModelProto, model: ir.Model, feeds: dict[str, np.ndarray]) -> None:
    wanted, ours = run(session(proto), feeds), run(session(model), feeds)
    assert wanted.keys() == ours.keys()
    for name, array in wanted.items():
        bound = (1e-2 if array.dtype == np.float16 else 1e-5) * max(1.0, float(np.max(np.abs(array))))
        np.testing.assert_allclose(ours[name].astype(float), array.astype(float), rtol=0, atol=bound)


def twice(feeds: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**feeds, **{f"{name}_2": array for name, array in other.items()}}


def turns(kinds: int) -> list[tuple[str, str]]:
    """Every strategy with ``kinds`` of the forms, which take turns."""
    return [
        (FORMS[(place + kind) % len(FORMS)], strategy)
        for place, strategy in enumerate(STRATEGIES)
        for kind in range(kinds)
    ]


@pytest.mark.parametrize(("form", "strategy"), turns(2))
def test_functions(form: str, strategy: str) -> None:
    spec = spec_of(form)
    proto = in_functions(build(spec))
    model, site = rewritten(proto, strategy)
    assert site.reason.endswith("; in function 'Block', for its 2 calls")
    (function,) = model.functions.values()
    tagged = [node for node in function.graph if node.metadata_props.get("graphsurgery.pass") == "gather-experts"]
    assert len(tagged) > 5
    assert len(list(model.graph)) == 2
    assert site.boundaries[0].scope == "Block"
    assert_equal(proto, model, twice(feeds_of(spec, 2, 3, 1), feeds_of(spec, 1, 2, 2)))


@pytest.mark.parametrize("strategy", ["grouped", "gather", "loop"])
def test_calls_with_weights_of_their_own(strategy: str) -> None:
    """Each call hands over its own weights: views of each are made for it."""
    spec = spec_of("batched")
    proto = in_functions(build(spec))
    weights = [item for item in proto.graph.initializer if item.name.startswith("w_")]
    rng = np.random.default_rng(5)
    second = next(node for node in proto.graph.node if node.name == "call_2")
    for item in weights:
        array = numpy_helper.to_array(item)
        other = numpy_helper.from_array(rng.normal(size=array.shape).astype(array.dtype), f"{item.name}_2")
        proto.graph.initializer.append(other)
        second.input[:] = [other.name if name == item.name else name for name in second.input]
    model, _ = rewritten(proto, strategy)
    assert_equal(proto, model, twice(feeds_of(spec, 2, 3, 1), feeds_of(spec, 1, 2, 2)))


@pytest.mark.parametrize("kind", ["if", "loop"])
@pytest.mark.parametrize(("form", "strategy"), turns(1))
def test_branches_and_loops(form: str, kind: str, strategy: str) -> None:
    spec = spec_of(form)
    proto = in_subgraph(build(spec), kind)
    model, _ = rewritten(proto, strategy)
    for choose in (True, False):
        assert_equal(proto, model, {**feeds_of(spec, 2, 3, 1), "choose": np.asarray(choose)})
        assert_equal(proto, model, {**feeds_of(spec, 1, 1, 1), "choose": np.asarray(choose)})


@pytest.mark.parametrize("strategy", ["grouped", "gather"])
def test_weights_stored_in_a_branch(strategy: str) -> None:
    spec = spec_of("batched")
    proto = in_subgraph(build(spec), "if", stored_inside=True)
    model, _ = rewritten(proto, strategy)
    assert_equal(proto, model, {**feeds_of(spec, 2, 3, 1), "choose": np.asarray(True)})


def test_weights_that_are_constants_of_a_function() -> None:
    """A stack is used as it is; one expert's part of a constant node cannot be had."""
    spec = spec_of("batched")
    proto = in_functions(build(spec), weights_inside=True)
    model, _ = rewritten(proto, "loop")
    assert_equal(proto, model, twice(feeds_of(spec, 2, 3, 1), feeds_of(spec, 1, 2, 2)))
    (site,) = Pipeline(["gather-experts"])(ir.from_proto(proto)).passes[0].sites
    assert site.status == "refused"
    assert site.reason.startswith("strategy=grouped: the weights of one expert cannot be viewed: 'w_")


@pytest.mark.parametrize("kind", ["if", "loop", "function"])
def test_what_cannot_be_read_is_reported(kind: str) -> None:
    """A copy of an expert is left out: the block is refused where it is, not passed over."""
    spec = spec_of("selected")
    proto = build(spec)
    equal = [node for node in proto.graph.node if node.op_type == "Equal"]
    number = next(item for item in proto.graph.initializer if item.name in equal[-1].input)
    number.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(number) * 0 + 7, number.name))
    held = in_functions(proto) if kind == "function" else in_subgraph(proto, kind)
    (site,) = Pipeline(["gather-experts"])(ir.from_proto(held)).passes[0].sites
    assert site.status == "refused"
    assert site.reason.startswith("the expert block that ends in ")
    assert site.reason.endswith("; in function 'Block', for its 2 calls") == (kind == "function")


def test_a_second_run_changes_nothing() -> None:
    spec = spec_of("batched")
    for proto in (in_functions(build(spec)), in_subgraph(build(spec), "if")):
        for strategy in STRATEGIES:
            model, _ = rewritten(proto, strategy)
            again = Pipeline([STRATEGIES[strategy]])(model).passes[0]
            assert not again.changed
            where = "; in function 'Block', for its 2 calls" if model.functions else ""
            (site,) = again.sites
            assert (site.status, site.reason) == (
                "skipped",
                f"already written by an earlier run of this pass{where}",
            )


def test_each_place_of_an_inlined_function_is_told() -> None:
    model, _ = rewritten(in_functions(build(spec_of("batched"))), "grouped")
    sites = Pipeline(["inline-functions", "gather-experts"])(model).passes[1].sites
    assert [(site.id, site.status) for site in sites] == [("experts:0", "skipped"), ("experts:1", "skipped")]


@pytest.mark.full
@settings(deadline=None)
@given(expert_specs(), st.sampled_from(sorted(STRATEGIES)), st.sampled_from(["if", "loop", "function"]))
def test_generated_blocks(spec: Spec, strategy: str, kind: str) -> None:
    if kind == "function":
        proto = in_functions(build(spec))
        feeds = twice(feeds_of(spec, 2, 3, 1), feeds_of(spec, 1, 2, 2))
    else:
        proto = in_subgraph(build(spec), kind)
        feeds = {**feeds_of(spec, 2, 3, 1), "choose": np.asarray(True)}
    model, _ = rewritten(proto, strategy)
    assert_equal(proto, model, feeds)
