"""Saving: where the data comes to lie, what may be replaced, and what a failure leaves behind."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.errors import InternalError, SaveError, UsageError
from graphsurgery.model_files import copying, serialising
from graphsurgery.model_io import default_output, load, save, source_of, stage
from tests.model_io_helpers import (
    Weight,
    add_model,
    all_tensors,
    entries_of,
    external_tensor,
    read_proto,
    tensor_bytes,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path


def _tree(directory: Path) -> dict[str, bytes | str]:
    """Every file below ``directory``; links as what they point to."""
    return {
        path.relative_to(directory).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def _locations(path: Path) -> list[str]:
    return [entries_of(tensor)["location"] for tensor in all_tensors(read_proto(path)) if tensor.external_data]


def _run(path: Path, rows: int = 4) -> np.ndarray:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": np.zeros(rows, np.float32)})
    return np.asarray(logits)


# --- placement of the data --------------------------------------------------------------------------------------------


def test_the_default_shares_the_data_beside_the_input(tmp_path: Path):
    path = write_model(tmp_path)
    before = _tree(tmp_path)
    model = load(path)
    source = source_of(model)
    assert source is not None
    assert default_output(source) == tmp_path / "model.surgery.onnx"
    result = save(model)
    assert (result.path, result.weights, result.bytes_copied) == (tmp_path / "model.surgery.onnx", "reference", 0)
    assert (result.data_files, result.notes) == ((tmp_path / "model.onnx.data",), ())
    after = _tree(tmp_path)
    assert after.pop("model.surgery.onnx") == before["model.onnx"]
    assert after == before


def test_another_directory_gets_a_copy_that_runs(tmp_path: Path):
    path = write_model(tmp_path / "in")
    (tmp_path / "out").mkdir()
    seen: list[tuple[int, int]] = []
    result = save(load(path), tmp_path / "out" / "o.onnx", data_progress=lambda done, total: seen.append((done, total)))
    assert (result.weights, result.bytes_copied) == ("copy", 48)
    assert result.data_files == (tmp_path / "out" / "o.onnx.data",)
    assert seen[-1] == (48, 48)
    assert sorted(_tree(tmp_path / "out")) == ["o.onnx", "o.onnx.data"]
    assert tensor_bytes(result.path) == tensor_bytes(path)
    assert _run(result.path).tolist() == [12, 15, 18, 21]


def test_copies_get_fresh_names(tmp_path: Path):
    tensors = [external_tensor(Weight(f"w{i}", f"{name}/d", 0, (4,))) for i, name in enumerate("ab")]
    path = tmp_path / "model.onnx"
    path.write_bytes(add_model(tensors).SerializeToString())
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "d").write_bytes(bytes([number]) * 16)
    (tmp_path / "o.onnx.data").write_bytes(b"old")
    result = save(load(path), tmp_path / "o.onnx", weights="copy")
    assert _locations(result.path) == ["o.onnx.1.data", "o.onnx.2.data"]
    assert (tmp_path / "o.onnx.data").read_bytes() == b"old"
    assert tensor_bytes(result.path) == {"w0": bytes(16), "w1": b"\1" * 16}


def test_reference_from_the_directory_above(tmp_path: Path):
    path = write_model(tmp_path / "sub" / "deep")
    result = save(load(path), tmp_path / "o.onnx", weights="reference")
    assert (result.bytes_copied, _locations(result.path)) == (0, ["sub/deep/model.onnx.data"] * 3)
    assert tensor_bytes(result.path) == tensor_bytes(path)
    assert _run(result.path).tolist() == [12, 15, 18, 21]
    assert save(load(path), tmp_path / "o2.onnx").weights == "copy"


def test_reference_from_elsewhere_is_refused(tmp_path: Path):
    path = write_model(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match=r"cannot share the data file .*, which lies outside .*: use --weights copy"):
        save(load(path), tmp_path / "out" / "o.onnx", weights="reference")
    assert _tree(tmp_path / "out") == {}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A model whose .onnx and data file are links into a store of blobs."""
    write_model(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    for name, blob in (("model.onnx", "aa"), ("model.onnx.data", "bb")):
        (tmp_path / "blobs" / name).rename(tmp_path / "blobs" / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot / "model.onnx"


def test_beside_a_hub_cache_the_data_is_copied(hub: Path):
    with pytest.raises(UsageError, match="is reached through a symbolic link"):
        save(load(hub), weights="reference")
    result = save(load(hub))
    assert (result.weights, result.bytes_copied) == ("copy", 48)
    assert result.data_files == (hub.parent / "model.surgery.onnx.data",)
    assert not result.data_files[0].is_symlink()
    assert _run(result.path).tolist() == [12, 15, 18, 21]


def test_in_place_in_a_hub_cache_replaces_the_link(hub: Path, tmp_path: Path):
    blobs = _tree(tmp_path / "blobs")
    with pytest.raises(UsageError, match="is the input itself"):
        save(load(hub), hub)
    result = save(load(hub), hub, force=True)
    assert not hub.is_symlink()
    assert result.data_files == (hub.parent / "model.onnx.1.data",)
    assert _tree(tmp_path / "blobs") == blobs
    assert _run(hub).tolist() == [12, 15, 18, 21]


def test_hard_links(tmp_path: Path, hub: Path):
    (tmp_path / "out").mkdir()
    result = save(load(hub), tmp_path / "out" / "o.onnx", weights="hardlink")
    assert (result.weights, result.bytes_copied) == ("hardlink", 0)
    assert os.path.samefile(result.data_files[0], tmp_path / "blobs" / "bb")
    assert not result.data_files[0].is_symlink()
    assert result.notes == ("hard-linked data is read by ONNX Runtime but refused by onnx.load and onnx.checker",)
    assert _run(result.path).tolist() == [12, 15, 18, 21]


def test_hard_links_to_another_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path / "in")
    (tmp_path / "out").mkdir()

    def across(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", across)
    with pytest.raises(UsageError, match=r"cannot be hard-linked .*Invalid cross-device link.*: use --weights copy"):
        save(load(path), tmp_path / "out" / "o.onnx", weights="hardlink")
    assert list((tmp_path / "out").iterdir()) == []


def test_repack_keeps_only_what_is_used_and_what_overlaps_shared(tmp_path: Path):
    data = bytes(range(200))
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(data[::-1])
    weights = [
        Weight("view", "a", 104, (4,)),
        Weight("whole", "a", 100, (8,)),
        Weight("same", "a", 100, (8,)),
        Weight("early", "a", 3, (4,)),
        Weight("behind", "a", 132, (1,)),
        Weight("none", "b", 200, (0,)),
        Weight("other", "b", 0, (4,)),
    ]
    path = tmp_path / "model.onnx"
    path.write_bytes(add_model([external_tensor(weight) for weight in weights]).SerializeToString())
    result = save(load(path), tmp_path / "o.onnx", weights="repack")
    assert (result.weights, result.bytes_copied) == ("repack", 16 + 36 + 16)
    (file,) = result.data_files
    assert file.read_bytes() == data[3:19] + data[100:136] + data[::-1][:16]
    offsets = {t.name: int(entries_of(t)["offset"]) for t in read_proto(result.path).graph.initializer}
    assert offsets == {"view": 20, "whole": 16, "same": 16, "early": 0, "behind": 48, "none": 0, "other": 52}
    assert tensor_bytes(result.path) == tensor_bytes(path)


def test_a_pruned_model_is_repacked_smaller(tmp_path: Path):
    path = write_model(tmp_path, weights=4)
    model = load(path)
    last = model.graph.node("add_3")
    last.replace_input_with(1, model.graph.initializers["w0"])
    del model.graph.initializers["w3"]
    result = save(model, tmp_path / "o.onnx", weights="repack")
    assert result.bytes_copied == 48
    assert _run(result.path).tolist() == [12, 16, 20, 24]


def test_models_without_external_data_take_every_mode(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(add_model([helper.make_tensor("w", TensorProto.FLOAT, [4], [0, 1, 2, 3])]).SerializeToString())
    (tmp_path / "out").mkdir()
    for mode in ("auto", "reference", "copy", "hardlink", "repack"):
        result = save(load(path), tmp_path / "out" / f"{mode}.onnx", weights=mode)
        assert (result.data_files, result.bytes_copied, result.notes) == ((), 0, ())
    assert sorted(_tree(tmp_path / "out")) == sorted(
        f"{m}.onnx" for m in ("auto", "reference", "copy", "hardlink", "repack")
    )


def test_unknown_modes_name_the_closest(tmp_path: Path):
    model = load(write_model(tmp_path))
    with pytest.raises(UsageError, match=r"weights='repak' is not one of .*: did you mean 'repack'"):
        save(model, weights="repak")  # type: ignore[arg-type]


def test_models_that_were_not_loaded(tmp_path: Path):
    proto = read_proto(write_model(tmp_path / "in"))
    model = ir.serde.deserialize_model(proto)
    with pytest.raises(UsageError, match="no default output: give a path"):
        save(model)
    ir.external_data.set_base_dir(model.graph, tmp_path / "in")
    (tmp_path / "out").mkdir()
    result = save(model, tmp_path / "out" / "o.onnx")
    assert (result.weights, result.data_files) == ("copy", (tmp_path / "out" / "o.onnx.data",))
    assert _run(result.path).tolist() == [12, 15, 18, 21]
    assert save(model, tmp_path / "in" / "o.onnx").weights == "reference"
    assert save(model, tmp_path / "dir", as_directory=True).path == tmp_path / "dir" / "model.onnx"


def test_the_model_itself_is_not_changed_by_a_save(tmp_path: Path):
    path = write_model(tmp_path / "in")
    model = load(path)
    (tmp_path / "out").mkdir()
    for mode in ("copy", "repack"):
        save(model, tmp_path / "out" / f"{mode}.onnx", weights=mode)
    tensor = model.graph.initializers["w0"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert (tensor.path, tensor.offset) == (str(tmp_path / "in" / "model.onnx.data"), 0)


def test_an_initializer_without_a_value_is_an_internal_error(tmp_path: Path):
    model = load(write_model(tmp_path))
    model.graph.initializers["w0"].const_value = None
    with pytest.raises(InternalError, match="initializer 'w0' has no value"):
        save(model)


# --- absent and short data --------------------------------------------------------------------------------------------


def test_absent_data(tmp_path: Path):
    path = write_model(tmp_path / "in")
    (tmp_path / "in" / "model.onnx.data").unlink()
    (tmp_path / "out").mkdir()
    model = load(path)
    assert save(model).notes == (f"the data file {tmp_path}/in/model.onnx.data is absent; the output refers to it",)
    for mode in ("auto", "copy", "hardlink"):
        result = save(model, tmp_path / "out" / f"{mode}.onnx", weights=mode)
        assert (result.data_files, result.bytes_copied) == ((), 0)
        assert _locations(result.path) == ["model.onnx.data"] * 3
        assert result.notes == (
            (
                f"the data file {tmp_path}/in/model.onnx.data is absent; "
                f"bring it to {tmp_path}/out/model.onnx.data before the output is used"
            ),
        )
    (tmp_path / "out" / "model.onnx.data").write_bytes(b"?")
    (note,) = save(model, tmp_path / "out" / "again.onnx").notes
    assert "must hold the same bytes" in note
    with pytest.raises(SaveError, match="is absent, so that it cannot be repacked"):
        save(model, tmp_path / "out" / "repack.onnx", weights="repack")
    assert not (tmp_path / "out" / "repack.onnx").exists()


def test_new_data_never_takes_the_name_of_absent_data(tmp_path: Path):
    tensors = [external_tensor(Weight("w0", "o.onnx.data", 0, (4,))), external_tensor(Weight("w1", "there", 0, (4,)))]
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.onnx"
    path.write_bytes(add_model(tensors).SerializeToString())
    (tmp_path / "in" / "there").write_bytes(bytes(16))
    (tmp_path / "out").mkdir()
    assert _locations(save(load(path), tmp_path / "out" / "o.onnx").path) == ["o.onnx.data", "o.onnx.1.data"]


def test_short_data_is_copied_as_it_is(tmp_path: Path):
    path = write_model(tmp_path / "in")
    (tmp_path / "in" / "model.onnx.data").write_bytes(b"short")
    (tmp_path / "out").mkdir()
    result = save(load(path), tmp_path / "out" / "o.onnx")
    assert result.data_files[0].read_bytes() == b"short"
    with pytest.raises(SaveError, match="ends before tensor 'w0' does, so that it cannot be repacked"):
        save(load(path), tmp_path / "out" / "p.onnx", weights="repack")


def test_data_that_shrinks_while_it_is_copied(tmp_path: Path):
    path = write_model(tmp_path / "in")
    (tmp_path / "out").mkdir()
    model = load(path)
    with open(tmp_path / "in" / "model.onnx.data", "rb") as source, open(tmp_path / "x", "wb") as target:
        meter = copying.Meter(100, None)
        with pytest.raises(SaveError, match="became shorter while it was copied"):
            copying.copy_range(source.fileno(), target.fileno(), 0, 100, meter, tmp_path / "d")
    del model


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
    assert _run(path).tolist() == [12, 15, 18, 21]


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
    before = _tree(tmp_path)
    with stage(load(path), tmp_path / "o.onnx", weights=mode) as staged:  # type: ignore[arg-type]
        assert staged.path == tmp_path / "o.onnx"
        assert not staged.path.exists()
        assert staged.model_path.is_relative_to(tmp_path)
        assert _run(staged.model_path).tolist() == [12, 15, 18, 21]
    assert _tree(tmp_path) == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    with stage(load(path), tmp_path / "o.onnx", weights=mode) as staged:  # type: ignore[arg-type]
        result = staged.commit()
        with pytest.raises(UsageError, match="was committed before"):
            staged.commit()
    assert result.path == tmp_path / "o.onnx"
    expected = {"model.onnx", "model.onnx.data", "o.onnx", *(file.name for file in result.data_files)}
    assert {item.name for item in tmp_path.iterdir()} == expected
    assert _run(result.path).tolist() == [12, 15, 18, 21]


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path):
    path = write_model(tmp_path)
    with stage(load(path), tmp_path / "o.onnx", weights="copy") as staged:
        (tmp_path / "o.onnx").write_bytes(b"other")
        with pytest.raises(SaveError, match="appeared while the output was being made"):
            staged.commit()
    assert sorted(_tree(tmp_path)) == ["model.onnx", "model.onnx.data", "o.onnx"]
    assert (tmp_path / "o.onnx").read_bytes() == b"other"


def test_an_interrupt_removes_the_temporaries(tmp_path: Path):
    path = write_model(tmp_path)
    before = _tree(tmp_path)

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(load(path), tmp_path / "o.onnx", weights="copy", data_progress=interrupt)
    assert _tree(tmp_path) == before
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
    before = _tree(tmp_path)
    model = load(path)
    failures = 0
    while (error := _save_with_failure(model, tmp_path / "o.onnx", mode, call, failures)) is not None:
        failures += 1
        assert error == (
            f"{tmp_path}/o.onnx could not be written: No space left on device; what was there before is untouched."
        )
        assert _tree(tmp_path) == before
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
    before = _tree(tmp_path)
    with stage(load(path)) as staged:
        assert _run(staged.model_path, 1000)[0] == 3001
    assert _tree(tmp_path) == before
    result = save(load(path))
    assert result.data_files == (tmp_path / "model.onnx.data", tmp_path / "model.surgery.onnx.data")
    assert _run(result.path, 1000)[0] == 3001
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
    assert sorted(_tree(tmp_path)) == ["model.onnx"]


def test_a_model_that_cannot_be_serialised_is_a_save_error(tmp_path: Path):
    model = load(write_model(tmp_path))
    model.graph.node("add_0").attributes["bad"] = ir.AttrInt64("bad", 2**70)
    with pytest.raises(SaveError, match="the model cannot be serialised: ") as caught:
        save(model)
    assert "\n" not in str(caught.value)
