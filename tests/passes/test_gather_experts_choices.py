"""Ways to write down a choice: a pass for each of K, weights on what an expert is given, scattered and sorted scores."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session

E, K, H, INNER = 4, 2, 8, 6
STRATEGIES = {
    "grouped": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "loop": "gather-experts{strategy=packed,chunk_size=3,lanes=2}",
}


class Graph:
    """Nodes in the making; arrays become initializers."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def parts(self, operator: str, *operands: Any, count: int, **attributes: Any) -> list[str]:
        number = len(self.nodes)
        names = [item if isinstance(item, str) else self.constant(item) for item in operands]
        outputs = [f"{operator.lower()}_{number}_{place}" for place in range(count)]
        self.nodes.append(helper.make_node(operator, names, outputs, name=f"{operator}_{number}", **attributes))
        return outputs

    def __call__(self, operator: str, *operands: Any, **attributes: Any) -> str:
        return self.parts(operator, *operands, count=1, **attributes)[0]

    def constant(self, array: Any) -> str:
        made = np.asarray(array)
        name = f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(made if made.dtype != np.float64 else made.astype("f4"), name))
        return name

    def weight(self, *sizes: int) -> str:
        return self.constant(self.rng.standard_normal(sizes).astype(np.float32))

    def router(self) -> tuple[str, str, str]:
        shares = self("Softmax", self("MatMul", "x", self.weight(H, E)), axis=-1)
        weights, indices = self.parts("TopK", shares, [K], count=2)
        return shares, weights, indices

    def sum(self, terms: list[str]) -> str:
        total = terms[0]
        for term in terms[1:]:
            total = self("Add", total, term)
        return total

    def expert(self, rows: str, bias: bool = False) -> str:
        hidden = self("MatMul", rows, self.weight(H, INNER))
        hidden = self("Add", hidden, self.weight(INNER)) if bias else hidden
        return self("MatMul", self("Relu", hidden), self.weight(INNER, H))

    def model(self, result: str) -> onnx.ModelProto:
        nodes = [*self.nodes, helper.make_node("Identity", [result], ["y"], name="end")]
        x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["T", H]) for name in "xy")
        graph = helper.make_graph(nodes, "choices", [x], [y], self.initializers)
        made: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        return made


def passes(cut: Literal["Slice", "Split", "Gather"]) -> onnx.ModelProto:
    """For each of K choices the weights of the experts that the tokens have there."""
    graph = Graph()
    _, weights, indices = graph.router()
    matrices = [graph.weight(E, H, INNER), graph.weight(E, INNER, H)]
    if cut == "Split":
        columns = [graph.parts("Split", item, [1] * K, count=K, axis=1) for item in (indices, weights)]
    terms = []
    for k in range(K):
        if cut == "Gather":
            chosen = graph("Gather", indices, k, axis=1)
            weight = graph("Unsqueeze", graph("Gather", weights, k, axis=1), [1])
        else:
            pair = [graph("Slice", item, [k], [k + 1], [1]) for item in (indices, weights)] if cut == "Slice" else None
            column, weight = pair or [items[k] for items in columns]
            chosen = graph("Squeeze", column, [1])
        rows = graph("Unsqueeze", "x", [1])
        first, second = (graph("Gather", item, chosen, axis=0) for item in matrices)
        rows = graph("MatMul", graph("Relu", graph("MatMul", rows, first)), second)
        terms.append(graph("Mul", graph("Squeeze", rows, [1]), weight))
    return graph.model(graph.sum(terms))


def masked_passes() -> onnx.ModelProto:
    """For each of K choices every expert, on all rows, with a mask for those that have it there."""
    graph = Graph()
    _, weights, indices = graph.router()
    terms = []
    for k in range(K):
        chosen, weight = (graph("Gather", item, k, axis=1) for item in (indices, weights))
        for expert in range(E):
            mask = graph("Cast", graph("Equal", chosen, expert), to=1)
            rows = graph.expert("x")
            terms.append(graph("Mul", rows, graph("Unsqueeze", graph("Mul", mask, weight), [1])))
    return graph.model(graph.sum(terms))


def masked_input(bias: bool = False) -> onnx.ModelProto:
    """Every expert on all rows, each row times its weight for the expert, which may be zero."""
    graph = Graph()
    _, weights, indices = graph.router()
    terms = []
    for expert in range(E):
        mask = graph("Cast", graph("Equal", indices, expert), to=1)
        weight = graph("ReduceSum", graph("Mul", mask, weights), [1], keepdims=1)
        terms.append(graph.expert(graph("Mul", "x", weight), bias))
    return graph.model(graph.sum(terms))


def spread(kind: str, form: Literal["dense", "loop"], where: Literal["input", "output"]) -> onnx.ModelProto:
    """Weights ``[T, E]`` for all experts, which run on all rows."""
    graph = Graph()
    shares, weights, indices = graph.router()
    zero = graph("Mul", shares, 0.0)
    bound = graph("Slice", weights, [K - 1], [K], [1])
    if kind == "scattered":
        full = graph("ScatterElements", zero, indices, weights, axis=1)
    elif kind == "sorted":
        _, order = graph.parts("TopK", shares, [E], count=2)
        first = graph("Slice", order, [0], [K], [1])
        full = graph("ScatterElements", zero, first, graph("GatherElements", shares, first, axis=1), axis=1)
    elif kind == "shared out":
        low = graph("Expand", -np.inf, graph("Shape", shares))
        full = graph("Softmax", graph("ScatterElements", low, indices, weights, axis=1), axis=-1)
    elif kind == "bound":
        full = graph("Where", graph("GreaterOrEqual", shares, bound), shares, 0.0)
    else:
        full = graph("Softmax", graph("Where", graph("Less", shares, bound), -np.inf, shares), axis=-1)
    if form == "loop":
        terms = []
        for expert in range(E):
            weight = graph("Slice", full, [expert], [expert + 1], [1])
            rows = graph.expert(graph("Mul", "x", weight) if where == "input" else "x")
            terms.append(rows if where == "input" else graph("Mul", rows, weight))
        return graph.model(graph.sum(terms))
    weight = graph("Unsqueeze", graph("Transpose", full, perm=[1, 0]), [2])
    rows = graph("Unsqueeze", "x", [0])
    rows = graph("Mul", rows, weight) if where == "input" else rows
    rows = graph("MatMul", graph("Relu", graph("MatMul", rows, graph.weight(E, H, INNER))), graph.weight(E, INNER, H))
    rows = rows if where == "input" else graph("Mul", rows, weight)
    return graph.model(graph("ReduceSum", rows, [0], keepdims=0))


REWRITTEN = {
    "pass by slices": (passes("Slice"), 2, "batched form of 4 experts, 1 chosen"),
    "pass by splits": (passes("Split"), 2, "batched form of 4 experts, 1 chosen"),
    "pass by gathers": (passes("Gather"), 2, "batched form of 4 experts, 1 chosen"),
    "masked passes": (masked_passes(), 2, "loop form of 4 experts, 1 chosen"),
    "weight on the input": (masked_input(), 1, "loop form of 4 experts, 2 chosen"),
    **{
        f"{kind}, {form}, {where}": (spread(kind, form, where), 1, f"{form} form of 4 experts, 2 chosen")
        for kind in ("scattered", "sorted", "shared out")
        for form in ("dense", "loop")
        for where in ("input", "output")
    },
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", REWRITTEN)
def test_what_says_who_is_chosen(kind: str, strategy: str) -> None:
    proto, count, reason = REWRITTEN[kind]
    model = ir.from_proto(proto)
    sites = Pipeline([STRATEGIES[strategy]])(model).passes[0].sites
    assert [site.status for site in sites] == ["rewritten"] * count, [site.reason for site in sites]
    assert all(site.reason.startswith(reason) for site in sites)
    assert not violations(model)
    before, after = session(proto), session(model)
    for tokens in (1, 7, 0):
        feeds = {"x": np.random.default_rng(tokens).standard_normal((tokens, H)).astype(np.float32)}
        wanted, ours = run(before, feeds)["y"], run(after, feeds)["y"]
        scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * scale)


def refusal(proto: onnx.ModelProto) -> str:
    model = ir.from_proto(proto)
    (site,) = Pipeline(["gather-experts"])(model).passes[0].sites
    assert site.status == "refused"
    assert len(model.graph) == len(proto.graph.node)
    return site.reason


def test_a_bias_that_every_row_gets_is_told() -> None:
    assert refusal(masked_input(bias=True)).endswith("experts that are not chosen add something too")


@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("form", ["dense", "loop"])
@pytest.mark.parametrize(("kind", "node", "value"), [("bound", "GreaterOrEqual", "where"), ("low", "Less", "softmax")])
def test_a_bound_on_scores_is_no_choice_of_k(
    kind: str, node: str, value: str, form: Literal["dense", "loop"], where: Literal["input", "output"]
) -> None:
    """Scores that are the same are all in or all out."""
    reason = refusal(spread(kind, form, where))
    assert f"cannot be read: {node} '{node}_" in reason
    assert f"compares scores with a bound for the weights '{value}_" in reason
    assert reason.endswith("so that nothing says how many experts a token gets")
