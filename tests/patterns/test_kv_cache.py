"""Caches: every one of every fixture is found, none is invented, and every form of a write is understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from graphsurgery.analysis.shapes import Shapes, shapes_of
from graphsurgery.model_io import load
from graphsurgery.passes.block_attention import BlockAttention
from graphsurgery.patterns._cache_names import cache_key, is_cache_name, kind_of_name, layer_of_name
from graphsurgery.patterns.kv_cache import CacheSite, find_caches
from tests.small_models import parse

if TYPE_CHECKING:
    import onnx_ir as ir

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"
SAMPLE = ("gemma2/model.onnx", "genai_gptoss/model.onnx", "llama_static/model.onnx", "optimum_llama/model.onnx")


def names_of(entry: dict[str, object]) -> tuple[str, str, str, str]:
    """What the exporter of a fixture calls the input and output of keys, and of values."""
    if entry["exporter"] == "transformers":
        return ("input.cache.layers.{}.keys", "output.cache.layers.{}.keys") + (
            "input.cache.layers.{}.values",
            "output.cache.layers.{}.values",
        )
    return "past_key_values.{}.key", "present.{}.key", "past_key_values.{}.value", "present.{}.value"


def expected(path: str) -> dict[str, tuple[str | None, str, str, int | None, str]]:
    """Id to input, output, form, axis and the tags of attended caches, for each fixture."""
    entry = next(item for item in json.loads((FIXTURES / "manifest.json").read_text()) if item["path"] == path)
    table: dict[str, tuple[str | None, str, str, int | None, str]] = {}
    linear = (0, 1, 2) if path.startswith("qwen3_5_moe") else ()
    sliding: tuple[int, ...] = (0, 2) if path.startswith(("gemma", "gpt_oss_")) else ()
    sliding = (0,) if path.startswith("genai_gptoss") else sliding
    static = entry["cache"] == "static"
    # Nothing in a static export but the name of its mask says which layers slide.
    sliding = () if static else sliding
    form = "scatter" if static else "fused" if path.startswith("genai") else "concat"
    given_key, made_key, given_value, made_value = names_of(entry)
    for layer in range(entry["layers"]):
        if layer in linear:
            for kind in ("conv", "recurrent"):
                name = f"cache.layers.{layer}.{kind}_states.0"
                way = "concat" if kind == "conv" else "state"
                table[f"cache:{layer}.{kind}"] = (f"input.{name}", f"output.{name}", way, None, "")
            continue
        tags = f"{'sliding' if layer in sliding else 'full'} {'fixed' if static else 'growing'}"
        for kind, given, made in (("key", given_key, made_key), ("value", given_value, made_value)):
            table[f"cache:{layer}.{kind}"] = (given.format(layer), made.format(layer), form, 2, tags)
        if layer in sliding and entry["exporter"] == "transformers":
            name = f"cache.layers.{layer}._sliding_window_tensor"
            table[f"cache:{layer}.window"] = (f"input.{name}", f"output.{name}", "passthrough", None, "")
        if static:
            name = f"cache.layers.{layer}.cumulative_length"
            table[f"cache:{layer}.length"] = (f"input.{name}", f"output.{name}", "counter", None, "")
    return table


def found_in(model: ir.Model) -> list[CacheSite]:
    return find_caches(model, shapes_of(model))


def table_of(sites: list[CacheSite]) -> dict[str, tuple[str | None, str, str, int | None, str]]:
    assert len({site.id for site in sites}) == len(sites)
    return {
        site.id: (
            site.input.name if site.input is not None else None,
            site.output.name or "",
            site.form,
            site.axis,
            " ".join(site.kinds[2:]),
        )
        for site in sites
    }


def check(path: str) -> None:
    model = load(FIXTURES / path)
    sites = found_in(model)
    assert table_of(sites) == expected(path)
    outputs = [value.name for value in model.graph.outputs]
    assert [site.output.name for site in sites] == [name for name in outputs if name != "logits"]


def decoders() -> list[str]:
    return [item["path"] for item in json.loads((FIXTURES / "manifest.json").read_text()) if item["has_logits"]]


@pytest.mark.parametrize("path", SAMPLE)
def test_every_cache_of_an_export_is_found(path):
    check(path)


@pytest.mark.full
@pytest.mark.parametrize("path", [path for path in decoders() if path not in SAMPLE and "lm_head" not in path])
def test_every_cache_of_the_other_exports_is_found(path):
    check(path)


def test_a_model_of_the_prompt_alone_only_returns_its_caches():
    sites = found_in(load(FIXTURES / "qwen3_vl_moe" / "language_model.onnx"))
    assert table_of(sites) == {
        f"cache:{layer}.{kind}": (None, f"cache.layers.{layer}.{kind}s", "fresh", 2, "full fresh")
        for layer in range(3)
        for kind in ("key", "value")
    }
    assert found_in(load(FIXTURES / "qwen3_vl_moe" / "lm_head.onnx")) == []


@pytest.mark.parametrize("kv_blocks", [1, 2])
def test_caches_that_are_only_returned_are_found_behind_attention_in_blocks(kv_blocks):
    model = load(FIXTURES / "qwen3_vl_moe" / "language_model.onnx")
    before = table_of(found_in(model))
    BlockAttention(q_blocks=2, kv_blocks=kv_blocks, lowering="unroll", skip="where", min_rows=1)(model)
    assert table_of(found_in(model)) == before


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("a04_attention_probs_are_graph_output", 4),
        ("p01_hidden_states_also_output", 2),
        ("a05_attention_spellings", 0),
        ("f04_model_already_has_functions", 0),
        ("m01_loop_over_experts_index_add", 0),
        ("p05_already_has_num_logits_to_keep", 2),
        ("s06_names_the_tool_would_invent", 2),
    ],
)
def test_what_is_no_cache_is_not_taken_for_one(case, count):
    assert len(found_in(load(CASES / f"{case}.onnx"))) == count


def test_the_window_that_an_operator_tells():
    sites = {site.id: site for site in found_in(load(FIXTURES / "genai_gptoss" / "model.onnx"))}
    assert [(sites[name].window, sites[name].sliding) for name in ("cache:0.key", "cache:1.key")] == [
        (8, True),
        (None, False),
    ]


HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "local" : 1]>'
FORMS = {
    # Name: inputs and outputs besides x, nodes, and what is expected of the one cache.
    "transposed": (
        "float[B,P,2,8] past_k, float[B,2,S,8] x",
        "float[B,T,2,8] present_k",
        (
            "p = Transpose <perm = [0, 2, 1, 3]> (past_k)  c = Concat <axis = -2> (p, x)"
            "  present_k = Transpose <perm = [0, 2, 1, 3]> (c)"
        ),
        ("concat", 1, "key", True, None),
    ),
    "evicting": (
        "float[B,2,P,8] past_v, float[B,2,S,8] x",
        "float[B,2,Q,8] present_v",
        (
            "c = Concat <axis = 2> (past_v, x)  start = Constant <value = int64[1] {-16}> ()"
            "  end = Constant <value = int64[1] {9223372036854775807}> ()  axes = Constant <value = int64[1] {2}> ()"
            "  present_v = Slice (c, start, end, axes)"
        ),
        ("concat", 2, "value", False, 16),
    ),
    "beams": (
        "float[B,2,P,8] past_key, int64[B] beams, float[B,2,S,8] x",
        "float[B,2,T,8] present_key",
        "g = Gather <axis = 0> (past_key, beams)  present_key = Concat <axis = 2> (g, x)",
        ("concat", 2, "key", True, None),
    ),
    "elements": (
        "float[B,2,16,8] past_key, int64[B,2,S,8] where, float[B,2,S,8] x",
        "float[B,2,16,8] present_key",
        "present_key = ScatterElements <axis = 2> (past_key, where, x)",
        ("scatter", 2, "key", False, None),
    ),
    "coordinates": (
        "float[B,2,16,8] past_key, int64[B,2,S,3] where, float[B,2,S,8] x",
        "float[B,2,16,8] present_key",
        "present_key = ScatterND (past_key, where, x)",
        ("scatter", 2, "key", False, None),
    ),
    "selected": (
        "float[B,2,16,8] past_key, bool[B,1,16,1] here, float[B,2,1,8] x",
        "float[B,2,16,8] present_key",
        "present_key = Where (here, x, past_key)",
        ("scatter", 2, "key", False, None),
    ),
    "quantised": (
        "uint8[B,2,P,8] past_key, float scale, float[B,2,S,8] x",
        "uint8[B,2,T,8] present_key",
        "p = DequantizeLinear (past_key, scale)  c = Concat <axis = 2> (p, x)  present_key = QuantizeLinear (c, scale)",
        ("concat", 2, "key", True, None),
    ),
    "branches": (
        "float[B,2,P,8] past_key, bool use_cache, float[B,2,S,8] x",
        "float[B,2,T,8] present_key",
        (
            "present_key = If (use_cache) <"
            " then_branch = with_past () => (float[B,2,T,8] joined) { joined = Concat <axis = 2> (past_key, x) },"
            " else_branch = without () => (float[B,2,T,8] fresh) { fresh = Identity (x) } >"
        ),
        ("concat", 2, "key", True, None),
    ),
    "cross": (
        "float[B,2,E,8] past_key_values.0.encoder.key, float[B,2,S,8] x",
        "float[B,2,E,8] present.0.encoder.key",
        '"present.0.encoder.key" = Identity ("past_key_values.0.encoder.key")',
        ("passthrough", 2, "key", False, None),
    ),
}


def built(name: str) -> ir.Model:
    inputs, outputs, nodes, _ = FORMS[name]
    text = f"{HEAD}\ng ({inputs}) => ({outputs}) {{ {nodes} }}"
    # The text form has no dots in names.
    text = text.replace('"present.0.encoder.key"', "OUT").replace('"past_key_values.0.encoder.key"', "IN")
    text = text.replace("past_key_values.0.encoder.key", "IN").replace("present.0.encoder.key", "OUT")
    model = parse(text)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = {"IN": "past_key_values.0.encoder.key", "OUT": "present.0.encoder.key"}.get(
            value.name or "", value.name
        )
    return model


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_write(name):
    (site,) = found_in(built(name))
    form, axis, kind, grows, window = FORMS[name][3]
    assert (site.form, site.axis, site.kind, site.grows, site.window) == (form, axis, kind, grows, window)
    assert site.cross == (name == "cross")
    assert site.id == ("cache:0.cross.key" if site.cross else f"cache:0.{kind}")


def test_a_write_inside_a_function_is_followed_through_the_call():
    model = parse(
        f"{HEAD}\n"
        "g (float[B,2,P,8] past_key_0, float[B,2,P,8] past_key_1, float[B,2,S,8] x)"
        " => (float[B,2,T,8] present_key_0, float[B,2,T,8] present_key_1)"
        " { y, present_key_0 = local.layer (x, past_key_0)  z, present_key_1 = local.layer (y, past_key_1) }\n"
        '<domain: "local", opset_import: ["" : 21]>\n'
        "layer (h, past) => (out, present) { present = Concat <axis = 2> (past, h)  out = Relu (h) }"
    )
    sites = found_in(model)
    assert [(site.id, site.input.name if site.input else None, site.output.name) for site in sites] == [
        ("cache:0.key", "past_key_0", "present_key_0"),
        ("cache:1.key", "past_key_1", "present_key_1"),
    ]


SCORES = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[B,2,S,8] q, float[B,2,P,8] a, float[B,2,P,8] b, float[B,2,S,8] x) => (float[B,2,S,8] y, float[B,2,T,8] c, float[B,2,T,8] d)
{
    c = Concat <axis = 2> (a, x)
    d = Concat <axis = 2> (b, x)
    t = Transpose <perm = [0, 1, 3, 2]> (d)
    s = MatMul (q, t)
    p = Softmax (s)
    y = MatMul (p, c)
}
"""


def test_where_names_say_nothing_the_products_tell_keys_from_values():
    sites = found_in(parse(SCORES))
    assert [(site.id, site.input.name if site.input else None, site.output.name) for site in sites] == [
        ("cache:0.value", "a", "c"),
        ("cache:0.key", "b", "d"),
    ]


OTHERS = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[B,3,H,W] pixel_values, int64[B,S] input_ids, int64[B,T] attention_mask, float[B,S,16] hidden_states, float[B,S,16] x)
    => (float[B,3,G,W] pixels, int64[B,S] ids, int64[B,U] mask, float[B,S,16] last_hidden_state, float[B,V,16] joined)
{
    pixels = Concat <axis = 2> (pixel_values, pixel_values)
    ids = Identity (input_ids)
    mask = Concat <axis = 1> (attention_mask, attention_mask)
    last_hidden_state = Relu (hidden_states)
    joined = Concat <axis = 1> (x, hidden_states)
}
"""


def test_pixels_ids_masks_and_hidden_states_are_no_caches():
    assert found_in(parse(OTHERS)) == []


STATES = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[B,4,8] ssm_state_in_0, float[B,4,8] ssm_state_in_1, float[B,4,8] past_state_other, float[B,4,8] x)
    => (float[B,4,8] ssm_state_out_0, float[B,4,8] ssm_state_out_1, float[B,4,8] present_state_other)
{
    a = Mul (ssm_state_in_0, x)
    ssm_state_out_0 = Add (a, x)
    b = Mul (ssm_state_in_1, a)
    ssm_state_out_1 = Add (b, x)
    present_state_other = Relu (x)
}
"""


def test_states_are_paired_by_name_and_must_depend_on_their_input():
    sites = found_in(parse(STATES))
    assert [(site.id, site.input.name if site.input else None, site.output.name, site.form) for site in sites] == [
        ("cache:0.recurrent", "ssm_state_in_0", "ssm_state_out_0", "state"),
        ("cache:1.recurrent", "ssm_state_in_1", "ssm_state_out_1", "state"),
    ]


def test_layers_are_numbered_by_order_where_names_do_not_tell():
    model = parse(SCORES)
    for value in model.graph.inputs:
        value.name = {"a": "past.v", "b": "past.k"}.get(value.name or "", value.name)
    assert [site.id for site in found_in(model)] == ["cache:0.value", "cache:0.key"]
    model = load(FIXTURES / "genai_llama" / "model.onnx")
    for value in model.graph.inputs[2:]:
        value.name = (value.name or "").replace("past_key_values.1", "past_key_values.0") + f"_{id(value)}"
    assert sorted(site.layer or 0 for site in find_caches(model, Shapes(model))) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("input.cache.layers.12.keys", "key", 12),
        ("past_key_values.3.value", "value", 3),
        ("past_key_values.3.encoder.key", "key", 3),
        ("present.7.key", "key", 7),
        ("past_value.11_RetainedState", "value", 11),
        ("past_key.0", "key", 0),
        ("k_cache_5", "key", 5),
        ("cache.layers.2.conv_states.0", "conv", 2),
        ("past_key_values.4.recurrent_state", "recurrent", 4),
        ("compressed_kv.6", "latent", 6),
        ("k_pe.6", "rope", 6),
        ("input.cache.layers.0._sliding_window_tensor", "window", 0),
        ("input.cache.layers.1.cumulative_length", "length", 1),
        ("kv2", None, 2),
        ("hidden", None, None),
    ],
)
def test_what_names_tell(name, kind, layer):
    assert (kind_of_name(name), layer_of_name(name)) == (kind, layer)


def test_names_of_caches_and_of_others():
    for name in ("past_key.0", "present.1.value", "kv_cache", "ssm_state", "conv_states.0", "cache.layers.0.keys"):
        assert is_cache_name(name), name
    for name in ("hidden_states", "last_hidden_state", "attentions.0", "past_sequence_length", "logits", "input_ids"):
        assert not is_cache_name(name), name
    assert cache_key("past_key_values.0.conv_state") == cache_key("present.0.conv_state")
    assert cache_key("past_key_values.0.conv_state") != cache_key("present.1.conv_state")
    assert cache_key("recurrent_state.2") == cache_key("recurrent_state.2_RetainedState")
