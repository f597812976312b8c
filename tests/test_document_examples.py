"""Examples in the documents and docstrings are run: what they print is what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

import graphsurgery
from graphsurgery import registry
from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.small_models import op_types, parse

ROOT = Path(__file__).parents[1]


def _blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


# ---- docs/writing-a-pass.md -----------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch):
    """The pass of the page, registered."""
    (code,) = _blocks("docs/writing-a-pass.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 42
    module = types.ModuleType("drop_identity_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "docs/writing-a-pass.md", "exec"), vars(module))
    passes = {**registry._PASSES, "drop-identity": f"{module.__name__}:DropIdentity"}
    monkeypatch.setattr(registry, "_PASSES", passes)


def test_the_example_pass_is_a_pass(example):
    model = parse(
        """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[B,4] x) => (float[B,4] y, float[B,4] z)
        { a = Identity(x)  b = Relu(a)  c = Identity(b)  y = Neg(c)  z = Identity(c) }
        """
    )
    report = Pipeline(["drop-identity"], check=True)(model)
    assert [(site.id, site.status) for site in report.passes[0].sites] == [
        ("identity:a", "rewritten"),
        ("identity:c", "rewritten"),
        ("identity:z", "refused"),
    ]
    assert op_types(model) == ["Relu", "Neg", "Identity"]
    assert violations(model) == []
    assert not Pipeline(["drop-identity"])(model).changed


def test_the_example_runs_on_a_fixture(example, monkeypatch, capsys):
    (code,) = _blocks("docs/writing-a-pass.md", "python run")
    monkeypatch.chdir(ROOT)
    exec(compile(code, "docs/writing-a-pass.md", "exec"), {"graphsurgery": graphsurgery})
    assert re.fullmatch(r"drop-identity \['rewritten'.*\]\n", capsys.readouterr().out)


# ---- docstrings -----------------------------------------------------------------------------------------------------------


def _modules() -> list[str]:
    """All modules whose source holds an example."""
    found = []
    for info in pkgutil.walk_packages(graphsurgery.__path__, "graphsurgery."):
        spec = info.module_finder.find_spec(info.name, None)
        if spec is not None and spec.origin is not None and ">>> " in Path(spec.origin).read_text(encoding="utf-8"):
            found.append(info.name)
    return found


@pytest.mark.parametrize("name", _modules())
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name), verbose=False)
    assert result.attempted
    assert not result.failed


def test_there_are_examples():
    assert {"graphsurgery.specs", "graphsurgery.sizes", "graphsurgery.benching.gates"} <= {*_modules()}
