"""Tiny decoders as exporters write them: every head, tail, layout and interface that pruning has to see through.

A :class:`Decoder` says what to build; :func:`build` makes the model, :func:`feeds_of` inputs for it, and
:func:`decoders` draws one. The body mixes all rows (so that a row that is cut too early changes the others) and has
no attention: what matters stands behind it.

Alphabet: B batch, S query length, P past, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EXTRAS", "HEADS", "LAYOUTS", "NORMS", "TAILS", "Decoder", "build", "decoders", "feeds_of"]

H, V, TABLE = 32, 12, 16
B, S, P = 2, 5, 3

HEADS = (
    "matmul",
    "tied",
    "gemm",
    "gemm_trans",
    "fused_matmul",
    "nbits",
    "integer",
    "integer_to_float",
    "dynamic_matmul",
    "qdq_weight",
    "qdq_all",
    "qlinear",
    "einsum",
    "einsum_dots",
    "chunks",
    "lora",
    "swapped",
    "conv",
    "half_cast",
)
TAILS = (
    "bias",
    "mul",
    "div",
    "softcap",
    "where",
    "expanded_mask",
    "slice",
    "slice_all",
    "concat",
    "cast",
    "softmax",
    "log_softmax",
    "identity",
    "if",
    "pad",
    "row_scale",
    "shared_row_scale",
    "tile",
)
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
_TWO_D = ("gemm", "gemm_trans")
_CONTRIB = ("fused_matmul", "nbits", "integer_to_float", "dynamic_matmul")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What to build.

    Attributes:
        tokens: ``ids``, ``ids32``, ``embeds`` or ``packed``.
        sizes: ``symbolic``, ``own`` (every input names its sizes differently), ``unnamed``, ``one`` (B = 1 static)
            or ``static``.
        mask: element type of the attention mask ``[B, P + S]`` (``int64``, ``int32``, ``bool``, ``float32``), or none.
        positions: rank of the position ids and their leading size: 0 for ``[B, S]``, 3, 4, or None.
        past: whether a cache of P rows is fed.
        norm: spelling of the final normalisation.
        layout: how the head is laid out.
        head: the product.
        tail: what follows it.
        extras: what else reads the hidden state or the logits.
        opset: of the default domain.
        half: float16 weights and activations.
        declared: whether values in between declare their shapes.
        taken: whether names that surgery would like are in use.
    """

    tokens: str = "ids"
    sizes: str = "symbolic"
    mask: str | None = None
    positions: int | None = None
    past: bool = False
    norm: str = "rms"
    layout: str = "plain"
    head: str = "matmul"
    tail: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    opset: int = 18
    half: bool = False
    declared: bool = False
    taken: bool = False

    @property
    def packed(self) -> bool:
        return self.tokens == "packed"


def possible(decoder: Decoder) -> bool:
    """Whether the parts go together in one model."""
    d = decoder
    if d.packed and (d.mask or d.positions is not None or d.past or d.sizes in ("one", "own")):
        return False
    if d.packed and d.layout not in ("plain", "head_function"):
        return False
    if d.head in _TWO_D and d.layout not in (
        "flat_const",
        "flat_of_hidden",
        "flat_of_ids",
        "flat_output",
        "flatten_op",
    ):
        return d.packed and d.layout == "plain"
    if d.half and d.head not in ("matmul", "tied", "chunks", "lora", "swapped", *_TWO_D):
        return False
    if d.half and (d.norm in ("function", "skip", "simplified") or d.opset < 13):
        return False
    if d.head in ("conv", "qlinear", "qdq_all", "einsum_dots") and d.packed:
        return False
    if d.head == "conv" and d.layout not in ("plain", "zero_entries", "seq_first", "seq_first_output", "four"):
        return False
    if d.layout in ("flat_output", "four", "seq_first_output") and set(d.tail) & {"row_scale", "shared_row_scale"}:
        return False
    if d.layout in ("flat_output", "four", "seq_first_output") and set(d.extras) - {
        "hidden_output",
        "norm_input_output",
    }:
        return False
    if d.layout == "head_function" and (d.head != "matmul" or d.extras):
        return False
    if d.packed and "shared_row_scale" in d.tail:
        return False
    old = d.opset < 13
    if old and (d.head in ("qdq_weight", "qdq_all", "einsum", "einsum_dots") or d.norm in ("layer_op", "function")):
        return False
    if d.opset < 17 and d.norm == "layer_op":
        return False
    return not (old and d.layout == "head_function")


class _Graph:
    """A graph in the making."""

    def __init__(self, decoder: Decoder) -> None:
        self.d = decoder
        self.rng = np.random.default_rng(3)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.dtype = np.float16 if decoder.half else np.float32
        self._count = 0

    @property
    def elem(self) -> int:
        return TensorProto.FLOAT16 if self.d.half else TensorProto.FLOAT

    def op(
        self, op_type: str, *inputs: str, name: str = "", domain: str = "", outputs: int = 1, **attributes: Any
    ) -> str:
        """A node; the name of its first output (others have ``.1`` and so on behind it)."""
        self._count += 1
        base = name or f"{op_type.lower()}_{self._count}"
        made = [base, *(f"{base}.{number}" for number in range(1, outputs))]
        node_name = "" if self.d.taken else f"node_{base}"
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name=node_name, domain=domain, **attributes))
        return base

    def const(self, array: Any, name: str = "", dtype: Any = None) -> str:
        self._count += 1
        name = name or f"const_{self._count}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def ints(self, *items: int) -> str:
        return self.const(items, dtype=np.int64)

    def weight(self, *shape: int, name: str = "") -> str:
        return self.const(self.rng.standard_normal(shape) * 0.4, name, self.dtype)

    def scalar(self, number: float) -> str:
        return self.const(number, dtype=self.dtype)

    def with_axes(self, op_type: str, value: str, axes: Sequence[int], since: int = 13, **attributes: Any) -> str:
        """An operator whose axes are an attribute before opset ``since`` and an operand from then on."""
        if self.d.opset < since:
            return self.op(op_type, value, axes=list(axes), **attributes)
        return self.op(op_type, value, self.ints(*axes), **attributes)

    def mean(self, value: str, axis: int) -> str:
        return self.with_axes("ReduceMean", value, [axis], since=18, keepdims=1)

    def input(self, name: str, elem: int, dims: Sequence[int | str | None]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, elem, dims))
        return name

    def output(self, name: str, elem: int, dims: Sequence[int | str | None] | None) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, elem, dims))

    def info(self, name: str, dims: Sequence[int | str | None]) -> None:
        if self.d.declared:
            self.infos.append(helper.make_tensor_value_info(name, self.elem, dims))


def _dims(decoder: Decoder, owner: str) -> tuple[Any, Any, Any]:
    """B, S and P + S as the input ``owner`` declares them."""
    match decoder.sizes:
        case "static":
            return B, S, (P if decoder.past else 0) + S
        case "one":
            return 1, "seq", "past + seq" if decoder.past else "seq"
        case "own":
            return f"{owner}_b", f"{owner}_s", f"{owner}_t"
        case "unnamed":
            return None, None, None
    return "batch", "seq", "past + seq" if decoder.past else "seq"


# ---- body ---------------------------------------------------------------------------------------------------------


def _body(g: _Graph) -> str:
    """Hidden states ``[B, S, H]`` (``[T, H]`` packed) that depend on every input and mix all rows."""
    d = g.d
    batch, seq, _ = _dims(d, "ids")
    table = g.weight(TABLE, H, name="embed")
    if d.packed:
        hidden = g.op("Gather", table, g.input("input_ids", TensorProto.INT64, [seq if d.sizes != "static" else S]))
    elif d.tokens == "embeds":
        hidden = g.op("Identity", g.input("inputs_embeds", g.elem, [batch, seq, H]))
    else:
        elem = TensorProto.INT32 if d.tokens == "ids32" else TensorProto.INT64
        hidden = g.op("Gather", table, g.input("input_ids", elem, [batch, seq]))
    if d.positions is not None:
        b, s, _ = _dims(d, "pos")
        lead = [d.positions] if d.positions else []
        positions = g.input("position_ids", TensorProto.INT64, [*lead, b, s])
        where = g.op("Gather", g.weight(TABLE, H), positions)
        if d.positions:
            where = g.with_axes("ReduceMean", where, [0], since=18, keepdims=0)
        hidden = g.op("Add", hidden, where)
    if d.mask is not None:
        b, _, total = _dims(d, "mask")
        elem = helper.np_dtype_to_tensor_dtype(np.dtype(d.mask))
        mask = g.input("attention_mask", elem, [b, total])
        kept = g.op("Cast", mask, to=g.elem)
        if d.mask == "float32":
            kept = g.op("Sub", g.scalar(1.0), kept)
        kept = g.with_axes("Unsqueeze", g.mean(kept, 1), [2])
        hidden = g.op("Add", hidden, kept)
    if d.past:
        b, _, _ = _dims(d, "past")
        past = g.input("past_key_values", g.elem, [b, P if d.sizes == "static" else "past", H])
        hidden = g.op("Add", hidden, g.with_axes("ReduceSum", past, [1], keepdims=1))
    mixed = g.op("Add", hidden, g.mean(hidden, 0 if d.packed else 1), name="mixed")
    cap = g.const(3.0, "cap", g.dtype)
    return g.op("Mul", g.op("Tanh", g.op("Div", mixed, cap)), cap, name="residual")


def _norm(g: _Graph, x: str) -> str:
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
            g.functions.append(helper.make_function("local", "Norm", ["x", "w"], ["y"], body, [_opset(d)]))
            return g.op("Norm", x, w, domain="local")
    raise AssertionError(d.norm)


# ---- head ---------------------------------------------------------------------------------------------------------


def _product(g: _Graph, x: str, *, rank: int, suffix: str = "") -> str:
    """``x [..., H]`` times the vocabulary matrix: ``[..., V]``."""
    d, name = g.d, f"lm_head{suffix}.weight"
    match d.head:
        case "matmul":
            return g.op("MatMul", x, g.weight(H, V, name=name))
        case "tied":
            table = "embed" if not suffix else g.weight(TABLE, H, name=name)
            return g.op("MatMul", x, g.op("Transpose", table, perm=[1, 0]))
        case "gemm":
            return g.op("Gemm", x, g.weight(H, V, name=name), alpha=0.5)
        case "gemm_trans":
            return g.op("Gemm", x, g.weight(V, H, name=name), g.weight(V), transB=1, beta=2.0)
        case "fused_matmul":
            return g.op("FusedMatMul", x, g.weight(V, H, name=name), domain="com.microsoft", transB=1, alpha=0.5)
        case "nbits":
            packed = g.const(g.rng.integers(0, 256, (V, 2, 8)), name, np.uint8)
            scales = g.const(g.rng.random(V * 2) * 0.1, dtype=np.float32)
            return g.op("MatMulNBits", x, packed, scales, domain="com.microsoft", K=H, N=V, bits=4, block_size=16)
        case "integer" | "integer_to_float" | "dynamic_matmul":
            return _integer_product(g, x, name)
        case "qdq_weight":
            scales = g.const(g.rng.random(V) * 0.02 + 0.01, dtype=np.float32)
            stored = g.const(g.rng.integers(-100, 100, (V, H)), name, np.int8)
            plain = g.op("DequantizeLinear", stored, scales, g.const(np.zeros(V), dtype=np.int8), axis=0)
            return g.op("MatMul", x, g.op("Transpose", plain, perm=[1, 0]))
        case "qdq_all":
            scale, zero = g.const(0.05, dtype=np.float32), g.const(120, dtype=np.uint8)
            seen = g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero), scale, zero)
            stored = g.const(g.rng.integers(-100, 100, (H, V)), name, np.int8)
            plain = g.op("DequantizeLinear", stored, g.const(0.02, dtype=np.float32), g.const(0, dtype=np.int8))
            product = g.op("MatMul", seen, plain)
            return g.op("DequantizeLinear", g.op("QuantizeLinear", product, scale, zero), scale, zero)
        case "qlinear":
            scale, zero = g.const(0.05, dtype=np.float32), g.const(120, dtype=np.uint8)
            stored = g.const(g.rng.integers(0, 200, (H, V)), name, np.uint8)
            seen = g.op("QuantizeLinear", x, scale, zero)
            product = g.op("QLinearMatMul", seen, scale, zero, stored, scale, zero, scale, zero)
            return g.op("DequantizeLinear", product, scale, zero)
        case "einsum":
            letters = "bts"[: rank - 1]
            return g.op("Einsum", x, g.weight(V, H, name=name), equation=f"{letters}h,vh->{letters}v")
        case "einsum_dots":
            return g.op("Einsum", x, g.weight(V, H, name=name), equation="...h,vh->...v")
        case "chunks":
            parts = [g.op("MatMul", x, g.weight(H, size)) for size in (5, V - 5)]
            return g.op("Concat", *parts, axis=-1)
        case "lora":
            down = g.op("MatMul", x, g.weight(H, 4))
            up = g.op("MatMul", g.op("Mul", down, g.scalar(0.5)), g.weight(4, V))
            return g.op("Add", g.op("MatMul", x, g.weight(H, V, name=name)), up)
        case "swapped":
            axes = [*range(rank - 2), rank - 1, rank - 2]
            turned = g.op("MatMul", g.weight(V, H, name=name), g.op("Transpose", x, perm=axes))
            return g.op("Transpose", turned, perm=axes)
        case "conv":
            columns = g.with_axes("Unsqueeze", g.op("Transpose", x, perm=[0, 2, 1]), [2])
            made = g.op("Conv", columns, g.weight(V, H, 1, 1, name=name))
            return g.op("Transpose", g.with_axes("Squeeze", made, [2]), perm=[0, 2, 1])
        case "half_cast":
            stored = g.const(g.rng.standard_normal((H, V)) * 0.4, name, np.float16)
            return g.op("Cast", g.op("MatMul", g.op("Cast", x, to=TensorProto.FLOAT16), stored), to=TensorProto.FLOAT)
    raise AssertionError(d.head)


def _integer_product(g: _Graph, x: str, name: str) -> str:
    stored = g.const(g.rng.integers(0, 200, (H, V)), name, np.uint8)
    scale, zero = g.const(0.02, dtype=np.float32), g.const(100, dtype=np.uint8)
    if g.d.head == "dynamic_matmul":
        return g.op("DynamicQuantizeMatMul", x, stored, scale, zero, g.weight(V), domain="com.microsoft")
    seen = g.op("DynamicQuantizeLinear", x, outputs=3)
    if g.d.head == "integer_to_float":
        inputs = (seen, stored, f"{seen}.1", scale, f"{seen}.2", zero)
        return g.op("MatMulIntegerToFloat", *inputs, domain="com.microsoft")
    summed = g.op("Cast", g.op("MatMulInteger", seen, stored, f"{seen}.2", zero), to=TensorProto.FLOAT)
    return g.op("Mul", summed, g.op("Mul", f"{seen}.1", scale))


def _tail(g: _Graph, x: str, rank: int, features: int) -> tuple[str, int, bool]:
    """What follows the product; the logits, how many there are, and whether they were cast to float32."""
    d, cast = g.d, False
    for step in d.tail:
        match step:
            case "bias":
                x = g.op("Add", x, g.weight(features))
            case "mul":
                x = g.op("Mul", x, g.scalar(0.7))
            case "div":
                x = g.op("Div", x, g.scalar(1.7))
            case "softcap":
                x = g.op("Mul", g.op("Tanh", g.op("Div", x, "cap")), "cap")
            case "where":
                allowed = g.const(g.rng.random(features) > 0.3)
                x = g.op("Where", allowed, x, g.scalar(-100.0))
            case "expanded_mask":
                allowed = g.op("Expand", g.const(g.rng.random(features) > 0.3), g.op("Shape", x))
                x = g.op("Where", allowed, x, g.scalar(-100.0))
            case "slice":
                x = g.op("Slice", x, g.ints(0), g.ints(features - 2), g.ints(-1))
                features -= 2
            case "slice_all":
                far = 2**63 - 1
                for axis in range(rank):
                    end = features - 1 if axis == rank - 1 else far
                    x = g.op("Slice", x, g.ints(0), g.ints(end), g.ints(axis), g.ints(1))
                features -= 1
            case "concat":
                sizes = g.op("Shape", x)
                lead = g.op("Slice", sizes, g.ints(0), g.ints(-1), g.ints(0))
                shape = g.op("Concat", lead, g.ints(3), axis=0)
                filler = g.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.array([-9], g.dtype)))
                x = g.op("Concat", x, filler, axis=-1)
                features += 3
            case "cast":
                if d.half and not cast:
                    x, cast = g.op("Cast", x, to=TensorProto.FLOAT), True
                    break
            case "softmax":
                x = g.op("Softmax", x, axis=rank - 1)
            case "log_softmax":
                x = g.op("LogSoftmax", x, axis=rank - 1)
            case "identity":
                x = g.op("Identity", x)
            case "if":
                x = _branches(g, x)
            case "pad":
                pads = [0] * (rank - 1) + [0] + [0] * (rank - 1) + [2]
                x = g.op("Pad", x, g.ints(*pads), g.scalar(-5.0))
                features += 2
            case "row_scale":
                scale = g.op("Sigmoid", g.mean("residual", -1))
                x = g.op("Mul", x, scale)
            case "shared_row_scale":
                scale = g.op("Sigmoid", g.mean(g.mean("residual", -1), 0))
                x = g.op("Mul", x, scale)
            case "tile":
                x = g.op("Tile", x, g.ints(*[1] * (rank - 1), 2))
                features *= 2
    return x, features, cast


def _branches(g: _Graph, x: str) -> str:
    """An If on a fed flag: the logits as they are, or halved."""
    if not any(value.name == "sharpen" for value in g.inputs):
        g.input("sharpen", TensorProto.BOOL, [])
    g._count += 1
    made = f"if_{g._count}"
    then = helper.make_graph(
        [helper.make_node("Mul", [x, "cap"], [f"{made}_then"])],
        "then",
        [],
        [helper.make_tensor_value_info(f"{made}_then", g.elem, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", [x], [f"{made}_else"])],
        "else",
        [],
        [helper.make_tensor_value_info(f"{made}_else", g.elem, None)],
    )
    return g.op("If", "sharpen", name=made, then_branch=then, else_branch=other)


# ---- layout -------------------------------------------------------------------------------------------------------


def _lay_out(g: _Graph, hidden: str, features: int) -> tuple[str, int]:
    """The head in its layout: what it gives, and the rank of it."""
    layout = g.d.layout
    if g.d.packed and layout == "plain":
        return _product(g, hidden, rank=2), 2
    match layout:
        case "plain":
            return _product(g, hidden, rank=3), 3
        case "head_function":
            body = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Tanh", ["p"], ["y"])]
            g.functions.append(helper.make_function("local", "Head", ["x", "w"], ["y"], body, [_opset(g.d)]))
            name = g.weight(H, V, name="lm_head.weight")
            return g.op("Head", hidden, name, domain="local"), 2 if g.d.packed else 3
        case "zero_entries":
            grouped = g.op("Reshape", hidden, g.ints(0, 0, 2, H // 2))
            return _product(g, g.op("Reshape", grouped, g.ints(0, 0, H)), rank=3), 3
        case "four":
            four = g.with_axes("Unsqueeze", hidden, [1])
            return _product_four(g, four), 4
        case "seq_first" | "seq_first_output":
            turned = g.op("Transpose", hidden, perm=[1, 0, 2])
            made = _product(g, turned, rank=3)
            return (g.op("Transpose", made, perm=[1, 0, 2]) if layout == "seq_first" else made), 3
    if layout == "flatten_op":
        flat = g.op("Flatten", hidden, axis=2)
    elif layout == "flat_const":
        flat = g.op("Reshape", hidden, g.ints(-1, H))
    else:
        source = hidden if layout in ("flat_of_hidden", "flat_output") or g.d.tokens == "embeds" else "input_ids"
        batch, rows = (_entry(g, source, axis) for axis in (0, 1))
        shape = g.op("Concat", g.op("Mul", batch, rows), g.ints(H), axis=0)
        flat = g.op("Reshape", hidden, shape)
    made = _product(g, flat, rank=2)
    if layout == "flat_output":
        return made, 2
    source = "input_ids" if layout == "flat_of_ids" and g.d.tokens != "embeds" else hidden
    batch, rows = (_entry(g, source, axis) for axis in (0, 1))
    return g.op("Reshape", made, g.op("Concat", batch, rows, g.ints(features), axis=0)), 3


def _product_four(g: _Graph, four: str) -> str:
    if g.d.head in ("matmul", "tied", "chunks", "lora", "swapped", "half_cast", "einsum_dots", "nbits"):
        return _product(g, four, rank=4)
    return g.op("MatMul", four, g.weight(H, V, name="lm_head.weight"))


def _entry(g: _Graph, value: str, axis: int) -> str:
    """The size of one axis as a list, the long way that TorchScript takes."""
    size = g.op("Gather", g.op("Shape", value), g.const(axis, dtype=np.int64), axis=0)
    return g.with_axes("Unsqueeze", size, [0])


# ---- the model ----------------------------------------------------------------------------------------------------


def _opset(decoder: Decoder) -> onnx.OperatorSetIdProto:
    return helper.make_opsetid("", decoder.opset)


def build(decoder: Decoder) -> onnx.ModelProto:
    """The model."""
    g = _Graph(decoder)
    d = decoder
    if d.taken:
        for name in ("last_token_indices", "lm_head/prune_last_token/rows", "lm_head/prune_last_token/row_indices"):
            g.input(name, TensorProto.FLOAT, [1])
    hidden = _norm(g, _body(g))
    features = TABLE if d.head == "tied" else V
    made, rank = _lay_out(g, hidden, features)
    logits, features, cast = _tail(g, made, rank, features)
    batch, seq, _ = _dims(d, "ids")
    lead = [S if d.sizes == "static" else seq] if d.packed else [batch, seq]
    if d.layout == "seq_first_output":
        lead = [seq, batch]
    dims: list[Any] = [*lead, features]
    if d.layout == "flat_output":
        dims = [B * S if d.sizes == "static" else "rows", features]
    if d.layout == "four":
        dims = [batch, 1, seq, features]
    g.info(made, [*dims[:-1], TABLE if d.head == "tied" else V])
    elem = TensorProto.FLOAT if cast else g.elem
    g.op("Identity" if not d.taken else "Abs", logits, name="logits")
    g.output("logits", elem, dims)
    _extras(g, hidden, [*lead])
    graph = helper.make_graph(g.nodes, "decoder", g.inputs, g.outputs, g.initializers, value_info=g.infos)
    imports = [_opset(d)]
    if any(node.domain == "com.microsoft" for node in g.nodes):
        imports.append(helper.make_opsetid("com.microsoft", 1))
    if g.functions:
        imports.append(helper.make_opsetid("local", 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=g.functions)


def _extras(g: _Graph, hidden: str, lead: list[Any]) -> None:
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
    for name in ("last_token_indices", "lm_head/prune_last_token/rows", "lm_head/prune_last_token/row_indices"):
        feeds[name] = np.zeros(1, np.float32)
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
        tail=_subset(TAILS, 3),
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
