"""Random shape arithmetic, as exporters write it, inferred and then computed by ORT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.analysis.shapes import Shapes
from tests.analysis.op_cases import Const, Fed, const, floats, model_of
from tests.analysis.ort_truth import check_against_ort

_INT64 = onnx.TensorProto.INT64


class Arithmetic:
    """A graph under construction: a pool of int64 scalars and lists with known lengths, and of tensors made from them."""

    def __init__(self) -> None:
        self.given: dict[str, Fed | Const] = {
            "x": floats("B S 8"),
            "cache": floats("B 2 P"),
            "k": Fed("", np.int64),
            "minus": const(-1),
            "one": const(1),
            "five": const(5),
            "zero": const(0),
            "first": const([0]),
        }
        self.nodes: list[onnx.NodeProto] = []
        self.scalars = ["minus", "one", "five", "k"]
        self.lists: list[tuple[str, int]] = []
        self.tensors = ["x", "cache"]

    def node(self, op: str, inputs: list[str], **attrs) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op, inputs, [name], name=name, **attrs))
        return name

    def constant(self, data) -> str:
        name = f"c{len(self.given)}"
        self.given[name] = const(data)
        return name

    def step(self, draw) -> None:
        kind = draw(
            st.sampled_from(["shape", "pick", "cut", "join", "binary", "unary", "reduce", "where", "tensor", "range"])
        )
        getattr(self, f"_{kind}")(draw)

    def _shape(self, draw) -> None:
        tensor = draw(st.sampled_from(self.tensors))
        name = self.node("Shape", [tensor], start=draw(st.integers(-4, 1)))
        self.lists.append((name, -1))

    def _list(self, draw) -> str:
        return draw(st.sampled_from(self.lists))[0] if self.lists else self.constant([3, 4])

    def _scalar(self, draw) -> str:
        return str(draw(st.sampled_from(self.scalars)))

    def _pick(self, draw) -> None:
        source = self._list(draw)
        # A list may be empty: one element is put in front, so that index 0 and -1 are always there.
        padded = self.node("Concat", [self.constant([draw(st.integers(-2, 6))]), source], axis=0)
        index = draw(st.sampled_from([0, -1]))
        if draw(st.booleans()):
            self.scalars.append(self.node("Gather", [padded, self.constant(index)]))
        else:
            self.lists.append((self.node("Gather", [padded, self.constant([index, 0])]), 2))

    def _cut(self, draw) -> None:
        bound = st.integers(-4, 4)
        step = draw(st.sampled_from([1, 1, 2, -1]))
        starts, ends = self.constant([draw(bound)]), self.constant([draw(bound)])
        self.lists.append((self.node("Slice", [self._list(draw), starts, ends, "first", self.constant([step])]), -1))

    def _join(self, draw) -> None:
        scalar = self.node("Unsqueeze", [self._scalar(draw), "first"])
        # Lists are kept short: what ORT computes must stay small.
        short = self.node("Slice", [self._list(draw), self.constant([0]), self.constant([3])])
        self.lists.append(
            (self.node("Concat", [scalar, short] if draw(st.booleans()) else [short, scalar], axis=0), -1)
        )

    def _binary(self, draw) -> None:
        op = draw(st.sampled_from(["Add", "Sub", "Mul", "Min", "Max", "Div", "Mod"]))
        left = self._scalar(draw)
        right = self._scalar(draw)
        if op in {"Div", "Mod"}:
            right = self.node("Max", [right, "one"])
        if op == "Mul":
            left = self.node("Min", [left, "five"])
        self.scalars.append(self.node(op, [left, right]))
        listed = self._list(draw)
        if op not in {"Div", "Mod", "Mul"}:
            self.lists.append((self.node(op, [listed, left]), -1))

    def _unary(self, draw) -> None:
        source = self._scalar(draw)
        op = draw(st.sampled_from(["Neg", "Abs", "Sign", "Identity", "Cast", "Reshape"]))
        if op == "Cast":
            self.scalars.append(self.node("Cast", [self.node("Cast", [source], to=onnx.TensorProto.INT32)], to=_INT64))
        elif op == "Reshape":
            flat = self.node("Reshape", [source, self.constant([-1])])
            self.scalars.append(self.node("Squeeze", [flat, "first"]))
        else:
            self.scalars.append(self.node(op, [source]))

    def _reduce(self, draw) -> None:
        short = self.node("Slice", [self._list(draw), self.constant([0]), self.constant([2])])
        padded = self.node("Concat", [self.constant([1]), short], axis=0)
        op = draw(st.sampled_from(["ReduceProd", "ReduceSum", "ReduceMax"]))
        result = self.node(op, [padded, "first"], keepdims=0)
        self.scalars.append(self.node("Min", [result, self.constant(50)]))

    def _where(self, draw) -> None:
        if draw(st.booleans()):
            condition = self.node(
                draw(st.sampled_from(["Equal", "Less", "Greater"])), [self._scalar(draw), self._scalar(draw)]
            )
            self.scalars.append(self.node("Where", [condition, self._scalar(draw), self._scalar(draw)]))
            return
        listed = self._list(draw)
        ones = self.node(
            "ConstantOfShape", [self.node("Shape", [listed])], value=onnx.numpy_helper.from_array(np.array([1]))
        )
        self.lists.append((self.node("Where", [self.node("Equal", [listed, "minus"]), ones, listed]), -1))

    def _tensor(self, draw) -> None:
        short = self.node("Slice", [self._list(draw), self.constant([0]), self.constant([3])])
        sizes = self.node("Min", [self.node("Max", [short, "zero"]), "five"])
        op = draw(st.sampled_from(["ConstantOfShape", "Expand"]))
        made = self.node(op, [sizes] if op == "ConstantOfShape" else [self.constant(2.0), sizes])
        self.tensors.append(self.node("Reshape", [made, self.constant([-1])]) if draw(st.booleans()) else made)

    def _range(self, draw) -> None:
        limit = self.node("Min", [self._scalar(draw), self.constant(9)])
        start = self.node("Max", [self._scalar(draw), self.constant(-9)])
        name = self.node("Range", [start, limit, self.constant(draw(st.sampled_from([1, 2, 3])))])
        self.tensors.append(name)


@st.composite
def graphs(draw) -> onnx.ModelProto:
    built = Arithmetic()
    built._shape(draw)
    for _ in range(draw(st.integers(3, 14))):
        built.step(draw)
    return model_of(built.nodes, built.given, [])


@given(
    proto=graphs(),
    sizes=st.fixed_dictionaries({"B": st.integers(1, 3), "S": st.integers(1, 4), "P": st.integers(0, 4)}),
    k=st.integers(-3, 6),
)
def test_inferred_shape_arithmetic_is_what_ort_computes(proto, sizes, k):
    model = ir.from_proto(proto)
    feeds = {
        "x": np.zeros((sizes["B"], sizes["S"], 8), np.float32),
        "cache": np.zeros((sizes["B"], 2, sizes["P"]), np.float32),
        "k": np.asarray(k, np.int64),
    }
    agreement = check_against_ort(model, proto, Path(), feeds)
    assert agreement.errors == []


def test_the_exporters_way_to_expand_by_a_shape_is_followed():
    built = Arithmetic()
    shape = built.node("Shape", ["x"])
    batch = built.node("Unsqueeze", [built.node("Gather", [shape, "zero"]), "first"])
    rows = built.node("Unsqueeze", [built.node("Gather", [shape, "one"]), "first"])
    wanted = built.node("Concat", [batch, rows, built.constant([-1])], axis=0)
    ones = built.node("ConstantOfShape", [built.constant([3])], value=onnx.numpy_helper.from_array(np.array([1])))
    chosen = built.node("Where", [built.node("Equal", [wanted, "minus"]), ones, wanted])
    expanded = built.node("Expand", ["x", chosen])
    model = ir.from_proto(model_of(built.nodes, built.given, [expanded]))
    shapes = Shapes(model)
    values = {value.name: value for node in model.graph for value in node.outputs}
    assert str(shapes.shape_value(values[chosen])) == "[B, S, 1]"
    assert [str(size) for size in shapes.shape(values[expanded]) or ()] == ["B", "S", "8"]
