"""Roles of sizes: batch, seq, past, total and context, whatever an exporter calls them."""

from __future__ import annotations

import io
import json

import onnx_ir as ir
import pytest
from rich.console import Console

from graphsurgery import inspection
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.model_io import load
from graphsurgery.patterns.roles import find_size_roles
from tests.small_models import parse, value_of

EXPORTS = {
    "llama": {"batch": ("s10",), "seq": ("s70",), "past": ("s39",)},
    "gpt2": {"batch": ("s17",), "seq": ("s10",), "past": ("s39",)},
    "gpt_oss_grouped": {"batch": ("s10",), "seq": ("s70",), "past": ("s39", "s8")},
    "llama_static": {"batch": ("s10",), "seq": ("s69",), "context": ("s12",)},
    "qwen3_5_moe": {"batch": ("s10",), "seq": ("s70",), "past": ("s12",)},
    "optimum_llama": {
        "batch": ("batch_size",),
        "seq": ("sequence_length",),
        "past": ("past_sequence_length",),
        "total": ("past_sequence_length + sequence_length",),
    },
    "genai_gptoss": {
        "batch": ("batch_size",),
        "seq": ("sequence_length",),
        "past": ("past_sequence_length",),
        "total": ("total_sequence_length",),
        "context": ("past_sliding_length",),
    },
    "qwen3_vl_moe/decode.onnx": {"batch": ("s10", "s40"), "seq": ("s22",), "past": ("s39",)},
    "qwen3_vl_moe/language_model.onnx": {"batch": ("s37",), "seq": ("s10",)},
    "qwen3_vl_moe/lm_head.onnx": {"batch": ("s31",), "seq": ("s81",)},
}


def roles_of(model: ir.Model) -> dict[str, tuple[str, ...]]:
    return find_size_roles(model, shapes_of(model)).named()


def decoder(inputs: str, body: str = "") -> ir.Model:
    """A model with ids, a cache and whatever else ``inputs`` declares."""
    return parse(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        decoder (int64[B,S] input_ids, float[B,2,S,4] k, float[B,2,P,4] past_key{inputs})
            => (float[B,S] logits, float[B,2,N,4] present_key)
        {{
            logits = Cast<to = 1>(input_ids)
            present_key = Concat<axis = 2>(past_key, k)
            {body}
        }}
    """)


@pytest.mark.parametrize("name", EXPORTS)
def test_stock_exports(fixtures_dir, name):
    path = fixtures_dir / name
    model = load(path if path.suffix else path / "model.onnx")
    assert roles_of(model) == EXPORTS[name]


@pytest.mark.parametrize(
    ("inputs", "role", "sizes"),
    [
        (", int64[B,T] attention_mask", "total", ("T",)),
        (", int64[B,S] attention_mask", "total", None),
        (", float[B,1,S,T] attention_mask", "total", ("T",)),
        (", float[1,1,S,T] attention_mask", "batch", ("B",)),
        (", float[B,1,1,T] attention_mask", "seq", ("S",)),
        (", int64[B2,S2] position_ids", "seq", ("S", "S2")),
        (", int64[3,B,S2] position_ids", "seq", ("S", "S2")),
        (", int64[S2] cache_position", "seq", ("S", "S2")),
        (", int32[B2,S2] token_type_ids", "batch", ("B", "B2")),
        (", int32[B2] beam_idx", "batch", ("B", "B2")),
        (", int64[B2,E] encoder_attention_mask", "batch", ("B",)),
        (", bool[B,S] visual_pos_masks, float[M,4] visual_embeds", "total", None),
    ],
)
def test_inputs_of_many_kinds(inputs, role, sizes):
    assert roles_of(decoder(inputs)).get(role) == sizes


def test_the_axis_of_a_turned_cache():
    text = """
    <ir_version: 9, opset_import: ["" : 18]>
    g (int64[B,S] input_ids, float[B,2,4,S] k, float[B,2,4,P] past_key) => (float[B,S] logits, float[B,2,4,N] present_key)
    {
        logits = Cast<to = 1>(input_ids)
        present_key = Concat<axis = 3>(past_key, k)
    }
    """
    model = parse(text)
    past = find_size_roles(model, shapes_of(model)).of("past")
    assert [(axis.input.name, axis.axis, str(axis.size)) for axis in past] == [("past_key", 3, "P")]


def test_a_cache_of_another_sequence_has_no_role():
    model = parse("""
        <ir_version: 9, opset_import: ["" : 18]>
        g (int64[B,S] decoder_input_ids, float[B,2,E,4] past_cross_key) => (float[B,S] logits, float[B,2,E,4] present_cross_key)
        {
            logits = Cast<to = 1>(decoder_input_ids)
            present_cross_key = Identity(past_cross_key)
        }
    """)
    assert roles_of(model) == {"batch": ("B",), "seq": ("S",)}


def test_the_past_that_only_the_mask_names(cases_dir):
    model = load(cases_dir / "a05_attention_spellings.onnx")
    assert roles_of(model)["past"] == ("past_sequence_length",)
    roles = find_size_roles(model, shapes_of(model))
    assert (roles.role_of("past_sequence_length"), roles.role_of("nobody")) == ("past", None)


def test_numbers_and_sizes_without_a_name():
    model = decoder(", int64[?,7] attention_mask")
    value_of(model, "past_key").shape = ir.Shape([1, 2, None, 4])
    assert roles_of(model) == {"batch": ("B", "1", "?"), "seq": ("S",), "past": ("?",), "total": ("7",)}


@pytest.mark.parametrize("positions", ["int64[S,2]", "int64[S2,D]", "int64[S]", "int64[1,S]"])
def test_packed_patches_have_no_batch(positions):
    model = parse(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[S,96] hidden_states, {positions} position_ids, int32[I] cu_seqlens) => (float[S,96] last_hidden_state)
        {{ last_hidden_state = Neg(hidden_states) }}
    """)
    assert roles_of(model) == {"seq": ("S", "S2") if "S2" in positions else ("S",)}


def test_a_model_without_tokens():
    model = parse('<ir_version: 9, opset_import: ["" : 18]> g (float[N] x) => (float[N] y) { y = Neg(x) }')
    assert roles_of(model) == {}


def test_inspect_shows_them(fixtures_dir, monkeypatch):
    monkeypatch.setattr(inspection, "pass_names", lambda: ["bind-dims"])
    found = inspection.inspect_model(fixtures_dir / "gpt_oss_grouped" / "model.onnx")
    assert json.loads(found.to_json())["roles"] == {"batch": ["s10"], "seq": ["s70"], "past": ["s39", "s8"]}
    text = io.StringIO()
    found.render(Console(file=text, width=160))
    assert "sizes: batch s10, seq s70, past s39 s8" in text.getvalue().splitlines()
    assert [(site.id, site.status, site.reason) for site in found.passes[0].sites][-1] == (
        "dim:s8",
        "skipped",
        "stays symbolic; bind it with past=NUMBER",
    )
