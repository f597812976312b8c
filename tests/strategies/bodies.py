"""Decoder bodies without attention, and final normalisations in every spelling."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.strategies.graphs import TABLE, Builder, H, P, S, dims_of, opset_of

__all__ = ["NORMS", "body", "norm"]

NORMS = (
    "none",
    "rms",
    "rms_pow",
    "rms_square",
    "rms_div",
    "rms_casts",
    "layer",
    "layer_op",
    "simplified",
    "skip",
    "function",
)


def body(g: Builder) -> str:
    """Hidden states ``[B, S, H]`` (``[T, H]`` packed) that depend on every input and mix all rows."""
    d = g.d
    batch, seq, _ = dims_of(d, "ids")
    table = g.weight(TABLE, H, name="embed")
    if d.packed:
        hidden = g.op("Gather", table, g.input("input_ids", TensorProto.INT64, [seq if d.sizes != "static" else S]))
    elif d.tokens == "embeds":
        hidden = g.op("Identity", g.input("inputs_embeds", g.elem, [batch, seq, H]))
    else:
        elem = TensorProto.INT32 if d.tokens == "ids32" else TensorProto.INT64
        hidden = g.op("Gather", table, g.input("input_ids", elem, [batch, seq]))
    if d.positions is not None:
        b, s, _ = dims_of(d, "pos")
        lead = [d.positions] if d.positions else []
        positions = g.input("position_ids", TensorProto.INT64, [*lead, b, s])
        where = g.op("Gather", g.weight(TABLE, H), positions)
        if d.positions:
            where = g.with_axes("ReduceMean", where, [0], since=18, keepdims=0)
        hidden = g.op("Add", hidden, where)
    if d.mask is not None:
        b, _, total = dims_of(d, "mask")
        elem = helper.np_dtype_to_tensor_dtype(np.dtype(d.mask))
        mask = g.input("attention_mask", elem, [b, total])
        kept = g.op("Cast", mask, to=g.elem)
        if d.mask == "float32":
            kept = g.op("Sub", g.scalar(1.0), kept)
        kept = g.with_axes("Unsqueeze", g.mean(kept, 1), [2])
        hidden = g.op("Add", hidden, kept)
    if d.past:
        b, _, _ = dims_of(d, "past")
        past = g.input("past_key_values", g.elem, [b, P if d.sizes == "static" else "past", H])
        hidden = g.op("Add", hidden, g.with_axes("ReduceSum", past, [1], keepdims=1))
    mixed = g.op("Add", hidden, g.mean(hidden, 0 if d.packed else 1), name="mixed")
    cap = g.const(3.0, "cap", g.dtype)
    return g.op("Mul", g.op("Tanh", g.op("Div", mixed, cap)), cap, name="residual")


def norm(g: Builder, x: str) -> str:
    """The final normalisation of ``x [..., H]``."""
    d, w = g.d, g.weight(H, name="norm.weight")
    eps = g.scalar(1e-3)
    match d.norm:
        case "none":
            return x
        case "rms" | "rms_pow" | "rms_square" | "rms_div" | "rms_casts":
            source = g.op("Cast", x, to=TensorProto.FLOAT) if d.norm == "rms_casts" else x
            if d.norm == "rms_casts":
                eps = g.const(1e-3, dtype=np.float32)
            two = g.const(2.0, dtype=np.float32)
            square = g.op("Mul", source, source) if d.norm == "rms_square" else g.op("Pow", source, two)
            mean = g.op("Add", g.mean(square, -1), eps)
            if d.norm == "rms_pow":
                scaled = g.op("Mul", source, g.op("Pow", mean, g.const(-0.5, dtype=np.float32)))
            elif d.norm == "rms_div":
                one = g.scalar(1.0)
                scaled = g.op("Mul", source, g.op("Div", one, g.op("Sqrt", mean)))
            else:
                scaled = g.op("Mul", source, g.op("Reciprocal", g.op("Sqrt", mean)))
            if d.norm == "rms_casts":
                scaled = g.op("Cast", scaled, to=g.elem)
            return g.op("Mul", w, scaled)
        case "layer":
            centred = g.op("Sub", x, g.mean(x, -1))
            variance = g.mean(g.op("Pow", centred, g.const(2.0, dtype=np.float32)), -1)
            scaled = g.op("Div", centred, g.op("Sqrt", g.op("Add", variance, eps)))
            return g.op("Add", g.op("Mul", scaled, w), g.weight(H))
        case "layer_op":
            return g.op("LayerNormalization", x, w, g.weight(H), axis=-1)
        case "simplified":
            return g.op("SimplifiedLayerNormalization", x, w, axis=-1, epsilon=1e-3)
        case "skip":
            skip = g.op("Sigmoid", x)
            return g.op("SkipSimplifiedLayerNormalization", x, skip, w, domain="com.microsoft", outputs=4, epsilon=1e-3)
        case "function":
            body = [
                helper.make_node("Mul", ["x", "x"], ["square"]),
                helper.make_node("Constant", [], ["axes"], value_ints=[-1]),
                helper.make_node("ReduceMean", ["square", "axes"], ["mean"])
                if d.opset >= 18
                else helper.make_node("ReduceMean", ["square"], ["mean"], axes=[-1]),
                helper.make_node("Sqrt", ["mean"], ["root"]),
                helper.make_node("Div", ["x", "root"], ["scaled"]),
                helper.make_node("Mul", ["scaled", "w"], ["y"]),
            ]
            g.functions.append(helper.make_function("local", "Norm", ["x", "w"], ["y"], body, [opset_of(d)]))
            return g.op("Norm", x, w, domain="local")
    raise AssertionError(d.norm)
