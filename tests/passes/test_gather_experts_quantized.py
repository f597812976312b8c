"""Experts whose weights are stored in fewer bits: DequantizeLinear by axis and block, MatMulNBits, under every strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.strategies.expert_forms import Spec
from tests.strategies.experts import build, feeds_of

if TYPE_CHECKING:
    from graphsurgery.site_report import SiteReport

STRATEGIES = {
    "grouped": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "dense": "gather-experts{strategy=dense}",
    "loop": "gather-experts{strategy=packed,chunk_size=3,lanes=2}",
    "one_lane": "gather-experts{strategy=packed,chunk_size=3}",
}
FORMS = ("batched", "grouped", "selected", "masked", "dense")


def spec_of(form: str, **more: Any) -> Spec:
    return Spec(form=form, experts=3, top_k=2, hidden=32, inner=32, gate="separate", **more)


def weights_of(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    names = ("gate", "up", "down")
    return [item for item in proto.graph.initializer if item.name.split("_")[1] in names and len(item.dims) > 1]


def dequantised(proto: onnx.ModelProto, axis: int, block: int = 0, *, zero: bool = True) -> onnx.ModelProto:
    """``proto`` with matrices in int8, a scale for each place of ``axis`` (counted from the end) or block along it."""
    rng = np.random.default_rng(1)
    weights = weights_of(proto)
    assert weights
    stored = {item.name: list(item.dims) for item in weights}
    kept = [item for item in proto.graph.initializer if item.name not in stored]
    nodes = []
    for name, sizes in stored.items():
        place = axis % len(sizes)
        shape = [sizes[place]]
        if block:
            shape = [size // block if number == place else size for number, size in enumerate(sizes)]
        kept.append(numpy_helper.from_array(rng.integers(-100, 100, sizes).astype(np.int8), f"{name}_q"))
        kept.append(numpy_helper.from_array(rng.uniform(0.001, 0.004, shape).astype(np.float32), f"{name}_s"))
        inputs = [f"{name}_q", f"{name}_s"]
        if zero:
            kept.append(numpy_helper.from_array(rng.integers(-9, 9, shape).astype(np.int8), f"{name}_z"))
            inputs.append(f"{name}_z")
        attributes = {"axis": place, **({"block_size": block} if block else {})}
        nodes.append(helper.make_node("DequantizeLinear", inputs, [name], name=f"dq_{name}", **attributes))
    graph = helper.make_graph([*nodes, *proto.graph.node], "dequantised", proto.graph.input, proto.graph.output, kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def packed(proto: onnx.ModelProto, *, zero: bool = True) -> onnx.ModelProto:
    """``proto``, whose experts have a matrix each, with products by MatMulNBits."""
    rng = np.random.default_rng(2)
    stored = {item.name: list(item.dims) for item in weights_of(proto)}
    kept = [item for item in proto.graph.initializer if item.name not in stored]
    nodes = []
    for node in proto.graph.node:
        plain = node.op_type == "MatMul" or (node.op_type == "Gemm" and len(node.input) == 2)
        name = node.input[1] if plain else ""
        if name not in stored:
            nodes.append(node)
            continue
        wide, columns = stored[name]
        blocks = wide // 16
        kept.append(numpy_helper.from_array(rng.integers(0, 256, (columns, blocks, 8)).astype(np.uint8), f"{name}_q"))
        kept.append(numpy_helper.from_array(rng.uniform(0.01, 0.04, columns * blocks).astype(np.float32), f"{name}_s"))
        inputs = [node.input[0], f"{name}_q", f"{name}_s"]
        if zero:
            points = rng.integers(0, 256, columns * ((blocks + 1) // 2)).astype(np.uint8)
            kept.append(numpy_helper.from_array(points, f"{name}_z"))
            inputs.append(f"{name}_z")
        attributes = {"K": wide, "N": columns, "bits": 4, "block_size": 16}
        nodes.append(
            helper.make_node("MatMulNBits", inputs, node.output, name=node.name, domain="com.microsoft", **attributes)
        )
    assert len(nodes) == len(proto.graph.node)
    graph = helper.make_graph(nodes, "packed", proto.graph.input, proto.graph.output, kept)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def rewritten(proto: onnx.ModelProto, strategy: str) -> tuple[ir.Model, SiteReport]:
    model = ir.from_proto(proto)
    (site,) = Pipeline([STRATEGIES[strategy]])(model).passes[0].sites
    assert site.status == "rewritten", site.reason
    assert not violations(model)
    return model, site


def assert_equal(proto: onnx.ModelProto, model: ir.Model, spec: Spec) -> None:
    for batch, length in ((2, 3), (1, 1)):
        feeds = feeds_of(spec, batch, length, 4)
        wanted, ours = run(session(proto), feeds), run(session(model), feeds)
        for name, array in wanted.items():
            bound = 1e-5 * max(1.0, float(np.max(np.abs(array))))
            np.testing.assert_allclose(ours[name], array, rtol=0, atol=bound)


PLACES = [(-1, 0), (-2, 0), (-2, 8), (-1, 8)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("axis", "block"), PLACES)
def test_dequantised_by_axis_and_block(axis: int, block: int, strategy: str) -> None:
    """Each place of the scales under each strategy, the forms taking turns."""
    turn = PLACES.index((axis, block)) + list(STRATEGIES).index(strategy)
    _check_dequantised(FORMS[turn % len(FORMS)], axis, block, strategy)


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("axis", "block"), PLACES)
def test_dequantised_in_every_form(form: str, axis: int, block: int, strategy: str) -> None:
    _check_dequantised(form, axis, block, strategy)


def _check_dequantised(form: str, axis: int, block: int, strategy: str) -> None:
    spec = spec_of(form, variant=1)
    proto = dequantised(build(spec), axis, block)
    model, site = rewritten(proto, strategy)
    assert_equal(proto, model, spec)
    if strategy == "grouped":
        assert site.detail["weight_bytes_moved"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["batched", "dense", "grouped"])
def test_a_scale_for_each_expert(form: str, strategy: str) -> None:
    spec = spec_of(form)
    proto = dequantised(build(spec), 0, zero=False)
    model, _ = rewritten(proto, strategy)
    assert_equal(proto, model, spec)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["selected", "masked"])
@pytest.mark.parametrize("zero", [True, False])
def test_packed_products_in_a_loop_over_experts(form: str, strategy: str, zero: bool) -> None:
    spec = spec_of(form)
    proto = packed(build(spec), zero=zero)
    model, site = rewritten(proto, strategy)
    products = sum(node.op_type == "MatMulNBits" for node in model.graph.all_nodes())
    # The operator takes one matrix: those of several experts at a time are unpacked and multiplied.
    assert products == {"grouped": 9, "one_lane": 3}.get(strategy, 0)
    if strategy == "grouped":
        assert site.detail["weight_bytes_moved"] == 0
    assert_equal(proto, model, spec)


@pytest.mark.parametrize(
    ("attribute", "number", "reason"),
    [
        ("accuracy_level", 4, "accuracy_level=4 lets it compute on activations in 8 bits"),
        ("bits", 2, "its weights are in 2 bits"),
        ("block_size", 64, "its blocks of 64 do not divide rows of 32"),
    ],
)
def test_packed_products_that_take_one_expert_at_a_time(attribute: str, number: int, reason: str) -> None:
    proto = packed(build(spec_of("selected")))
    for node in proto.graph.node:
        if node.op_type == "MatMulNBits":
            kept = [item for item in node.attribute if item.name != attribute]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(attribute, number)])
    (site,) = Pipeline([STRATEGIES["gather"]])(ir.from_proto(proto)).passes[0].sites
    assert site.status == "refused"
    assert site.reason.endswith(f"(MatMulNBits) works on the weights of one expert at a time: {reason}")
