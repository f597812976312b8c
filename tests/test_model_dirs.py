"""Directory outputs: the other files come along, and the configuration keeps pointing right."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import onnx_ir as ir
import pytest

from graphsurgery.errors import SaveError, UsageError
from graphsurgery.model_files.directories import rename_decoder
from graphsurgery.model_io import load, save, stage
from tests.model_io_helpers import FIXTURES, tensor_bytes, write_model

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """{
    "model": {
        "decoder": {
            "filename": "model.onnx",
            "inputs": {"input_ids": "input_ids", "über": "x"}
        },
        "bos_token_id": 1
    }
}
"""


@pytest.fixture
def genai(tmp_path: Path) -> Path:
    """A model directory with a configuration, a tokenizer, a second model and files that stay behind."""
    directory = tmp_path / "in"
    write_model(directory)
    write_model(directory, name="vision.onnx")
    (directory / "genai_config.json").write_text(CONFIG, encoding="utf-8")
    (directory / "sub").mkdir()
    (directory / "sub" / "merges.txt").write_text("a b")
    (tmp_path / "blob").write_text("tokens")
    (directory / "tokenizer.json").symlink_to("../blob")
    (directory / "gone.json").symlink_to("nowhere")
    (directory / ".git").mkdir()
    (directory / ".git" / "HEAD").write_text("ref")
    (directory / ".model.onnx.graphsurgery-0123abcd.tmp.onnx").write_text("stale")
    return directory


FILES = [
    "genai_config.json",
    "model.onnx",
    "model.onnx.data",
    "sub/merges.txt",
    "tokenizer.json",
    "vision.onnx",
    "vision.onnx.data",
]


def _files(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("spelling", ["slash", "existing", "keyword"])
def test_the_other_files_come_along(genai: Path, tmp_path: Path, spelling: str):
    output = tmp_path / "out"
    if spelling == "existing":
        output.mkdir()
    path = f"{output}/" if spelling == "slash" else output
    result = save(load(genai), path, as_directory=spelling == "keyword")
    assert result.path == output / "model.onnx"
    assert (result.weights, result.bytes_copied, result.data_files) == ("copy", 48, (output / "model.onnx.data",))
    assert _files(output) == FILES
    assert (output / "model.onnx").read_bytes() == (genai / "model.onnx").read_bytes()
    assert tensor_bytes(output / "vision.onnx") == tensor_bytes(genai / "vision.onnx")
    assert not (output / "tokenizer.json").is_symlink()
    assert (output / "tokenizer.json").read_text() == "tokens"
    assert (output / "genai_config.json").read_bytes() == (genai / "genai_config.json").read_bytes()
    assert result.notes == (
        f"{genai}/.git was left out: not a model directory",
        f"{genai}/gone.json was left out: not a regular file",
    )
    assert sorted(item.name for item in tmp_path.iterdir()) == ["blob", "in", "out"]


def test_the_staged_directory_is_complete_and_dropped_without_a_commit(genai: Path, tmp_path: Path):
    with stage(load(genai), f"{tmp_path}/out/") as staged:
        assert _files(staged.model_path.parent) == FILES
        assert not (tmp_path / "out").exists()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["blob", "in"]


def test_a_new_input_is_not_listed_in_the_configuration(genai: Path, tmp_path: Path):
    model = load(genai)
    model.graph.inputs.append(ir.val("last_token_indices", ir.DataType.INT32, [1]))
    save(model, f"{tmp_path}/out/")
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text(encoding="utf-8"))
    assert config["model"]["decoder"]["inputs"] == {"input_ids": "input_ids", "über": "x"}


def test_another_file_name_is_told_to_the_configuration(genai: Path, tmp_path: Path):
    result = save(load(genai), f"{tmp_path}/out/", file_name="prefill.onnx")
    assert result.path == tmp_path / "out" / "prefill.onnx"
    assert "model.onnx" not in _files(tmp_path / "out")
    text = (tmp_path / "out" / "genai_config.json").read_text(encoding="utf-8")
    config = json.loads(CONFIG)
    config["model"]["decoder"]["filename"] = "prefill.onnx"
    assert json.loads(text) == config
    assert text.splitlines()[1:3] == CONFIG.splitlines()[1:3]
    assert "über" in text
    assert text.endswith("}\n")


def test_the_configuration_of_another_model_is_left_alone(genai: Path, tmp_path: Path):
    save(load(genai, file="vision.onnx"), f"{tmp_path}/out/", file_name="eyes.onnx")
    assert (tmp_path / "out" / "genai_config.json").read_text(encoding="utf-8") == CONFIG
    # Its decoder came along as a file of the directory, with its data.
    assert tensor_bytes(tmp_path / "out" / "model.onnx") == tensor_bytes(genai / "model.onnx")


def test_models_in_a_sub_directory_stay_there(tmp_path: Path):
    path = write_model(tmp_path / "in" / "onnx")
    (tmp_path / "in" / "config.json").write_text("{}")
    result = save(load(tmp_path / "in"), f"{tmp_path}/out/")
    assert result.path == tmp_path / "out" / "onnx" / "model.onnx"
    assert _files(tmp_path / "out") == ["config.json", "onnx/model.onnx", "onnx/model.onnx.data"]
    assert tensor_bytes(result.path) == tensor_bytes(path)


def test_a_single_file_output_leaves_the_other_files(genai: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    save(load(genai), tmp_path / "out" / "prefill.onnx")
    assert _files(tmp_path / "out") == ["prefill.onnx", "prefill.onnx.data"]


def test_an_existing_directory_needs_force_for_existing_files(genai: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    save(load(genai), tmp_path / "out")
    before = {name: (tmp_path / "out" / name).stat().st_ino for name in _files(tmp_path / "out")}
    with pytest.raises(UsageError, match=r"model\.onnx exists: choose another, or replace it with --force"):
        save(load(genai), tmp_path / "out")
    (tmp_path / "out" / "model.onnx").unlink()
    with pytest.raises(UsageError, match="exists: choose another output directory, or replace its files with --force"):
        save(load(genai), tmp_path / "out")
    result = save(load(genai), tmp_path / "out", force=True)
    assert result.data_files == (tmp_path / "out" / "model.onnx.1.data",)
    assert _files(tmp_path / "out") == sorted([*FILES, "mine.txt", "model.onnx.1.data"])
    # The data of the earlier output is not touched, nor is what has nothing to do with the model.
    for name in ("model.onnx.data", "mine.txt"):
        assert (tmp_path / "out" / name).stat().st_ino == before[name]
    assert tensor_bytes(result.path) == tensor_bytes(genai / "model.onnx")


def test_a_failure_half_way_puts_replaced_files_back(genai: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = tmp_path / "out"
    save(load(genai), f"{output}/")
    for name in _files(output):
        (output / name).write_text(f"old {name}")
    real = os.replace
    for fail_at in range(1, 9):
        calls = 0

        def failing(source, target, *, fail_at=fail_at):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(5, "Input/output error")
            return real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            if fail_at == 8:
                save(load(genai), output, force=True)
                break
            with pytest.raises(SaveError, match="Input/output error"):
                save(load(genai), output, force=True)
        assert {name: (output / name).read_text() for name in _files(output)} == {name: f"old {name}" for name in FILES}
        assert not [item for item in output.iterdir() if item.name.startswith(".")]
    assert calls == 7
    assert tensor_bytes(output / "model.onnx") == tensor_bytes(genai / "model.onnx")


def test_the_input_directory_itself_is_in_place(genai: Path):
    model = load(genai)
    before = _files(genai)
    with pytest.raises(UsageError, match="is the input itself"):
        save(model, f"{genai}/")
    assert save(model, f"{genai}/", force=True).weights == "reference"
    assert save(model, genai, file_name="prefill.onnx").bytes_copied == 0
    assert _files(genai) == sorted([*before, "prefill.onnx"])


def test_an_output_within_the_input_is_not_copied_into_itself(genai: Path):
    save(load(genai), f"{genai}/out/")
    save(load(genai), genai / "out", force=True)
    assert _files(genai / "out") == sorted([*FILES, "model.onnx.1.data"])


def test_directories_that_cannot_be_outputs(genai: Path, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is to be a directory and a file has that name"):
        save(load(genai), tmp_path / "file", as_directory=True)
    with pytest.raises(UsageError, match=r"directory .*/none does not exist"):
        save(load(genai), f"{tmp_path}/none/out/")
    with pytest.raises(UsageError, match="has a directory in it"):
        save(load(genai), f"{tmp_path}/out/", file_name="a/b.onnx")
    with pytest.raises(UsageError, match="is not a directory: leave it out"):
        save(load(genai), tmp_path / "o.onnx", file_name="b.onnx")
    with pytest.raises(UsageError, match="would take the place of"):
        save(load(genai), f"{tmp_path}/out/", file_name="vision.onnx")
    with pytest.raises(UsageError, match="cannot share the data file"):
        save(load(genai), f"{tmp_path}/out/", weights="reference")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["blob", "file", "in"]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('{"model":{"decoder":{"filename":"a.onnx"}}}', '{"model": {"decoder": {"filename": "b.onnx"}}}'),
        (
            '{\n "model": {"decoder": {"filename": "./a.onnx"}}\n}',
            '{\n "model": {\n  "decoder": {\n   "filename": "b.onnx"\n  }\n }\n}',
        ),
        ('{\r\n\t"model": {"decoder": {"filename": "c.onnx"}}}\r\n', None),
        ('{"model": []}', None),
        ("[]", None),
    ],
)
def test_rename_decoder(tmp_path: Path, text: str, result: str | None):
    (tmp_path / "genai_config.json").write_bytes(text.encode())
    assert rename_decoder(tmp_path / "genai_config.json", "a.onnx", "b.onnx") == result


def test_line_ends_are_kept(tmp_path: Path):
    (tmp_path / "genai_config.json").write_bytes(b'{\r\n\t"model": {"decoder": {"filename": "a.onnx"}}\r\n}\r\n')
    text = rename_decoder(tmp_path / "genai_config.json", "a.onnx", "b.onnx")
    assert text is not None
    assert text.startswith('{\r\n\t"model": {\r\n\t\t"decoder"')
    assert text.count("\n") == text.count("\r\n")


@pytest.mark.parametrize("mode", ["auto", "repack"])
def test_a_genai_fixture_as_a_directory(tmp_path: Path, mode: str):
    fixture = FIXTURES / "genai_llama"
    result = save(load(fixture), f"{tmp_path}/out/", weights=mode)  # type: ignore[arg-type]
    assert {"genai_config.json", "model.onnx"} < set(_files(tmp_path / "out"))
    assert tensor_bytes(result.path) == tensor_bytes(fixture / "model.onnx")
