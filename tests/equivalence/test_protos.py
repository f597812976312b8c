from __future__ import annotations

import shutil

import pytest
from onnx import helper

from graphsurgery.equivalence.protos import Scope, all_tensors, foreign_ops, missing_data, model_bytes, read_proto
from graphsurgery.errors import InputRefusedError
from tests.equivalence.builders import CASES, Graph, case, decoder, save


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("s04_lfs_pointer_and_truncated.onnx", "Git LFS pointer"),
        ("s04_lfs_pointer_and_truncated.truncated.onnx", "truncated"),
        ("s04_lfs_pointer_and_truncated.empty.onnx", "empty file"),
        ("s99_nowhere.onnx", "cannot be read"),
    ],
)
def test_what_is_no_model_is_named(name, words):
    with pytest.raises(InputRefusedError) as caught:
        read_proto(CASES / name)
    assert name in str(caught.value)
    assert words in str(caught.value)


def test_missing_and_short_data_name_tensor_and_file(tmp_path):
    proto = read_proto(case("s03"))
    problem = missing_data(proto, CASES)
    assert problem is not None
    assert "model.embed_tokens.weight is short" in problem
    assert "which has 16 bytes" in problem
    shutil.copy(case("s03"), tmp_path)
    problem = missing_data(proto, tmp_path)
    assert problem is not None
    assert "there is no file s03_external_data_missing_or_short.short.data" in problem


def test_present_data_is_counted(tmp_path):
    path = save(decoder(), tmp_path / "m.onnx", external=True)
    proto = read_proto(path)
    assert missing_data(proto, tmp_path) is None
    assert model_bytes(proto, path) == path.stat().st_size + (tmp_path / "m.onnx.data").stat().st_size


def test_foreign_ops_are_named_with_their_domain():
    assert foreign_ops(read_proto(case("s13"))) == ["vendor.ops::Scale"]
    assert foreign_ops(read_proto(case("f04"))) == []
    assert foreign_ops(read_proto(case("a10"))) == []


def test_tensors_in_subgraphs_and_attributes_are_seen():
    g = Graph()
    branch = helper.make_graph([], "then", [], [], [helper.make_tensor("inner", 1, [1], [0.0])])
    g.nodes.append(helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch))
    g.nodes.append(helper.make_node("Constant", [], ["c"], value=helper.make_tensor("held", 9, [], [True])))
    assert [tensor.name for tensor in all_tensors(g.model())] == ["inner", "inner", "held"]


def test_uses_are_followed_into_functions_and_out_again():
    function = helper.make_function(
        "local",
        "Look",
        ["table", "ids"],
        ["rows"],
        [helper.make_node("Identity", ["ids"], ["i"]), helper.make_node("Gather", ["table", "i"], ["rows"])],
        [helper.make_opsetid("", 18)],
    )
    g = Graph()
    g.weight("embed", 11, 4)
    g.nodes.append(helper.make_node("Transpose", ["embed"], ["turned"], perm=[1, 0]))
    g.nodes.append(helper.make_node("Look", ["turned", "ids"], ["rows"], domain="local"))
    model = g.model()
    model.functions.append(function)
    uses = list(Scope.of(model).reached("ids", {"Identity": (0,)}))
    assert [(node.op_type, slot) for _, node, slot in uses] == [("Gather", 1)]
    scope, node, _ = uses[0]
    assert scope.static_dims(node.input[0]) == (4, 11)
