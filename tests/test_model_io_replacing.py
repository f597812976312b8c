"""Saving: what may be replaced, staging, failures, and protobufs that are too large."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from graphsurgery.errors import SaveError, UsageError
from graphsurgery.model_files import serialising
from graphsurgery.model_io import load, save, stage
from tests.model_io_helpers import (
    add_model,
    entries_of,
    files_below,
    read_proto,
    run_saved,
    tensor_bytes,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

# --- what may be replaced ---------------------------------------------------------------------------------------------


def test_existing_outputs_need_force(tmp_path: Path):
    path = write_model(tmp_path)
    output = tmp_path / "o.onnx"
    output.write_bytes(b"old")
    with pytest.raises(UsageError, match=r"the output .*o.onnx exists: choose another, or replace it with --force"):
        save(load(path), output)
    assert output.read_bytes() == b"old"
    save(load(path), output, force=True)
    assert output.read_bytes() == path.read_bytes()


def test_data_of_an_earlier_output_is_kept_and_told(tmp_path: Path):
    path = write_model(tmp_path / "in")
    (tmp_path / "out").mkdir()
    save(load(path), tmp_path / "out" / "o.onnx")
    result = save(load(path), tmp_path / "out" / "o.onnx", force=True)
    assert result.data_files == (tmp_path / "out" / "o.onnx.1.data",)
    assert result.notes == (
        f"{tmp_path}/out/o.onnx.data is left from an earlier output: delete it if nothing else uses it",
    )
    assert (tmp_path / "out" / "o.onnx.data").exists()


def test_in_place_by_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path / "m")
    (tmp_path / "link.onnx").symlink_to(path)
    (tmp_path / "dirlink").symlink_to(tmp_path / "m")
    os.link(path, tmp_path / "m" / "hard.onnx")
    monkeypatch.chdir(tmp_path)
    model = load(path)
    for spelling in ("m/model.onnx", "m/../m/model.onnx", "dirlink/model.onnx", "link.onnx", "m/hard.onnx"):
        with pytest.raises(UsageError, match="is the input itself"):
            save(model, spelling)
    data = (tmp_path / "m" / "model.onnx.data").read_bytes()
    result = save(model, path, force=True)
    assert (result.weights, result.bytes_copied) == ("reference", 0)
    assert (tmp_path / "m" / "model.onnx.data").read_bytes() == data
    assert run_saved(path).tolist() == [12, 15, 18, 21]


def test_a_hard_link_to_the_input_is_replaced_and_the_input_stays(tmp_path: Path):
    path = write_model(tmp_path)
    model = load(path)
    model.graph.name = "renamed"
    before = path.read_bytes()
    os.link(path, tmp_path / "hard.onnx")
    save(model, tmp_path / "hard.onnx", force=True)
    assert path.read_bytes() == before
    assert read_proto(tmp_path / "hard.onnx").graph.name == "renamed"


def test_a_link_is_replaced_itself(tmp_path: Path):
    path = write_model(tmp_path)
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "o.onnx").symlink_to("target")
    (tmp_path / "dangling.onnx").symlink_to("nowhere")
    for name in ("o.onnx", "dangling.onnx"):
        with pytest.raises(UsageError, match="exists"):
            save(load(path), tmp_path / name)
        save(load(path), tmp_path / name, force=True)
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()


def test_the_name_of_a_data_file_is_refused(tmp_path: Path):
    path = write_model(tmp_path)
    os.link(tmp_path / "model.onnx.data", tmp_path / "alias")
    for name in ("model.onnx.data", "alias"):
        with pytest.raises(UsageError, match="is a data file of the model"):
            save(load(path), tmp_path / name, force=True)
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(UsageError, match="is a data file of the model"):
        save(load(path), tmp_path / "model.onnx.data")


def test_outputs_that_cannot_be_files(tmp_path: Path):
    model = load(write_model(tmp_path))
    with pytest.raises(UsageError, match=r"directory .*/none does not exist: make it first"):
        save(model, tmp_path / "none" / "o.onnx")
    for name in ("", "a\0b"):
        with pytest.raises(UsageError, match="is not a path"):
            save(model, name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file"):
        save(model, tmp_path / "pipe", force=True)
    with pytest.raises(UsageError, match="is not a regular file"):
        save(model, "/dev/null", force=True)


# --- staging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reference", "copy", "hardlink", "repack"])
def test_the_staged_model_runs_in_place(tmp_path: Path, mode: str):
    path = write_model(tmp_path)
    before = files_below(tmp_path)
    with stage(load(path), tmp_path / "o.onnx", weights=mode) as staged:  # type: ignore[arg-type]
        assert staged.path == tmp_path / "o.onnx"
        assert not staged.path.exists()
        assert staged.model_path.is_relative_to(tmp_path)
        assert run_saved(staged.model_path).tolist() == [12, 15, 18, 21]
    assert files_below(tmp_path) == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    with stage(load(path), tmp_path / "o.onnx", weights=mode) as staged:  # type: ignore[arg-type]
        result = staged.commit()
        with pytest.raises(UsageError, match="was committed before"):
            staged.commit()
    assert result.path == tmp_path / "o.onnx"
    expected = {"model.onnx", "model.onnx.data", "o.onnx", *(file.name for file in result.data_files)}
    assert {item.name for item in tmp_path.iterdir()} == expected
    assert run_saved(result.path).tolist() == [12, 15, 18, 21]


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path):
    path = write_model(tmp_path)
    with stage(load(path), tmp_path / "o.onnx", weights="copy") as staged:
        (tmp_path / "o.onnx").write_bytes(b"other")
        with pytest.raises(SaveError, match="appeared while the output was being made"):
            staged.commit()
    assert sorted(files_below(tmp_path)) == ["model.onnx", "model.onnx.data", "o.onnx"]
    assert (tmp_path / "o.onnx").read_bytes() == b"other"


def test_an_interrupt_removes_the_temporaries(tmp_path: Path):
    path = write_model(tmp_path)
    before = files_below(tmp_path)

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(load(path), tmp_path / "o.onnx", weights="copy", data_progress=interrupt)
    assert files_below(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 2


def _save_with_failure(model: ir.Model, output: Path, mode: str, call: str, fail_at: int) -> str | None:
    """Save while the call number ``fail_at`` of ``os.call`` fails; the error, or None where there were fewer calls."""
    real = getattr(os, call)
    count = -1

    def failing(*args, **kwargs):
        nonlocal count
        if call == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        count += 1
        if count == fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, failing)
        try:
            save(model, output, weights=mode, force=True)  # type: ignore[arg-type]
        except SaveError as error:
            return str(error)
    return None


@pytest.mark.parametrize("mode", ["reference", "copy", "repack"])
@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_failures_leave_everything_as_it_was(tmp_path: Path, mode: str, call: str):
    path = write_model(tmp_path)
    (tmp_path / "o.onnx").write_bytes(b"old")
    before = files_below(tmp_path)
    model = load(path)
    failures = 0
    while (error := _save_with_failure(model, tmp_path / "o.onnx", mode, call, failures)) is not None:
        failures += 1
        assert error == (
            f"{tmp_path}/o.onnx could not be written: No space left on device; what was there before is untouched."
        )
        assert files_below(tmp_path) == before
        assert len(list(tmp_path.iterdir())) == len(before)
    # One .onnx, and one data file where it is not shared.
    assert failures == (1 if mode == "reference" else 2)


def test_copies_without_the_help_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path / "in", rows=100_000)
    (tmp_path / "out").mkdir()

    def unsupported(*_args: object, **_kwargs: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", unsupported)
    result = save(load(path), tmp_path / "out" / "o.onnx")
    assert result.bytes_copied == 1_200_000
    assert tensor_bytes(result.path) == tensor_bytes(path)
    monkeypatch.delattr(os, "copy_file_range")
    assert save(load(path), tmp_path / "out" / "p.onnx", weights="repack").bytes_copied == 1_200_000


def test_output_files_follow_the_umask(tmp_path: Path):
    path = write_model(tmp_path / "in")
    (tmp_path / "out").mkdir()
    old = os.umask(0o027)
    try:
        result = save(load(path), tmp_path / "out" / "o.onnx")
    finally:
        os.umask(old)
    assert [file.stat().st_mode & 0o777 for file in (result.path, *result.data_files)] == [0o640, 0o640]


# --- protobufs that are too large -------------------------------------------------------------------------------------


def _inline_model(**sizes: tuple[int, int]) -> onnx.ModelProto:
    tensors = []
    for name, (count, data_type) in sizes.items():
        values = np.arange(count).astype(helper.tensor_dtype_to_np_dtype(data_type))
        tensors.append(helper.make_tensor(name, data_type, [count], values.tobytes(), raw=True))
    return add_model(tensors)


def test_inline_weights_move_out_of_a_protobuf_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "model.onnx"
    proto = _inline_model(big=(1000, 1), small=(255, 1), index=(1000, 7), half=(600, 10))
    proto.graph.initializer[0].doc_string = "kept"
    path.write_bytes(proto.SerializeToString())
    monkeypatch.setattr(serialising, "MAX_PROTO_BYTES", 11_000)
    model = load(path)
    result = save(model)
    assert (result.weights, result.bytes_copied) == ("reference", 5200)
    assert result.data_files == (tmp_path / "model.surgery.onnx.data",)
    assert result.notes == (
        "inline weights of 5200 bytes were moved to model.surgery.onnx.data, for a protobuf is limited",
    )
    tensors = {tensor.name: tensor for tensor in read_proto(result.path).graph.initializer}
    assert [name for name, tensor in tensors.items() if tensor.external_data] == ["big", "half"]
    assert entries_of(tensors["half"]) == {"location": "model.surgery.onnx.data", "offset": "4000", "length": "1200"}
    assert tensors["big"].doc_string == "kept"
    originals = {tensor.name: tensor.raw_data for tensor in proto.graph.initializer}
    assert tensor_bytes(result.path) == {name: originals[name] for name in ("big", "half")}
    weight = model.graph.initializers["big"].const_value
    assert weight is not None
    assert not isinstance(weight, ir.ExternalTensor)


def test_a_protobuf_below_the_limit_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(_inline_model(big=(1000, 1)).SerializeToString())
    monkeypatch.setattr(serialising, "MAX_PROTO_BYTES", path.stat().st_size)
    assert save(load(path)).data_files == ()
    monkeypatch.setattr(serialising, "MAX_PROTO_BYTES", path.stat().st_size - 1)
    assert len(save(load(path), force=True).data_files) == 1


def test_weights_move_out_beside_shared_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path, rows=1000)
    proto = read_proto(path)
    proto.graph.initializer.append(
        helper.make_tensor("inline", 1, [1000], np.ones(1000, np.float32).tobytes(), raw=True)
    )
    proto.graph.node[0].input[0] = "inline"
    path.write_bytes(proto.SerializeToString())
    monkeypatch.setattr(serialising, "MAX_PROTO_BYTES", 3000)
    before = files_below(tmp_path)
    with stage(load(path)) as staged:
        assert run_saved(staged.model_path, 1000)[0] == 3001
    assert files_below(tmp_path) == before
    result = save(load(path))
    assert result.data_files == (tmp_path / "model.onnx.data", tmp_path / "model.surgery.onnx.data")
    assert run_saved(result.path, 1000)[0] == 3001
    # The name of the shared file would be free, were it absent.
    (tmp_path / "model.onnx.data").rename(tmp_path / "elsewhere")
    assert save(load(path), path, force=True).data_files == (tmp_path / "model.onnx.1.data",)


def test_a_graph_that_is_too_large_by_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(_inline_model(index=(1000, 7), big=(1000, 1)).SerializeToString())
    monkeypatch.setattr(serialising, "MAX_PROTO_BYTES", 5000)
    with pytest.raises(
        SaveError, match="the model is over 5000 bytes as a protobuf even with its weights in a data file"
    ):
        save(load(path))
    assert sorted(files_below(tmp_path)) == ["model.onnx"]


def test_a_model_that_cannot_be_serialised_is_a_save_error(tmp_path: Path):
    model = load(write_model(tmp_path))
    model.graph.node("add_0").attributes["bad"] = ir.AttrInt64("bad", 2**70)
    with pytest.raises(SaveError, match="the model cannot be serialised: ") as caught:
        save(model)
    assert "\n" not in str(caught.value)
