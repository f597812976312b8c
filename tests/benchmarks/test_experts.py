"""`benchmarks/_experts.py`: the forms that are measured are the same model, and are recognised for what they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime as ort
import pytest

from graphsurgery.model_io import load, save
from graphsurgery.pipeline import Pipeline

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _experts import MixtureSize, WideSize, write_mixture, write_wide


def _compare(path: Path, output: Path, feeds: dict[str, np.ndarray], form: str, blocks: int) -> None:
    model = load(path)
    report = Pipeline(["gather-experts"])(model).passes[0]
    assert [site.detail["form"] for site in report.sites] == [form] * blocks
    save(model, output, force=True)
    results = [ort.InferenceSession(str(item)).run(None, feeds)[0] for item in (path, output)]
    assert float(np.std(results[0])) > 0.01
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-4 * float(np.abs(results[0]).max()))


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("form", ["grouped", "batched", "loop"])
def test_the_decoder_in_each_form(form: Literal["grouped", "batched", "loop"], external: bool, tmp_path: Path) -> None:
    size = MixtureSize(
        layers=2, hidden=32, heads=4, kv_heads=2, head=8, vocabulary=64, experts=5, top_k=2, expert_inner=12, form=form
    )
    write_mixture(tmp_path / "model.onnx", size, external=external)
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {
        f"past.{layer}.{kind}": np.zeros((1, 2, 0, 8), np.float32) for layer in (0, 1) for kind in ("key", "value")
    }
    feeds |= {"input_ids": rng.integers(0, 64, (1, 9)), "position_ids": np.arange(9)[None]}
    _compare(tmp_path / "model.onnx", tmp_path / "out.onnx", feeds, form, 2)


def test_the_wide_block(tmp_path: Path) -> None:
    write_wide(tmp_path / "wide.onnx", WideSize(experts=6, top_k=2, hidden=16, inner=8))
    x = np.random.default_rng(0).standard_normal((7, 16)).astype(np.float32)
    _compare(tmp_path / "wide.onnx", tmp_path / "out.onnx", {"x": x}, "dense", 1)
