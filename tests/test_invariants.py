"""Each rule, broken once, and what is said of it."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphsurgery.invariants import violations
from graphsurgery.model_io import load
from tests.small_models import CHAIN, NESTED, graph_of, node_of, parse, value_of

FUNCTION = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
g (float[4] x) => (float[4] y) { y = local.twice(x) }
<domain: "local", opset_import: ["" : 18]>
twice (v) => (w) { u = Add(v, v)  w = Identity(u) }
"""


def _body(model: ir.Model) -> ir.Graph:
    return next(iter(model.functions.values())).graph


def _move_last_to_front(model: ir.Model) -> None:
    last = node_of(model, "y")
    model.graph.remove(last)
    model.graph.insert_before(next(iter(model.graph)), last)


def _unsorted_function(model: ir.Model) -> None:
    add, identity = list(_body(model))
    _body(model).remove(identity)
    _body(model).insert_before(add, identity)


def _twin_nodes(model: ir.Model) -> None:
    for node in list(model.graph)[:2]:
        node.name = "twin"


def _twin_nodes_across_a_subgraph(model: ir.Model) -> None:
    node_of(model, "a").name = "twin"
    node_of(model, "inner").name = "twin"


def _twin_values(model: ir.Model) -> None:
    value_of(model, "b").name = "a"


def _hidden_value(model: ir.Model) -> None:
    value_of(model, "inner").name = "a"


def _hidden_by_initializer(model: ir.Model) -> None:
    inner = graph_of(model, "inner")
    shadow = ir.Value(name="a", const_value=ir.tensor([1.0], name="a"))
    inner.initializers.add(shadow)


def _reads_nothing(model: ir.Model) -> None:
    node_of(model, "y").replace_input_with(0, ir.Value(name="nowhere"))


def _reads_a_removed_node(model: ir.Model) -> None:
    model.graph.remove(node_of(model, "b"))


def _output_of_nothing(model: ir.Model) -> None:
    model.graph.outputs[0] = ir.Value(name="nowhere")


def _stale_size(model: ir.Model) -> None:
    value_of(model, "b").shape = ir.Shape(["B", 5])


def _stale_digits(model: ir.Model) -> None:
    value_of(model, "b").shape = ir.Shape(["B", "5"])


def _stale_rank(model: ir.Model) -> None:
    value_of(model, "b").shape = ir.Shape(["B", 4, 1])


def _unknown_domain(model: ir.Model) -> None:
    node_of(model, "b").domain = "com.vendor"


def _unknown_domain_in_function(model: ir.Model) -> None:
    model.opset_imports["com.vendor"] = 1
    next(iter(_body(model))).domain = "com.vendor"


@pytest.mark.parametrize("text", [CHAIN, NESTED, FUNCTION])
def test_a_sound_model_breaks_nothing(text):
    assert violations(parse(text)) == []


@pytest.mark.parametrize(
    ("text", "break_it", "sentences"),
    [
        (
            CHAIN,
            _move_last_to_front,
            [
                "the nodes of the main graph are not in execution order",
                "node 'Abs_2' of the main graph reads 'b', which nothing makes",
            ],
        ),
        (
            FUNCTION,
            _unsorted_function,
            [
                "the nodes of function local::twice are not in execution order",
                "node 'Identity_1' of function local::twice reads 'u', which nothing makes",
            ],
        ),
        (CHAIN, _twin_nodes, ["two nodes of the main graph are called 'twin'"]),
        (NESTED, _twin_nodes_across_a_subgraph, ["two nodes of the main graph are called 'twin'"]),
        (CHAIN, _twin_values, ["two values of the main graph are called 'a'"]),
        (NESTED, _hidden_value, ["two values of the main graph are called 'a'"]),
        (NESTED, _hidden_by_initializer, ["value 'a' of a subgraph of the main graph hides one of an outer graph"]),
        (CHAIN, _reads_nothing, ["node 'Abs_2' of the main graph reads 'nowhere', which nothing makes"]),
        (
            CHAIN,
            _reads_a_removed_node,
            [
                "the nodes of the main graph are not in execution order",
                "node 'Abs_2' of the main graph reads 'b' of a removed node",
            ],
        ),
        (CHAIN, _output_of_nothing, ["output 'nowhere' of the main graph is made by nothing"]),
        (CHAIN, _stale_size, ["value 'b' declares size 5 on axis 1 and has size 4"]),
        (CHAIN, _stale_digits, ["value 'b' declares size 5 on axis 1 and has size 4"]),
        (CHAIN, _stale_rank, ["value 'b' declares rank 3 and has rank 2"]),
        (CHAIN, _unknown_domain, ["operator domain 'com.vendor' is used and not imported"]),
        (
            FUNCTION,
            _unknown_domain_in_function,
            ["operator domain 'com.vendor' is used in function local::twice and not imported there"],
        ),
    ],
)
def test_each_rule_is_told_in_one_sentence(text, break_it, sentences):
    model = parse(text)
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for number, node in enumerate(graph.all_nodes()):
            node.name = f"{node.op_type}_{number}"
    break_it(model)
    assert violations(model) == sentences


def test_a_symbolic_size_and_an_unknown_one_contradict_nothing():
    model = parse(CHAIN)
    value_of(model, "b").shape = ir.Shape(["anything", None])
    assert violations(model) == []


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe_grouped", "optimum_llama"])
def test_stock_exports_are_sound(fixtures_dir, name):
    assert violations(load(fixtures_dir / name / "model.onnx")) == []


def test_what_an_exporter_declares_wrongly_is_seen(fixtures_dir):
    model = load(fixtures_dir / "genai_llama" / "model.onnx")
    assert violations(model) == ["value '/model/constants/INT64/[1]' declares rank 0 and has rank 1"]


def test_functions_that_call_functions_are_sound(cases_dir):
    assert violations(load(cases_dir / "f04_model_already_has_functions.onnx")) == []


def test_a_name_less_node_is_called_by_its_operator():
    model = parse(CHAIN)
    node_of(model, "y").name = None
    _reads_nothing(model)
    assert violations(model) == ["node 'Abs' of the main graph reads 'nowhere', which nothing makes"]
