"""``graphsurgery inspect``."""

from __future__ import annotations

import json

import pytest

from tests.directories import digests


def test_a_directory(run, genai):
    before = digests(genai)
    done = run("inspect", genai)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == str(genai / "model.onnx")
    assert "lm_head:logits" in done.out
    assert "\x1b" not in done.out
    assert digests(genai) == before


def test_json_on_stdout_and_in_a_file(run, llama, tmp_path):
    done = run("inspect", llama, "--report", "json", "--report-file", tmp_path / "report.json")
    assert (done.code, done.err) == (0, "")
    data = json.loads(done.out)
    assert data["schema"] == 1
    assert data["path"] == str(llama)
    assert (tmp_path / "report.json").read_text() == done.out


def test_more_detail(run, llama):
    assert len(run("inspect", llama, "-v").out) > len(run("inspect", llama).out)


def test_a_chosen_file(run, genai):
    done = run("inspect", genai, "--file", "model.onnx")
    assert done.code == 0
    done = run("inspect", genai, "--file", "modell.onnx")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"graphsurgery: {genai} has no file 'modell.onnx': the closest is 'model.onnx'.\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("s04_lfs_pointer_and_truncated.onnx", "Git LFS pointer"),
        ("s04_lfs_pointer_and_truncated.truncated.onnx", "cut short"),
        ("s04_lfs_pointer_and_truncated.empty.onnx", "is empty (0 bytes)"),
    ],
)
def test_what_is_no_model(run, cases_dir, name, words):
    done = run("inspect", cases_dir / name)
    assert (done.code, done.out) == (3, "")
    assert done.err.count("\n") == 1
    assert name in done.err
    assert words in done.err


def test_missing_data_is_shown(run, cases_dir):
    done = run("inspect", cases_dir / "s03_external_data_missing_or_short.onnx")
    assert (done.code, done.err) == (0, "")
    assert "warning: the data file" in done.out


def test_a_report_that_cannot_be_written(run, llama, tmp_path):
    done = run("inspect", llama, "--report-file", tmp_path / "deep" / "report.json")
    assert (done.code, done.out) == (2, "")
    assert f"the directory {tmp_path / 'deep'} does not exist: make it first." in done.err
    done = run("inspect", llama, "--report-file", llama)
    assert (done.code, done.out) == (2, "")
    assert f"{llama} is the name of a model: give the report another." in done.err
    done = run("inspect", llama, "--report-file", tmp_path)
    assert (done.code, done.out) == (2, "")
