"""Loading: what is read, absent and short data, and files that are no model."""

from __future__ import annotations

import gc
import io
import os
import pickle
import zipfile
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import pytest

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_files import reading
from graphsurgery.model_io import load, source_of
from tests.model_io_helpers import CASES, refusal, write_model

if TYPE_CHECKING:
    from pathlib import Path

# --- what is loaded ---------------------------------------------------------------------------------------------------


def test_external_tensors_are_references_and_no_data_is_read(tmp_path: Path):
    path = write_model(tmp_path, weights=2)
    (tmp_path / "model.onnx.data").unlink()
    model = load(path)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    assert [type(tensor) for tensor in tensors] == [ir.ExternalTensor, ir.ExternalTensor]
    assert [tensor.path for tensor in tensors if isinstance(tensor, ir.ExternalTensor)] == [
        str(tmp_path / "model.onnx.data")
    ] * 2


def test_the_data_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path)
    opened = []
    real = open

    def watched(file, *args, **kwargs):
        opened.append(os.fspath(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", watched)
    monkeypatch.setattr(io, "open", watched)
    load(path)
    assert opened == [str(path)]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_it_was(tmp_path: Path, enabled: bool, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path)
    during = []
    real = ir.serde.deserialize_model

    def watched(proto):
        during.append(gc.isenabled())
        return real(proto)

    monkeypatch.setattr(ir.serde, "deserialize_model", watched)
    (gc.enable if enabled else gc.disable)()
    try:
        load(path)
        assert (during, gc.isenabled()) == ([False], enabled)
        with pytest.raises(InputRefusedError):
            load(tmp_path / "none.onnx")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_source_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path / "m", weights=3, data="weights/all.bin")
    monkeypatch.chdir(tmp_path)
    source = source_of(load("m/model.onnx"))
    assert source is not None
    assert (source.path, source.directory, source.root) == (path, path.parent, path.parent)
    assert [(file.location, file.size, file.linked) for file in source.data_files] == [("weights/all.bin", 48, False)]
    assert (source.problems, source.config_path) == ((), None)


def test_a_model_without_source():
    assert source_of(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)) is None


# --- absent and short data --------------------------------------------------------------------------------------------


def test_absent_data_is_told_and_not_refused(tmp_path: Path):
    path = write_model(tmp_path, weights=3)
    (tmp_path / "model.onnx.data").unlink()
    source = source_of(load(path))
    assert source is not None
    (problem,) = source.problems
    assert (problem.kind, problem.tensors, problem.needed, problem.size) == ("missing", ("w0", "w1", "w2"), 48, None)
    assert problem.message == (
        f"the data file {tmp_path}/model.onnx.data is missing, so tensors 'w0' and 2 more cannot be verified"
    )


def test_short_data_names_the_tensors_behind_its_end(tmp_path: Path):
    path = write_model(tmp_path, weights=3)
    (tmp_path / "model.onnx.data").write_bytes(bytes(47))
    source = source_of(load(path))
    assert source is not None
    (problem,) = source.problems
    assert (problem.kind, problem.tensors, problem.needed, problem.size) == ("short", ("w2",), 48, 47)
    assert problem.message == (
        f"the data file {tmp_path}/model.onnx.data holds 47 of the 48 bytes that it should, so tensor 'w2' cannot be verified"
    )


def test_data_that_is_a_git_lfs_pointer_is_named(tmp_path: Path):
    path = write_model(tmp_path, weights=3, rows=64)
    (tmp_path / "model.onnx.data").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 768\n")
    source = source_of(load(path))
    assert source is not None
    assert "it is a Git LFS pointer: run `git lfs pull`" in source.problems[0].message


def test_a_link_to_a_model_tells_where_its_data_is(tmp_path: Path):
    path = write_model(tmp_path / "store")
    link = tmp_path / "model.onnx"
    link.symlink_to(path)
    source = source_of(load(link))
    assert source is not None
    assert source.problems[0].path == tmp_path / "model.onnx.data"
    assert "give the path of the target" in source.problems[0].message


def test_the_missing_or_short_case():
    source = source_of(load(CASES / "s03_external_data_missing_or_short.onnx"))
    assert source is not None
    assert [(p.kind, p.tensors) for p in source.problems] == [
        ("short", ("model.embed_tokens.weight",)),
        ("missing", ("lm_head.weight",)),
    ]


# --- not a model ------------------------------------------------------------------------------------------------------


def _zip(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "x")
    return buffer.getvalue()


FOREIGN = {
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "is a Git LFS pointer",
        "git lfs pull",
    ),
    "empty": (b"", "is empty (0 bytes)", "fetch"),
    "text": (b"Hello, this is no model.\nNot at all.\n", "is a text file, not an ONNX model", ".onnx file"),
    "textproto": (b'ir_version: 8\nproducer_name: "x"\n', "is an ONNX model in text form", "convert"),
    "onnxtxt": (
        b'<ir_version: 8, opset_import: ["" : 18]>\nagraph (float[N] x) => (float[N] y) {}\n',
        "text form",
        "convert",
    ),
    "html": (b"<!DOCTYPE html>\n<html><body>404</body></html>", "is an HTML page", "fetch"),
    "link": (b"../../blobs/aa11", "is a text file that holds a path", "path it names"),
    "zip": (_zip("model.onnx"), "is a zip archive", "export"),
    "torch": (_zip("archive/data.pkl"), "is a PyTorch checkpoint (zip)", "export"),
    "pickle": (pickle.dumps({"a": 1}, protocol=2), "is a pickle", "export"),
    "safetensors": ((2).to_bytes(8, "little") + b"{}" + bytes(8), "is a safetensors file", "export"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(64), "is a GGUF file", "export"),
    "ort": (b"\x20\0\0\0ORTM" + bytes(64), "ORT format", "export"),
    "gzip": (b"\x1f\x8b\x08\0" + bytes(64), "is a gzip archive", "export"),
    "noise": (b"\xff\xfe\xfd" * 50, "cannot be parsed as an ONNX protobuf", "export it again"),
    "hollow": (onnx.ModelProto(ir_version=8).SerializeToString(), "holds no graph with nodes", "export it again"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_named_for_what_they_are(tmp_path: Path, kind: str):
    content, what, remedy = FOREIGN[kind]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    message = refusal(path)
    assert str(path) in message
    assert what in message
    assert remedy in message


@pytest.mark.parametrize("suffix", ["", ".truncated", ".empty"])
def test_the_pointer_truncated_and_empty_cases(suffix: str):
    path = CASES / f"s04_lfs_pointer_and_truncated{suffix}.onnx"
    assert str(path) in refusal(path)


def test_every_truncation_of_a_model_is_refused(tmp_path: Path):
    whole = write_model(tmp_path).read_bytes()
    cut = tmp_path / "cut.onnx"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        assert str(cut) in refusal(cut)


def test_missing_dangling_and_special_files(tmp_path: Path):
    assert refusal(tmp_path / "no.onnx") == f"{tmp_path}/no.onnx does not exist: check the path."
    (tmp_path / "link.onnx").symlink_to("blobs/gone")
    assert "is a link to blobs/gone, which does not exist" in refusal(tmp_path / "link.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    assert "is not a regular file" in refusal(tmp_path / "pipe.onnx")
    assert "cannot be read" in refusal(tmp_path / "zero\0byte.onnx")


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path)
    real = open

    def denied(file, *args, **kwargs):
        if os.fspath(file) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", denied)
    assert refusal(path) == f"{path} cannot be read (Permission denied): check its permissions."


def test_a_protobuf_over_two_gib_is_refused_without_being_read(tmp_path: Path):
    path = write_model(tmp_path)
    os.truncate(path, 2**31)
    message = refusal(path)
    assert "is 2.00 GiB and no runtime reads a protobuf over 2 GiB: re-export the model with external data" in message
    os.truncate(path, 0)
    os.truncate(path, 3 * 2**30)
    with open(path, "r+b") as file:
        file.write(b"GGUF")
    assert "is a GGUF file" in refusal(path)


def test_the_limit_itself_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path)
    monkeypatch.setattr(reading, "PROTOBUF_LIMIT", path.stat().st_size)
    load(path)
    monkeypatch.setattr(reading, "PROTOBUF_LIMIT", path.stat().st_size - 1)
    assert "2 GiB" in refusal(path)
