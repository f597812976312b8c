"""Tiny decoders as exporters write them: every head, tail, layout and interface that pruning has to see through.

A :class:`Decoder` says what to build; :func:`build` makes the model, :func:`feeds_of` inputs for it, and
:func:`decoders` draws one. The body mixes all rows (so that a row that is cut too early changes the others) and has
no attention: what matters stands behind it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.strategies.bodies import NORMS, body, norm
from tests.strategies.graphs import TABLE, B, Builder, Decoder, H, P, S, V, dims_of, entry, opset_of
from tests.strategies.heads import HEADS, product
from tests.strategies.tails import TAILS, tail

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EXTRAS", "HEADS", "LAYOUTS", "NORMS", "TAILS", "Decoder", "build", "decoders", "feeds_of", "possible"]

LAYOUTS = (
    "plain",
    "flat_const",
    "flat_of_hidden",
    "flat_of_ids",
    "flat_output",
    "flatten_op",
    "zero_entries",
    "seq_first",
    "seq_first_output",
    "four",
    "features_first",
    "head_function",
)
EXTRAS = (
    "hidden_output",
    "norm_input_output",
    "second_head",
    "log_probs",
    "value_head",
    "rows_of_logits",
    "size_of_logits",
    "router_logits",
)
TAKEN = ("last_token_indices", "lm_head/prune_last_token/rows", "lm_head/prune_last_token/row_indices")
_TWO_D = ("gemm", "gemm_trans")


_FLAT = ("flat_const", "flat_of_hidden", "flat_of_ids", "flat_output", "flatten_op")
_THREE_D = ("plain", "zero_entries", "seq_first", "seq_first_output", "features_first", "four")


def possible(decoder: Decoder) -> bool:
    """Whether the parts go together in one model."""
    d, tail, extras = decoder, set(decoder.tail), set(decoder.extras)
    by_row = tail & {"row_scale", "shared_row_scale"}
    beside = extras - {"hidden_output", "norm_input_output"}
    bare = d.layout in ("flat_output", "four", "seq_first_output")
    plain_head = d.head in ("matmul", "tied", "chunks", "lora", "swapped", *_TWO_D)
    newer_head = d.head in ("qdq_weight", "qdq_all", "einsum", "einsum_dots")
    impossible = (
        d.packed and (d.mask or d.positions is not None or d.past or d.sizes in ("one", "own")),
        d.packed and d.layout not in ("plain", "head_function"),
        d.packed and (d.head in ("conv", "qlinear", "qdq_all", "einsum_dots") or "shared_row_scale" in tail),
        d.head in _TWO_D and not (d.layout in _FLAT or (d.packed and d.layout == "plain")),
        d.head == "conv" and d.layout not in _THREE_D,
        d.half and not plain_head,
        d.half and (d.norm in ("function", "skip", "simplified") or d.opset < 13),
        d.layout == "features_first" and (tail or extras),
        d.layout == "head_function" and (d.head != "matmul" or extras or d.opset < 13),
        bare and (by_row or beside),
        d.opset < 13 and (newer_head or d.norm == "function"),
        d.opset < 17 and d.norm == "layer_op",
    )
    return not any(impossible)


# ---- layout -------------------------------------------------------------------------------------------------------


def _lay_out(g: Builder, hidden: str, features: int) -> tuple[str, int]:
    """The head in its layout: what it gives, and the rank of it."""
    layout = g.d.layout
    if g.d.packed and layout == "plain":
        return product(g, hidden, 2), 2
    match layout:
        case "plain":
            return product(g, hidden, 3), 3
        case "features_first":
            return g.op("Transpose", product(g, hidden, 3), perm=[0, 2, 1]), 3
        case "head_function":
            body = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Tanh", ["p"], ["y"])]
            g.functions.append(helper.make_function("local", "Head", ["x", "w"], ["y"], body, [opset_of(g.d)]))
            name = g.weight(H, V, name="lm_head.weight")
            return g.op("Head", hidden, name, domain="local"), 2 if g.d.packed else 3
        case "zero_entries":
            grouped = g.op("Reshape", hidden, g.ints(0, 0, 2, H // 2))
            return product(g, g.op("Reshape", grouped, g.ints(0, 0, H)), 3), 3
        case "four":
            four = g.with_axes("Unsqueeze", hidden, [1])
            return _product_four(g, four), 4
        case "seq_first" | "seq_first_output":
            turned = g.op("Transpose", hidden, perm=[1, 0, 2])
            made = product(g, turned, 3)
            return (g.op("Transpose", made, perm=[1, 0, 2]) if layout == "seq_first" else made), 3
    if layout == "flatten_op":
        flat = g.op("Flatten", hidden, axis=2)
    elif layout == "flat_const":
        flat = g.op("Reshape", hidden, g.ints(-1, H))
    else:
        source = hidden if layout in ("flat_of_hidden", "flat_output") or g.d.tokens == "embeds" else "input_ids"
        batch, rows = (entry(g, source, axis) for axis in (0, 1))
        shape = g.op("Concat", g.op("Mul", batch, rows), g.ints(H), axis=0)
        flat = g.op("Reshape", hidden, shape)
    made = product(g, flat, 2)
    if layout == "flat_output":
        return made, 2
    source = "input_ids" if layout == "flat_of_ids" and g.d.tokens != "embeds" else hidden
    batch, rows = (entry(g, source, axis) for axis in (0, 1))
    return g.op("Reshape", made, g.op("Concat", batch, rows, g.ints(features), axis=0)), 3


def _product_four(g: Builder, four: str) -> str:
    if g.d.head in ("matmul", "tied", "chunks", "lora", "swapped", "half_cast", "einsum_dots", "nbits"):
        return product(g, four, 4)
    return g.op("MatMul", four, g.weight(H, V, name="lm_head.weight"))


# ---- the model ----------------------------------------------------------------------------------------------------


def build(decoder: Decoder) -> onnx.ModelProto:
    """The model."""
    g = Builder(decoder)
    d = decoder
    if d.taken:
        for name in TAKEN:
            g.input(name, TensorProto.FLOAT, [1])
    hidden = norm(g, body(g))
    features = TABLE if d.head == "tied" else V
    made, rank = _lay_out(g, hidden, features)
    logits, features = tail(g, made, rank, features)
    batch, seq, _ = dims_of(d, "ids")
    lead = [S if d.sizes == "static" else seq] if d.packed else [batch, seq]
    dims: list[Any] = [*lead, features]
    if d.layout == "seq_first_output":
        dims = [seq, batch, features]
    if d.layout == "flat_output":
        dims = [B * S if d.sizes == "static" else "rows", features]
    if d.layout == "features_first":
        dims = [batch, features, seq]
    if d.layout == "four":
        dims = [batch, 1, seq, features]
    if d.layout != "features_first":
        g.info(made, [*dims[:-1], TABLE if d.head == "tied" else V])
    elem = TensorProto.FLOAT if "cast" in d.tail else g.elem
    g.op("Identity" if not d.taken else "Abs", logits, name="logits")
    g.output("logits", elem, dims)
    _extras(g, hidden, [*lead])
    graph = helper.make_graph(g.nodes, "decoder", g.inputs, g.outputs, g.initializers, value_info=g.infos)
    imports = [opset_of(d)]
    if any(node.domain == "com.microsoft" for node in g.nodes):
        imports.append(helper.make_opsetid("com.microsoft", 1))
    if g.functions:
        imports.append(helper.make_opsetid("local", 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=g.functions)


def _extras(g: Builder, hidden: str, lead: list[Any]) -> None:
    d = g.d
    for extra in d.extras:
        match extra:
            case "hidden_output":
                g.op("Identity", hidden, name="hidden_copy")
                g.output("hidden_copy", g.elem, [*lead, H])
            case "norm_input_output":
                g.output("residual", g.elem, [*lead, H])
            case "second_head":
                g.op("MatMul", hidden, g.weight(H, 7), name="draft_logits")
                g.output("draft_logits", g.elem, [*lead, 7])
            case "log_probs":
                g.op("Neg", "logits", name="logits_negated")
                elem = g.outputs[0].type.tensor_type.elem_type
                features = g.outputs[0].type.tensor_type.shape.dim[-1].dim_value
                g.output("logits_negated", elem, [*lead, features])
            case "value_head":
                g.op("MatMul", hidden, g.weight(H, 1), name="value")
                g.output("value", g.elem, [*lead, 1])
            case "rows_of_logits":
                rows = g.op("Gather", g.op("Shape", "logits"), g.const(0 if d.packed else 1, dtype=np.int64))
                g.op("Range", g.const(0, dtype=np.int64), rows, g.const(1, dtype=np.int64), name="row_numbers")
                g.output("row_numbers", TensorProto.INT64, None)
            case "size_of_logits":
                g.op("Shape", "logits", name="logits_shape")
                g.output("logits_shape", TensorProto.INT64, None)
            case "router_logits":
                g.op("MatMul", "residual", g.weight(H, 4), name="router_logits")
                g.output("router_logits", g.elem, [*lead, 4])


# ---- feeds --------------------------------------------------------------------------------------------------------


def feeds_of(decoder: Decoder, *, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """A few sets of inputs: several rows, one row, padding on both sides, a row of padding only."""
    d = decoder
    plans = [(B, S, P), (3, 1, 2), (1, 4, 0)]
    if d.sizes == "static":
        plans = [(B, S, P)] * 2
    if d.sizes == "one":
        plans = [(1, S, P), (1, 1, 2)]
    return [_feeds(d, plan, np.random.default_rng(seed + number)) for number, plan in enumerate(plans)]


def _feeds(d: Decoder, plan: tuple[int, int, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    batch, length, past = plan
    past = past if d.past else 0
    dtype = np.float16 if d.half else np.float32
    feeds: dict[str, np.ndarray] = {
        "sharpen": np.array(rng.random() < 0.5),
        "inputs_embeds": (rng.standard_normal((batch, length, H)) * 0.5).astype(dtype),
        "past_key_values": (rng.standard_normal((batch, past, H)) * 0.3).astype(dtype),
    }
    lead = (length,) if d.packed else (batch, length)
    feeds["input_ids"] = rng.integers(0, TABLE, lead).astype(np.int32 if d.tokens == "ids32" else np.int64)
    first, real = rng.integers(0, length, batch), rng.integers(1, length + 1, batch)
    columns = np.arange(length)[None, :]
    attended = (columns >= first[:, None]) if rng.random() < 0.5 else (columns < real[:, None])
    if batch > 1 and past:
        attended[-1] = False
    mask = np.concatenate([np.ones((batch, past), bool), attended], axis=1)
    if d.mask is not None:
        feeds["attention_mask"] = mask.astype(d.mask)
    if d.positions is not None:
        counted = np.where(attended, np.cumsum(attended, axis=1) - 1, -1)
        planes = d.positions or 1
        stacked = np.stack([counted if plane == 0 else np.maximum(counted - plane, -1) for plane in range(planes)])
        feeds["position_ids"] = (stacked if d.positions else counted).astype(np.int64)
    feeds |= {name: np.zeros(1, np.float32) for name in TAKEN if d.taken}
    return feeds


# ---- drawing ------------------------------------------------------------------------------------------------------


def _subset(items: Sequence[str], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(items), max_size=most, unique=True).map(tuple)


def decoders() -> st.SearchStrategy[Decoder]:
    """Decoders whose parts go together."""
    drawn = st.builds(
        Decoder,
        tokens=st.sampled_from(["ids", "ids32", "embeds", "packed"]),
        sizes=st.sampled_from(["symbolic", "symbolic", "own", "unnamed", "one", "static"]),
        mask=st.sampled_from([None, "int64", "int32", "bool", "float32"]),
        positions=st.sampled_from([None, 0, 3, 4]),
        past=st.booleans(),
        norm=st.sampled_from(NORMS),
        layout=st.sampled_from(LAYOUTS),
        head=st.sampled_from(HEADS),
        tail=_subset(TAILS, 3).map(lambda steps: tuple(sorted(steps, key="cast".__eq__))),
        extras=_subset(EXTRAS, 2),
        opset=st.sampled_from([11, 12, 13, 18, 21]),
        half=st.sampled_from([False, False, False, True]),
        declared=st.booleans(),
        taken=st.sampled_from([False, False, True]),
    )
    return drawn.map(_made_possible)


def _made_possible(decoder: Decoder) -> Decoder:
    """The decoder with parts put back to their defaults until they go together."""
    plain = Decoder()
    for field in ("extras", "tail", "half", "norm", "layout", "head", "tokens", "sizes", "mask", "positions", "past"):
        if possible(decoder):
            return decoder
        if possible(dataclasses.replace(decoder, **{field: getattr(plain, field)})):
            return dataclasses.replace(decoder, **{field: getattr(plain, field)})
    for field in ("extras", "tail", "half", "norm", "layout", "head", "tokens", "opset"):
        decoder = dataclasses.replace(decoder, **{field: getattr(plain, field)})
        if possible(decoder):
            return decoder
    return plain
