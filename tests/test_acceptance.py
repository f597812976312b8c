"""Whole pipelines on whole families: a blocked prefill file hands its cache to a decode file, and 40 tokens are the export's.

Families x block modes x weights there or absent and put back x layers as functions or not; every file with packed or
gathered experts, pruned to the last token, and named for retained states. A sample by default, all of it with ``-m full``.
"""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import onnx_ir as ir
import pytest

import graphsurgery
from graphsurgery.pipeline import Pipeline
from tests.conftest import SAMPLE_SEED

FIXTURES = Path(__file__).parents[1] / "fixtures"
FAMILIES = {
    "gpt_oss": ("gpt_oss_grouped/model.onnx", "gpt_oss_batched/model.onnx"),
    "gemma4": ("gemma4_moe_grouped/model.onnx", "gemma4_moe_batched/model.onnx"),
    "qwen3_vl_moe": ("qwen3_vl_moe/decode.onnx",),
    "qwen3_5_moe": ("qwen3_5_moe/model.onnx",),
}
MODES = {
    "prefill_q": "mode=prefill_q,q_blocks=2",
    "prefill_kv": "mode=prefill_kv,kv_blocks=2",
    "prefill_qkv": "mode=prefill_qkv,num_q_blocks=2,num_kv_blocks=2,headpar_split=1",
}
MATRIX = list(itertools.product(FAMILIES, MODES, ("weights", "absent"), ("flat", "functions")))
TOKENS = 40
LARGE = ("qwen3_5_moe",)
"""Families whose graphs are so large (5,000 nodes) that they are run with the whole product only."""


def sample() -> list[tuple[str, str, str, str]]:
    """Every family but the large ones once, and every mode and way at least once."""
    chance = random.Random(SAMPLE_SEED)
    families = [family for family in FAMILIES if family not in LARGE]
    modes = chance.sample(list(MODES), len(families))
    data, shape = (
        [*ways, *chance.choices(ways, k=len(families) - len(ways))]
        for ways in (["weights", "absent"], ["flat", "functions"])
    )
    chance.shuffle(data)
    chance.shuffle(shape)
    return list(zip(families, modes, data, shape, strict=True))


def prefill_passes(mode: str) -> list[str]:
    return [
        "prune-last-token{index=auto,depth=layer}",
        f"block-attention{{{MODES[mode]}}}",
        "gather-experts{strategy=packed,chunk_size=4,lanes=2}",
    ]


DECODE_PASSES = ["block-attention", "gather-experts{strategy=gather}"]


def external(source: Path, folder: Path) -> Path:
    """The model with its weights, but not its shape constants, in a data file of their own."""
    folder.mkdir()
    ir.save(ir.load(source), folder / "model.onnx", external_data="weights.data", size_threshold_bytes=256)
    return folder / "model.onnx"


def rewrite(source: Path, output: Path, passes: list[str], *, functions: bool) -> None:
    """Run the passes, hold each to its report, and save beside the data file."""
    model = graphsurgery.load(source)
    named = ["rename-io{to=retained-state}", "tidy", *(["extract-functions"] if functions else [])]
    report = Pipeline([*passes, *named], check=True)(model)
    rewritten = {item.name: item.count("rewritten") for item in report.passes}
    refused = [(site.id, site.reason) for item in report.passes for site in item.sites if site.status == "refused"]
    assert all(rewritten[name] for name in rewritten if name != "tidy"), (rewritten, refused)
    assert bool(model.functions) is functions
    names = [value.name or "" for value in model.graph.outputs]
    assert sum(name.endswith("_RetainedState") for name in names) >= 4
    graphsurgery.save(model, output, weights="reference")


def hold(family: str, mode: str, data: str, shape: str, folder: Path, variant: int) -> None:
    choices = FAMILIES[family]
    source = external(FIXTURES / choices[variant % len(choices)], folder / "model")
    away = folder / "weights.data"
    if data == "absent":
        shutil.move(source.parent / "weights.data", away)
    prefill, decode = source.with_name("prefill.onnx"), source.with_name("decode.onnx")
    for output, passes in ((prefill, prefill_passes(mode)), (decode, DECODE_PASSES)):
        rewrite(source, output, passes, functions=shape == "functions")
    if data == "absent":
        assert not list(source.parent.glob("*.data")), "a pass made a data file out of weights that are not there"
        shutil.move(away, source.parent / "weights.data")
    found = graphsurgery.verify(source, prefill, depth="generate", decode=decode, steps=TOKENS, opt_level_check=False)
    assert found.status == "equal", found.reasons
    assert found.steps == TOKENS
    assert found.token_differences == ()
    assert found.prompts


@pytest.mark.parametrize(("family", "mode", "data", "shape"), sample())
def test_a_sample_of_the_matrix(family: str, mode: str, data: str, shape: str, tmp_path: Path):
    hold(family, mode, data, shape, tmp_path, SAMPLE_SEED)


@pytest.mark.full
@pytest.mark.parametrize(("family", "mode", "data", "shape"), MATRIX)
def test_the_whole_matrix(family: str, mode: str, data: str, shape: str, tmp_path: Path):
    for variant in range(len(FAMILIES[family])):
        folder = tmp_path / str(variant)
        folder.mkdir()
        hold(family, mode, data, shape, folder, variant)
