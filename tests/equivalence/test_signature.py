from __future__ import annotations

import json
from typing import Any

import pytest
from onnx import TensorProto as T

from graphsurgery.equivalence.feeds import Sizes, make_feeds
from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.roles import Role, cache_axis, letter_of
from graphsurgery.equivalence.signature import merge, read_signature
from tests.equivalence.builders import FIXTURES, Graph, case, decoder, mixture


def roles(signature) -> Any:
    return {spec.name: spec.role for spec in signature.inputs}


def test_a_stock_export():
    signature = read_signature(read_proto(FIXTURES / "llama" / "model.onnx"))
    found = roles(signature)
    assert found["input_ids"] is Role.TOKENS
    assert found["position_ids"] is Role.POSITIONS
    assert [role for name, role in found.items() if ".cache." in name] == [Role.CACHE] * 6
    tokens = signature.input("input_ids")
    assert tokens is not None
    assert tokens.limit == 64
    assert signature.sequence == (tokens, 1)
    assert sorted(set(signature.letters.values())) == ["B", "P", "S"]


def test_every_input_of_every_fixture_is_understood():
    manifest = json.loads((FIXTURES / "manifest.json").read_text())
    for entry in manifest:
        signature = read_signature(read_proto(FIXTURES / entry["path"]))
        unknown = {spec.name for spec in signature.having(Role.UNKNOWN)}
        assert unknown <= {"mm_token_type_ids", "pixel_values"}, entry["path"]
        if entry["cache"] == "dynamic":
            assert signature.having(Role.CACHE), entry["path"]
        if entry["cache"] == "static":
            assert signature.having(Role.SLOTS), entry["path"]


def test_a_cache_that_is_written_in_place():
    signature = read_signature(read_proto(case("a08")))
    assert roles(signature)["past_key.0"] is Role.SLOTS
    assert signature.fixed == {"N": 16}
    static = read_signature(read_proto(FIXTURES / "llama_static" / "model.onnx"))
    assert roles(static)["attention_mask"] is Role.MASK_ND
    assert roles(static)["input.cache.layers.0.cumulative_length"] is Role.PAST_LENGTH
    assert "N" in static.letters.values()


def test_sizes_that_only_a_fused_operator_knows():
    signature = read_signature(read_proto(FIXTURES / "genai_gptoss" / "model.onnx"))
    assert signature.fused_attention
    ring, whole = signature.input("past_key_values.0.key"), signature.input("past_key_values.1.key")
    assert ring is not None
    assert whole is not None
    assert (ring.role, ring.size) == (Role.STATE, ((3, 16), (2, 8)))
    assert (whole.role, whole.size) == (Role.CACHE, ((3, 16),))
    assert signature.rings == {"present.0.key", "present.0.value"}


def test_weights_that_are_inputs_are_not_fed():
    signature = read_signature(read_proto(case("s07")))
    assert len(signature.inputs) == 7


def test_hidden_states_stand_in_for_token_ids():
    signature = read_signature(read_proto(case("p11")))
    assert signature.sequence is not None
    assert signature.sequence[0].name == "inputs_embeds"
    unnamed = read_signature(read_proto(FIXTURES / "qwen3_vl_moe" / "lm_head.onnx"))
    assert unnamed.inputs[0].role is Role.EMBEDS


def test_rows_for_replaced_tokens():
    found = roles(read_signature(read_proto(FIXTURES / "qwen3_vl_moe" / "language_model.onnx")))
    assert found["visual_pos_masks"] is Role.MARKED
    assert found["deepstack_visual_embeds.0"] is Role.MARKED_ROWS


def test_unnamed_ids_are_found_by_their_table():
    model = mixture()
    model.graph.input[0].name = "x"
    for node in model.graph.node:
        node.input[:] = ["x" if name == "input_ids" else name for name in node.input]
    signature = read_signature(model)
    assert [(spec.name, spec.role, spec.limit) for spec in signature.inputs] == [("x", Role.TOKENS, 40)]


def test_a_recurrent_state_is_no_cache():
    signature = read_signature(read_proto(FIXTURES / "qwen3_5_moe" / "model.onnx"))
    states = {name for name, role in roles(signature).items() if role is Role.STATE}
    assert {name.split(".")[-2] for name in states} == {"conv_states", "recurrent_states"}
    assert "P" not in signature.fixed


@pytest.mark.parametrize(
    ("name", "dtype", "role"),
    [
        ("num_logits_to_keep", T.INT64, Role.KEEP),
        ("use_cache_branch", T.BOOL, Role.BRANCH),
        ("total_sequence_length", T.INT32, Role.TOTAL_LENGTH),
        ("past_sequence_length", T.INT32, Role.PAST_LENGTH),
        ("something_else", T.INT64, Role.UNKNOWN),
    ],
)
def test_scalars_by_name(name, dtype, role):
    g = Graph()
    g.input("input_ids", T.INT64, "b", "s")
    g.input(name, dtype)
    assert roles(read_signature(g.model()))[name] is role


def test_half_precision_is_told():
    assert read_signature(decoder(T.FLOAT16)).half
    assert not read_signature(decoder()).half


def test_letters_of_output_dims():
    letters = {"b": "B", "s": "S", "p": "P"}
    assert [letter_of(dim, letters) for dim in ("b", "s", "p + s", "s + p", "b*s", "q", 7)] == [
        *("B", "S", "T", "T", "BS", None, None)
    ]


def test_a_static_rewrite_narrows_the_signature():
    fixed = decoder()
    for value in fixed.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            sizes = {"batch": 1, "seq": 4, "total": 10, "past": 6}
            if dim.dim_param:
                dim.dim_value = sizes[dim.dim_param]
    merged = merge(read_signature(decoder()), read_signature(fixed))
    assert merged.fixed == {"B": 1, "S": 4, "T": 10, "P": 6}
    cache = merged.input("past.0.key")
    assert cache is not None
    assert cache_axis(cache) == 2


def test_positions_end_with_the_table():
    assert read_signature(read_proto(case("a01"))).positions == 64
    # Planes of positions whose largest is looked up, and a table that an operator holds.
    assert read_signature(read_proto(case("p11"))).positions == 64
    assert read_signature(read_proto(case("a10"))).positions == 32
    assert read_signature(read_proto(FIXTURES / "llama" / "model.onnx")).positions is None


def test_the_part_of_a_cache_that_is_read_is_as_long_as_an_input():
    g = Graph()
    ids = g.input("input_ids", T.INT64, "b", "s")
    g.input("comp_ctx_lengths", T.INT64, "comp_ctx_lengths")
    g.op("Gather", g.weight("table", 40, 16), ids, out="y")
    g.output("y", T.FLOAT, "b", "s", 16)
    signature = read_signature(g.model())
    assert roles(signature)["comp_ctx_lengths"] is Role.BOUND
    assert signature.letters["comp_ctx_lengths"] == "C"
    arrays = {feed.name: feed.build()["comp_ctx_lengths"] for feed in make_feeds(signature, 0)[0]}
    assert (arrays["b1-s5-p0"].tolist(), len(arrays["b1-s200-p0"])) == ([0] * 6, 200)
    assert Sizes(1, 3, 4, slots=7).letters()["C"] == 7
    assert Sizes(1, 3, 4, slots=16).letters()["C"] == 8
