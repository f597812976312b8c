"""gather-experts on exports: the same outputs under every strategy, and the structure that each promises."""

from __future__ import annotations

import collections
import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from graphsurgery.equivalence.verify import verify_models
from graphsurgery.errors import UsageError
from graphsurgery.invariants import violations
from graphsurgery.model_io import load, save
from graphsurgery.passes.gather_experts import GatherExperts
from graphsurgery.pipeline import Pipeline
from graphsurgery.registry import make_pass
from tests.conftest import SAMPLE_SEED

if TYPE_CHECKING:
    from graphsurgery.site_report import PassReport

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"

MODES = {
    "auto": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "dense": "gather-experts{strategy=dense}",
    "loop": "gather-experts{strategy=packed,chunk_size=4}",
    "loop_lanes": "gather-experts{strategy=packed,chunk_size=3,lanes=3}",
    "npu": "gather-experts{target=npu,threshold=3,chunk_size=4,lanes=2}",
}
STATIC = {
    "static_grouped": "gather-experts{strategy=grouped}",
    "static_gather": "gather-experts{strategy=gather}",
    "static_dense": "gather-experts{strategy=dense}",
    "static_loop": "gather-experts{strategy=packed,chunk_size=5,lanes=2,lowering=loop}",
    "unroll": "gather-experts{strategy=packed,chunk_size=5,lowering=unroll}",
    "unroll_lanes": "gather-experts{target=npu,threshold=2,chunk_size=4,lanes=3}",
}
BIND = "bind-dims{batch=1,seq=8,past=4}"
EXPORTS = [
    *("qwen3_moe_grouped", "qwen3_moe_batched", "qwen3_moe_grouped_external", "qwen3_moe_matmulnbits"),
    *("gpt_oss_grouped", "gpt_oss_batched", "mixtral_grouped", "mixtral_batched"),
    *("deepseek_v3_grouped", "deepseek_v3_batched", "gemma4_moe_grouped", "gemma4_moe_batched"),
    *("optimum_qwen3_moe", "optimum_gpt_oss", "genai_gptoss"),
]
SLOW = ["qwen3_5_moe"]
HOSTILE = ["m01_loop_over_experts_index_add", "m03_topk_then_softmax_bias_interleaved"]


def _path(name: str) -> Path:
    case = CASES / f"{name}.onnx"
    return case if case.exists() else FIXTURES / name / "model.onnx"


def apply(name: str, specs: list[str], output: Path) -> PassReport:
    model = load(_path(name))
    before = set(violations(model))
    report = Pipeline(specs)(model).passes[-1]
    assert set(violations(model)) <= before
    save(model, output, weights="copy", force=True)
    return report


def check(name: str, mode: str, output: Path) -> PassReport:
    static = mode in STATIC
    report = apply(name, [BIND, STATIC[mode]] if static else [MODES[mode]], output)
    assert report.sites
    assert {site.status for site in report.sites} == {"rewritten"}, [site.reason for site in report.sites]
    result = verify_models(_path(name), output, opt_level_check=False)
    assert result.status == "equal", result.reasons
    return report


def _product() -> list[tuple[str, str]]:
    models = itertools.product([*EXPORTS, *SLOW], [*MODES, *STATIC])
    return [*models, *itertools.product(HOSTILE, MODES)]


def _sample() -> list[tuple[str, str]]:
    """Every export and every mode at least once."""
    generator = random.Random(SAMPLE_SEED)
    modes = [*MODES, *STATIC]
    generator.shuffle(modes)
    return [(name, modes[place % len(modes)]) for place, name in enumerate(EXPORTS)]


@pytest.mark.parametrize(("name", "mode"), _sample())
def test_same_outputs_sampled(name: str, mode: str, tmp_path: Path) -> None:
    check(name, mode, tmp_path / "out.onnx")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("mode", ["auto", "loop_lanes"])
def test_hostile_models(name: str, mode: str, tmp_path: Path) -> None:
    check(name, mode, tmp_path / "out.onnx")


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode"), _product())
def test_same_outputs_in_every_mode(name: str, mode: str, tmp_path: Path) -> None:
    check(name, mode, tmp_path / "out.onnx")


def _decoded(name: str, mode: str, output: Path) -> None:
    apply(name, [MODES[mode]], output)
    result = verify_models(_path(name), output, depth="generate", steps=10, opt_level_check=False)
    assert result.status == "equal", result.reasons
    assert result.token_differences == ()


def test_ten_greedy_steps(tmp_path: Path) -> None:
    _decoded("qwen3_moe_grouped", "npu", tmp_path / "out.onnx")


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXPORTS)
def test_ten_greedy_steps_of_every_export(name: str, mode: str, tmp_path: Path) -> None:
    _decoded(name, mode, tmp_path / "out.onnx")


@pytest.mark.parametrize(("recipe", "last"), [("prefill", "s10"), ("decode", "s10*s70"), ("unified", "s10")])
def test_recipes_include_experts(recipe: str, last: str, tmp_path: Path) -> None:
    """Where only the last row is wanted, the last layer's experts get the tokens of that row only."""
    model = load(_path("qwen3_moe_grouped"))
    report = Pipeline.from_recipe(recipe)(model)
    experts = next(item for item in report.passes if item.name == "gather-experts")
    assert [site.status for site in experts.sites] == ["rewritten"] * 3
    assert [site.detail["tokens"] for site in experts.sites] == ["s10*s70", "s10*s70", last]
    save(model, tmp_path / "out.onnx", weights="copy")
    result = verify_models(_path("qwen3_moe_grouped"), tmp_path / "out.onnx", opt_level_check=False)
    assert result.status == "equal", result.reasons


def test_one_batch_row_of_fixed_sizes_is_read() -> None:
    for sizes in ("batch=1,seq=5,past=3", "batch=1,seq=4,past=3", "batch=2,seq=5,past=3"):
        model = load(_path("optimum_gpt_oss"))
        report = Pipeline([f"bind-dims{{{sizes}}}", "gather-experts"])(model).passes[1]
        assert report.count("rewritten") == 2, sizes
        assert {site.detail["tokens"] for site in report.sites} == {
            str(5 if "1,seq=5" in sizes else 4 if "seq=4" in sizes else 10)
        }


# ---- what is in the result ----------------------------------------------------------------------------------------


def test_a_second_run_changes_nothing() -> None:
    for mode, spec in MODES.items():
        model = load(_path("qwen3_moe_grouped"))
        assert Pipeline([spec])(model).passes[0].count("rewritten") == 3
        for again in (spec, MODES["gather"], MODES["auto"]):
            report = Pipeline([again])(model).passes[0]
            assert not report.changed, mode
            assert {site.reason for site in report.sites} == {"already written by an earlier run of this pass"}
            assert report.count("skipped") == 3


@pytest.mark.parametrize("recipe", ["unified", "npu-prefill", "npu-decode"])
def test_a_recipe_that_is_applied_twice_says_of_everything_that_it_is_done(recipe: str) -> None:
    model = load(_path("qwen3_moe_grouped"))
    passes = Pipeline.from_recipe(recipe)
    passes(model)
    again = passes(model)
    assert not again.changed
    told = {(item.name, site.status) for item in again.passes for site in item.sites}
    wanted = {("block-attention", "skipped"), ("gather-experts", "skipped")}
    if recipe != "npu-decode":
        wanted.add(("prune-last-token", "refused"))
    if recipe != "unified":
        wanted |= {("bind-dims", "skipped"), ("rename-io", "skipped"), ("extract-functions", "skipped")}
    if recipe == "npu-prefill":
        # The last layer, which is pruned, is like no other.
        wanted.add(("extract-functions", "refused"))
    assert told == wanted


def test_the_same_run_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("one.onnx", "two.onnx"):
        apply("gpt_oss_batched", [MODES["npu"]], tmp_path / name)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


@pytest.mark.parametrize("mode", [*MODES, *STATIC])
@pytest.mark.parametrize("name", ["qwen3_moe_grouped", "optimum_qwen3_moe"])
def test_nothing_is_scattered_with_a_reduction(name: str, mode: str) -> None:
    """What the exporter wrote so is gone too: no two threads can add to one row."""
    model = load(_path(name))
    Pipeline([BIND, STATIC[mode]] if mode in STATIC else [MODES[mode]])(model)
    for node in model.graph.all_nodes():
        assert not node.op_type.startswith("Scatter") or "reduction" not in node.attributes, node.name
        made = node.metadata_props.get("graphsurgery.pass") == "gather-experts"
        assert not made or not node.domain


@pytest.mark.parametrize("mode", ["unroll", "unroll_lanes", "static_gather", "static_dense"])
def test_static_forms_have_no_branch_and_no_loop(mode: str) -> None:
    model = load(_path("mixtral_grouped"))
    Pipeline([BIND, STATIC[mode], "tidy"])(model)
    kinds = collections.Counter(node.op_type for node in model.graph.all_nodes())
    assert kinds["If"] == kinds["Loop"] == 0
    ours = [node for node in model.graph if node.metadata_props.get("graphsurgery.pass") == "gather-experts"]
    assert any(node.op_type == "Where" for node in ours) == mode.startswith("unroll")


def test_data_files_are_not_needed(tmp_path: Path) -> None:
    """Views of stacked weights need no byte: the model is written without its data."""
    source = tmp_path / "model.onnx"
    source.write_bytes(_path("qwen3_moe_grouped_external").read_bytes())
    for mode in MODES:
        model = load(source)
        report = Pipeline([MODES[mode]])(model).passes[0]
        assert report.count("rewritten") == 3
        assert {site.detail["weight_bytes_moved"] for site in report.sites} == {0}


# ---- reports and refusals -----------------------------------------------------------------------------------------


def test_report_tells_what_became_of_a_site() -> None:
    model = load(_path("qwen3_moe_grouped"))
    site = Pipeline(["gather-experts"])(model).passes[0].sites[1]
    assert (site.id, site.layer) == ("experts:1", 1)
    assert site.reason == "grouped form of 8 experts, 2 chosen, is now grouped; no weight is moved"
    assert site.detail == {
        "strategy": "grouped",
        "form": "grouped",
        "experts": 8,
        "top_k": 2,
        "tokens": "s10*s70",
        "nodes_before": 111,
        "nodes_after": 44,
        "weight_bytes_moved": 0,
    }
    assert len(site.boundaries) == 1


def test_gather_for_many_tokens_is_called_more_work() -> None:
    model = load(_path("qwen3_moe_batched"))
    report = Pipeline([BIND, "gather-experts{strategy=gather}"])(model).passes[-1]
    note = "8 tokens x 2 choices are more than 8 experts: gather reads more weights than dense"
    assert all(site.reason.endswith(note) for site in report.sites)
    assert report.warnings == [f"experts:{number}: {note}." for number in range(3)]


def test_sites_are_selected_by_layer() -> None:
    model = load(_path("mixtral_batched"))
    report = Pipeline(["gather-experts{sites=[0-1],exclude=[1]}"])(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten", "skipped", "skipped"]


def test_unrolling_a_symbolic_number_of_tokens_is_refused() -> None:
    model = load(_path("mixtral_batched"))
    report = Pipeline(["gather-experts{strategy=packed,lowering=unroll}"])(model).passes[0]
    assert {site.status for site in report.sites} == {"refused"}
    assert report.sites[0].reason == (
        "lowering=unroll needs a fixed number of tokens, and it is s10*s70: fix it with bind-dims"
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chunk_size=0,strategy=packed", "Option chunk_size=0 of pass gather-experts must be 1 or more."),
        ("lanes=0,strategy=packed", "Option lanes=0 of pass gather-experts must be 1 or more."),
        ("threshold=-1,target=npu", "Option threshold=-1 of pass gather-experts must be 0 or more."),
        (
            "lanes=2,strategy=grouped",
            (
                "Option lanes=2 of pass gather-experts says nothing for strategy=grouped: it is for strategy=packed, or "
                "strategy=auto,target=npu."
            ),
        ),
    ],
)
def test_options_that_contradict_each_other(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        make_pass(f"gather-experts{{{spec}}}")
    assert str(error.value) == message


def test_aliases() -> None:
    assert make_pass("gather-experts{strategy=packed,expert_parallel_chunk_size=64}") == GatherExperts(
        strategy="packed", chunk_size=64
    )
