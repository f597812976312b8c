"""Diff of two models: what is listed, in exact words, and what has no weight."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import graphsurgery
from graphsurgery.compare import diff_models
from graphsurgery.comparison.diff_report import LISTED, Size
from tests.compare_helpers import HEAD, diff, lists, model_of
from tests.model_io_helpers import write_model

if TYPE_CHECKING:
    from pathlib import Path


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


def test_a_model_and_itself():
    found = diff(BASE, BASE)
    assert (found.severity, found.changes(), lists(found)) == ("none", "no change", {})
    assert (found.affected_outputs, found.notes, found.functions) == ((), (), {})
    assert found.operators == dict.fromkeys(("Add", "Mul", "Neg", "Relu", "Softmax", "Sub"), (1, 1))


@pytest.mark.parametrize(
    ("old", "new", "severity", "expected", "affected"),
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
def test_one_change(old: str, new: str, severity: str, expected: dict[str, list[str]], affected: tuple[str, ...]):
    changed = BASE.replace(old, new)
    if "t)\n<" in new:
        changed = changed.replace("s = Neg(z)", "t = Neg(z)")
    assert changed != BASE
    found = diff(BASE, changed)
    assert (found.severity, lists(found), found.affected_outputs) == (severity, expected, affected)


def test_names_of_both_sides_are_given():
    found = diff(BASE, BASE.replace("[third]", "[other]").replace("<axis = 1>", "<axis = 0>"))
    assert lists(found) == {"attributes": ["Softmax third (other): axis 1 -> 0"]}


def test_a_node_without_a_name_is_called_by_what_it_makes():
    found = diff(BASE.replace("[third] ", ""), BASE.replace("[third] ", "").replace("<axis = 1>", "<axis = 0>"))
    assert lists(found) == {"attributes": ["Softmax c: axis 1 -> 0"]}


def test_long_lists_are_cut_and_counted():
    more = "\n".join(f"[extra{i}] e{i} = Exp(x)" for i in range(LISTED + 7))
    found = diff(BASE, BASE.replace("[sixth]", f"{more}\n[sixth]"))
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
    found = diff(text, text.replace("Sub(a, b)", "Sub(b, a)"))
    assert (found.severity, lists(found)) == (
        "minor",
        {"initializers": ["v data: other values", "w data: other values"]},
    )


def test_a_value_computed_twice_is_a_node_more():
    text = BASE.replace("[fifth] y = Sub(d, a)", "[again] e = Relu(x) [fifth] y = Sub(d, e)")
    found = diff(BASE, text)
    assert found.severity == "moderate"
    assert lists(found) == {"nodes added": ["Relu again"]}
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

    found = diff(layers(0, 1, 2, 3, 4, 5), layers(0, 1, 3, 4, 5))
    assert lists(found) == {"nodes removed": ["Mul mul2", "Relu act2", "Add add2"]}
    found = diff(layers(0, 1, 2), layers(0, 1, 2).replace("Relu(m", "Tanh(m"))
    assert found.changes() == "+3 -3 nodes"
    assert [item.name for item in found.nodes_removed.items] == ["act0", "act1", "act2"]


def test_notes_for_what_has_no_weight():
    other = BASE.replace("ir_version: 9", "ir_version: 10").replace("[B,4]", "[N,4]")
    changed = model_of(other)
    changed.metadata_props["recipe"] = "prefill"
    next(iter(changed.graph)).metadata_props["pass"] = "tidy"
    changed.graph.node(1).outputs[0].shape = ir.Shape([3, 4])
    base = model_of(BASE)
    base.graph.node(1).outputs[0].shape = ir.Shape(["B", 4])
    found = diff(base, changed)
    assert found.severity == "none"
    assert found.notes == (
        "IR version 9 -> 10",
        "symbols of dims renamed: B -> N",
        "metadata of the model: recipe",
        "metadata differs at 1 node",
        "declared type or shape differs at 1 value",
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
    found = diff(text, other)
    assert [str(item) for item in found.interface.items] == changes
    assert found.severity == ("major" if changes else "none")


def test_a_dim_without_a_name_is_a_symbol_of_its_own():
    def text(dims: str) -> str:
        return f"{HEAD} g (float[{dims}] x) => (float[Q,4] y) {{ y = Relu(x) }}"

    assert diff(text("B,4"), text("?,4")).notes == ("symbols of dims renamed: B -> ?",)
    assert diff(text("?,4"), text("?,4")).notes == ()
    # What was the same length as the output's need no longer be.
    assert lists(diff(text("Q,4"), text("?,4"))) == {"interface": ["input x shape: [Q, 4] -> [?, 4]"]}


def test_another_operator_set_counts_where_an_operator_was_redefined():
    def text(version: int) -> str:
        return f"""<ir_version: 6, opset_import: ["" : {version}]>
        g (float[B,4] x) => (float[B,4] y) {{ a = Softmax(x) b = Softmax(a) y = Sin(b) }}"""

    found = diff(text(11), text(13))
    assert (found.severity, lists(found)) == (
        "minor",
        {"operator versions": ["2 Softmax: operator version 11 -> 13"]},
    )
    assert found.changes() == "2 of another operator version"
    found = diff(text(13), text(14))
    assert (found.severity, found.notes) == ("none", ("operator set ai.onnx 13 -> 14",))


def test_a_nan_is_the_same_as_itself():
    node = helper.make_node("Elu", ["x"], ["y"], alpha=float("nan"))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:]))
    other = onnx.ModelProto.FromString(model.SerializeToString())
    assert diff(model, other).severity == "none"


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
    size = Size(before, after)
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
    found = diff(BASE, BASE)
    assert found.sizes["graph_bytes"] == Size(None, None)
    assert found.sizes["weight_bytes"] == Size(20, 20)


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
