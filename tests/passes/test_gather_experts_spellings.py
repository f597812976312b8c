"""Rarer spellings of expert blocks: one expert by ArgMax, no weights at all, a sum that begins at the residual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session

if TYPE_CHECKING:
    from graphsurgery.site_report import SiteReport

EXPERTS, HIDDEN, INNER = 4, 6, 5
STRATEGIES = {
    "grouped": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "dense": "gather-experts{strategy=dense}",
    "loop": "gather-experts{strategy=packed,chunk_size=3,lanes=2}",
    "npu": "gather-experts{target=npu,threshold=3,chunk_size=2}",
}


class Writer:
    """Nodes in the making."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(7)

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=f"n_{name}", **attributes))
        return name

    def constant(self, array: np.ndarray) -> str:
        name = f"c_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def expert(self, rows: str) -> str:
        up = self.op("Relu", self.op("MatMul", rows, self.weight(HIDDEN, INNER)))
        return self.op("Add", self.op("MatMul", up, self.weight(INNER, HIDDEN)), self.weight(HIDDEN))


def block(form: str, router: str, *, weighted: bool = True, base: str = "zero") -> onnx.ModelProto:
    """An expert block over ``x [T, H]``, every expert written out.

    Args:
        form: ``selected`` (the rows that chose an expert) or ``masked`` (all rows, masked).
        router: ``argmax`` (``[T]``), ``argmax_column`` (``[T, 1]``) or ``topk`` (2 choices).
        weighted: whether the router's weights multiply.
        base: what the sum begins at: ``zero``, ``residual`` (the input) or ``shared`` (another expert).
    """
    w = Writer()
    shares = w.op("Softmax", w.op("MatMul", "x", w.weight(HIDDEN, EXPERTS)), axis=-1)
    if router == "topk":
        w.nodes.append(helper.make_node("TopK", [shares, w.ints(2)], ["weights", "chosen"], name="top", axis=-1))
        weights, chosen = "weights", "chosen"
    else:
        weights = w.op("ReduceMax", shares, w.ints(-1), keepdims=1)
        chosen = w.op("ArgMax", shares, axis=-1, keepdims=int(router == "argmax_column"))
    total = {"zero": "", "residual": "x"}.get(base)
    if total is None:
        total = w.op("Tanh", w.op("MatMul", "x", w.weight(HIDDEN, HIDDEN)))
    if form == "selected" and not total:
        total = w.op("Mul", "x", w.constant(np.array(0, np.float32)))
    for expert in range(EXPERTS):
        own = w.op("Equal", chosen, w.constant(np.array(expert)))
        if form == "selected":
            places = w.op("NonZero", own)
            token = w.op("Gather", places, w.constant(np.array(0)), axis=0)
            result = w.expert(w.op("Gather", "x", token, axis=0))
            if weighted and router == "topk":
                pairs = w.op("Transpose", places, perm=[1, 0])
                result = w.op("Mul", result, w.op("Unsqueeze", w.op("GatherND", weights, pairs), w.ints(1)))
            elif weighted:
                result = w.op("Mul", result, w.op("Gather", weights, token, axis=0))
            index = w.op("Unsqueeze", token, w.ints(1))
            total = w.op("ScatterND", total, index, result, reduction="add")
            continue
        mask = w.op("Cast", own, to=TensorProto.FLOAT)
        if router == "argmax":
            mask = w.op("Unsqueeze", mask, w.ints(1))
        if weighted:
            mask = w.op("Mul", mask, weights)
        if router == "topk":
            mask = w.op("ReduceSum", mask, w.ints(-1), keepdims=1)
        result = w.op("Mul", w.expert("x"), mask)
        total = w.op("Add", total, result) if total else result
    w.nodes.append(helper.make_node("Identity", [total], ["y"], name="end"))
    kind = TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", kind, ["T", HIDDEN])]
    outputs = [helper.make_tensor_value_info("y", kind, ["T", HIDDEN])]
    graph = helper.make_graph(w.nodes, "block", inputs, outputs, w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def rewritten(proto: onnx.ModelProto, strategy: str) -> tuple[ir.Model, SiteReport]:
    model = ir.from_proto(proto)
    (site,) = Pipeline([STRATEGIES[strategy]])(model).passes[0].sites
    assert site.status == "rewritten", site.reason
    assert not violations(model)
    return model, site


def assert_equal(proto: onnx.ModelProto, model: ir.Model) -> None:
    before, after = session(proto), session(model)
    for tokens in (1, 7, 0):
        feeds = {"x": np.random.default_rng(tokens).standard_normal((tokens, HIDDEN)).astype(np.float32)}
        wanted, ours = run(before, feeds)["y"], run(after, feeds)["y"]
        bound = 1e-5 * max(1.0, float(np.max(np.abs(wanted), initial=0)))
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=bound)


def _masked_sum_is_no_choice(model: ir.Model) -> bool:
    kinds = [node.op_type for node in model.graph.all_nodes()]
    return kinds.count("NonZero") == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["selected", "masked"])
@pytest.mark.parametrize("router", ["argmax", "argmax_column"])
def test_one_expert_by_argmax(router: str, form: str, strategy: str) -> None:
    proto = block(form, router)
    model, site = rewritten(proto, strategy)
    assert (site.detail["top_k"], site.detail["experts"], site.detail["form"]) == (1, EXPERTS, "loop")
    assert _masked_sum_is_no_choice(model)
    assert_equal(proto, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["selected", "masked"])
@pytest.mark.parametrize("router", ["argmax", "argmax_column", "topk"])
def test_experts_without_weights(router: str, form: str, strategy: str) -> None:
    proto = block(form, router, weighted=False)
    model, _ = rewritten(proto, strategy)
    assert_equal(proto, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["selected", "masked"])
@pytest.mark.parametrize("base", ["residual", "shared"])
def test_a_sum_that_begins_at_something(base: str, form: str, strategy: str) -> None:
    proto = block(form, "topk", base=base)
    model, site = rewritten(proto, strategy)
    assert len(site.boundaries[0].inputs_before) == 4
    assert_equal(proto, model)


def test_an_argmax_along_another_axis_is_no_choice() -> None:
    proto = block("masked", "argmax_column")
    node = next(node for node in proto.graph.node if node.op_type == "ArgMax")
    node.attribute[0].i = 0
    assert all(
        site.status != "rewritten" for site in Pipeline(["gather-experts"])(ir.from_proto(proto)).passes[0].sites
    )
