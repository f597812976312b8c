"""Property: whatever the layout of external data, every placement keeps every byte; damaged files end in a clear error."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from graphsurgery.errors import GraphSurgeryError
from graphsurgery.model_io import load, save
from tests.model_io_helpers import (
    CASES,
    Weight,
    add_model,
    canonical,
    entries_of,
    external_tensor,
    read_proto,
    tensor_byte_list,
)

TYPES = [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.INT64, TensorProto.BFLOAT16]
LOCATIONS = ["model.onnx.data", "a.bin", "weights/b.bin", "weights/deep/c.bin", "./d.bin", "o.onnx.data"]


@st.composite
def _weights(draw: st.DrawFn) -> list[Weight]:
    """Tensors over some files: apart, adjacent, overlapping, equal, empty, at odd offsets, with and without fields."""
    locations = draw(st.lists(st.sampled_from(LOCATIONS), min_size=1, max_size=3, unique=True))
    weights: list[Weight] = []
    for number in range(draw(st.integers(1, 9))):
        dims = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=2)))
        data_type = draw(st.sampled_from(TYPES))
        location = draw(st.sampled_from(locations))
        offset = draw(st.integers(0, 300))
        before = [weight for weight in weights if weight.location == location]
        if draw(st.booleans()) and before:
            other = draw(st.sampled_from(before))
            offset = draw(st.sampled_from([other.offset, other.offset + other.nbytes, other.offset + 1]))
        weights.append(
            Weight(
                f"w{number}",
                location,
                offset,
                dims,
                data_type,
                state_offset=offset > 0 or draw(st.booleans()),
                state_length=draw(st.booleans()),
            )
        )
    return weights


def _write(directory: Path, weights: list[Weight], places: list[int]) -> Path:
    """A model that holds ``weights`` as initializers (place 0), in both branches of an If (1), or in Constants (2)."""
    sizes: dict[str, int] = {}
    for weight in weights:
        sizes[weight.location] = max(sizes.get(weight.location, 0), weight.offset + weight.nbytes)
    chance = random.Random(0)
    for location, size in sizes.items():
        (directory / location).parent.mkdir(parents=True, exist_ok=True)
        (directory / location).write_bytes(chance.randbytes(size + 3))
    chosen: list[list[TensorProto]] = [[], [], []]
    for weight, place in zip(weights, places, strict=True):
        chosen[place].append(external_tensor(weight))
    model = add_model(chosen[0])
    if chosen[1]:
        node = helper.make_node("Identity", [chosen[1][0].name], ["y"])
        branch = helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("y", 1, None)], chosen[1])
        model.graph.node.append(helper.make_node("If", ["x"], ["z"], name="if", then_branch=branch, else_branch=branch))
    for tensor in chosen[2]:
        model.graph.node.append(helper.make_node("Constant", [], [f"c_{tensor.name}"], value=tensor))
    path = directory / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@given(weights=_weights(), places=st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_every_placement_keeps_every_byte(weights: list[Weight], places: list[int]):
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "in"
        base.mkdir()
        path = _write(base, weights, places[: len(weights)])
        before = tensor_byte_list(path)
        files = {file: file.read_bytes() for file in base.rglob("*") if file.is_file()}
        model = load(path)
        (Path(name) / "out").mkdir()

        shared = save(model, base / "shared.onnx", weights="reference")
        assert shared.bytes_copied == 0
        assert canonical(read_proto(shared.path)) == canonical(read_proto(path))

        copied = save(model, Path(name) / "out" / "o.onnx", weights="copy")
        assert tensor_byte_list(copied.path) == before
        used = {weight.location for weight in weights}
        assert sorted(file.read_bytes() for file in copied.data_files) == sorted(files[base / loc] for loc in used)

        repacked = save(model, Path(name) / "out" / "r.onnx", weights="repack")
        assert tensor_byte_list(repacked.path) == before
        covered = {
            (weight.location, byte)
            for weight in weights
            for byte in range(weight.offset, weight.offset + weight.nbytes)
        }
        assert repacked.bytes_copied == repacked.data_files[0].stat().st_size == len(covered)

        whole = save(model, Path(name) / "directory", as_directory=True)
        assert tensor_byte_list(whole.path) == before
        assert {file: file.read_bytes() for file in files} == files


@given(weights=_weights())
def test_tensors_that_shared_bytes_share_them_when_repacked(weights: list[Weight]):
    with tempfile.TemporaryDirectory() as name:
        path = _write(Path(name), weights, [0] * len(weights))
        result = save(load(path), Path(name) / "r.onnx", weights="repack")
        offsets = {t.name: int(entries_of(t)["offset"]) for t in read_proto(result.path).graph.initializer}
        for one in weights:
            for other in weights:
                ends = one.offset + one.nbytes, other.offset + other.nbytes
                overlap = max(one.offset, other.offset) < min(ends)
                if one.location == other.location and overlap:
                    assert offsets[one.name] - offsets[other.name] == one.offset - other.offset


# --- damaged files ----------------------------------------------------------------------------------------------------

WHOLE = [
    (CASES / f"{name}.onnx").read_bytes()
    for name in (
        "s01_everything_external_even_shapes",
        "f04_model_already_has_functions",
        "s09_metadata_symbols_ir_version",
        "s12_weights_behind_identity_cast_dq",
    )
]


def _outcome(path: Path, output: Path, mode: str) -> str:
    try:
        save(load(path), output, weights=mode)  # type: ignore[arg-type]
    except GraphSurgeryError as error:
        return str(error)
    return "saved"


def _load_and_save(content: bytes) -> None:
    """Only a GraphSurgeryError may come of it, and nothing outside the output directory may change."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "in").mkdir()
        (base / "out").mkdir()
        path = base / "in" / "model.onnx"
        path.write_bytes(content)
        (base / "in" / "s01_everything_external_even_shapes.onnx.data").write_bytes(bytes(23520))
        (base / "precious").write_bytes(b"precious")
        before = {file: file.read_bytes() for file in base.rglob("*") if file.is_file()}
        for mode in ("copy", "repack"):
            assert "\n" not in _outcome(path, base / "out" / f"{mode}.onnx", mode)
        after = {file: file.read_bytes() for file in base.rglob("*") if file.is_file()}
        assert {file for file in after if file not in before} <= set((base / "out").iterdir())
        assert {file: after[file] for file in before} == before
        assert not [item for item in (base / "out").iterdir() if item.name.startswith(".")]


@settings(max_examples=80)
@given(
    whole=st.sampled_from(WHOLE),
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.sampled_from(["set", "cut", "add"])),
        min_size=1,
        max_size=6,
    ),
)
def test_mutated_protobufs_end_in_a_clear_error_or_a_model(whole: bytes, edits: list[tuple[float, int, str]]):
    content = bytearray(whole)
    for where, byte, kind in edits:
        position = int(where * len(content))
        if kind == "set":
            content[position] = byte
        elif kind == "cut":
            del content[position : position + byte % 8]
        else:
            content.insert(position, byte)
    _load_and_save(bytes(content))


PIECES = ["..", ".", "/", "a", "precious", "C:", "\\", "\0", "in", "model.onnx", "é", "~", "$HOME", " ", ""]


@given(
    location=st.lists(st.sampled_from(PIECES), max_size=5).map("".join),
    offset=st.sampled_from(["0", "-1", "1e9", "99999999999999999999", "x", "", "7", None]),
    length=st.sampled_from(["16", "-1", "0", "4611686018427387904", " 4", None]),
    dims=st.lists(st.sampled_from([-1, 0, 1, 4, 2**40]), max_size=3),
    data_type=st.sampled_from([0, 1, 8, 16, 22, 77]),
)
def test_hostile_external_entries(
    location: str, offset: str | None, length: str | None, dims: list[int], data_type: int
):
    tensor = TensorProto(name="w", data_type=data_type, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=value)
    _load_and_save(add_model([tensor]).SerializeToString())


@given(st.binary(max_size=200))
def test_arbitrary_bytes(content: bytes):
    _load_and_save(content)


def test_the_cases_hold_what_the_mutations_need():
    assert sum(bool(onnx.ModelProto.FromString(content).functions) for content in WHOLE) == 1
