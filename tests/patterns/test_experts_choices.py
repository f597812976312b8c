"""A dense model is told from one that chooses experts before anything is inferred."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from graphsurgery import load
from graphsurgery.analysis import shapes as shapes_module
from graphsurgery.patterns.experts.choices import may_choose
from graphsurgery.patterns.experts.finding import find_experts
from graphsurgery.patterns.matcher import GraphIndex
from graphsurgery.pipeline import Pipeline

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _may_choose(model: ir.Model) -> bool:
    return may_choose(model.graph, GraphIndex(model))


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama", "llama_opset23", "llama_qdq", "qwen3"])
def test_dense_models_choose_nothing(name: str) -> None:
    assert not _may_choose(load(FIXTURES / name / "model.onnx"))


@pytest.mark.parametrize(
    "name", ["deepseek_v3_grouped", "gpt_oss_static", "mixtral_batched", "optimum_qwen3_moe", "qwen3_moe_grouped"]
)
def test_models_with_experts_are_read(name: str) -> None:
    assert _may_choose(load(FIXTURES / name / "model.onnx"))


@pytest.mark.parametrize("recipe", ["prefill", "decode", "unified"])
def test_no_shapes_are_inferred_for_the_experts_of_a_dense_model(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[ir.Model] = []

    class Counted(shapes_module.Shapes):
        def __init__(self, model: ir.Model, earlier: shapes_module.Shapes | None = None) -> None:
            walks.append(model)
            super().__init__(model, earlier)

    monkeypatch.setattr(shapes_module, "Shapes", Counted)
    model = load(FIXTURES / "llama" / "model.onnx")
    Pipeline.from_recipe(recipe)(model)
    # One for each pass that edits: pruning, where the recipe has it, and blocking.
    assert len(walks) == (1 if recipe == "decode" else 2)
    assert find_experts(model) == []


def _graph(text: str) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 18, "vendor" : 1]>\n{text}')


@pytest.mark.parametrize(
    "text",
    [
        "g (float[T, 4] scores) => (int64[T, 1] out) { out = ArgMax<axis = -1>(scores) }",
        "g (float[T, 4] scores) => (int64[T, 2] out) { out = Cast<to = 7>(scores) }",
        "g (float[T, 4] scores) => (int64[T, 2] out) { out = vendor.Route(scores) }",
        "g (int64[T, 2] chosen) => (int64[T, 2] out) { out = Identity(chosen) }",
        "g (int64[T] ids) => (int64[T, 2] out) <int64[3, 2] table = {0, 1, 1, 2, 0, 2}> { out = Gather(table, ids) }",
        "g (int64[T] i) => (int64[T, 2] o) { t = Constant<value = int64[3, 2] {0, 1, 1, 2, 0, 2}>() o = Gather(t, i) }",
    ],
    ids=["argmax", "rounded", "vendor", "input", "table", "constant"],
)
def test_every_source_of_a_choice_counts(text: str) -> None:
    assert _may_choose(_graph(text))


def test_token_numbers_and_masks_are_no_choice() -> None:
    text = "g (int64[B, S] ids, float[B, S] mask) => (float[B, S] out) { n = Cast<to = 1>(ids) out = Add(n, mask) }"
    assert not _may_choose(_graph(text))
