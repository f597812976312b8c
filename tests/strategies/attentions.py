"""Generated attention: the spellings, masks, layouts and types that exporters write, and lengths to run them at."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

__all__ = ["PLAIN", "TWO_MASKS", "AttentionSpec", "attention_specs", "build", "feeds_of", "lengths", "pass_options"]


TWO_MASKS = ("add_add", "where_where", "add_where", "where_add")
"""A causal mask and a padding mask, one after the other."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One attention.

    Attributes:
        groups: key heads, G.
        repeats: query heads for each key head.
        features: head size of queries and keys.
        value_features: head size of values.
        scale: where the scale is applied.
        keys: how keys get transposed.
        expand: how key heads are repeated.
        mask: what masks.
        low: what masked scores get.
        softcap: whether scores are capped.
        sink: whether a sink takes part.
        guard: what is done for rows without a key.
        half: float16.
        static: lengths are fixed in the file: S, P; None where symbolic.
        exposed: what else is an output: the scores, what the mask makes of them, or the probabilities.
        products: products of the probabilities: with the values, and with the keys too.
    """

    groups: int
    repeats: int
    features: int
    value_features: int
    scale: Literal["scores_mul", "scores_div", "both", "query", "none"]
    keys: Literal["transpose", "flattened"]
    expand: Literal["unsqueeze", "tile"]
    mask: str
    low: str
    softcap: bool
    sink: bool
    guard: str
    half: bool
    static: tuple[int, int] | None
    exposed: Literal["none", "scores", "masked", "weights"] = "none"
    products: int = 1


PLAIN = AttentionSpec(
    groups=2,
    repeats=2,
    features=4,
    value_features=3,
    scale="scores_mul",
    keys="transpose",
    expand="unsqueeze",
    mask="padding",
    low="finite",
    softcap=False,
    sink=False,
    guard="none",
    half=False,
    static=None,
)
"""Grouped queries, padding told by an input, lengths symbolic."""


@st.composite
def attention_specs(draw: st.DrawFn) -> AttentionSpec:
    """Any attention that computes something: rows without a key and an infinite mask come with a guard."""
    mask = draw(
        st.sampled_from(
            [
                *("none", "causal", "window", "padding", "bool_where", "given", "given_rows", "bias", "keys_only"),
                *TWO_MASKS,
            ]
        )
    )
    low = draw(st.sampled_from(["finite", "infinite"]))
    guard = draw(st.sampled_from(["none", "nan", "rows"]))
    if mask in ("none", "bias") and guard == "rows":
        guard = "none"
    if low == "infinite" and mask not in ("none", "causal", "bias"):
        guard = "nan"
    return AttentionSpec(
        groups=draw(st.integers(1, 3)),
        repeats=draw(st.integers(1, 3)),
        features=draw(st.sampled_from([2, 4])),
        value_features=draw(st.sampled_from([2, 3])),
        scale=draw(st.sampled_from(["scores_mul", "scores_div", "both", "query", "none"])),
        keys=draw(st.sampled_from(["transpose", "flattened"])),
        expand=draw(st.sampled_from(["unsqueeze", "tile"])),
        mask=mask,
        low=low,
        softcap=draw(st.booleans()),
        sink=draw(st.booleans()),
        guard=guard,
        half=draw(st.integers(0, 5)) == 0,
        static=draw(st.one_of(st.none(), st.tuples(st.integers(2, 9), st.integers(0, 5)))),
        exposed=draw(st.sampled_from([*("none",) * 5, "scores", "masked", "weights"])),
        products=draw(st.sampled_from([1, 1, 1, 2])),
    )


def lengths(spec: AttentionSpec) -> st.SearchStrategy[tuple[int, int, int]]:
    """Batch, S and P to run at."""
    if spec.static is not None:
        return st.tuples(st.integers(1, 3), st.just(spec.static[0]), st.just(spec.static[1]))
    return st.tuples(st.integers(1, 3), st.integers(1, 17), st.integers(0, 9))


@st.composite
def pass_options(draw: st.DrawFn) -> dict[str, Any]:
    """Options of block-attention that do not contradict each other."""
    options: dict[str, Any] = {
        "headpar_split": draw(st.sampled_from([1, 1, 2, 3])),
        "fold_gqa": draw(st.booleans()),
        "head_blocks": draw(st.integers(1, 4)),
        "skip": draw(st.sampled_from(["auto", "none", "trim", "if", "where"])),
    }
    for axis in ("q", "kv"):
        if draw(st.booleans()):
            options[f"{axis}_blocks"] = draw(st.integers(1, 4))
        else:
            options[f"{axis}_block_size"] = draw(st.integers(1, 7))
    if draw(st.booleans()):
        options["min_rows"] = draw(st.integers(0, 5))
    return options


class _Graph:
    """Nodes in the making."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.dtype = np.float16 if spec.half else np.float32
        self._count = 0
        self.masks: tuple[str, ...] = ()

    def op(self, op_type: str, *inputs: str, **attributes: object) -> str:
        self._count += 1
        name = f"v{self._count}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=f"n{self._count}", **attributes))
        return name

    def number(self, value: float) -> str:
        return self.array(np.asarray(value, self.dtype))

    def ints(self, *values: int) -> str:
        return self.array(np.asarray(values, np.int64))

    def array(self, value: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name


def build(spec: AttentionSpec) -> onnx.ModelProto:
    """The model: queries, keys and values are inputs, the cache grows by Concat, the attended values are the output."""
    graph = _Graph(spec)
    kind = TensorProto.FLOAT16 if spec.half else TensorProto.FLOAT
    heads = spec.groups * spec.repeats
    length: int | str
    past: int | str
    total: int | str
    length, past, total = "S", "P", "P + S"
    if spec.static is not None:
        length, past, total = spec.static[0], spec.static[1], sum(spec.static)
    info = helper.make_tensor_value_info
    inputs = [
        info("query", kind, ["B", heads, length, spec.features]),
        info("past_key", kind, ["B", spec.groups, past, spec.features]),
        info("past_value", kind, ["B", spec.groups, past, spec.value_features]),
        info("new_key", kind, ["B", spec.groups, length, spec.features]),
        info("new_value", kind, ["B", spec.groups, length, spec.value_features]),
    ]
    graph.nodes.append(helper.make_node("Concat", ["past_key", "new_key"], ["key"], name="grow_key", axis=2))
    graph.nodes.append(helper.make_node("Concat", ["past_value", "new_value"], ["value"], name="grow_value", axis=2))
    keys, values = _expanded(graph, spec, "key", spec.features), _expanded(graph, spec, "value", spec.value_features)
    keys = _transposed(graph, spec, keys, heads)
    query, factor = "query", 1 / np.sqrt(spec.features)
    if spec.scale == "both":
        root = graph.number(np.sqrt(factor))
        query, keys = graph.op("Mul", query, root), graph.op("Mul", keys, root)
    elif spec.scale == "query":
        query = graph.op("Mul", query, graph.number(factor))
    scores = graph.op("MatMul", query, keys)
    seen = {"scores": scores}
    if spec.scale == "scores_mul":
        scores = graph.op("Mul", scores, graph.number(factor))
    elif spec.scale == "scores_div":
        scores = graph.op("Div", scores, graph.number(1 / factor))
    if spec.softcap:
        cap = graph.number(2.0)
        scores = graph.op("Mul", graph.op("Tanh", graph.op("Div", scores, cap)), cap)
    allowed = _allowed(graph, spec, inputs, total)
    scores = _masked(graph, spec, inputs, scores, allowed, heads, length, total)
    weights = _probabilities(graph, spec, scores, heads)
    seen |= {"masked": scores, "weights": weights}
    outs = [graph.op("MatMul", weights, values)]
    outputs = [
        info("attended", kind, ["B", heads, length, spec.value_features]),
        info("key", kind, ["B", spec.groups, total, spec.features]),
    ]
    if spec.products == 2:
        outs.append(graph.op("MatMul", weights, _expanded(graph, spec, "key", spec.features)))
        outputs.append(info("attended_keys", kind, ["B", heads, length, spec.features]))
    if spec.guard == "rows" and allowed is not None:
        counted = graph.op("Cast", allowed, to=int(TensorProto.FLOAT))
        count = graph.op("ReduceSum", counted, graph.ints(-1), keepdims=1)
        nothing = graph.op("Less", count, graph.array(np.asarray(1.0, np.float32)))
        outs = [graph.op("Where", nothing, graph.number(0.0), out) for out in outs]
    for out, name in zip(outs, ("attended", "attended_keys"), strict=False):
        graph.nodes.append(helper.make_node("Identity", [out], [name], name=f"result_{name}"))
    if spec.exposed != "none":
        graph.nodes.append(helper.make_node("Neg", [seen[spec.exposed]], ["exposed"], name="look"))
        outputs.append(info("exposed", kind, ["B", heads, length, total]))
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in graph.constants.items()]
    proto = helper.make_graph(graph.nodes, "attention", inputs, outputs, constants)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _expanded(graph: _Graph, spec: AttentionSpec, value: str, features: int) -> str:
    if spec.repeats == 1:
        return value
    heads = spec.groups * spec.repeats
    apart = graph.op("Unsqueeze", value, graph.ints(2))
    if spec.expand == "tile":
        spread = graph.op("Tile", apart, graph.ints(1, 1, spec.repeats, 1, 1))
        return graph.op("Reshape", spread, graph.ints(0, heads, -1, features))
    sizes = graph.op("Shape", value)
    batch = graph.op("Slice", sizes, graph.ints(0), graph.ints(1))
    length = graph.op("Slice", sizes, graph.ints(2), graph.ints(3))
    target = graph.op(
        "Concat", batch, graph.ints(spec.groups), graph.ints(spec.repeats), length, graph.ints(features), axis=0
    )
    spread = graph.op("Expand", apart, target)
    merged = graph.op("Concat", batch, graph.ints(heads), length, graph.ints(features), axis=0)
    return graph.op("Reshape", spread, merged)


def _transposed(graph: _Graph, spec: AttentionSpec, keys: str, heads: int) -> str:
    if spec.keys == "transpose":
        return graph.op("Transpose", keys, perm=[0, 1, 3, 2])
    sizes = graph.op("Shape", keys)
    length = graph.op("Slice", sizes, graph.ints(-2), graph.ints(-1))
    flat = graph.op("Reshape", keys, graph.op("Concat", graph.ints(-1), length, graph.ints(spec.features), axis=0))
    turned = graph.op("Transpose", flat, perm=[0, 2, 1])
    front = graph.op("Slice", sizes, graph.ints(0), graph.ints(2))
    return graph.op("Reshape", turned, graph.op("Concat", front, graph.ints(spec.features), length, axis=0))


def _numbers(graph: _Graph, value: str, axis: int) -> str:
    sizes = graph.op("Shape", value)
    size = graph.op("Gather", sizes, graph.array(np.asarray(axis, np.int64)))
    zero, one = graph.array(np.asarray(0, np.int64)), graph.array(np.asarray(1, np.int64))
    return graph.op("Range", zero, size, one)


def _allowed(graph: _Graph, spec: AttentionSpec, inputs: list[onnx.ValueInfoProto], total: int | str) -> str | None:
    """Which columns each row attends: bool, ``[1, 1, S, T]`` or ``[B, 1, S, T]`` or ``[B, 1, 1, T]``."""
    if spec.mask in ("none", "bias", "given", "given_rows"):
        return None
    columns = graph.op("Unsqueeze", _numbers(graph, "key", 2), graph.ints(0, 1, 2))
    past = graph.op("Gather", graph.op("Shape", "past_key"), graph.array(np.asarray(2, np.int64)))
    rows = graph.op("Unsqueeze", graph.op("Add", _numbers(graph, "query", 2), past), graph.ints(0, 1, 3))
    allowed = graph.op("LessOrEqual", columns, rows)
    if spec.mask == "window":
        first = graph.op("Sub", rows, graph.array(np.asarray(3, np.int64)))
        allowed = graph.op("And", allowed, graph.op("Greater", columns, first))
    if spec.mask in ("padding", "keys_only", *TWO_MASKS):
        inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["B", total]))
        attended = graph.op("Unsqueeze", graph.op("Cast", "attention_mask", to=int(TensorProto.BOOL)), graph.ints(1, 2))
        graph.masks = (allowed, attended)
        if spec.mask in TWO_MASKS and spec.guard != "rows":
            return allowed
        allowed = attended if spec.mask == "keys_only" else graph.op("And", allowed, attended)
    return allowed


def _masked(
    graph: _Graph,
    spec: AttentionSpec,
    inputs: list[onnx.ValueInfoProto],
    scores: str,
    allowed: str | None,
    heads: int,
    length: int | str,
    total: int | str,
) -> str:
    kind = TensorProto.FLOAT16 if spec.half else TensorProto.FLOAT
    low = graph.number(-np.inf if spec.low == "infinite" else float(np.finfo(graph.dtype).min))
    if spec.mask in ("given", "given_rows", "bias"):
        shape = ["B", 1, length, total] if spec.mask == "given" else [length, total]
        shape = [1, heads, length, total] if spec.mask == "bias" else shape
        inputs.append(helper.make_tensor_value_info("bias", kind, shape))
        return graph.op("Add", scores, "bias")
    if allowed is None:
        return scores
    if spec.mask in TWO_MASKS:
        for how, condition in zip(spec.mask.split("_"), graph.masks, strict=True):
            if how == "where":
                scores = graph.op("Where", condition, scores, low)
            else:
                scores = graph.op("Add", scores, graph.op("Where", condition, graph.number(0.0), low))
        return scores
    if spec.mask == "bool_where":
        return graph.op("Where", allowed, scores, low)
    return graph.op("Add", scores, graph.op("Where", allowed, graph.number(0.0), low))


def _probabilities(graph: _Graph, spec: AttentionSpec, scores: str, heads: int) -> str:
    if spec.sink:
        sink = graph.array(np.linspace(-1, 1, heads).reshape(1, heads, 1, 1).astype(graph.dtype))
        sizes = graph.op("Shape", scores)
        front = graph.op("Slice", sizes, graph.ints(0), graph.ints(3))
        spread = graph.op("Expand", sink, graph.op("Concat", front, graph.ints(1), axis=0))
        scores = graph.op("Concat", scores, spread, axis=-1)
        top = graph.op("ReduceMax", scores, graph.ints(-1), keepdims=1)
        scores = graph.op("Sub", scores, top)
    weights = graph.op("Softmax", scores, axis=-1)
    if spec.guard == "nan":
        weights = graph.op("Where", graph.op("IsNaN", weights), graph.number(0.0), weights)
    if spec.sink:
        weights = graph.op("Slice", weights, graph.ints(0), graph.ints(-1), graph.ints(3))
    return weights


def feeds_of(spec: AttentionSpec, batch: int, length: int, past: int, seed: int) -> dict[str, np.ndarray]:
    """Random inputs; masks with rows that attend nothing next to rows that do."""
    generator = np.random.default_rng(seed)
    dtype = np.float16 if spec.half else np.float32
    heads, total = spec.groups * spec.repeats, past + length

    def draw(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(dtype)

    feeds = {
        "query": draw(batch, heads, length, spec.features),
        "past_key": draw(batch, spec.groups, past, spec.features),
        "past_value": draw(batch, spec.groups, past, spec.value_features),
        "new_key": draw(batch, spec.groups, length, spec.features),
        "new_value": draw(batch, spec.groups, length, spec.value_features),
    }
    if spec.mask in ("padding", "keys_only", *TWO_MASKS):
        mask = np.ones((batch, total), np.int64)
        for row in range(batch):
            width = int(generator.integers(0, total + 1)) if spec.guard == "nan" else int(generator.integers(0, total))
            side = slice(0, width) if generator.integers(2) else slice(total - width, total)
            mask[row, side] = 0
        feeds["attention_mask"] = mask
    if spec.mask in ("given", "given_rows"):
        shape = (batch, 1, length, total) if spec.mask == "given" else (length, total)
        low = -np.inf if spec.low == "infinite" else np.finfo(dtype).min
        given = np.where(generator.random(shape) < 0.5, 0, low).astype(dtype)
        given[..., 0, :] = low if spec.guard == "nan" or spec.low == "finite" else 0
        feeds["bias"] = given
    if spec.mask == "bias":
        feeds["bias"] = draw(1, heads, length, total)
    return feeds
