"""Passes tried on copies of one graph report what they report on a file of their own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from graphsurgery import inspection
from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.inspection import inspect_model
from graphsurgery.model_files.reading import read_model_proto
from graphsurgery.model_io import load
from graphsurgery.pipeline import Pipeline
from graphsurgery.registry import pass_names
from graphsurgery.trial import try_passes
from tests.small_models import parse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphsurgery.site_report import PassReport

NAMES = ("prune-last-token", "tidy", "block-attention", "rename-io")


def _timeless(reports: Iterable[PassReport]) -> list[PassReport]:
    return [dataclasses.replace(report, seconds=0) for report in reports]


def _never():
    raise AssertionError("the file was read again")


def test_the_file_is_read_once(fixtures_dir, monkeypatch):
    read = []

    def counted(path):
        read.append(path)
        return read_model_proto(path)

    monkeypatch.setattr("graphsurgery.model_io.read_model_proto", counted)
    path = fixtures_dir / "llama" / "model.onnx"
    found = inspect_model(path)
    assert len(found.passes) + len(found.unusable) == len(pass_names()) > 1
    assert read == [path]


@pytest.mark.parametrize("name", ["llama_merged", "genai_gptoss", "qwen3_moe_batched"])
def test_reports_are_those_of_files_of_their_own(fixtures_dir, name):
    path = fixtures_dir / name / "model.onnx"
    alone = [report for item in NAMES for report in Pipeline([item])(load(path)).passes]
    trial = try_passes(load(path), NAMES, _never)
    assert _timeless(trial.passes) == _timeless(alone)
    assert any(site.status == "rewritten" for report in alone for site in report.sites)


def test_the_model_stays_as_it_is(fixtures_dir):
    path = fixtures_dir / "llama" / "model.onnx"
    model, other = load(path), load(path)
    try_passes(model, NAMES, _never)
    named = [(node.name, node.op_type, [value and value.name for value in node.inputs]) for node in model.graph]
    assert named == [(node.name, node.op_type, [value and value.name for value in node.inputs]) for node in other.graph]
    assert model.metadata_props == other.metadata_props


def test_copies_are_made_only_behind_changes(fixtures_dir, monkeypatch):
    model = load(fixtures_dir / "llama" / "model.onnx")
    made = []
    original = type(model).clone

    def clone(self):
        made.append(self)
        return original(self)

    monkeypatch.setattr(type(model), "clone", clone)
    # Nothing to tidy, nothing to be fed: the copy is still what it was when the last pass gets it.
    trial = try_passes(model, ["tidy", "weights-from-inputs", "prune-last-token"], _never)
    assert [report.changed for report in trial.passes] == [False, False, True]
    assert made == [model]


def test_a_pass_that_gave_up_leaves_its_copy(fixtures_dir, monkeypatch):
    model = load(fixtures_dir / "llama" / "model.onnx")
    seen = []

    class Fussy:
        changed = True
        passes = ()

        def __init__(self, names):
            self.names = names

        def __call__(self, given):
            seen.append(given)
            if self.names == ["fussy"]:
                raise UsageError("not on this model.")
            return self

    monkeypatch.setattr("graphsurgery.trial.Pipeline", Fussy)
    trial = try_passes(model, ["fussy", "other"], _never)
    assert trial.unusable == {"fussy": "not on this model."}
    assert len({id(item) for item in (*seen, model)}) == 3


def test_what_cannot_be_copied_is_read_again(fixtures_dir, monkeypatch):
    path = fixtures_dir / "llama" / "model.onnx"
    model = load(path)

    def clone(self):
        raise RuntimeError("BUG: mapped to None")

    monkeypatch.setattr(type(model), "clone", clone)
    read = []

    def reload():
        read.append(path)
        return load(path)

    trial = try_passes(model, NAMES, reload)
    assert [report.name for report in trial.passes] == list(NAMES)
    assert len(read) == 3


def test_nodes_in_a_circle_are_refused():
    model = parse("""<ir_version: 9, opset_import: ["" : 18]>
    round (float[B,4] x) => (float[B,4] y) { a = Add(x, b)  b = Neg(a)  y = Abs(b) }""")
    with pytest.raises(InputRefusedError, match="form a cycle"):
        try_passes(model, NAMES, _never)


def test_the_file_is_told_of_as_it_was_read(cases_dir, monkeypatch):
    """Sorting for the copies comes after the look at the file."""
    monkeypatch.setattr(inspection, "pass_names", lambda: ["tidy"])
    found = inspect_model(cases_dir / "s05_unnamed_unsorted_nodes.onnx")
    assert found.nodes == 179
    assert [report.name for report in found.passes] == ["tidy"]
