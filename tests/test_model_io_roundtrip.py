"""A model that is loaded and saved says what it said before."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.model_io import load, reserved_names, save, source_of
from tests.model_io_helpers import (
    CASES,
    FIXTURES,
    Weight,
    add_model,
    canonical,
    entries_of,
    external_tensor,
    read_proto,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

SKIPPED = ("s04_", "s01_everything")  # not models; and the links of a hub cache, which have their own tests
MODELS = [*CASES.glob("*.onnx"), *FIXTURES.glob("*/*.onnx")]
MODELS = sorted(path for path in MODELS if not path.name.startswith(SKIPPED))


def _assert_same(path: Path) -> None:
    output = path.with_name("out.onnx")
    result = save(load(path), output)
    assert (result.weights, result.bytes_copied) == ("reference", 0)
    assert canonical(read_proto(output)) == canonical(read_proto(path))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_files_round_trip(path: Path, tmp_path: Path):
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    _assert_same(copy)


def test_external_constant_attribute_round_trips(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes((CASES / "s01_everything_external_even_shapes.onnx").read_bytes())
    _assert_same(path)


def _branch(name: str, weight: TensorProto, **fields: object) -> onnx.GraphProto:
    node = helper.make_node("Add", ["x", weight.name], [f"{name}_out"])
    info = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [4])
    return helper.make_graph([node], name, [], [info], [weight], **fields)


def _rich_model() -> onnx.ModelProto:
    """Everything at once that onnx-ir alone would drop, add or change."""
    info = helper.make_tensor_value_info
    metadata = {"origin": "a test"}
    inline = helper.make_tensor("inline", TensorProto.FLOAT, [4], [1, 2, 3, 4])
    inline.metadata_props.add(key="folded_from", value="somewhere")
    model = add_model(
        [external_tensor(Weight("w0", "sub/a.data", 3, (4,)), checksum="abc", basepath="/x"), inline],
        value_info=[
            info("ghost", TensorProto.FLOAT, ["a + b"]),
            info("w0", TensorProto.FLOAT, [4]),
            info("logits", TensorProto.FLOAT, [4]),
            info("sum_0", TensorProto.FLOAT, [4]),
        ],
        doc_string="about the graph",
    )
    graph = model.graph
    graph.node[0].metadata_props.add(key="namespace", value="layers.0")
    graph.node[0].doc_string = "about the node"
    graph.metadata_props.add(key="of", value="graph")
    branches = {
        "then_branch": _branch("yes", external_tensor(Weight("w1", "b.data", 0, (4,)))),
        "else_branch": _branch(
            "no", external_tensor(Weight("w2", "b.data", 16, (4,))), value_info=[info("w2", 1, [4])]
        ),
    }
    graph.input.append(info("flag", TensorProto.BOOL, []))
    graph.node.append(helper.make_node("If", ["flag"], ["chosen"], name="if", **branches))
    graph.node.append(helper.make_node("Twice", ["chosen"], ["twice"], domain="local", name="call"))
    graph.node.append(helper.make_node("Mystery", ["twice", ""], ["", "odd"], domain="vendor.ops", name="m", level=3))
    graph.output.append(info("odd", TensorProto.FLOAT, ["batch", 4]))
    constant = helper.make_node("Constant", [], ["c"], value=external_tensor(Weight("", "b.data", 32, (4,))))
    body = [constant, helper.make_node("Add", ["v", "c"], ["r"])]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("vendor.ops", 2), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Twice", ["v"], ["r"], body, imports[:1])
    function.value_info.extend([info("r", 1, [4]), info("nothing", 1, [4])])
    model.functions.append(function)
    del model.opset_import[:]
    model.opset_import.extend(imports)
    for tensor in ("w0", "gone", "logits"):
        annotation = graph.quantization_annotation.add(tensor_name=tensor)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="s")
    helper.set_model_props(model, metadata)
    model.producer_name, model.model_version, model.doc_string = "tests", 7, "about the model"
    return model


def test_nothing_is_lost_silently(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(_rich_model().SerializeToString())
    _assert_same(path)


def test_lost_value_names_are_reserved(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(_rich_model().SerializeToString())
    assert reserved_names(load(path)) == {"ghost", "nothing", "gone"}


def test_value_info_of_function_values_before_ir_10(tmp_path: Path):
    model = _rich_model()
    model.ir_version = 9
    del model.functions[0].value_info[:]
    model.graph.value_info.append(helper.make_tensor_value_info("local::Twice/r", 1, [4]))
    model.graph.value_info.append(helper.make_tensor_value_info("local::Gone/r", 1, [4]))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    _assert_same(path)


def test_value_info_of_an_output_follows_the_output(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(_rich_model().SerializeToString())
    model = load(path)
    model.graph.outputs[0].shape = ir.Shape([2])
    save(model, tmp_path / "out.onnx")
    infos = {info.name: info for info in read_proto(tmp_path / "out.onnx").graph.value_info}
    assert [dim.dim_value for dim in infos["logits"].type.tensor_type.shape.dim] == [2]


def test_lost_value_info_gives_way_to_a_new_value(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(_rich_model().SerializeToString())
    model = load(path)
    model.graph.node("add_0").outputs[0].name = "ghost"
    save(model, tmp_path / "out.onnx")
    infos = [info for info in read_proto(tmp_path / "out.onnx").graph.value_info if info.name == "ghost"]
    assert [[dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in infos] == [[4]]


def test_the_default_domain_has_one_spelling(tmp_path: Path):
    path = write_model(tmp_path)
    proto = read_proto(path)
    proto.opset_import[0].domain = "ai.onnx"
    path.write_bytes(proto.SerializeToString())
    assert load(path).opset_imports == {"": 18}


def test_a_clone_still_knows_where_it_came_from(tmp_path: Path):
    model = load(write_model(tmp_path)).clone()
    result = save(model)
    assert result.path == tmp_path / "model.surgery.onnx"
    assert canonical(read_proto(result.path)) == canonical(read_proto(tmp_path / "model.onnx"))


def test_two_saves_are_byte_identical(tmp_path: Path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.onnx"
    path.write_bytes(_rich_model().SerializeToString())
    (tmp_path / "in" / "sub").mkdir()
    (tmp_path / "in" / "sub" / "a.data").write_bytes(bytes(range(19)))
    (tmp_path / "in" / "b.data").write_bytes(bytes(range(48)))
    for mode in ("copy", "repack"):
        files = []
        model = load(path)
        for number in range(2):
            (tmp_path / f"{mode}{number}").mkdir()
            result = save(model if number else load(path), tmp_path / f"{mode}{number}" / "o.onnx", weights=mode)
            files.append([file.read_bytes() for file in (result.path, *result.data_files)])
        assert files[0] == files[1]
        assert len(files[0]) == {"copy": 3, "repack": 2}[mode]


def test_unknown_external_keys_follow_copied_data_but_no_checksum_follows_repacked(tmp_path: Path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    path = tmp_path / "in" / "model.onnx"
    path.write_bytes(_rich_model().SerializeToString())
    (tmp_path / "in" / "sub" / "a.data").write_bytes(bytes(range(19)))
    (tmp_path / "in" / "b.data").write_bytes(bytes(range(48)))
    model = load(path)
    save(model, tmp_path / "copy.onnx", weights="copy")
    save(model, tmp_path / "repack.onnx", weights="repack")
    copied = entries_of(read_proto(tmp_path / "copy.onnx").graph.initializer[0])
    assert copied == {
        "location": "copy.onnx.data",
        "offset": "3",
        "length": "16",
        "checksum": "abc",
        "basepath": "/x",
    }
    repacked = entries_of(read_proto(tmp_path / "repack.onnx").graph.initializer[0])
    assert repacked == {"location": "repack.onnx.data", "offset": "0", "length": "16", "basepath": "/x"}


def test_functions_get_the_directory_of_the_model(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(_rich_model().SerializeToString())
    model = load(path)
    constant = next(iter(model.functions.values()))[0]
    assert constant.attributes["value"].value.path == str(tmp_path / "b.data")


def test_graph_hash_is_that_of_the_file(tmp_path: Path):
    path = write_model(tmp_path)
    source = source_of(load(path))
    (tmp_path / "model.onnx.data").unlink()
    assert source is not None
    assert source.graph_hash() == hashlib.sha256(path.read_bytes()).hexdigest()
