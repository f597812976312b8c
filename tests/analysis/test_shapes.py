"""What the shape walk believes of a model as a whole: sources, functions, order, caching, scale."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnx_ir as ir
import pytest

from graphsurgery.analysis import dims
from graphsurgery.analysis.shapes import Shapes, invalidate, shapes_of
from graphsurgery.errors import InputRefusedError
from tests.analysis.ort_truth import check_against_ort

CASES = Path(__file__).parents[1] / "cases"


def _model(text: str, header: str = '<ir_version: 10, opset_import: ["": 20]>') -> ir.Model:
    model = ir.from_proto(onnx.parser.parse_model(f"{header}\n{text}"))
    assert isinstance(model, ir.Model)
    return model


def _values(model: ir.Model) -> dict[str, ir.Value]:
    found = {str(value.name): value for node in model.graph for value in node.outputs}
    return found | {str(value.name): value for value in model.graph.inputs} | dict(model.graph.initializers)


def _shown(shapes, value: ir.Value) -> str | None:
    shape = shapes.shape(value)
    return None if shape is None else " ".join(str(size) for size in shape)


def test_the_views_of_a_value():
    model = _model("g (float[B, S, 8] x) => (float y) { y = Transpose <perm = [0, 2, 1]> (x)  n = Shape (y) }")
    shapes, values = Shapes(model), _values(model)
    assert shapes.rank(values["y"]) == 3
    assert shapes.dim(values["y"], -1) == dims.symbol("S")
    assert shapes.dim(values["y"], 3) is None
    assert shapes.dtype(values["y"]) == ir.DataType.FLOAT
    assert str(shapes.shape_value(values["n"])) == "[B, 8, S]"
    assert shapes.shape_value(values["y"]) is None
    contents = shapes.shape_value(values["n"])
    assert contents is not None
    assert (contents.rank, len(contents), contents[1], contents.single, contents.ints()) == (1, 3, 8, None, None)


def test_equal_names_are_one_size_and_digits_are_a_number():
    model = _model('g (float[B, S] x, float[S, "3"] w) => (float y) { y = MatMul (x, w) }'.replace('"3"', "3"))
    model.graph.inputs[1].shape = ir.Shape(["S", "3"])
    assert _shown(Shapes(model), _values(model)["y"]) == "B 3"


def test_unnamed_axes_are_anonymous_and_shared_by_elementwise_results():
    model = _model("g (float[B, S] x) => (float y) { y = Neg (x) }")
    model.graph.inputs[0].shape = ir.Shape([None, "S"])
    shapes, values = Shapes(model), _values(model)
    assert _shown(shapes, values["x"]) == "?1 S"
    assert shapes.shape(values["y"]) == shapes.shape(values["x"])


def test_names_of_integer_inputs_are_never_zero_others_may_be():
    text = """g (int64[B, S] ids, float[B, P] cache) => (float y) {
        start = Constant <value_ints = [-1]> ()
        end = Constant <value_ints = [9223372036854775807]> ()
        axes = Constant <value_ints = [1]> ()
        last = Slice (ids, start, end, axes)
        newest = Slice (cache, start, end, axes)
    }"""
    model = _model(text)
    shapes, values = Shapes(model), _values(model)
    assert _shown(shapes, values["last"]) == "B 1"
    assert _shown(shapes, values["newest"]) == "B min(P, 1)"


def test_an_op_without_a_rule_is_what_the_file_declares_or_unknown():
    text = """g (float[B, S, 8] x) => (float y) {
        a = vendor.Scale (x)
        b = vendor.Scale (x)
        y = Neg (a)
        z = Neg (b)
    }"""
    model = _model(text, '<ir_version: 10, opset_import: ["": 20, "vendor": 1]>')
    values = _values(model)
    values["a"].shape = ir.Shape(["B", "S", 8])
    values["a"].dtype = ir.DataType.FLOAT16
    shapes = Shapes(model)
    assert _shown(shapes, values["y"]) == "B S 8"
    assert shapes.dtype(values["y"]) == ir.DataType.FLOAT16
    assert shapes.shape(values["z"]) is None


def test_inference_wins_over_a_stale_declaration():
    model = _model("g (float[B, S, 8] x) => (float y) { y = Neg (x) }")
    value = _values(model)["y"]
    value.shape = ir.Shape(["B", 1, 9])
    assert _shown(Shapes(model), value) == "B S 8"


def test_an_overridable_initializer_has_its_shape_but_no_contents():
    text = "g (float[B, S] x, int64[2] to = {0, -1}) => (float y) { y = Reshape (x, to) }"
    model = _model(text)
    assert model.graph.inputs[1].is_initializer()
    shapes = Shapes(model)
    assert shapes.rank(_values(model)["y"]) == 2
    assert (_shown(shapes, _values(model)["y"]) or "").count("?") == 2
    model.ir_version = 3  # where every initializer had to be listed as an input
    assert _shown(Shapes(model), _values(model)["y"]) == "B S"


def test_no_weight_is_read(tmp_path, monkeypatch):
    def refuse(self):
        raise AssertionError(f"{self.name} was read")

    monkeypatch.setattr(ir.ExternalTensor, "numpy", refuse)
    monkeypatch.setattr(ir.ExternalTensor, "tobytes", refuse)
    model = ir.load(CASES / "s01_everything_external_even_shapes.onnx")
    assert any(isinstance(value.const_value, ir.ExternalTensor) for value in model.graph.initializers.values())
    shapes = Shapes(model)
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    assert shapes.rank(logits) == 3


def test_a_node_that_no_runtime_would_take_is_named():
    model = _model("g (float[B, S] x) => (float y) { y = Cast <to = 99> (x) }")
    model.graph[0].name = "broken"
    message = r"Node 'broken' \(ai.onnx::Cast\) has inputs or attributes that its operator does not allow \(99 is not"
    with pytest.raises(InputRefusedError, match=message):
        Shapes(model)


def test_the_model_is_not_changed():
    path = CASES / "f04_model_already_has_functions.onnx"
    model = ir.load(path)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    shapes_of(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_shapes_are_cached_until_invalidated():
    model = _model("g (float[B, S] x) => (float y) { y = Neg (x) }")
    first = shapes_of(model)
    assert shapes_of(model) is first
    invalidate(model)
    assert shapes_of(model) is not first
    invalidate(model)
    invalidate(model)


FUNCTIONS = """<ir_version: 10, opset_import: ["": 20, "local": 1]>
g (float[B, S, 8] x, float[B, P, 4] z) => (float y) {
    a = local.Halve <axis = 1> (x)
    b = local.Halve <axis = 2> (x)
    c = local.Outer (z)
    d = local.Outer (z)
}
<domain: "local", opset_import: ["": 20, "local": 1]>
Outer (v) => (w) { u = local.Halve (v)  w = Neg (u) }
<domain: "local", opset_import: ["": 20]>
Halve <axis: int = 2> (v) => (w) {
    lengths = Shape (v)
    where = Constant <value_int: int = @axis> ()
    size = Gather (lengths, where)
    two = Constant <value_int = 2> ()
    half = Div (size, two)
    zero = Constant <value_ints = [0]> ()
    flat = Reshape (half, one)
    one = Constant <value_ints = [1]> ()
    at = Reshape (where, one)
    w = Slice (v, zero, flat, at)
}
"""


def test_a_function_body_is_seen_in_the_context_of_each_call():
    model = ir.from_proto(onnx.parser.parse_model(FUNCTIONS))
    shapes, values = Shapes(model), _values(model)
    assert _shown(shapes, values["a"]) == "B floordiv(S, 2) 8"
    assert _shown(shapes, values["b"]) == "B S 4"
    assert _shown(shapes, values["c"]) == "B P 2"
    halve = model.functions["local", "Halve", ""]
    outer = model.functions["local", "Outer", ""]
    calls = {str(node.outputs[0].name): node for node in model.graph}
    assert _shown(shapes.in_call(calls["a"]), halve.outputs[0]) == "B floordiv(S, 2) 8"
    assert _shown(shapes.in_call(calls["b"]), halve.inputs[0]) == "B S 8"
    inside = shapes.in_call(calls["c"])
    assert _shown(inside.in_call(outer[0]), halve.outputs[0]) == "B P 2"
    # The same arguments give the same view, walked once.
    assert shapes.in_call(calls["c"])._frame is shapes.in_call(calls["d"])._frame
    assert shapes.in_call(calls["a"])._frame is not shapes.in_call(calls["b"])._frame
    with pytest.raises(ValueError, match="calls no local function"):
        shapes.in_call(outer[1])


def test_calls_with_unknown_sizes_inside_do_not_share_them():
    text = """<ir_version: 10, opset_import: ["": 20, "local": 1]>
    g (bool[N] x, bool[N] z) => (float y) { a = local.Find (x)  b = local.Find (z) }
    <domain: "local", opset_import: ["": 20]>
    Find (v) => (w) { w = NonZero (v) }
    """
    proto = onnx.parser.parse_model(text)
    model = ir.from_proto(proto)
    shapes, values = Shapes(model), _values(model)
    assert shapes.dim(values["a"], 1) != shapes.dim(values["b"], 1)
    feeds = {"x": np.array([True, False, True]), "z": np.array([True, False, False])}
    assert check_against_ort(model, proto, Path(), feeds).errors == []


def test_functions_that_call_each_other_many_times_end():
    # 2 ** 40 calls when inlined: every level calls the level below twice with the same shapes.
    header = '<ir_version: 10, opset_import: ["": 20, "local": 1]>'
    parts = [f"{header} g (float[B, S] x) => (float y) {{ y = local.F40 (x) }}"]
    for level in range(1, 41):
        below = f"local.F{level - 1}"
        parts.append(
            f'<domain: "local", opset_import: ["": 20, "local": 1]> F{level} (v) => (w) '
            f"{{ a = {below} (v)  b = {below} (a)  w = Neg (b) }}"
        )
    parts.append('<domain: "local", opset_import: ["": 20]> F0 (v) => (w) { w = Neg (v) }')
    model = ir.from_proto(onnx.parser.parse_model("\n".join(parts)))
    assert _shown(Shapes(model), _values(model)["y"]) == "B S"


def test_shapes_in_functions_are_those_of_the_inlined_model():
    path = CASES / "f04_model_already_has_functions.onnx"
    model = ir.load(path)
    inlined = ir.from_proto(onnx.inliner.inline_local_functions(onnx.ModelProto.FromString(path.read_bytes())))
    shapes, flat = Shapes(model), Shapes(inlined)
    called = shapes.in_call(next(node for node in model.graph if node.op_type == "DecoderLayer"))
    layer = model.functions["local", "DecoderLayer", ""]
    activation = next(node for node in layer if node.op_type == "Sigmoid")
    twin = next(node for node in inlined.graph if node.op_type == "Sigmoid")
    assert called.shape(activation.outputs[0]) == flat.shape(twin.outputs[0])
    assert called.shape(activation.outputs[0]) is not None


def test_a_cast_to_half_precision_forgets_contents_that_may_be_rounded():
    text = """g (float[B, S, 8] x) => (float y) {
        n = Shape (x)
        wide = Cast <to = 1> (n)
        back = Cast <to = 7> (wide)
        half = Cast <to = 10> (n)
    }"""
    model = _model(text)
    shapes, values = Shapes(model), _values(model)
    assert str(shapes.shape_value(values["back"])) == "[B, S, 8]"
    assert shapes.shape_value(values["half"]) is None


def test_contents_do_not_grow_without_end():
    size = ir.node("Shape", [ir.Value(name="x", shape=ir.Shape(["B"]), type=ir.TensorType(ir.DataType.FLOAT))])
    nodes = [size]
    for number in range(200):
        last = nodes[-1].outputs[0]
        seven = ir.node("Constant", [], {"value_ints": [7 + number]})
        nodes += [seven, ir.node("Mod", [last, seven.outputs[0]])]
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], last]))
    source = size.inputs[0]
    assert source is not None
    model = ir.Model(ir.Graph([source], [nodes[-1].outputs[0]], nodes=nodes, opset_imports={"": 20}), ir_version=10)
    shapes = Shapes(model)
    weights = [
        item.weight
        for node in nodes
        for item in shapes.shape_value(node.outputs[0]) or ()
        if isinstance(item, dims.Expr)
    ]
    assert len(weights) > 300
    assert max(weights) <= 200


def _chain(length: int) -> ir.Model:
    """``length`` nodes of shape arithmetic and elementwise work, each group fed by the one before."""
    source = ir.Value(name="x", shape=ir.Shape(["B", "S", 64]), type=ir.TensorType(ir.DataType.FLOAT))
    heads = ir.node("Constant", [], {"value_ints": [0, 0, 8, 8]})
    flat = ir.node("Constant", [], {"value_ints": [0, 0, -1]})
    one = ir.node("Constant", [], {"value_int": 1})
    nodes = [heads, flat, one]
    value = source
    while len(nodes) < length:
        split = ir.node("Reshape", [value, heads.outputs[0]])
        turned = ir.node("Transpose", split.outputs, {"perm": [0, 2, 1, 3]})
        product = ir.node("Mul", [turned.outputs[0], turned.outputs[0]])
        back = ir.node("Transpose", product.outputs, {"perm": [0, 2, 1, 3]})
        joined = ir.node("Reshape", [back.outputs[0], flat.outputs[0]])
        sizes = ir.node("Shape", joined.outputs)
        rows = ir.node("Gather", [sizes.outputs[0], one.outputs[0]])
        total = ir.node("Add", [rows.outputs[0], one.outputs[0]])
        summed = ir.node("Add", [value, joined.outputs[0]])
        nodes += [split, turned, product, back, joined, sizes, rows, total, summed]
        value = summed.outputs[0]
    return ir.Model(ir.Graph([source], [value], nodes=nodes, opset_imports={"": 20}), ir_version=10)


def test_unsorted_nodes_need_no_recursion():
    model = _chain(8_000)
    nodes = list(model.graph)
    value = model.graph.outputs[0]
    model.graph.remove(nodes)
    model.graph.extend(reversed(nodes))
    assert _shown(Shapes(model), value) == "B S 64"


@pytest.mark.full
def test_time_is_linear_in_nodes():
    def seconds(model: ir.Model) -> float:
        started = time.process_time()
        Shapes(model)
        return time.process_time() - started

    small, large = _chain(5_000), _chain(50_000)
    few = min(seconds(small) for _ in range(3))
    many = min(seconds(large) for _ in range(2))
    print(f"5k nodes: {few:.3f} s, 50k nodes: {many:.3f} s")
    assert few < 0.5
    assert many < 20 * few


@pytest.mark.parametrize(("count", "known"), [(8, True), (32, False)])
def test_long_rows_of_numbers_that_are_not_known_are_not_computed_with(count: int, known: bool) -> None:
    """No shape has so many axes: they number rows, and walking over them takes longer than all shapes."""
    steps = ", ".join(map(str, range(count)))
    text = f"""g (float[N] x) => (int64[{count}] y, int64[{count}] z)
    <int64[{count}] steps = {{{steps}}}, int64[1] two = {{2}}> {{
        size = Shape (x)
        y = Add (steps, size)
        z = Add (steps, two)
    }}"""
    model = _model(text)
    shapes = Shapes(model)
    y, z = model.graph.outputs
    assert (shapes.shape_value(y) is not None) == known
    assert shapes.shape(y) == (count,)
    found = shapes.shape_value(z)
    assert found is not None
    assert found.items == tuple(range(2, count + 2))


def test_a_division_rounded_down_for_any_sign_is_plain_for_the_rows_of_an_image():
    model = _model("""
        g (float[B,3,H,W] pixel_values) => (float[N,M] y)
        {
            four = Constant<value = int64[1] {4}>()
            one = Constant<value = int64[1] {1}>()
            less = Constant<value = int64[1] {-1}>()
            rows = Shape<start = 2, end = 3>(pixel_values)
            sign = Sign(rows)
            same = Equal(sign, one)
            other = Not(same)
            rest = Mod(rows, four)
            some = Cast<to = 9>(rest)
            both = And(other, some)
            more = Cast<to = 7>(both)
            whole = Div(rows, four)
            patches = Sub(whole, more)
            shape = Concat<axis = 0>(patches, less)
            y = Reshape(pixel_values, shape)
        }
    """)
    assert _shown(Shapes(model), model.graph.outputs[0]) == "floordiv(H, 4) floordiv(3*B*H*W, floordiv(H, 4))"
