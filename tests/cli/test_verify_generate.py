"""``graphsurgery verify --depth generate`` and ``apply --verify=generate``."""

from __future__ import annotations

import json

import pytest

GENERATE = ("--depth", "generate", "--steps", "3")


@pytest.fixture
def pruned(run, llama):
    """The export with its rows pruned."""
    assert run("apply", llama, "-q", "-p", "prune-last-token{index=last}").code == 0
    return llama.with_name("llama.surgery.onnx")


def test_equal(run, llama, pruned):
    done = run("verify", llama, pruned, *GENERATE, "--prompt", "1,2,3", "--prompt", "4,5,6")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "prompts (seed 0, 2 threads): prompt-0, prompt-1, all-prompts" in lines
    assert lines[-1] == "equal: 12 tokens behind 3 prompts (seed 0)"


def test_different(run, llama, fixtures_dir, tmp_path):
    other = fixtures_dir / "llama_merged" / "model.onnx"
    done = run("verify", llama, other, *GENERATE, "--prompt", "1,2,3", "--report-file", tmp_path / "report.json")
    assert (done.code, done.err) == (1, "")
    assert "│ second │ " in done.out
    assert "no tie: in the reference " in done.out
    data = json.loads((tmp_path / "report.json").read_text())
    assert (data["depth"], data["status"], data["steps"]) == ("generate", "different", 3)
    assert data["prompts"][0]["lengths"] == [3]
    found = data["token_differences"][0]
    assert (found["tie"], found["prompt"]) == (False, "prompt-0")
    assert found["reference"]["best"] != found["rewritten"]["best"]


def test_two_files(run, llama, pruned):
    done = run(
        "verify",
        llama,
        pruned,
        *GENERATE,
        "--decode",
        llama,
        "--reference-decode",
        llama,
        "--prompt",
        "1,2",
        "--report",
        "json",
    )
    assert (done.code, done.err) == (0, "")
    data = json.loads(done.out)
    assert (data["decode"], data["decode_reference"]) == (str(llama), str(llama))


def test_apply(run, llama):
    done = run("apply", llama, "-p", "prune-last-token{index=last}", "--verify=generate", "--report", "json")
    assert done.code == 0
    verification = json.loads(done.out)["verification"]
    assert (verification["depth"], verification["status"], verification["steps"]) == ("generate", "equal", 10)
    assert [prompt["name"] for prompt in verification["prompts"]] == [
        "b1-s5",
        "b1-s1",
        "b2-s7",
        "b1-s40-in-2",
        "b1-s200",
    ]


@pytest.mark.usefixtures("saboteur")
def test_nothing_is_written_where_tokens_differ(run, llama):
    before = sorted(llama.parent.iterdir())
    done = run("apply", llama, "-p", "saboteur{how=values}", "--verify=generate")
    assert done.code == 1
    assert f"The result does not compute the same as {llama}: " in done.err
    assert sorted(llama.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--depth", "generate", "--steps", "0"], "0 steps are too few: the prompt itself gives the first token"),
        (["--steps", "3"], "Steps, prompts and files to decode with belong to depth generate"),
        (["--prompt", "1,2"], "Steps, prompts and files to decode with belong to depth generate"),
        (["--decode", "b.onnx"], "Steps, prompts and files to decode with belong to depth generate"),
        (["--depth", "generate", "--feeds", "x.npz"], "Feeds are inputs of single calls, for depth outputs"),
        (["--depth", "generate", "--prompt", "1,64"], "Prompt id 64 is no token of "),
        (["--depth", "generate", "--prompt", "Once upon"], "The prompt is text and there is no "),
        (["--depth", "generate", "--prompt", "gone.json"], "The prompt file gone.json does not exist."),
    ],
)
def test_usage(run, llama, options, words):
    done = run("verify", llama, llama, *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert words in done.err


def test_a_decode_file_that_is_no_model(run, llama, cases_dir):
    bad = cases_dir / "s04_lfs_pointer_and_truncated.onnx"
    done = run("verify", llama, llama, "--depth", "generate", "--decode", bad)
    assert (done.code, done.out) == (3, "")
    assert bad.name in done.err
