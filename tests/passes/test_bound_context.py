"""bound-context: the same outputs at every bound, and scores that really have C columns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.contracts import ContextBound, read_context_bound
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.model_io import load, save
from graphsurgery.passes.bound_context import BoundContext
from graphsurgery.patterns.site import Refusal
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.strategies.static_caches import StaticSpec, build, feeds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.site_report import PassReport

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"
LLAMA = FIXTURES / "llama_static" / "model.onnx"
A08 = CASES / "a08_static_cache_scatter_ctx16.onnx"
PLAIN = StaticSpec(
    write="scatter_elements",
    layout="bgnd",
    read="plain",
    mask="range",
    fused=False,
    expand=True,
    sink=False,
    guard=False,
    rows_first=False,
    window=None,
    slots=12,
    groups=2,
)


def bounded(path: Path, output: Path, *specs: str) -> tuple[ir.Model, list[PassReport]]:
    model = load(path)
    report = Pipeline(specs or ["bound-context"], check=True)(model)
    save(model, output, weights="copy", force=True)
    return model, report.passes


def with_columns(model: ir.Model, names: Sequence[str] = ()) -> list[str]:
    """Return the scores of every attention too; their names."""
    scores = [
        node.outputs[0]
        for node in model.graph
        if node.op_type == "MatMul" and any(_ends_in_softmax(use.node) for use in node.outputs[0].uses())
    ]
    for value in scores:
        value.type, value.shape = value.type or ir.TensorType(ir.DataType.FLOAT), None
        model.graph.outputs.append(value)
    return [value.name or "" for value in scores]


def _ends_in_softmax(node: ir.Node) -> bool:
    for _ in range(8):
        if node.op_type == "Softmax":
            return True
        uses = [use.node for use in node.outputs[0].uses()]
        if node.op_type not in ("Mul", "Add", "Where", "Tanh", "Div", "Concat", "Sub", "Reshape") or not uses:
            return False
        node = next((item for item in uses if item.op_type != "ReduceMax"), uses[0])
    return False


def fed(path: Path, slots: int, length: int, past: int, batch: int = 2) -> dict[str, Any]:
    """Feeds of a static export for tokens behind ``past`` slots in use; the others hold noise."""
    rng = np.random.default_rng(slots + length)
    feeds: dict[str, Any] = {}
    for value in session(load(path)).get_inputs():
        if value.name == "input_ids":
            feeds[value.name] = rng.integers(0, 40, (batch, length))
        elif value.name == "position_ids":
            feeds[value.name] = np.tile(np.arange(past, past + length), (batch, 1))
        elif value.name == "attention_mask":
            allowed = np.arange(slots)[None, :] <= np.arange(past, past + length)[:, None]
            feeds[value.name] = np.broadcast_to(allowed, (batch, 1, length, slots)).copy()
        elif value.name.endswith("cumulative_length"):
            feeds[value.name] = np.asarray(past)
        elif "comp_ctx" not in value.name:
            # Exporters write fixed sizes as names too.
            heads, features = int(value.shape[1]), int(value.shape[3])
            feeds[value.name] = rng.standard_normal((batch, heads, slots, features)).astype(np.float32)
    return feeds


def close(reference: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in reference.items():
        error = np.abs(value.astype(np.float64) - found[name]).max() / max(1.0, np.abs(value).max())
        assert error <= 1e-5, (name, error)


# ---- equal, and really bounded ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "slots"), [(LLAMA, 20), (A08, 16)], ids=["llama_static", "a08"])
def test_every_bound_gives_the_same_and_the_scores_have_so_many_columns(path: Path, slots: int) -> None:
    model = load(path)
    assert Pipeline(["bound-context"], check=True)(model).changed
    scores = with_columns(model)
    before, after = session(load(path)), session(model)
    for length, past in ((1, 0), (5, 0), (3, 4), (1, 9)):
        feeds = fed(path, slots, length, past)
        reference = run(before, feeds)
        for bound in {past + length, past + length + 1, slots - 1, slots, slots + 5}:
            found = run(after, feeds | {"comp_ctx_lengths": np.full(bound, -3)})
            close(reference, found)
            assert [found[name].shape[-1] for name in scores] == [min(bound, slots)] * len(scores)
            # Caches of the first layer do not depend on attention.
            first = next(name for name in reference if "key" in name and ".0" in name)
            assert np.array_equal(reference[first], found[first])
            assert found[first].shape[2] == slots


@pytest.mark.parametrize(("path", "slots"), [(LLAMA, 20), (A08, 16)], ids=["llama_static", "a08"])
def test_a_bound_from_the_positions(path: Path, slots: int) -> None:
    model = load(path)
    report = Pipeline(["bound-context{source=positions,multiple=4}"], check=True)(model).passes[0]
    assert report.count("rewritten") == len(report.sites)
    assert [value.name for value in model.graph.inputs] == [value.name for value in load(path).graph.inputs]
    assert read_context_bound(model) == ContextBound(None, 4)
    scores = with_columns(model)
    before, after = session(load(path)), session(model)
    for length, past, columns in ((1, 0, 4), (5, 0, 8), (3, 5, 8), (1, 8, 12), (1, slots - 1, slots)):
        feeds = fed(path, slots, length, past)
        found = run(after, feeds)
        close(run(before, feeds), found)
        assert {found[name].shape[-1] for name in scores} == {columns}


def test_rows_that_write_nothing_still_have_a_bound() -> None:
    model = load(A08)
    Pipeline(["bound-context{source=positions,multiple=2}"])(model)
    feeds = fed(A08, 16, 1, 3)
    feeds["position_ids"][1] = -1
    found = run(session(model), feeds)
    close(
        {name: value[:1] for name, value in run(session(load(A08)), feeds).items()},
        {n: v[:1] for n, v in found.items()},
    )


@pytest.mark.parametrize("source", ["bound-context", "bound-context{source=positions,multiple=4}"])
@pytest.mark.parametrize("depth", ["outputs", "generate"])
def test_verified(tmp_path: Path, source: str, depth: str) -> None:
    bounded(A08, tmp_path / "m.onnx", source)
    result = verify_models(A08, tmp_path / "m.onnx", depth=depth)
    assert (result.status, result.reasons) == ("equal", ())


@pytest.mark.full
@pytest.mark.parametrize("source", ["bound-context", "bound-context{source=positions,multiple=4}"])
@pytest.mark.parametrize("depth", ["outputs", "generate"])
@pytest.mark.parametrize("name", ["llama_static", "gpt_oss_static"])
def test_verified_exports(tmp_path: Path, name: str, source: str, depth: str) -> None:
    path = FIXTURES / name / "model.onnx"
    bounded(path, tmp_path / "m.onnx", source)
    result = verify_models(path, tmp_path / "m.onnx", depth=depth)
    assert (result.status, result.reasons) == ("equal", ())


def test_the_verifier_finds_a_bound_that_is_too_small(tmp_path: Path) -> None:
    """A bound on the positions of which the last is left out: the check can fail."""
    model = load(A08)
    Pipeline(["bound-context{source=positions,multiple=1}"])(model)
    one = next(node for node in model.graph if node.op_type == "Add" and (node.name or "").endswith("/end"))
    one.replace_input_with(1, ir.val("zero", const_value=ir.tensor(np.zeros(1, np.int64), name="zero")))
    model.graph.register_initializer(one.inputs[1])  # type: ignore[arg-type]
    save(model, tmp_path / "m.onnx")
    assert verify_models(A08, tmp_path / "m.onnx").status == "different"


# ---- what else reads, and other passes ----------------------------------------------------------------------------


def test_who_asks_for_the_number_of_columns_hears_the_old_one() -> None:
    spec = dataclasses.replace(PLAIN, shape_reader=True, sink=True)
    model = ir.from_proto(build(spec))
    Pipeline(["bound-context"], check=True)(model)
    feeds = feeds_of(spec, 2, 1, 4, 12, 0) | {"comp_ctx_lengths": np.zeros(6, np.int64)}
    assert run(session(model), feeds)["scores_shape"].tolist() == [2, 4, 1, 12]


@pytest.mark.parametrize(
    "blocks",
    ["block-attention{q_blocks=2,kv_blocks=2}", "block-attention{q_block_size=3,kv_block_size=4}"],
)
def test_blocks_are_blocks_of_what_is_left(blocks: str) -> None:
    model = load(A08)
    passes = Pipeline(["bound-context", blocks], check=True)(model).passes
    assert [report.count("rewritten") for report in passes] == [2, 2]
    before, after = session(load(A08)), session(model)
    for length, past, bound in ((5, 0, 5), (4, 3, 9), (1, 8, 16)):
        feeds = fed(A08, 16, length, past)
        close(run(before, feeds), run(after, feeds | {"comp_ctx_lengths": np.zeros(bound, np.int64)}))


def test_blocks_first_is_refused() -> None:
    with pytest.raises(UsageError, match="block-attention must run after bound-context"):
        Pipeline(["block-attention{q_blocks=2}", "bound-context"])
    model = load(A08)
    Pipeline(["block-attention{q_blocks=2}"])(model)
    sites = Pipeline(["bound-context"])(model).passes[0].sites
    assert [(site.status, site.id) for site in sites] == [("refused", "attention:0"), ("refused", "attention:1")]
    assert sites[0].reason == "its keys are read block by block already: run bound-context before block-attention"


def test_static_sizes_before_and_after(tmp_path: Path) -> None:
    both, reports = bounded(A08, tmp_path / "a.onnx", "bind-dims{batch=1,seq=1}", "bound-context")
    assert reports[1].count("rewritten") == 2
    feeds = fed(A08, 16, 1, 5, batch=1)
    reference = run(session(load(A08)), feeds)
    close(reference, run(session(both), feeds | {"comp_ctx_lengths": np.zeros(8, np.int64)}))
    fixed, _ = bounded(A08, tmp_path / "b.onnx", "bound-context", "bind-dims{batch=1,seq=1,dims=comp_ctx_lengths:8}")
    assert fixed.graph.inputs[-1].shape == ir.Shape([8])
    close(reference, run(session(fixed), feeds | {"comp_ctx_lengths": np.zeros(8, np.int64)}))
    result = verify_models(A08, tmp_path / "b.onnx")
    assert (result.status, result.reasons) == ("equal", ())


def test_twice_changes_nothing() -> None:
    model = load(A08)
    Pipeline(["bound-context"])(model)
    before = ir.to_proto(model).SerializeToString()
    report = Pipeline(["bound-context"])(model).passes[0]
    assert [site.reason for site in report.sites] == ["already bounded: an earlier run cut its keys"] * 2
    assert ir.to_proto(model).SerializeToString() == before


def test_layers_one_after_the_other_share_the_input() -> None:
    model = load(A08)
    Pipeline(["bound-context{sites=0}"])(model)
    report = Pipeline(["bound-context{sites=1}"])(model).passes[0]
    assert [site.status for site in report.sites] == ["skipped", "rewritten"]
    assert [value.name for value in model.graph.inputs].count("comp_ctx_lengths") == 1
    model = load(A08)
    Pipeline(["bound-context{sites=0}"])(model)
    with pytest.raises(UsageError, match="an earlier run bounded this model in another way"):
        Pipeline(["bound-context{source=positions}"])(model)


# ---- the interface ------------------------------------------------------------------------------------------------


def test_the_input_and_what_is_told_of_it() -> None:
    model = load(A08)
    report = Pipeline(["bound-context{input_name=ccl}"])(model).passes[0]
    added = model.graph.inputs[-1]
    assert (added.name, added.dtype, added.shape) == ("ccl", ir.DataType.INT64, ir.Shape(["ccl"]))
    told = (
        "Input 'ccl' must be fed on every call, int64 [C], with C more than every slot that is in use; its contents do"
    )
    assert report.warnings == [f"{told} not matter."]
    assert report.sites[0].reason == "reads the first min(len(ccl), 16) slots"
    assert report.sites[0].detail == {
        "bound": "length of input 'ccl'",
        "slots": "16",
        "caches": ["past_key.0_RetainedState", "past_value.0_RetainedState"],
    }
    for cache in (value for value in model.graph.outputs if "Retained" in (value.name or "")):
        assert cache.shape == ir.Shape(["batch_size", 2, 16, 4])


def test_an_input_of_any_name_is_fed_right(tmp_path: Path) -> None:
    bounded(A08, tmp_path / "m.onnx", "bound-context{input_name=ccl}")
    result = verify_models(A08, tmp_path / "m.onnx", opt_level_check=False)
    assert (result.status, result.reasons) == ("equal", ())


def test_given_feeds_read_all_slots(tmp_path: Path) -> None:
    bounded(A08, tmp_path / "m.onnx")
    result = verify_models(A08, tmp_path / "m.onnx", feeds=fed(A08, 16, 3, 9), opt_level_check=False)
    assert (result.status, result.reasons) == ("equal", ())


def test_options_that_contradict_each_other() -> None:
    for options, words in (
        ({"source": "positions", "input_name": "x"}, "names an input, which source=positions has not"),
        ({"multiple": 4}, "rounds what source=positions finds"),
        ({"source": "positions", "multiple": 0}, "must be 1 or more"),
        ({"input_name": ""}, "must not be empty"),
    ):
        with pytest.raises(UsageError, match=words):
            BoundContext(**options)
    with pytest.raises(UsageError, match="already has a value of that name"):
        Pipeline(["bound-context{input_name=position_ids}"])(load(A08))
    model = load(A08)
    model.metadata_props["graphsurgery.context_bound"] = "nonsense"
    with pytest.raises(InputRefusedError, match="is not what graphsurgery writes"):
        Pipeline(["bound-context"])(model)


# ---- fused operators ----------------------------------------------------------------------------------------------


MULTI_HEAD = """
<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
fused (float[b,s,8] query, float[b,2,s,4] new, int64[b,s] position_ids, float[b,2,16,4] past_key_0, float[b,2,16,4] past_value_0,
       float[b,1,s,16] attention_mask) => (float[b,s,8] logits, float[b,2,16,4] past_key_0_RetainedState,
       float[b,2,16,4] past_value_0_RetainedState)
<int64[2] places = {1, 3}>
{
    index = Unsqueeze(position_ids, places)
    shape = Shape(new)
    spread = Expand(index, shape)
    past_key_0_RetainedState = ScatterElements<axis = 2>(past_key_0, spread, new)
    past_value_0_RetainedState = ScatterElements<axis = 2>(past_value_0, spread, new)
    logits = com.microsoft.MultiHeadAttention<num_heads = 2 ATTRIBUTES>(
        query, past_key_0_RetainedState, past_value_0_RetainedState, , , attention_mask)
}
"""


def multi_head(attributes: str = "") -> ir.Model:
    return ir.from_onnx_text(MULTI_HEAD.replace("ATTRIBUTES", attributes))


def test_multi_head_attention_is_cut() -> None:
    model = multi_head()
    report = Pipeline(["bound-context"], check=True)(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten"]
    rng = np.random.default_rng(0)
    allowed = np.broadcast_to(np.arange(16)[None, :] <= np.arange(3, 6)[:, None], (2, 1, 3, 16))
    feeds: dict[str, Any] = {
        "query": rng.standard_normal((2, 3, 8)).astype(np.float32),
        "new": rng.standard_normal((2, 2, 3, 4)).astype(np.float32),
        "position_ids": np.tile(np.arange(3, 6), (2, 1)),
        "past_key_0": rng.standard_normal((2, 2, 16, 4)).astype(np.float32),
        "past_value_0": rng.standard_normal((2, 2, 16, 4)).astype(np.float32),
        "attention_mask": np.where(allowed, 0, np.float32(-1e9)).astype(np.float32),
    }
    reference = run(session(multi_head()), feeds)
    for bound in (6, 9, 20):
        found = run(session(model), feeds | {"comp_ctx_lengths": np.zeros(bound, np.int64)})
        close(reference, found)
        assert np.array_equal(reference["past_key_0_RetainedState"], found["past_key_0_RetainedState"])


def test_a_causal_mask_that_is_counted_from_the_end_is_refused() -> None:
    sites = Pipeline(["bound-context"])(multi_head(", unidirectional = 1")).passes[0].sites
    assert sites[0].status == "refused"
    assert "counts its causal mask from the last key" in sites[0].reason


# ---- refusals -----------------------------------------------------------------------------------------------------


def reasons(path: Path) -> set[str]:
    found = BoundContext().find(load(path))
    assert all(isinstance(site, Refusal) for site in found)
    return {site.reason for site in found if isinstance(site, Refusal)}


def test_dynamic_caches_are_not_applicable() -> None:
    assert reasons(FIXTURES / "llama" / "model.onnx") == {
        f"not applicable: cache 'input.cache.layers.{layer}.keys' grows with each call and has no unused slots"
        for layer in range(3)
    }
    assert all(reason.startswith("not applicable: cache") for reason in reasons(FIXTURES / "optimum_llama/model.onnx"))
    assert all("whose kernel reads only the positions" in item for item in reasons(FIXTURES / "genai_llama/model.onnx"))


def test_probabilities_that_are_read_elsewhere_stop_a_site() -> None:
    model = load(A08)
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    model.graph.outputs.append(softmax.outputs[0])
    report = Pipeline(["bound-context"])(model).passes[0]
    assert [site.status for site in report.sites] == ["refused", "rewritten"]
    assert report.sites[0].reason.startswith("its scores or probabilities are also read by graph output")


def test_an_export_with_a_bound_of_its_own() -> None:
    model = load(A08)
    own = ir.val("comp_ctx_lengths", dtype=ir.DataType.INT64, shape=["c"])
    model.graph.inputs.append(own)
    sites = Pipeline(["bound-context"])(model).passes[0].sites
    assert {site.reason for site in sites} == {"already bounded: the model has an input 'comp_ctx_lengths'"}
