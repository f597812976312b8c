"""``graphsurgery diff``."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from tests.directories import digests


@pytest.fixture
def edited(llama, tmp_path):
    """Makes a copy of the export with one change of the given severity."""

    def make(severity: str):
        model = onnx.ModelProto.FromString(llama.read_bytes())
        if severity == "minor":
            node = next(node for node in model.graph.node if node.op_type == "Softmax")
            node.attribute[0].i = 1
        elif severity == "moderate":
            model.graph.node[-1].op_type = "Gemm"
        elif severity == "major":
            model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        elif severity == "blocking":
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((100, 100), np.float32), "unused"))
        path = tmp_path / f"{severity}.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return make


def test_nothing_is_written_and_nothing_differs(run, genai):
    before = digests(genai)
    done = run("diff", genai, genai, "--fail-on", "minor")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "severity: none"
    assert "\x1b" not in done.out
    assert digests(genai) == before


@pytest.mark.parametrize("severity", ["none", "minor", "moderate", "major"])
@pytest.mark.parametrize("limit", [None, "none", "minor", "moderate", "major", "blocking"])
def test_exit_codes(run, llama, edited, severity, limit):
    path = edited(severity)
    done = run("diff", llama, path, *(() if limit is None else ("--fail-on", limit)))
    levels = ["none", "minor", "moderate", "major"]
    fails = limit in levels[1:] and levels.index(severity) >= levels.index(limit)
    assert done.code == (1 if fails else 0)
    assert done.out.splitlines()[-1] == f"severity: {severity}"
    expected = f"graphsurgery: {path} differs from {llama}: severity {severity} (llama.onnx).\n"
    assert done.err == (expected if fails else "")


def test_growth_can_fail_too(run, llama, edited):
    path = edited("blocking")
    assert run("diff", llama, path, "--fail-on", "moderate").code == 0
    done = run("diff", llama, path, "--fail-on", "moderate", "--fail-on", "blocking")
    assert done.code == 1
    assert done.err == f"graphsurgery: {path} is 10 % or more larger than {llama} (llama.onnx).\n"
    done = run("diff", llama, path, "--fail-on", "minor", "--fail-on", "blocking")
    assert (done.code, done.err) == (1, f"graphsurgery: {path} differs from {llama}: severity minor (llama.onnx).\n")


def test_forms_of_the_report(run, llama, edited, tmp_path):
    path = edited("minor")
    done = run("diff", llama, path, "--report", "json", "--report-file", tmp_path / "report.json")
    data = json.loads(done.out)
    assert (done.code, done.err, data["kind"], data["severity"]) == (0, "", "diff", "minor")
    assert data["models"][0]["attributes"] == {
        "count": 1,
        "items": [{"op": "Softmax", "name": "node_Softmax_201", "renamed": "", "detail": "axis -1 -> 1"}],
    }
    assert (tmp_path / "report.json").read_text() == done.out
    done = run("diff", llama, path, "--report", "markdown")
    assert done.code == 0
    assert done.out.startswith(f"## Graph diff: 🔵 minor\n\n`{llama}` -> `{path}`\n\n| Model | Sub-model |")


def test_inputs_that_are_refused(run, llama, cases_dir, tmp_path):
    pointer = cases_dir / "s04_lfs_pointer_and_truncated.onnx"
    done = run("diff", llama, pointer)
    assert (done.code, done.out) == (3, "")
    assert done.err == (
        f"graphsurgery: {pointer} is a Git LFS pointer, not the model itself: run `git lfs pull` in its repository.\n"
    )
    assert run("diff", llama, tmp_path / "none.onnx").code == 3
    done = run("diff", llama, tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"graphsurgery: {tmp_path} is a directory and {llama} is not: ")


def test_usage(run, llama):
    done = run("diff", llama, llama, "--fail-on", "huge")
    assert (done.code, done.out) == (2, "")
    assert "'huge' is not one of 'none', 'minor', 'moderate', 'major', 'blocking'" in done.err
    assert run("diff", llama).code == 2
    done = run("diff", llama, llama, "--report-file", llama)
    assert done.code == 2
    assert "is the name of a model" in done.err
