"""Attention inside function bodies, branches and loops: the generated ones, moved there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import helper

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Placement", "in_functions", "in_subgraph", "placements"]

_MASKS = ("attention_mask", "bias")


@dataclasses.dataclass(frozen=True)
class Placement:
    """How an attention becomes a function that is called twice.

    Attributes:
        mask_outside: what makes the mask stays with the callers.
        shared_mask: both calls get the same mask; else each makes its own in the same way.
        constants_inside: constants become nodes of the body; else parameters.
        other_past: the second call names the length of its cache differently.
    """

    mask_outside: bool
    shared_mask: bool
    constants_inside: bool
    other_past: bool


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any placement."""
    return Placement(draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))


def in_functions(model: onnx.ModelProto, placement: Placement) -> onnx.ModelProto:
    """``model`` with its attention as a function that is called twice, the second time on inputs of its own.

    The inputs and outputs of the second call end in ``_2``; masks that are inputs are shared where the mask is.
    """
    graph = model.graph
    outside = _mask_nodes(graph) if placement.mask_outside else set()
    inside = [node for node in graph.node if node.output[0] not in outside]
    made = {output for node in inside for output in node.output}
    read = list(dict.fromkeys(name for node in inside for name in node.input if name and name not in made))
    constants = {tensor.name: tensor for tensor in graph.initializer}
    held = [name for name in read if name in constants and placement.constants_inside]
    formals = [name for name in read if name not in held]
    nodes = [helper.make_node("Constant", [], [name], value=constants[name]) for name in held]
    nodes += [_renamed(node, {}) for node in inside]
    results = [output.name for output in graph.output if output.name in made]
    imports = list(model.opset_import)
    function = helper.make_function("local", "Attend", formals, results, nodes, imports)

    kept = [node for node in graph.node if node.output[0] in outside]
    shared = set(_MASKS) if placement.shared_mask else set()
    second: dict[str, str] = {}
    for value in graph.input:
        second[value.name] = value.name if value.name in shared else f"{value.name}_2"
    for name in outside:
        second[name] = name if placement.shared_mask and name not in ("key", "value") else f"{name}_2"
    second |= {name: f"{name}_2" for name in results}
    calls = [helper.make_node("Attend", formals, results, name="call_1", domain="local")]
    actual = [second.get(name, name) for name in formals]
    calls.append(helper.make_node("Attend", actual, [second[name] for name in results], name="call_2", domain="local"))
    copied = [_renamed(node, second) for node in kept if second[node.output[0]] != node.output[0]]
    for number, node in enumerate(copied):
        node.name = f"{node.name or 'node'}_second_{number}"
    inputs = [*graph.input]
    others = [value for value in graph.input if second[value.name] != value.name]
    inputs += [_second_info(value, second[value.name], placement) for value in others]
    outputs = [*graph.output, *(_second_info(value, f"{value.name}_2", placement) for value in graph.output)]
    proto = helper.make_graph([*kept, *copied, *calls], "calls", inputs, outputs, list(graph.initializer))
    return helper.make_model(
        proto,
        opset_imports=[*imports, helper.make_opsetid("local", 1)],
        functions=[function],
        ir_version=model.ir_version,
    )


def in_subgraph(model: onnx.ModelProto, kind: str) -> onnx.ModelProto:
    """``model`` with its nodes in a branch of an If (``if``), or in the body of a Loop that runs once (``loop``)."""
    graph = model.graph
    outer = {output.name for output in graph.output}
    names = {name: f"{name}/inner" for name in outer}
    nodes = [_renamed(node, names) for node in graph.node]
    outputs = [_info_like(value, f"{value.name}/inner") for value in graph.output]
    results = [value.name for value in graph.output]
    constants = list(graph.initializer)
    inputs = list(graph.input)
    if kind == "if":
        inputs.append(helper.make_tensor_value_info("choose", onnx.TensorProto.BOOL, []))
        zeros = []
        for value in graph.output:
            source = "new_key" if value.name == "key" else "query"
            zeros += [helper.make_node("Identity", [source], [f"{value.name}/other"])]
        other = helper.make_graph(
            zeros, "other", [], [_info_like(v, f"{v.name}/other", bare=True) for v in graph.output]
        )
        then = helper.make_graph(nodes, "then", [], [_info_like(v, f"{v.name}/inner", bare=True) for v in graph.output])
        held = helper.make_node("If", ["choose"], results, name="choice", then_branch=then, else_branch=other)
    else:
        constants += [
            onnx.numpy_helper.from_array(np.asarray(1, np.int64), "once"),
            onnx.numpy_helper.from_array(np.asarray(True), "always"),
        ]
        info = helper.make_tensor_value_info
        formals = [info("number", onnx.TensorProto.INT64, []), info("go_on", onnx.TensorProto.BOOL, [])]
        nodes.append(helper.make_node("Identity", ["go_on"], ["still"]))
        body = helper.make_graph(nodes, "body", formals, [info("still", onnx.TensorProto.BOOL, []), *outputs])
        stacked = [f"{name}/stacked" for name in results]
        held = helper.make_node("Loop", ["once", "always"], stacked, name="loop", body=body)
        constants.append(onnx.numpy_helper.from_array(np.asarray([0], np.int64), "first_axis"))
        squeezes = [
            helper.make_node("Squeeze", [name, "first_axis"], [result], name=f"squeeze_{result}")
            for name, result in zip(stacked, results, strict=True)
        ]
        proto = helper.make_graph([held, *squeezes], "looped", inputs, list(graph.output), constants)
        return helper.make_model(proto, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    proto = helper.make_graph([held], "chosen", inputs, list(graph.output), constants)
    return helper.make_model(proto, opset_imports=list(model.opset_import), ir_version=model.ir_version)


def _mask_nodes(graph: onnx.GraphProto) -> set[str]:
    """The outputs of the nodes that make what masks the scores, caches included."""
    makers = {output: node for node in graph.node for output in node.output}
    roots = []
    scores = {output for node in graph.node if node.op_type == "MatMul" for output in node.output}
    reached = set(scores)
    for node in graph.node:
        if any(name in reached for name in node.input) and node.op_type != "Shape":
            reached |= set(node.output)
            if node.op_type in ("Add", "Where"):
                roots += [name for name in node.input if name not in reached and name in makers]
    found: set[str] = set()
    pending = roots
    while pending:
        name = pending.pop()
        if name in makers and name not in found and name not in reached:
            found.add(name)
            pending += list(makers[name].input)
    return found


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    return copy


def _info_like(value: onnx.ValueInfoProto, name: str, *, bare: bool = False) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    copy.name = name
    if bare:
        copy.type.tensor_type.ClearField("shape")
    return copy


def _second_info(value: onnx.ValueInfoProto, name: str, placement: Placement) -> onnx.ValueInfoProto:
    copy = _info_like(value, name)
    if placement.other_past and value.name not in _MASKS:
        for dim in copy.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = {"P": "P_2", "P + S": "P_2 + S"}.get(dim.dim_param, dim.dim_param)
    return copy
