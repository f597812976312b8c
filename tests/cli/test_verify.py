"""``graphsurgery verify``."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import onnx
import pytest


@pytest.fixture
def pruned(run, llama):
    """The export with its rows pruned."""
    assert run("apply", llama, "-q", "-p", "prune-last-token{index=last}").code == 0
    return llama.with_name("llama.surgery.onnx")


def test_equal(run, llama, pruned):
    done = run("verify", llama, pruned)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1].startswith("equal: ")
    assert "\x1b" not in done.out


def test_json_on_stdout_and_in_a_file(run, llama, pruned, tmp_path):
    done = run("verify", llama, pruned, "--report", "json", "--report-file", tmp_path / "report.json", "--seed", "3")
    assert (done.code, done.err) == (0, "")
    data = json.loads(done.out)
    assert (data["schema"], data["kind"], data["status"], data["exit_code"], data["seed"]) == (
        1,
        "verify",
        "equal",
        0,
        3,
    )
    assert (tmp_path / "report.json").read_text() == done.out
    assert done.out.endswith("}\n")


def test_different(run, llama, fixtures_dir):
    done = run("verify", llama, fixtures_dir / "llama_merged" / "model.onnx", "--report", "json")
    assert done.code == 1
    data = json.loads(done.out)
    assert data["status"] == "different"
    assert data["reasons"]


def test_unchecked(run, cases_dir):
    case = cases_dir / "s13_missing_contrib_opset_and_unknown_domain.onnx"
    done = run("verify", case, case)
    assert done.code == 5
    assert "vendor.ops::Scale" in done.out
    assert done.out.splitlines()[-1].startswith("unchecked: ")


def test_given_feeds(run, cases_dir, tmp_path):
    case = cases_dir / "p02_tied_embedding_transpose.onnx"
    with np.load(cases_dir / "p02_tied_embedding_transpose.feeds.npz") as kept:
        feeds = {key.split("|")[2]: kept[key] for key in kept if key.startswith("f0|in|")}
    np.savez(tmp_path / "feeds.npz", **feeds)
    done = run("verify", case, case, "--feeds", tmp_path / "feeds.npz")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--depth", "deep"], 2, "Depth 'deep' is not known"),
        (["--memory", "lots"], 2, "--memory 'lots' is not a size: write a number with KB, MB, GB, KiB, MiB or GiB."),
        (["--seed", "x"], 2, "'x' is not a valid integer"),
        (["--feeds", "gone.npz"], 2, "gone.npz"),
    ],
)
def test_usage(run, llama, options, code, words):
    done = run("verify", llama, llama, *options)
    assert (done.code, done.out) == (code, "")
    assert done.err.count("\n") == 1
    assert words in done.err


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_model(run, llama, cases_dir, place):
    bad = cases_dir / "s04_lfs_pointer_and_truncated.onnx"
    pair = [llama, llama]
    pair[place] = bad
    done = run("verify", *pair)
    assert (done.code, done.out) == (3, "")
    assert done.err.count("\n") == 1
    assert bad.name in done.err


def test_without_the_runtime(run, llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = run("verify", llama, llama)
    assert (done.code, done.out) == (5, "")
    assert done.err == (
        'graphsurgery: Verifying needs ONNX Runtime, which is not installed: pip install "graphsurgery[verify]".\n'
    )


def test_nothing_is_written(run, llama, pruned, tmp_path, monkeypatch):
    other = tmp_path / "elsewhere"
    other.mkdir()
    for path in (llama, pruned):
        shutil.copy(path, other)
    monkeypatch.chdir(other)
    before = sorted(path.name for path in other.iterdir())
    assert run("verify", llama.name, pruned.name, "-q").code == 0
    assert sorted(path.name for path in other.iterdir()) == before


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("graphsurgery.exact_outputs", text) for text in ("{", "3", "null", '{"logits":1}', "[1]", "[[1]]")),
        *(("graphsurgery.renamed", text) for text in ("{", "3", "null", "[]", '{"inputs":{"a":1},"outputs":{}}')),
        *(("graphsurgery.contracts", text) for text in ("{", "3", "[1]")),
    ],
)
def test_metadata_that_nobody_wrote(run, llama, tmp_path, command, key, text):
    model = onnx.ModelProto.FromString(llama.read_bytes())
    model.metadata_props.add(key=key, value=text)
    other = tmp_path / "other.onnx"
    other.write_bytes(model.SerializeToString())
    done = run(command, *([llama, other] if command == "verify" else [other]))
    assert (done.code, done.out) == (3, "")
    assert done.err == f"graphsurgery: The model's metadata '{key}' is not what graphsurgery writes: remove it.\n"


def test_verbose_shows_more(run, llama):
    short, long = run("verify", llama, llama), run("verify", llama, llama, "-v")
    assert (short.code, long.code) == (0, 0)
    assert "padding" not in short.out
    assert "padding" in long.out
    assert len(long.out.splitlines()) > len(short.out.splitlines()) + 10


def test_help_lists_the_depths(run):
    assert "--depth outputs|generate" in run("verify", "--help").out
