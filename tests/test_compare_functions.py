"""Diff sees through calls of local functions and into subgraphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from onnx import TensorProto, helper
from onnx_ir.passes.common import InlinePass

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_io import load
from tests.compare_helpers import HEAD, diff, lists

if TYPE_CHECKING:
    from pathlib import Path


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
    ("old", "new", "severity", "expected"),
    [
        ("carried", "other", "none", {}),
        ("Sub(t, carried)", "Sub(carried, t)", "moderate", {"re-wired": ["Sub last: input 0: inner -> subgraph input 2; input 1: subgraph input 2 -> inner"]}),
        ("Mul(carried, h)", "Mul(carried, x)", "moderate", {"re-wired": ["Mul inner: input 1: h -> input x"]}),
        ("Mul(carried, h)", "Mul <note = 1> (carried, h)", "minor", {"attributes": ["Mul inner: note absent -> 1"]}),
        ("Mul(carried, h)", "Add(carried, h)", "moderate", {"nodes removed": ["Mul inner"], "nodes added": ["Add inner"]}),
    ],
)  # fmt: skip
def test_subgraphs(old: str, new: str, severity: str, expected: dict[str, list[str]]):
    found = diff(LOOP, LOOP.replace(old, new))
    assert (found.severity, lists(found)) == (severity, expected)


def test_a_node_moved_out_of_a_branch_differs():
    def text(before: str, inside: str) -> str:
        return f"""{HEAD}
        g (bool f, float[4] x) => (float[4] y) {{ {before} [if] y = If (f) <
            then_branch = t () => (float[4] r) {{ {inside} [neg] r = Neg(q) }},
            else_branch = e () => (float[4] o) {{ [abs] o = Abs(x) }}> }}"""

    found = diff(text("", "[exp] q = Exp(x)"), text("[exp] q = Exp(x)", ""))
    assert (found.severity, lists(found)) == ("moderate", {"nodes removed": ["Exp exp"], "nodes added": ["Exp exp"]})


def test_a_model_with_functions_and_its_inlined_form_do_not_differ(cases_dir: Path):
    path = cases_dir / "f04_model_already_has_functions.onnx"
    inlined = load(path)
    InlinePass()(inlined)
    assert not inlined.functions
    found = diff(load(path), inlined)
    assert (found.severity, lists(found), found.affected_outputs) == ("none", {}, ())
    assert (found.sizes["nodes"].before, found.sizes["nodes"].after) == (39, 39)
    assert (found.sizes["stored_nodes"].before, found.sizes["stored_nodes"].after) == (23, 39)
    assert (
        found.notes
        == (
            "operator set local 1 -> not imported",
            "function local::DecoderLayer: 6 nodes -> absent",
            "function local::Double: 1 node -> absent",
            "function local::RMSNorm: 8 nodes -> absent",
            "nodes in the file, functions once: 23 -> 39",
            "metadata differs at 39 nodes",
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
    found = diff(FUNCTIONS, INLINED)
    assert (found.severity, lists(found)) == ("none", {})
    found = diff(FUNCTIONS.replace("slope = 0.5", "slope = 0.75"), INLINED)
    assert lists(found) == {"attributes": ["Elu call/elu (p): alpha 0.75 -> 0.5"]}
    found = diff(FUNCTIONS.replace("Clip(e, u)", "Clip(e, , u)"), INLINED)
    assert lists(found) == {
        "re-wired": ["Clip call/clip (q): input 1: nothing -> input w; input 2: input w -> nothing"]
    }


def test_a_change_in_a_body_is_listed_once_a_call():
    found = diff(FUNCTIONS, FUNCTIONS.replace("[clip] r = Clip(e, u)", "[neg] i = Neg(e) [clip] r = Clip(i, u)"))
    assert lists(found) == {"nodes added": ["Neg call/neg", "Neg again/neg"]}
    assert found.functions == {"local::Act": (2, 3)}


def test_a_function_that_gives_back_its_input():
    text = """
    <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
    g (float[B,4] x) => (float[B,4] y) { a = local.Same (x) y = Relu(a) }
    <opset_import: ["" : 18], domain: "local"> Same (v) => (v) { unused = Neg(v) }
    """
    found = diff(text, f"{HEAD} g (float[B,4] x) => (float[B,4] y) {{ y = Relu(x) d = Neg(x) }}")
    assert (found.severity, lists(found)) == ("none", {})


def test_functions_that_call_themselves_are_refused():
    text = """
    <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
    g (float[B,4] x) => (float[B,4] y) { y = local.F (x) }
    <opset_import: ["" : 18, "local" : 1], domain: "local"> F (v) => (r) { r = local.F (v) }
    """
    with pytest.raises(InputRefusedError, match=r"^model A: function local::F calls itself; export the model again\.$"):
        diff(text, text)


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
        diff(text, text)


def test_a_node_that_depends_on_itself_is_refused():
    info = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        [helper.make_node("Neg", ["z"], ["y"], "n"), helper.make_node("Abs", ["y"], ["z"])], "g", [], [info]
    )
    with pytest.raises(InputRefusedError, match=r"^model A: node 'n' depends on itself; export the model again\.$"):
        diff(helper.make_model(graph), helper.make_model(graph))
