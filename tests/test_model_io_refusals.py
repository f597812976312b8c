"""Loading: unsafe locations, what would be lost, and directories."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphsurgery.errors import UsageError
from graphsurgery.model_io import load, source_of
from tests.model_io_helpers import Weight, add_model, external_tensor, read_proto, write_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from google.protobuf.message import Message
from tests.model_io_helpers import refusal

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
    message = refusal(path)
    assert repr(location) in message
    assert "tensor 'bad'" in message
    assert UNSAFE[location] in message


@pytest.mark.parametrize("holder", HOLDERS)
def test_locations_are_checked_wherever_tensors_are(tmp_path: Path, holder: Callable[[TensorProto], onnx.ModelProto]):
    path = tmp_path / "model.onnx"
    path.write_bytes(holder(external_tensor(Weight("bad", "../x", 0, (4,)))).SerializeToString())
    assert "external data location '../x' of tensor 'bad' leaves the model's directory" in refusal(path)


def test_data_within_the_model_file_or_a_device_is_refused(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(_initializer(external_tensor(Weight("w", "model.onnx", 0, (4,)))).SerializeToString())
    assert "takes its data from the model file itself" in refusal(path)
    path.write_bytes(_initializer(external_tensor(Weight("w", "pipe", 0, (4,)))).SerializeToString())
    os.mkfifo(tmp_path / "pipe")
    assert f"the data file {tmp_path}/pipe is not a regular file" in refusal(path)


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
    "twin producer": (
        lambda m: m.graph.node.add(op_type="Relu", input=["x"], output=["logits"]),
        "which node 'add_0' makes already",
    ),
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
    message = refusal(path)
    assert message.startswith(str(path))
    assert what in message


def test_a_negative_dimension_and_a_repeated_key(tmp_path: Path):
    path = tmp_path / "model.onnx"
    tensor = external_tensor(Weight("w", "d", 0, (4,)))
    tensor.dims[0] = -4
    path.write_bytes(_initializer(tensor).SerializeToString())
    assert "'w' has a negative dimension" in refusal(path)
    tensor = external_tensor(Weight("w", "d", 0, (4,)))
    tensor.external_data.add(key="location", value="../x")
    path.write_bytes(_initializer(tensor).SerializeToString())
    assert "'w' states its location twice" in refusal(path)


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
    assert f"holds fields that onnx {onnx.__version__} does not know" in refusal(path)


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
    assert refusal(tmp_path) == f"{tmp_path} holds no .onnx file: give the directory of a model, or an .onnx file."
    write_model(tmp_path, name="decode.onnx")
    write_model(tmp_path, name="prefill.onnx")
    assert refusal(tmp_path) == (
        f"{tmp_path} holds 2 models with logits (decode.onnx, prefill.onnx): choose with --file NAME."
    )
    for name in ("decode", "prefill"):
        proto = read_proto(tmp_path / f"{name}.onnx")
        proto.graph.output[0].name = proto.graph.node[-1].output[0] = "hidden"
        (tmp_path / f"{name}.onnx").write_bytes(proto.SerializeToString())
    assert refusal(tmp_path) == (
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
    message = refusal(tmp_path)
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
