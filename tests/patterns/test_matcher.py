"""The op index, order, and seeing through wrapping nodes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import forget, invalidate
from graphsurgery.model_io import load
from graphsurgery.patterns.matcher import (
    GraphIndex,
    all_graphs,
    index_of,
    is_op,
    is_sorted,
    origin,
    readers,
    subgraphs,
    through,
)
from tests.small_models import CHAIN, NESTED, graph_of, node_of, parse, value_of

WRAPPED = """
<ir_version: 9, opset_import: ["" : 18, "com.vendor" : 1]>
g (float[4,4] x, float16[4,4] half) => (float[4,4] y)
<float[4,4] weight = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
{
    a = Identity(weight)
    b = Cast <to = 10> (a)
    c = CastLike(b, half)
    d, mask = Dropout(c)
    e = Transpose(d)
    s = Shape(e)
    f = Reshape(e, s)
    axes = Constant <value_ints = [0]> ()
    g = Unsqueeze(f, axes)
    h = Squeeze(g, axes)
    foreign = com.vendor.Identity(h)
    y = MatMul(x, foreign)
}
"""

FUNCTIONS = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
g (float[4] x, bool flag) => (float[4] y) { y = local.choose(x, flag) }
<domain: "local", opset_import: ["" : 18]>
choose (v, f) => (w) {
    w = If (f) <then_branch = t () => (a) { a = Neg(v) }, else_branch = e () => (b) { b = Abs(v) }>
}
"""


def test_nodes_come_by_operator_in_execution_order():
    model = parse(NESTED)
    index = GraphIndex(model)
    assert [node.outputs[0].name for node in index.nodes("Neg")] == ["inner"]
    assert [node.outputs[0].name for node in index.nodes("Exp", "If", "Add", "Relu")] == ["a", "t", "e", "y"]
    assert index.nodes("Neg", domain="com.vendor") == []
    assert index.nodes("MatMul") == []
    assert index.operators() == {("", "Relu"): 1, ("", "Neg"): 1, ("", "Add"): 1, ("", "Exp"): 1, ("", "If"): 1}
    assert sorted(index.order.values()) == list(range(5))


def test_an_index_is_kept_until_an_edit():
    model = parse(FUNCTIONS)
    (function,) = model.functions.values()
    main, inner = index_of(model), index_of(model, function.graph)
    assert index_of(model) is main
    assert index_of(model, function.graph) is inner
    assert list(inner.operators()) != list(main.operators())
    invalidate(model)
    assert index_of(model) is not main
    forgotten = index_of(model, function.graph)
    assert forgotten is not inner
    forget(model)
    assert index_of(model, function.graph) is not forgotten


def test_the_node_that_holds_a_subgraph_is_known():
    model = parse(NESTED)
    index = GraphIndex(model)
    held = list(subgraphs(node_of(model, "y")))
    assert [graph.name for graph in held] == ["then_part", "else_part"]
    assert [index.owner[graph] for graph in held] == [node_of(model, "y")] * 2
    assert list(subgraphs(node_of(model, "a"))) == []


def test_all_graphs_are_those_of_functions_too():
    assert [graph.name for graph in all_graphs(parse(NESTED))] == ["nested", "then_part", "else_part"]
    names = [graph.name for graph in all_graphs(parse(FUNCTIONS))]
    assert names[0] == "g"
    assert names[2:] == ["t", "e"]
    assert len(names) == 4


def test_operators_are_of_a_domain():
    model = parse(WRAPPED)
    assert is_op(node_of(model, "y"), "MatMul")
    assert is_op(node_of(model, "y"), "Gemm", "MatMul")
    assert not is_op(node_of(model, "y"), "Gemm")
    assert not is_op(node_of(model, "foreign"), "Identity")
    assert is_op(node_of(model, "foreign"), "Identity", domain="com.vendor")
    assert not is_op(None, "MatMul")


@pytest.mark.parametrize(
    ("value", "behind", "source"),
    [
        ("weight", "weight", "weight"),
        ("a", "weight", "weight"),
        ("d", "weight", "weight"),
        ("mask", "weight", "weight"),
        ("e", "e", "weight"),
        ("f", "f", "weight"),
        ("h", "h", "weight"),
        ("foreign", "foreign", "foreign"),
        ("y", "y", "y"),
    ],
)
def test_seeing_through(value, behind, source):
    model = parse(WRAPPED)
    assert through(value_of(model, value)).name == behind
    assert origin(value_of(model, value)).name == source


def test_seeing_through_only_what_is_named():
    model = parse(WRAPPED)
    assert through(value_of(model, "d"), ["Dropout", "CastLike"]).name == "b"
    assert through(value_of(model, "d"), iter(["Dropout"])).name == "c"


def test_readers_come_once_and_from_subgraphs_too():
    model = parse(NESTED)
    assert [node.op_type for node in readers(value_of(model, "a"))] == ["Neg", "Exp"]
    assert readers(value_of(model, "y")) == []
    square = parse('<ir_version: 9, opset_import: ["" : 18]> g (float[4] x) => (float[4] y) { y = Mul(x, x) }')
    assert len(readers(square.graph.inputs[0])) == 1


def test_order():
    model = parse(CHAIN)
    assert is_sorted(model.graph)
    last = node_of(model, "y")
    model.graph.remove(last)
    model.graph.insert_before(next(iter(model.graph)), last)
    assert not is_sorted(model.graph)


def test_order_within_and_across_subgraphs():
    model = parse(NESTED)
    assert is_sorted(model.graph)
    held = node_of(model, "y")
    model.graph.remove(held)
    model.graph.insert_before(node_of(model, "a"), held)
    assert not is_sorted(model.graph)
    model = parse(NESTED)
    graph = graph_of(model, "inner")
    inner, add = list(graph)
    graph.remove(add)
    graph.insert_before(inner, add)
    assert not is_sorted(model.graph)


def test_the_unsorted_case(cases_dir):
    model = load(cases_dir / "s05_unnamed_unsorted_nodes.onnx")
    assert not is_sorted(model.graph)
    model.graph.sort()
    assert is_sorted(model.graph)


def test_a_long_chain_is_no_recursion():
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4]))
    nodes, value = [], x
    for _ in range(20_000):
        nodes.append(ir.node("Neg", [value]))
        value = nodes[-1].outputs[0]
    model = ir.Model(ir.Graph([x], [value], nodes=nodes, opset_imports={"": 18}), ir_version=9)
    index = GraphIndex(model)
    assert len(index.nodes("Neg", "Abs")) == 20_000
    assert is_sorted(model.graph)
    assert through(value, ["Neg"]) is x
