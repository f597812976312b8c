"""Whatever is fed to the command line, it answers with an exit code and a line, never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphsurgery.recipes import recipe_names

ROOT = Path(__file__).parents[2]
CASES = sorted((ROOT / "tests" / "cases").rglob("*.onnx"))
FIXTURES = sorted((ROOT / "fixtures").glob("*/*.onnx"))


def _answers(done) -> None:
    """Done, or refused with one line: the file, or sizes with which its graph cannot run."""
    assert done.code in (0, 3) or (done.code == 2 and "The graph cannot run with " in done.err), done.err
    assert "Traceback" not in done.err
    if done.code:
        assert done.out == ""
        assert done.err.startswith("graphsurgery: ")
        assert done.err.count("\n") == 1
    else:
        assert all(line.startswith("warning: ") for line in done.err.splitlines())


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_every_hostile_case_is_answered(run, tmp_path, case):
    output = tmp_path / "out.onnx"
    done = run("apply", case, "-o", output, "-p", "prune-last-token", "-p", "tidy", "--check")
    _answers(done)
    assert output.exists() == (done.code == 0)


@pytest.mark.full
@pytest.mark.parametrize("model", [*CASES, *FIXTURES], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_model_is_answered_by_every_recipe_and_inspected(run, tmp_path, model):
    for recipe in recipe_names():
        _answers(run("apply", model, "-o", tmp_path / f"{recipe}.onnx", "--recipe", recipe, "--check"))
    _answers(run("inspect", model))
