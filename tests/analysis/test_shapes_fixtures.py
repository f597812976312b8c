"""Every size, element type and content inferred for stock exports and hostile cases, against what ORT computes."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphsurgery.analysis import dims
from graphsurgery.analysis.shapes import Shapes
from tests.analysis.ort_truth import check_against_ort, feeds_for, share_unknown

ROOT = Path(__file__).parents[2]
FIXTURES = sorted(ROOT.glob("fixtures/**/*.onnx"))
CASES = sorted(path for path in ROOT.glob("tests/cases/*.onnx") if not path.name.startswith("s04"))
# ORT cannot run these: data files are missing, an op belongs to a vendor.
UNRUNNABLE = {"s03_external_data_missing_or_short", "s13_missing_contrib_opset_and_unknown_domain"}
# The default run: one of each way of writing a model.
SAMPLE = {"llama", "llama_static", "gpt2", "gemma2", "genai_gptoss", "optimum_llama", "qwen3_moe_grouped", "llama_qdq4"}
SIZES = [(2, 5, 3), (1, 1, 6), (3, 4, 0)]
# GroupQueryAttention takes no batch with several rows on a past, and its sliding cache is never shorter than the window.
GENAI_SIZES = [(1, 5, 8), (2, 1, 9), (3, 1, 8)]


def _name(path: Path) -> str:
    return path.parent.name if path.stem == "model" else f"{path.parent.name}-{path.stem}"


def _sizes(path: Path) -> list[tuple[int, int, int]]:
    return GENAI_SIZES if "genai" in path.parent.name else SIZES


def _proto(path: Path) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(path.read_bytes())


def _check(path: Path, model: ir.Model, feeds: dict[str, np.ndarray]) -> None:
    agreement = check_against_ort(model, _proto(path), path.parent, feeds)
    assert agreement.errors == []
    # What no run can settle is at most a handful of sizes that hold two unknowns at once.
    assert agreement.open <= 0.002 * agreement.checked
    assert agreement.checked > 0


def _case_feeds(path: Path) -> list[dict[str, np.ndarray]]:
    feeds: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    with np.load(path.with_suffix(".feeds.npz")) as stored:
        for key in stored.files:
            number, side, name = key.split("|", 2)
            if side == "in":
                feeds[number][name] = stored[key]
    return list(feeds.values())


@pytest.mark.parametrize("path", [path for path in FIXTURES if path.parent.name in SAMPLE], ids=_name)
def test_sampled_fixtures(path):
    model = ir.load(path)
    batch, rows, past = _sizes(path)[0]
    _check(path, model, feeds_for(model, batch=batch, rows=rows, past=past))


@pytest.mark.full
@pytest.mark.parametrize("path", FIXTURES, ids=_name)
def test_all_fixtures(path):
    model = ir.load(path)
    for batch, rows, past in _sizes(path):
        _check(path, model, feeds_for(model, batch=batch, rows=rows, past=past))


@pytest.mark.parametrize("path", [path for path in CASES if path.stem not in UNRUNNABLE], ids=lambda path: path.stem)
def test_hostile_cases(path):
    model = ir.load(path)
    for feeds in _case_feeds(path)[:2]:
        _check(path, model, feeds)


@pytest.mark.parametrize("path", FIXTURES, ids=_name)
def test_few_sizes_stay_unknown(path):
    model = ir.load(path)
    total, anonymous, rankless = share_unknown(model, Shapes(model))
    print(
        f"{_name(path)}: {anonymous} of {total} sizes hold an anonymous unknown, {rankless} values have no known rank"
    )
    assert rankless == 0
    assert anonymous <= 0.16 * total
    # How many rows an expert gets is known to no one before the run; nothing else is.
    assert _origins(model, Shapes(model)) <= ({"NonZero", "Range", "Split"} if _counts_rows(model) else set())


def _counts_rows(model: ir.Model) -> bool:
    """Whether the model finds or counts the rows of each expert (or the image tokens) at run time."""
    ops = {node.op_type for node in model.graph}
    return "NonZero" in ops or {"TopK", "Range", "Split"} <= ops


def _origins(model: ir.Model, shapes: Shapes) -> set[str]:
    """The ops that give an anonymous size where no input has one."""

    def anonymous(value: ir.Value | None) -> bool:
        shape = (None if value is None else shapes.shape(value)) or ()
        return any(name.startswith("?") for size in shape for name in dims.free_names(size))

    return {
        node.op_type
        for node in model.graph
        if any(map(anonymous, node.outputs)) and not any(map(anonymous, node.inputs))
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "optimum_llama", "genai_llama", "llama_static", "qwen3_moe_grouped"])
def test_the_interface_is_known_by_name(name):
    model = ir.load(ROOT / "fixtures" / name / "model.onnx")
    shapes = Shapes(model)
    batch, rows = shapes.shape(model.graph.inputs[0]) or ()
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    assert (shapes.shape(logits) or ())[:2] == (batch, rows)
    for value in model.graph.outputs:
        for size in shapes.shape(value) or ():
            assert not any(part.startswith("?") for part in dims.free_names(size))


def test_scores_and_caches_of_a_layer_have_their_names():
    model = ir.load(ROOT / "fixtures" / "optimum_llama" / "model.onnx")
    shapes = Shapes(model)
    batch, past, rows = (dims.symbol(name) for name in ("batch_size", "past_sequence_length", "sequence_length"))
    softmaxes = [node for node in model.graph if node.op_type == "Softmax"]
    assert len(softmaxes) >= 2
    for node in softmaxes:
        shape = shapes.shape(node.outputs[0]) or ()
        assert (shape[0], shape[2], shape[3]) == (batch, rows, past + rows)


def test_a_stale_value_info_is_not_believed():
    model = ir.load(ROOT / "tests" / "cases" / "p04_softcap_shared_const_stale_value_info.onnx")
    scores = [node.outputs[0] for node in model.graph if node.op_type == "Softmax"]
    for value in scores:
        value.shape = ir.Shape([1, 1, 1, "nonsense"])
    shapes = Shapes(model)
    for value in scores:
        assert [str(size) for size in shapes.shape(value) or ()] == [
            "batch_size",
            "4",
            "sequence_length",
            "past_sequence_length + sequence_length",
        ]
