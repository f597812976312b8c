"""The specialisations file: what users say, what the symbols of a model get, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphsurgery.errors import UsageError
from graphsurgery.model_io import load
from graphsurgery.pipeline import Pipeline
from graphsurgery.specializations import bind_specializations, parse_specializations, specializations_text

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = Path(__file__).parent / "cases"


def bound(path: Path, *texts: str) -> list[tuple[str, dict[str, int]]]:
    bindings = bind_specializations(load(path), parse_specializations(texts))
    return [(item.name, dict(item.symbols)) for item in bindings]


def test_without_a_name_it_is_a_prefill_and_a_decode():
    items = parse_specializations(["seq=128,ctx=4096", "verify: seq = 8 , past=4"])
    assert [(item.name, dict(item.sizes)) for item in items] == [
        ("Prefill", {"seq": 128, "ctx": 4096}),
        ("Decode", {"seq": 1, "ctx": 4096}),
        ("Verify", {"seq": 8, "past": 4}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq", "--specialize 'seq' is not of the form NAME:ROLE=SIZE,...: e.g. prefill:seq=128,ctx=4096."),
        ("", "--specialize '' is not of the form NAME:ROLE=SIZE,...: e.g. prefill:seq=128,ctx=4096."),
        ("a:seq=x", "--specialize 'a:seq=x' is not of the form NAME:ROLE=SIZE,...: e.g. prefill:seq=128,ctx=4096."),
        ("seq=1,", "--specialize 'seq=1,' is not of the form NAME:ROLE=SIZE,...: e.g. prefill:seq=128,ctx=4096."),
        ("seq=1,seq=2", "--specialize 'seq=1,seq=2' gives seq twice; keep one."),
        ("seq=-1", "--specialize 'seq=-1' is not of the form NAME:ROLE=SIZE,...: e.g. prefill:seq=128,ctx=4096."),
    ],
)
def test_texts_that_cannot_be_read(text, message):
    with pytest.raises(UsageError) as caught:
        parse_specializations([text])
    assert str(caught.value) == message


def test_the_same_twice():
    with pytest.raises(UsageError) as caught:
        parse_specializations(["seq=1,ctx=8", "decode:seq=1,ctx=8"])
    assert str(caught.value) == (
        "--specialize 'decode:seq=1,ctx=8': Decode with these sizes is there already; leave it out."
    )


def test_a_cache_of_a_fixed_size():
    assert bound(FIXTURES / "llama_static" / "model.onnx", "seq=128,ctx=4096,batch=2") == [
        ("Prefill", {"s10": 2, "s69": 128, "s12": 4096}),
        ("Decode", {"s10": 2, "s69": 1, "s12": 4096}),
    ]


def test_a_cache_that_grows_has_what_the_context_leaves():
    assert bound(FIXTURES / "optimum_llama" / "model.onnx", "seq=128,ctx=4096") == [
        ("Prefill", {"batch_size": 1, "sequence_length": 128, "past_sequence_length": 3968}),
        ("Decode", {"batch_size": 1, "sequence_length": 1, "past_sequence_length": 4095}),
    ]
    path = CASES / "a10_genai_gqa_contrib_empty_slots.onnx"
    assert bound(path, "prefill:seq=8,past=0") == [
        ("Prefill", {"batch_size": 1, "sequence_length": 8, "past_sequence_length": 0, "total_sequence_length": 8}),
    ]
    # Several names of one role get one number; a name goes before its role.
    assert bound(FIXTURES / "gemma2" / "model.onnx", "a:seq=8,ctx=64", "b:seq=8,ctx=64,s39=7") == [
        ("A", {"s10": 1, "s70": 8, "s39": 56, "s8": 56}),
        ("B", {"s10": 1, "s70": 8, "s39": 7, "s8": 56}),
    ]


def test_sizes_by_symbol():
    assert bound(FIXTURES / "qwen3_vl_moe" / "decode.onnx", "decode:s22=1,s39=5,s10=3,s40=3") == [
        ("Decode", {"s10": 3, "s40": 3, "s22": 1, "s39": 5})
    ]


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        (
            "llama",
            "p:seq=8",
            (
                "--specialize 'p:seq=8' leaves P without a size for s39 (axis 2 of input 'input.cache.layers.0.keys'): add "
                "past=SIZE."
            ),
        ),
        (
            "llama",
            "p:seq=8,ctx=4",
            "--specialize 'p:seq=8,ctx=4': P cannot be: its context of 4 is shorter than its 8 tokens.",
        ),
        (
            "llama",
            "p:sec=8",
            "Unknown role or symbol in --specialize 'p:sec=8': 'sec'; did you mean seq?",
        ),
        (
            "llama_static",
            "p:seq=8,ctx=16,past=4",
            (
                "--specialize 'p:seq=8,ctx=16,past=4': no size of the inputs is the past; its roles are batch (s10), seq (s69), "
                "context (s12)."
            ),
        ),
    ],
)
def test_sizes_that_do_not_fit(model, text, message):
    with pytest.raises(UsageError) as caught:
        bound(FIXTURES / model / "model.onnx", text)
    assert str(caught.value) == message


def test_sizes_that_contradict_each_other():
    with pytest.raises(UsageError) as caught:
        bound(FIXTURES / "optimum_llama" / "model.onnx", "p:seq=8,ctx=16,past=4")
    message = "Dim 'past_sequence_length + sequence_length' cannot be both 16 (total=16) and 12 ("
    assert str(caught.value).startswith(message)


def test_fixed_sizes_are_held_to():
    path = CASES / "a08_static_cache_scatter_ctx16.onnx"
    assert bound(path, "d:seq=1,ctx=16") == [("D", {"batch_size": 1, "seq_len": 1})]
    with pytest.raises(UsageError) as caught:
        bound(path, "d:seq=1,ctx=17")
    assert str(caught.value) == "Axis 2 of input 'past_key.0' cannot be both 17 (context=17) and 16 (its fixed size)."


def test_a_model_without_symbols():
    model = load(FIXTURES / "llama" / "model.onnx")
    from graphsurgery.passes.bind_dims import BindDims

    BindDims(batch=1, seq=4, past=0)(model)
    with pytest.raises(UsageError) as caught:
        bind_specializations(model, parse_specializations(["seq=4"]))
    assert str(caught.value) == "--specializations: no input of the result has a symbolic size; leave it out."


def test_the_file():
    bindings = bind_specializations(
        load(FIXTURES / "llama_static" / "model.onnx"), parse_specializations(["seq=128,ctx=4096"])
    )
    text = specializations_text(bindings)
    assert json.loads(text) == {
        "specializations": [
            {"name": "Prefill", "symbols": {"s10": "1", "s69": "128", "s12": "4096"}},
            {"name": "Decode", "symbols": {"s10": "1", "s69": "1", "s12": "4096"}},
        ]
    }
    assert text.endswith("}\n")


def test_bounds_of_each_phase_and_the_whole_context_where_none_is_told():
    model = load(CASES / "a08_static_cache_scatter_ctx16.onnx")
    Pipeline(["bound-context"])(model)
    wanted = parse_specializations(
        ["prefill:seq=4", "decode:seq=1,bound=4/8/16", "decode:seq=1,batch=2,comp_ctx_lengths=6"]
    )
    assert [(item.name, dict(item.symbols)) for item in bind_specializations(model, wanted)] == [
        ("Prefill", {"batch_size": 1, "seq_len": 4, "comp_ctx_lengths": 16}),
        ("Decode", {"batch_size": 1, "seq_len": 1, "comp_ctx_lengths": 4}),
        ("Decode", {"batch_size": 1, "seq_len": 1, "comp_ctx_lengths": 8}),
        ("Decode", {"batch_size": 1, "seq_len": 1, "comp_ctx_lengths": 16}),
        ("Decode", {"batch_size": 2, "seq_len": 1, "comp_ctx_lengths": 6}),
    ]
    both = bind_specializations(model, parse_specializations(["seq=4/8,ccl=8"]))
    assert [(item.name, item.symbols["seq_len"], item.symbols["comp_ctx_lengths"]) for item in both] == [
        ("Prefill", 4, 8),
        ("Prefill", 8, 8),
        ("Decode", 1, 8),
    ]
    with pytest.raises(UsageError) as caught:
        bind_specializations(model, parse_specializations(["decode:seq=1,bound=32"]))
    assert str(caught.value) == (
        "--specialize 'decode:seq=1,bound=32': Decode cannot be: its bound of 32 is not between 1 and its context of 16."
    )


def test_a_bound_without_an_input_for_it():
    with pytest.raises(UsageError, match="Unknown role or symbol in --specialize 'decode:bound=4': 'bound'"):
        bind_specializations(
            load(CASES / "a08_static_cache_scatter_ctx16.onnx"), parse_specializations(["decode:bound=4"])
        )
