"""Expert blocks written as plainly as can be, with the site that a recogniser would find: no recogniser is involved.

The block gathers the weights of each (token, choice) and multiplies, ``[T * K, 1, F]``. What it is made of varies.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from graphsurgery.analysis.dims import symbol
from graphsurgery.patterns.experts.sites import (
    ROUTE_WEIGHT,
    TOKEN_ROW,
    ExpertSite,
    ExpertStep,
    ExpertTensor,
    StepOutput,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.patterns.experts.sites import Operand

__all__ = ["Block", "Built", "build"]


@dataclasses.dataclass(frozen=True)
class Block:
    """What a block is made of.

    Attributes:
        experts: E.
        top_k: K.
        hidden: H.
        inner: I.
        tokens: T, None for a symbolic one.
        batch: tokens are ``[2, S, H]``.
        activation: ``silu``, ``gelu`` (no gate), ``clamped`` (interleaved, both clamped, as in gpt-oss).
        bias: both projections have one.
        stacked: parameters are one tensor each.
        transposed: projections are stored ``[out, in]`` and transposed.
        weighting: where the weight of the router enters: ``last``, ``first`` or ``none``.
        routing: ``top_k``, or ``fed``: the indices are an input, and may repeat for a token.
        spread: the site has a weight for every expert, ``[T, E]``, of which the block picks those of the chosen ones.
        scale: one more factor for each expert.
        quantized: ``""``, ``tensor``, ``axis``: projections are int8 with a scale for each expert (and column).
        opset: of the model.
        dtype: of all floats.
    """

    experts: int = 4
    top_k: int = 2
    hidden: int = 8
    inner: int = 6
    tokens: int | None = None
    batch: bool = False
    activation: str = "silu"
    bias: bool = False
    stacked: bool = True
    transposed: bool = False
    weighting: str = "last"
    routing: str = "top_k"
    spread: bool = False
    scale: bool = False
    quantized: str = ""
    opset: int = 20
    dtype: str = "float32"
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Built:
    """A model with one block, and its site in the model that was read from it."""

    model: ir.Model
    site: ExpertSite
    proto: onnx.ModelProto
    block: Block

    def feeds(self, tokens: int, seed: int = 0, *, favourite: int | None = None) -> dict[str, np.ndarray]:
        """Inputs for ``tokens`` tokens; with ``favourite``, a router that nearly always prefers that expert."""
        block, rng = self.block, np.random.default_rng(seed)
        shape = (2, tokens // 2, block.hidden) if block.batch else (tokens, block.hidden)
        x = rng.standard_normal(shape).astype(block.dtype)
        feeds: dict[str, np.ndarray] = {"x": x}
        lead = shape[:-1]
        if block.routing == "fed":
            feeds["indices"] = rng.integers(0, block.experts, (*lead, block.top_k))
            feeds["weights"] = rng.standard_normal((*lead, _weights_of(block))).astype(block.dtype)
        else:
            push = np.zeros(block.experts, block.dtype)
            if favourite is not None:
                push[favourite % block.experts] = 50
            feeds["push"] = push
        return feeds


class _Writer:
    def __init__(self, block: Block) -> None:
        self.block = block
        self.rng = np.random.default_rng(block.seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.steps: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.tensors: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []

    def constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.array(array, order="C"), name))
        return name

    def node(self, op_type: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, list(inputs), list(outputs), name=f"n_{outputs[0]}", **attributes))
        return outputs[0]

    def parameter(self, name: str, parts: np.ndarray) -> tuple[str, Any]:
        """The rows of a parameter for each pair, and the operand that says so."""
        block = self.block
        if block.stacked:
            names: tuple[str, ...] = (self.constant(name, parts),)
            stack = name
        else:
            names = tuple(self.constant(f"{name}.{number}", part) for number, part in enumerate(parts))
            wide = [self.unsqueeze(item, [0]) for item in names]
            stack = self.node("Concat", wide, f"{name}_stack", axis=0)
        rows = self.node("Gather", [stack, "flat_indices"], f"{name}_rows", axis=0)
        return rows, ("tensor", names, parts.shape[1:])

    def unsqueeze(self, value: str, axes: list[int]) -> str:
        name = f"{value}_u{len(self.nodes)}"
        if self.block.opset < 13:
            return self.node("Unsqueeze", [value], name, axes=axes)
        return self.node("Unsqueeze", [value, self.constant(f"{name}_axes", np.array(axes))], name)

    def step(
        self, op_type: str, values: list[str], operands: list[Any], name: str, **attributes: Any
    ) -> tuple[str, int]:
        extra = {key[1:]: attributes.pop(key) for key in list(attributes) if key.startswith("_")}
        outputs = extra.pop("outputs", (name,))
        which = extra.pop("output", 0)
        if not any(item.name == f"n_{outputs[0]}" for item in self.nodes):
            self.node(op_type, values, *outputs, **attributes)
        self.steps.append((outputs[0], tuple(operands), {"output": which, **extra}))
        return outputs[which], len(self.steps) - 1


def build(block: Block) -> Built:
    """Write the block and find its parts again."""
    writer = _Writer(block)
    total = _write(writer)
    dims: list[Any] = [2, "S"] if block.batch else [block.tokens if block.tokens is not None else "T"]
    if block.batch and block.tokens is not None:
        dims = [2, block.tokens // 2]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(block.dtype))
    inputs = [helper.make_tensor_value_info("x", kind, [*dims, block.hidden])]
    if block.routing == "fed":
        inputs.append(helper.make_tensor_value_info("indices", TensorProto.INT64, [*dims, block.top_k]))
        inputs.append(helper.make_tensor_value_info("weights", kind, [*dims, _weights_of(block)]))
    else:
        inputs.append(helper.make_tensor_value_info("push", kind, [block.experts]))
    outputs = [helper.make_tensor_value_info("y", kind, [*dims, block.hidden])]
    graph = helper.make_graph(writer.nodes, "block", inputs, outputs, writer.initializers)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", block.opset)], ir_version=8)
    onnx.checker.check_model(proto)
    model = ir.from_proto(proto)
    return Built(model, _site(model, writer, block, dims, total), proto, block)


def _site(model: ir.Model, writer: _Writer, block: Block, dims: list[Any], total: str) -> ExpertSite:
    nodes = {node.outputs[0].name: node for node in model.graph}
    values = {value.name or "": value for node in model.graph for value in node.outputs}
    values.update({value.name or "": value for value in (*model.graph.initializers.values(), *model.graph.inputs)})

    def operand(item: Any) -> Operand:
        if isinstance(item, tuple) and item[0] == "tensor":
            return ExpertTensor(tuple(values[name] for name in item[1]), block.stacked, tuple(item[2]))
        if isinstance(item, int):
            return StepOutput(item)
        return values[item] if isinstance(item, str) else item

    body = tuple(
        ExpertStep(nodes[name], tuple(operand(item) for item in operands), **extra)
        for name, operands, extra in writer.steps
    )
    size = symbol("T") if not block.batch else 2 * symbol("S")
    first = next(index for index, node in enumerate(model.graph) if node.outputs[0].name == "flat_indices")
    return ExpertSite(
        id="experts:0",
        kinds=("experts", "batched"),
        form="batched",
        tokens=values["x"],
        indices=values["indices"],
        weights=None if block.weighting == "none" else values["weights"],
        output=values["y_sum"],
        body=body,
        experts=block.experts,
        top_k=block.top_k,
        tokens_dim=block.tokens if block.tokens is not None else size,
        hidden=block.hidden,
        weights_by_expert=block.spread and block.weighting != "none",
        interior=tuple(model.graph)[first:-1],
    )


def _weights_of(block: Block) -> int:
    return block.experts if block.spread else block.top_k


def _write(w: _Writer) -> str:
    block = w.block
    experts, top_k, width, inner = block.experts, block.top_k, block.hidden, block.inner
    dtype = np.dtype(block.dtype)
    lead = 2 if block.batch else 1
    if block.routing == "top_k":
        router = w.constant("router", w.rng.standard_normal((width, experts)).astype(dtype))
        scores = w.node("MatMul", ["x", router], "scores")
        scores = w.node("Add", [scores, "push"], "pushed")
        w.constant("k", np.array([top_k], np.int64))
        w.node("TopK", [scores, "k"], "top", "indices", axis=-1)
        w.node("Softmax", [scores if block.spread else "top"], "weights", axis=-1)
    w.constant("line", np.array([-1], np.int64))
    w.node("Reshape", ["indices", "line"], "flat_indices")
    wide = w.unsqueeze("x", [lead])
    w.constant("ones", np.ones((top_k, 1), dtype))
    wide = w.node("Mul", [wide, "ones"], "repeated")
    w.constant("rows_shape", np.array([-1, 1, width], np.int64))
    row = w.node("Reshape", [wide, "rows_shape"], "rows")
    w.constant("weights_shape", np.array([-1, 1, 1], np.int64))
    if block.weighting != "none":
        found = w.node("GatherElements", ["weights", "indices"], "picked", axis=-1) if block.spread else "weights"
        w.node("Reshape", [found, "weights_shape"], "row_weights")
    hidden: Any = TOKEN_ROW
    if block.weighting == "first":
        row, hidden = w.step("Mul", [row, "row_weights"], [hidden, ROUTE_WEIGHT], "weighted")
    gated = block.activation != "gelu"
    row, hidden = _project(w, "up", row, hidden, width, 2 * inner if gated else inner)
    row, hidden = _activate(w, row, hidden, inner)
    row, hidden = _project(w, "down", row, hidden, inner, width)
    if block.scale:
        rows, operand = w.parameter("scale", w.rng.uniform(0.5, 2, (experts,)).astype(dtype))
        scale = w.unsqueeze(rows, [1, 2])
        row, hidden = w.step("Mul", [row, scale], [hidden, operand], "scaled")
    if block.weighting == "last":
        row, hidden = w.step("Mul", [row, "row_weights"], [hidden, ROUTE_WEIGHT], "weighted")
    sizes = [2, -1, top_k, width] if block.batch else [-1, top_k, width]
    w.constant("choices", np.array(sizes, np.int64))
    choices = w.node("Reshape", [row, "choices"], "by_choice")
    axis = 2 if block.batch else 1
    if block.opset < 13:
        w.node("ReduceSum", [choices], "y_sum", axes=[axis], keepdims=0)
    else:
        w.node("ReduceSum", [choices, w.constant("sum_axes", np.array([axis]))], "y_sum", keepdims=0)
    w.node("Identity", ["y_sum"], "y")
    return "y_sum"


def _project(w: _Writer, name: str, row: str, hidden: Any, size: int, out: int) -> tuple[str, Any]:
    block = w.block
    dtype = np.dtype(block.dtype)
    shape = (out, size) if block.transposed else (size, out)
    parts = (w.rng.standard_normal((block.experts, *shape)) * (2 / np.sqrt(size))).astype(dtype)
    if block.quantized:
        weight, operand = _quantized(w, name, parts)
    else:
        weight, operand = w.parameter(name, parts)
    if block.transposed:
        weight, operand = w.step(
            "Transpose", [weight], [operand], f"{name}_t", perm=[0, 2, 1], _per_row=False, _axes=(1, 0)
        )
    row, hidden = w.step("MatMul", [row, weight], [hidden, operand], f"{name}_out")
    if block.bias:
        bias, operand = w.parameter(f"{name}_bias", w.rng.standard_normal((block.experts, out)).astype(dtype))
        bias = w.unsqueeze(bias, [1])
        row, hidden = w.step("Add", [row, bias], [hidden, operand], f"{name}_biased")
    return row, hidden


def _quantized(w: _Writer, name: str, parts: np.ndarray) -> tuple[str, Any]:
    """int8 parts; the plain block multiplies out what one DequantizeLinear for each expert would."""
    block = w.block
    dtype = np.dtype(block.dtype)
    experts = block.experts
    columns = parts.shape[2] if block.quantized == "axis" else 1
    scale = w.rng.uniform(0.01, 0.02, (experts, columns) if columns > 1 else (experts,)).astype(dtype)
    stored = w.rng.integers(-100, 100, parts.shape).astype(np.int8)
    zero = w.rng.integers(-5, 5, scale.shape).astype(np.int8)
    kept, block_stacked = [], block.stacked
    for label, array in ((name, stored), (f"{name}_scale", scale), (f"{name}_zero", zero)):
        kept.append(w.parameter(label, array))
    assert block_stacked == block.stacked
    to = helper.np_dtype_to_tensor_dtype(dtype)
    number = w.node("Cast", [kept[0][0]], f"{name}_number", to=to)
    zeros = w.node("Cast", [kept[2][0]], f"{name}_zeros", to=to)
    axes = [1] if columns > 1 else [1, 2]
    centred = w.node("Sub", [number, w.unsqueeze(zeros, axes)], f"{name}_centred")
    w.node("Mul", [centred, w.unsqueeze(kept[1][0], axes)], f"{name}_numbers")
    # The node of the step, on the first expert, which nothing reads here.
    inputs = []
    for label, array in ((f"{name}_q0", stored[0]), (f"{name}_s0", scale[0]), (f"{name}_z0", zero[0])):
        inputs.append(w.constant(label, array))
    extra: dict[str, Any] = {"axis": 1} if columns > 1 else {}
    return f"{name}_numbers", w.step(
        "DequantizeLinear",
        inputs,
        [item[1] for item in kept],
        f"{name}_dq",
        _per_row=False,
        _axes=(-1,) * bool(extra),
        **extra,
    )[1]


def _activate(w: _Writer, row: str, hidden: Any, inner: int) -> tuple[str, Any]:
    block = w.block
    dtype = np.dtype(block.dtype)
    if block.activation == "gelu":
        half = w.constant("root", np.asarray(np.sqrt(0.5), dtype))
        inside, i = w.step("Mul", [row, half], [hidden, half], "inside")
        inside, i = w.step("Erf", [inside], [i], "erf")
        one = w.constant("unit", np.asarray(1, dtype))
        inside, i = w.step("Add", [inside, one], [i, one], "erf_one")
        return w.step("Mul", [row, inside], [hidden, i], "gelu_out")
    if block.activation == "silu":
        if block.opset >= 13:
            sizes = w.constant("halves", np.array([inner, inner], np.int64))
            attributes: dict[str, Any] = {"axis": 2}
            inputs = [row, sizes]
            operands = [hidden, sizes]
        else:
            inputs, attributes, operands = [row], {"axis": 2, "split": [inner, inner]}, [hidden]
        common = {"_outputs": ("gate", "up_half"), "_axes": (-1,), **attributes}
        gate, g = w.step("Split", inputs, operands, "gate", _output=0, **common)
        up, u = w.step("Split", inputs, operands, "gate", _output=1, **common)
        sigmoid, s = w.step("Sigmoid", [gate], [g], "sigmoid")
        silu, m = w.step("Mul", [gate, sigmoid], [g, s], "silu")
        return w.step("Mul", [silu, up], [m, u], "gated")
    pieces = []
    for start, label in ((0, "gate"), (1, "up_part")):
        names = [
            w.constant(f"{label}_{key}", np.array([value], np.int64))
            for key, value in (("start", start), ("end", 2**62), ("axis", 2), ("step", 2))
        ]
        pieces.append(w.step("Slice", [row, *names], [hidden, *names], label, _axes=(-1,)))
    low, high = (w.constant(key, np.asarray(value, dtype)) for key, value in (("low", -0.7), ("high", 0.7)))
    gate, g = w.step("Clip", [pieces[0][0], "", high], [pieces[0][1], None, high], "gate_clipped")
    up, u = w.step("Clip", [pieces[1][0], low, high], [pieces[1][1], low, high], "up_clipped")
    alpha = w.constant("alpha", np.asarray(1.702, dtype))
    one = w.constant("unit", np.asarray(1, dtype).reshape(1, 1, 1))
    sharp, a = w.step("Mul", [gate, alpha], [g, alpha], "sharp")
    sigmoid, s = w.step("Sigmoid", [sharp], [a], "sigmoid")
    glu, m = w.step("Mul", [gate, sigmoid], [g, s], "glu")
    more, p = w.step("Add", [up, one], [u, one], "up_one")
    return w.step("Mul", [more, glu], [p, m], "gated")
