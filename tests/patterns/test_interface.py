"""Which inputs carry tokens, padding masks and positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.patterns.interface import (
    find_attention_mask,
    find_position_ids,
    find_token_input,
    has_past,
)

Inputs = dict[str, tuple[int, list[Any]]]

IDS: Inputs = {"input_ids": (T.INT64, ["B", "S"])}
CACHE: Inputs = {"past_key_values.0.key": (T.FLOAT, ["B", 2, "P", 4])}


def decoder(inputs: Inputs, ids: str = "input_ids", extra: list[Any] | None = None) -> ir.Model:
    """A head over an embedding (or over embeddings that are fed), with inputs that nothing need read."""
    table = numpy_helper.from_array(np.zeros((8, 4), np.float32), "table")
    weight = numpy_helper.from_array(np.zeros((4, 8), np.float32), "lm_head.weight")
    elem, dims = inputs[ids]
    nodes, hidden = list(extra or []), ids
    lead = dims if elem != T.FLOAT else dims[:-1]
    if elem != T.FLOAT:
        nodes.append(helper.make_node("Gather", ["table", ids], ["hidden"]))
        hidden = "hidden"
    nodes.append(helper.make_node("MatMul", [hidden, "lm_head.weight"], ["logits"]))
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info(name, kind, sizes) for name, (kind, sizes) in inputs.items()],
        [helper.make_tensor_value_info("logits", T.FLOAT, [*lead, 8])],
        [weight, *([table] if elem != T.FLOAT else [])],
    )
    model: ir.Model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    return model


def tokens_of(model: ir.Model) -> tuple[str | None, int | None, int, str, str] | None:
    found = find_token_input(model, Shapes(model))
    if found is None:
        return None
    return found.value.name, found.batch_axis, found.sequence_axis, str(found.batch), str(found.length)


@pytest.mark.parametrize(
    ("inputs", "ids", "expected"),
    [
        (IDS, "input_ids", ("input_ids", 0, 1, "B", "S")),
        ({"input_ids": (T.INT32, ["B", "S"])}, "input_ids", ("input_ids", 0, 1, "B", "S")),
        ({"input_ids": (T.INT64, ["T"])}, "input_ids", ("input_ids", None, 0, "None", "T")),
        ({"inputs_embeds": (T.FLOAT, ["B", "S", 4])}, "inputs_embeds", ("inputs_embeds", 0, 1, "B", "S")),
        ({"inputs_embeds": (T.FLOAT, ["T", 4])}, "inputs_embeds", ("inputs_embeds", None, 0, "None", "T")),
        ({"x": (T.INT64, [1, "n"])}, "x", ("x", 0, 1, "1", "n")),
        ({"y": (T.FLOAT, ["b", "n", 4])}, "y", ("y", 0, 1, "b", "n")),
    ],
)
def test_tokens_are_found_by_name_or_by_what_they_feed(inputs: Inputs, ids: str, expected: tuple[Any, ...]):
    others = {"attention_mask": (T.INT64, ["B", "P + S"]), "position_ids": (T.INT64, ["B", "S"]), **CACHE}
    assert tokens_of(decoder(others | inputs, ids)) == expected


def test_weights_that_are_fed_are_no_tokens():
    model = decoder({"w": (T.FLOAT, [16, 4]), "proj": (T.FLOAT, [3, 5, 4]), **IDS})
    for value in model.graph.inputs:
        if value.name == "input_ids":
            value.name = "ids"
    assert tokens_of(model) == ("ids", 0, 1, "B", "S")


def test_the_decoder_of_two_sequences_is_meant():
    both: Inputs = {
        "input_ids": (T.INT64, ["B", "E"]),
        "attention_mask": (T.INT64, ["B", "E"]),
        "decoder_input_ids": (T.INT64, ["B", "S"]),
        "position_ids": (T.INT64, ["B", "E"]),
    }
    model = decoder(both, "decoder_input_ids")
    shapes = Shapes(model)
    assert tokens_of(model) == ("decoder_input_ids", 0, 1, "B", "S")
    assert find_attention_mask(model, shapes) is None
    assert find_position_ids(model, shapes) is None


def test_the_sequence_of_the_logits_decides_where_names_do_not():
    inputs: Inputs = {"tokens": (T.INT64, ["B", "E"]), **IDS}
    extra = [helper.make_node("Gather", ["table", "tokens"], ["other"])]
    assert tokens_of(decoder(inputs, extra=extra)) == ("input_ids", 0, 1, "B", "S")
    assert tokens_of(decoder(inputs, "tokens")) == ("tokens", 0, 1, "B", "E")


def test_an_encoder_that_is_fed_is_not_the_tokens():
    inputs: Inputs = {
        "encoder_hidden_states": (T.FLOAT, ["B", "E", 4]),
        "encoder_attention_mask": (T.INT64, ["B", "E"]),
        **IDS,
    }
    model = decoder(inputs)
    assert tokens_of(model) == ("input_ids", 0, 1, "B", "S")
    assert find_attention_mask(model, Shapes(model)) is None


def test_nothing_that_looks_like_tokens():
    model = ir.from_onnx_text(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[N] x, bool flag) => (float[N] y) { y = Relu(x) }'
    )
    assert tokens_of(model) is None


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ({"attention_mask": (T.INT64, ["B", "P + S"])}, True),
        ({"attention_mask": (T.BOOL, ["B", "total"])}, True),
        ({"attention_mask": (T.INT32, ["batch_of_mask", "length_of_mask"])}, True),
        ({"attention_mask": (T.INT64, [None, None])}, True),
        ({"decoder_attention_mask": (T.INT64, ["B", "S"])}, True),
        ({"mask": (T.INT64, ["B", "total"])}, True),
        ({"input_mask": (T.INT64, ["B", "total"])}, True),
        ({"attention_mask": (T.FLOAT, ["B", "total"])}, True),
        ({"padding_mask": (T.BOOL, ["B", "total"])}, False),
        ({"attention_mask": (T.INT64, ["B", 1, "S", "total"])}, False),
        ({"attention_mask": (T.INT64, ["S", "total"])}, False),
        ({"attention_mask": (T.INT64, [1, "total"])}, False),
        ({"attention_mask": (T.INT64, ["B", "P"])}, False),
        ({"attention_mask": (T.INT64, ["B", 128])}, False),
        ({"vision_attention_mask": (T.INT64, ["B", "patches"])}, False),
        ({"cross_attention_mask": (T.INT64, ["B", "frames"])}, False),
    ],
)
def test_which_masks_tell_of_padding(mask: Inputs, found: bool):
    model = decoder({**IDS, **mask, **CACHE})
    value = find_attention_mask(model, Shapes(model))
    assert (value is not None) is found
    assert value is None or value.name == next(iter(mask))


def test_a_mask_over_the_slots_of_a_static_cache_does_not_end_in_the_tokens():
    inputs: Inputs = {"input_ids": (T.INT64, [1, 4]), "attention_mask": (T.INT64, [1, 16])}
    slots = decoder({**inputs, "past_key.0": (T.FLOAT, [1, 2, 16, 4])})
    assert find_attention_mask(slots, Shapes(slots)) is None
    growing = decoder({**inputs, "past_key.0": (T.FLOAT, [1, 2, 12, 4])})
    assert find_attention_mask(growing, Shapes(growing)) is not None


def test_a_batch_that_only_the_tokens_fix():
    inputs: Inputs = {"input_ids": (T.INT64, [1, "S"]), "attention_mask": (T.INT64, ["B", "total"])}
    model = decoder(inputs)
    assert find_attention_mask(model, Shapes(model)) is not None


def test_a_float_mask_that_is_added_is_a_bias():
    bias = [
        helper.make_node("Unsqueeze", ["attention_mask", "axes"], ["wide"]),
        helper.make_node("Add", ["scores", "wide"], ["masked"]),
    ]
    inputs: Inputs = {**IDS, "attention_mask": (T.FLOAT, ["B", "total"]), "scores": (T.FLOAT, ["B", "S", "total"])}
    model = decoder({**inputs, "axes": (T.INT64, [1])}, extra=bias)
    assert find_attention_mask(model, Shapes(model)) is None


@pytest.mark.parametrize(
    ("positions", "found"),
    [
        ({"position_ids": (T.INT64, ["B", "S"])}, True),
        ({"position_ids": (T.INT32, [3, "B", "S"])}, True),
        ({"position_ids": (T.INT64, ["4", "B", "S"])}, True),
        ({"position_ids": (T.INT64, ["pb", "ps"])}, True),
        ({"position_ids": (T.INT64, ["planes", "B", "S"])}, False),
        ({"position_ids": (T.INT64, [2, "B", "S"])}, False),
        ({"position_ids": (T.INT64, [1, "S"])}, False),
        ({"position_ids": (T.INT64, ["S"])}, False),
        ({"position_ids": (T.INT64, ["B", "P + S"])}, False),
        ({"position_ids": (T.FLOAT, ["B", "S"])}, False),
        ({"cache_position": (T.INT64, ["B", "S"])}, False),
        ({"encoder_position_ids": (T.INT64, ["B", "S"])}, False),
    ],
)
def test_which_positions_are_those_of_the_tokens(positions: Inputs, found: bool):
    model = decoder({**IDS, **positions, **CACHE})
    assert (find_position_ids(model, Shapes(model)) is not None) is found


def test_packed_streams_have_no_mask_and_no_positions_of_rows():
    packed: Inputs = {
        "input_ids": (T.INT64, ["T"]),
        "attention_mask": (T.INT64, ["B", "T"]),
        "position_ids": (T.INT64, ["B", "T"]),
    }
    model = decoder(packed)
    assert find_attention_mask(model, Shapes(model)) is None
    assert find_position_ids(model, Shapes(model)) is None


def test_whether_a_cache_is_fed():
    assert has_past(decoder({**IDS, **CACHE}))
    assert not has_past(decoder(IDS))
