"""Shapes after an edit: what the edit has not touched is taken over, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import onnx_ir as ir
import pytest

import graphsurgery
from graphsurgery.analysis.shapes import Shapes, forget, invalidate, shapes_of
from graphsurgery.pass_base import count_nodes
from graphsurgery.rewrite import Rewrite

ROOT = Path(__file__).parents[2]
SAMPLE = ["llama", "llama_static", "gemma2", "genai_llama", "optimum_llama", "mixtral_grouped", "llama_qdq4"]


def _described(shapes: Shapes, model: ir.Model) -> dict[str, str]:
    """What is known of every value of the main graph, with nameless unknowns made alike."""
    found = {}
    for node in model.graph:
        for value in node.outputs:
            text = f"{shapes.shape(value)} {shapes.dtype(value)} {shapes.shape_value(value)}"
            found[value.name or ""] = re.sub(r"\?\d+", "?", text)
    return found


@pytest.mark.parametrize("name", SAMPLE)
def test_they_are_those_of_a_fresh_walk_after_each_pass(name):
    model = graphsurgery.load(ROOT / "fixtures" / name / "model.onnx")
    nodes = count_nodes(model)
    checked: list[int] = []

    def check(position, model, report):
        renewed = shapes_of(model)
        assert _described(renewed, model) == _described(Shapes(model), model)
        checked.append(renewed.renewed)

    specs = ["prune-last-token{index=last}", "block-attention{q_blocks=2}", "tidy", "rename-io{to=retained-state}"]
    graphsurgery.Pipeline(specs, callback=check)(model)
    assert len(checked) == len(specs)
    # Pruning edits the end of the graph; other names of sizes are other sizes.
    assert checked[0] > 0.8 * nodes


def _chain() -> ir.Model:
    return ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[batch, 8] x) => (float[batch, 8] y) {
            a = Relu(x)
            b = Neg(a)
            c = Abs(b)
            y = Relu(c)
        }
    """)


def test_only_what_reads_something_new_is_walked_again():
    model = _chain()
    shapes_of(model)
    nodes = list(model.graph)
    edit = Rewrite(model, "test", "site", scope="test")
    edit.before(nodes[1])
    doubled = edit.emit("Concat", [nodes[0].outputs[0]] * 2, {"axis": 1}, name="twice", dtype=ir.DataType.FLOAT)
    edit.reroute(nodes[1], 0, doubled)
    edit.commit()
    renewed = shapes_of(model)
    assert [str(renewed.dim(nodes[3].outputs[0], axis)) for axis in (0, 1)] == ["batch", "16"]
    assert renewed.renewed == 1


def test_what_reads_something_new_of_the_same_shape_is_all_that_is_walked_again():
    model = _chain()
    shapes_of(model)
    nodes = list(model.graph)
    edit = Rewrite(model, "test", "site", scope="test")
    edit.before(nodes[1])
    again = edit.emit("Relu", [nodes[0].outputs[0]], name="again", dtype=ir.DataType.FLOAT)
    edit.reroute(nodes[1], 0, again)
    edit.commit()
    assert shapes_of(model).renewed == 3


def test_an_input_of_another_shape_renews_nothing():
    model = _chain()
    shapes_of(model)
    model.graph.inputs[0].shape = ir.Shape(["batch", 4])
    invalidate(model)
    renewed = shapes_of(model)
    assert renewed.dim(model.graph.outputs[0], 1) == 4
    assert renewed.renewed == 0


def test_unknown_sizes_of_two_walks_are_never_taken_for_one():
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[batch, 8] x, float z) => (int64[n, m] y) {
            y = NonZero(x)
            w = Relu(z)
        }
    """)
    first = shapes_of(model).dim(model.graph.outputs[0], 1)
    node = next(iter(model.graph))
    edit = Rewrite(model, "test", "site", scope="test")
    edit.before(node)
    other = edit.emit("Neg", [node.inputs[0]], name="neg", dtype=ir.DataType.FLOAT)
    edit.reroute(node, 0, other)
    edit.commit()
    assert shapes_of(model).dim(model.graph.outputs[0], 1) != first


def test_forgetting_walks_everything_again():
    model = _chain()
    shapes_of(model)
    forget(model)
    assert shapes_of(model).renewed == 0
