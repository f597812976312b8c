"""Every recipe on every export, decoding step by step against the export; drawn pipelines in every order that is allowed."""

from __future__ import annotations

import collections
import itertools
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphsurgery
from graphsurgery.errors import UsageError
from graphsurgery.patterns.matcher import all_graphs
from graphsurgery.pipeline import Pipeline
from graphsurgery.recipes import read_recipe, recipe_names
from graphsurgery.registry import make_pass
from tests.conftest import SAMPLE_SEED

if TYPE_CHECKING:
    from graphsurgery.equivalence.verify_report import VerifyReport
    from graphsurgery.site_report import Report

FIXTURES = Path(__file__).parents[1] / "fixtures"
MANIFEST: list[dict[str, Any]] = json.loads((FIXTURES / "manifest.json").read_text(encoding="utf-8"))
DECODERS = [entry["path"] for entry in MANIFEST if entry["has_logits"] and "lm_head" not in entry["path"]]
RECIPES = ["prefill", "decode", "unified", "npu"]
# GroupQueryAttention takes no batch of several rows on a past, its cache is a ring, and nothing of it is fixed by roles.
SIZES = {"seq": 16, "past": 24}


def sample() -> list[tuple[str, str]]:
    """Eight exports, each recipe twice."""
    chance = random.Random(SAMPLE_SEED)
    # Its layers are written out in thousands of nodes: it is part of the whole product.
    paths = chance.sample([path for path in DECODERS if "qwen3_5" not in path], 8)
    return list(zip(paths, RECIPES * 2, strict=True))


def passes_of(recipe: str) -> list[dict[str, Any]]:
    """The recipe, with sizes that a tiny export can be run at."""
    tables = [dict(table) for table in read_recipe(recipe).passes]
    for table in tables:
        if table["name"] == "bind-dims":
            table["seq"] = min(table["seq"], SIZES["seq"])
            table["past"] = min(table["past"], SIZES["past"])
    return tables


def rewritten(path: str, recipe: str, output: Path) -> Report:
    model = graphsurgery.load(FIXTURES / path)
    report = Pipeline(passes_of(recipe), check=True)(model)
    assert [item.name for item in report.passes] == [table["name"] for table in read_recipe(recipe).passes]
    if recipe.startswith("npu"):
        operators = collections.Counter(node.op_type for graph in all_graphs(model) for node in graph)
        written = {
            node.op_type for graph in all_graphs(model) for node in graph if "graphsurgery.pass" in node.metadata_props
        }
        assert not written & {"If", "Loop", "Scan"}, operators
    graphsurgery.save(model, output)
    return report


def hold(path: str, recipe: str, folder: Path) -> VerifyReport:
    if recipe == "npu":
        prefill, decode = folder / "prefill.onnx", folder / "decode.onnx"
        rewritten(path, "npu-prefill", prefill)
        rewritten(path, "npu-decode", decode)
        return graphsurgery.verify(
            FIXTURES / path, prefill, depth="generate", decode=decode, steps=6, opt_level_check=False
        )
    output = folder / "model.onnx"
    rewritten(path, recipe, output)
    return graphsurgery.verify(FIXTURES / path, output, depth="generate", steps=6, opt_level_check=False)


def check(found: VerifyReport) -> None:
    assert found.status == "equal", found.reasons
    assert found.prompts


def test_the_recipes():
    assert recipe_names() == ["decode", "npu-decode", "npu-prefill", "prefill", "unified"]


@pytest.mark.parametrize(("path", "recipe"), sample())
def test_a_sample_of_exports_and_recipes(path: str, recipe: str, tmp_path: Path):
    print(f"{path} under {recipe}, seed {SAMPLE_SEED}")
    check(hold(path, recipe, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize(("path", "recipe"), list(itertools.product(DECODERS, RECIPES)))
def test_every_export_under_every_recipe(path: str, recipe: str, tmp_path: Path):
    check(hold(path, recipe, tmp_path))


# ---- any order ------------------------------------------------------------------------------------------------------

SPECS = [
    "prune-last-token{index=last,depth=layer}",
    "prune-last-token{index=position,keep=2}",
    "bind-dims{batch=1,missing=skip}",
    "block-attention{q_blocks=2,min_rows=0}",
    "block-attention{kv_blocks=3,head_blocks=2}",
    "block-attention{q_block_size=4}",
    "gather-experts{strategy=packed,chunk_size=4}",
    "gather-experts{strategy=grouped}",
    "gather-experts{strategy=gather}",
    "rename-io{to=retained-state,symbols=true}",
    "strip-metadata",
    "tidy{identities=true}",
    "extract-functions",
    "inline-functions",
]
PIPELINE_FIXTURES = [
    "llama/model.onnx",
    "gpt_oss_grouped/model.onnx",
    "mixtral_batched/model.onnx",
    "optimum_qwen3_moe/model.onnx",
]


def one_of_a_kind(specs: list[str]) -> bool:
    names = [spec.partition("{")[0] for spec in specs]
    return len(set(names)) == len(names)


def allowed(specs: list[str]) -> bool:
    """Whether no pass comes before one that it declares to come after."""
    passes = [make_pass(spec) for spec in specs]
    return not any(later.name in earlier.after for place, earlier in enumerate(passes) for later in passes[place + 1 :])


@settings(max_examples=12)
@given(
    specs=st.lists(st.sampled_from(SPECS), min_size=2, max_size=5).filter(one_of_a_kind),
    path=st.sampled_from(PIPELINE_FIXTURES),
)
def test_any_order_is_right_or_refused(specs: list[str], path: str, tmp_path_factory: pytest.TempPathFactory):
    if not allowed(specs):
        with pytest.raises(UsageError, match="must run after"):
            Pipeline(specs)
        return
    model = graphsurgery.load(FIXTURES / path)
    try:
        Pipeline(specs, check=True)(model)
    except UsageError as error:
        # What the model as a whole cannot honour is said, by name.
        refused = str(error)
        named = [spec for spec in specs if spec.partition("{")[0] in refused]
        assert named, refused
        return
    output = tmp_path_factory.mktemp("pipeline") / "model.onnx"
    graphsurgery.save(model, output)
    found = graphsurgery.verify(FIXTURES / path, output, opt_level_check=False)
    assert found.status == "equal", (specs, path, found.reasons)
