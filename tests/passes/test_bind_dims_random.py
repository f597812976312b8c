"""bind-dims on random shape arithmetic and random sizes: ONNX Runtime computes the same bits."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.passes.bound_runs import assert_same, bind, run, shape_nodes

_BINARY = ("Add", "Sub", "Mul", "Min", "Max", "Div", "Mod")


class _Graph:
    """Random arithmetic on the sizes of three inputs, every value of it an int64 list."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.lists: dict[str, int] = {}
        self.outputs: list[onnx.ValueInfoProto] = []

    def node(self, op_type: str, inputs: list[str], **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=f"n{len(self.nodes)}", **attributes))
        return name

    def constant(self, values: list[int] | int) -> str:
        name = f"c{len(self.constants)}"
        array = np.array(values, dtype=np.int64)
        self.constants.append(onnx.numpy_helper.from_array(array, name))
        return name

    def pick(self) -> str:
        return self.draw(st.sampled_from(sorted(self.lists)))

    def keep(self, name: str, length: int) -> None:
        self.lists[name] = length

    def step(self) -> None:
        kind = self.draw(st.integers(0, 9))
        name = self.pick()
        length = self.lists[name]
        if kind == 0:
            at = self.draw(st.lists(st.integers(-length, length - 1), min_size=1, max_size=3))
            self.keep(self.node("Gather", [name, self.constant(at)]), len(at))
        elif kind == 1:
            start = self.draw(st.integers(0, length - 1))
            ends = [self.constant([start]), self.constant([length]), self.constant([0])]
            self.keep(self.node("Slice", [name, *ends]), length - start)
        elif kind == 2:
            other = self.pick()
            if length + self.lists[other] <= 8:
                self.keep(self.node("Concat", [name, other], axis=0), length + self.lists[other])
        elif kind in (3, 4):
            self.arithmetic(name, length)
        elif kind == 5:
            self.choice(name, length)
        elif kind == 6:
            self.branch(name, length)
        elif kind == 7:
            narrow = self.node("Cast", [name], to=TensorProto.INT32)
            self.keep(self.node("Cast", [narrow], to=TensorProto.INT64), length)
        elif kind == 8:
            self.through_floats(name, length)
        else:
            scalar = self.node("ReduceMax", [self.node("Abs", [name])], keepdims=0)
            bounded = self.node("Min", [scalar, self.constant(9)])
            count = self.node("Range", [self.constant(0), bounded, self.constant(1)])
            self.keep(self.node("Shape", [count]), 1)

    def arithmetic(self, name: str, length: int) -> None:
        op_type = self.draw(st.sampled_from(_BINARY))
        same = sorted(other for other, size in self.lists.items() if size in (1, length))
        other = (
            self.draw(st.sampled_from(same))
            if self.draw(st.booleans())
            else self.constant([self.draw(st.integers(-3, 9))])
        )
        if op_type in ("Div", "Mod"):
            other = self.node("Max", [other, self.constant([1])])
        if op_type == "Mul":
            other = self.node("Min", [other, self.constant([50])])
        self.keep(self.node(op_type, [name, other]), length)

    def choice(self, name: str, length: int) -> None:
        less = self.node(
            self.draw(st.sampled_from(["Less", "Equal", "GreaterOrEqual"])),
            [name, self.constant([self.draw(st.integers(0, 6))])],
        )
        self.keep(self.node("Where", [less, name, self.constant([self.draw(st.integers(-2, 7))])]), length)

    def through_floats(self, name: str, length: int) -> None:
        """ceil(x / n), as exporters that know no integer division of lengths write it."""
        bounded = self.node("Clip", [name, self.constant(-1000), self.constant(1000)])
        value = self.node("Cast", [bounded], to=TensorProto.FLOAT)
        array = np.array(self.draw(st.sampled_from([3.0, 0.7, 64.0])), np.float32)
        self.constants.append(onnx.numpy_helper.from_array(array, f"c{len(self.constants)}"))
        value = self.node("Div", [value, self.constants[-1].name])
        value = self.node(self.draw(st.sampled_from(["Ceil", "Floor", "Round"])), [value])
        self.keep(self.node("Cast", [value], to=TensorProto.INT64), length)

    def branch(self, name: str, length: int) -> None:
        first = self.node("Gather", [name, self.constant(0)])
        condition = self.node("Less", [first, self.constant(self.draw(st.integers(0, 8)))])
        number = len(self.nodes)

        def body(label: str, op_type: str) -> onnx.GraphProto:
            node = helper.make_node(op_type, [name], [f"{label}{number}"])
            value = helper.make_tensor_value_info(f"{label}{number}", TensorProto.INT64, [length])
            return helper.make_graph([node], f"{label}_part{number}", [], [value])

        then_branch, else_branch = body("t", "Neg"), body("e", "Identity")
        self.keep(self.node("If", [condition], then_branch=then_branch, else_branch=else_branch), length)

    def use(self, name: str, number: int) -> None:
        """Make something of the sizes in ``name``: each of them between 1 and 6."""
        positive = self.node("Abs", [name])
        small = self.node("Add", [self.node("Mod", [positive, self.constant([6])]), self.constant([1])])
        sizes = self.node("Slice", [small, self.constant([0]), self.constant([3]), self.constant([0])])
        made = self.node("ConstantOfShape", [sizes])
        flat = self.node("Reshape", [made, self.constant([-1, 1])])
        scaled = self.node("Expand", [flat, self.node("Concat", [self.constant([1]), self.constant([2])], axis=0)])
        for value, kind in ((name, TensorProto.INT64), (scaled, TensorProto.FLOAT)):
            out = f"out{number}_{kind}"
            self.nodes.append(helper.make_node("Identity", [value], [out], name=f"id_{out}"))
            rank = 1 if kind == TensorProto.INT64 else 2
            self.outputs.append(helper.make_tensor_value_info(out, kind, [f"{out}.{axis}" for axis in range(rank)]))


@st.composite
def _models(draw: st.DrawFn) -> onnx.ModelProto:
    graph = _Graph(draw)
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]),
        helper.make_tensor_value_info("past", TensorProto.FLOAT, ["B", 2, "P", 4]),
    ]
    graph.keep(graph.node("Shape", ["input_ids"]), 2)
    graph.keep(graph.node("Shape", ["past"]), 4)
    graph.keep(graph.node("Reshape", [graph.node("Size", ["past"]), graph.constant([1])]), 1)
    for _ in range(draw(st.integers(3, 14))):
        graph.step()
    for number, name in enumerate(list(graph.lists)[-3:]):
        graph.use(name, number)
    made = helper.make_graph(graph.nodes, "random", inputs, graph.outputs, graph.constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@given(
    _models(),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 9)),
    st.sets(st.sampled_from("BSP"), min_size=1),
)
def test_random_shape_arithmetic(proto, sizes, names):
    numbers = dict(zip("BSP", sizes, strict=True))
    feeds = {
        "input_ids": np.zeros((numbers["B"], numbers["S"]), np.int64),
        "past": np.zeros((numbers["B"], 2, numbers["P"], 4), np.float32),
    }
    # Anything that overflows or divides by zero in the original is not about bind-dims.
    run(proto, feeds)
    model = ir.from_proto(proto)
    spec = f"dims=[{','.join(f'{name}:{numbers[name]}' for name in sorted(names))}]"
    bind(model, spec)
    assert_same(proto, model, feeds)
    if len(names) == 3:
        assert shape_nodes(model) == []
        assert all(node.op_type not in ("If", "Gather", "Concat", "Where") for node in model.graph)
    again = ir.serde.from_proto(ir.to_proto(model))
    assert not bind(again, spec).changed
