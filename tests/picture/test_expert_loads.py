"""Tokens by expert of drawn samples, and the rows of each form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from graphsurgery.picture.expert_loads import TOKENS, expert_pictures
from graphsurgery.site_report import PassReport, SiteReport

if TYPE_CHECKING:
    from graphsurgery.site_report import Status


def _reports(*details: dict[str, Any], status: Status = "rewritten") -> list[PassReport]:
    sites = [SiteReport(f"experts:{i}", ("experts",), i, status, "", dict(item)) for i, item in enumerate(details)]
    return [PassReport("gather-experts", "gather-experts", sites)]


DETAIL = {"experts": 16, "top_k": 4, "form": "dense", "strategy": "packed", "chunk_size": 32}


def test_every_token_takes_k_different_experts():
    (found,) = expert_pictures(_reports(DETAIL, DETAIL))
    assert (found.sites, found.layers) == (("experts:0", "experts:1"), (0, 1))
    assert (found.experts, found.top_k, found.tokens, found.useful_rows) == (16, 4, TOKENS, TOKENS * 4)
    even, skewed = found.loads
    assert (even.name, skewed.name) == ("even", "skewed")
    for load in found.loads:
        assert sum(load.tokens) == TOKENS * 4
        assert max(load.tokens) <= TOKENS
    assert max(even.tokens) - min(even.tokens) < 60
    assert skewed.tokens[0] > 3 * skewed.tokens[-1]
    assert list(skewed.tokens[:3]) == sorted(skewed.tokens[:3], reverse=True)


def test_rows():
    (found,) = expert_pictures(_reports(DETAIL))
    for load in found.loads:
        packed = sum((count + 31) // 32 * 32 for count in load.tokens)
        assert load.rows == {"dense": 16 * TOKENS, "gather": 4 * TOKENS, "grouped": 4 * TOKENS, "packed": packed}
        assert 4 * TOKENS <= packed <= 4 * TOKENS + 16 * 31


def test_unrolled_slots_compute_every_chunk():
    (found,) = expert_pictures(_reports(DETAIL | {"lowering": "unroll", "chunk_size": 300}))
    assert {load.rows["packed"] for load in found.loads} == {16 * 600}


def test_all_experts_chosen():
    (found,) = expert_pictures(_reports(DETAIL | {"experts": 4}))
    assert {load.tokens for load in found.loads} == {(TOKENS,) * 4}


@pytest.mark.parametrize(
    "change", [{"experts": "16"}, {"top_k": None}, {"top_k": 17}, {"top_k": 0}, {"experts": 10**6}]
)
def test_details_that_say_nothing_of_experts(change):
    assert expert_pictures(_reports(DETAIL | change)) == ()


def test_refused_blocks_are_left_out():
    assert expert_pictures(_reports(DETAIL, status="refused")) == ()


def test_kinds_are_kept_apart():
    found = expert_pictures(_reports(DETAIL, DETAIL | {"form": "loop"}, DETAIL))
    assert [(item.form, item.layers) for item in found] == [("dense", (0, 2)), ("loop", (1,))]
