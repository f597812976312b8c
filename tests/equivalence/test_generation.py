"""``verify`` at depth ``generate``: what must pass passes."""

from __future__ import annotations

import pytest

from tests.equivalence.builders import (
    FIXTURES,
    case,
    decoder,
    mixture,
    prune,
)
from tests.equivalence.generating import lengths


def test_a_model_equals_itself(decoded):
    report = decoded(decoder(), decoder(), prompts=None, opt_level_check=True, seed=4)
    assert (report.status, report.exit_code, report.reasons) == ("equal", 0, ())
    assert (report.depth, report.steps, report.seed) == ("generate", 4, 4)
    assert lengths(report) == {
        "b1-s5": (5,),
        "b1-s1": (1,),
        "b2-s7-left": (7, 4),
        "b3-s6-right": (6, 3, 2),
        "b2-s3": (3, 3),
        "b1-s40-in-2": (40,),
        "b1-s200": (200,),
    }
    assert [(prompt.padding, prompt.calls) for prompt in report.prompts] == [
        ("none", 1),
        ("none", 1),
        ("left", 1),
        ("right", 1),
        ("none", 1),
        ("none", 2),
        ("none", 1),
    ]
    assert all(len(row) == 4 for prompt in report.prompts for row in prompt.tokens)
    assert [(out.name, out.level, out.error) for out in report.outputs] == [
        (name, level, 0.0)
        for level in ("disabled", "default")
        for name in ("logits", "present.0.key", "present.0.value")
    ]
    assert (report.left_out, report.warnings, report.notes, report.token_differences) == ((), (), (), ())
    assert report.summary() == "equal: 44 tokens behind 7 prompts (seed 4)"


def test_tokens_follow_from_the_seed(decoded):
    tokens = [decoded(decoder(), decoder(), prompts=None, seed=seed).prompts[0].tokens for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("rows", ["last", "mask", "position", "runtime"])
def test_pruned_rows(decoded, rows):
    source = {"mask": "attention_mask", "position": "position_ids", "runtime": "last_token_indices"}.get(rows)
    report = decoded(decoder(), prune(decoder(), rows, index=rows, source=source), prompts=None)
    assert report.status == "equal", report.reasons
    # A static last row is padding in a batch that is padded on the right.
    assert ("b3-s6-right" in lengths(report)) == (rows != "last")
    assert "b2-s7-left" in lengths(report)


@pytest.mark.parametrize(
    ("name", "index", "keep"),
    [
        ("optimum_llama", "mask", 1),
        ("optimum_llama", "runtime", 3),
        ("llama_static", "position", 3),
        ("genai_llama", "mask", 1),
    ],
)
def test_pruned_exports(decoded, made, name, index, keep):
    source = FIXTURES / name / "model.onnx"
    report = decoded(source, made(source, f"prune-last-token{{index={index},keep={keep}}}"))
    assert report.status == "equal", report.reasons
    assert lengths(report)["all-prompts"] == (5, 3, 1)


def test_a_pruned_cache_with_slots_by_position(decoded, made):
    source = case("a08")
    report = decoded(source, made(source, "prune-last-token{index=position}"))
    assert report.status == "equal", report.reasons
    assert report.prompts[-1].padding == "right"


def test_a_static_last_row_is_not_fed_padding_behind_it(decoded, made):
    source = FIXTURES / "genai_llama" / "model.onnx"
    made_path = made(source, "prune-last-token{index=last}")
    report = decoded(source, made_path)
    assert report.status == "equal", report.reasons
    assert [(each.feed, each.reason) for each in report.left_out] == [
        (
            "all-prompts",
            f"{made_path} does not tell padding from tokens, so it cannot be fed rows of unequal length",
        )
    ]


def test_blocked_attention(decoded, made):
    source = FIXTURES / "optimum_llama" / "model.onnx"
    report = decoded(source, made(source, "block-attention{q_block_size=4}"), prompts=None, steps=3)
    assert report.status == "equal", report.reasons


def test_renamed_caches(decoded, made):
    source = FIXTURES / "llama_static" / "model.onnx"
    report = decoded(source, made(source, "rename-io{to=retained-state}"))
    assert report.status == "equal", report.reasons
    assert {out.rewritten for out in report.outputs} >= {"past_key.0_RetainedState"}


def test_quantised_weights_at_the_default_level(decoded, made):
    source = FIXTURES / "llama_qdq" / "model.onnx"
    report = decoded(source, made(source, "prune-last-token"), opt_level_check=True)
    assert report.status == "equal", report.reasons
    assert {out.level for out in report.outputs} == {"disabled", "default"}


def test_hidden_states_are_drawn_for_each_token(decoded):
    report = decoded(case("p11"), case("p11"))
    assert report.status == "equal", report.reasons
    assert report.notes == ("input inputs_embeds takes hidden states: every token is given a drawn vector",)


def test_a_model_without_a_cache_is_fed_the_whole_sequence(decoded):
    report = decoded(mixture(), mixture())
    assert report.status == "equal", report.reasons
    assert lengths(report)["all-prompts"] == (5, 3, 1)
    assert [out.name for out in report.outputs] == ["logits"]
