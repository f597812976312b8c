"""Running the command line within the test process."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from graphsurgery import registry
from graphsurgery.cli import main


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.err.splitlines()[-1] if self.err else ""


@pytest.fixture
def run(capfd):
    """Calls ``main`` with its arguments; the exit code and what was printed."""

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as left:
            main([str(item) for item in arguments])
        captured = capfd.readouterr()
        code = left.value.code
        assert isinstance(code, int)
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def saboteur(monkeypatch):
    """Registers the pass that breaks models."""
    monkeypatch.setattr(registry, "_PASSES", {**registry._PASSES, "saboteur": "tests.small_models:Saboteur"})


@pytest.fixture
def genai(fixtures_dir, tmp_path) -> Path:
    """A GenAI export in a directory of its own."""
    return Path(shutil.copytree(fixtures_dir / "genai_llama", tmp_path / "genai"))


@pytest.fixture
def llama(fixtures_dir, tmp_path) -> Path:
    """A plain export with its weights inside."""
    return Path(shutil.copy(fixtures_dir / "llama" / "model.onnx", tmp_path / "llama.onnx"))
