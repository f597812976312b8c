"""``verify`` at depth ``generate``: options, progress, and every fixture."""

from __future__ import annotations

import pytest
from onnx import TensorProto as T

from graphsurgery.equivalence import verify_models
from graphsurgery.errors import UsageError
from tests.equivalence.builders import (
    FIXTURES,
    case,
    decoder,
)

# Options --------------------------------------------------------------------------------------------------------------


def test_nothing_to_decode_is_unchecked(decoded):
    path = case("m01")
    report = decoded(path, path, prompts=None)
    assert (report.status, report.exit_code) == ("unchecked", 5)
    assert report.reasons == (f"{path} has no logits, so nothing can be decoded: check it with --depth outputs.",)


def test_prompts_that_do_not_fit_are_unchecked(decoded):
    path = case("a08")
    report = decoded(path, path, prompts=[tuple(range(20))])
    assert report.status == "unchecked"
    assert report.reasons == (f"No prompt could be decoded; the last, prompt-0: {path} holds 16 positions.",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"depth": "generate", "steps": 0},
            "0 steps are too few: the prompt itself gives the first token, so 1 or more.",
        ),
        (
            {"depth": "generate", "feeds": {}},
            "Feeds are inputs of single calls, for depth outputs: give prompts to depth generate.",
        ),
        (
            {"steps": 3},
            "Steps, prompts and files to decode with belong to depth generate: ask for it, or leave them out.",
        ),
        ({"depth": "all"}, "Depth 'all' is not known: choose auto or outputs or generate or regions."),
    ],
)
def test_usage(options, words):
    path = FIXTURES / "llama" / "model.onnx"
    with pytest.raises(UsageError) as error:
        verify_models(path, path, **options)
    assert str(error.value) == words


def test_progress_is_told_for_every_prompt(decoded):
    told: list[tuple[str, int, int]] = []
    decoded(decoder(), decoder(), progress=lambda *step: told.append(step), opt_level_check=True)
    assert [done for _, done, _ in told] == list(range(1, 17))
    assert {total for _, _, total in told} == {16}
    assert told[0][0] == "reference prompt-0"
    assert told[4][0] == "rewritten prompt-0"


def test_other_types_of_logits(decoded):
    report = decoded(decoder(T.FLOAT16), decoder(T.FLOAT16))
    assert report.status == "equal", report.reasons
    assert report.outputs[0].tolerance == 2e-3


# Everything -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*.onnx")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_fixture_equals_itself(path):
    report = verify_models(path, path, depth="generate", steps=6)
    if path.stem in {"language_model", "lm_head"}:
        assert report.reasons == (f"{path} has no logits, so nothing can be decoded: check it with --depth outputs.",)
        return
    assert report.status == "equal", report.reasons
    assert len(report.prompts) >= 4
    assert report.tie_flips == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [path for path in sorted(FIXTURES.glob("*/*.onnx")) if path.stem in {"model", "decode"}],
    ids=lambda path: path.parent.name,
)
def test_every_fixture_decodes_alike_with_pruned_rows(decoded, made, path):
    report = decoded(path, made(path, "prune-last-token"), prompts=None, steps=5, opt_level_check=True)
    assert report.status == "equal", report.reasons
