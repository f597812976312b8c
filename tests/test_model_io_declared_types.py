"""Types and shapes that a file declares reach the values as onnx-ir reads them, each distinct one read once."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from graphsurgery.model_io import load, reserved_names, save
from tests.model_io_helpers import canonical, read_proto

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FLOAT = TensorProto.FLOAT
_STEPS = 40


def _model() -> onnx.ModelProto:
    """A chain whose values are declared in every way, and declarations of what is none of its values."""
    names = ["x", *(f"v{number}" for number in range(_STEPS)), "y"]
    nodes = [helper.make_node("Add", [before, "w"], [after], name=after) for before, after in itertools.pairwise(names)]
    infos = [
        helper.make_tensor_value_info(name, FLOAT, ["B", 4] if number % 2 else [None, 4])
        for number, name in enumerate(names[1:-6])
    ]
    infos.append(helper.make_tensor_value_info("v1", FLOAT, [2, 4]))  # the last one counts
    told = helper.make_tensor_value_info(names[-6], FLOAT, ["B", 4], doc_string="what it is")
    noted = helper.make_tensor_value_info(names[-5], FLOAT, ["B", 4])
    noted.metadata_props.add(key="from", value="exporter")
    denoted = helper.make_tensor_value_info(names[-4], FLOAT, ["B", 4])
    denoted.type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    shapeless = helper.make_tensor_value_info(names[-3], FLOAT, None)
    listed = helper.make_tensor_sequence_value_info("orphan_list", FLOAT, ["B"])
    orphan = helper.make_tensor_value_info("orphan", FLOAT, ["B", 4])
    weight = helper.make_tensor_value_info("w", FLOAT, [4])
    output = helper.make_tensor_value_info("y", FLOAT, ["B", 4])
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", FLOAT, ["B", 4])],
        [output],
        [helper.make_tensor("w", FLOAT, [4], [1.0] * 4)],
        value_info=[*infos, told, noted, denoted, shapeless, listed, orphan, weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _described(model: ir.Model) -> list[tuple[object, ...]]:
    values = [value for node in model.graph for value in node.outputs]
    values += [*model.graph.inputs, *model.graph.initializers.values()]
    return [
        (
            value.name,
            value.type,
            value.shape,
            None if value.shape is None else [value.shape.get_denotation(axis) for axis in range(len(value.shape))],
            value.doc_string,
            dict(value.metadata_props),
        )
        for value in values
    ]


def test_values_are_declared_as_onnx_ir_reads_them(tmp_path: Path):
    path = tmp_path / "model.onnx"
    onnx.save(_model(), path)
    model = load(path)
    assert _described(model) == _described(ir.load(path))
    assert reserved_names(model) == {"orphan", "orphan_list"}
    save(model, tmp_path / "out.onnx")
    saved, given = read_proto(tmp_path / "out.onnx"), read_proto(path)
    del given.graph.value_info[1]  # the first declaration of v1
    assert canonical(saved) == canonical(given)


def test_each_distinct_declaration_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "model.onnx"
    onnx.save(_model(), path)
    read = []
    original = ir.serde.deserialize_tensor_shape

    def counted(proto: onnx.TensorShapeProto) -> ir.Shape:
        read.append(proto)
        return original(proto)

    monkeypatch.setattr(ir.serde, "deserialize_tensor_shape", counted)
    model = load(path)
    # [?, 4], [B, 4] and [2, 4] of plain values, [B] of a list and [4] of the weight, told or not; x, y and the three with
    # more to tell read their own.
    assert len(read) < 14 < _STEPS
    shapes = [node.outputs[0].shape for node in model.graph]
    assert shapes[3] is shapes[5]
    assert shapes[3] is not None
    assert shapes[3].frozen


def test_types_are_not_shared(tmp_path: Path):
    path = tmp_path / "model.onnx"
    onnx.save(_model(), path)
    model = load(path)
    first, second = (node.outputs[0] for node in list(model.graph)[3:6:2])
    first.dtype = ir.DataType.DOUBLE
    assert second.dtype == ir.DataType.FLOAT
