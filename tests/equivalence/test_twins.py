from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.twins import float32_twin, holds_bfloat16
from graphsurgery.errors import CannotCheckError
from tests.equivalence.builders import Graph, case, decoder, initializer, save, values


def test_bfloat16_is_seen_wherever_it_stands():
    assert holds_bfloat16(decoder(T.BFLOAT16))
    assert holds_bfloat16(read_proto(case("s12")))
    assert not holds_bfloat16(decoder())
    g = Graph()
    g.op("Cast", g.input("x", T.FLOAT, 2), to=T.BFLOAT16)
    assert holds_bfloat16(g.model())


def test_weights_types_casts_and_constants_are_widened(tmp_path):
    g = Graph(T.BFLOAT16)
    x = g.op("Cast", g.input("x", T.FLOAT, 2), to=T.BFLOAT16)
    constant = helper.make_tensor("c", T.BFLOAT16, [2], [1.0, 2.5])
    g.nodes.append(helper.make_node("Constant", [], ["held"], value=constant))
    g.op("Add", g.op("Mul", x, "held"), g.weight("w", 2), out="y")
    g.output("y", T.BFLOAT16, 2)
    model = g.model()
    twin = float32_twin(model, tmp_path, tmp_path)
    assert not holds_bfloat16(twin)
    assert holds_bfloat16(model)
    assert twin.graph.output[0].type.tensor_type.elem_type == T.FLOAT
    np.testing.assert_array_equal(values(twin, "w"), values(model, "w").astype(np.float32))
    assert numpy_helper.to_array(twin.graph.node[1].attribute[0].t).tolist() == [1.0, 2.5]
    assert list(tmp_path.iterdir()) == []


def test_external_data_is_streamed_into_one_file(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    model = decoder(T.BFLOAT16)
    proto = read_proto(save(model, source / "m.onnx", external=True))
    before = sorted(path.name for path in source.iterdir())
    twin = float32_twin(proto, source, target)
    assert [path.name for path in target.iterdir()] == ["twin.data"]
    assert sorted(path.name for path in source.iterdir()) == before
    embed = numpy_helper.to_array(initializer(twin, "embed"), str(target))
    np.testing.assert_array_equal(embed, values(decoder(T.BFLOAT16), "embed").astype(np.float32))


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    proto = read_proto(save(decoder(T.BFLOAT16), tmp_path / "m.onnx", external=True))
    target = tmp_path / "target"
    target.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10))
    with pytest.raises(CannotCheckError, match="set TMPDIR to a larger disk"):
        float32_twin(proto, tmp_path, target)
    assert list(target.iterdir()) == []
