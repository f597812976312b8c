"""Loading: weight-free, and whatever is not a sound model is refused for what it is."""

from __future__ import annotations

import gc
import io
import os
import pickle
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.model_files import reading
from graphsurgery.model_io import load, source_of
from tests.model_io_helpers import CASES, Weight, add_model, external_tensor, read_proto, write_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from google.protobuf.message import Message


def _refusal(path: Path, file: str | None = None) -> str:
    with pytest.raises(InputRefusedError) as caught:
        load(path, file=file)
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    message = _refusal(path)
    assert str(path) in message
    assert what in message
    assert remedy in message


@pytest.mark.parametrize("suffix", ["", ".truncated", ".empty"])
def test_the_pointer_truncated_and_empty_cases(suffix: str):
    path = CASES / f"s04_lfs_pointer_and_truncated{suffix}.onnx"
    assert str(path) in _refusal(path)


def test_every_truncation_of_a_model_is_refused(tmp_path: Path):
    whole = write_model(tmp_path).read_bytes()
    cut = tmp_path / "cut.onnx"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        assert str(cut) in _refusal(cut)


def test_missing_dangling_and_special_files(tmp_path: Path):
    assert _refusal(tmp_path / "no.onnx") == f"{tmp_path}/no.onnx does not exist: check the path."
    (tmp_path / "link.onnx").symlink_to("blobs/gone")
    assert "is a link to blobs/gone, which does not exist" in _refusal(tmp_path / "link.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    assert "is not a regular file" in _refusal(tmp_path / "pipe.onnx")
    assert "cannot be read" in _refusal(tmp_path / "zero\0byte.onnx")


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path)
    real = open

    def denied(file, *args, **kwargs):
        if os.fspath(file) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", denied)
    assert _refusal(path) == f"{path} cannot be read (Permission denied): check its permissions."


def test_a_protobuf_over_two_gib_is_refused_without_being_read(tmp_path: Path):
    path = write_model(tmp_path)
    os.truncate(path, 2**31)
    message = _refusal(path)
    assert "is 2.00 GiB and no runtime reads a protobuf over 2 GiB: re-export the model with external data" in message
    os.truncate(path, 0)
    os.truncate(path, 3 * 2**30)
    with open(path, "r+b") as file:
        file.write(b"GGUF")
    assert "is a GGUF file" in _refusal(path)


def test_the_limit_itself_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_model(tmp_path)
    monkeypatch.setattr(reading, "PROTOBUF_LIMIT", path.stat().st_size)
    load(path)
    monkeypatch.setattr(reading, "PROTOBUF_LIMIT", path.stat().st_size - 1)
    assert "2 GiB" in _refusal(path)


# --- unsafe locations -------------------------------------------------------------------------------------------------

UNSAFE = {
    "/etc/passwd": "is absolute",
    "../model.data": "leaves the model's directory",
    "sub/../../model.data": "leaves the model's directory",
    "sub/../model.data": "leaves the model's directory",
    "./../model.data": "leaves the model's directory",
    "C:\\data.bin": "holds a backslash",
    "C:/data.bin": "is absolute",
    "..\\data.bin": "holds a backslash",
    "\\\\host\\share": "holds a backslash",
    "": "is empty",
    "sub/": "names a directory",
    ".": "names a directory",
    "a\0b": "holds a zero byte",
}


def _initializer(tensor: TensorProto) -> onnx.ModelProto:
    return add_model([tensor])


def _constant(tensor: TensorProto) -> onnx.ModelProto:
    model = add_model([])
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))
    return model


def _subgraph(tensor: TensorProto) -> onnx.ModelProto:
    model = add_model([])
    body = helper.make_graph([helper.make_node("Identity", [tensor.name], ["y"])], "b", [], [], [tensor])
    model.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=body, else_branch=body))
    return model


def _function(tensor: TensorProto) -> onnx.ModelProto:
    model = add_model([])
    node = helper.make_node("Constant", [], ["c"], value=tensor)
    model.functions.append(helper.make_function("d", "F", [], ["c"], [node], [helper.make_opsetid("", 18)]))
    return model


def _default_of_function(tensor: TensorProto) -> onnx.ModelProto:
    model = add_model([])
    node = helper.make_node("Constant", [], ["c"])
    node.attribute.add(name="value", ref_attr_name="v", type=onnx.AttributeProto.TENSOR)
    function = helper.make_function("d", "F", [], ["c"], [node], [helper.make_opsetid("", 18)])
    function.attribute_proto.append(helper.make_attribute("v", tensor))
    model.functions.append(function)
    return model


def _sparse(tensor: TensorProto) -> onnx.ModelProto:
    model = add_model([])
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(tensor)
    sparse.dims.extend([4])
    return model


def _tensors(tensor: TensorProto) -> onnx.ModelProto:
    model = add_model([])
    model.graph.node.append(helper.make_node("Odd", [], ["c"], domain="d", values=[tensor]))
    return model


HOLDERS = [_initializer, _constant, _subgraph, _function, _default_of_function, _sparse, _tensors]


@pytest.mark.parametrize("location", UNSAFE)
def test_unsafe_locations_are_refused(tmp_path: Path, location: str):
    path = tmp_path / "model.onnx"
    path.write_bytes(_initializer(external_tensor(Weight("bad", location, 0, (4,)))).SerializeToString())
    message = _refusal(path)
    assert repr(location) in message
    assert "tensor 'bad'" in message
    assert UNSAFE[location] in message


@pytest.mark.parametrize("holder", HOLDERS)
def test_locations_are_checked_wherever_tensors_are(tmp_path: Path, holder: Callable[[TensorProto], onnx.ModelProto]):
    path = tmp_path / "model.onnx"
    path.write_bytes(holder(external_tensor(Weight("bad", "../x", 0, (4,)))).SerializeToString())
    assert "external data location '../x' of tensor 'bad' leaves the model's directory" in _refusal(path)


def test_data_within_the_model_file_or_a_device_is_refused(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(_initializer(external_tensor(Weight("w", "model.onnx", 0, (4,)))).SerializeToString())
    assert "takes its data from the model file itself" in _refusal(path)
    path.write_bytes(_initializer(external_tensor(Weight("w", "pipe", 0, (4,)))).SerializeToString())
    os.mkfifo(tmp_path / "pipe")
    assert f"the data file {tmp_path}/pipe is not a regular file" in _refusal(path)


def test_a_hub_cache_is_accepted_and_marked_as_linked(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "rev" / "onnx"
    write_model(blobs)
    snapshot.mkdir(parents=True)
    for name, blob in (("model.onnx", "aa11"), ("model.onnx.data", "bb22")):
        (blobs / name).rename(blobs / blob)
        (snapshot / name).symlink_to(f"../../../blobs/{blob}")
    source = source_of(load(snapshot / "model.onnx"))
    assert source is not None
    assert source.directory == snapshot
    assert [(file.path, file.size, file.linked) for file in source.data_files] == [
        (snapshot / "model.onnx.data", 48, True)
    ]
    assert source.problems == ()


# --- what would be lost -----------------------------------------------------------------------------------------------


def _with(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = add_model([helper.make_tensor("w", TensorProto.FLOAT, [4], [0, 1, 2, 3])])
    change(model)
    return model


def _map_output(model: onnx.ModelProto) -> None:
    kind = model.graph.output[0].type.map_type
    kind.key_type = TensorProto.INT64
    kind.value_type.tensor_type.elem_type = TensorProto.FLOAT


def _untyped_constant(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=TensorProto(dims=[4])))


def _odd_entry(key: str, value: str, **fields: object) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        tensor = external_tensor(Weight("w", "d", 0, (4,)))
        for name, field in fields.items():
            setattr(tensor, name, field)
        kept = [entry for entry in tensor.external_data if entry.key != key]
        del tensor.external_data[:]
        tensor.external_data.extend(kept)
        tensor.external_data.add(key=key, value=value)
        model.graph.initializer[0].CopyFrom(tensor)

    return change


LOSSY: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "training": (lambda m: m.training_info.add(), "training information"),
    "sparse": (lambda m: m.graph.sparse_initializer.add().values.MergeFrom(TensorProto(name="s")), "'s' is sparse"),
    "sparse attribute": (
        lambda m: m.graph.node[0].attribute.add(name="a", type=onnx.AttributeProto.SPARSE_TENSOR),
        "is sparse",
    ),
    "map": (_map_output, "value 'logits' is a map"),
    "two initializers": (lambda m: m.graph.initializer.add(name="w", data_type=1), "two initializers named 'w'"),
    "nameless": (lambda m: m.graph.initializer.add(data_type=1), "an initializer without a name"),
    "two inputs": (lambda m: m.graph.input.add(name="x"), "two inputs named 'x'"),
    "two functions": (lambda m: [m.functions.add(name="F", domain="d") for _ in "ab"], "two functions named"),
    "two imports": (lambda m: m.opset_import.add(domain="ai.onnx", version=9), "two imports of the operator set"),
    "two attributes": (
        lambda m: [m.graph.node[0].attribute.add(name="a", type=2, i=1) for _ in "ab"],
        "node 'add_0' (Add) has two attributes of one name",
    ),
    "untyped attribute": (
        lambda m: m.graph.node[0].attribute.add(name="a", i=1),
        "attribute 'a' of node 'add_0' (Add) has no type",
    ),
    "devices": (lambda m: m.configuration.add(name="two", num_devices=2), "places nodes on devices"),
    "segment": (lambda m: setattr(m.graph.initializer[0].segment, "begin", 1), "stored in segments"),
    "no version": (lambda m: m.ClearField("ir_version"), "states no ONNX IR version"),
    "no imports": (lambda m: m.ClearField("opset_import"), "imports no operator set"),
    "twin producer": (lambda m: m.graph.node.add(op_type="Relu", input=["x"], output=["logits"]), "redeclared"),
    "bad dtype": (
        lambda m: setattr(m.graph.initializer[0], "data_type", 77),
        "tensor 'w' has the unknown element type 77",
    ),
    "no dtype": (_untyped_constant, "has the unknown element type 0"),
    "offset": (_odd_entry("offset", "-4"), "has the offset '-4'"),
    "length": (_odd_entry("length", "1e3"), "has the length '1e3'"),
    "string": (_odd_entry("offset", "0", data_type=TensorProto.STRING), "holds strings"),
    "both": (_odd_entry("offset", "0", raw_data=b"abcd"), "both inline and external"),
}


@pytest.mark.parametrize("kind", LOSSY)
def test_what_would_be_lost_or_is_damaged_is_refused(tmp_path: Path, kind: str):
    change, what = LOSSY[kind]
    path = tmp_path / "model.onnx"
    path.write_bytes(_with(change).SerializeToString())
    message = _refusal(path)
    assert message.startswith(str(path))
    assert what in message


def test_a_negative_dimension_and_a_repeated_key(tmp_path: Path):
    path = tmp_path / "model.onnx"
    tensor = external_tensor(Weight("w", "d", 0, (4,)))
    tensor.dims[0] = -4
    path.write_bytes(_initializer(tensor).SerializeToString())
    assert "'w' has a negative dimension" in _refusal(path)
    tensor = external_tensor(Weight("w", "d", 0, (4,)))
    tensor.external_data.add(key="location", value="../x")
    path.write_bytes(_initializer(tensor).SerializeToString())
    assert "'w' states its location twice" in _refusal(path)


# Field 999, a varint: what a later version of the format might add.
UNKNOWN = b"\xb8\x3e\x01"

UNKNOWN_HOLDERS: dict[str, Callable[[onnx.ModelProto], Message]] = {
    "model": lambda m: m,
    "graph": lambda m: m.graph,
    "node": lambda m: m.graph.node[0],
    "type": lambda m: m.graph.output[0].type,
    "small tensor": lambda m: m.graph.initializer[0],
    "large tensor": lambda m: m.graph.initializer[1],
    "function": lambda m: m.functions[0].node[0],
}


@pytest.mark.parametrize("holder", UNKNOWN_HOLDERS)
def test_unknown_fields_are_refused(tmp_path: Path, holder: str):
    large = helper.make_tensor("large", TensorProto.FLOAT, [2000], bytes(8000), raw=True)
    model = add_model([helper.make_tensor("w", TensorProto.FLOAT, [4], bytes(16), raw=True), large])
    node = helper.make_node("Identity", ["a"], ["b"])
    model.functions.append(helper.make_function("d", "F", ["a"], ["b"], [node], [helper.make_opsetid("", 18)]))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    load(path)
    UNKNOWN_HOLDERS[holder](model).MergeFromString(UNKNOWN)
    path.write_bytes(model.SerializeToString())
    assert f"holds fields that onnx {onnx.__version__} does not know" in _refusal(path)


# --- directories ------------------------------------------------------------------------------------------------------


def test_the_decoder_of_the_configuration(tmp_path: Path):
    write_model(tmp_path, name="other.onnx")
    path = write_model(tmp_path / "onnx", name="decoder.onnx")
    (tmp_path / "genai_config.json").write_text('{"model": {"decoder": {"filename": "onnx/decoder.onnx"}}}')
    source = source_of(load(tmp_path))
    assert source is not None
    assert (source.path, source.root) == (path, tmp_path)
    assert source.config_path == tmp_path / "genai_config.json"


def test_the_only_model_with_logits(tmp_path: Path):
    path = write_model(tmp_path, name="text.onnx")
    proto = read_proto(path)
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "image_features"
    (tmp_path / "vision.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / ".text.onnx.graphsurgery-0123abcd.tmp.onnx").write_bytes(path.read_bytes())
    source = source_of(load(tmp_path))
    assert source is not None
    assert source.path == path


def test_models_in_sub_directories_are_found(tmp_path: Path):
    path = write_model(tmp_path / "onnx")
    source = source_of(load(tmp_path))
    assert source is not None
    assert (source.path, source.root) == (path, tmp_path)


def test_ambiguous_and_empty_directories_are_refused(tmp_path: Path):
    assert _refusal(tmp_path) == f"{tmp_path} holds no .onnx file: give the directory of a model, or an .onnx file."
    write_model(tmp_path, name="decode.onnx")
    write_model(tmp_path, name="prefill.onnx")
    assert _refusal(tmp_path) == (
        f"{tmp_path} holds 2 models with logits (decode.onnx, prefill.onnx): choose with --file NAME."
    )
    for name in ("decode", "prefill"):
        proto = read_proto(tmp_path / f"{name}.onnx")
        proto.graph.output[0].name = proto.graph.node[-1].output[0] = "hidden"
        (tmp_path / f"{name}.onnx").write_bytes(proto.SerializeToString())
    assert _refusal(tmp_path) == (
        f"{tmp_path} holds no model with an output named logits (decode.onnx, prefill.onnx): choose with --file NAME."
    )
    source = source_of(load(tmp_path, file="prefill.onnx"))
    assert source is not None
    assert source.path == tmp_path / "prefill.onnx"


def test_a_file_that_is_not_there_names_the_closest(tmp_path: Path):
    path = write_model(tmp_path, name="prefill.onnx")
    write_model(tmp_path, name="vision.onnx")
    with pytest.raises(UsageError, match=r"has no file 'prefil': the closest is 'prefill.onnx'"):
        load(tmp_path, file="prefil")
    with pytest.raises(UsageError, match=r"leaves the model's directory"):
        load(tmp_path, file="../x.onnx")
    with pytest.raises(UsageError, match="chooses within a directory"):
        load(path, file="x.onnx")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            '{"model": {"decoder": {"filename": "gone.onnx"}}}',
            "names the decoder 'gone.onnx', which is not there (model.onnx)",
        ),
        ('{"model": {"decoder": {"filename": "../x.onnx"}}}', "leaves the model's directory"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_bad_configurations_are_refused(tmp_path: Path, config: str, what: str):
    path = write_model(tmp_path)
    (tmp_path / "genai_config.json").write_text(config)
    message = _refusal(tmp_path)
    assert "genai_config.json" in message
    assert what in message
    load(tmp_path, file="model.onnx")
    load(path)


def test_a_configuration_without_a_decoder_is_passed_over(tmp_path: Path):
    path = write_model(tmp_path)
    (tmp_path / "genai_config.json").write_text('{"model": {"decoder": {"pipeline": []}}}')
    source = source_of(load(tmp_path))
    assert source is not None
    assert source.path == path


def test_outputs_are_peeked_at_without_reading_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from graphsurgery.model_files import wire

    weight = helper.make_tensor("w", TensorProto.FLOAT, [2**18], np.zeros(2**18, np.float32).tobytes(), raw=True)
    path = tmp_path / "big.onnx"
    path.write_bytes(add_model([weight], rows=2**18).SerializeToString())
    read = []

    class Watched(io.FileIO):
        def read(self, size=-1):
            data = super().read(size)
            read.append(len(data))
            return data

    monkeypatch.setattr(wire, "open", lambda file, _mode: Watched(file, "r"), raising=False)
    assert wire.peek_output_names(path) == ("logits",)
    assert sum(read) < 200
