"""bind-dims inside branches, loops and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.passes.bound_runs import assert_same, bind, dims_of, random_feeds, run, shape_nodes
from tests.small_models import op_types, parse

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.site_report import PassReport
    from tests.passes.bound_runs import Arrays

BRANCHES = """
<ir_version: 9, opset_import: ["" : 18]>
branches (int64[B,S] input_ids, float[B,S,4] x) => (float[B,S,4] y, float[B,S,4] z)
<int64 one = {1}>
{
    shape = Shape(input_ids)
    s = Gather(shape, one)
    single = Equal(s, one)
    y = If (single) <
        then_branch = then_part () => (float[B,S,4] t) { t = Neg(x) },
        else_branch = else_part () => (float[B,S,4] e) { t = Exp(x)  e = Abs(t) }
    >
    several = Not(single)
    q = If (several) <
        then_branch = then_part2 () => (float[B,S,4] t2) <float[1] c = {2.0}> { t = Neg(x)  t2 = Mul(t, c) },
        else_branch = else_part2 () => (float[B,S,4] e2) { e2 = Identity(x) }
    >
    whole = Shape(q)
    r = Reshape(q, whole)
    z = Add(r, y)
}
"""

OPEN_BRANCH = """
<ir_version: 9, opset_import: ["" : 18]>
open_branch (int64[B,S] input_ids, float[B,S,4] x, bool flag) => (float[N,M] y, int64[3] sizes)
<int64[1] flat = {-1}, int64[1] first = {0}>
{
    y, sizes = If (flag) <
        then_branch = then_part () => (float[A,C] t, int64[3] u) {
            u = Shape(x)
            rows = Gather(u, first)
            wanted = Concat<axis = 0>(rows, flat)
            t = Reshape(x, wanted)
        },
        else_branch = else_part () => (float[A2,C2] e, int64[3] v) {
            of_x = Shape(x)
            v = Neg(of_x)
            wide = Concat<axis = 0>(flat, first)
            narrow = Abs(wide)
            n = Neg(x)
            e = Flatten<axis = 1>(n)
        }
    >
}
"""

LOOP = """
<ir_version: 9, opset_import: ["" : 18]>
loop (int64[B,S] input_ids, float[B,S,4] x, float[B,P,4] past) => (float[B,R,4] y)
<int64 one = {1}, bool yes = {1}>
{
    shape = Shape(past)
    trips = Gather(shape, one)
    longer = Loop (trips, yes, x) <
        body = step (int64 i, bool c, float[B,Q,4] v) => (bool c2, float[B,Q2,4] v2) {
            c2 = Identity(c)
            of_past = Shape(past)
            part = Reshape(past, of_past)
            v2 = Concat<axis = 1>(v, part)
        }
    >
    whole = Shape(longer)
    y = Expand(longer, whole)
}
"""

FUNCTIONS = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
functions (int64[B,S] input_ids, float[B,S,4] x, float[B,P,4] past) => (float[B,N] y, float[B,M] z, float[K] w)
{
    y = local.rows(x)
    z = local.rows(past)
    w = local.flat(past)
}
<domain: "local", opset_import: ["" : 18]>
rows (v) => (w) {
    zero = Constant<value_int = 0>()
    shape = Shape(v)
    b = Gather(shape, zero)
    axes = Constant<value_ints = [0]>()
    b1 = Unsqueeze(b, axes)
    size = Size(v)
    rest = Div(size, b)
    rest1 = Unsqueeze(rest, axes)
    target = Concat<axis = 0>(b1, rest1)
    w = Reshape(v, target)
}
<domain: "local", opset_import: ["" : 18, "local" : 1]>
flat (v) => (w) {
    f = local.rows(v)
    size = Size(f)
    axes = Constant<value_ints = [0]>()
    one = Unsqueeze(size, axes)
    w = Reshape(f, one)
}
"""


def both(text: str, spec: str, sizes: dict[str, int]) -> tuple[ir.Model, PassReport]:
    model = parse(text)
    report = bind(model, spec)
    assert_same(parse(text), model, random_feeds(model, sizes))
    assert not bind(model, spec).changed
    return model, report


def test_the_branch_that_is_taken_replaces_the_if():
    model, _ = both(BRANCHES, "batch=2,seq=1", {})
    assert op_types(model) == ["Neg", "Identity", "Reshape", "Add"]
    model, _ = both(BRANCHES, "batch=2,seq=3", {})
    assert op_types(model) == ["Exp", "Abs", "Neg", "Mul", "Reshape", "Add"]
    # The initializer of the branch moved out, and what was called alike in both branches is not any more.
    assert "c" in model.graph.initializers
    assert [node.outputs[0].name for node in model.graph] == ["t_2", "y", "t_1", "t2", "r", "z"]


def test_an_open_condition_keeps_both_branches():
    model, _ = both(BRANCHES, "batch=2", {"S": 1})
    assert op_types(model).count("If") == 2
    assert_same(parse(BRANCHES), model, random_feeds(model, {"S": 3}))


@pytest.mark.parametrize("flag", [True, False])
def test_inside_of_branches(flag):
    model = parse(OPEN_BRANCH)
    report = bind(model, "batch=2,seq=3")
    assert shape_nodes(model) == []
    assert [node.op_type for graph in model.graph.subgraphs() for node in graph] == [
        *("Constant", "Reshape"),
        *("Constant", "Neg", "Flatten"),
    ]
    assert (report.nodes_before, report.nodes_after) == (11, 6)
    feeds: Arrays = {
        "input_ids": np.ones((2, 3), np.int64),
        "x": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "flag": np.array(flag),
    }
    assert_same(parse(OPEN_BRANCH), model, feeds)


def test_a_loop_that_never_runs():
    model, _ = both(LOOP, "batch=2,seq=3,dims=[P:0]", {})
    # What the loop was thought to make longer is static once it is gone.
    assert op_types(model) == ["Expand"]
    assert dims_of(model.graph.outputs[0]) == [2, 3, 4]


def test_a_loop_that_runs():
    model, _ = both(LOOP, "batch=2,seq=3,dims=[P:5]", {})
    assert [node.op_type for node in model.graph.all_nodes()].count("Shape") == 1
    loop = next(node for node in model.graph if node.op_type == "Loop")
    assert loop.inputs[0] is not None
    assert loop.inputs[0].name == "bind_dims/size_5"
    assert [node.op_type for node in loop.attributes["body"].as_graph()] == ["Identity", "Reshape", "Concat"]


def test_calls_of_different_sizes_get_functions_of_their_own():
    model, _ = both(FUNCTIONS, "batch=2,seq=3,dims=[P:5]", {})
    assert op_types(model) == ["rows", "rows_1", "flat"]
    assert [function.name for function in model.functions.values()] == ["rows", "rows_1", "flat"]
    bodies = {function.name: [node.op_type for node in function] for function in model.functions.values()}
    assert bodies == {
        "rows": ["Constant", "Reshape"],
        "rows_1": ["Constant", "Reshape"],
        "flat": ["Constant", "rows_1", "Reshape"],
    }
    assert shape_nodes(model) == []


def test_calls_of_one_size_share_a_function():
    model, _ = both(FUNCTIONS, "batch=2,seq=3,dims=[P:3]", {})
    assert op_types(model) == ["rows", "rows", "flat"]
    assert len(model.functions) == 2
    assert shape_nodes(model) == []


def test_open_sizes_in_functions():
    model, _ = both(FUNCTIONS, "batch=2", {"S": 3, "P": 5})
    assert len(model.functions) == 2
    rows = next(function for function in model.functions.values() if function.name == "rows")
    assert "Shape" not in [node.op_type for node in rows]
    assert "Size" in [node.op_type for node in rows]


def test_a_function_that_only_computed_sizes_is_removed():
    text = """
    <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
    g (int64[B,S] input_ids, float[B,S,4] x) => (float[B,S,4] y)
    {
        size = local.size_of(x)
        y = Expand(x, size)
    }
    <domain: "local", opset_import: ["" : 18]>
    size_of (v) => (w) { w = Shape(v) }
    """
    model, _ = both(text, "batch=2,seq=3", {})
    assert not model.functions
    assert op_types(model) == ["Expand"]


def test_a_node_that_fails_in_an_open_branch_is_no_contradiction():
    text = """
    <ir_version: 9, opset_import: ["" : 18]>
    g (int64[B,S] input_ids, float[B,S,4] x, float[64,4] table, bool flag) => (float[B,Q,4] y)
    {
        y = If (flag) <
            then_branch = then_part () => (float[B,Q2,4] t) { t = Add(x, table) },
            else_branch = else_part () => (float[B,Q3,4] e) { e = Neg(x) }
        >
    }
    """
    model = parse(text)
    bind(model, "batch=2,seq=3")
    assert dims_of(model.graph.inputs[1]) == [2, 3, 4]


def test_arithmetic_that_overflows_is_left_to_the_runtime():
    text = """
    <ir_version: 9, opset_import: ["" : 18]>
    g (int64[B,S] input_ids, float[B,S,4] x) => (int64[1] wrapped, int64[1] after)
    <int64[1] large = {4611686018427387904}, int64[1] one = {1}>
    {
        s = Shape<start = 1, end = 2>(input_ids)
        wrapped = Mul(s, large)
        after = Div(wrapped, large)
    }
    """
    model, _ = both(text, "batch=2,seq=3", {})
    assert op_types(model) == ["Mul", "Div"]
    feeds = random_feeds(model, {})
    assert run(model, feeds)["after"].tolist() == [-1]


def test_ranges_and_masks_stay_in_the_graph():
    text = """
    <ir_version: 9, opset_import: ["" : 18]>
    g (int64[B,S] input_ids, float[B,S,4] x) => (bool[S,S2] mask, float[N] y)
    <int64 zero = {0}, int64 one = {1}, int64[1] axis = {1}>
    {
        shape = Shape(input_ids)
        s = Gather(shape, one)
        columns = Range(zero, s, one)
        rows = Unsqueeze(columns, axis)
        mask = LessOrEqual(columns, rows)
        last = Gather(columns, zero)
        more = Add(last, s)
        axis0 = Unsqueeze(more, zero1)
        zero1 = Constant<value_ints = [0]>()
        y = ConstantOfShape(axis0)
    }
    """
    model, _ = both(text, "batch=2,seq=3", {})
    assert op_types(model) == ["Range", "Unsqueeze", "LessOrEqual", "ConstantOfShape"]
