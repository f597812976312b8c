"""The main job in one piece: what is written, when, and what is not."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

from graphsurgery import registry, workflow
from graphsurgery.equivalence import running
from graphsurgery.errors import (
    CannotCheckError,
    DifferenceError,
    InputRefusedError,
    InternalError,
    NothingChangedError,
    SaveError,
    UsageError,
)
from graphsurgery.model_io import load
from graphsurgery.pipeline import provenance
from graphsurgery.workflow import ApplyRequest, apply_passes
from tests.directories import digests

PRUNE = ("prune-last-token{index=mask}",)


@pytest.fixture
def model(fixtures_dir, tmp_path):
    """A GenAI export in a directory of its own."""
    return shutil.copytree(fixtures_dir / "genai_llama", tmp_path / "model") / "model.onnx"


@pytest.fixture
def saboteur(monkeypatch):
    """Registers the pass that breaks models."""
    passes = {**registry._PASSES, "saboteur": "tests.small_models:Saboteur"}
    monkeypatch.setattr(registry, "_PASSES", passes)


def test_load_rewrite_verify_save(model):
    before = digests(model.parent)
    result = apply_passes(ApplyRequest(input=model, specs=PRUNE, verify="outputs"))
    output = model.with_name("model.surgery.onnx")
    assert result.output == output
    assert result.failure is None
    assert result.verification is not None
    assert result.verification.status == "equal"
    assert (result.report.input, result.report.output) == (str(model), str(output))
    assert result.report.changed
    after = digests(model.parent)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"model.surgery.onnx"}
    assert [run["passes"] for run in provenance(load(output))] == [list(PRUNE)]


def test_the_report_is_the_same_in_every_run(model):
    request = ApplyRequest(input=model, specs=PRUNE, verify="outputs", force=True)
    texts = [apply_passes(request).report.to_json() for _ in range(2)]
    assert texts[0] == texts[1]
    assert ".tmp" not in texts[0]
    output = str(model.with_name("model.surgery.onnx"))
    assert json.loads(texts[0])["verification"]["rewritten"] == output


def test_a_dry_run_writes_nothing(model):
    before = digests(model.parent)
    result = apply_passes(ApplyRequest(input=model, specs=PRUNE, dry_run=True))
    assert (result.output, result.report.output, result.report.changed) == (None, None, True)
    assert digests(model.parent) == before


def test_a_change_can_be_required(model):
    with pytest.raises(NothingChangedError) as caught:
        apply_passes(ApplyRequest(input=model, specs=("tidy",), require_change=True))
    assert str(caught.value) == f"No pass changed {model}."
    first = apply_passes(ApplyRequest(input=model, specs=PRUNE))
    assert first.output is not None
    with pytest.raises(NothingChangedError, match=r"\(lm_head:logits: already pruned.*\)\.$"):
        apply_passes(ApplyRequest(input=first.output, specs=PRUNE, require_change=True))
    assert not first.output.with_name("model.surgery.surgery.onnx").exists()


def test_the_models_after_each_pass(model, tmp_path):
    request = ApplyRequest(
        input=model, specs=(*PRUNE, "tidy"), dump_after=tmp_path / "deep" / "dumps", output=tmp_path / "out.onnx"
    )
    apply_passes(request)
    dumps = sorted(path.name for path in (tmp_path / "deep" / "dumps").glob("*.onnx"))
    assert dumps == ["00-prune-last-token.onnx", "01-tidy.onnx"]
    shapes = [load(tmp_path / "deep" / "dumps" / name).graph.outputs[0].shape for name in dumps]
    assert [str(shape) for shape in shapes] == ["[batch_size,1,512]"] * 2


def test_a_recipe_and_its_file(model, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[[pass]]\nname = "prune-last-token"\nindex = "mask"\n')
    mine = apply_passes(ApplyRequest(input=model, recipe=str(recipe), dry_run=True))
    assert [item.spec for item in mine.report.passes] == list(PRUNE)
    named = apply_passes(ApplyRequest(input=model, recipe="prefill", dry_run=True))
    assert named.report.passes[-1].name == "tidy"


def test_an_existing_output_is_replaced_on_demand_only(model, tmp_path):
    output = tmp_path / "out.onnx"
    output.write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"out\.onnx exists: choose another, or replace it with --force\."):
        apply_passes(ApplyRequest(input=model, specs=PRUNE, output=output))
    assert output.read_bytes() == b"precious"
    apply_passes(ApplyRequest(input=model, specs=PRUNE, output=output, force=True))
    assert str(load(output).graph.outputs[0].shape) == "[batch_size,1,512]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Give either --recipe NAME or one or more -p SPEC: what is to be done?"),
        (
            {"recipe": "prefill", "specs": PRUNE},
            "Give either --recipe NAME or one or more -p SPEC: what is to be done?",
        ),
        ({"specs": PRUNE, "verify": "output"}, "Unknown depth of --verify: 'output'; did you mean outputs?"),
        (
            {"specs": PRUNE, "dry_run": True, "verify": "outputs"},
            "--dry-run writes nothing, so --verify has nothing to work on: leave one of them out.",
        ),
        (
            {"specs": PRUNE, "dry_run": True, "dump_after": Path("x")},
            "--dry-run writes nothing, so --dump-after has nothing to work on: leave one of them out.",
        ),
        (
            {"specs": PRUNE, "keep_unverified": True},
            "--keep-unverified says what becomes of an output that --verify rejects: give --verify.",
        ),
        ({"specs": PRUNE, "output": Path("nowhere/out.onnx")}, "the output's directory"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused_before_any_work(model, options, message):
    before = digests(model.parent)
    with pytest.raises(UsageError) as caught:
        apply_passes(ApplyRequest(input=model, **options))
    assert str(caught.value).startswith(message)
    assert digests(model.parent) == before


# ---- verification -----------------------------------------------------------------------------------------------------


def test_a_model_that_was_broken_is_not_kept(model, tmp_path, saboteur):
    output = tmp_path / "out" / "out.onnx"
    output.parent.mkdir()
    output.write_bytes(b"precious")
    result = apply_passes(
        ApplyRequest(input=model, specs=("saboteur{how=values}",), output=output, verify="outputs", force=True)
    )
    assert isinstance(result.failure, DifferenceError)
    text = str(result.failure)
    assert text.startswith(f"The result does not compute the same as {model}: output logits")
    assert text.endswith("; no output was written.")
    assert ".;" not in text
    assert (result.output, result.report.output) == (None, None)
    assert result.verification is not None
    assert result.verification.status == "different"
    # The old output is whole, and nothing lies beside it.
    assert {path.name: path.read_bytes() for path in output.parent.iterdir()} == {"out.onnx": b"precious"}


def test_it_is_kept_on_demand(model, saboteur):
    result = apply_passes(
        ApplyRequest(input=model, specs=("saboteur{how=values}",), verify="outputs", keep_unverified=True)
    )
    assert isinstance(result.failure, DifferenceError)
    assert "no output was written" not in str(result.failure)
    assert result.output == model.with_name("model.surgery.onnx")
    assert model.with_name("model.surgery.onnx").exists()


def test_verification_sees_the_temporary_file_in_its_place(model, tmp_path, monkeypatch):
    seen: dict[str, Any] = {}

    def look(reference, rewritten, **arguments):
        seen.update(arguments, reference=reference, rewritten=rewritten, there=rewritten.exists())
        seen["beside"] = [path.name for path in (tmp_path / "out").iterdir()]
        seen["final"] = (tmp_path / "out" / "out.onnx").exists()
        return verify(reference, rewritten, **arguments)

    from graphsurgery.equivalence import verify as module

    verify = module.verify_models
    monkeypatch.setattr(module, "verify_models", look)
    (tmp_path / "out").mkdir()
    result = apply_passes(
        ApplyRequest(input=model, specs=PRUNE, output=tmp_path / "out" / "out.onnx", verify="outputs", seed=7)
    )
    assert result.failure is None
    assert (seen["there"], seen["final"], seen["seed"], seen["depth"]) == (True, False, 7, "outputs")
    assert seen["reference"] == model
    assert all(name.startswith(".") for name in seen["beside"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["out.onnx", "out.onnx.data"]


def test_without_the_runtime_nothing_is_done(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    before = digests(model.parent)
    with pytest.raises(CannotCheckError) as caught:
        apply_passes(ApplyRequest(input=model, specs=PRUNE, verify="outputs"))
    assert str(caught.value) == (
        'Verifying needs ONNX Runtime, which is not installed: pip install "graphsurgery[verify]".'
    )
    assert digests(model.parent) == before
    kept = apply_passes(ApplyRequest(input=model, specs=PRUNE, verify="outputs", keep_unverified=True))
    assert isinstance(kept.failure, CannotCheckError)
    assert kept.verification is None
    assert kept.output is not None
    assert kept.output.exists()


def test_absent_weights_are_no_hindrance_but_cannot_be_verified(cases_dir, tmp_path):
    case = cases_dir / "s03_external_data_missing_or_short.onnx"
    for name in (case.name, "s03_external_data_missing_or_short.short.data"):
        shutil.copy(cases_dir / name, tmp_path)
    model = tmp_path / case.name
    result = apply_passes(ApplyRequest(input=model, specs=("prune-last-token",)))
    assert result.output is not None
    assert [text for text in result.report.warnings if text.startswith("Weights are incomplete: the data file ")]
    assert any("lm_head.weight" in text for text in result.report.warnings)
    result.output.unlink()
    result = apply_passes(ApplyRequest(input=model, specs=("prune-last-token",), verify="outputs"))
    assert isinstance(result.failure, CannotCheckError)
    assert "short.data" in str(result.failure)
    assert ".;" not in str(result.failure)
    assert result.output is None
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".data", ".onnx"]


def test_progress_is_told(model, tmp_path):
    told = []
    apply_passes(
        ApplyRequest(input=model, specs=PRUNE, output=tmp_path / "out.onnx", verify="outputs"),
        lambda what, done, total: told.append((what, done, total)),
    )
    copying = [(done, total) for what, done, total in told if what == "copying weights"]
    size = model.with_name("model.onnx.data").stat().st_size
    assert copying[-1] == (size, size)
    verifying = [(done, total) for what, done, total in told if what != "copying weights"]
    assert verifying[-1][0] == verifying[-1][1] == len(verifying)


# ---- errors of others -------------------------------------------------------------------------------------------------


def test_a_check_between_passes_catches_a_broken_model(model, saboteur):
    before = digests(model.parent)
    with pytest.raises(InternalError, match=r"^Pass saboteur broke the model: two nodes of the main graph are called"):
        apply_passes(ApplyRequest(input=model, specs=("saboteur",), check=True))
    assert digests(model.parent) == before


def test_an_input_that_is_no_model(cases_dir, tmp_path):
    for name in ("s04_lfs_pointer_and_truncated", "s04_lfs_pointer_and_truncated.truncated"):
        with pytest.raises(InputRefusedError, match=name):
            apply_passes(ApplyRequest(input=cases_dir / f"{name}.onnx", specs=PRUNE, output=tmp_path / "out.onnx"))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(model, tmp_path, monkeypatch):
    from graphsurgery.model_files import saving

    def full(path, job, meter):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "_make_data", full)
    (tmp_path / "out").mkdir()
    with pytest.raises(SaveError, match="No space left on device"):
        apply_passes(ApplyRequest(input=model, specs=PRUNE, output=tmp_path / "out" / "out.onnx"))
    assert list((tmp_path / "out").iterdir()) == []


def test_the_runtime_is_asked_for_lazily():
    assert isinstance(running.require_runtime(), types.ModuleType)
    assert not hasattr(workflow, "onnxruntime")
