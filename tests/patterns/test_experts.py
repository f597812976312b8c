"""The experts' recogniser: every committed export, hostile cases, generated blocks; each site computed on its own."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings

from graphsurgery.equivalence.feeds import make_feeds
from graphsurgery.equivalence.signature import read_signature
from graphsurgery.patterns.experts.finding import find_experts
from graphsurgery.patterns.experts.sites import ROUTE_WEIGHT, TOKEN_ROW, ExpertSite, ExpertTensor, StepOutput
from graphsurgery.patterns.site import Refusal
from tests.expert_bodies import assert_bodies_compute, body_results
from tests.strategies.experts import Spec, build, expert_specs, feeds_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"

# file: form, layers, E, K, H, number of steps, of parameters
EXPORTS = {
    "deepseek_v3_batched/model": ("batched", (1, 2), 8, 2, 32, 8, 2),
    "deepseek_v3_grouped/model": ("grouped", (1, 2), 8, 2, 32, 8, 2),
    "gemma4_moe_batched/model": ("batched", (0, 1, 2, 3), 8, 2, 32, 7, 2),
    "gemma4_moe_grouped/model": ("grouped", (0, 1, 2, 3), 8, 2, 32, 7, 2),
    "gpt_oss_batched/model": ("batched", (0, 1, 2, 3), 4, 2, 32, 14, 4),
    "gpt_oss_grouped/model": ("grouped", (0, 1, 2, 3), 4, 2, 32, 14, 4),
    "mixtral_batched/model": ("batched", (0, 1, 2), 4, 2, 32, 8, 2),
    "mixtral_grouped/model": ("grouped", (0, 1, 2), 4, 2, 32, 8, 2),
    "optimum_gpt_oss/model": ("dense", (0, 1), 4, 2, 64, 14, 4),
    "optimum_qwen3_moe/model": ("loop", (0, 1), 8, 2, 64, 8, 3),
    "qwen3_5_moe/model": ("grouped", (0, 1, 2, 3), 4, 2, 32, 8, 2),
    "qwen3_moe_batched/model": ("batched", (0, 1, 2), 8, 2, 32, 8, 2),
    "qwen3_moe_grouped/model": ("grouped", (0, 1, 2), 8, 2, 32, 8, 2),
    "qwen3_moe_grouped_external/model": ("grouped", (0, 1, 2), 8, 2, 32, 8, 2),
    "qwen3_moe_matmulnbits/model": ("grouped", (0, 1, 2), 8, 2, 32, 8, 2),
    "qwen3_vl_moe/decode": ("grouped", (0, 1, 2), 4, 2, 32, 8, 2),
    "qwen3_vl_moe/language_model": ("grouped", (0, 1, 2), 4, 2, 32, 8, 2),
}
HOSTILE = {
    "m01_loop_over_experts_index_add": ("loop", 4, 2, 16, 7, 3),
    "m03_topk_then_softmax_bias_interleaved": ("dense", 4, 2, 16, 14, 4),
}
DENSE_MODELS = [
    *("llama", "llama_fp16", "llama_static", "llama_merged", "llama_matmulnbits", "llama_qdq", "llama_qdq4", "qwen3"),
    *("gemma2", "gpt2", "llama_external", "llama_opset23", "llama_opset_newest", "optimum_llama", "genai_llama"),
]


def sites_of(path: Path) -> tuple[ir.Model, list[ExpertSite]]:
    model = ir.load(path)
    found = find_experts(model)
    assert not [site.reason for site in found if isinstance(site, Refusal)]
    return model, [site for site in found if isinstance(site, ExpertSite)]


def tensors_of(site: ExpertSite) -> list[ExpertTensor]:
    found = [item for step in site.body for item in step.operands if isinstance(item, ExpertTensor)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("name", EXPORTS)
def test_every_export(name: str) -> None:
    form, layers, experts, top_k, hidden, steps, tensors = EXPORTS[name]
    _, sites = sites_of(FIXTURES / f"{name}.onnx")
    assert [site.id for site in sites] == [f"experts:{number}" for number in range(len(layers))]
    assert tuple(site.layer for site in sites) == layers
    for site in sites:
        assert (site.form, site.kinds) == (form, ("experts", form))
        assert (site.experts, site.top_k, site.hidden) == (experts, top_k, hidden)
        assert len(site.body) == steps
        assert len(tensors_of(site)) == tensors
        check(site)


def check(site: ExpertSite) -> None:
    """What holds of every site."""
    assert site.weights is not None
    reads = [item for step in site.body for item in step.operands]
    assert TOKEN_ROW in reads
    assert ROUTE_WEIGHT in reads
    for number, step in enumerate(site.body):
        assert all(item.step < number for item in step.operands if isinstance(item, StepOutput))
    read = {item.step for item in reads if isinstance(item, StepOutput)}
    assert read == set(range(len(site.body) - 1)), "every step but the last is read"
    for tensor in tensors_of(site):
        assert len(tensor.values) == (1 if tensor.stacked else site.experts)
    last = site.output.producer()
    assert last in site.interior
    inside = set(site.interior)
    for value in (site.tokens, site.indices, site.weights):
        assert value.producer() not in inside
    for node in site.interior:
        if node is not last:
            assert all(use.node in inside for value in node.outputs for use in value.uses())
    assert all(step.node in inside for step in site.body if step.per_row and step.node.graph is not None)


def test_the_form_of_one_body_in_full() -> None:
    """The loop of the Optimum export: separate projections, each expert with parameters of its own."""
    _, sites = sites_of(FIXTURES / "optimum_qwen3_moe" / "model.onnx")
    body = sites[0].body
    assert [step.node.op_type for step in body] == [
        "MatMul",
        "Sigmoid",
        "Mul",
        "MatMul",
        "Mul",
        "MatMul",
        "Mul",
        "Cast",
    ]
    gate, up, down = tensors_of(sites[0])
    assert [tensor.shape for tensor in (gate, up, down)] == [(64, 32), (64, 32), (32, 64)]
    assert [tensor.values[0].name for tensor in (gate, up, down)] == [f"onnx::MatMul_188{n}" for n in (3, 4, 5)]
    assert body[0].operands == (TOKEN_ROW, gate)
    assert body[3].operands == (TOKEN_ROW, up)
    assert body[5].operands == (StepOutput(4), down)
    assert body[6].operands == (StepOutput(5), ROUTE_WEIGHT)
    assert sites[0].tokens.name == "/model/layers.0/mlp/Reshape_output_0"
    assert sites[0].indices.name == "/model/layers.0/mlp/TopK_output_1"
    assert sites[0].weights is not None
    assert sites[0].weights.name == "/model/layers.0/mlp/Cast_1_output_0"
    assert sites[0].output.name == "/model/layers.0/mlp/Add_15_output_0"


def test_weights_are_those_that_reach_the_experts() -> None:
    """DeepSeek chooses with a bias and weighs without it, renormalised and scaled; Gemma 4 scales by expert."""
    _, deepseek = sites_of(FIXTURES / "deepseek_v3_grouped" / "model.onnx")
    _, gemma = sites_of(FIXTURES / "gemma4_moe_batched" / "model.onnx")
    for site in (*deepseek, *gemma):
        assert site.weights is not None
        maker = site.weights.producer()
        assert maker is not None
        assert maker.op_type == "Mul"
        assert site.weights not in (site.indices, site.tokens)
    scale = gemma[0].weights.producer().inputs[1].producer()  # type: ignore[union-attr]
    assert scale is not None
    assert scale.op_type == "GatherND"


@pytest.mark.parametrize("name", EXPORTS)
def test_bodies_compute_what_the_export_computes(name: str) -> None:
    path = FIXTURES / f"{name}.onnx"
    model, sites = sites_of(path)
    feeds, _ = make_feeds(read_signature(ir.to_proto(model)), 0)
    assert_bodies_compute(model, sites, [feed.build() for feed in feeds[:3]], path.parent)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_cases(name: str) -> None:
    model, (site,) = sites_of(CASES / f"{name}.onnx")
    form, experts, top_k, hidden, steps, tensors = HOSTILE[name]
    assert (site.form, site.experts, site.top_k, site.hidden) == (form, experts, top_k, hidden)
    assert len(site.body) == steps
    assert len(tensors_of(site)) == tensors
    check(site)
    stored = np.load(CASES / f"{name}.feeds.npz")
    given: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    for key in stored.files:
        feed, kind, value = key.split("|")
        if kind == "in":
            given[feed][value] = stored[key]
    assert_bodies_compute(model, [site], list(given.values()))


@pytest.mark.parametrize("name", DENSE_MODELS)
def test_nothing_is_invented(name: str) -> None:
    """Models without experts, shared experts beside, attention, top-k of other things: nothing."""
    assert find_experts(ir.load(FIXTURES / name / "model.onnx")) == []


def test_other_cases_have_no_experts() -> None:
    found = {}
    for path in sorted(CASES.glob("*.onnx")):
        if path.name.startswith(("m0", "s03", "s04", "s13")):
            continue
        found[path.name] = find_experts(ir.load(path))
    assert len(found) > 15
    assert not any(found.values())


def test_fused_operators_are_read() -> None:
    model = ir.load(FIXTURES / "genai_gptoss" / "model.onnx")
    before = ir.to_proto(model).SerializeToString()
    uses = {value.name: len(value.uses()) for node in model.graph for value in node.outputs}
    found = find_experts(model)
    assert [site.layer for site in found] == [0, 1]
    assert [site.kinds for site in found] == [("experts", "op")] * 2
    site = found[0]
    assert isinstance(site, ExpertSite)
    assert (site.experts, site.top_k, site.hidden, str(site.tokens_dim)) == (4, 2, 64, "batch_size*sequence_length")
    assert site.router is not None
    assert site.router.scores.name == "/model/layers.0/moe/router/Reshape/output_0"
    assert site.router.normalised
    assert [node.op_type for node in site.interior] == ["MoE"]
    kinds = [step.node.op_type for step in site.body]
    assert kinds[:4] == ["MatMul", "Add", "Slice", "Slice"]
    assert kinds[-3:] == ["MatMul", "Add", "Mul"]
    assert kinds.count("Min") == 2
    assert {value.name: len(value.uses()) for node in model.graph for value in node.outputs} == uses
    assert ir.to_proto(model).SerializeToString() == before


# ---- generated blocks ----------------------------------------------------------------------------------------------

FORMS = {
    "dense": ("dense",),
    "selected": ("loop",),
    "masked": ("loop",),
    "grouped": ("grouped",),
    "batched": ("batched",),
    "einsum": ("dense", "batched"),
    "outputs": ("dense",),
}


@settings(deadline=None)
@given(expert_specs())
def test_generated_blocks(spec: Spec) -> None:
    model = ir.from_proto(build(spec))
    before = ir.to_proto(model).SerializeToString()
    (site,) = find_experts(model)
    assert isinstance(site, ExpertSite), site
    assert ir.to_proto(model).SerializeToString() == before, "the recogniser changes nothing"
    assert site.form in FORMS[spec.form]
    assert (site.experts, site.top_k, site.hidden) == (spec.experts, spec.top_k, spec.hidden)
    check(site)
    for found, ours, wanted in body_results(model, [site], [feeds_of(spec, 2, 5, 1), feeds_of(spec, 1, 1, 2)]):
        assert found is site
        bound = 4e-3 if spec.half else 1e-5
        scale = max(1.0, float(np.max(np.abs(wanted))))
        np.testing.assert_allclose(ours.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=bound * scale)
