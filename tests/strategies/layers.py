"""Stacks of layers: kinds in any order, what they share, what leaves them, and what lies in their branches.

A :class:`Layers` says what to build, :func:`build` makes the model, :func:`feeds_of` inputs for it, :func:`expected` how
often each function is to be called, and :func:`layer_stacks` draws one. Sizes: B batch, S positions, hidden size 4.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MIXERS", "MLPS", "Layers", "build", "expected", "feeds_of", "layer_stacks"]

MIXERS = ("softmax", "softcap", "parallel")
MLPS = ("dense", "experts", "branch", "loop")
_HIDDEN, _VOCABULARY = 4, 11


@dataclasses.dataclass(frozen=True)
class Layers:
    """What to build.

    Attributes:
        layers: mixer and feed-forward block of each layer.
        embeds: the model takes embeddings in place of token ids.
        scalars: each layer scales what it adds by a number of its own.
        constants: numbers are Constant nodes of each layer, in place of one initializer for all.
        merged: layers that read the norm weight of layer 0 in place of their own.
        exported: layers whose hidden state is an output too.
        values: layers whose attention output is an output too.
        skip: every layer but the first mixes in the values of the first.
        first_shares: layer 0 holds the mask, made of the shape of its hidden state.
        shuffled: order of the nodes in the file; None for the order of execution.
    """

    layers: tuple[tuple[str, str], ...]
    embeds: bool = False
    scalars: bool = False
    constants: bool = False
    merged: frozenset[int] = frozenset()
    exported: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()
    skip: bool = False
    first_shares: bool = False
    shuffled: int | None = None


class _Writer:
    def __init__(self, spec: Layers) -> None:
        self.spec = spec
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, np.ndarray] = {}
        self.outputs: list[str] = []
        self.rng = np.random.default_rng(5)

    def op(self, op_type: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        name = to or f"x{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name

    def weight(self, name: str, *shape: int) -> str:
        if name not in self.initializers:
            self.initializers[name] = self.rng.normal(0, 0.5, shape).astype(np.float32)
        return name

    def number(self, value: float, name: str) -> str:
        if self.spec.constants:
            tensor = numpy_helper.from_array(np.array(value, np.float32))
            return self.op("Constant", value=tensor)
        self.initializers[name] = np.array(value, np.float32)
        return name


def build(spec: Layers) -> onnx.ModelProto:
    """The model."""
    write = _Writer(spec)
    if spec.embeds:
        hidden = "inputs_embeds"
        source = helper.make_tensor_value_info(hidden, TensorProto.FLOAT, ["B", "S", _HIDDEN])
    else:
        hidden = write.op("Gather", write.weight("table", _VOCABULARY, _HIDDEN), "input_ids")
        source = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"])
    write.initializers["one"] = np.array([1], np.int64)
    write.initializers["two"] = np.array([2], np.int64)
    mask = _mask(write, hidden) if spec.first_shares else "mask"
    first: str | None = None
    for number, (mixer, mlp) in enumerate(spec.layers):
        hidden, values = _layer(write, number, mixer, mlp, hidden, mask, first)
        if number == 0 and spec.skip:
            first = values
    scaled = write.op("Mul", hidden, write.weight("norm", _HIDDEN))
    write.op("MatMul", scaled, write.weight("head", _HIDDEN, _VOCABULARY), to="logits")
    nodes = list(write.nodes)
    if spec.shuffled is not None:
        random.Random(spec.shuffled).shuffle(nodes)
    floats = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("logits", *write.outputs)]
    inputs = [source, helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    if not spec.first_shares:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["S", "S"]))
    stored = [numpy_helper.from_array(array, name) for name, array in write.initializers.items()]
    graph = helper.make_graph(nodes, "layers", inputs, floats, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _mask(write: _Writer, hidden: str) -> str:
    write.initializers["low"] = np.array(-9.0, np.float32)
    length = write.op("Slice", write.op("Shape", hidden), "one", "two")
    square = write.op("Expand", "low", write.op("Concat", length, length, axis=0))
    write.initializers["diagonal"] = np.array(1, np.int64)
    return write.op("Trilu", square, "diagonal", upper=1)


def _layer(
    write: _Writer, number: int, mixer: str, mlp: str, hidden: str, mask: str, first: str | None
) -> tuple[str, str]:
    spec = write.spec
    norm = write.weight(f"norm{0 if number in spec.merged else number}", _HIDDEN)
    scale = write.number(0.5 + 0.1 * number if spec.scalars else 0.5, f"scale{number}" if spec.scalars else "scale")
    normed = write.op("Mul", hidden, norm)
    query, key, values = (
        write.op("MatMul", normed, write.weight(f"{part}{number}", _HIDDEN, _HIDDEN)) for part in "qkv"
    )
    if first is not None:
        values = write.op("Add", values, first)
    scores = write.op("MatMul", query, write.op("Transpose", key, perm=[0, 2, 1]))
    if mixer == "softcap":
        scores = write.op("Tanh", scores)
    attended = write.op("MatMul", write.op("Softmax", write.op("Add", scores, mask), axis=-1), values)
    name = f"attended{number}" if number in spec.values else ""
    if name:
        write.outputs.append(name)
    attended = write.op("Mul", attended, scale, to=name)
    middle = hidden if mixer == "parallel" else write.op("Add", hidden, attended)
    inner = _feed_forward(write, number, mlp, middle)
    if mixer == "parallel":
        inner = write.op("Add", inner, attended)
    name = f"hidden{number}" if number in spec.exported else ""
    if name:
        write.outputs.append(name)
    return write.op("Add", middle, inner, to=name), values


def _feed_forward(write: _Writer, number: int, mlp: str, hidden: str) -> str:
    def expert(index: int) -> str:
        up = write.op("MatMul", hidden, write.weight(f"up{number}_{index}", _HIDDEN, 6))
        return write.op("MatMul", write.op("Relu", up), write.weight(f"down{number}_{index}", 6, _HIDDEN))

    if mlp == "experts":
        return write.op("Sum", *(expert(index) for index in range(4)))
    dense = expert(0)
    if mlp == "branch":
        scale = write.weight(f"gate{number}", _HIDDEN)
        bodies = {
            label: helper.make_graph(
                [helper.make_node(operator, [dense, other], [f"{label}{number}"])],
                label,
                [],
                [helper.make_tensor_value_info(f"{label}{number}", TensorProto.FLOAT, None)],
            )
            for label, operator, other in (("then_branch", "Mul", scale), ("else_branch", "Sub", hidden))
        }
        return write.op("If", "flag", **bodies)
    if mlp == "loop":
        write.initializers["trips"] = np.array(2, np.int64)
        state, again = f"state{number}", f"again{number}"
        body = helper.make_graph(
            [
                helper.make_node("Add", [state, hidden], [f"next{number}"]),
                helper.make_node("Identity", [again], [f"on{number}"]),
            ],
            "body",
            [
                helper.make_tensor_value_info(f"trip{number}", TensorProto.INT64, []),
                helper.make_tensor_value_info(again, TensorProto.BOOL, []),
                helper.make_tensor_value_info(state, TensorProto.FLOAT, ["B", "S", _HIDDEN]),
            ],
            [
                helper.make_tensor_value_info(f"on{number}", TensorProto.BOOL, []),
                helper.make_tensor_value_info(f"next{number}", TensorProto.FLOAT, ["B", "S", _HIDDEN]),
            ],
        )
        return write.op("Loop", "trips", "", dense, body=body)
    return dense


def feeds_of(spec: Layers) -> list[dict[str, np.ndarray]]:
    """Inputs of two lengths, with either branch."""
    rng = np.random.default_rng(3)
    found: list[dict[str, np.ndarray]] = []
    for batch, length, flag in ((1, 3, True), (2, 5, False)):
        mask = np.triu(np.full((length, length), -9.0, np.float32), 1)
        feed: dict[str, np.ndarray] = {"mask": mask, "flag": np.array(flag)}
        if spec.embeds:
            feed["inputs_embeds"] = rng.normal(0, 1, (batch, length, _HIDDEN)).astype(np.float32)
        else:
            feed["input_ids"] = rng.integers(0, _VOCABULARY, (batch, length))
        found.append(feed)
    return found


def expected(spec: Layers) -> list[int]:
    """How often each function is called, fewest first: one for each kind of layer that occurs more than once."""
    kinds: collections.Counter[object] = collections.Counter()
    for number, (mixer, mlp) in enumerate(spec.layers):
        kinds[mixer, mlp, spec.skip and number > 0] += 1
    return sorted(count for count in kinds.values() if count > 1)


def layer_stacks(mlps: Sequence[str] = MLPS) -> st.SearchStrategy[Layers]:
    """Stacks of two to six layers, of one or two kinds."""
    # No family has parallel layers beside others.
    mixers = st.sampled_from([MIXERS[:2], MIXERS[2:]])
    few = mixers.flatmap(
        lambda own: st.lists(
            st.tuples(st.sampled_from(own), st.sampled_from(mlps)), min_size=1, max_size=2, unique=True
        )
    )
    stacks = few.flatmap(lambda own: st.lists(st.sampled_from(own), min_size=2, max_size=6)).map(tuple)
    some = st.frozensets(st.integers(0, 5), max_size=3)
    return st.builds(
        Layers,
        layers=stacks,
        embeds=st.booleans(),
        scalars=st.booleans(),
        constants=st.booleans(),
        merged=some,
        exported=some,
        values=some,
        skip=st.booleans(),
        first_shares=st.booleans(),
        shuffled=st.none() | st.integers(0, 99),
    )
