"""Interfaces that are not one decoder on [B, S]: packed streams, two sequences, weights that are fed, odd names."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.contracts import read_contracts
from graphsurgery.passes.prune_last_token import PruneLastToken
from tests.oracle import assert_pruned_equal, prune, session

RNG = np.random.default_rng(5)
WEIGHTS = {
    "table": RNG.standard_normal((16, 4)).astype(np.float32),
    "w": RNG.standard_normal((4, 8)).astype(np.float32),
}
HEADER = '<ir_version: 9, opset_import: ["" : 18]>'


def model_of(text: str) -> ir.Model:
    """A model whose weights ``table [16, 4]`` and ``w [4, 8]`` are initializers, where it does not feed them."""
    model = ir.from_onnx_text(f"{HEADER} {text}")
    fed = {value.name for value in model.graph.inputs}
    used: dict[str, ir.Value] = {}
    for node in model.graph:
        for value in node.inputs:
            if value is not None and value.name in WEIGHTS and value.name not in fed:
                used[value.name] = value
    for name, value in used.items():
        value.const_value = ir.tensor(WEIGHTS[name], name=name)
        model.graph.register_initializer(value)
    return model


def hold(text: str, feeds: list[dict[str, np.ndarray]], **options: Any) -> ir.Model:
    before, model = model_of(text), model_of(text)
    sites = prune(model, PruneLastToken(**options))
    assert [site.status for site in sites] == ["rewritten"], [site.reason for site in sites]
    assert_pruned_equal(session(before), session(model), model, feeds)
    return model


def ids(*shape: int) -> np.ndarray:
    return RNG.integers(0, 16, shape)


PACKED = """
g (int64[T] input_ids, int64[N] cu_seqlens) => (float[{out}] logits)
{{
    h = Gather(table, input_ids)
    zero = Constant <value_ints = [0]> ()
    {body}
}}
"""


@pytest.mark.parametrize(
    ("out", "body"),
    [
        ("T,8", "logits = MatMul(h, w)"),
        ("1,T,8", "b = Unsqueeze(h, zero) logits = MatMul(b, w)"),
        ("T,8", "b = Unsqueeze(h, zero) p = MatMul(b, w) logits = Squeeze(p, zero)"),
        ("T,8", "logits = Gemm(h, w)"),
    ],
)
@pytest.mark.parametrize("options", [{"index": "last"}, {"index": "runtime", "keep": 2}, {"index": "last", "keep": 3}])
def test_packed_streams(out: str, body: str, options: dict[str, Any]):
    feeds = [{"input_ids": ids(length), "cu_seqlens": np.array([0, 1, length])} for length in (7, 2)]
    model = hold(PACKED.format(out=out, body=body), feeds, **options)
    (contract,) = read_contracts(model)
    assert (contract.sequence, contract.sequence_axis, contract.batch_axis, contract.flat) == (
        "input_ids",
        0,
        None,
        False,
    )


def test_packed_embeddings():
    text = "g (float[T,4] inputs_embeds) => (float[T,8] logits) { h = Tanh(inputs_embeds) logits = MatMul(h, w) }"
    hold(text, [{"inputs_embeds": RNG.standard_normal((6, 4)).astype(np.float32)}], index="runtime")


TWO_SEQUENCES = """
g (int64[B,E] input_ids, int64[B,E] attention_mask, int64[B,S] decoder_input_ids{more}) => (float[B,S,8] logits)
{{
    e = Gather(table, input_ids)
    one = Constant <value_ints = [1]> ()
    kept = Cast <to = 1> (attention_mask)
    two = Constant <value_ints = [2]> ()
    wide = Unsqueeze(kept, two)
    seen = Mul(e, wide)
    context = ReduceMean(seen, one)
    d = Gather(table, decoder_input_ids)
    h = Add(d, context)
    logits = MatMul(h, w)
}}
"""


def test_the_decoder_of_two_sequences():
    feeds = [
        {"input_ids": ids(2, 7), "attention_mask": np.ones((2, 7), np.int64), "decoder_input_ids": ids(2, length)}
        for length in (3, 1)
    ]
    model = hold(TWO_SEQUENCES.format(more=""), feeds)
    (contract,) = read_contracts(model)
    assert (contract.index, contract.sequence) == ("last", "decoder_input_ids")


def test_its_own_mask_where_it_has_one():
    text = TWO_SEQUENCES.format(more=", int64[B,S] decoder_attention_mask")
    feed = {"input_ids": ids(2, 7), "attention_mask": np.ones((2, 7), np.int64), "decoder_input_ids": ids(2, 3)}
    model = hold(text, [feed | {"decoder_attention_mask": np.array([[1, 1, 0], [1, 1, 1]])}])
    (contract,) = read_contracts(model)
    assert (contract.index, contract.source) == ("mask", "decoder_attention_mask")


def test_weights_that_are_fed():
    text = """
g (float[16,4] table, float[4,8] w, int64[B,S] ids) => (float[B,S,8] logits)
{ h = Gather(table, ids) logits = MatMul(h, w) }
"""
    model = hold(text, [WEIGHTS | {"ids": ids(2, 5)}], index="runtime")
    assert [value.name for value in model.graph.inputs] == ["table", "w", "ids", "last_token_indices"]


def test_states_of_a_recurrent_model_are_no_tokens():
    text = """
g (float[B,4] state_0, float[B,3,4] states_1, int64[B,S] tokens) => (float[B,S,8] logits, float[B,4] state_0_out)
{
    h = Gather(table, tokens)
    one = Constant <value_ints = [1]> ()
    s = Unsqueeze(state_0, one)
    t = ReduceSum(states_1, one)
    u = Add(h, s)
    v = Add(u, t)
    logits = MatMul(v, w)
    state_0_out = Neg(state_0)
}
"""
    state = RNG.standard_normal((2, 4)).astype(np.float32)
    feed = {"state_0": state, "states_1": RNG.standard_normal((2, 3, 4)).astype(np.float32), "tokens": ids(2, 5)}
    hold(text, [feed], index="runtime")


def test_one_symbol_for_batch_and_rows_by_mistake():
    text = """
g (int64[N,N] input_ids, int64[N,N] attention_mask) => (float[N,N,8] logits)
{ h = Gather(table, input_ids) k = Cast <to = 1> (attention_mask) logits = MatMul(h, w) }
"""
    hold(text, [{"input_ids": ids(4, 4), "attention_mask": np.tril(np.ones((4, 4), np.int64))}])


def test_only_the_width_of_the_mask_has_a_name():
    text = """
g (int64[1,4] input_ids, int64[1,T] attention_mask, float[1,2,P,4] past_key) => (float[1,4,8] logits)
{ h = Gather(table, input_ids) k = Cast <to = 1> (attention_mask) q = Neg(past_key) logits = MatMul(h, w) }
"""
    feeds = [
        {
            "input_ids": ids(1, 4),
            "attention_mask": np.array([[1] * past + mask]),
            "past_key": np.zeros((1, 2, past, 4), np.float32),
        }
        for past, mask in ((0, [1, 1, 0, 0]), (3, [1, 1, 1, 0]), (1, [0, 1, 1, 1]))
    ]
    model = hold(text, feeds)
    assert read_contracts(model)[0].index == "mask"


def test_outputs_that_are_sequences_are_left_alone():
    text = """
g (int64[B,S] input_ids) => (float[B,S,8] logits, seq(float[B,S,4]) hidden_logits)
{ h = Gather(table, input_ids) logits = MatMul(h, w) hidden_logits = SequenceConstruct(h) }
"""
    before, model = model_of(text), model_of(text)
    sites = {site.id: site for site in prune(model, PruneLastToken())}
    assert sites["lm_head:logits"].status == "rewritten"
    assert sites["lm_head:hidden_logits"].status == "refused"
    feed = {"input_ids": ids(2, 3)}
    old, new = (session(item).run(["hidden_logits"], feed)[0] for item in (before, model))
    np.testing.assert_array_equal(old, new)


def test_a_head_alone_in_its_file():
    text = "g (float[B,S,4] hidden_states) => (float[B,S,8] logits) { logits = MatMul(hidden_states, w) }"
    feed = {"hidden_states": RNG.standard_normal((2, 5, 4)).astype(np.float32)}
    for options in ({"index": "last"}, {"index": "runtime"}, {"index": "last", "keep": 3, "depth": "norm"}):
        hold(text, [feed], **options)


def test_sizes_that_only_the_output_declares():
    text = """
g (int64[B,S] input_ids, int64[3] form) => (float[B,S,8] logits)
{ h = Gather(table, input_ids) r = Reshape(h, form) p = MatMul(r, w) logits = Tanh(p) }
"""
    feeds = [
        {"input_ids": ids(3, 5), "form": np.array([3, 5, 4])},
        {"input_ids": ids(1, 2), "form": np.array([1, 2, 4])},
    ]
    model = hold(text, feeds, index="runtime", keep=2)
    assert str(model.graph.outputs[0].shape) == "[B,2,8]"
