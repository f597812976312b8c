"""Every committed export: its head, and every way to prune it; a sample by default, all of it with ``-m full``."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.equivalence.feeds import make_feeds
from graphsurgery.equivalence.signature import read_signature
from graphsurgery.passes.prune_last_token import PruneLastToken
from graphsurgery.patterns.interface import find_attention_mask, find_position_ids, find_token_input
from graphsurgery.patterns.lm_head import LMHead
from graphsurgery.pipeline import Pipeline
from tests.conftest import SAMPLE_SEED
from tests.oracle import REFUSALS, assert_pruned_equal, run, session

if TYPE_CHECKING:
    import onnxruntime as ort

FIXTURES = Path(__file__).parents[2] / "fixtures"
MANIFEST: dict[str, dict[str, Any]] = {
    entry["path"]: entry for entry in json.loads((FIXTURES / "manifest.json").read_text(encoding="utf-8"))
}
PATHS = sorted(MANIFEST)
QUANTIZED = {"matmulnbits": "MatMulNBits"}
MODES = list(itertools.product(["last", "mask", "position", "runtime"], ["head", "norm", "layer"], [1, 2, 3, 4]))
_LONGEST, _MOST_FEEDS = 30, 4


def usable(model: ir.Model, index: str) -> bool:
    """Whether the model has what ``index`` reads."""
    shapes = shapes_of(model)
    tokens = find_token_input(model, shapes)
    if index == "mask":
        return find_attention_mask(model, shapes, tokens) is not None
    return index != "position" or find_position_ids(model, shapes, tokens) is not None


def sampled(path: str) -> tuple[str, str, int]:
    """A mode that the export has the inputs for, drawn from the sample seed."""
    modes = random.Random(f"{SAMPLE_SEED} {path}").sample(MODES, len(MODES))
    model = ir.load(FIXTURES / path)
    return next(mode for mode in modes if usable(model, mode[0]))


def takes(opened: ort.InferenceSession, feeds: dict[str, Any]) -> bool:
    """Whether the export itself runs on ``feeds``: fused attention does not take every batch."""
    try:
        run(opened, feeds)
    except REFUSALS:
        return False
    return True


def hold(path: str, index: str, depth: str, keep: int) -> None:
    proto = onnx.ModelProto.FromString((FIXTURES / path).read_bytes())
    folder = (FIXTURES / path).parent
    model = ir.load(FIXTURES / path)
    inputs = [value.name for value in model.graph.inputs]
    options: dict[str, Any] = {"index": index, "depth": depth, "keep": keep}
    report = Pipeline([PruneLastToken(**options)], check=True)(model)
    (site,) = report.passes[0].sites
    assert site.status == "rewritten", site.reason
    added = ["last_token_indices"] if index == "runtime" else []
    assert [value.name for value in model.graph.inputs] == inputs + added
    output = model.graph.outputs[0]
    assert output.shape is not None
    assert output.shape[1] == keep
    before = session(proto, folder)
    signature = read_signature(proto)
    short = [feed for feed in make_feeds(signature, SAMPLE_SEED)[0] if feed.sizes.length <= _LONGEST]
    taken = [feed for feed in short[:: max(1, len(short) // _MOST_FEEDS)] if takes(before, feed.build())]
    assert len(taken) >= 2
    written = [dict.fromkeys(signature.rings, feed.sizes.letters()["T"]) for feed in taken]
    half = MANIFEST[path]["dtype"] == "float16"
    built = [feed.build() for feed in taken]
    after = session(model, folder)
    assert_pruned_equal(before, after, model, built, lenient=half, seed=SAMPLE_SEED, written=written)


EXPERTS = [path for path in PATHS if MANIFEST[path]["moe"] not in (None, "none", False) and "lm_head" not in path]


@pytest.mark.parametrize("name", ["llama_opset23", "llama_opset_newest"])
def test_the_last_attention_operator_computes_the_wanted_rows(name: str):
    model = ir.load(FIXTURES / name / "model.onnx")
    Pipeline(["prune-last-token{depth=layer}"])(model)
    shapes = shapes_of(model)
    queries = [node.inputs[0] for node in model.graph if node.op_type == "Attention"]
    assert [value is not None and shapes.dim(value, -2) == 1 for value in queries] == [False, False, True]


@pytest.mark.parametrize("path", EXPERTS)
def test_the_last_layer_is_pruned_through_its_experts(path: str):
    """Its attention, its router and its experts see the chosen rows: what is left whole is in front of them."""
    model = ir.load(FIXTURES / path)
    report = Pipeline([PruneLastToken(index="last", depth="layer")], check=True)(model)
    (site,) = report.passes[0].sites
    operator = "genai" in path
    assert ("1 expert block" in site.reason) is not operator
    assert "matrix products" in site.reason


def replayed(path: str, *before: str) -> list[str]:
    """What is computed again on the selected rows, in a result that went through the passes ``before`` first."""
    model = ir.load(FIXTURES / path)
    Pipeline([*before, PruneLastToken(index="last", depth="layer")])(model)
    names = [value.name or "" for node in model.graph for value in node.outputs]
    return [name.rpartition("/")[2] for name in names if name.startswith("lm_head/") and name.endswith("_rows")]


@pytest.mark.parametrize("path", ["llama/model.onnx", "gemma2/model.onnx"])
def test_features_that_are_as_many_as_the_rows_are_no_mask(path: str):
    """The mask is made again on its rows; the residual stream, 32 wide, is not, through all layers to the embeddings."""
    masks = replayed(path)
    assert "le_rows" in masks
    for length in (13, 64):
        assert replayed(path, f"bind-dims{{batch=1,seq={length},past=0}}") == masks


@pytest.mark.parametrize("path", PATHS)
def test_the_head_is_found(path: str):
    entry = MANIFEST[path]
    model = ir.load(FIXTURES / path)
    (site,) = PruneLastToken().find(model)
    if not entry["has_logits"]:
        assert site.id == "hidden:last_hidden_state"
        return
    assert isinstance(site, LMHead)
    assert site.name == ("output" if path.endswith("lm_head.onnx") else "logits")
    assert [node.op_type for node in site.products] == [QUANTIZED.get(entry["quantization"] or "", "MatMul")]
    assert site.vocabulary == entry["vocabulary"]
    assert len(site.cone.frontier) == 1
    assert (site.norm is None) is path.endswith("lm_head.onnx")


@pytest.mark.parametrize("path", PATHS)
def test_each_export_in_a_sampled_mode(path: str):
    index, depth, keep = sampled(path)
    print(f"{path}: index={index}, depth={depth}, keep={keep}")
    hold(path, index, depth, keep)


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("index", "depth", "keep"), MODES)
def test_each_export_in_every_mode(path: str, index: str, depth: str, keep: int):
    if usable(ir.load(FIXTURES / path), index):
        hold(path, index, depth, keep)
