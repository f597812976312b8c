"""Names that lead nowhere, twice somewhere, or to a later node: refused at load where ONNX Runtime refuses them too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_io import load
from tests.oracle import REFUSALS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]


def info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])


def node(text: str, operator: str = "Identity", domain: str = "") -> onnx.NodeProto:
    """``name: a b -> c`` as a node."""
    name, _, rest = text.partition(": ")
    reads, _, makes = rest.partition(" -> ")
    return helper.make_node(operator, reads.split(), makes.split(), name=name, domain=domain)


def model(nodes: Sequence[onnx.NodeProto], *functions: onnx.FunctionProto, output: str = "y") -> onnx.ModelProto:
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    graph = helper.make_graph(nodes, "main", [info("x"), condition], [info(output)], [weight])
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=OPSETS, ir_version=9, functions=functions)
    return made


def function(
    *nodes: onnx.NodeProto, inputs: Sequence[str] = ("a",), outputs: Sequence[str] = ("b",)
) -> onnx.FunctionProto:
    return helper.make_function("own", "f", list(inputs), list(outputs), list(nodes), OPSETS)


def branch(*nodes: onnx.NodeProto, output: str = "then", reads: str = "c", gives: str = "y") -> onnx.NodeProto:
    """An If whose branch holds ``nodes``."""
    bodies = {
        "then_branch": helper.make_graph(nodes, "t", [], [info(output)]),
        "else_branch": helper.make_graph(
            [node("other: x -> else" if reads == "c" else "other: a -> else")], "e", [], [info("else")]
        ),
    }
    return helper.make_node("If", [reads], [gives], name="branch", **bodies)


def loop(*nodes: onnx.NodeProto, carried: str) -> onnx.NodeProto:
    """A Loop whose parameter ``carried`` and initializer ``w`` hide outer names."""
    number, going = (helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", 7), ("go", 9)))
    on = helper.make_tensor_value_info("on", TensorProto.BOOL, [])
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    body = helper.make_graph(nodes, "l", [number, going, info(carried)], [on, info("next")], [weight])
    return helper.make_node("Loop", ["", "c", "x"], ["y"], name="loop", body=body)


CALL = node("call: x -> y", "f", "own")
CALL_IF = helper.make_node("f", ["x", "c"], ["y"], name="call", domain="own")
PASSED = node("pass: x -> y")

ACCEPTED = {
    "main graph out of order": model([node("late: m -> y"), node("early: x -> m")]),
    "a body reads what the main graph makes later": model([branch(node("n: m -> then")), node("early: x -> m")]),
    "a body hides what is made later": model([branch(node("n: x -> m"), node("o: m -> then")), node("late: x -> m")]),
    "branches share names": model([branch(node("n: x -> q"), node("other: q -> then"))]),
    "parameters and initializers hide": model([loop(node("n: go -> on"), node("o: x w -> next", "Add"), carried="x")]),
    "an unused function reads nothing": model([PASSED], function(node("n: gone -> b"))),
    "an unused function is out of order": model([PASSED], function(node("n: m -> b"), node("o: a -> m"))),
    "outputs are inputs and initializers": model([node("n: x -> m")], output="x"),
}

REFUSED = {
    "reads nothing": (
        model([PASSED, node("n: x gone -> z", "Add")]),
        "node 'n' (Add) reads 'gone', which nothing makes",
    ),
    "made twice": (
        model([node("n: x -> m"), node("o: x -> m"), node("p: m -> y")]),
        "node 'o' (Identity) makes 'm', which node 'n' makes already",
    ),
    "an input made": (
        model([node("n: x -> x"), PASSED]),
        "node 'n' (Identity) makes 'x', which an input or initializer is already",
    ),
    "no output": (model([node("n: x -> m")]), "output 'y' of the model is made by nothing"),
    "two nodes of a name": (model([node("n: x -> m"), node("n: m -> y")]), "two nodes are called 'n'"),
    "function reads nothing": (
        model([CALL], function(node("n: a gone -> b", "Add"))),
        "node 'n' (Add) of function own::f reads 'gone', which nothing makes",
    ),
    "function reads the main graph": (
        model([CALL], function(node("n: a w -> b", "Add"))),
        "node 'n' (Add) of function own::f reads 'w', which nothing makes",
    ),
    "function out of order": (
        model([CALL], function(node("n: m -> b"), node("o: a -> m"))),
        "node 'n' (Identity) of function own::f reads 'm' before node 'o' makes it",
    ),
    "function makes twice": (
        model([CALL], function(node("n: a -> b"), node("o: a -> b"))),
        "node 'o' (Identity) of function own::f makes 'b', which node 'n' makes already",
    ),
    "function without its output": (
        model([CALL], function(node("n: a -> m"))),
        "output 'b' of function own::f is made by nothing",
    ),
    "function passes an input on": (
        model([CALL], function(node("n: a -> b"), outputs=["a"])),
        "output 'a' of function own::f is one of its inputs",
    ),
    "too many values": (
        model([node("call: x x -> y", "f", "own")], function(node("n: a -> b"))),
        "node 'call' (f) hands 2 values to function own::f, which has 1",
    ),
    "too many results": (
        model([node("call: x -> y z", "f", "own")], function(node("n: a -> b"))),
        "node 'call' (f) takes 2 results of function own::f, which has 1",
    ),
    "body reads nothing": (
        model([branch(node("n: gone -> then"))]),
        "node 'n' (Identity) in a body of node 'branch' (If) reads 'gone', which nothing makes",
    ),
    "body out of order": (
        model([branch(node("n: m -> then"), node("o: x -> m"))]),
        "node 'n' (Identity) in a body of the model reads 'm' before node 'o' makes it",
    ),
    "body hides": (
        model([node("m: x -> m"), branch(node("n: x -> m"), node("o: m -> then"))]),
        "node 'n' (Identity) in a body of node 'branch' (If) makes 'm', which a graph around it has already",
    ),
    "body gives an outer value": (
        model([branch(node("n: x -> m"), output="x")]),
        "output 'x' in a body of node 'branch' (If) is a value of a graph around it",
    ),
    "body of a function reads the main graph": (
        model([CALL_IF], function(branch(node("n: x -> then"), reads="k", gives="b"), inputs=["a", "k"])),
        "node 'n' (Identity) in a body of node 'branch' (If) of function own::f reads 'x', which nothing makes",
    ),
    "body of a function out of order": (
        model(
            [CALL_IF],
            function(branch(node("n: m -> then"), node("o: a -> m"), reads="k", gives="b"), inputs=["a", "k"]),
        ),
        "node 'n' (Identity) in a body of function own::f reads 'm' before node 'o' makes it",
    ),
}


def accepted(proto: onnx.ModelProto) -> bool:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(proto.SerializeToString(), options)
    except REFUSALS:
        return False
    return True


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_the_runtime_accepts_is_accepted(kind: str, tmp_path: Path) -> None:
    assert accepted(ACCEPTED[kind])
    onnx.save(ACCEPTED[kind], tmp_path / "model.onnx")
    assert len(load(tmp_path / "model.onnx").graph) == len(ACCEPTED[kind].graph.node)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_runtime_refuses_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    proto, message = REFUSED[kind]
    assert not accepted(proto)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    with pytest.raises(InputRefusedError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: {message}; ")
    assert "\n" not in text
    assert caught.value.exit_code == 3
