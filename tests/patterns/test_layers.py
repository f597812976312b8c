"""Stacks of layers: how words of regions are split, and what is refused with which reason."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.patterns.layer_names import role_of
from graphsurgery.patterns.layers.finding import LayerKind, find_layers
from graphsurgery.patterns.layers.words import Letter, split_word
from graphsurgery.patterns.site import Refusal
from tests.strategies.layers import Layers, build


def letters(word: str) -> list[Letter]:
    """Capitals mix positions; small letters are products, dots norms or casts."""
    return [Letter(kind, kind.isupper(), kind != ".", 1 if kind == "." else 10) for kind in word]


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("AmAmAmnh", ["Am", "Am", "Am"]),
        ("AdAeAe", ["Ad", "Ae", "Ae"]),
        ("AXmAXmh", ["AXm", "AXm"]),
        ("A.X.m.A.X.m.h", ["A.X.m.", "A.X.m."]),
        ("LeLeLeFeLeLeLeFe", ["Le", "Le", "Le", "Fe"] * 2),
        ("CAmAmh", ["Am", "Am"]),
        ("mmm", []),
    ],
)
def test_words(word: str, parts: list[str]) -> None:
    found = split_word(letters(word), mixing=True)
    assert [word[factor.start : factor.end] for factor in found] == parts


def test_what_is_like_no_other_is_refused_with_the_reason() -> None:
    model = ir.from_proto(build(Layers(layers=(("softmax", "dense"), ("softmax", "dense"), ("softcap", "dense")))))
    kind, refusal = find_layers(model, shapes_of(model))
    assert isinstance(kind, LayerKind)
    assert kind.numbers == (0, 1)
    assert isinstance(refusal, Refusal)
    assert refusal.layer == 2
    assert refusal.reason == "layer 2 is like no other (min_repeats=2): MatMul 'x6' and Tanh 'x37' differ"


def test_layers_that_differ_in_an_attribute_are_told_by_it() -> None:
    proto = build(Layers(layers=(("softmax", "dense"), ("softmax", "dense"), ("softmax", "dense"))))
    last = [node for node in proto.graph.node if node.op_type == "Softmax"][-1]
    del last.attribute[:]
    last.attribute.append(onnx.helper.make_attribute("axis", 1))
    model = ir.from_proto(proto)
    refusal = next(site for site in find_layers(model, shapes_of(model)) if isinstance(site, Refusal))
    assert refusal.layer == 2
    assert refusal.reason.endswith(" differ in axis"), refusal.reason


def test_what_is_built_otherwise_is_told_from_the_nearest_by_its_operators() -> None:
    model = ir.from_proto(build(Layers(layers=(("softmax", "dense"), ("softmax", "dense"), ("softmax", "experts")))))
    refusal = next(site for site in find_layers(model, shapes_of(model)) if isinstance(site, Refusal))
    assert refusal.reason.startswith("layer 2 is like no other (min_repeats=2): next to layer 0 it has ")
    assert refusal.reason.endswith(" more"), refusal.reason


def test_experts_are_not_taken_for_layers() -> None:
    model = ir.from_proto(build(Layers(layers=(("softmax", "experts"),))))
    assert not [site for site in find_layers(model, shapes_of(model)) if isinstance(site, LayerKind)]


def test_steps_that_multiply_nothing_are_no_layers() -> None:
    proto = build(Layers(layers=(("softmax", "dense"), ("softmax", "dense"))))
    graph = proto.graph
    graph.input.append(onnx.helper.make_tensor_value_info("states", onnx.TensorProto.FLOAT, ["B", "E", 8]))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([2], np.int64), "third"))
    graph.node.append(onnx.helper.make_node("Transpose", ["states"], ["turned"], perm=[0, 2, 1]))
    value = "turned"
    for number in range(8):
        graph.node.append(onnx.helper.make_node("Unsqueeze", [value, "third"], [f"apart_{number}"]))
        value = f"apart_{number}"
    # Its mean is added to the embeddings: the decoder's own cone begins behind it.
    graph.node.append(onnx.helper.make_node("ReduceMean", [value], ["mean"], keepdims=0))
    embedded = next(node.output[0] for node in graph.node if node.op_type == "Gather")
    for node in graph.node:
        node.input[:] = ["shifted" if name == embedded else name for name in node.input]
    graph.node.append(onnx.helper.make_node("Add", [embedded, "mean"], ["shifted"]))
    model = ir.from_proto(proto)
    model.graph.sort()
    (kind,) = find_layers(model, shapes_of(model))
    assert isinstance(kind, LayerKind)
    assert kind.numbers == (0, 1)


@pytest.mark.parametrize(("keeps_state", "role"), [(True, "decoder"), (False, "vision")])
def test_a_layer_with_a_cache_is_no_vision_layer_whatever_its_model_is_called(keeps_state: bool, role: str) -> None:
    scope = (
        "model: models.some_vision.modeling_some_vision.Model/model.layers.0: models.some.Layer/mlp: models.some.MLP"
    )
    node = ir.Node("", "MatMul", [], metadata_props={"namespace": scope})
    assert role_of([node], keeps_state=keeps_state) == role
