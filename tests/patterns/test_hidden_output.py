"""Hidden states as an output, of a decoder whose head is another file."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.analysis.slices import RowAxis
from graphsurgery.patterns.hidden_output import HiddenOutput, find_hidden_output
from graphsurgery.patterns.interface import find_token_input
from graphsurgery.patterns.matcher import GraphIndex
from graphsurgery.patterns.site import Refusal
from tests.interface_text import small_decoder
from tests.strategies.decoders import Decoder, build

PLAIN = Decoder(norm="rms")


def hidden_of(model: ir.Model, name: str | None = None) -> HiddenOutput | Refusal | None:
    shapes = Shapes(model)
    tokens = find_token_input(model, shapes)
    assert tokens is not None
    return find_hidden_output(model, shapes, GraphIndex(model), tokens, name)


def headless(decoder: Decoder = PLAIN, extras: tuple[str, ...] = ("hidden_output",)) -> ir.Model:
    """The decoder with its hidden states in place of logits."""
    proto = build(dataclasses.replace(decoder, extras=extras))
    del proto.graph.output[0]
    model: ir.Model = ir.from_proto(proto)
    return model


def test_the_only_output_that_a_normalisation_ends_in():
    found = hidden_of(headless())
    assert isinstance(found, HiddenOutput)
    assert (found.id, found.name, found.rows, found.batch_axis) == ("hidden:hidden_copy", "hidden_copy", RowAxis(1), 0)
    assert found.norm is not None


def test_caches_beside_it_do_not_hide_it():
    model = headless()
    cache = ir.Value(
        name="present.0.key", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 2, "seq", 4])
    )
    node = ir.node("Identity", [cache], name="cache")
    model.graph.inputs.append(cache)
    node.outputs[0].name, node.outputs[0].type = "present.0.out", ir.TensorType(ir.DataType.FLOAT)
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    found = hidden_of(model)
    assert isinstance(found, HiddenOutput)
    assert found.name == "hidden_copy"


def test_two_of_them_or_none_is_a_question_for_the_user():
    assert hidden_of(headless(extras=("hidden_output", "norm_input_output"))) is None
    assert hidden_of(headless(extras=("norm_input_output",))) is None
    found = hidden_of(headless(extras=("norm_input_output",)), "residual")
    assert isinstance(found, HiddenOutput)
    assert found.norm is None


def test_an_output_without_rows_is_refused():
    model = small_decoder(["m = ReduceMean <keepdims = 0> (hidden, one)", "y = Relu(m)"], {"y": ["B", 4]})
    refused = hidden_of(model, "y")
    assert isinstance(refused, Refusal)
    assert refused.reason == "output 'y' does not hold one row for each token of 'input_ids'"
