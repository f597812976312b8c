"""Diff, as properties: other words for the same model are no difference, and each single edit has its severity."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_ir.passes.common import InlinePass

from graphsurgery.compare import diff_models
from tests.strategies.graph_edits import EDIT_KINDS, Edit, edits_of, in_other_words, model_with_everything, models

if TYPE_CHECKING:
    import onnx

    from graphsurgery.compare import ModelDiff


def _diff(a: onnx.ModelProto, b: onnx.ModelProto) -> ModelDiff:
    return diff_models(ir.from_proto(a), ir.from_proto(b)).models[0]


def _differences(found: ModelDiff) -> dict[str, list[str]]:
    return {heading: [str(item) for item in listing.items] for heading, listing in found.lists()}


@given(models(), st.randoms(use_true_random=False))
def test_a_model_in_other_words_is_no_difference(model: onnx.ModelProto, rng: random.Random):
    found = _diff(model, in_other_words(model, rng))
    assert _differences(found) == {}
    assert (found.severity, found.affected_outputs) == ("none", ())
    assert found.sizes["nodes"].before == found.sizes["nodes"].after


@given(models(), st.randoms(use_true_random=False))
def test_each_single_edit_has_its_severity(model: onnx.ModelProto, rng: random.Random):
    edits = edits_of(model, rng)
    for edit in rng.sample(edits, min(3, len(edits))):
        found = _diff(model, in_other_words(edit.model, rng))
        assert (edit.kind, found.severity) == (edit.kind, edit.severity), _differences(found)


@given(models(dead=False), st.randoms(use_true_random=False))
def test_each_single_edit_is_what_is_listed(model: onnx.ModelProto, rng: random.Random):
    # Without dead code: of two dead nodes alike, none can tell which was edited.
    edits = edits_of(model, rng)
    for edit in rng.sample(edits, min(3, len(edits))):
        found = _diff(model, in_other_words(edit.model, rng))
        counts = {name: getattr(found, name).count for name in edit.counts}
        assert (edit.kind, counts) == (edit.kind, edit.counts), _differences(found)


@given(models(), st.randoms(use_true_random=False))
def test_severity_is_the_same_in_both_directions(model: onnx.ModelProto, rng: random.Random):
    edits = edits_of(model, rng)
    one, other = rng.choice(edits), rng.choice(edits)
    assert _diff(one.model, other.model).severity == _diff(other.model, one.model).severity


@given(models(), st.randoms(use_true_random=False))
def test_a_model_and_its_inlined_form_do_not_differ(model: onnx.ModelProto, rng: random.Random):
    inlined = ir.from_proto(model)
    InlinePass()(inlined)
    found = _diff(in_other_words(model, rng), ir.to_proto(inlined))
    assert all(node.domain != "local" for node in inlined.graph.all_nodes())
    assert _differences(found) == {}


@pytest.fixture(scope="module")
def every_edit() -> list[Edit]:
    return edits_of(model_with_everything(), random.Random(3))


def test_the_edits_are_of_every_kind(every_edit: list[Edit]):
    assert {edit.kind for edit in every_edit} == EDIT_KINDS


@pytest.mark.parametrize("kind", sorted(EDIT_KINDS))
def test_each_kind_of_edit_in_a_model_with_everything(kind: str, every_edit: list[Edit]):
    edit = next(edit for edit in every_edit if edit.kind == kind)
    found = _diff(model_with_everything(), in_other_words(edit.model, random.Random(4)))
    assert found.severity == edit.severity
    assert {name: getattr(found, name).count for name in edit.counts} == edit.counts
