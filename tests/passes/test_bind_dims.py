"""bind-dims: options, roles, names, contradictions and reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.contracts import EXACT_OUTPUTS_KEY
from graphsurgery.errors import UsageError
from graphsurgery.model_io import load
from graphsurgery.passes.bind_dims import BOUND_KEY, BindDims
from graphsurgery.pipeline import Pipeline
from graphsurgery.registry import make_pass
from tests.passes.bound_runs import assert_same, bind, dims_of, is_static, random_feeds, shape_nodes
from tests.small_models import op_types, parse, value_of

if TYPE_CHECKING:
    from graphsurgery.site_report import PassReport
    from tests.passes.bound_runs import Arrays

FLAT = """
<ir_version: 9, opset_import: ["" : 18]>
flat (int64[B,S] input_ids, float[B,S,4] x) => (float[B,N] y, int64[2] sizes, float[B,S,4] z)
<int64[1] rest = {-1}, int64 first = {0}, int64[1] axis = {0}>
{
    shape = Shape(x)
    rows = Gather(shape, first)
    row = Unsqueeze(rows, axis)
    target = Concat<axis = 0>(row, rest)
    y = Reshape(x, target)
    sizes = Shape(input_ids)
    z = Expand(x, shape)
}
"""

MASKED = """
<ir_version: 9, opset_import: ["" : 18]>
masked (int64[B,S] input_ids, int64[B,T] attention_mask, float[B,2,P,4] past_key, float[B,2,S,4] k)
    => (float[B,S] logits, float[B,2,N,4] present_key)
{
    present_key = Concat<axis = 2>(past_key, k)
    logits = Cast<to = 1>(input_ids)
}
"""


UNNAMED = """
<ir_version: 9, opset_import: ["" : 18]>
unnamed (int64[?,?] input_ids, float[?,2,?,4] past_key, float[?,2,?,4] k)
    => (float[?,?] logits, float[?,2,?,4] present_key, int64[4] sizes)
{
    present_key = Concat<axis = 2>(past_key, k)
    logits = Cast<to = 1>(input_ids)
    sizes = Shape(past_key)
}
"""


def bound(spec: str, text: str = FLAT) -> tuple[ir.Model, PassReport]:
    model = parse(text)
    return model, bind(model, spec)


def test_shape_arithmetic_becomes_constants():
    model, report = bound("batch=2,seq=3")
    assert op_types(model) == ["Reshape", "Constant", "Expand"]
    assert shape_nodes(model) == []
    assert (report.nodes_before, report.nodes_after) == (7, 3)
    assert [(site.id, site.status, site.reason, site.detail) for site in report.sites] == [
        ("dim:B", "rewritten", "bound to 2 as batch", {"role": "batch", "value": 2, "nodes_removed": 4}),
        ("dim:S", "rewritten", "bound to 3 as seq", {"role": "seq", "value": 3, "nodes_removed": 4}),
    ]
    declared = [dims_of(value) for value in (*model.graph.inputs, *model.graph.outputs)]
    assert declared == [[2, 3], [2, 3, 4], [2, 12], [2], [2, 3, 4]]
    assert "bind_dims/sizes_2x3x4" in model.graph.initializers
    assert_same(parse(FLAT), model, random_feeds(model, {}))


def test_every_output_is_promised_to_be_bitwise_equal():
    model, _ = bound("batch=2,seq=3")
    assert json.loads(model.metadata_props[EXACT_OUTPUTS_KEY]) == ["sizes", "y", "z"]


def test_one_dim_alone():
    model, report = bound("seq=3")
    # The Shape nodes depend on the batch as well.
    assert op_types(model) == ["Shape", "Gather", "Unsqueeze", "Concat", "Reshape", "Shape", "Expand"]
    assert [site.status for site in report.sites] == ["skipped", "rewritten"]
    assert report.sites[0].reason == "stays symbolic; bind it with batch=NUMBER"
    assert report.warnings == ["Still symbolic: B (batch); bind them too, by role or with dims=[NAME:NUMBER]."]
    assert dims_of(model.graph.outputs[2]) == ["B", 3, 4]
    assert_same(parse(FLAT), model, random_feeds(model, {"B": 5}))


def test_without_options_nothing_is_bound():
    model, report = bound("")
    assert not report.changed
    assert [(site.id, site.kinds, site.status) for site in report.sites] == [
        ("dim:B", ("dim", "batch"), "skipped"),
        ("dim:S", ("dim", "seq"), "skipped"),
    ]
    assert op_types(model) == op_types(parse(FLAT))


@pytest.mark.parametrize(
    "spelling", ["dims=[B:2,S:3]", "dims=['B=2','S = 3']", "batch=2,dims=[S:3]", "seq=3,dims='B=2'"]
)
def test_names_and_roles_bind_the_same(spelling):
    by_role, by_name = bound("batch=2,seq=3")[0], bound(spelling)[0]
    assert op_types(by_name) == op_types(by_role)
    assert [dims_of(value) for value in by_name.graph.outputs] == [dims_of(value) for value in by_role.graph.outputs]


def test_options_in_python_and_as_text():
    made = BindDims(batch=1, seq=128, past=0, dims=("s8=64",))
    assert str(made) == "bind-dims{batch=1,seq=128,past=0,dims=['s8=64']}"
    assert make_pass(str(made)) == made
    assert make_pass({"name": "bind-dims", "batch_size": 1, "sequence": 128, "past": 0, "dims": ["s8=64"]}) == made


def test_a_second_run_changes_nothing():
    model, _ = bound("batch=2,dims=[S:3]")
    before = op_types(model)
    report = bind(model, "batch=2,dims=[S:3]")
    assert not report.changed
    assert [(site.id, site.status, site.reason) for site in report.sites] == [
        ("dim:batch", "skipped", "batch is 2 already"),
        ("dim:S", "skipped", "S is 3 already"),
    ]
    assert op_types(model) == before
    assert json.loads(model.metadata_props[BOUND_KEY]) == {"B": 2, "S": 3}


def test_one_by_one_is_the_same_as_at_once():
    at_once, one_by_one = bound("batch=2,seq=3")[0], parse(FLAT)
    Pipeline(["bind-dims{seq=3}", "bind-dims{batch=2}"], check=True)(one_by_one)
    assert op_types(one_by_one) == op_types(at_once)
    assert json.loads(one_by_one.metadata_props[BOUND_KEY]) == {"S": 3, "B": 2}


def test_selectors():
    model = parse(FLAT)
    report = bind(model, "batch=2,seq=3,exclude=[seq]")
    assert [(site.id, site.status, site.reason) for site in report.sites] == [
        ("dim:B", "rewritten", "bound to 2 as batch"),
        ("dim:S", "skipped", "not selected"),
    ]
    assert dims_of(model.graph.inputs[0]) == [2, "S"]


def test_a_static_export_is_folded_too():
    text = FLAT.replace("B,S", "2,3")
    model = parse(text)
    report = bind(model, "batch=2,seq=3")
    assert [(site.id, site.status, site.reason) for site in report.sites] == [
        ("dim:batch", "rewritten", "batch is 2 already; shape arithmetic was folded"),
        ("dim:seq", "rewritten", "seq is 3 already; shape arithmetic was folded"),
    ]
    assert shape_nodes(model) == []
    assert not bind(model, "batch=2,seq=3").changed


def test_sizes_without_a_name():
    model = parse(UNNAMED)
    report = bind(model, "batch=2,past=3")
    assert [(site.id, site.kinds, site.status) for site in report.sites] == [
        ("dim:input_ids.0", ("dim", "batch"), "rewritten"),
        ("dim:input_ids.1", ("dim", "seq"), "skipped"),
        ("dim:past_key.0", ("dim", "batch"), "rewritten"),
        ("dim:past_key.2", ("dim", "past"), "rewritten"),
        ("dim:k.0", ("dim",), "skipped"),
        ("dim:k.2", ("dim",), "skipped"),
    ]
    assert [str(value.shape) for value in model.graph.inputs] == ["[2,None]", "[2,2,3,4]", "[None,2,None,4]"]
    assert BOUND_KEY not in model.metadata_props
    assert_same(parse(UNNAMED), model, _unnamed_feeds())


def _unnamed_feeds() -> Arrays:
    floats = np.random.default_rng(1).standard_normal
    return {
        "input_ids": np.ones((2, 5), np.int64),
        "past_key": floats((2, 2, 3, 4)).astype(np.float32),
        "k": floats((2, 2, 5, 4)).astype(np.float32),
    }


def test_digits_are_numbers():
    model = parse(FLAT.replace("float[B,S,4] x", "float[B,S,D] x"))
    value_of(model, "x").shape = ir.Shape(["B", "S", "4"])
    bind(model, "batch=2,seq=3")
    assert dims_of(model.graph.inputs[1]) == [2, 3, 4]
    assert shape_nodes(model) == []


def test_total_follows_from_past_and_seq():
    model, report = bound("batch=1,seq=4,past=3", MASKED)
    assert [(site.id, site.detail["value"]) for site in report.sites] == [
        ("dim:B", 1),
        ("dim:S", 4),
        ("dim:T", 7),
        ("dim:P", 3),
    ]
    assert [dims_of(value) for value in model.graph.outputs] == [[1, 4], [1, 2, 7, 4]]


def test_past_follows_from_total_and_seq():
    model, _ = bound("total=7,seq=4", MASKED)
    assert dims_of(model.graph.inputs[2]) == ["B", 2, 3, 4]


def test_names_alone_are_taken_as_they_are():
    model, _ = bound("dims=[B:1,S:4,P:3,T:20]", MASKED)
    assert dims_of(model.graph.inputs[1]) == [1, 20]
    model, report = bound("dims=[S:4,P:3]", MASKED)
    assert [site.id for site in report.sites if site.status == "skipped"] == ["dim:B", "dim:T"]


def test_a_past_of_zero_is_no_news_where_there_is_none():
    model, report = bound("batch=2,seq=3,past=0")
    assert [(site.id, site.status) for site in report.sites][-1] == ("dim:past", "rewritten")
    assert report.sites[-1].reason == "past is 0 already; shape arithmetic was folded"
    assert shape_nodes(model) == []


ERRORS = [
    (FLAT, "seq=3,dims=[S:4]", "Dim 'S' cannot be both 4 (S=4) and 3 (seq=3)."),
    (
        MASKED.replace("[B,S] input_ids", "[B,B] input_ids"),
        "batch=2,seq=3",
        "Dim 'B' cannot be both 3 (seq=3) and 2 (batch=2).",
    ),
    (
        MASKED.replace("[B,S] input_ids", "[B,64] input_ids"),
        "seq=3",
        "Axis 1 of input 'input_ids' cannot be both 3 (seq=3) and 64 (its fixed size).",
    ),
    (
        MASKED,
        "seq=4,past=3,total=9",
        "Dim 'T' cannot be both 7 (past + seq, with past=3 and seq=4) and 9 (total=9).",
    ),
    (
        MASKED.replace("[B,T]", "[B,R]").replace("R]", "7]"),
        "seq=4,past=4",
        "The mask's width cannot be both 8 (past + seq, with past=4 and seq=4) and 7 (its fixed size).",
    ),
    (
        MASKED,
        "seq=4,total=3",
        "No size of dim 'P' makes T equal to P + S (past + seq), with seq=4 and total=3.",
    ),
    (FLAT, "dims=[X:4]", "Unknown symbolic size: 'X'; there are B, S."),
    (MASKED.replace("B,", "batch,"), "dims=[bath:4]", "Unknown symbolic size: 'bath'; did you mean batch?"),
    (FLAT, "dims=[7:8]", "Dim '7' cannot be both 8 (7=8) and 7 (its fixed size)."),
    (FLAT.replace("B,S", "2,3"), "dims=[B:4]", "Unknown symbolic size: 'B'; all sizes of the inputs are fixed."),
    (
        FLAT,
        "past=7",
        "Option past=7 of pass bind-dims: no input of the model has a size of that role; its roles are batch (B), seq (S).",
    ),
    (
        '<ir_version: 9, opset_import: ["" : 18]> g (float[N] x) => (float[N] y) { y = Neg(x) }',
        "total=7",
        (
            "Option total=7 of pass bind-dims: no input of the model has a size of that role; "
            "none of its sizes has a role: bind them by name with dims=."
        ),
    ),
    (FLAT, "seq=0", "Option seq=0 of pass bind-dims must be 1 or more."),
    (FLAT, "past=-1", "Option past=-1 of pass bind-dims must be 0 or more."),
    (FLAT, "dims=[S]", "Option dims of pass bind-dims takes NAME=NUMBER or NAME:NUMBER, not 'S'."),
    (FLAT, "dims=[S:-1]", "Option dims of pass bind-dims takes NAME=NUMBER or NAME:NUMBER, not 'S:-1'."),
    (FLAT, "dims=[S:1,S:1]", "Option dims of pass bind-dims gives 'S' twice; keep one."),
    (
        FLAT.replace("int64[1] rest = {-1}", "int64[1] rest = {40}"),
        "batch=2,seq=3",
        (
            "The graph cannot run with batch=2 and seq=3: node 'y' (Reshape) needs equal sizes for the number of "
            "elements before and after and gets 4*B*S = 24 and 40*B = 80."
        ),
    ),
]


@pytest.mark.parametrize(("text", "spec", "message"), ERRORS, ids=[message[:40] for _, _, message in ERRORS])
def test_contradictions(text, spec, message):
    model = parse(text)
    before = op_types(model)
    with pytest.raises(UsageError) as caught:
        bind(model, spec)
    assert str(caught.value) == message
    # Nothing was changed: the model can still be used.
    assert op_types(model) == before
    assert all(not is_static(value) for value in model.graph.inputs if value.name == "k")


def test_a_sum_that_is_given_needs_its_parts():
    text = MASKED.replace("[B,T]", "[B,Q]")
    model = parse(text)
    value_of(model, "attention_mask").shape = ir.Shape(["B", "P + S"])
    with pytest.raises(UsageError) as caught:
        bind(model, "total=7")
    assert str(caught.value) == (
        "Option total=7 of pass bind-dims does not tell the sizes in 'P + S' apart; bind all of them but one too."
    )
    bind(model, "total=7,seq=3")
    assert [dims_of(value)[1:] for value in model.graph.inputs][:3] == [[3], [7], [2, 4, 4]]


def test_a_size_that_would_be_negative():
    model = parse(MASKED)
    value_of(model, "past_key").shape = ir.Shape(["B", 2, "T - S", 4])
    with pytest.raises(UsageError) as caught:
        bind(model, "dims=[T:3,S:4]")
    assert str(caught.value) == "Axis 2 of input 'past_key' is T - S, which would be -1 with S=4 and T=3."
    bind(model, "total=7,seq=4")
    assert dims_of(model.graph.inputs[2]) == ["B", 2, 3, 4]


def test_an_earlier_binding_is_held_to():
    model, _ = bound("batch=2,seq=3")
    with pytest.raises(UsageError) as caught:
        bind(model, "dims=[S:4]")
    assert str(caught.value) == "Dim 'S' cannot be both 4 (S=4) and 3 (its fixed size)."


def test_no_data_file_is_read(fixtures_dir, tmp_path):
    shutil.copy(fixtures_dir / "llama_external" / "model.onnx", tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx")
    report = bind(model, "batch=1,seq=16,past=0")
    assert (report.nodes_before, report.nodes_after) == (260, 230)


# ---- roles that a model does not have ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before", "options", "reason"),
    [
        ("llama", None, "batch=1,seq=4,past=3,context=16", "no input of the model has a size of that role"),
        ("llama_static", "context=40", "batch=1,seq=4,context=16", "it is 40 already"),
    ],
)
def test_a_role_that_says_nothing_of_the_model_is_an_error_or_skipped(
    name: str, before: str | None, options: str, reason: str
):
    def fresh() -> ir.Model:
        model = load(Path(__file__).parents[2] / "fixtures" / name / "model.onnx")
        if before is not None:
            Pipeline([f"bind-dims{{{before}}}"])(model)
        return model

    with pytest.raises(UsageError, match="context"):
        Pipeline([f"bind-dims{{{options}}}"])(fresh())
    report = Pipeline([f"bind-dims{{{options},missing=skip}}"])(fresh())
    (site,) = [site for site in report.passes[0].sites if site.id == "dim:context"]
    assert (site.status, site.reason) == ("skipped", reason)
    assert report.passes[0].count("rewritten") >= 2
