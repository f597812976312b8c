"""What the documents say is held true: field names, commands, exit codes, the example pass."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from graphsurgery import errors
from graphsurgery.cli import main
from graphsurgery.equivalence.bisecting import BisectedPass
from graphsurgery.equivalence.generation_report import PromptReport, TokenDifference, TopTwo
from graphsurgery.equivalence.regions.region_report import RegionReport
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.equivalence.verify_report import VerifyReport
from graphsurgery.inspection import inspect_model
from graphsurgery.listing import describe_passes, describe_recipe
from graphsurgery.picture.expert_loads import expert_pictures
from graphsurgery.site_report import PassReport, SiteReport
from graphsurgery.workflow import ApplyRequest, apply_passes

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")),
]


def _blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


# ---- docs/reports.md --------------------------------------------------------------------------------------------------


def _documented() -> dict[str, list[str]]:
    """Field names by the path of the object that holds them, in the order of the page."""
    text = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    found = {}
    for path, section in re.findall(r"<!-- fields: (\S+) -->\n(.*?)(?=\n#|\n<!--|\Z)", text, flags=re.S):
        found[path] = re.findall(r"^\| `(\w+)` \|", section, flags=re.M)
    return found


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> dict[str, Any]:
    """One real document of each kind."""
    directory = tmp_path_factory.mktemp("documents")
    fixtures = ROOT / "fixtures"
    model = Path(shutil.copy(fixtures / "optimum_llama" / "model.onnx", directory / "model.onnx"))
    specs = ("prune-last-token{index=mask}", "block-attention{q_blocks=2}")
    result = apply_passes(ApplyRequest(input=model, specs=specs, verify="outputs", picture=True))
    assert result.output is not None
    # No expert block in this model: the report of one is made up.
    block = SiteReport("experts:0", ("experts",), 0, "rewritten", "", {"experts": 8, "top_k": 2})
    experts = expert_pictures([PassReport("gather-experts", "gather-experts", [block])])
    left_out = verify_models(fixtures / "genai_llama" / "model.onnx", fixtures / "genai_llama" / "model.onnx")
    # Models whose tokens differ are hard to come by: the report of such a run is made up.
    two = TopTwo(1, 2.0, 3, 1.0, 1.0)
    where = ("a", "b", "node", ("tidy",), ("site",))
    region = RegionReport(*where, "equal", 1, (2, 3), 1, 2, 0.0, 1e-5, "float32", "f", (0,), None)
    decoded = VerifyReport(
        "a.onnx",
        "b.onnx",
        "different",
        depth="generate",
        prompts=(PromptReport("p", (3,), "none", 1, ((1, 2),)),),
        token_differences=(TokenDifference("p", 0, 1, "disabled", two, two, 0.5, 0.1, tie=False),),
        regions=(region,),
        bisected=(BisectedPass("tidy", "equal"),),
    ).to_json()
    verify = json.loads(left_out.dumps())
    verify |= {key: decoded[key] for key in ("prompts", "token_differences", "regions", "bisected")}
    applied = json.loads(result.report.to_json())
    picture = applied["picture"] | {"experts": [json.loads(json.dumps(dataclasses.asdict(item))) for item in experts]}
    return {
        "picture": picture,
        "apply": applied,
        "inspect": json.loads(inspect_model(result.output).to_json()),
        "verify": verify,
        "passes": json.loads(json.dumps(describe_passes())),
        "recipe": json.loads(json.dumps(describe_recipe("prefill"))),
    }


def _at(documents: dict[str, Any], path: str) -> dict[str, Any]:
    """The first object at ``path``, through lists."""
    found: Any = documents
    for name in path.split("."):
        found = found[name]
        while isinstance(found, list):
            found = found[0]
    assert isinstance(found, dict)
    return found


def test_every_object_is_documented():
    assert set(_documented()) == {
        "apply",
        "apply.passes",
        "apply.passes.sites",
        "apply.passes.sites.boundaries",
        "inspect",
        "inspect.inputs",
        "inspect.runs",
        "inspect.contracts",
        "picture",
        "picture.operators",
        "picture.layers",
        "picture.attention",
        "picture.attention.sample",
        "picture.attention.division",
        "picture.attention.division.blocks",
        "picture.experts",
        "picture.experts.loads",
        "verify",
        "verify.outputs",
        "verify.feeds",
        "verify.left_out",
        "verify.prompts",
        "verify.token_differences",
        "verify.token_differences.reference",
        "verify.regions",
        "verify.bisected",
        "passes",
        "passes.options",
        "recipe",
    }


@pytest.mark.parametrize("path", list(_documented()))
def test_the_documented_fields_are_the_real_ones(documents, path):
    assert list(_at(documents, path)) == _documented()[path]


def test_documents_within_documents(documents):
    assert list(documents["apply"]["verification"]) == _documented()["verify"]
    assert list(documents["inspect"]["outputs"][0]) == _documented()["inspect.inputs"]
    without_changed = [name for name in _documented()["apply.passes"] if name != "changed"]
    assert list(documents["inspect"]["passes"][0]) == without_changed
    assert {documents[kind]["schema"] for kind in ("apply", "inspect", "verify")} == {1}


def test_the_exit_codes_are_all_there():
    text = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \| ", text, flags=re.M)}
    assert listed == {getattr(errors, name).exit_code for name in errors.__all__} | {0, 130}


# ---- README.md --------------------------------------------------------------------------------------------------------


def test_the_first_block_gets_a_new_user_to_a_result(tmp_path, monkeypatch, capsys):
    lines = _blocks("README.md", "bash")[0].splitlines()
    assert lines[0].startswith("python -m venv ")
    installing = [line for line in lines if line.startswith("pip install ")]
    assert installing
    assert all("[verify]" in line for line in installing)
    command = next(line for line in lines if line.startswith("python -m graphsurgery "))
    shutil.copytree(ROOT / "fixtures" / "genai_llama", tmp_path / "fixtures" / "genai_llama")
    monkeypatch.chdir(tmp_path)
    # The shell's own splitting: quotes in the README must be right.
    words = subprocess.run(
        ["bash", "-c", f'printf "%s\\n" {command.removeprefix("python -m graphsurgery ")}'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    assert "equal: " in capsys.readouterr().out


def test_the_second_block_runs_the_tests():
    text = _blocks("README.md", "bash")[1]
    assert "pip install" in text
    assert "[test]" in text
    assert re.search(r"\bpytest\b", text)


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    (code,) = _blocks("README.md", "python")
    shutil.copy(ROOT / "fixtures" / "optimum_llama" / "model.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "equal\n"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


# ---- docs/forms.md ----------------------------------------------------------------------------------------------------


def test_forms_are_held_by_tests_that_exist():
    text = (ROOT / "docs" / "forms.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 100
    there = {
        path: re.findall(r"^def (test_\w+)\(", (ROOT / "tests" / path).read_text(encoding="utf-8"), flags=re.M)
        for path in {path for path, _ in named}
    }
    assert [f"{path}::{name}" for path, name in named if name not in there[path]] == []


def test_every_form_names_what_becomes_of_it_and_a_test():
    rows = re.findall(r"^\| (?!-)(.*) \|$", (ROOT / "docs" / "forms.md").read_text(encoding="utf-8"), flags=re.M)
    forms = [row for row in rows if not row.endswith("| tests")]
    assert len(forms) > 50
    assert [row for row in forms if "::test_" not in row.rsplit(" | ", 1)[1] or not all(row.split(" | "))] == []


# ---- CONTRIBUTING.md --------------------------------------------------------------------------------------------------


def test_the_folders_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for folder in re.findall(r"^\| `([\w/]+)` \| ", text, flags=re.M):
        assert (ROOT / folder).exists(), folder


# ---- continuous integration -------------------------------------------------------------------------------------------


def test_the_ci_script_takes_its_commands_from_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    subprocess.run(["bash", "-n", str(script)], check=True)
    function = re.search(r"^block\(\) \{\n.*?^\}$", text, flags=re.M | re.S)
    assert function is not None
    for number, block in enumerate(_blocks("README.md", "bash")[:2], start=1):
        done = subprocess.run(
            ["bash", "-c", f"{function.group()}\nblock {number}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == block
    for tool in ("ruff check", "ruff format --check", "mypy"):
        assert f'step "{tool}" {tool}\n' in text


def test_the_commit_hooks_fetch_nothing():
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"repo: (\S+)", text) == ["local"]
    assert set(re.findall(r"language: (\S+)", text)) == {"system"}


def test_the_licence_is_the_one_that_is_named():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.split("\n", 3)[1].strip() == "Apache License"
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
