"""Pruning any decoder that exporters may write, held to its contract in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsurgery.errors import UsageError
from graphsurgery.passes.prune_last_token import PruneLastToken
from tests.oracle import assert_pruned_equal, prune, session
from tests.strategies.decoders import Decoder, build, decoders, feeds_of

OPTIONS = st.fixed_dictionaries(
    {
        "index": st.sampled_from(["auto", "last", "mask", "position", "runtime"]),
        "keep": st.integers(1, 4),
        "depth": st.sampled_from(["head", "norm", "layer"]),
        "input_name": st.just("wanted_rows"),
        "input_type": st.sampled_from(["int32_b11", "int64_b"]),
    }
)


def check(decoder: Decoder, options: dict[str, Any]) -> None:
    proto = build(decoder)
    model = ir.from_proto(proto)
    inputs = [value.name for value in model.graph.inputs]
    try:
        sites = prune(model, PruneLastToken(**options))
    except UsageError:
        missing = {"mask": decoder.mask is None, "position": decoder.positions is None}
        assert missing.get(options["index"], False) or decoder.packed or decoder.sizes == "unnamed"
        return
    logits = next(site for site in sites if site.id == "lm_head:logits")
    assert logits.status == "rewritten", logits.reason
    added = ["wanted_rows"] if options["index"] == "runtime" else []
    assert [value.name for value in model.graph.inputs] == inputs + added
    half = decoder.half or decoder.head == "half_cast"
    assert_pruned_equal(session(proto), session(model), model, feeds_of(decoder), lenient=half)
    again = prune(model, PruneLastToken(**options | {"input_name": "more_rows"}))
    assert {site.status for site in again if site.id == "lm_head:logits"} == {"refused"}


@given(decoders(), OPTIONS)
@settings(max_examples=60)
def test_any_decoder_is_pruned_to_its_contract(decoder: Decoder, options: dict[str, Any]):
    check(decoder, options)


@pytest.mark.full
@given(decoders(), OPTIONS)
@settings(max_examples=1500)
def test_any_decoder_is_pruned_to_its_contract_at_length(decoder: Decoder, options: dict[str, Any]):
    check(decoder, options)
