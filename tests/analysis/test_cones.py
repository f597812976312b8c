"""Climbing from a value to where its rows come from, and who else needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.cones import Cone, climb, join, outside_readers, size_readers
from graphsurgery.analysis.shapes import Shapes
from graphsurgery.analysis.slices import Blocked, RowAxis, lift
from tests.small_models import parse, value_of

if TYPE_CHECKING:
    import onnx_ir as ir

HEADER = '<ir_version: 9, opset_import: ["" : 18, "local" : 1]>'

PLAIN = (
    HEADER
    + """
g (float[B,S,4] x, float[4,6] w, float[6] b) => (float[B,S,6] y)
{
    a = Relu(x)
    p = MatMul(a, w)
    t = Tanh(p)
    y = Add(t, b)
}
"""
)


def cone_of(model: ir.Model, output: str = "y", axis: int = 1, *, stop: tuple[str, ...] = ()) -> Cone | Blocked:
    return climb(
        value_of(model, output), RowAxis(axis), Shapes(model), model, lambda edge, _lift: edge.value.name not in stop
    )


def climbed(model: ir.Model, output: str = "y", axis: int = 1, *, stop: tuple[str, ...] = ()) -> Cone:
    cone = cone_of(model, output, axis, stop=stop)
    assert isinstance(cone, Cone), cone
    return cone


def names(values) -> list[str]:
    return [value.name for value in values]


def frontier(cone: Cone) -> list[tuple[str, int, str]]:
    return [(edge.node.op_type, edge.index, edge.value.name or "") for edge in cone.frontier]


def test_a_cone_goes_up_to_the_inputs():
    cone = climbed(parse(PLAIN))
    assert names(cone.values) == ["y", "t", "p", "a"]
    assert frontier(cone) == [("Relu", 0, "x")]
    assert [node.op_type for node in cone.contractions] == ["MatMul"]
    assert {value.name: reason for value, reason in cone.stops.items()} == {"x": "'x' is an input or a constant"}
    assert outside_readers(cone) == {}


def test_the_caller_says_where_it_ends():
    cone = climbed(parse(PLAIN), stop=("p",))
    assert names(cone.values) == ["y", "t"]
    assert frontier(cone) == [("Tanh", 0, "p")]
    assert cone.stops == {}


def test_a_root_that_cannot_be_lifted_is_blocked():
    blocked = cone_of(parse(PLAIN), "x")
    assert blocked == Blocked("'x' is an input or a constant")


def test_a_frontier_value_that_the_cone_makes_is_not_selected_twice():
    model = parse(
        HEADER
        + """
g (float[B,S,4] x, float[4,4] w) => (float[B,S,4] y)
{
    h = Relu(x)
    p = MatMul(h, w)
    y = Add(p, h)
}
"""
    )
    shapes = Shapes(model)
    cone = climb(value_of(model, "y"), RowAxis(1), shapes, model, lambda _edge, step: not step.contracts)
    assert isinstance(cone, Cone)
    assert names(cone.values) == ["y", "p", "h"]
    assert frontier(cone) == [("Relu", 0, "x")]


def test_a_value_that_is_also_read_whole_has_an_outside_reader():
    model = parse(
        HEADER
        + """
g (float[B,S,4] x) => (float[B,S,S] y, float[B,S,4] z)
{
    h = Relu(x)
    turned = Transpose <perm = [0, 2, 1]> (h)
    y = MatMul(h, turned)
    z = Neg(x)
}
"""
    )
    cone = climbed(model)
    assert outside_readers(cone) == {value_of(model, "h"): "a Transpose node"}


def test_one_node_that_reads_a_value_both_ways_counts():
    model = parse(
        HEADER
        + """
g (float[B,4,4] x) => (float[B,4,4] y)
{
    h = Relu(x)
    y = MatMul(h, h)
}
"""
    )
    assert list(outside_readers(climbed(model)).values()) == ["a MatMul node"]


def test_outputs_and_outer_readers_are_named():
    model = parse(
        HEADER
        + """
g (float[B,S,4] x) => (float[B,S,4] y, float[B,S,4] h, float[B,4] m)
<int64[1] axes = {1}>
{
    h = Relu(x)
    t = Exp(h)
    [mean] m = ReduceMean <keepdims = 0> (t, axes)
    y = Neg(t)
}
"""
    )
    cone = climbed(model)
    assert {value.name: who for value, who in outside_readers(cone).items()} == {
        "h": "graph output 'h'",
        "t": "node 'mean' (ReduceMean)",
    }
    assert names(outside_readers(cone, [value_of(model, "t")])) == ["t"]


def test_other_outputs_of_a_node_get_fewer_rows_too():
    model = parse(
        HEADER
        + """
g (float[B,S,4] x) => (float[B,S,2] y, float[B,S,2] z)
{
    a, b = Split <axis = 2, num_outputs = 2> (x)
    y = Neg(a)
    z = Abs(b)
}
"""
    )
    cone = climbed(model)
    assert {value.name: who for value, who in outside_readers(cone).items()} == {"a": "a Abs node, through 'b'"}


def test_readers_of_a_shape_are_told_apart():
    model = parse(
        HEADER
        + """
g (float[B,S,4] x) => (float[B,S,4] y, int64[3] n)
{
    h = Relu(x)
    n = Shape(h)
    y = Neg(h)
}
"""
    )
    cone = climbed(model)
    assert outside_readers(cone) == {}
    assert [(node.op_type, value.name, rows.axis) for node, value, rows in size_readers(cone)] == [("Shape", "h", 1)]


BRANCHES = (
    HEADER
    + """
g (float[B,S,4] x, bool flag) => (float[B,S,4] y)
{
    h = Relu(x)
    y = If (flag) <
        then_branch = a () => (float[B,S,4] t) { inner = Exp(h)  t = Neg(inner) },
        else_branch = b () => (float[B,S,4] e) {
            e = If (flag) <
                then_branch = c () => (float[B,S,4] u) { u = Abs(h) },
                else_branch = d () => (float[B,S,4] v) { v = Sqrt(h) }
            >
        }
    >
}
"""
)


def test_both_branches_of_an_if_are_climbed_nested_ones_too():
    model = parse(BRANCHES)
    cone = climbed(model)
    assert names(cone.values) == ["y", "t", "e", "u", "v", "inner", "h"]
    assert frontier(cone) == [("Relu", 0, "x")]
    assert outside_readers(cone) == {}


def test_a_branch_that_mixes_rows_blocks_the_if():
    model = parse(BRANCHES.replace("u = Abs(h)", "u = Softmax <axis = 1> (h)"))
    reason = "in a branch of If node '', in a branch of If node '', the Softmax that makes 'u' works along the rows"
    assert cone_of(model) == Blocked(reason)


def test_an_old_softmax_in_a_branch_works_to_the_end():
    model = parse(BRANCHES.replace('"" : 18', '"" : 11').replace("u = Abs(h)", "u = Softmax (h)"))
    blocked = cone_of(model)
    assert isinstance(blocked, Blocked)
    assert blocked.reason.endswith("works along the rows")


def test_two_layouts_of_one_value_block_the_climb():
    model = parse(
        HEADER
        + """
g (float[N,N] x) => (float[N,N] y)
{
    h = Relu(x)
    t = Transpose(h)
    y = Add(h, t)
}
"""
    )
    assert cone_of(model, axis=0) == Blocked("'h' is needed in two layouts")


def test_joined_cones_share_what_they_both_make():
    model = parse(
        HEADER
        + """
g (float[B,S,4] x, float[4,6] w) => (float[B,S,6] y, float[B,S,6] z)
{
    h = Relu(x)
    y = MatMul(h, w)
    z = LogSoftmax <axis = -1> (y)
}
"""
    )
    first, second = climbed(model, "y", stop=("h",)), climbed(model, "z", stop=("h",))
    assert names(outside_readers(first)) == ["y"]
    assert names(outside_readers(second)) == ["y"]
    whole = join([first, second])
    assert isinstance(whole, Cone)
    assert outside_readers(whole) == {}
    assert names(whole.roots) == ["y", "z"]
    assert frontier(whole) == [("MatMul", 0, "h")]
    shallow = climbed(model, "z", stop=("y",))
    joined = join([shallow, first])
    assert isinstance(joined, Cone)
    # ``y`` has fewer rows already where ``z`` reads it.
    assert frontier(joined) == [("MatMul", 0, "h")]
    other = climbed(model, "y", axis=0, stop=("h",))
    assert join([first, other]) == Blocked("'y' is needed in two layouts")


# ---- functions ----------------------------------------------------------------------------------------------------


def call(body: str, inputs: str = "x", returned: str = "r", rest: str = "y = Neg(r)") -> ir.Model:
    return parse(
        HEADER
        + "g (float[B,S,4] x, float[4,6] w) => (float y) { "
        + f"{returned} = local.f({inputs}) {rest} }}"
        + f' <domain: "local", opset_import: ["" : 18]> {body}'
    )


def lifted(model: ir.Model, output: int = 0, axis: int = 1):
    node = next(node for node in model.graph if node.domain == "local")
    return lift(node, output, RowAxis(axis), Shapes(model), model)


def test_a_function_keeps_rows_apart_when_its_body_does():
    step = lifted(call("f (a) => (b) { c = Exp(a) b = Neg(c) }"))
    assert step.rows == {0: RowAxis(1)}
    assert step.contracts is False
    step = lifted(call("f (a, m) => (b) { c = MatMul(a, m) b = Tanh(c) }", "x, w"))
    assert step.rows == {0: RowAxis(1)}
    assert step.contracts is True


def test_a_function_that_flattens_by_computed_sizes_follows_the_rows():
    body = """
f (a, m) => (b) {
    s = Shape(a)
    zero = Constant <value_ints = [0]> ()
    two = Constant <value_ints = [2]> ()
    lead = Slice(s, zero, two)
    flat_shape = Constant <value_ints = [-1, 4]> ()
    flat = Reshape(a, flat_shape)
    p = MatMul(flat, m)
    six = Constant <value_ints = [6]> ()
    out = Concat <axis = 0> (lead, six)
    b = Reshape(p, out)
}"""
    step = lifted(call(body, "x, w"))
    assert not isinstance(step, Blocked)
    assert step.rows == {0: RowAxis(1)}
    assert step.patches == ()


def test_what_keeps_a_function_from_giving_fewer_rows():
    def reason(*arguments: str) -> str:
        step = lifted(call(*arguments))
        assert isinstance(step, Blocked)
        return step.reason

    assert reason("f (a) => (b) { b = Softmax <axis = 1> (a) }") == (
        "inside function 'f', the Softmax that makes 'b' works along the rows"
    )
    mean = "f (a) => (b) { ax = Constant <value_ints = [1]> () m = ReduceMean(a, ax) b = Add(a, m) }"
    assert reason(mean) == "function 'f' uses all rows of 'a'"
    two = "f (a) => (b, c) { c = Exp(a) b = Neg(c) }"
    assert reason(two, "x", "r, q") == "function 'f' returns all rows of 'c'"
    fixed = "f (a, n) => (b) { b = Reshape(a, n) }"
    model = parse(
        HEADER
        + "g (float[B,S,4] x) => (float y) { n = Shape(x) r = local.f(x, n) y = Neg(r) }"
        + f' <domain: "local", opset_import: ["" : 18]> {fixed}'
    )
    step = lifted(model)
    assert isinstance(step, Blocked)
    assert step.reason == "node '' inside function 'f' fixes the number of rows"


def test_calls_inside_calls():
    model = parse(
        HEADER
        + "g (float[B,S,4] x) => (float y) { y = local.outer(x) }"
        + ' <domain: "local", opset_import: ["" : 18, "local" : 1]> outer (a) => (b) { c = local.inner(a) b = Neg(c) }'
        + ' <domain: "local", opset_import: ["" : 18]> inner (a) => (b) { b = Exp(a) }'
    )
    step = lifted(model)
    assert step.rows == {0: RowAxis(1)}
