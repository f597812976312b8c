"""block-attention: the same outputs in every mode, and the structure that each mode promises."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.errors import UsageError
from graphsurgery.invariants import violations
from graphsurgery.model_io import load, save
from graphsurgery.passes.block_attention import BlockAttention
from graphsurgery.pipeline import Pipeline
from graphsurgery.registry import make_pass
from tests.conftest import SAMPLE_SEED
from tests.strategies.attentions import PLAIN, TWO_MASKS, AttentionSpec, build

if TYPE_CHECKING:
    from graphsurgery.site_report import PassReport

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"

MODES = {
    "unexpanded": "block-attention",
    "prefill_q": "block-attention{q_blocks=2,mode=prefill_q}",
    "prefill_kv": "block-attention{kv_blocks=2,mode=prefill_kv}",
    "prefill_qkv": "block-attention{q_blocks=2,kv_blocks=2,mode=prefill_qkv}",
    "heads": "block-attention{head_blocks=3}",
    "heads_qkv": "block-attention{q_blocks=3,kv_blocks=2,head_blocks=2}",
    "lanes": "block-attention{q_blocks=2,kv_blocks=3,headpar_split=2}",
    "not_folded": "block-attention{q_blocks=2,fold_gqa=false,head_blocks=4}",
    "not_trimmed": "block-attention{q_blocks=4,skip=none}",
    "loop_q": "block-attention{q_block_size=4}",
    "loop_kv": "block-attention{kv_block_size=3}",
    "loop_qkv": "block-attention{q_block_size=5,kv_block_size=4,headpar_split=2,min_rows=2}",
    "skip_if": "block-attention{q_blocks=3,kv_blocks=3,skip=if}",
    "skip_where": "block-attention{q_blocks=2,kv_blocks=4,headpar_split=2,skip=where}",
    "skip_if_loop": "block-attention{q_block_size=3,kv_block_size=4,skip=if}",
    "unrolled_in_if": "block-attention{q_blocks=3,min_rows=4}",
}
EXPORTS = [
    *("llama", "llama_fp16", "llama_static", "llama_matmulnbits", "llama_qdq", "qwen3", "gemma2", "gpt2"),
    *("gpt_oss_batched", "gemma4_moe_batched", "deepseek_v3_batched", "mixtral_batched"),
    *("optimum_llama", "optimum_gpt_oss", "optimum_qwen3_moe", "llama_opset23", "llama_opset_newest"),
]
HOSTILE = [
    "a01_nan_guard_fully_masked_rows",
    "a03_gqa_past_zero_uneven_blocks",
    "a05_attention_spellings",
    "p11_vlm_inputs_embeds_mrope",
    "s05_unnamed_unsorted_nodes",
    "s06_names_the_tool_would_invent",
    "s07_weights_are_also_graph_inputs",
    "s09_metadata_symbols_ir_version",
    "s11_opset11_old_semantics",
    "s12_weights_behind_identity_cast_dq",
]


def apply(path: Path, spec: str, output: Path) -> PassReport:
    model = load(path)
    before = set(violations(model))
    report = Pipeline([spec])(model).passes[0]
    assert set(violations(model)) <= before
    save(model, output, weights="copy", force=True)
    return report


def check(path: Path, spec: str, output: Path) -> PassReport:
    report = apply(path, spec, output)
    if "opset" in path.parent.name and spec == MODES["unexpanded"]:
        assert "is one operator, and no blocks are asked for" in report.sites[0].reason
    elif "s11" in path.name and "q_block_size" in spec:
        assert "imports opset 11; blocks need 13: convert it first" in report.sites[0].reason
    else:
        assert report.changed
    result = verify_models(path, output, opt_level_check=False)
    assert result.status == "equal", result.reasons
    return report


def _product() -> list[tuple[str, str]]:
    return list(itertools.product([*EXPORTS, *HOSTILE], MODES))


def _sample() -> list[tuple[str, str]]:
    """Every export and every mode at least once."""
    generator = random.Random(SAMPLE_SEED)
    modes = list(MODES)
    generator.shuffle(modes)
    return [(name, modes[place % len(modes)]) for place, name in enumerate([*EXPORTS, *HOSTILE])]


def _path(name: str) -> Path:
    case = CASES / f"{name}.onnx"
    return case if case.exists() else FIXTURES / name / "model.onnx"


@pytest.mark.parametrize(("name", "mode"), _sample())
def test_same_outputs_sampled(name: str, mode: str, tmp_path: Path) -> None:
    check(_path(name), MODES[mode], tmp_path / "out.onnx")


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode"), _product())
def test_same_outputs_in_every_mode(name: str, mode: str, tmp_path: Path) -> None:
    check(_path(name), MODES[mode], tmp_path / "out.onnx")


# ---- structure ----------------------------------------------------------------------------------------------------


def blocked(spec: str, name: str = "llama") -> tuple[ir.Model, collections.Counter[str]]:
    """The model, and how often each kind of block node was made."""
    model = load(_path(name))
    Pipeline([spec])(model)
    kinds: collections.Counter[str] = collections.Counter()
    for node in model.graph.all_nodes():
        if node.metadata_props.get("graphsurgery.pass") == "block-attention":
            kinds[(node.name or "").rsplit("/", 1)[-1].rstrip("0123456789").rstrip("_")] += 1
    return model, kinds


@pytest.mark.parametrize(
    ("spec", "scores", "keys", "values"),
    [
        ("block-attention", 3, 0, 0),
        ("block-attention{q_blocks=2,skip=none}", 6, 0, 0),
        ("block-attention{q_blocks=2}", 6, 6, 6),
        ("block-attention{kv_blocks=2}", 6, 6, 6),
        ("block-attention{q_blocks=2,kv_blocks=3,skip=none}", 18, 9, 9),
        ("block-attention{q_blocks=2,kv_blocks=3}", 18, 18, 18),
        ("block-attention{kv_blocks=2,headpar_split=2}", 12, 12, 12),
        ("block-attention{head_blocks=2}", 6, 6, 6),
        ("block-attention{q_block_size=4}", 6, 3, 3),
    ],
)
def test_counts_of_products_and_reads(spec: str, scores: int, keys: int, values: int) -> None:
    """Three layers: score products, and slices of the key and value caches; both are read for every key block."""
    _, kinds = blocked(spec)
    assert kinds["scores"] == scores
    assert kinds["weighted"] == scores
    assert (kinds["keys"], kinds["values"]) == (keys, values)


def test_masks_are_sliced_once_for_all_layers() -> None:
    _, one = blocked("block-attention{q_blocks=4}")
    assert one["mul_part"] == 0
    parts = {kind: count for kind, count in one.items() if kind.endswith("_part")}
    assert parts
    assert set(parts.values()) <= {4, 8}, parts  # one for each query block, whatever the number of layers
    assert one["mask_columns"] == 4


def test_loops_share_one_survey_of_the_mask() -> None:
    """Needed columns and the row guard are found once for three layers; a layer makes only the part that it needs."""
    model, kinds = blocked("block-attention{q_block_size=4}")
    assert kinds["surveyed"] == 1
    assert kinds["survey_by_rows"] == 1
    assert kinds["needed_columns"] == 1
    assert kinds["row_guard"] == 1
    assert kinds["rows_of_guard"] == 3
    assert kinds["query_blocks"] == 3
    assert kinds["mask_columns"] == 0
    loops = [node for node in model.graph.all_nodes() if node.op_type == "Loop"]
    assert [len(loop.attributes["body"].as_graph().outputs) for loop in loops] == [4, 2, 2, 2]


def test_two_masks_get_a_survey_each() -> None:
    _, kinds = blocked("block-attention{q_block_size=4}", "gemma2")
    assert kinds["surveyed"] == 2
    assert kinds["query_blocks"] == 4


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss_batched", "optimum_llama"])
@pytest.mark.parametrize(
    "spec", [MODES["prefill_q"], MODES["prefill_qkv"], MODES["loop_q"], MODES["loop_kv"], MODES["lanes"]]
)
def test_no_tensor_with_rows_and_columns_is_left(name: str, spec: str) -> None:
    model, _ = blocked(spec, name)
    shapes = Shapes(model)
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    length = shapes.dim(ids, 1)
    totals = {shapes.dim(value, 2) for value in model.graph.outputs if "key" in (value.name or "")}
    for node in model.graph:
        for value in node.outputs:
            shape = shapes.shape(value) or ()
            assert not (length in shape and totals & set(shape)), (node.op_type, value.name, shape)


@pytest.mark.parametrize("mask", TWO_MASKS)
def test_keys_are_trimmed_by_two_masks(mask: str) -> None:
    """A causal mask and a padding mask of their own: the needed keys are those that both leave."""
    spec = AttentionSpec(
        1, 2, 4, 4, "scores_mul", "transpose", "unsqueeze", mask, "finite", False, False, "none", False, None
    )
    model = ir.from_proto(build(spec))
    report = Pipeline(["block-attention{q_block_size=4}"])(model).passes[0]
    assert report.sites[0].reason == (
        "query blocks of 4 in a loop, keys trimmed by the mask, keys and values not expanded"
    )
    kinds = collections.Counter(node.op_type for node in model.graph.all_nodes())
    assert kinds["ArgMax"] == 2


def test_a_second_run_changes_nothing() -> None:
    model = load(_path("llama"))
    assert Pipeline(["block-attention{q_blocks=2}"])(model).passes[0].count("rewritten") == 3
    again = Pipeline(["block-attention{q_blocks=2}"])(model).passes[0]
    assert not again.changed
    assert [(site.status, site.reason) for site in again.sites] == [
        ("skipped", "already blocked: an earlier run made its nodes")
    ] * 3


def test_the_same_run_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("one.onnx", "two.onnx"):
        apply(_path("gemma2"), MODES["heads_qkv"], tmp_path / name)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


# ---- reports and refusals -----------------------------------------------------------------------------------------


def test_probabilities_as_output_leave_that_layer_out_of_key_blocks_only(tmp_path: Path) -> None:
    report = check(_path("a04_attention_probs_are_graph_output"), MODES["prefill_kv"], tmp_path / "out.onnx")
    assert [site.status for site in report.sites] == ["refused", "rewritten"]
    assert report.sites[0].reason == (
        "its scores or probabilities are also read by graph output 'attentions.0', and key blocks never have them whole: "
        "blocks of queries and heads do"
    )


@pytest.mark.parametrize("mode", ["prefill_q", "heads", "not_folded", "loop_q", "unrolled_in_if"])
def test_probabilities_as_output_are_put_together_from_blocks(mode: str, tmp_path: Path) -> None:
    report = check(_path("a04_attention_probs_are_graph_output"), MODES[mode], tmp_path / "out.onnx")
    assert [site.status for site in report.sites] == ["rewritten", "rewritten"]
    model = load(tmp_path / "out.onnx")
    (output,) = [value for value in model.graph.outputs if value.name == "attentions.0"]
    maker = output.producer()
    assert maker is not None
    joins = {"loop_q": "If", "unrolled_in_if": "If"}
    assert maker.op_type == joins.get(mode, "Concat")
    assert "Softmax" not in {node.op_type for node in model.graph if node.name == "softmax_0"}


def test_nothing_keeps_the_scores_for_their_sizes() -> None:
    """The sink is spread by the shape of the masked scores, as some exporters write it."""
    spec = dataclasses.replace(PLAIN, sink=True, mask="causal", repeats=1)
    model = ir.from_proto(build(spec))
    asking = [node for node in model.graph if node.op_type == "Shape" and node.inputs[0] is not None]
    makers = {maker.op_type for node in asking if (maker := node.inputs[0].producer()) is not None}
    assert "Add" in makers
    report = Pipeline([BlockAttention(q_block_size=4)], check=True)(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten"]
    assert not [node for node in model.graph if node.op_type in ("MatMul", "Softmax")]


@pytest.mark.parametrize(
    "options", [{"q_blocks": 2}, {"q_block_size": 3, "kv_block_size": 4}, {"kv_blocks": 3}], ids=str
)
def test_products_with_the_same_probabilities_are_one_site(options: dict[str, int]) -> None:
    """Scores are made once a block for both products, and both take their own values from the cache."""
    model = ir.from_proto(build(dataclasses.replace(PLAIN, products=2)))
    report = Pipeline([BlockAttention(**options, min_rows=0)], check=True)(model).passes[0]  # type: ignore[arg-type]
    (site,) = report.sites
    assert site.status == "rewritten"
    assert site.detail["values"] == "value, key"
    products = collections.Counter(
        name.rsplit("/", 1)[-1].split("_")[0]
        for node in model.graph.all_nodes()
        if node.op_type == "MatMul" and (name := node.outputs[0].name)
    )
    assert products["weighted"] == 2 * products["scores"] > 0


def test_fused_attention_is_left_alone() -> None:
    model = load(_path("a10_genai_gqa_contrib_empty_slots"))
    report = Pipeline([MODES["prefill_q"]])(model).passes[0]
    assert {site.status for site in report.sites} == {"refused"}
    assert "is a fused GroupQueryAttention, left to the runtime's own kernel" in report.sites[0].reason


def test_sites_are_selected_by_layer() -> None:
    model = load(_path("gemma2"))
    report = Pipeline(["block-attention{q_blocks=2,sites=[0-1],exclude=[1]}"])(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten", "skipped", "skipped", "skipped"]


def test_report_tells_how_a_site_was_divided() -> None:
    model = load(_path("llama"))
    site = Pipeline(["block-attention{q_block_size=64,kv_block_size=32}"])(model).passes[0].sites[2]
    assert site.id == "attention:2"
    assert site.layer == 2
    assert site.reason == (
        "query blocks of 64 in a loop, key blocks of 32 in a loop, keys trimmed by the mask, keys and values not expanded"
    )
    assert site.detail["keys"] == "output.cache.layers.2.keys"
    assert site.detail["min_rows"] == 64
    assert len(site.boundaries) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("block-attention{q_blocks=0}", "Option q_blocks=0 of pass block-attention must be 1 or more."),
        (
            "block-attention{q_blocks=2,q_block_size=4}",
            "Give q_blocks or q_block_size of pass block-attention, not both.",
        ),
        (
            "block-attention{mode=prefill_qkv,q_blocks=2}",
            "mode=prefill_qkv of pass block-attention needs kv_blocks or kv_block_size.",
        ),
        (
            "block-attention{lowering=loop,q_blocks=2}",
            (
                "lowering=loop of pass block-attention walks over blocks of a fixed size: give q_block_size or "
                "kv_block_size in place of a number of blocks."
            ),
        ),
    ],
)
def test_options_that_contradict_each_other(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        make_pass(spec)
    assert str(error.value) == message


def test_a_block_size_cannot_be_unrolled_at_a_symbolic_length() -> None:
    model = load(_path("llama"))
    with pytest.raises(UsageError, match="needs a fixed length, and the model has s70: fix it with bind-dims"):
        Pipeline(["block-attention{q_block_size=4,lowering=unroll}"])(model)


def test_aliases() -> None:
    assert make_pass("block-attention{num_q_blocks=2,num_kv_blocks=3}") == BlockAttention(q_blocks=2, kv_blocks=3)


# ---- a memory budget ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "reason", "predicted"),
    [
        ("100MiB", "one block, keys and values not expanded", 4473600),
        ("1MiB", "query blocks of 64 in a loop, keys trimmed by the mask, keys and values not expanded", 954368),
        (
            "20KiB",
            (
                "query blocks of 16 in a loop, key blocks of 16 in a loop, keys trimmed by the mask, keys and values not "
                "expanded"
            ),
            12800,
        ),
    ],
)
def test_a_budget_chooses_the_blocks(budget: str, reason: str, predicted: int, tmp_path: Path) -> None:
    spec = f"block-attention{{memory_budget={budget},assume='S=300,P=10'}}"
    report = check(_path("llama"), spec, tmp_path / "out.onnx")
    assert {site.reason for site in report.sites} == {reason}
    assert {site.detail["predicted_bytes"] for site in report.sites} == {predicted}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "memory_budget=1MiB,q_blocks=2",
            "memory_budget of pass block-attention chooses the blocks: give no number or size of them.",
        ),
        (
            "memory_budget=1MiB,assume='T=3'",
            "Option assume='T=3' of pass block-attention: write lengths as 'S=4096,P=0,B=1'.",
        ),
        ("memory_budget=1MiB,assume='P=3'", "Option assume='P=3' of pass block-attention needs S and B of 1 or more."),
        ("memory_budget=lots", "memory_budget 'lots' is not a size: write a number with KB, MB, GB, KiB, MiB or GiB."),
    ],
)
def test_budgets_that_cannot_be_read(options: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        make_pass(f"block-attention{{{options}}}")
    assert str(error.value) == message


def test_a_budget_below_the_smallest_blocks_is_an_error() -> None:
    with pytest.raises(UsageError, match="is less than the 12800 that the smallest blocks of attention:0 take"):
        Pipeline(["block-attention{memory_budget=1KiB}"])(load(_path("llama")))


def test_lengths_that_cannot_be_told_are_refused_by_name() -> None:
    """Gather indices in the data file: how long the mask is cannot be told."""
    report = Pipeline([MODES["prefill_kv"]])(load(_path("s01_everything_external_even_shapes"))).passes[0]
    assert {site.status for site in report.sites} == {"refused"}
    assert report.sites[0].reason.startswith(
        "an operand of its chain cannot be cut to blocks: '/model/Where_20_output_0'"
    )


# ---- in a pipeline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss_batched"])
def test_static_graphs_have_static_slices(name: str, tmp_path: Path) -> None:
    """After bind-dims nothing is computed from shapes: every bound of a slice is a constant."""
    model = load(_path(name))
    Pipeline(["bind-dims{batch=1,seq=16,past=8}", "block-attention{q_blocks=2,kv_blocks=3,skip=none}", "tidy"])(model)
    kinds = collections.Counter(node.op_type for node in model.graph.all_nodes())
    assert kinds["Shape"] == kinds["If"] == kinds["Loop"] == 0
    for node in model.graph.all_nodes():
        if node.op_type == "Slice" and node.metadata_props.get("graphsurgery.pass") == "block-attention":
            assert all(value is not None and value.is_initializer() for value in node.inputs[1:])
    save(model, tmp_path / "out.onnx", weights="copy")
    result = verify_models(_path(name), tmp_path / "out.onnx", opt_level_check=False)
    assert result.status == "equal", result.reasons


def _decoded(name: str, mode: str, output: Path) -> None:
    apply(_path(name), MODES[mode], output)
    result = verify_models(_path(name), output, depth="generate", steps=10, opt_level_check=False)
    assert result.status == "equal", result.reasons
    assert result.token_differences == ()


def test_ten_greedy_steps(tmp_path: Path) -> None:
    _decoded("llama", "loop_qkv", tmp_path / "out.onnx")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["prefill_q", "prefill_kv", "prefill_qkv", "heads_qkv", "loop_qkv", "skip_if_loop"])
@pytest.mark.parametrize("name", EXPORTS)
def test_ten_greedy_steps_of_every_export(name: str, mode: str, tmp_path: Path) -> None:
    _decoded(name, mode, tmp_path / "out.onnx")
