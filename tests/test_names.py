"""New names are unique over everything that a file names."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from graphsurgery.model_io import load
from graphsurgery.names import Names, claim
from tests.small_models import CHAIN, NESTED, node_of, parse, value_of

FUNCTIONS = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
g (float[4] x) => (float[4] y)
{
    [call] y = local.twice(x)
}
<domain: "local", opset_import: ["" : 18]>
twice (v) => (w) { [add] u = Add(v, v)  w = Identity(u) }
"""


def test_a_free_name_is_taken_as_it_is_and_then_numbered():
    names = Names(parse(CHAIN))
    assert names.value("fresh") == "fresh"
    assert names.value("fresh") == "fresh_1"
    assert names.value("fresh") == "fresh_2"
    assert names.value("fresh_1") == "fresh_1_1"


def test_values_of_every_kind_are_taken():
    names = Names(parse(NESTED))
    for taken in ("x", "flag", "one", "a", "y", "inner", "t", "e"):
        assert names.has_value(taken), taken
        assert names.value(taken) == f"{taken}_1"


def test_functions_are_part_of_the_model():
    model = parse(FUNCTIONS)
    for function in model.functions.values():
        for number, node in enumerate(function):
            node.name = f"body_{number}"
    names = Names(model)
    assert [names.value(name) for name in ("v", "u", "w")] == ["v_1", "u_1", "w_1"]
    assert [names.node(name) for name in ("body_0", "body_1")] == ["body_0_1", "body_1_1"]


def test_nodes_and_values_do_not_hinder_each_other():
    model = parse(CHAIN)
    node_of(model, "a").name = "relu"
    names = Names(model)
    assert names.node("relu") == "relu_1"
    assert names.value("relu") == "relu"
    assert names.node("a") == "a"


def test_many_names_of_one_hint_take_one_look_each():
    class Counted(set[str]):
        looks = 0

        def __contains__(self, item: object) -> bool:
            Counted.looks += 1
            return super().__contains__(item)

    taken = Counted({"rows", "rows_3"})
    numbers: dict[str, int] = {}
    assert [claim(taken, "rows", numbers=numbers) for _ in range(4)] == ["rows_1", "rows_2", "rows_4", "rows_5"]
    for _ in range(1000):
        claim(taken, "rows", numbers=numbers)
    assert Counted.looks < 4000


def test_names_that_only_type_information_uses_are_taken(tmp_path):
    proto = onnx.parser.parse_model(CHAIN)
    ghost = helper.make_tensor_value_info("ghost", TensorProto.FLOAT, [1])
    proto.graph.value_info.append(ghost)
    onnx.save(proto, tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx")
    assert Names.of(model).value("ghost") == "ghost_1"


def test_names_are_collected_once_and_forgotten_on_request():
    model = parse(CHAIN)
    names = Names.of(model)
    assert Names.of(model) is names
    value_of(model, "a").name = "other"
    assert names.has_value("a")
    Names.forget(model)
    assert not Names.of(model).has_value("a")
    assert Names.of(model).has_value("other")


def test_the_case_that_uses_every_likely_name(cases_dir):
    model = load(cases_dir / "s06_names_the_tool_would_invent.onnx")
    names = Names.of(model)
    for taken in ("axes", "indices", "logits_pruned", "last_hidden", "last_token_indices", "val_0"):
        assert names.value(taken) == f"{taken}_1", taken
