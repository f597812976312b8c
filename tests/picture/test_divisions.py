"""Blocks at a sample length, from what the blocking pass reports."""

from __future__ import annotations

from typing import Any

import pytest

from graphsurgery.picture.divisions import with_divisions
from graphsurgery.picture.parts import MaskDivision, MaskPicture
from graphsurgery.site_report import PassReport, SiteReport
from tests.html_helpers import causal_sample


def _divide(status: Any = "rewritten", **detail: Any) -> MaskDivision | None:
    mask = MaskPicture("mask", ("attention:0", "attention:1"), (0, 1), ("attention",), causal_sample(64, 8))
    site = SiteReport("attention:1", ("attention",), 1, status, "", detail)
    (found,) = with_divisions([mask], [PassReport("block-attention", "block-attention", [site])])
    return found.division


def _keys(**detail: Any) -> list[list[tuple[int, int]]]:
    found = _divide(**detail)
    assert found is not None
    return [list(block.keys) for block in found.blocks]


def test_one_block():
    found = _divide(q_blocks=1, kv_blocks=1, skip="none")
    assert found is not None
    assert (found.skip, found.computed) == ("none", 64 * 64)
    assert [(block.queries, block.keys) for block in found.blocks] == [((0, 64), ((0, 64),))]


@pytest.mark.parametrize("told", [3, "of 22"])
def test_the_last_block_is_shorter(told):
    found = _divide(q_blocks=told, kv_blocks=1, skip="none")
    assert found is not None
    assert [block.queries for block in found.blocks] == [(0, 22), (22, 44), (44, 64)]


def test_trimmed_keys_are_divided():
    assert _keys(q_blocks=2, kv_blocks=2, skip="trim") == [[(0, 16), (16, 32)], [(0, 32), (32, 64)]]
    found = _divide(q_blocks=4, kv_blocks=1, skip="trim")
    assert found is not None
    assert found.computed == 16 * (16 + 32 + 48 + 64)


def test_skipped_blocks_are_not_computed():
    assert _keys(q_blocks=2, kv_blocks=4, skip="if") == [[(0, 16), (16, 32)], [(0, 16), (16, 32), (32, 48), (48, 64)]]


def test_discarded_blocks_are_computed():
    found = _divide(q_blocks=2, kv_blocks=4, skip="where")
    assert found is not None
    assert found.computed == 64 * 64


@pytest.mark.parametrize("changes", [{"status": "refused", "q_blocks": 2}, {"other": 1}])
def test_what_was_not_divided(changes):
    assert _divide(**changes) is None


def test_a_mask_that_is_not_told():
    mask = MaskPicture(None, ("attention:1",), (), (), None, "no mask")
    site = SiteReport("attention:1", (), None, "rewritten", "", {"q_blocks": 2})
    (found,) = with_divisions([mask], [PassReport("block-attention", "block-attention", [site])])
    assert found == mask


def test_blocks_without_number_are_not_drawn():
    assert _divide(q_blocks="of 1", kv_blocks="of 1", skip="none") is not None
    mask = MaskPicture("m", ("attention:1",), (1,), (), causal_sample(1024, 32))
    site = SiteReport("attention:1", (), 1, "rewritten", "", {"q_blocks": "of 1", "kv_blocks": "of 1", "skip": "none"})
    (found,) = with_divisions([mask], [PassReport("block-attention", "block-attention", [site])])
    assert found.division is None
