"""Random models, the same model in other words, and single edits with the severity that a diff must give them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

_UNARY = ("Relu", "Neg", "Abs", "Softmax", "Elu")
_BINARY = ("Add", "Sub", "Mul", "MatMul")
_ATTRIBUTES: dict[str, tuple[str, int | float]] = {"Softmax": ("axis", 1), "Elu": ("alpha", 0.5)}
_FLOAT = TensorProto.FLOAT


def _norm() -> onnx.FunctionProto:
    """``Norm(v, w)``: an attribute that the call gives, one with a default, and a nested call."""
    mean = helper.make_node("ReduceMean", ["v"], ["m"])
    mean.attribute.append(onnx.AttributeProto(name="keepdims", type=onnx.AttributeProto.INT, ref_attr_name="keep"))
    body = [
        mean,
        helper.make_node("Centre", ["v", "m"], ["c"], domain="local"),
        helper.make_node("Mul", ["c", "w"], ["r"]),
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Norm", ["v", "w"], ["r"], body, opsets)
    function.attribute_proto.append(helper.make_attribute("keep", 1))
    return function


def _centre() -> onnx.FunctionProto:
    body = [helper.make_node("Sub", ["v", "m"], ["r"])]
    return helper.make_function("local", "Centre", ["v", "m"], ["r"], body, [helper.make_opsetid("", 18)])


def _weight(name: str, seed: int) -> TensorProto:
    return numpy_helper.from_array(np.random.default_rng(seed).standard_normal((4, 4)).astype(np.float32), name)


@st.composite
def models(draw: st.DrawFn, max_nodes: int = 14, *, dead: bool = True) -> onnx.ModelProto:
    """A model with inputs ``x`` and ``z``, Ifs, calls, several outputs and shared values; every node is named.

    Args:
        draw: hypothesis'.
        max_nodes: of the main graph.
        dead: whether there may be nodes on which no output depends; else every value that is not read is an output.
    """
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []
    values = ["x", "z"]

    def pick() -> str:
        chosen: str = draw(st.sampled_from(values[-5:] + values[:1]))
        return chosen

    def weight() -> str:
        number = draw(st.integers(0, len(weights) - 1)) if weights and draw(st.integers(0, 3)) == 0 else len(weights)
        if number == len(weights):
            weights.append(_weight(f"w{number}", draw(st.integers(0, 3))))
        return f"w{number}"

    for number in range(draw(st.integers(2, max_nodes))):
        kind = draw(st.sampled_from(("unary", "binary", "weight", "split", "clip", "if", "call")))
        name, outputs = f"n{number}", [f"v{number}"]
        if kind == "unary":
            op = draw(st.sampled_from(_UNARY))
            node = helper.make_node(op, [pick()], outputs, name)
            if op in _ATTRIBUTES:
                node.attribute.append(helper.make_attribute(*_ATTRIBUTES[op]))
        elif kind == "binary":
            node = helper.make_node(draw(st.sampled_from(_BINARY)), [pick(), pick()], outputs, name)
        elif kind == "weight":
            node = helper.make_node(draw(st.sampled_from(_BINARY)), [pick(), weight()], outputs, name)
        elif kind == "split":
            outputs = [f"v{number}", f"u{number}"]
            node = helper.make_node("Split", [pick()], outputs, name, axis=0, num_outputs=2)
        elif kind == "clip":
            node = helper.make_node("Clip", [pick(), "", weight()], outputs, name)
        elif kind == "if":
            node = _branch(name, outputs, pick(), pick(), number)
        else:
            keep = {"keep": draw(st.integers(0, 1))} if draw(st.booleans()) else {}
            node = helper.make_node("Norm", [pick(), weight()], outputs, name, domain="local", **keep)
        nodes.append(node)
        values += outputs
    given = draw(st.lists(st.sampled_from(values[2:-1]), max_size=2, unique=True)) if len(values) > 3 else []
    read = {name for node in nodes for name in node.input} | _captured(nodes)
    unread = [] if dead else [node.output[0] for node in nodes if not read & set(node.output)]
    return _model(nodes, list(dict.fromkeys((values[-1], *given, *unread))), weights)


def _model(nodes: list[onnx.NodeProto], outputs: list[str], weights: list[TensorProto]) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("x", _FLOAT, ["B", 4]),
        helper.make_tensor_value_info("z", _FLOAT, ["B", 4]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    infos = [helper.make_tensor_value_info(name, _FLOAT, ["B", 4]) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, infos, weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, functions=[_centre(), _norm()], opset_imports=opsets, ir_version=10)


def model_with_everything() -> onnx.ModelProto:
    """One model that allows every kind of edit."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["v0"], "n0"),
        helper.make_node("Softmax", ["v0"], ["v1"], "n1", axis=1),
        _branch("n2", ["v2"], "v1", "z", 2),
        helper.make_node("Relu", ["v2"], ["v3"], "n3"),
        helper.make_node("Add", ["v3", "v1"], ["v4"], "n4"),
        helper.make_node("Mul", ["v3", "w1"], ["v5"], "n5"),
        helper.make_node("Norm", ["v5", "w0"], ["v6"], "n6", domain="local", keep=0),
        helper.make_node("Split", ["v6"], ["v7", "u7"], "n7", axis=0, num_outputs=2),
        helper.make_node("Clip", ["u7", "", "w1"], ["v8"], "n8"),
        helper.make_node("Neg", ["v8"], ["v9"], "n9"),
        helper.make_node("Sub", ["v9", "v4"], ["v10"], "n10"),
    ]
    return _model(nodes, ["v10", "v7"], [_weight("w0", 0), _weight("w1", 1)])


def _branch(name: str, outputs: list[str], one: str, other: str, number: int) -> onnx.NodeProto:
    """An If whose branches read values from outside; one has an initializer of its own, the other a dead node."""
    bias = numpy_helper.from_array(np.full((4,), number, np.float32), f"bias{number}")
    result = helper.make_tensor_value_info(f"t{number}", _FLOAT, None)
    then = helper.make_graph(
        [helper.make_node("Add", [one, bias.name], [result.name], f"{name}_then")], "then", [], [result], [bias]
    )
    result = helper.make_tensor_value_info(f"e{number}", _FLOAT, None)
    nodes = [
        helper.make_node("Sub", [other, one], [result.name], f"{name}_else"),
        helper.make_node("Abs", [other], [f"dead{number}"], f"{name}_dead"),
    ]
    other_graph = helper.make_graph(nodes, "else", [], [result])
    return helper.make_node("If", ["flag"], outputs, name, then_branch=then, else_branch=other_graph)


# The same model in other words


def in_other_words(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """``model`` with every name but those of the interface changed, and everything that may be re-ordered in another order."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    kept = {value.name for value in (*result.graph.input, *result.graph.output)}
    names: dict[str, str] = {}

    def renamed(name: str) -> str:
        if not name or name in kept:
            return name
        return names.setdefault(name, f"other_{len(names)}_{rng.randrange(1000)}")

    _rename_graph(result.graph, renamed, rng)
    functions = list(result.functions)
    for function in functions:
        local: dict[str, str] = {}
        for node in function.node:
            node.name = f"other_{rng.randrange(10**6)}"
            for field in (node.input, node.output):
                field[:] = [local.setdefault(name, f"f{len(local)}") if name else "" for name in field]
        for field in (function.input, function.output):
            field[:] = [local.setdefault(name, f"f{len(local)}") for name in field]
        _shuffle(function.node, rng)
    _shuffle(result.functions, rng)
    return result


def _rename_graph(graph: onnx.GraphProto, renamed: Callable[[str], str], rng: random.Random) -> None:
    graph.name = f"graph_{rng.randrange(1000)}"
    for node in graph.node:
        node.name = f"node_{rng.randrange(10**9)}"
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename_graph(attribute.g, renamed, rng)
        _shuffle(node.attribute, rng)
    for item in (*graph.initializer, *graph.output, *graph.value_info):
        item.name = renamed(item.name)
    _shuffle(graph.node, rng)
    _shuffle(graph.initializer, rng)


def _shuffle(field: Any, rng: random.Random) -> None:
    items = [type(item).FromString(item.SerializeToString()) for item in field]
    rng.shuffle(items)
    del field[:]
    field.extend(items)


# Single edits


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change of a model.

    Attributes:
        kind: what was done.
        severity: what it must count as.
        model: the result.
        counts: what must be counted in which list of the model's diff, where that is certain.
    """

    kind: str
    severity: str
    model: onnx.ModelProto
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


def edits_of(model: onnx.ModelProto, rng: random.Random) -> list[Edit]:
    """Every kind of single edit that ``model`` allows, each at a random place."""
    found = []
    for edit in _EDITS:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        result = edit(copy, rng)
        if result is not None:
            severity, counts = result
            found.append(Edit(edit.__name__.strip("_"), severity, copy, counts))
    return found


_Result = tuple[str, dict[str, int]] | None


def _pick(items: list[Any], rng: random.Random) -> Any:
    return rng.choice(items) if items else None


def _attribute_changed(model: onnx.ModelProto, rng: random.Random) -> _Result:
    node = _pick([node for node in model.graph.node if node.op_type in ("Softmax", "Elu")], rng)
    if node is None:
        return None
    node.attribute[0].CopyFrom(helper.make_attribute(node.attribute[0].name, 0 if node.op_type == "Softmax" else 0.25))
    return "minor", {"attributes": 1, "initializers": 0}


def _attribute_added(model: onnx.ModelProto, rng: random.Random) -> _Result:
    node = _pick([node for node in model.graph.node if node.op_type in ("Relu", "Add")], rng)
    if node is None:
        return None
    node.attribute.append(helper.make_attribute("note", "added"))
    return "minor", {"attributes": 1, "initializers": 0}


def _attribute_in_branch(model: onnx.ModelProto, rng: random.Random) -> _Result:
    node = _pick([node for node in model.graph.node if node.op_type == "If"], rng)
    if node is None:
        return None
    attribute = next(item for item in node.attribute if item.name == "else_branch")
    attribute.g.node[0].attribute.append(helper.make_attribute("note", "added"))
    return "minor", {"attributes": 1, "initializers": 0}


def _initializer_changed(model: onnx.ModelProto, rng: random.Random) -> _Result:
    read = {name for node in model.graph.node for name in node.input}
    tensor = _pick([item for item in model.graph.initializer if item.name in read], rng)
    if tensor is None:
        return None
    tensor.raw_data = np.full((4, 4), 7, np.float32).tobytes()
    return "minor", {"initializers": 1, "attributes": 0}


def _initializer_of_other_type(model: onnx.ModelProto, rng: random.Random) -> _Result:
    read = {name for node in model.graph.node for name in node.input}
    tensor = _pick([item for item in model.graph.initializer if item.name in read], rng)
    if tensor is None:
        return None
    tensor.CopyFrom(numpy_helper.from_array(np.zeros((4, 5), np.float16), tensor.name))
    return "minor", {"initializers": 2, "attributes": 0}


def _initializer_added(model: onnx.ModelProto, rng: random.Random) -> _Result:
    model.graph.initializer.append(numpy_helper.from_array(np.arange(3), "one_more"))
    return "minor", {"initializers": 1, "attributes": 0}


def _node_inserted(model: onnx.ModelProto, rng: random.Random) -> _Result:
    node = rng.choice(list(model.graph.node))
    slot = rng.choice([slot for slot, name in enumerate(node.input) if name]) if node.input else None
    if slot is None:
        return None
    model.graph.node.append(helper.make_node("Sqrt", [node.input[slot]], ["inserted"], "inserted"))
    node.input[slot] = "inserted"
    return "moderate", {"nodes_added": 1, "nodes_removed": 0, "rewired": 0}


def _node_removed(model: onnx.ModelProto, rng: random.Random) -> _Result:
    outputs = {value.name for value in model.graph.output}
    read = {name for node in model.graph.node for name in node.input}
    free = [
        n
        for n in model.graph.node
        if n.op_type in _UNARY and n.output[0] in read - outputs - _captured(model.graph.node)
    ]
    node = _pick(free, rng)
    if node is None:
        return None
    for reader in model.graph.node:
        reader.input[:] = [node.input[0] if name == node.output[0] else name for name in reader.input]
    model.graph.node.remove(node)
    return "moderate", {}


def _captured(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    bodies = [item.g for node in nodes for item in node.attribute if item.type == onnx.AttributeProto.GRAPH]
    return {name for body in bodies for node in body.node for name in node.input}


def _operator_replaced(model: onnx.ModelProto, rng: random.Random) -> _Result:
    node = _pick([node for node in model.graph.node if node.op_type in _BINARY], rng)
    if node is None:
        return None
    node.op_type = "Pow"
    return "moderate", {"nodes_added": 1, "nodes_removed": 1}


def _edge_to_another_operator(model: onnx.ModelProto, rng: random.Random) -> _Result:
    """An input is taken from a node of another operator, or from a graph input: no renaming can undo that."""
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    weights = {item.name for item in model.graph.initializer}
    order = {name: number for number, node in enumerate(model.graph.node) for name in node.output}
    choices = []
    for number, node in enumerate(model.graph.node):
        for slot, name in enumerate(node.input):
            if not name or name in weights or node.op_type == "If":
                continue
            for other in ("x", "z", *(name for name, place in order.items() if place < number)):
                kinds = (makers.get(name, f"input {name}"), makers.get(other, f"input {other}"))
                if kinds[0] != kinds[1] and "Norm" not in kinds:
                    choices.append((node, slot, other))
    if not choices:
        return None
    node, slot, other = rng.choice(choices)
    node.input[slot] = other
    return "moderate", {"nodes_added": 0, "nodes_removed": 0}


def _dead_node_added(model: onnx.ModelProto, rng: random.Random) -> _Result:
    model.graph.node.append(helper.make_node("Sqrt", ["x"], ["dead"], "dead"))
    return "moderate", {"nodes_added": 1, "nodes_removed": 0, "rewired": 0}


def _node_duplicated(model: onnx.ModelProto, rng: random.Random) -> _Result:
    """A value that several nodes read is computed once more for one of them."""
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in model.graph.node:
        for slot, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, slot))
    shared = [node for node in model.graph.node if len(node.output) == 1 and len(readers.get(node.output[0], [])) > 1]
    node = _pick([node for node in shared if node.op_type in (*_UNARY, *_BINARY)], rng)
    if node is None:
        return None
    reader, slot = rng.choice(readers[node.output[0]])
    twin = onnx.NodeProto()
    twin.CopyFrom(node)
    twin.name, twin.output[0] = "twin", "twin"
    reader.input[slot] = "twin"
    model.graph.node.append(twin)
    return "moderate", {"nodes_added": 1, "nodes_removed": 0}


def _input_renamed(model: onnx.ModelProto, rng: random.Random) -> _Result:
    model.graph.input[2].name = "condition"
    for node in model.graph.node:
        node.input[:] = ["condition" if name == "flag" else name for name in node.input]
    return "major", {"interface": 1, "nodes_added": 0, "nodes_removed": 0, "rewired": 0}


def _input_added(model: onnx.ModelProto, rng: random.Random) -> _Result:
    model.graph.input.append(helper.make_tensor_value_info("more", _FLOAT, [1]))
    return "major", {"interface": 1, "nodes_added": 0, "nodes_removed": 0, "rewired": 0}


def _inputs_in_other_order(model: onnx.ModelProto, rng: random.Random) -> _Result:
    inputs = list(reversed(model.graph.input))
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return "major", {"interface": 1, "nodes_added": 0, "nodes_removed": 0, "rewired": 0}


def _output_removed(model: onnx.ModelProto, rng: random.Random) -> _Result:
    if len(model.graph.output) < 2:
        return None
    del model.graph.output[-1]
    return "major", {"interface": 1, "nodes_added": 0, "nodes_removed": 0, "rewired": 0}


def _output_of_other_type(model: onnx.ModelProto, rng: random.Random) -> _Result:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    return "major", {"interface": 1, "nodes_added": 0, "nodes_removed": 0, "rewired": 0}


def _output_of_other_shape(model: onnx.ModelProto, rng: random.Random) -> _Result:
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    return "major", {"interface": 1, "nodes_added": 0, "nodes_removed": 0, "rewired": 0}


_EDITS: tuple[Callable[[onnx.ModelProto, random.Random], _Result], ...] = (
    _attribute_changed,
    _attribute_added,
    _attribute_in_branch,
    _initializer_changed,
    _initializer_of_other_type,
    _initializer_added,
    _node_inserted,
    _node_removed,
    _operator_replaced,
    _edge_to_another_operator,
    _dead_node_added,
    _node_duplicated,
    _input_renamed,
    _input_added,
    _inputs_in_other_order,
    _output_removed,
    _output_of_other_type,
    _output_of_other_shape,
)

EDIT_KINDS = frozenset(edit.__name__.strip("_") for edit in _EDITS)
"""Every kind that :func:`edits_of` can give."""
