"""Tiny models, right and wrong, made node by node.

Alphabet: B batch, S query length, P past, T = P + S keys, D head size, H hidden size, E experts, K chosen, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

CASES = Path(__file__).parents[1] / "cases"
FIXTURES = Path(__file__).parents[2] / "fixtures"
V, H, E, K = 40, 16, 4, 2
IDS = ((3, 1, 4, 1, 5), (9, 2, 6), (5,))
"""Prompts to decode."""


def case(name: str) -> Path:
    return next(CASES.glob(f"{name}*.onnx"))


class Graph:
    """Collects nodes and initializers; values are named by their node."""

    def __init__(self, dtype: int = T.FLOAT, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.dtype, self.rng = dtype, np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, out: str = "", outs: int = 1, **attributes: Any) -> str:
        name = out or f"{kind}_{len(self.nodes)}"
        outputs = [name] if outs == 1 else [f"{name}.{i}" for i in range(outs)]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"node/{name}", **attributes))
        return outputs[0]

    def weight(self, name: str, *shape: int, scale: float = 0.3) -> str:
        return self.floats(name, self.rng.standard_normal(shape) * scale)

    def floats(self, name: str, values: Any) -> str:
        dtype = ml_dtypes.bfloat16 if self.dtype == T.BFLOAT16 else helper.tensor_dtype_to_np_dtype(self.dtype)
        self.tensors.append(numpy_helper.from_array(np.asarray(values, np.float32).astype(dtype), name))
        return name

    def ints(self, name: str, values: Any) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def input(self, name: str, dtype: int, *dims: Any) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, dims))
        return name

    def output(self, name: str, dtype: int, *dims: Any) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, dims))

    def model(self, opset: int = 18) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def decoder(
    dtype: int = T.FLOAT, *, scale: float = 0.5, invert_mask: bool = False, drop_cache_row: bool = False
) -> onnx.ModelProto:
    """One attention layer with a growing cache, a rank-2 mask and positions; errors can be planted."""
    g = Graph(dtype)
    ids = g.input("input_ids", T.INT64, "batch", "seq")
    mask = g.input("attention_mask", T.INT64, "batch", "total")
    positions = g.input("position_ids", T.INT64, "batch", "seq")
    past_key = g.input("past.0.key", dtype, "batch", 1, "past", H)
    past_value = g.input("past.0.value", dtype, "batch", 1, "past", H)
    one, axis1, axis2 = g.ints("one", [1]), g.ints("axis1", [1]), g.ints("axis2", [2])
    hidden = g.op(
        "Add",
        g.op("Gather", g.weight("embed", V, H, scale=1.0), ids),
        g.op("Gather", g.weight("places", 512, H, scale=1.0), positions),
        out="hidden",
    )
    query, key, value = (
        g.op("Unsqueeze", g.op("MatMul", hidden, g.weight(f"w{part}", H, H)), axis1, out=part) for part in "qkv"
    )
    key = g.op("Concat", past_key, key, axis=2, out="present.0.key")
    value = g.op("Concat", past_value, value, axis=2, out="present.0.value")
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.floats("scale", scale))
    total = g.op("Shape", key, start=2, end=3)
    length = g.op("Shape", ids, start=1, end=2)
    zero = g.ints("zero", 0)
    step = g.ints("step", 1)
    columns = g.op("Range", zero, g.op("Squeeze", total), step)
    rows = g.op("Range", g.op("Squeeze", g.op("Sub", total, length)), g.op("Squeeze", total), step)
    causal = g.op("LessOrEqual", g.op("Unsqueeze", columns, g.ints("axis0", [0])), g.op("Unsqueeze", rows, one))
    attended = g.op("Cast", mask, to=T.BOOL)
    if invert_mask:
        attended = g.op("Not", attended)
    attended = g.op("Unsqueeze", attended, g.ints("axes12", [1, 2]))
    allowed = g.op("And", attended, causal)
    scores = g.op("Where", allowed, scores, g.floats("low", -1e4))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
    hidden = g.op("Add", hidden, g.op("Squeeze", mixed, axis1), out="hidden_1")
    g.op("MatMul", hidden, g.weight("head", H, V), out="logits")
    g.output("logits", dtype, "batch", "seq", V)
    if drop_cache_row:
        g.op("Slice", value, g.ints("from", [1]), g.ints("to", [2**62]), axis2, out="cut")
        g.nodes[-1].output[0] = "present.0.value"
        for node in g.nodes[:-1]:
            node.output[:] = ["whole" if name == "present.0.value" else name for name in node.output]
            node.input[:] = ["whole" if name == "present.0.value" else name for name in node.input]
        g.nodes[-1].input[0] = "whole"
    for name in ("present.0.key", "present.0.value"):
        g.output(name, dtype, "batch", 1, "total", H)
    return g.model()


def mixture(
    *, nudge: float = 0.0, wrong: bool = False, scatter: bool = False, tied: int | None = None, vocabulary: int = V
) -> onnx.ModelProto:
    """Token ids to experts by a router whose scores stand in the embedding, then a running sum over S, then a head.

    Token ``tied`` has two scores that differ by 1e-7 at the K-th place; ``nudge`` is added to the score of expert 1.
    """
    g = Graph()
    ids = g.input("input_ids", T.INT64, "batch", "seq")
    table = g.rng.standard_normal((vocabulary, H))
    # Scores well apart: a permutation of 0, 1, 2, 3 for each token.
    table[:, :E] = np.stack([g.rng.permutation(E) for _ in range(vocabulary)])
    if tied is not None:
        table[tied, :E] = [1.0, np.nextafter(np.float32(1), np.float32(0)), 3.0, 0.0]
    hidden = g.op("Gather", g.floats("embed", table), ids)
    scores = g.op("MatMul", hidden, g.floats("router", np.eye(H, E)), out="scores")
    bias = np.zeros(E)
    bias[1] = nudge
    scores = g.op("Add", scores, g.floats("bias", bias), out="biased")
    if wrong:
        scores = g.op("Neg", scores)
    best = g.op("TopK", scores, g.ints("k", [K]), axis=-1, out="top", outs=2)
    weights = g.op("Softmax", best, axis=-1)
    zeros = g.op("Sub", scores, scores)
    gates = g.op("ScatterElements", zeros, "top.1", weights, axis=-1, reduction="add" if scatter else "none")
    gates = g.op("Unsqueeze", gates, g.ints("last", [-1]))
    g.weight("experts", E, H, H)
    expanded = g.op("Unsqueeze", g.op("Unsqueeze", hidden, g.ints("a2", [2])), g.ints("a3", [3]))
    projected = g.op("Squeeze", g.op("MatMul", expanded, "experts"), g.ints("a3b", [3]))
    mixed = g.op("ReduceSum", g.op("Mul", projected, gates), g.ints("a2b", [2]), keepdims=0)
    summed = g.op("CumSum", mixed, g.ints("axis", 1), out="summed")
    g.op("MatMul", summed, g.weight("head", H, V), out="logits")
    g.output("logits", T.FLOAT, "batch", "seq", V)
    return g.model()


def cross_decoder(encoder: int | str = "encoded") -> onnx.ModelProto:
    """Tokens that read what an encoder has read, through its mask; no mask tells of the tokens."""
    g = Graph()
    g.input("encoder_attention_mask", T.INT64, "batch", encoder)
    ids = g.input("input_ids", T.INT64, "batch", "seq")
    states = g.input("encoder_hidden_states", T.FLOAT, "batch", encoder, H)
    places = g.op("CumSum", g.op("Gather", g.weight("embed", V, H, scale=1.0), ids), g.ints("axis", 1), out="places")
    scores = g.op("MatMul", places, g.op("Transpose", states, perm=[0, 2, 1]))
    seen = g.op("Unsqueeze", g.op("Cast", "encoder_attention_mask", to=T.BOOL), g.ints("axis1", [1]))
    scores = g.op("Where", seen, scores, g.floats("low", -1e4))
    hidden = g.op("Add", places, g.op("MatMul", g.op("Softmax", scores, axis=-1), states))
    g.op("MatMul", hidden, g.weight("head", H, V), out="logits")
    g.output("logits", T.FLOAT, "batch", "seq", V)
    return g.model()


def grouped(*, packed: bool = True, rotary: int | None = None, inside: bool = False) -> onnx.ModelProto:
    """GroupQueryAttention with 2 heads, 1 KV head and D = 32, which its caches call ``kv_cache_dim``.

    Args:
        packed: Q, K and V in one projection; else in three, with RotaryEmbedding in front where ``rotary`` is given.
        rotary: width of the rotary tables; D/2 where whole heads are rotated.
        inside: the layer is a function.
    """
    g = Graph()
    ids = g.input("input_ids", T.INT64, "batch", "seq")
    g.input("attention_mask", T.INT64, "batch", "total")
    positions = g.input("position_ids", T.INT64, "batch", "seq")
    past = [g.input(f"past.{part}", T.FLOAT, "batch", 1, "past", "kv_cache_dim") for part in ("key", "value")]
    hidden = g.op("Gather", g.weight("embed", V, H, scale=1.0), ids)
    counted = g.op("ReduceSum", "attention_mask", g.ints("axis1", [1]), keepdims=0)
    last = g.op("Cast", g.op("Sub", counted, g.ints("one", [1])), to=T.INT32)
    total = g.op("Cast", g.op("Gather", g.op("Shape", "attention_mask"), g.ints("place", 1)), to=T.INT32)
    tables = [g.weight("cos", 256, rotary), g.weight("sin", 256, rotary)] if rotary else []
    outer = len(g.nodes)
    if packed:
        rows = [g.op("MatMul", hidden, g.weight("qkv", H, 128)), "", ""]
    else:
        rows = [
            g.op("MatMul", hidden, g.weight(f"w{part}", H, size)) for part, size in (("q", 64), ("k", 32), ("v", 32))
        ]
        if rotary:
            for place in (0, 1):
                rows[place] = g.op("RotaryEmbedding", rows[place], positions, *tables, domain="com.microsoft")
    whole = bool(rotary) and packed
    g.op(
        *("GroupQueryAttention", *rows, *past, last, total, *(tables if whole else [])),
        outs=3,
        out="a",
        domain="com.microsoft",
        num_heads=2,
        kv_num_heads=1,
        do_rotary=int(whole),
    )
    g.nodes[-1].output[:] = ["mixed", "present.key", "present.value"]
    if inside:
        body = g.nodes[outer:]
        made = {name for node in body for name in node.output}
        inputs = list(dict.fromkeys(name for node in body for name in node.input if name and name not in made))
        domains = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        outputs = ["mixed", "present.key", "present.value"]
        layer = helper.make_function("own", "Layer", inputs, outputs, body, domains)
        g.nodes[outer:] = [helper.make_node("Layer", inputs, outputs, name="node/layer", domain="own")]
    g.op("MatMul", "mixed", g.weight("head", 64, V), out="logits")
    g.output("logits", T.FLOAT, "batch", "seq", V)
    for part in ("key", "value"):
        g.output(f"present.{part}", T.FLOAT, "batch", 1, "total", "kv_cache_dim")
    model = g.model()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    if inside:
        model.functions.append(layer)
        model.opset_import.append(helper.make_opsetid("own", 1))
    return model


def prune(model: onnx.ModelProto, rows: str = "last", **contract: Any) -> onnx.ModelProto:
    """Keep one row of ``logits [B,S,V]``: ``last``, ``first``, ``mask``, ``position`` or ``runtime``.

    Keyword arguments are the contract to write; none writes no contract.
    """
    model = copy(model)
    graph = model.graph
    for node in graph.node:
        node.output[:] = ["full" if name == "logits" else name for name in node.output]
    extra = Graph()
    one = extra.ints("p/one", [1])
    length = extra.op("Shape", "full", start=1, end=2, out="p/length")
    if rows == "first":
        index = extra.op("Mul", length, extra.ints("p/zero", [0]), out="p/index")
        index = extra.op("Expand", index, extra.op("Shape", "full", start=0, end=1, out="p/batch"), out="p/index_b")
    elif rows == "last":
        index = extra.op("Sub", length, one, out="p/index")
        index = extra.op("Expand", index, extra.op("Shape", "full", start=0, end=1, out="p/batch"), out="p/index_b")
    elif rows == "runtime":
        index = extra.input("last_token_indices", T.INT64, "batch")
    else:
        source = {"mask": "attention_mask", "position": "position_ids"}[rows]
        start = extra.op("Neg", length, out="p/start")
        window = extra.op("Slice", source, start, extra.ints("p/end", [2**62]), one, out="p/window")
        index = extra.op("ArgMax", window, axis=1, keepdims=0, select_last_index=1, out="p/index")
    index = extra.op("Unsqueeze", index, extra.ints("p/axis", [1]), out="p/index_2")
    index = extra.op("Unsqueeze", index, extra.ints("p/axis2", [2]), out="p/index_3")
    extra.op("GatherND", "full", index, batch_dims=1, out="logits")
    extra.nodes[-1].name = "node/pruned"
    graph.node.extend(extra.nodes)
    graph.initializer.extend(extra.tensors)
    graph.input.extend(extra.inputs)
    for output in graph.output:
        if output.name == "logits":
            output.type.tensor_type.shape.dim[1].Clear()
            output.type.tensor_type.shape.dim[1].dim_value = 1
    if contract:
        entry = {
            "output": "logits",
            "index": rows,
            "keep": 1,
            "source": None,
            "sequence": "input_ids",
            "sequence_axis": 1,
            "row_axis": 1,
            "batch_axis": 0,
            "flat": False,
        } | contract
        set_metadata(model, "graphsurgery.contracts", [entry])
    return model


def set_metadata(model: onnx.ModelProto, key: str, value: Any) -> None:
    model.metadata_props.add(key=key, value=json.dumps(value))


def copy(model: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    return result


def save(model: onnx.ModelProto, path: Path, *, external: bool = False) -> Path:
    if external:
        onnx.save(model, path, save_as_external_data=True, location=path.name + ".data", size_threshold=64)
    else:
        path.write_bytes(model.SerializeToString())
    return path


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def set_values(model: onnx.ModelProto, name: str, values: Any) -> None:
    tensor = initializer(model, name)
    old = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(values).astype(old.dtype).reshape(old.shape), name))


def values(model: onnx.ModelProto, name: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = numpy_helper.to_array(initializer(model, name)).copy()
    return array
