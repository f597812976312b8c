"""gather-experts on blocks of every make: all strategies give what the plain block gives, and each other's values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphsurgery.passes.gather_experts import GatherExperts
from graphsurgery.patterns.experts.sites import ExpertSite
from graphsurgery.patterns.site import Refusal
from graphsurgery.site_report import PassReport
from tests.oracle import run, session, tolerance_of
from tests.passes.expert_blocks import Block, build

if TYPE_CHECKING:
    import onnx_ir as ir

STRATEGIES = [
    GatherExperts(),
    GatherExperts(strategy="gather"),
    GatherExperts(strategy="dense"),
    GatherExperts(strategy="packed", lowering="loop", chunk_size=3),
    GatherExperts(strategy="packed", lowering="loop", chunk_size=2, lanes=3),
    GatherExperts(strategy="packed", lowering="unroll", chunk_size=3),
    GatherExperts(strategy="packed", lowering="unroll", chunk_size=4, lanes=3),
    GatherExperts(target="npu", chunk_size=3, lanes=2),
]

blocks = st.builds(
    Block,
    experts=st.integers(3, 9),
    top_k=st.integers(1, 3),
    hidden=st.sampled_from([4, 8]),
    inner=st.sampled_from([3, 6]),
    tokens=st.sampled_from([None, None, 1, 6, 11]),
    activation=st.sampled_from(["silu", "gelu", "clamped"]),
    bias=st.booleans(),
    stacked=st.booleans(),
    transposed=st.booleans(),
    weighting=st.sampled_from(["last", "first", "none"]),
    routing=st.sampled_from(["top_k", "fed"]),
    spread=st.booleans(),
    scale=st.booleans(),
    quantized=st.sampled_from(["", "", "tensor", "axis"]),
    opset=st.sampled_from([13, 17, 20, 21, 23]),
    dtype=st.sampled_from(["float32", "float32", "float16"]),
    seed=st.integers(0, 5),
).map(lambda block: dataclasses.replace(block, opset=21) if block.quantized and block.dtype == "float16" else block)
"""Scales of float16 came with opset 19."""


def rewritten(block: Block, pass_: GatherExperts) -> tuple[ExpertSite | Refusal, ir.Model, PassReport]:
    """The site as the pass sees it, the model after it, and its report."""
    built = build(block)
    report = PassReport(pass_.name, str(pass_))
    site = pass_.usable(built.site, built.model)
    assert isinstance(site, ExpertSite | Refusal)
    if isinstance(site, ExpertSite):
        assert pass_.rewrite(built.model, [site], report) == {"y"}
    return site, built.model, report


def assert_equal(block: Block, pass_: GatherExperts, counts: list[int]) -> None:
    """The block after ``pass_`` gives what it gave, at several numbers of tokens and with one expert preferred."""
    built = build(block)
    site, model, report = rewritten(block, pass_)
    if isinstance(site, Refusal):
        assert pass_.lowering == "unroll"
        assert block.tokens is None
        assert "lowering=unroll needs a fixed number of tokens" in site.reason
        return
    assert [item.status for item in report.sites] == ["rewritten"]
    before, after = session(built.proto), session(model)
    for count in counts if block.tokens is None else [block.tokens]:
        for favourite in (None, 1):
            feeds = built.feeds(count, seed=count, favourite=favourite)
            wanted, found = run(before, feeds)["y"], run(after, feeds)["y"]
            assert found.shape == wanted.shape
            assert found.dtype == wanted.dtype
            scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
            np.testing.assert_allclose(
                found.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=tolerance_of(wanted) * scale
            )


@pytest.mark.parametrize("pass_", STRATEGIES, ids=str)
@given(block=blocks)
@example(block=Block(routing="fed", top_k=3, experts=3, tokens=7))
@example(block=Block(experts=7, top_k=3, tokens=1))
@example(block=Block(opset=11, bias=True, tokens=6))
def test_every_make_of_block(pass_: GatherExperts, block: Block) -> None:
    assert_equal(block, pass_, [0, 1, 2, 7, 16])


@pytest.mark.parametrize("opset", [11, 12, 13, 14, 18, 20, 25])
@pytest.mark.parametrize("pass_", STRATEGIES, ids=str)
def test_batch_and_length(pass_: GatherExperts, opset: int) -> None:
    """Tokens ``[B, S, H]``, none included, at every form of the operators."""
    for size in (None, 6):
        assert_equal(Block(batch=True, opset=opset, bias=True, tokens=size), pass_, [0, 2, 12])


@given(chunk_size=st.integers(1, 9), lanes=st.integers(1, 8), experts=st.integers(3, 7), tokens=st.integers(1, 12))
def test_any_chunks_and_lanes(chunk_size: int, lanes: int, experts: int, tokens: int) -> None:
    lowerings: tuple[tuple[Literal["loop", "unroll"], int | None], ...] = (("loop", None), ("unroll", tokens))
    for lowering, size in lowerings:
        packed = GatherExperts(strategy="packed", lowering=lowering, chunk_size=chunk_size, lanes=lanes)
        assert_equal(Block(experts=experts, tokens=size), packed, [0, 1, tokens])


def test_weights_of_zero_and_below_count() -> None:
    """Who runs is said by the indices: a negative weight is a weight, and an expert chosen twice counts twice."""
    built = build(Block(routing="fed", experts=3, top_k=2))
    feeds = built.feeds(4)
    feeds["indices"] = np.array([[0, 0], [1, 2], [2, 2], [0, 1]])
    feeds["weights"] = np.array([[1, 2], [-3, 0], [0, 0], [-1, -1]], np.float32)
    wanted = run(session(built.proto), feeds)["y"]
    assert np.abs(wanted[0]).max() > 0.1
    assert not wanted[2].any()
    for pass_ in STRATEGIES:
        if pass_.lowering == "unroll":
            continue
        _, model, _ = rewritten(Block(routing="fed", experts=3, top_k=2), pass_)
        np.testing.assert_allclose(run(session(model), feeds)["y"], wanted, rtol=0, atol=1e-5)


def test_a_token_that_is_not_finite_stays_alone() -> None:
    """Rows of other tokens are not touched by one of NaN: nothing is masked by multiplication."""
    for pass_ in STRATEGIES:
        built = build(Block(tokens=6))
        feeds = built.feeds(6)
        feeds["x"][2] = np.nan
        wanted = run(session(built.proto), feeds)["y"]
        _, model, _ = rewritten(Block(tokens=6), pass_)
        found = run(session(model), feeds)["y"]
        assert np.isnan(found[2]).all()
        np.testing.assert_allclose(np.delete(found, 2, 0), np.delete(wanted, 2, 0), rtol=0, atol=1e-5)
