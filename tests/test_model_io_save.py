"""Saving: where the data goes, and data that is absent or short."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.errors import InternalError, SaveError, UsageError
from graphsurgery.model_files import copying
from graphsurgery.model_io import default_output, load, save, source_of
from tests.model_io_helpers import (
    Weight,
    add_model,
    all_tensors,
    entries_of,
    external_tensor,
    files_below,
    read_proto,
    run_saved,
    tensor_bytes,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path


def _locations(path: Path) -> list[str]:
    return [entries_of(tensor)["location"] for tensor in all_tensors(read_proto(path)) if tensor.external_data]


# --- placement of the data --------------------------------------------------------------------------------------------


def test_the_default_shares_the_data_beside_the_input(tmp_path: Path):
    path = write_model(tmp_path)
    before = files_below(tmp_path)
    model = load(path)
    source = source_of(model)
    assert source is not None
    assert default_output(source) == tmp_path / "model.surgery.onnx"
    result = save(model)
    assert (result.path, result.weights, result.bytes_copied) == (tmp_path / "model.surgery.onnx", "reference", 0)
    assert (result.data_files, result.notes) == ((tmp_path / "model.onnx.data",), ())
    after = files_below(tmp_path)
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
    assert sorted(files_below(tmp_path / "out")) == ["o.onnx", "o.onnx.data"]
    assert tensor_bytes(result.path) == tensor_bytes(path)
    assert run_saved(result.path).tolist() == [12, 15, 18, 21]


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
    assert run_saved(result.path).tolist() == [12, 15, 18, 21]
    assert save(load(path), tmp_path / "o2.onnx").weights == "copy"


def test_reference_from_elsewhere_is_refused(tmp_path: Path):
    path = write_model(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match=r"cannot share the data file .*, which lies outside .*: use --weights copy"):
        save(load(path), tmp_path / "out" / "o.onnx", weights="reference")
    assert files_below(tmp_path / "out") == {}


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
    assert run_saved(result.path).tolist() == [12, 15, 18, 21]


def test_in_place_in_a_hub_cache_replaces_the_link(hub: Path, tmp_path: Path):
    blobs = files_below(tmp_path / "blobs")
    with pytest.raises(UsageError, match="is the input itself"):
        save(load(hub), hub)
    result = save(load(hub), hub, force=True)
    assert not hub.is_symlink()
    assert result.data_files == (hub.parent / "model.onnx.1.data",)
    assert files_below(tmp_path / "blobs") == blobs
    assert run_saved(hub).tolist() == [12, 15, 18, 21]


def test_hard_links(tmp_path: Path, hub: Path):
    (tmp_path / "out").mkdir()
    result = save(load(hub), tmp_path / "out" / "o.onnx", weights="hardlink")
    assert (result.weights, result.bytes_copied) == ("hardlink", 0)
    assert os.path.samefile(result.data_files[0], tmp_path / "blobs" / "bb")
    assert not result.data_files[0].is_symlink()
    assert result.notes == ("hard-linked data is read by ONNX Runtime but refused by onnx.load and onnx.checker",)
    assert run_saved(result.path).tolist() == [12, 15, 18, 21]


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
    assert run_saved(result.path).tolist() == [12, 16, 20, 24]


def test_models_without_external_data_take_every_mode(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(add_model([helper.make_tensor("w", TensorProto.FLOAT, [4], [0, 1, 2, 3])]).SerializeToString())
    (tmp_path / "out").mkdir()
    for mode in ("auto", "reference", "copy", "hardlink", "repack"):
        result = save(load(path), tmp_path / "out" / f"{mode}.onnx", weights=mode)
        assert (result.data_files, result.bytes_copied, result.notes) == ((), 0, ())
    assert sorted(files_below(tmp_path / "out")) == sorted(
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
    assert run_saved(result.path).tolist() == [12, 15, 18, 21]
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
