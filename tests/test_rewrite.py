"""Edits: names, order, constants, provenance, dead nodes and boundaries."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.editing.dead_nodes import remove_dead
from graphsurgery.invariants import violations
from graphsurgery.model_io import load, save
from graphsurgery.patterns.matcher import is_sorted
from graphsurgery.rewrite import PASS_KEY, SITE_KEY, Rewrite
from graphsurgery.site_report import Boundary
from tests.small_models import CHAIN, NESTED, graph_of, maker, node_of, op_types, parse, value_of

FLOAT = ir.DataType.FLOAT


def _edit(model: ir.Model, scope: str = "layers.0/test") -> Rewrite:
    return Rewrite(model, "test-pass", "site:0", scope=scope)


# ---- what is inserted -------------------------------------------------------------------------------------------------


def test_an_inserted_node_tells_what_it_is():
    model = parse(CHAIN)
    edit = _edit(model)
    source = value_of(model, "a")
    edit.after(source)
    made = edit.emit("Elu", [source], {"alpha": 0.5}, name="soft", dtype=FLOAT, shape=["B", 4])
    node = made.producer()
    assert node is not None
    assert (node.op_type, node.domain, node.name, made.name) == ("Elu", "", "layers.0/test/soft", "layers.0/test/soft")
    assert node.attributes["alpha"].as_float() == 0.5
    assert (made.dtype, str(made.shape)) == (FLOAT, "[B,4]")
    assert node.metadata_props == {PASS_KEY: "test-pass", SITE_KEY: "site:0"}
    assert op_types(model) == ["Relu", "Elu", "Neg", "Abs", "Exp"]


def test_kept_nodes_keep_names_and_metadata():
    model = parse(CHAIN)
    relu = node_of(model, "a")
    relu.name, relu.metadata_props["namespace"] = "kept", "layers.0"
    edit = _edit(model)
    edit.after(value_of(model, "a"))
    edit.reroute(node_of(model, "b"), 0, edit.emit("Neg", [value_of(model, "a")], name="neg", dtype=FLOAT))
    edit.commit()
    assert (relu.name, relu.metadata_props) == ("kept", {"namespace": "layers.0"})


def test_what_is_not_known_is_not_declared():
    model = parse(CHAIN)
    made = _edit(model).emit("Neg", [model.graph.inputs[0]], name="neg", dtype=None)
    assert (made.dtype, made.shape) == (None, None)
    made = _edit(model).emit("Neg", [model.graph.inputs[0]], name="neg", dtype=FLOAT, shape=[None, 4])
    assert made.shape == ir.Shape([None, 4])


def test_another_site_of_the_same_edit():
    model = parse(CHAIN)
    edit = _edit(model)
    first = edit.emit("Neg", [model.graph.inputs[0]], name="neg", dtype=FLOAT)
    edit.at_site("site:1", "layers.1/test")
    second = edit.emit("Neg", [first], name="neg", dtype=FLOAT)
    assert second.name == "layers.1/test/neg"
    assert [maker(value).metadata_props[SITE_KEY] for value in (first, second)] == ["site:0", "site:1"]


def test_a_vendor_domain_is_imported_once_and_never_downgraded():
    model = parse(CHAIN)
    edit = _edit(model)
    edit.emit("Gelu", [model.graph.inputs[0]], name="gelu", dtype=FLOAT, domain="com.microsoft")
    assert model.opset_imports == {"": 18, "com.microsoft": 1}
    model.opset_imports["com.microsoft"] = 3
    edit.emit("Gelu", [model.graph.inputs[0]], name="gelu", dtype=FLOAT, domain="com.microsoft")
    assert model.opset_imports == {"": 18, "com.microsoft": 3}
    assert edit.opset == 18


# ---- names ------------------------------------------------------------------------------------------------------------


def test_names_are_unique_over_graph_subgraphs_and_type_information(tmp_path):
    proto = onnx.parser.parse_model(NESTED)
    proto.graph.value_info.append(helper.make_tensor_value_info("s/ghost", TensorProto.FLOAT, [1]))
    for name, node in (("s/one", proto.graph.node[0]), ("s/two", proto.graph.node[1].attribute[0].g.node[0])):
        node.name = name
    onnx.save(proto, tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx")
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name == "inner":
                value.name = "s/inner"
    edit = _edit(model, scope="s")
    made = [
        edit.emit("Neg", [model.graph.inputs[0]], name=name, dtype=FLOAT, shape=["B", 4])
        for name in ("ghost", "inner", "inner", "one", "two")
    ]
    assert [value.name for value in made] == ["s/ghost_1", "s/inner_1", "s/inner_2", "s/one", "s/two"]
    assert [maker(value).name for value in made] == ["s/ghost", "s/inner", "s/inner_1", "s/one_1", "s/two_1"]
    assert violations(model) == []
    # The ghost keeps its entry, and it does not become the type of what was inserted.
    save(model, tmp_path / "out.onnx")
    infos = {
        info.name: info for info in onnx.load_model_from_string((tmp_path / "out.onnx").read_bytes()).graph.value_info
    }
    assert [dim.dim_value for dim in infos["s/ghost"].type.tensor_type.shape.dim] == [1]
    assert infos["s/ghost_1"].type.tensor_type.shape.dim[0].dim_param == "B"


def test_two_edits_of_one_scope_do_not_clash():
    model = parse(CHAIN)
    names = []
    for _ in range(3):
        edit = _edit(model)
        names.append(edit.emit("Neg", [model.graph.inputs[0]], name="neg", dtype=FLOAT).name)
        names.append(edit.constant([1]).name)
        edit.commit()
    assert names == [
        "layers.0/test/neg",
        "layers.0/test/const",
        "layers.0/test/neg_1",
        "layers.0/test/const_1",
        "layers.0/test/neg_2",
        "layers.0/test/const_2",
    ]
    assert set(model.graph.initializers) == {name for name in names if "const" in (name or "")}


# ---- order ------------------------------------------------------------------------------------------------------------


def test_at_the_start_means_before_everything_in_the_order_of_insertion():
    model = parse(CHAIN)
    edit = _edit(model)
    x = model.graph.inputs[0]
    first = edit.emit("Neg", [x], name="p0", dtype=FLOAT)
    edit.after(value_of(model, "b"))
    edit.emit("Abs", [value_of(model, "b")], name="m0", dtype=FLOAT)
    edit.at_start()
    second = edit.emit("Neg", [first], name="p1", dtype=FLOAT)
    edit.after(x)
    edit.emit("Neg", [second], name="p2", dtype=FLOAT)
    names = [node.name.rpartition("/")[2] if node.name else node.op_type for node in model.graph]
    assert names[:3] == ["p0", "p1", "p2"]
    assert [name for name in names if name.startswith("m")] == ["m0"]
    assert is_sorted(model.graph)


def test_a_prologue_within_the_start_stays_readable():
    model = parse(CHAIN)
    edit = _edit(model)
    edit.at_start()
    with edit.prologue():
        first = edit.emit("Neg", [model.graph.inputs[0]], name="p0", dtype=FLOAT)
    second = edit.emit("Neg", [first], name="p1", dtype=FLOAT)
    edit.after(value_of(model, "b"))
    with edit.prologue():
        third = edit.emit("Neg", [second], name="p2", dtype=FLOAT)
    edit.emit("Add", [third, value_of(model, "b")], name="m0", dtype=FLOAT)
    assert op_types(model) == ["Neg", "Neg", "Neg", "Relu", "Neg", "Add", "Abs", "Exp"]
    assert is_sorted(model.graph)


def test_in_front_of_a_node_in_the_order_of_insertion():
    model = parse(CHAIN)
    edit = _edit(model)
    edit.before(node_of(model, "b"))
    first = edit.emit("Abs", [value_of(model, "a")], name="one", dtype=FLOAT)
    edit.emit("Exp", [first], name="two", dtype=FLOAT)
    assert op_types(model) == ["Relu", "Abs", "Exp", "Neg", "Abs", "Exp"]


def test_an_empty_graph_takes_a_node():
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=9)
    _edit(model).emit("Constant", [], {"value_float": 1.0}, name="one", dtype=FLOAT)
    assert op_types(model) == ["Constant"]


def test_a_value_of_a_subgraph_is_followed_inside_it():
    model = parse(NESTED)
    inner = value_of(model, "inner")
    edit = _edit(model)
    edit.after(inner)
    made = edit.emit("Neg", [inner], name="neg", dtype=FLOAT)
    assert maker(made).graph is maker(inner).graph
    assert [node.op_type for node in graph_of(model, "inner")] == ["Neg", "Neg", "Add"]
    assert violations(model) == []


_PLACES = st.lists(
    st.tuples(st.sampled_from(["start", "after", "before"]), st.integers(0, 30), st.integers(0, 30)), max_size=12
)


@given(_PLACES)
def test_any_sequence_of_insertions_stays_in_execution_order(places):
    """Each insertion reads the value behind which it stands, or an input."""
    model = parse(CHAIN)
    edit = _edit(model)
    x = model.graph.inputs[0]
    for place, number, _ in places:
        values = [x, *(value for node in model.graph for value in node.outputs)]
        chosen = values[number % len(values)]
        if place == "before":
            nodes = list(model.graph)
            node = nodes[number % len(nodes)]
            edit.before(node)
            chosen = node.inputs[0] or x
        elif place == "after":
            edit.after(chosen)
        else:
            edit.at_start()
            chosen = x
        made = edit.emit("Neg", [chosen], name="neg", dtype=FLOAT)
        edit.emit("Abs", [made], name="abs", dtype=FLOAT)
    assert is_sorted(model.graph)
    assert len(model.graph) == 4 + 2 * len(places)
    assert violations(model) == []


# ---- constants --------------------------------------------------------------------------------------------------------


def test_constants_are_inline_and_equal_ones_are_one():
    model = parse(CHAIN)
    edit = _edit(model)
    one = edit.constant([1, 2], "starts")
    assert edit.constant(np.array([1, 2], np.int64)) is one
    assert edit.constant(1) is not one
    assert edit.constant([1, 2]) is one
    assert edit.constant(np.array([1, 2], np.int32)) is not one
    assert edit.constant(np.array([[1, 2]], np.int64)) is not one
    assert edit.constant(np.array([0.0], np.float32)) is not edit.constant(np.array([-0.0], np.float32))
    assert one.name == "layers.0/test/starts"
    assert (one.dtype, str(one.shape)) == (ir.DataType.INT64, "[2]")
    assert one.const_value is not None
    assert not isinstance(one.const_value, ir.ExternalTensor)
    assert one.const_value.numpy().tolist() == [1, 2]
    assert one.name in model.graph.initializers
    assert len(model.graph.initializers) == 6


def _bytes(model: ir.Model) -> dict[str, bytes]:
    return {name: v.const_value.tobytes() for name, v in model.graph.initializers.items() if v.const_value is not None}


def test_existing_initializers_are_untouched(cases_dir):
    model = load(cases_dir / "s06_names_the_tool_would_invent.onnx")
    before = _bytes(model)
    edit = _edit(model, scope="axes")
    edit.constant([7], "axes")
    for name in ("axes", "indices", "one", "starts"):
        Rewrite(model, "test-pass", "s", scope=name)
    made = edit.emit("Neg", [model.graph.inputs[0]], name="x", dtype=None)
    assert made.name == "axes/x"
    after = _bytes(model)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 1


# ---- edges and interface ----------------------------------------------------------------------------------------------


def test_rerouting_removes_what_nothing_reads_any_more():
    model = parse(CHAIN)
    edit = _edit(model)
    edit.after(value_of(model, "a"))
    new = edit.emit("Exp", [value_of(model, "a")], name="exp", dtype=FLOAT)
    edit.reroute(node_of(model, "y"), 0, new)
    assert op_types(model) == ["Relu", "Exp", "Neg", "Abs", "Exp"]
    edit.commit()
    assert op_types(model) == ["Relu", "Exp", "Abs", "Exp"]
    assert violations(model) == []


def test_rerouting_to_what_is_read_already_changes_nothing():
    model = parse(CHAIN)
    edit = _edit(model)
    edit.reroute(node_of(model, "b"), 0, value_of(model, "a"))
    edit.commit()
    assert op_types(model) == ["Relu", "Neg", "Abs", "Exp"]


def test_an_optional_input_is_left_out():
    model = parse(
        """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[B,4] x, float lo) => (float[B,4] y) { hi = Neg(lo)  y = Clip(x, lo, hi) }
        """
    )
    edit = _edit(model)
    edit.reroute(node_of(model, "y"), 2, None)
    edit.commit()
    assert op_types(model) == ["Clip"]
    assert [value.name if value else None for value in node_of(model, "y").inputs] == ["x", "lo", None]


def test_a_new_input_goes_behind_all_others():
    model = parse(CHAIN)
    made = _edit(model).add_input("rows", ir.DataType.INT32, ["B", 1, 1], "Which row.")
    assert [value.name for value in model.graph.inputs] == ["x", "rows"]
    assert (made.dtype, str(made.shape), made.doc_string) == (ir.DataType.INT32, "[B,1,1]", "Which row.")


def test_an_output_keeps_its_name_and_its_place():
    model = parse(CHAIN)
    old = value_of(model, "y")
    old.metadata_props["kept"], old.doc_string = "yes", "The result."
    edit = _edit(model)
    edit.after(old)
    new = edit.emit("Neg", [old], name="neg", dtype=FLOAT, shape=["B", 4])
    edit.replace_output(old, new, "y/before")
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    assert model.graph.outputs[0] is new
    assert (new.metadata_props, new.doc_string) == ({"kept": "yes"}, "The result.")
    assert old.name == "y/before"
    assert not old.is_graph_output()
    assert violations(model) == []


def test_users_inside_keep_reading_the_old_value():
    model = parse(
        """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[B,4] x) => (float[B,4] y, float[B,4] z) { y = Relu(x)  z = Neg(y) }
        """
    )
    old = value_of(model, "y")
    edit = _edit(model)
    edit.after(old)
    edit.replace_output(old, edit.emit("Exp", [old], name="exp", dtype=FLOAT), "y/before")
    assert node_of(model, "z").inputs[0] is old
    edit.commit()
    assert op_types(model) == ["Relu", "Exp", "Neg"]


def test_all_uses_go_over_and_an_output_takes_its_name_along():
    model = parse(
        """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[B,4] x) => (float[B,4] y, float[B,4] z) { a = Relu(x)  y = Abs(a)  z = Add(y, y) }
        """
    )
    old = value_of(model, "y")
    edit = _edit(model)
    edit.after(value_of(model, "a"))
    new = edit.emit("Exp", [value_of(model, "a")], name="exp", dtype=FLOAT)
    edit.replace_all_uses(old, new)
    edit.commit()
    assert op_types(model) == ["Relu", "Exp", "Add"]
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    assert list(node_of(model, "z").inputs) == [new, new]
    assert violations(model) == []


def test_a_clone_is_the_same_node_on_other_inputs():
    model = parse(
        """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[B,4] x) => (float[B,4] y) { a = LeakyRelu <alpha = 0.25> (x)  y = Neg(a) }
        """
    )
    node = node_of(model, "a")
    node.metadata_props["namespace"] = "layers.0"
    edit = _edit(model)
    edit.after(node.outputs[0])
    copy = edit.clone(node, [node.outputs[0]], name="again")
    made = copy.producer()
    assert made is not None
    assert (made.op_type, made.attributes["alpha"].as_float(), copy.name) == ("LeakyRelu", 0.25, "layers.0/test/again")
    assert made.metadata_props == {"namespace": "layers.0", PASS_KEY: "test-pass", SITE_KEY: "site:0"}
    assert node.metadata_props == {"namespace": "layers.0"}
    assert (copy.dtype, copy.shape) == (node.outputs[0].dtype, None)


# ---- closing ----------------------------------------------------------------------------------------------------------


def test_boundaries_are_recorded_by_name():
    model = parse(CHAIN)
    edit = _edit(model)
    a = value_of(model, "a")
    edit.after(a)
    new = edit.emit("Neg", [a], name="neg", dtype=FLOAT)
    edit.record([a], ["y"], [a, new], ["y"])
    edit.record([new], ["z"], [new], ["z"], scope="local::layer")
    assert edit.commit() == (
        Boundary("main", ("a",), ("y",), ("a", "layers.0/test/neg"), ("y",)),
        Boundary("local::layer", ("layers.0/test/neg",), ("z",), ("layers.0/test/neg",), ("z",)),
    )


def test_cached_shapes_are_dropped_at_the_end():
    model = parse(CHAIN)
    before = shapes_of(model)
    assert shapes_of(model) is before
    _edit(model).commit()
    assert shapes_of(model) is not before


def test_a_dead_chain_goes_with_its_weights_and_what_only_its_subgraphs_read():
    model = parse(
        """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[4] x, bool flag) => (float[4] y)
        <float[1] shared = {1.0}, float[1] own = {2.0}>
        {
            y = Add(x, shared)
            a = Add(x, own)
            c = Neg(x)
            dead = If (flag) <
                then_branch = t () => (float[4] p) { q = Neg(c)  p = Add(q, shared) },
                else_branch = e () => (float[4] r) { r = Neg(a) }
            >
            end = Abs(dead)
        }
        """
    )
    assert remove_dead([value_of(model, "end")]) == 4
    assert op_types(model) == ["Add"]
    assert list(model.graph.initializers) == ["shared"]
    assert [value.name for value in model.graph.inputs] == ["x", "flag"]
    assert remove_dead([value_of(model, "y")]) == 0


def test_what_a_dead_node_and_the_body_of_another_read_goes():
    model = parse(
        """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[4] x, bool flag) => (float[4] y)
        {
            y = Add(x, x)
            a = Abs(x)
            b = Neg(a)
            c = Exp(a)
            dead = If (flag) <
                then_branch = t () => (float[4] p) { q = Neg(a)  p = Add(q, a) },
                else_branch = e () => (float[4] r) { r = Neg(b) }
            >
            end = Add(b, dead)
            other = Sqrt(c)
        }
        """
    )
    first = value_of(model, "x")
    assert remove_dead([value_of(model, "end"), value_of(model, "other")]) == 6
    assert op_types(model) == ["Add"]
    # Of what stays only living nodes are readers.
    assert [use.node for use in first.uses()] == [node_of(model, "y")] * 2


def test_what_is_still_read_stays():
    model = parse(CHAIN)
    assert remove_dead([value_of(model, "a"), value_of(model, "y"), model.graph.inputs[0]]) == 0
    assert len(model.graph) == 4


def test_a_weight_that_is_an_input_too_stays():
    model = parse(
        """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[4] x, float[4] w = {1, 2, 3, 4}) => (float[4] y) { y = Relu(x)  dead = Add(x, w) }
        """
    )
    assert remove_dead([value_of(model, "dead")]) == 1
    assert "w" in model.graph.initializers
    assert [value.name for value in model.graph.inputs] == ["x", "w"]


@pytest.mark.parametrize("length", [3000])
def test_a_long_dead_chain_is_no_recursion(length):
    body = "".join(f"v{number + 1} = Neg(v{number})\n" for number in range(length))
    model = parse(f'<ir_version: 9, opset_import: ["" : 18]> g (float[4] v0) => (float[4] y) {{ {body} y = Abs(v0) }}')
    assert remove_dead([value_of(model, f"v{length}")]) == length
    assert op_types(model) == ["Abs"]


@pytest.mark.parametrize("branches", [50, 400])
def test_what_is_removed_is_looked_at_once_however_many_readers_and_outputs_there_are(branches, monkeypatch):
    parts = ", ".join(f"p{number}" for number in range(branches))
    body = "".join(f"r{number} = Add(p{number}, one)\n" for number in range(branches))
    rows = ", ".join(f"r{number}" for number in range(branches))
    model = parse(
        f"""
        <ir_version: 9, opset_import: ["" : 18]> g (float[{branches}] x) => (float[{branches}] y)
        <float[1] one = {{1.0}}>
        {{ y = Abs(x)  {parts} = Split <axis = 0, num_outputs = {branches}> (x)  {body} dead = Concat <axis = 0> ({rows}) }}
        """
    )
    dead = value_of(model, "dead")
    looked: list[str | None] = []
    uses = ir.Value.uses

    def counted(value):
        looked.append(value.name)
        return uses(value)

    monkeypatch.setattr(ir.Value, "uses", counted)
    assert remove_dead([dead]) == branches + 2
    assert op_types(model) == ["Abs"]
    assert not model.graph.initializers
    assert len(looked) <= 3 * branches + 4
