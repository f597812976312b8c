from __future__ import annotations

import dataclasses
import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from graphsurgery.equivalence.feeds import LeftOut
from graphsurgery.equivalence.generation_report import PromptReport, TokenDifference, TopTwo
from graphsurgery.equivalence.verify_report import FeedReport, OutputReport, VerifyReport

GOOD = OutputReport("logits", "logits", "disabled", 3e-7, 1e-5, "float32", "b1-s5-p0", 0, (0, 1, 2), None)
BAD = OutputReport(
    "present", "kept", "disabled", math.inf, 0.0, "float32", "b2-s1-p6", 0, None, "has shape [1], not [2]"
)
FEED = FeedReport("b1-s5-p0", 1, 5, 0, "none")


def printed(report, *, verbose: bool = False) -> Any:
    stream = io.StringIO()
    report.render(Console(file=stream, width=140), verbose=verbose)
    return stream.getvalue()


@pytest.mark.parametrize(("status", "code"), [("equal", 0), ("different", 1), ("unchecked", 5)])
def test_exit_codes(status, code):
    assert VerifyReport("a", "b", status, reasons=("x",)).exit_code == code


def test_json_is_versioned_and_has_no_infinity():
    report = VerifyReport("a", "b", "different", reasons=("no",), outputs=(GOOD, BAD), feeds=(FEED,))
    data = json.loads(report.dumps())
    assert (data["schema"], data["kind"], data["status"], data["exit_code"]) == (1, "verify", "different", 1)
    assert data["outputs"][0]["error"] == 3e-7
    assert data["outputs"][0]["index"] == [0, 1, 2]
    assert data["outputs"][1]["error"] == "inf"
    assert data["feeds"] == [{"name": "b1-s5-p0", "batch": 1, "length": 5, "past": 0, "padding": "none"}]


def test_the_worst_output_is_the_one_that_fails():
    assert VerifyReport("a", "b", "different", outputs=(GOOD, BAD)).worst is BAD
    assert VerifyReport("a", "b", "equal").worst is None


def test_the_table_says_what_was_found():
    report = VerifyReport(
        "a",
        "b",
        "different",
        reasons=("output kept has shape [1], not [2] (feed b2-s1-p6)",),
        outputs=(GOOD, BAD),
        feeds=(FEED,),
        left_out=(LeftOut("b1-s200-p0", "the reference fails: out of bounds"),),
        routers=("r",),
        tie_flips=1,
        routed_rows=80,
        excluded_rows=20,
        notes=("assumed index=mask for logits",),
        warnings=("input x is gone",),
        threads=2,
    )
    text = printed(report)
    for words in (
        "3.0e-07",
        "[0, 1, 2]",
        "present / kept",
        "bitwise",
        "feeds (seed 0, 2 threads): b1-s5-p0",
        "left out: b1-s200-p0: the reference fails: out of bounds",
        "routers: 1, 80 choices compared, 1 flipped at a tie, 20 token rows left out for it",
        "note: assumed index=mask for logits",
        "warning: input x is gone",
        "different: output kept has shape [1], not [2] (feed b2-s1-p6)",
    ):
        assert words in text
    assert "\x1b" not in text


def test_one_line_summaries():
    equal = VerifyReport("a", "b", "equal", outputs=(GOOD,), feeds=(FEED,), seed=3)
    assert equal.summary() == "equal: 1 outputs on 1 feeds (seed 3)"
    assert printed(equal).endswith("equal: 1 outputs on 1 feeds (seed 3)\n")
    assert VerifyReport("a", "b", "unchecked", reasons=("why",)).summary() == "unchecked: why"
    assert VerifyReport("a", "b", "different", reasons=("x", "y")).summary() == "different: x (and 1 more)"


def test_the_summary_says_what_no_feed_covers():
    lost = tuple(LeftOut(f"f{number}", "why") for number in range(5))
    report = VerifyReport(
        "a", "b", "equal", outputs=(GOOD,), feeds=(FEED,), left_out=lost, uncovered=("batch above 1", "past")
    )
    assert report.summary() == "equal: 1 outputs on 1 feeds (seed 0; 5 left out: no batch above 1, no past)"
    assert dataclasses.replace(report, uncovered=()).summary() == "equal: 1 outputs on 1 feeds (seed 0; 5 left out)"
    data = json.loads(report.dumps())
    assert data["left_out"][0] == {"feed": "f0", "reason": "why"}
    assert data["uncovered"] == ["batch above 1", "past"]


def test_more_is_printed_when_asked_for():
    lost = tuple(LeftOut(f"f{number}", "why") for number in range(5))
    notes = tuple(f"assumed {number}" for number in range(6))
    report = VerifyReport("a", "b", "equal", outputs=(GOOD,), feeds=(FEED,), left_out=lost, notes=notes)
    short, long = printed(report), printed(report, verbose=True)
    assert [line for line in short.splitlines() if line.startswith("note")] == [
        "note: assumed 0",
        "note: assumed 1",
        "note: assumed 2",
        "note: 3 more, listed with -v",
    ]
    assert "left out: 2 more, listed with -v" in short
    assert [line for line in long.splitlines() if line.startswith("note")] == [f"note: {note}" for note in notes]
    assert long.count("left out: f") == 5
    assert "padding" in long
    assert "padding" not in short


def test_what_decoding_found_is_plain_data():
    best = TopTwo(1, math.inf, 2, math.nan, 0.5)
    found = TokenDifference("p", 0, 3, "disabled", best, best, math.nan, 1e-5, False)
    report = VerifyReport(
        "a",
        "b",
        "different",
        reasons=("no",),
        depth="generate",
        prompts=(PromptReport("p", (3, 2), "left", 1, ((1, 2), (3, 4))),),
        token_differences=(found,),
    )
    data = json.loads(report.dumps())
    assert data["prompts"] == [
        {"name": "p", "lengths": [3, 2], "padding": "left", "calls": 1, "tokens": [[1, 2], [3, 4]]}
    ]
    assert data["token_differences"][0]["reference"] == {
        "best": 1,
        "best_logit": "inf",
        "second": 2,
        "second_logit": "nan",
        "gap": 0.5,
    }
    assert data["token_differences"][0]["gap"] == "nan"
    equal = VerifyReport("a", "b", "equal", depth="generate", prompts=report.prompts, threads=2, seed=7)
    assert printed(equal) == "prompts (seed 7, 2 threads): p\nequal: 4 tokens behind 1 prompts (seed 7)\n"
