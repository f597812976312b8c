"""Pipelines: order, callbacks, foreign passes, checks, and what they record in the model."""

from __future__ import annotations

import json

import onnx_ir as ir
import pytest
from onnx_ir.passes.common import CheckerPass, TopologicalSortPass

from graphsurgery.contracts import EXACT_OUTPUTS_KEY
from graphsurgery.errors import InputRefusedError, InternalError, UsageError
from graphsurgery.model_io import load, source_of
from graphsurgery.pass_base import REPORTS_KEY
from graphsurgery.passes.prune_last_token import PruneLastToken
from graphsurgery.passes.tidy import Tidy
from graphsurgery.pipeline import PROVENANCE_KEY, AnyPass, Pipeline, provenance
from graphsurgery.recipes import recipe_names
from graphsurgery.version import __version__
from tests.small_models import (
    CHAIN,
    AfterDouble,
    DoubleNegate,
    ForeignIdle,
    ForeignRename,
    Saboteur,
    node_of,
    op_types,
    parse,
    value_of,
)

UNSORTED = """
<ir_version: 9, opset_import: ["" : 18]>
unsorted (float[B,4] x) => (float[B,4] y)
{
    y = Abs(b)
    b = Neg(a)
    a = Relu(x)
}
"""

CYCLE = """
<ir_version: 9, opset_import: ["" : 18]>
round (float[B,4] x) => (float[B,4] y)
{
    a = Add(x, b)
    b = Neg(a)
    y = Abs(b)
}
"""


def test_passes_run_in_order_and_report_in_order():
    model = parse(CHAIN)
    report = Pipeline([DoubleNegate(), "tidy", {"name": "tidy", "sites": []}])(model)
    assert [item.name for item in report.passes] == ["double-negate", "tidy", "tidy"]
    assert report.changed
    assert [item.changed for item in report.passes] == [True, False, False]
    assert op_types(model) == ["Relu", "Neg", "Neg", "Neg", "Abs", "Exp"]


def test_specs_are_what_was_asked_for():
    pipeline = Pipeline(["prune-last-token{index=mask,keep=1}", Tidy(), ForeignIdle()])
    assert pipeline.specs() == ["prune-last-token{index=mask}", "tidy", "ForeignIdle"]


def test_a_pass_that_must_come_later_is_refused_earlier():
    Pipeline([DoubleNegate(), AfterDouble()])
    Pipeline([AfterDouble(), Tidy()])
    with pytest.raises(UsageError) as caught:
        Pipeline([AfterDouble(), Tidy(), DoubleNegate()])
    assert str(caught.value) == "Pass after-double must run after double-negate; put double-negate before it."
    with pytest.raises(UsageError, match="must run after double-negate"):
        Pipeline([DoubleNegate(), AfterDouble(), DoubleNegate()])


def test_text_alone_is_no_list_of_passes():
    with pytest.raises(UsageError, match=r"^Pipeline takes a list of passes, not the text 'tidy'; put it in a list\.$"):
        Pipeline("tidy")


def test_the_callback_sees_the_model_after_each_pass():
    seen = []

    def look(position, model, report):
        seen.append((position, report.name, len(model.graph), len(model.meta[REPORTS_KEY])))

    Pipeline([DoubleNegate(), DoubleNegate(), Tidy()], callback=look)(parse(CHAIN))
    assert seen == [(0, "double-negate", 6, 1), (1, "double-negate", 6, 2), (2, "tidy", 6, 3)]


def test_foreign_passes_take_part():
    model = parse(CHAIN)
    report = Pipeline([DoubleNegate(), ForeignRename(), ForeignIdle(), DoubleNegate(label="again")], check=True)(model)
    assert [(item.name, item.changed) for item in report.passes] == [
        ("double-negate", True),
        ("ForeignRename", True),
        ("ForeignIdle", False),
        ("double-negate", False),
    ]
    site = report.passes[1].sites[0]
    assert (site.id, site.status, site.reason) == ("model", "rewritten", "changed by a pass of another package")
    assert (report.passes[1].nodes_before, report.passes[1].nodes_after) == (6, 6)
    assert value_of(model, "renamed_0").producer() is next(iter(model.graph))


def test_what_a_foreign_pass_renamed_is_known_to_the_next():
    model = parse(CHAIN)
    node_of(model, "a").meta["doubled"] = True
    Pipeline([DoubleNegate(), ForeignRename()])(model)
    del node_of(model, "renamed_0").meta["doubled"]
    Pipeline([ForeignIdle(), DoubleNegate()], check=True)(model)
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(set(names)) == len(names)


def test_a_foreign_change_alone_is_recorded_and_no_output_is_called_exact():
    model = parse(CHAIN)
    report = Pipeline([ForeignRename()])(model)
    assert report.changed
    assert provenance(model)[0]["passes"] == ["ForeignRename"]
    assert json.loads(model.metadata_props[EXACT_OUTPUTS_KEY]) == []


def test_common_onnx_ir_passes_mix_in(fixtures_dir):
    model = load(fixtures_dir / "llama" / "model.onnx")
    passes: list[AnyPass | str] = [TopologicalSortPass(), "prune-last-token", CheckerPass(), "tidy"]
    report = Pipeline(passes, check=True)(model)
    assert [item.name for item in report.passes] == ["TopologicalSortPass", "prune-last-token", "CheckerPass", "tidy"]
    assert report.passes[1].count("rewritten") == 1


def test_a_pass_that_returns_another_model_is_refused():
    with pytest.raises(UsageError) as caught:
        Pipeline([ir.passes.functionalize(Tidy())])
    assert str(caught.value) == (
        "Pass _FunctionalPassWrapper returns a new model; a pipeline runs passes that work in place."
    )


def test_check_catches_a_pass_that_breaks_an_invariant():
    model = parse(CHAIN)
    with pytest.raises(InternalError) as caught:
        Pipeline([DoubleNegate(), Saboteur()], check=True)(model)
    assert str(caught.value) == (
        "Pass saboteur broke the model: two nodes of the main graph are called 'twin' (1 in all). Please report this."
    )
    assert caught.value.exit_code == 70
    Pipeline([Saboteur()])(parse(CHAIN))


def test_what_was_broken_before_is_not_held_against_a_pass():
    model = parse(CHAIN)
    for node in list(model.graph)[:2]:
        node.name = "twin"
    report = Pipeline([DoubleNegate(), Tidy()], check=True)(model)
    assert report.changed


def test_provenance_says_version_passes_and_input(fixtures_dir):
    model = load(fixtures_dir / "llama" / "model.onnx")
    source = source_of(model)
    assert source is not None
    Pipeline(["prune-last-token{index=position}", "tidy"])(model)
    assert provenance(model) == [
        {"version": __version__, "passes": ["prune-last-token{index=position}", "tidy"], "input": source.graph_hash()}
    ]
    assert len(source.graph_hash()) == 64
    exact = json.loads(model.metadata_props[EXACT_OUTPUTS_KEY])
    outputs = {value.name for value in model.graph.outputs}
    assert "logits" not in exact
    assert set(exact) == outputs - {"logits"}
    assert exact == sorted(exact)


def test_a_model_from_memory_has_no_input_hash():
    model = parse(CHAIN)
    Pipeline([DoubleNegate()])(model)
    assert provenance(model) == [{"version": __version__, "passes": ["double-negate"], "input": None}]
    assert json.loads(model.metadata_props[EXACT_OUTPUTS_KEY]) == ["z"]


def test_runs_accumulate_and_exactness_only_shrinks():
    model = parse(CHAIN)
    Pipeline([DoubleNegate()])(model)
    del node_of(model, "a").meta["doubled"]
    first = model.metadata_props[PROVENANCE_KEY]
    Pipeline([DoubleNegate(times=2)])(model)
    assert [run["passes"] for run in provenance(model)] == [["double-negate"], ["double-negate{times=2}"]]
    assert model.metadata_props[PROVENANCE_KEY].startswith(first[:-1])
    assert json.loads(model.metadata_props[EXACT_OUTPUTS_KEY]) == ["z"]
    Pipeline([ForeignRename()])(model)
    assert len(provenance(model)) == 3
    assert json.loads(model.metadata_props[EXACT_OUTPUTS_KEY]) == []


def test_a_run_that_changes_nothing_records_nothing():
    model = parse(CHAIN)
    before = ir.to_proto(model).SerializeToString()
    report = Pipeline(["tidy", DoubleNegate(exclude=("relu",))])(model)
    assert not report.changed
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize("text", ["garbage", "{}", "[1]", '[{"version": 1}]', '[{"version": "1", "passes": null}]'])
def test_metadata_that_no_pipeline_wrote_is_refused(text):
    model = parse(CHAIN)
    model.metadata_props[PROVENANCE_KEY] = text
    with pytest.raises(InputRefusedError) as caught:
        provenance(model)
    assert str(caught.value) == (
        "The model's metadata 'graphsurgery.pipeline' is not what graphsurgery writes: remove it."
    )


def test_a_damaged_list_of_exact_outputs_is_refused():
    model = parse(CHAIN)
    Pipeline([DoubleNegate()])(model)
    model.metadata_props[EXACT_OUTPUTS_KEY] = "garbage"
    with pytest.raises(InputRefusedError, match=r"^The model's metadata 'graphsurgery\.exact_outputs' is not what"):
        Pipeline([ForeignRename()])(model)


def test_an_unsorted_input_is_sorted_with_a_warning():
    model = parse(UNSORTED)
    report = Pipeline([DoubleNegate()], check=True)(model)
    assert report.warnings == ["The nodes of the input were not in execution order; they were sorted."]
    assert op_types(model) == ["Relu", "Neg", "Neg", "Neg", "Abs"]
    assert Pipeline([Tidy()])(model).warnings == []


def test_a_cycle_is_refused():
    with pytest.raises(InputRefusedError, match=r"^The nodes of graph 'round' form a cycle, so that it cannot run"):
        Pipeline([Tidy()])(parse(CYCLE))


def test_inside_sequential_reports_are_in_the_models_meta(fixtures_dir):
    model = load(fixtures_dir / "llama" / "model.onnx")
    sequence = ir.passes.Sequential(TopologicalSortPass(), PruneLastToken(), Tidy())
    result = sequence(model)
    assert result.modified
    reports = model.meta[REPORTS_KEY]
    assert [(item.name, item.count("rewritten")) for item in reports] == [("prune-last-token", 1), ("tidy", 1)]
    assert reports[0].spec == "prune-last-token"
    assert PROVENANCE_KEY not in model.metadata_props


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_a_pipeline(recipe):
    pipeline = Pipeline.from_recipe(recipe, check=True)
    assert pipeline.specs()[-1].split("{")[0] == ("extract-functions" if recipe.startswith("npu") else "tidy")


def test_errors_leave_as_they_are():
    with pytest.raises(RuntimeError, match="slipped"):
        Pipeline([Saboteur(how="crash")])(parse(CHAIN))
    with pytest.raises(UsageError, match="index=mask of pass prune-last-token"):
        Pipeline(["prune-last-token{index=mask}"])(
            parse(
                """
                <ir_version: 9, opset_import: ["" : 18]>
                g (int64[B,S] input_ids, float[16,8] table, float[8,16] head) => (float[B,S,16] logits)
                {
                    hidden = Gather(table, input_ids)
                    logits = MatMul(hidden, head)
                }
                """
            )
        )
