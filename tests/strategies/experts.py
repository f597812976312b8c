"""Generated expert blocks: every form, router, activation, layout and type that exporters write, and feeds for them.

``build`` makes a whole model: hidden states ``[B, S, H]`` in, the block's result added to them out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.strategies.expert_forms import FORMS, Graph, Spec

__all__ = ["FORMS", "Spec", "build", "expert_specs", "feeds_of"]

_WEIGHED_LAST = ("masked", "einsum", "outputs")
ROUTERS = ("softmax_topk", "renormalised", "topk_softmax", "sigmoid_bias", "grouped_choice", "one_by_one", "fed")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped", "relu_squared")
GATES = ("split", "slices", "interleaved", "separate", "none")


@st.composite
def expert_specs(draw: st.DrawFn, *, forms: tuple[str, ...] = tuple(FORMS)) -> Spec:
    """Any expert block of these forms that the recogniser is to read."""
    form = draw(st.sampled_from(forms))
    experts = draw(st.sampled_from([2, 3, 4, 6]))
    gate = draw(st.sampled_from(GATES))
    router = draw(st.sampled_from(ROUTERS if form in ("grouped", "batched") else ROUTERS[:-1]))
    # A weight on the way in makes nothing of a token's row, so that nothing may be added to it afterwards.
    weighted = draw(st.sampled_from(["output", "output", "input"])) if form not in _WEIGHED_LAST else "output"
    # An expert of its own kind of number: Llama 4 scales what goes in, so that an unchosen expert sees zeros.
    dense = form == "dense"
    free = weighted == "output" or not dense
    return Spec(
        form=form,
        experts=experts,
        top_k=draw(st.integers(1, min(3, experts))),
        hidden=draw(st.sampled_from([4, 6])),
        inner=draw(st.sampled_from([2, 5])),
        router=router,
        scaled=draw(st.booleans()),
        expert_scale=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)) if free else draw(st.sampled_from(["silu", "gelu"])),
        gate=gate,
        bias=draw(st.booleans()) and free,
        norm=draw(st.booleans()) and free and form != "einsum",
        weighted=weighted,
        turned=draw(st.booleans()),
        behind=draw(st.sampled_from(["nothing", "nothing", "identity", "cast", "dequantised"])),
        shared=draw(st.booleans()),
        half=draw(st.integers(0, 5)) == 0,
        static=draw(st.one_of(st.none(), st.tuples(st.integers(1, 3), st.integers(1, 5)))),
        flat=draw(st.booleans()),
        variant=draw(st.integers(0, 11)),
        seed=draw(st.integers(0, 999)),
    )


def build(spec: Spec) -> onnx.ModelProto:
    """The model of ``spec``: input ``hidden`` (and the fed choice of experts), outputs ``result`` and ``block``."""
    graph = Graph(spec)
    batch, length = spec.static or ("B", "S")
    kind = TensorProto.FLOAT16 if spec.half else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("hidden", kind, [batch, length, spec.hidden])]
    normed = graph.op("Mul", "hidden", graph.weight("norm", (spec.hidden,)))
    tokens = graph.op("Reshape", normed, graph.ints([-1, spec.hidden]))
    if spec.router == "fed":
        rows = batch * length if isinstance(batch, int) and isinstance(length, int) else "T"
        inputs += [
            helper.make_tensor_value_info("indices", TensorProto.INT64, [rows, spec.top_k]),
            helper.make_tensor_value_info("weights", kind, [rows, spec.top_k]),
        ]
        indices, weights = "indices", "weights"
    else:
        indices, weights = _route(graph, spec, tokens)
    if spec.expert_scale:
        scale = graph.weight("expert_scale", (spec.experts,))
        picked = graph.op("GatherND", scale, graph.op("Unsqueeze", indices, graph.ints([-1])))
        weights = graph.op("Mul", weights, picked)
    summed = FORMS[spec.form](graph, tokens, indices, weights)
    back = graph.op("Reshape", summed, graph.op("Shape", normed), output="block")
    if spec.shared:
        inner = graph.op("MatMul", normed, graph.weight("shared_up", (spec.hidden, spec.inner)))
        back = graph.op(
            "Add",
            back,
            graph.op("MatMul", graph.op("Relu", inner), graph.weight("shared_down", (spec.inner, spec.hidden))),
        )
    graph.op("Add", "hidden", back, output="result")
    outputs = [helper.make_tensor_value_info(name, kind, [batch, length, spec.hidden]) for name in ("result", "block")]
    made = helper.make_graph(
        graph.nodes,
        "experts",
        inputs,
        outputs,
        initializer=[onnx.numpy_helper.from_array(array, name) for name, array in graph.constants.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def feeds_of(spec: Spec, batch: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Inputs for ``build(spec)``; a static spec sets the lengths."""
    batch, length = spec.static or (batch, length)
    rng = np.random.default_rng(seed)
    kind = np.float16 if spec.half else np.float32
    # A square of float16 in front of a sum loses what the tolerance of float16 is about: it is kept below one.
    scale = 0.5 if spec.half and spec.activation == "relu_squared" else 1.0
    feeds: dict[str, Any] = {"hidden": (scale * rng.normal(size=(batch, length, spec.hidden))).astype(kind)}
    if spec.router == "fed":
        rows = batch * length
        chosen = [rng.permutation(spec.experts)[: spec.top_k] for _ in range(rows)]
        feeds["indices"] = np.array(chosen, dtype=np.int64).reshape(rows, spec.top_k)
        feeds["weights"] = rng.uniform(0.2, 1, (rows, spec.top_k)).astype(kind)
        if spec.variant % 3 == 0:
            feeds["weights"][rng.uniform(size=(rows, spec.top_k)) < 0.3] = 0
    return feeds


def _route(graph: Graph, spec: Spec, tokens: str) -> tuple[str, str]:
    """The chosen experts and their weights, ``[T, K]``."""
    logits = graph.op("MatMul", tokens, graph.weight("router", (spec.hidden, spec.experts)))
    count = graph.ints([spec.top_k])
    if spec.router == "topk_softmax":
        values, indices = graph.two("TopK", logits, count, axis=-1)
        weights = graph.op("Softmax", values, axis=1)
    elif spec.router == "one_by_one" and spec.top_k > 1:
        # Each the best of what those before it have left.
        each, left = list[str](), logits
        for _ in range(spec.top_k):
            each.append(graph.op("ArgMax", left, axis=-1, keepdims=1))
            low = graph.op("Expand", graph.number(-np.inf), graph.op("Shape", each[-1]))
            left = graph.op("ScatterElements", left, each[-1], low, axis=-1)
        indices = graph.op("Concat", *each, axis=-1)
        weights = graph.op("Softmax", graph.op("GatherElements", logits, indices, axis=1), axis=-1)
    elif spec.router in ("sigmoid_bias", "grouped_choice"):
        scores = graph.op("Sigmoid", logits)
        biased = graph.op("Add", scores, graph.weight("correction", (spec.experts,)))
        if spec.router == "grouped_choice" and spec.experts % 2 == 0:
            biased = _limited(graph, spec, biased)
        _, indices = graph.two("TopK", biased, count, axis=-1)
        weights = graph.op("GatherElements", scores, indices, axis=1)
        total = graph.op("ReduceSum", weights, graph.ints([-1]), keepdims=1)
        weights = graph.op("Div", weights, graph.op("Add", total, graph.number(1e-3)))
    else:
        weights, indices = graph.two("TopK", graph.op("Softmax", logits, axis=-1), count, axis=-1)
        if spec.router == "renormalised":
            weights = graph.op("Div", weights, graph.op("ReduceSum", weights, graph.ints([-1]), keepdims=1))
    return indices, graph.op("Mul", weights, graph.number(1.5)) if spec.scaled else weights


def _limited(graph: Graph, spec: Spec, scores: str) -> str:
    """Scores of which only those of the better half of the groups are left (the choice may then take more)."""
    groups = graph.op("Reshape", scores, graph.ints([-1, 2, spec.experts // 2]))
    best = graph.op("ReduceMax", groups, axes=[-1], keepdims=0)
    _, chosen = graph.two("TopK", best, graph.ints([1]), axis=-1)
    zeros = graph.op("Mul", best, graph.number(0.0))
    ones = graph.op(
        "Add", graph.op("Mul", graph.op("Cast", chosen, to=graph.kind), graph.number(0.0)), graph.number(1.0)
    )
    mask = graph.op("ScatterElements", zeros, chosen, ones, axis=1)
    spread = graph.op("Expand", graph.op("Unsqueeze", mask, graph.ints([-1])), graph.op("Shape", groups))
    return graph.op("Mul", scores, graph.op("Reshape", spread, graph.op("Shape", scores)))
