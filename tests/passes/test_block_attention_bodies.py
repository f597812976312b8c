"""block-attention inside function bodies, branches and loops: once for all callers, the same outputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from onnx import inliner

from graphsurgery.equivalence.verify import verify_models
from graphsurgery.model_io import load, save
from graphsurgery.passes.block_attention import BlockAttention
from graphsurgery.pipeline import Pipeline
from tests.oracle import Arrays, run, session
from tests.strategies.attentions import PLAIN, AttentionSpec, attention_specs, build, feeds_of, lengths, pass_options
from tests.strategies.in_bodies import Placement, in_functions, in_subgraph, placements

if TYPE_CHECKING:
    import onnx

    from graphsurgery.site_report import PassReport

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
OUTSIDE = Placement(mask_outside=True, shared_mask=True, constants_inside=True, other_past=False)
OPTIONS = [
    {"q_blocks": 3},
    {"q_block_size": 4},
    {"kv_block_size": 3},
    {"q_block_size": 3, "kv_blocks": 2, "skip": "if"},
]


def block(proto: onnx.ModelProto, **options: object) -> tuple[ir.Model, PassReport]:
    model = ir.from_proto(proto)
    report = Pipeline([BlockAttention(**options)], check=True)(model).passes[0]  # type: ignore[arg-type]
    return model, report


def feeds(spec: AttentionSpec, batch: int, length: int, past: int, seed: int) -> Arrays:
    """For both calls; what they share is the first one's."""
    first, second = (feeds_of(spec, batch, length, past, seed + place) for place in (0, 1))
    return {**first, **{f"{name}_2": array for name, array in second.items()}}


def same(spec: AttentionSpec, expected: Arrays, got: Arrays) -> None:
    assert set(expected) == set(got)
    for name, values in expected.items():
        reference, found = values.astype(np.float32), got[name].astype(np.float32)
        assert np.array_equal(np.isnan(reference), np.isnan(found)), name
        assert np.array_equal(np.isinf(reference), np.isinf(found)), name
        finite = np.isfinite(reference)
        reference, found = reference[finite], found[finite]
        error = np.max(np.abs(reference - found), initial=0.0) / max(1.0, np.max(np.abs(reference), initial=0.0))
        assert error <= (2e-3 if spec.half else 1e-5), (error, name)


def wide_values(graph: ir.Graph) -> list[str]:
    """Values of the main graph that something could hold S rows and T columns in: comparisons and selections."""
    return [node.op_type for node in graph if node.op_type in ("Where", "And", "LessOrEqual", "Greater", "Expand")]


# ---- functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_body_is_blocked_once_for_both_calls(options: dict[str, object]) -> None:
    proto = in_functions(build(PLAIN), OUTSIDE)
    model, report = block(proto, **options)
    (site,) = report.sites
    assert site.status == "rewritten"
    assert "in function 'Attend', for its 2 calls" in site.reason
    assert site.kinds == ("attention", "decomposed", "causal", "full")
    assert site.boundaries[0].scope == "Attend"
    before, after = session(proto), session(model)
    for length, past in ((1, 4), (7, 0), (12, 5)):
        given_feeds = feeds(PLAIN, 2, length, past, seed=length)
        same(PLAIN, run(before, given_feeds), run(after, given_feeds))


def test_the_mask_of_the_callers_is_made_in_the_body_from_its_sources() -> None:
    proto = in_functions(build(PLAIN), OUTSIDE)
    model, report = block(proto, q_block_size=4)
    (function,) = model.functions.values()
    (site,) = report.sites
    assert site.detail["sliced_masks"] == []
    assert site.detail["skip"] == "trim"
    # The finished mask is no parameter any more, and the callers do not make it.
    assert wide_values(model.graph) == []
    names = [value.name for value in function.inputs]
    assert "layers" not in str(names)
    calls = [node for node in model.graph if node.op_type == "Attend"]
    assert [len(call.inputs) for call in calls] == [len(names), len(names)]
    assert not function.graph.initializers


def test_masks_that_callers_make_in_the_same_way() -> None:
    proto = in_functions(build(PLAIN), Placement(True, False, False, False))
    model, report = block(proto, q_blocks=2)
    assert report.sites[0].detail["sliced_masks"] == []
    assert wide_values(model.graph) == []
    given_feeds = feeds(PLAIN, 2, 6, 3, seed=5)
    same(PLAIN, run(session(proto), given_feeds), run(session(model), given_feeds))


def test_a_mask_that_is_an_input_of_the_model_is_cut_as_it_is() -> None:
    import dataclasses

    spec = dataclasses.replace(PLAIN, mask="given")
    proto = in_functions(build(spec), OUTSIDE)
    model, report = block(proto, q_block_size=4)
    assert report.sites[0].detail["skip"] == "none"
    assert "is not known to be zero or low only" in report.sites[0].reason
    given_feeds = feeds(spec, 2, 6, 3, seed=5)
    same(spec, run(session(proto), given_feeds), run(session(model), given_feeds))


def test_a_second_run_changes_nothing() -> None:
    model, _ = block(in_functions(build(PLAIN), OUTSIDE), q_block_size=4)
    again = Pipeline(["block-attention{q_block_size=4}"])(model).passes[0]
    assert not again.changed
    done = ("skipped", "already blocked: an earlier run made its nodes")
    assert [(site.status, site.reason) for site in again.sites] == [done]


def test_functions_without_attention_stay_as_they_are() -> None:
    model = load(CASES / "f04_model_already_has_functions.onnx")
    report = Pipeline(["block-attention{q_block_size=4}"])(model).passes[0]
    assert report.sites == []
    assert [function.name for function in model.functions.values()] == ["RMSNorm", "DecoderLayer", "Double"]


@pytest.mark.parametrize(
    ("name", "calls", "kinds", "sliced"),
    [
        ("llama", 3, ("causal", "full"), []),
        # Sliding and full layers are calls of one function: their masks are made differently further up.
        ("gemma2", 4, ("causal",), ["bitwise_and_1"]),
    ],
)
def test_layers_that_became_functions(
    name: str, calls: int, kinds: tuple[str, ...], sliced: list[str], tmp_path: Path
) -> None:
    path = FIXTURES / name / "model.onnx"
    model = load(path)
    report = Pipeline(["extract-functions", "block-attention{q_block_size=4}"], check=True)(model).passes[1]
    (site,) = report.sites
    assert site.status == "rewritten"
    assert site.kinds == ("attention", "decomposed", *kinds)
    assert f"for its {calls} calls" in site.reason
    assert site.detail["sliced_masks"] == sliced
    save(model, tmp_path / "out.onnx", weights="copy")
    result = verify_models(path, tmp_path / "out.onnx", opt_level_check=False)
    assert result.status == "equal", result.reasons


def _check_functions(data: st.DataObject) -> None:
    spec = data.draw(attention_specs())
    placement = data.draw(placements())
    options = data.draw(pass_options())
    proto = in_functions(build(spec), placement)
    model, report = block(proto, **options)
    flat = inliner.inline_local_functions(proto)
    flat_model, flat_report = block(flat, **options)
    assert len(report.sites) == 1
    if not report.changed:
        assert report.sites[0].status == "refused"
        return
    assert [site.status for site in flat_report.sites] == ["rewritten", "rewritten"], report.sites[0].reason
    before, after, flat_after = session(proto), session(model), session(flat_model)
    for batch, length, past in data.draw(st.lists(lengths(spec), min_size=2, max_size=2)):
        given_feeds = feeds(spec, batch, length, past, data.draw(st.integers(0, 2**16)))
        expected = run(before, given_feeds)
        same(spec, expected, run(after, given_feeds))
        same(spec, expected, run(flat_after, given_feeds))


@settings(max_examples=8, phases=PHASES)
@given(st.data())
def test_blocked_as_after_inlining(data: st.DataObject) -> None:
    _check_functions(data)


@pytest.mark.full
@settings(max_examples=300, phases=PHASES)
@given(st.data())
def test_blocked_as_after_inlining_at_length(data: st.DataObject) -> None:
    _check_functions(data)


# ---- branches and loops -------------------------------------------------------------------------------------------


def _check_subgraphs(data: st.DataObject) -> None:
    spec = data.draw(attention_specs())
    kind = data.draw(st.sampled_from(["if", "loop"]))
    proto = in_subgraph(build(spec), kind)
    model, report = block(proto, **data.draw(pass_options()))
    assert len(report.sites) == 1
    if not report.changed:
        assert report.sites[0].status == "refused"
        return
    before, after = session(proto), session(model)
    for batch, length, past in data.draw(st.lists(lengths(spec), min_size=2, max_size=2)):
        given_feeds = {**feeds_of(spec, batch, length, past, 3), "choose": np.asarray(True)}
        same(spec, run(before, given_feeds), run(after, given_feeds))


@settings(max_examples=12, phases=PHASES)
@given(st.data())
def test_blocked_in_branches_and_loops(data: st.DataObject) -> None:
    _check_subgraphs(data)


@pytest.mark.full
@settings(max_examples=600, phases=PHASES)
@given(st.data())
def test_blocked_in_branches_and_loops_at_length(data: st.DataObject) -> None:
    _check_subgraphs(data)
