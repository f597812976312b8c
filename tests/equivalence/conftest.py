"""Models to verify, and models that passes made."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from graphsurgery import Pipeline, load
from graphsurgery import save as save_model
from graphsurgery.equivalence import VerifyReport, verify_models
from tests.equivalence.builders import IDS, save


@pytest.fixture
def compared(tmp_path):
    """Two models, output by output."""

    def run(a, b, **options) -> VerifyReport:
        return verify_models(save(a, tmp_path / "a.onnx"), save(b, tmp_path / "b.onnx"), **options)

    return run


@pytest.fixture
def decoded(tmp_path):
    """Two models, decoding side by side."""

    def run(a, b, **given: Any) -> VerifyReport:
        paths = []
        for name, model in (("a", a), ("b", b)):
            paths.append(save(model, tmp_path / f"{name}.onnx") if isinstance(model, onnx.ModelProto) else model)
        options: Any = {"steps": 4, "opt_level_check": False, "prompts": IDS} | given
        return verify_models(*paths, depth="generate", **options)

    return run


@pytest.fixture
def made(tmp_path):
    """A model to which passes were applied."""

    def make(source, *specs: str, name: str = "made"):
        model = load(source)
        Pipeline(list(specs))(model)
        save_model(model, tmp_path / f"{name}.onnx")
        return tmp_path / f"{name}.onnx"

    return make
