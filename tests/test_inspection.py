"""What a file is, and what each pass would do with it."""

from __future__ import annotations

import io
import json
import os
import shutil

import onnx_ir as ir
import pytest
from rich.console import Console

from graphsurgery import inspection
from graphsurgery.errors import InputRefusedError
from graphsurgery.inspection import inspect_model
from graphsurgery.model_io import load, save
from graphsurgery.pipeline import Pipeline
from graphsurgery.registry import pass_names
from graphsurgery.site_report import SCHEMA


def _text(found: inspection.Inspection, *, verbose: bool = False) -> str:
    text = io.StringIO()
    found.render(Console(file=text, width=160, highlight=False, markup=False, emoji=False), verbose=verbose)
    return text.getvalue()


@pytest.fixture
def few_passes(monkeypatch):
    """Where passes do not matter, trying all of them takes time."""
    monkeypatch.setattr(inspection, "pass_names", lambda: ["tidy"])


def test_a_genai_directory(fixtures_dir):
    found = inspect_model(fixtures_dir / "genai_llama")
    assert found.path == str((fixtures_dir / "genai_llama" / "model.onnx").absolute())
    assert found.opsets[""] == 22
    assert "com.microsoft" in found.opsets
    assert [(item.name, item.role) for item in found.inputs[:2]] == [
        ("input_ids", "tokens [B, S]"),
        ("attention_mask", "padding mask [B, T]"),
    ]
    assert found.inputs[0].dtype == "INT64"
    assert found.inputs[0].shape == ("batch_size", "sequence_length")
    assert found.outputs[0].name == "logits"
    assert found.operators["com.microsoft::GroupQueryAttention"] == 2
    counts = list(found.operators.values())
    assert counts == sorted(counts, reverse=True)
    assert found.nodes == sum(counts)
    assert found.functions == ()
    assert found.data_files == {"model.onnx.data": (fixtures_dir / "genai_llama" / "model.onnx.data").stat().st_size}
    assert found.problems == ()
    assert (found.runs, found.contracts, found.unusable) == ((), (), {})
    prune = next(item for item in found.passes if item.name == "prune-last-token")
    assert [(site.id, site.status, site.detail["index"]) for site in prune.sites] == [
        ("lm_head:logits", "rewritten", "mask")
    ]


def test_every_pass_is_tried(fixtures_dir):
    found = inspect_model(fixtures_dir / "llama" / "model.onnx")
    assert {item.name for item in found.passes} | set(found.unusable) == set(pass_names())


def test_weights_count_external_bytes_too(fixtures_dir, few_passes):
    path = fixtures_dir / "llama_external" / "model.onnx"
    found = inspect_model(path)
    model = load(path)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    assert found.weights == (len(tensors), sum(tensor.nbytes for tensor in tensors if tensor is not None))
    assert found.weights[1] > path.with_name("model.onnx.data").stat().st_size * 0.9


def test_nothing_is_written_and_no_external_data_is_read(fixtures_dir, tmp_path, monkeypatch):
    directory = shutil.copytree(fixtures_dir / "llama_external", tmp_path / "model")

    def read(self):
        raise AssertionError(f"tensor {self.name} was read")

    monkeypatch.setattr(ir.ExternalTensor, "_load", read)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}
    inspect_model(directory / "model.onnx")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()} == before


def test_missing_data_is_a_problem_not_an_error(cases_dir, few_passes):
    found = inspect_model(cases_dir / "s03_external_data_missing_or_short.onnx")
    assert found.data_files == {
        "s03_external_data_missing_or_short.short.data": 16,
        "s03_external_data_missing_or_short.missing.data": None,
    }
    assert len(found.problems) == 2
    assert "is missing" in found.problems[1]
    text = _text(found)
    assert "data file s03_external_data_missing_or_short.missing.data: missing" in text
    assert f"warning: {found.problems[0]}" in text


def test_unsorted_input(cases_dir, few_passes):
    found = inspect_model(cases_dir / "s05_unnamed_unsorted_nodes.onnx")
    assert [item.role for item in found.inputs[:3]] == ["tokens [B, S]", "padding mask [B, T]", "positions"]
    assert found.nodes == 179


def test_inputs_with_a_default_are_left_out(cases_dir, few_passes):
    found = inspect_model(cases_dir / "s07_weights_are_also_graph_inputs.onnx")
    model = load(cases_dir / "s07_weights_are_also_graph_inputs.onnx")
    assert len(model.graph.inputs) > len(found.inputs)
    assert not {item.name for item in found.inputs} & set(model.graph.initializers)


def test_functions_are_listed_and_counted(cases_dir, few_passes):
    found = inspect_model(cases_dir / "f04_model_already_has_functions.onnx")
    assert sorted(found.functions) == ["local::DecoderLayer", "local::Double", "local::RMSNorm"]
    assert found.operators["local::DecoderLayer"] == 2
    assert found.nodes > sum(found.operators.values())


def test_history_and_promises_of_a_result(fixtures_dir, tmp_path):
    model = load(fixtures_dir / "llama" / "model.onnx")
    Pipeline(["prune-last-token{index=last}"])(model)
    save(model, tmp_path / "pruned.onnx")
    found = inspect_model(tmp_path / "pruned.onnx")
    assert [run["passes"] for run in found.runs] == [["prune-last-token{index=last}"]]
    assert [(item["output"], item["index"], item["keep"]) for item in found.contracts] == [("logits", "last", 1)]
    prune = next(item for item in found.passes if item.name == "prune-last-token")
    assert [site.status for site in prune.sites] == ["refused"]
    assert "already pruned" in prune.sites[0].reason
    assert f"made by graphsurgery {found.runs[0]['version']}: prune-last-token{{index=last}}" in _text(found)


def test_the_json_form(fixtures_dir, few_passes):
    found = inspect_model(fixtures_dir / "llama" / "model.onnx")
    data = json.loads(found.to_json())
    assert data["schema"] == SCHEMA
    assert data["inputs"][0]["role"] == "tokens [B, S]"
    assert "seconds" not in data["passes"][0]
    assert found.to_json() == inspect_model(fixtures_dir / "llama" / "model.onnx").to_json()
    assert found.to_json().endswith("}\n")


def test_the_table(fixtures_dir):
    found = inspect_model(fixtures_dir / "llama" / "model.onnx")
    lines = [line.rstrip() for line in _text(found).splitlines()]
    assert lines[0] == found.path
    assert lines[1].startswith(f"IR version {found.ir_version}, opsets ai.onnx 20; {found.nodes} nodes, 0 functions; ")
    assert any(line.startswith("in   input_ids") and line.endswith("tokens [B, S]") for line in lines)
    words = [line.split()[:3] for line in lines]
    assert ["prune-last-token", "lm_head:logits", "rewritten"] in words
    assert ["tidy", "-", "skipped"] in words
    few = next(line for line in lines if line.startswith("operators: "))
    every = next(line for line in _text(found, verbose=True).splitlines() if line.startswith("operators: "))
    assert few.count(",") == 11
    assert every.count(",") == len(found.operators) - 1


def test_a_pass_that_cannot_run_says_why(fixtures_dir, monkeypatch):
    monkeypatch.setattr(inspection, "pass_names", lambda: ["tidy", "prune-last-tokens"])
    found = inspect_model(fixtures_dir / "llama" / "model.onnx")
    assert found.unusable == {"prune-last-tokens": "Unknown pass: 'prune-last-tokens'; did you mean prune-last-token?"}
    assert [item.name for item in found.passes] == ["tidy"]
    assert "refused" in _text(found)


@pytest.mark.parametrize("name", ["", ".truncated", ".empty"])
def test_what_is_no_model_is_refused(cases_dir, name):
    with pytest.raises(InputRefusedError, match="s04_lfs_pointer_and_truncated"):
        inspect_model(cases_dir / f"s04_lfs_pointer_and_truncated{name}.onnx")


def test_paths_of_any_kind_do(fixtures_dir, few_passes):
    path = fixtures_dir / "llama"
    expected = inspect_model(path).path
    assert inspect_model(str(path)).path == expected
    assert inspect_model(os.path.relpath(path)).path == expected
    assert inspect_model(path, file="model.onnx").path == expected
