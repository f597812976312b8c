"""What decoders are built with: their description, and a graph in the making.

Alphabet: B batch, S query length, P past, H hidden size, V vocabulary, TABLE rows of the embedding.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TABLE", "B", "Builder", "Decoder", "H", "P", "S", "V", "dims_of", "entry", "opset_of"]

H, V, TABLE = 32, 12, 16
B, S, P = 2, 5, 3


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


def opset_of(decoder: Decoder) -> onnx.OperatorSetIdProto:
    return helper.make_opsetid("", decoder.opset)


class Builder:
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
        return int(TensorProto.FLOAT16 if self.d.half else TensorProto.FLOAT)

    def fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}_{self._count}"

    def op(
        self, op_type: str, *inputs: str, name: str = "", domain: str = "", outputs: int = 1, **attributes: Any
    ) -> str:
        """A node; the name of its first output (others have ``.1`` and so on behind it)."""
        base = name or self.fresh(op_type.lower())
        made = [base, *(f"{base}.{number}" for number in range(1, outputs))]
        node_name = "" if self.d.taken else f"node_{base}"
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name=node_name, domain=domain, **attributes))
        return base

    def const(self, array: Any, name: str = "", dtype: Any = None) -> str:
        name = name or self.fresh("const")
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


def dims_of(decoder: Decoder, owner: str) -> tuple[Any, Any, Any]:
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


def entry(g: Builder, value: str, axis: int) -> str:
    """The size of one axis as a list, the long way that TorchScript takes."""
    size = g.op("Gather", g.op("Shape", value), g.const(axis, dtype=np.int64), axis=0)
    return g.with_axes("Unsqueeze", size, [0])
