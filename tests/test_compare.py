"""Diff of two models: what is listed, in exact words, and what does not count."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes.common import InlinePass

import graphsurgery
from graphsurgery import compare
from graphsurgery.compare import diff_models
from graphsurgery.comparison import unfolding
from graphsurgery.comparison.diff_report import LISTED
from graphsurgery.errors import InputRefusedError
from graphsurgery.model_io import load
from tests.model_io_helpers import Weight, add_model, external_tensor, write_model

if TYPE_CHECKING:
    from pathlib import Path

    from graphsurgery.compare import ModelDiff
    from graphsurgery.comparison.cells import View

HEAD = '<ir_version: 9, opset_import: ["" : 18]>'

BASE = f"""
{HEAD}
base (float[B,4] x, float[B,4] z) => (float[B,4] y, float[B,4] s)
<float[4] w = {{1.0, 2.0, 3.0, 4.0}}, float[1] eps = {{0.5}}>
{{
    [first] a = Relu(x)
    [second] b = Mul(a, w)
    [third] c = Softmax <axis = 1> (b)
    [fourth] d = Add(c, eps)
    [fifth] y = Sub(d, a)
    [sixth] s = Neg(z)
}}
"""


def _diff(a: str | onnx.ModelProto | ir.Model, b: str | onnx.ModelProto | ir.Model) -> ModelDiff:
    return diff_models(_model(a), _model(b)).models[0]


def _model(given: str | onnx.ModelProto | ir.Model) -> ir.Model:
    if isinstance(given, ir.Model):
        return given
    return ir.from_proto(onnx.parser.parse_model(given) if isinstance(given, str) else given)


def _lists(found: ModelDiff) -> dict[str, list[str]]:
    return {heading: [str(item) for item in listing.items] for heading, listing in found.lists()}


# --- what is listed ---------------------------------------------------------------------------------------------------


def test_a_model_and_itself():
    found = _diff(BASE, BASE)
    assert (found.severity, found.changes(), _lists(found)) == ("none", "no change", {})
    assert (found.affected_outputs, found.notes, found.functions) == ((), (), {})
    assert found.operators == dict.fromkeys(("Add", "Mul", "Neg", "Relu", "Softmax", "Sub"), (1, 1))


@pytest.mark.parametrize(
    ("old", "new", "severity", "lists", "affected"),
    [
        (
            "<axis = 1>",
            "<axis = 0>",
            "minor",
            {"attributes": ["Softmax third: axis 1 -> 0"]},
            ("y",),
        ),
        (
            "<axis = 1>",
            "",
            "minor",
            {"attributes": ["Softmax third: axis 1 -> absent"]},
            ("y",),
        ),
        (
            "{0.5}",
            "{0.25}",
            "minor",
            {"initializers": ["eps data: other values"]},
            ("y",),
        ),
        (
            "float[1] eps = {0.5}",
            "float eps = {0.5}",
            "minor",
            {"initializers": ["eps shape: [1] -> []"]},
            ("y",),
        ),
        (
            "float[1] eps = {0.5}",
            "double[1] eps = {0.5}",
            "minor",
            {"initializers": ["eps dtype: FLOAT -> DOUBLE"]},
            ("y",),
        ),
        (
            "float[1] eps = {0.5}",
            "float[1] eps = {0.5}, int64[2] more = {1, 2}",
            "minor",
            {"initializers": ["more added: INT64 [2]"]},
            (),
        ),
        (
            "[fourth] d = Add(c, eps)",
            "[new] n = Identity(c) [fourth] d = Add(n, eps)",
            "moderate",
            {"nodes added": ["Identity new"]},
            ("y",),
        ),
        (
            "[fifth] y = Sub(d, a)",
            "[fifth] y = Sub(a, d)",
            "moderate",
            {"re-wired": ["Sub fifth: input 0: fourth -> first; input 1: first -> fourth"]},
            ("y",),
        ),
        (
            "[fifth] y = Sub(d, a)",
            "[fifth] y = Sub(d, z)",
            "moderate",
            {"re-wired": ["Sub fifth: input 1: first -> input z"]},
            ("y",),
        ),
        (
            "[sixth] s = Neg(z)",
            "[sixth] s = Abs(z)",
            "moderate",
            {"nodes removed": ["Neg sixth"], "nodes added": ["Abs sixth"]},
            ("s",),
        ),
        (
            "[sixth] s = Neg(z)",
            "[sixth] s = Neg(z) [seventh] dead = Exp(z)",
            "moderate",
            {"nodes added": ["Exp seventh"]},
            (),
        ),
        (
            "float[B,4] x,",
            "float16[B,4] x,",
            "major",
            {"interface": ["input x dtype: FLOAT -> FLOAT16"]},
            (),
        ),
        (
            "(float[B,4] y,",
            "(float[1,4] y,",
            "major",
            {"interface": ["output y shape: [B, 4] -> [1, 4]"]},
            (),
        ),
        (
            "float[B,4] z) =>",
            "float[B,4] z, int64[N] more) =>",
            "major",
            {"interface": ["input more added: INT64 [N]"]},
            (),
        ),
        (
            "float[B,4] y, float[B,4] s)",
            "float[B,4] s, float[B,4] y)",
            "major",
            {"interface": ["order of outputs: y, s -> s, y"]},
            (),
        ),
        (
            ", float[B,4] s)",
            ")",
            "major",
            {"interface": ["output s removed: FLOAT [B, 4]"]},
            ("s",),
        ),
        (
            "s)\n<float[4] w",
            "t)\n<float[4] w",
            "major",
            {"interface": ["output s: s -> t"]},
            (),
        ),
    ],
)
def test_one_change(old: str, new: str, severity: str, lists: dict[str, list[str]], affected: tuple[str, ...]):
    changed = BASE.replace(old, new)
    if "t)\n<" in new:
        changed = changed.replace("s = Neg(z)", "t = Neg(z)")
    assert changed != BASE
    found = _diff(BASE, changed)
    assert (found.severity, _lists(found), found.affected_outputs) == (severity, lists, affected)


def test_names_of_both_sides_are_given():
    found = _diff(BASE, BASE.replace("[third]", "[other]").replace("<axis = 1>", "<axis = 0>"))
    assert _lists(found) == {"attributes": ["Softmax third (other): axis 1 -> 0"]}


def test_a_node_without_a_name_is_called_by_what_it_makes():
    found = _diff(BASE.replace("[third] ", ""), BASE.replace("[third] ", "").replace("<axis = 1>", "<axis = 0>"))
    assert _lists(found) == {"attributes": ["Softmax c: axis 1 -> 0"]}


def test_long_lists_are_cut_and_counted():
    more = "\n".join(f"[extra{i}] e{i} = Exp(x)" for i in range(LISTED + 7))
    found = _diff(BASE, BASE.replace("[sixth]", f"{more}\n[sixth]"))
    assert found.nodes_added.count == LISTED + 7
    assert [item.name for item in found.nodes_added.items] == [f"extra{i}" for i in range(LISTED)]
    assert found.changes() == f"+{LISTED + 7} -0 nodes"


def test_twin_branches_with_their_weights_exchanged_are_told_by_their_initializers():
    text = f"""
    {HEAD}
    twins (float[B,4] x) => (float[B,4] y)
    <float[4] v = {{1.0, 1.0, 1.0, 1.0}}, float[4] w = {{2.0, 2.0, 2.0, 2.0}}>
    {{ [one] a = Mul(x, v) [two] b = Mul(x, w) [end] y = Sub(a, b) }}
    """
    found = _diff(text, text.replace("Sub(a, b)", "Sub(b, a)"))
    assert (found.severity, _lists(found)) == (
        "minor",
        {"initializers": ["v data: other values", "w data: other values"]},
    )


def test_a_value_computed_twice_is_a_node_more():
    text = BASE.replace("[fifth] y = Sub(d, a)", "[again] e = Relu(x) [fifth] y = Sub(d, e)")
    found = _diff(BASE, text)
    assert found.severity == "moderate"
    assert _lists(found) == {"nodes added": ["Relu again"]}
    # The expression is the same.
    assert found.affected_outputs == ()


def test_a_removed_layer_is_named_and_no_other():
    def layers(*numbers: int) -> str:
        weights = ", ".join(f"float[1] w{n} = {{{n}.0}}" for n in range(6))
        lines, value = [], "x"
        for n in numbers:
            lines.append(
                f"[mul{n}] m{n} = Mul({value}, w{n}) [act{n}] r{n} = Relu(m{n}) [add{n}] h{n} = Add(r{n}, {value})"
            )
            value = f"h{n}"
        body = "\n".join(lines)
        return f"{HEAD} g (float[B,4] x) => (float[B,4] y) <{weights}> {{ {body} [end] y = Neg({value}) }}"

    found = _diff(layers(0, 1, 2, 3, 4, 5), layers(0, 1, 3, 4, 5))
    assert _lists(found) == {"nodes removed": ["Mul mul2", "Relu act2", "Add add2"]}
    found = _diff(layers(0, 1, 2), layers(0, 1, 2).replace("Relu(m", "Tanh(m"))
    assert found.changes() == "+3 -3 nodes"
    assert [item.name for item in found.nodes_removed.items] == ["act0", "act1", "act2"]


# --- what has no weight -----------------------------------------------------------------------------------------------


def test_notes_for_what_has_no_weight():
    other = BASE.replace("ir_version: 9", "ir_version: 10").replace("[B,4]", "[N,4]")
    changed = _model(other)
    changed.metadata_props["recipe"] = "prefill"
    next(iter(changed.graph)).metadata_props["pass"] = "tidy"
    changed.graph.node(1).outputs[0].shape = ir.Shape([3, 4])
    base = _model(BASE)
    base.graph.node(1).outputs[0].shape = ir.Shape(["B", 4])
    found = _diff(base, changed)
    assert found.severity == "none"
    assert found.notes == (
        "IR version 9 -> 10",
        "symbols of dims renamed: B -> N",
        "metadata of the model: recipe",
        "the metadata of 1 nodes differs",
        "the declared type or shape of 1 values differs",
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "changes"),
    [
        (("B,S", "B,T"), "B,S", []),
        (("N,L", "N,M"), "N,L", []),
        (("B,S", "B,T"), "B,N", ["output y shape: [B, S] -> [B, N]"]),
        (("B,S", "B,S"), "B,S", ["input z shape: [B, T] -> [B, S]"]),
        (("B,8", "B,T"), "B,8", ["input x shape: [B, S] -> [B, 8]", "output y shape: [B, S] -> [B, 8]"]),
        (("B,S,1", "B,T"), "B,S", ["input x shape: [B, S] -> [B, S, 1]"]),
    ],
)
def test_symbols_may_be_renamed_one_to_one(inputs: tuple[str, str], outputs: str, changes: list[str]):
    text = HEAD + " g (float[B,S] x, float[B,T] z) => (float[B,S] y) { y = Relu(x) q = Neg(z) }"
    other = (
        f"{HEAD} g (float[{inputs[0]}] x, float[{inputs[1]}] z) => (float[{outputs}] y) {{ y = Relu(x) q = Neg(z) }}"
    )
    found = _diff(text, other)
    assert [str(item) for item in found.interface.items] == changes
    assert found.severity == ("major" if changes else "none")


def test_a_dim_without_a_name_is_a_symbol_of_its_own():
    def text(dims: str) -> str:
        return f"{HEAD} g (float[{dims}] x) => (float[Q,4] y) {{ y = Relu(x) }}"

    assert _diff(text("B,4"), text("?,4")).notes == ("symbols of dims renamed: B -> ?",)
    assert _diff(text("?,4"), text("?,4")).notes == ()
    # What was the same length as the output's need no longer be.
    assert _lists(_diff(text("Q,4"), text("?,4"))) == {"interface": ["input x shape: [Q, 4] -> [?, 4]"]}


def test_another_operator_set_counts_where_an_operator_was_redefined():
    def text(version: int) -> str:
        return f"""<ir_version: 6, opset_import: ["" : {version}]>
        g (float[B,4] x) => (float[B,4] y) {{ a = Softmax(x) b = Softmax(a) y = Sin(b) }}"""

    found = _diff(text(11), text(13))
    assert (found.severity, _lists(found)) == (
        "minor",
        {"operator versions": ["2 Softmax: operator version 11 -> 13"]},
    )
    assert found.changes() == "2 of another operator version"
    found = _diff(text(13), text(14))
    assert (found.severity, found.notes) == ("none", ("operator set ai.onnx 13 -> 14",))


def test_a_nan_is_the_same_as_itself():
    node = helper.make_node("Elu", ["x"], ["y"], alpha=float("nan"))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:]))
    other = onnx.ModelProto.FromString(model.SerializeToString())
    assert _diff(model, other).severity == "none"


# --- subgraphs --------------------------------------------------------------------------------------------------------

LOOP = f"""
{HEAD}
loops (int64 n, float[B,4] x) => (float[B,4] y)
<bool go = {{1}}>
{{
    h = Relu(x)
    [loop] y = Loop (n, go, x) <body = body (int64 i, bool c, float[B,4] carried) => (bool k, float[B,4] next)
        {{ k = Identity(c) [inner] t = Mul(carried, h) [last] next = Sub(t, carried) }}>
}}
"""


@pytest.mark.parametrize(
    ("old", "new", "severity", "lists"),
    [
        ("carried", "other", "none", {}),
        ("Sub(t, carried)", "Sub(carried, t)", "moderate", {"re-wired": ["Sub last: input 0: inner -> subgraph input 2; input 1: subgraph input 2 -> inner"]}),
        ("Mul(carried, h)", "Mul(carried, x)", "moderate", {"re-wired": ["Mul inner: input 1: h -> input x"]}),
        ("Mul(carried, h)", "Mul <note = 1> (carried, h)", "minor", {"attributes": ["Mul inner: note absent -> 1"]}),
        ("Mul(carried, h)", "Add(carried, h)", "moderate", {"nodes removed": ["Mul inner"], "nodes added": ["Add inner"]}),
    ],
)  # fmt: skip
def test_subgraphs(old: str, new: str, severity: str, lists: dict[str, list[str]]):
    found = _diff(LOOP, LOOP.replace(old, new))
    assert (found.severity, _lists(found)) == (severity, lists)


def test_a_node_moved_out_of_a_branch_differs():
    def text(before: str, inside: str) -> str:
        return f"""{HEAD}
        g (bool f, float[4] x) => (float[4] y) {{ {before} [if] y = If (f) <
            then_branch = t () => (float[4] r) {{ {inside} [neg] r = Neg(q) }},
            else_branch = e () => (float[4] o) {{ [abs] o = Abs(x) }}> }}"""

    found = _diff(text("", "[exp] q = Exp(x)"), text("[exp] q = Exp(x)", ""))
    assert (found.severity, _lists(found)) == ("moderate", {"nodes removed": ["Exp exp"], "nodes added": ["Exp exp"]})


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_model_with_functions_and_its_inlined_form_do_not_differ(cases_dir: Path):
    path = cases_dir / "f04_model_already_has_functions.onnx"
    inlined = load(path)
    InlinePass()(inlined)
    assert not inlined.functions
    found = _diff(load(path), inlined)
    assert (found.severity, _lists(found), found.affected_outputs) == ("none", {}, ())
    assert (found.sizes["nodes"].before, found.sizes["nodes"].after) == (39, 39)
    assert (found.sizes["stored_nodes"].before, found.sizes["stored_nodes"].after) == (23, 39)
    assert (
        found.notes
        == (
            "operator set local 1 -> not imported",
            "function local::DecoderLayer: 6 nodes -> absent",
            "function local::Double: 1 nodes -> absent",
            "function local::RMSNorm: 8 nodes -> absent",
            "nodes in the file, functions once: 23 -> 39",
            "the metadata of 39 nodes differs",
        )
        or found.notes
    )


FUNCTIONS = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
g (float[B,4] x, float[4] w) => (float[B,4] y)
{ [call] a = local.Act <slope = 0.5> (x, w) [again] y = local.Act (a) }
<opset_import: ["" : 18], domain: "local">
Act <slope: float = 0.25> (v, u) => (r) { [elu] e = Elu <alpha : float = @slope> (v) [clip] r = Clip(e, u) }
"""

INLINED = f"""
{HEAD}
g (float[B,4] x, float[4] w) => (float[B,4] y)
{{ p = Elu <alpha = 0.5> (x) q = Clip(p, w) s = Elu <alpha = 0.25> (q) y = Clip(s) }}
"""


def test_attributes_of_calls_defaults_and_inputs_left_out():
    found = _diff(FUNCTIONS, INLINED)
    assert (found.severity, _lists(found)) == ("none", {})
    found = _diff(FUNCTIONS.replace("slope = 0.5", "slope = 0.75"), INLINED)
    assert _lists(found) == {"attributes": ["Elu call/elu (p): alpha 0.75 -> 0.5"]}
    found = _diff(FUNCTIONS.replace("Clip(e, u)", "Clip(e, , u)"), INLINED)
    assert _lists(found) == {
        "re-wired": ["Clip call/clip (q): input 1: nothing -> input w; input 2: input w -> nothing"]
    }


def test_a_change_in_a_body_is_listed_once_a_call():
    found = _diff(FUNCTIONS, FUNCTIONS.replace("[clip] r = Clip(e, u)", "[neg] i = Neg(e) [clip] r = Clip(i, u)"))
    assert _lists(found) == {"nodes added": ["Neg call/neg", "Neg again/neg"]}
    assert found.functions == {"local::Act": (2, 3)}


def test_a_function_that_gives_back_its_input():
    text = """
    <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
    g (float[B,4] x) => (float[B,4] y) { a = local.Same (x) y = Relu(a) }
    <opset_import: ["" : 18], domain: "local"> Same (v) => (v) { unused = Neg(v) }
    """
    found = _diff(text, f"{HEAD} g (float[B,4] x) => (float[B,4] y) {{ y = Relu(x) d = Neg(x) }}")
    assert (found.severity, _lists(found)) == ("none", {})


def test_functions_that_call_themselves_are_refused():
    text = """
    <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
    g (float[B,4] x) => (float[B,4] y) { y = local.F (x) }
    <opset_import: ["" : 18, "local" : 1], domain: "local"> F (v) => (r) { r = local.F (v) }
    """
    with pytest.raises(InputRefusedError, match=r"^model A: function local::F calls itself; export the model again\.$"):
        _diff(text, text)


def test_functions_that_unfold_without_end_are_refused():
    calls = "".join(
        f'<opset_import: ["" : 18, "local" : 1], domain: "local"> F{n} (v) => (r) '
        f"{{ a = local.F{n + 1} (v) r = local.F{n + 1} (a) }}"
        for n in range(40)
    )
    text = f"""
    <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
    g (float[B,4] x) => (float[B,4] y) {{ y = local.F0 (x) }} {calls}
    <opset_import: ["" : 18], domain: "local"> F40 (v) => (r) {{ r = Relu(v) }}
    """
    message = r"^model A: its functions unfold to 1099511627776 nodes, more than the 2000000 that are compared\.$"
    with pytest.raises(InputRefusedError, match=message):
        _diff(text, text)


def test_a_node_that_depends_on_itself_is_refused():
    info = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        [helper.make_node("Neg", ["z"], ["y"], "n"), helper.make_node("Abs", ["y"], ["z"])], "g", [], [info]
    )
    with pytest.raises(InputRefusedError, match=r"^model A: node 'n' depends on itself; export the model again\.$"):
        _diff(helper.make_model(graph), helper.make_model(graph))


# --- weights by reference ---------------------------------------------------------------------------------------------


def _external(offset: int = 0, location: str = "m.data", dims: tuple[int, ...] = (4,)) -> onnx.ModelProto:
    return add_model(
        [external_tensor(Weight("w", location, offset, dims)), external_tensor(Weight("v", location, 64, (4,)))]
    )


def test_external_tensors_are_compared_by_place_and_never_read():
    assert _diff(_external(), _external()).severity == "none"
    found = _diff(_external(), _external(offset=16))
    assert (found.severity, _lists(found)) == ("minor", {"initializers": ["w place: m.data[0:16] -> m.data[16:32]"]})
    found = _diff(_external(), _external(dims=(8,)))
    assert _lists(found) == {"initializers": ["w shape: [4] -> [8]"]}


def test_the_name_of_a_data_file_does_not_count():
    assert _diff(_external(), _external(location="elsewhere.data")).severity == "none"
    two = add_model([external_tensor(Weight("w", "a", 0, (4,))), external_tensor(Weight("v", "b", 0, (2, 2)))])
    renamed = add_model([external_tensor(Weight("w", "c", 0, (4,))), external_tensor(Weight("v", "d", 0, (2, 2)))])
    assert _diff(two, renamed).severity == "none"
    one = add_model([external_tensor(Weight("w", "c", 0, (4,))), external_tensor(Weight("v", "c", 16, (2, 2)))])
    assert _lists(_diff(two, one)) == {"initializers": ["w place: a[0:16] -> c[0:16]", "v place: b[0:16] -> c[16:32]"]}


def test_inline_and_external_data_cannot_be_told_equal():
    inline = add_model(
        [numpy_helper.from_array(np.zeros(4, np.float32), "w"), external_tensor(Weight("v", "m.data", 64, (4,)))]
    )
    assert _lists(_diff(inline, _external())) == {"initializers": ["w place: inline -> m.data[0:16]"]}


def test_a_tied_weight_stored_twice_is_an_initializer_more():
    text = f"{HEAD} g (float[1] x) => (float[1] y) <float[1] w = {{3.0}}> {{ a = Mul(x, w) y = Add(a, w) }}"
    other = text.replace("w = {3.0}", "w = {3.0}, float[1] v = {3.0}").replace("Add(a, w)", "Add(a, v)")
    found = _diff(text, other)
    assert (found.severity, _lists(found)) == ("minor", {"initializers": ["v added: FLOAT [1]"]})
    assert found.notes == ("initializers: 1 -> 2",)
    assert _lists(_diff(other, text)) == {"initializers": ["v removed: FLOAT [1]"]}


def test_defaults_of_inputs(cases_dir: Path):
    path = cases_dir / "s07_weights_are_also_graph_inputs.onnx"
    other = load(path)
    name = other.graph.outputs[0].producer().inputs[1].name  # type: ignore[union-attr]
    other.graph.initializers[name].const_value = ir.tensor(np.zeros((16, 40), np.float32))  # type: ignore[index]
    found = _diff(load(path), other)
    assert found.severity == "minor"
    assert [item.name for item in found.initializers.items] == [name]
    assert found.affected_outputs == (other.graph.outputs[0].name,)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "percent", "growth"),
    [
        (100, 100, 0.0, "neutral"),
        (100, 104, 4.0, "neutral"),
        (100, 105, 5.0, "warning"),
        (100, 109, 9.0, "warning"),
        (100, 110, 10.0, "blocking"),
        (100, 99, -1.0, "neutral"),
        (100, 98, -2.0, "improvement"),
        (0, 0, 0.0, "neutral"),
        (0, 1, None, "blocking"),
        (None, 1, None, "neutral"),
    ],
)
def test_growth(before: int | None, after: int | None, percent: float | None, growth: str):
    size = compare.Size(before, after)
    assert (size.percent, size.growth) == (percent, growth)


def test_sizes_of_files(tmp_path: Path):
    a, b = write_model(tmp_path / "a", weights=20, rows=8), write_model(tmp_path / "b", weights=22, rows=8)
    found = graphsurgery.diff(a, b).models[0]
    assert (found.sizes["nodes"].before, found.sizes["nodes"].after) == (20, 22)
    assert (found.sizes["weight_bytes"].before, found.sizes["weight_bytes"].after) == (640, 704)
    assert (found.sizes["graph_bytes"].before, found.sizes["graph_bytes"].after) == (a.stat().st_size, b.stat().st_size)
    assert found.growth == "blocking"
    assert found.to_data()["sizes"]["nodes"] == {"before": 20, "after": 22, "percent": 10.0, "growth": "blocking"}


def test_sizes_of_models_in_memory():
    found = _diff(BASE, BASE)
    assert found.sizes["graph_bytes"] == compare.Size(None, None)
    assert found.sizes["weight_bytes"] == compare.Size(20, 20)


# --- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_moe_grouped", "gpt_oss_batched", "optimum_qwen3_moe", "genai_gptoss"])
def test_an_export_and_itself_do_not_differ(name: str, fixtures_dir: Path):
    path = fixtures_dir / name / "model.onnx"
    report = graphsurgery.diff(path, path)
    assert (report.severity, report.growth, report.models[0].notes) == ("none", "neutral", ())


def test_every_case_differs_from_itself_in_nothing(cases_dir: Path):
    found = {}
    for path in sorted(cases_dir.glob("*.onnx")):
        if "s04" not in path.name:
            found[path.name] = diff_models(path, path).severity
    assert len(found) > 20
    assert set(found.values()) == {"none"}


def test_two_exports_of_one_model(fixtures_dir: Path):
    report = graphsurgery.diff(fixtures_dir / "llama" / "model.onnx", fixtures_dir / "llama_external" / "model.onnx")
    found = report.models[0]
    assert report.severity == "minor"
    assert [heading for heading, _ in found.lists()] == ["initializers"]
    assert {item.what for item in found.initializers.items} == {"place"}


def test_the_report_is_json(fixtures_dir: Path):
    report = graphsurgery.diff(fixtures_dir / "llama" / "model.onnx", fixtures_dir / "llama_merged" / "model.onnx")
    data = json.loads(report.to_json())
    assert (data["schema"], data["kind"], data["severity"]) == (1, "diff", "minor")
    assert data["models"][0]["initializers"]["count"] == len(data["models"][0]["initializers"]["items"]) == 7
    assert report.to_json() == graphsurgery.diff(report.a, report.b).to_json()


# --- cost -------------------------------------------------------------------------------------------------------------


def _layers(count: int, *, extra: bool = False, inline: bool = False, without: int = -1) -> onnx.ModelProto:
    """``count`` layers of three heads each: ten nodes a layer, eleven with the extra one."""
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []
    hidden = "x"
    for layer in range(count):
        heads = []
        for head in range(3):
            name = f"l{layer}h{head}"
            if inline:
                weights.append(numpy_helper.from_array(np.zeros(4, np.float32), name))
            else:
                weights.append(external_tensor(Weight(name, "m.data", 16 * len(weights), (4,))))
            nodes.append(helper.make_node("MatMul", [hidden, name], [f"{name}m"]))
            nodes.append(helper.make_node("Softmax", [f"{name}m"], [f"{name}s"], axis=-1))
            nodes.append(helper.make_node("Mul", [f"{name}s", "x"], [f"{name}g"]))
            heads.append(f"{name}g")
        if extra:
            nodes.append(helper.make_node("Identity", [heads[0]], [f"l{layer}i"]))
            heads[0] = f"l{layer}i"
        if layer == without:
            del nodes[-9:]
            continue
        hidden = f"l{layer}"
        nodes.append(helper.make_node("Concat", heads, [hidden], axis=-1))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 4]) for name in ("x", hidden)]
    infos[1].name = "y"
    nodes.append(helper.make_node("Neg", [hidden], ["y"]))
    return helper.make_model(helper.make_graph(nodes, "g", infos[:1], infos[1:], weights), ir_version=10)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch):
    """Counts the steps that one comparison takes."""

    def count(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[int, ModelDiff]:
        views: list[View] = []

        def unfold(model: ir.Model, who: str) -> View:
            views.append(unfolding.unfold(model, who))
            return views[-1]

        monkeypatch.setattr(compare, "unfold", unfold)
        found = _diff(a, b)
        return sum(view.visits for view in views), found

    return count


_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "no change"),
    "a node in every layer": ({"extra": True}, "+{layers} -0 nodes"),
    "a layer less": ({"without": 2}, "+0 -10 nodes"),
    "all weights, and a node in every layer": (
        {"inline": True, "extra": True},
        "+{layers} -0 nodes, {weights} of the initializers",
    ),
}


@pytest.mark.parametrize("change", list(_CHANGES))
def test_steps_are_linear_in_nodes(change: str, steps):
    options, text = _CHANGES[change]
    counted = []
    for layers in (25, 100):
        count, found = steps(_layers(layers), _layers(layers, **options))
        assert found.changes() == text.format(layers=layers, weights=3 * layers)
        counted.append(count)
    assert counted[1] <= 4.1 * counted[0]
    assert counted[1] <= 40 * 1000


@pytest.mark.full
@pytest.mark.parametrize("change", list(_CHANGES))
def test_fifty_thousand_nodes(change: str, steps):
    options, text = _CHANGES[change]
    count, found = steps(_layers(5000), _layers(5000, **options))
    assert found.sizes["nodes"].before == 50_001
    assert found.changes() == text.format(layers=5000, weights=15000)
    assert count <= 40 * 50_000
