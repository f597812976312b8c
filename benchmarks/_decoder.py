"""A Llama-like decoder of any size in plain ONNX ops, with random weights: for measuring where no export is at hand.

Spelled as the ONNX exporter of transformers spells it at opset 20: decomposed RMSNorm, K and V expanded to the query
heads, K transposed, scale on both factors, an additive causal mask built from Range, gated MLP, an untied head.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Builder", "DecoderSize", "value_info", "write_decoder"]

_OPSET = 20


@dataclasses.dataclass(frozen=True)
class DecoderSize:
    """Sizes of a decoder.

    Attributes:
        layers: number of decoder layers.
        hidden: width of the residual stream.
        heads: query heads H.
        kv_heads: key and value heads G.
        head: size of a head D.
        inner: width of the MLP.
        vocabulary: V.
        static: caches have a fixed number of slots, which are written in place by position; else they grow.
    """

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    head: int = 64
    inner: int = 1536
    vocabulary: int = 32_000
    static: bool = False


def write_decoder(path: Path, size: DecoderSize, *, seed: int = 0) -> int:
    """Write the decoder with its weights in ``<path>.data``.

    Inputs ``input_ids`` and ``position_ids`` int64 ``[B, S]``, ``past.N.key`` and ``past.N.value`` ``[B, G, P, D]``;
    outputs ``logits`` ``[B, S, V]``, ``present.N.key`` and ``present.N.value`` ``[B, G, P + S, D]``. Where caches have a
    fixed size, both are ``[B, G, N, D]``.

    Returns:
        Number of nodes.
    """
    builder = Builder(size, np.random.default_rng(seed))
    model = builder.model()
    onnx.save_model(
        model,
        path,
        save_as_external_data=True,
        location=path.name + ".data",
        size_threshold=1024,
        convert_attribute=False,
    )
    return len(model.graph.node)


class Builder:
    """Writes the nodes of a decoder, one after the other; what stands where the MLP is may be another."""

    def __init__(self, size: DecoderSize, random: np.random.Generator) -> None:
        self._size = size
        self._random = random
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, onnx.TensorProto] = {}
        self._scope = ""

    def model(self) -> onnx.ModelProto:
        size = self._size
        rows, caches, outputs = ["B", "S"], [], []
        hidden = self._op("Gather", self._weight("embed", size.vocabulary, size.hidden, scale=1.0), "input_ids")
        mask = self._mask()
        rotary = self._rotary()
        for layer in range(size.layers):
            self._scope = f"layers.{layer}."
            names = [f"past.{layer}.key", f"past.{layer}.value"]
            before, after = ("N", "N") if size.static else ("P", "T")
            caches += [value_info(name, ["B", size.kv_heads, before, size.head]) for name in names]
            hidden, presents = self._layer(hidden, mask, rotary, names)
            outputs += [value_info(name, ["B", size.kv_heads, after, size.head]) for name in presents]
        self._scope = ""
        head = self._weight("lm_head", size.hidden, size.vocabulary)
        self._op("MatMul", self._norm(hidden, "norm"), head, output="logits")
        graph = helper.make_graph(
            self._nodes,
            "decoder",
            [value_info(name, rows, TensorProto.INT64) for name in ("input_ids", "position_ids")] + caches,
            [value_info("logits", [*rows, size.vocabulary]), *outputs],
            list(self._tensors.values()),
        )
        imports = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10, producer_name="benchmarks")

    def _layer(self, hidden: str, mask: str, rotary: tuple[str, str], past: list[str]) -> tuple[str, list[str]]:
        size = self._size
        normed = self._norm(hidden, "input_norm")
        query = self._heads(normed, "q_proj", size.heads)
        key = self._heads(normed, "k_proj", size.kv_heads)
        value = self._heads(normed, "v_proj", size.kv_heads)
        query, key = self._rotated(query, rotary), self._rotated(key, rotary)
        presents = [name.replace("past", "present") for name in past]
        key = self._cached(past[0], key, presents[0])
        value = self._cached(past[1], value, presents[1])
        key, value = self._expanded(key), self._expanded(value)
        scale = self._floats("scale", size.head**-0.25)
        key = self._op("Transpose", key, perm=[0, 1, 3, 2])
        scores = self._op("MatMul", self._op("Mul", query, scale), self._op("Mul", key, scale))
        probabilities = self._op("Softmax", self._op("Add", scores, mask), axis=-1)
        mixed = self._op("Transpose", self._op("MatMul", probabilities, value), perm=[0, 2, 1, 3])
        mixed = self._op("Reshape", mixed, self._ints("merged", [0, 0, -1]))
        hidden = self._op("Add", hidden, self._product(mixed, "o_proj", size.heads * size.head, size.hidden))
        return self._op("Add", hidden, self._mlp(self._norm(hidden, "post_norm"))), presents

    def _mlp(self, normed: str) -> str:
        size = self._size
        gate = self._product(normed, "gate_proj", size.hidden, size.inner)
        gate = self._op("Mul", gate, self._op("Sigmoid", gate))
        wide = self._op("Mul", gate, self._product(normed, "up_proj", size.hidden, size.inner))
        return self._product(wide, "down_proj", size.inner, size.hidden)

    def _cached(self, past: str, new: str, present: str) -> str:
        """The cache after the call."""
        if not self._size.static:
            return self._op("Concat", past, new, output=present, axis=-2)
        slots = self._op("Unsqueeze", "position_ids", self._ints("rows", [1, 3]))
        slots = self._op("Expand", slots, self._op("Shape", new))
        return self._op("ScatterElements", past, slots, new, output=present, axis=2)

    def _norm(self, hidden: str, name: str) -> str:
        square = self._op("Pow", hidden, self._floats("two", 2.0))
        mean = self._op("ReduceMean", square, self._ints("last", [-1]), keepdims=1)
        root = self._op("Sqrt", self._op("Add", mean, self._floats("epsilon", 1e-6)))
        scaled = self._op("Mul", hidden, self._op("Reciprocal", root))
        weight = self._tensor(f"{self._scope}{name}.weight", self._random.uniform(0.8, 1.2, self._size.hidden))
        return self._op("Mul", weight, scaled)

    def _mask(self) -> str:
        """Additive ``[1, 1, S, T]``: 0 where key column <= P + query row, the smallest float elsewhere.

        Over the slots of a fixed-size cache ``[B, 1, S, N]``, 0 where slot <= position.
        """
        zero, one = self._ints("zero", 0), self._ints("one", 1)
        low = self._floats("low", float(np.finfo(np.float32).min))
        if self._size.static:
            slots = self._op("Squeeze", self._op("Shape", "past.0.key", start=2, end=3))
            last = self._op("Unsqueeze", "position_ids", self._ints("rows", [1, 3]))
            allowed = self._op("LessOrEqual", self._op("Range", zero, slots, one), last)
            return self._op("Where", allowed, self._floats("none", 0.0), low)
        rows = self._op("Squeeze", self._op("Shape", "input_ids", start=1, end=2))
        past = self._op("Squeeze", self._op("Shape", "past.0.key", start=2, end=3))
        columns = self._op("Range", zero, self._op("Add", rows, past), one)
        last = self._op("Add", self._op("Range", zero, rows, one), past)
        allowed = self._op("LessOrEqual", columns, self._op("Unsqueeze", last, self._ints("end", [1])))
        mask = self._op("Where", allowed, self._floats("none", 0.0), low)
        return self._op("Unsqueeze", mask, self._ints("front", [0, 1]))

    def _rotary(self) -> tuple[str, str]:
        """Cosines and sines ``[B, 1, S, D]``."""
        head = self._size.head
        frequencies = 10_000.0 ** -(np.arange(0, head, 2) / head)
        positions = self._op(
            "Cast", self._op("Unsqueeze", "position_ids", self._ints("third", [2])), to=TensorProto.FLOAT
        )
        angles = self._op("Mul", positions, self._tensor("inv_freq", frequencies))
        angles = self._op("Unsqueeze", self._op("Concat", angles, angles, axis=-1), self._ints("end", [1]))
        return self._op("Cos", angles), self._op("Sin", angles)

    def _rotated(self, value: str, rotary: tuple[str, str]) -> str:
        half = self._ints("half", [self._size.head // 2])
        start, stop, axis = self._ints("begin", [0]), self._ints("stop", [self._size.head]), self._ints("fourth", [3])
        left = self._op("Slice", value, start, half, axis)
        right = self._op("Neg", self._op("Slice", value, half, stop, axis))
        turned = self._op("Concat", right, left, axis=-1)
        return self._op("Add", self._op("Mul", value, rotary[0]), self._op("Mul", turned, rotary[1]))

    def _heads(self, value: str, name: str, heads: int) -> str:
        size = self._size
        wide = self._product(value, name, size.hidden, heads * size.head)
        parted = self._op("Reshape", wide, self._ints("parted", [0, 0, -1, size.head]))
        return self._op("Transpose", parted, perm=[0, 2, 1, 3])

    def _expanded(self, value: str) -> str:
        """``[B, G, T, D]`` to ``[B, H, T, D]``."""
        size = self._size
        apart = self._op("Unsqueeze", value, self._ints("third", [2]))
        repeats = self._ints("repeats", [1, 1, size.heads // size.kv_heads, 1, 1])
        copies = self._op("Expand", apart, repeats)
        batch = self._op("Shape", value, start=0, end=1)
        total = self._op("Shape", value, start=2, end=3)
        shape = self._op(
            "Concat", batch, self._ints("heads", [size.heads]), total, self._ints("head", [size.head]), axis=0
        )
        return self._op("Reshape", copies, shape)

    def _product(self, value: str, name: str, inner: int, outer: int) -> str:
        return self._op("MatMul", value, self._weight(f"{self._scope}{name}.weight", inner, outer))

    def _weight(self, name: str, rows: int, columns: int, scale: float | None = None) -> str:
        values = self._random.standard_normal((rows, columns), dtype=np.float32)
        return self._tensor(name, values * (rows**-0.5 if scale is None else scale))

    def _tensor(self, name: str, values: np.ndarray[Any, np.dtype[Any]]) -> str:
        self._tensors[name] = numpy_helper.from_array(values.astype(np.float32), name)
        return name

    def _floats(self, name: str, value: float) -> str:
        self._tensors.setdefault(name, numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def _ints(self, name: str, value: int | list[int]) -> str:
        name = f"int_{name}"
        self._tensors.setdefault(name, numpy_helper.from_array(np.asarray(value, np.int64), name))
        return name

    def _ops(self, op_type: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """A node with ``count`` outputs."""
        name = f"{self._scope}{op_type}_{len(self._nodes)}"
        outputs = [f"{name}.{place}" for place in range(count)]
        self._nodes.append(helper.make_node(op_type, list(inputs), outputs, name=name, **attributes))
        return outputs

    def _op(self, op_type: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        name = f"{self._scope}{op_type}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, list(inputs), [output or name], name=name, **attributes))
        return output or name


def value_info(name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))
