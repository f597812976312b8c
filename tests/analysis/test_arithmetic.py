"""Small nodes computed outright: the same bits as ONNX Runtime, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from graphsurgery.analysis.arithmetic import compute, is_computed
from tests.passes.bound_runs import run

_FLOATS = st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=1, max_size=4)
_INTS = st.lists(st.integers(-1000, 1000), min_size=1, max_size=4)
_ANY = ("Add", "Sub", "Mul", "Max", "Min", "Div")
_UNARY_FLOAT = ("Neg", "Abs", "Sqrt", "Ceil", "Floor", "Round", "Sign", "Identity")
_COMPARED = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_REDUCED = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd")


def both(op_type: str, arrays: list[np.ndarray[Any, Any]], **attributes: object) -> tuple[Any, np.ndarray[Any, Any]]:
    """What :func:`compute` and ONNX Runtime make of a node."""
    names = [f"x{number}" for number in range(len(arrays))]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, arrays, strict=True)
    ]
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name="y")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    inferred = onnx.shape_inference.infer_shapes(proto)
    made = ir.from_proto(inferred).graph[0]
    truth = run(inferred, dict(zip(names, arrays, strict=True)))["y"]
    return compute(made, arrays, made.attributes), truth


def agree(op_type: str, arrays: list[np.ndarray[Any, Any]], **attributes: object) -> None:
    ours, truth = both(op_type, arrays, **attributes)
    assert ours is not None
    assert ours.dtype == truth.dtype
    assert ours.shape == truth.shape
    assert ours.tobytes() == truth.tobytes()


@given(st.sampled_from(_ANY + _COMPARED), _FLOATS, st.floats(0.125, 100, width=32))
def test_floats(op_type, items, other):
    agree(op_type, [np.array(items, np.float32), np.array(other, np.float32)])


@given(st.sampled_from(_ANY + _COMPARED), _INTS, st.integers(-50, 50).filter(bool))
def test_integers(op_type, items, other):
    agree(op_type, [np.array(items, np.int64), np.array([other], np.int64)])


@given(st.sampled_from(_UNARY_FLOAT), _FLOATS)
def test_one_operand(op_type, items):
    array = np.array(items, np.float32)
    agree(op_type, [np.abs(array) if op_type == "Sqrt" else array])


@given(st.sampled_from(_REDUCED), _INTS, st.booleans(), st.booleans())
def test_reductions(op_type, items, keep, axes):
    array = np.array(items, np.int64)[:, None]
    if op_type == "ReduceSum":
        agree(op_type, [array, np.array([0], np.int64)] if axes else [array], keepdims=int(keep))
    else:
        agree(op_type, [array], keepdims=int(keep))


@pytest.mark.parametrize("target", ["FLOAT", "DOUBLE", "INT64", "INT32", "BOOL", "UINT8"])
@pytest.mark.parametrize("source", [np.float32, np.int64, np.bool_])
def test_casts(source, target):
    agree("Cast", [np.array([0, 1, 2.5, 200], source)], to=getattr(TensorProto, target))


def test_where():
    agree("Where", [np.array([True, False]), np.array([1, 2], np.int64), np.array(7, np.int64)])


@pytest.mark.parametrize(
    ("op_type", "arrays", "attributes"),
    [
        ("Div", [np.array([1], np.int64), np.array([0], np.int64)], {}),
        ("Div", [np.array([1], np.float32), np.array([0], np.float32)], {}),
        ("Sqrt", [np.array([-1], np.float32)], {}),
        ("Add", [np.array([1, 2]), np.array([1, 2, 3])], {}),
        ("Add", [np.ones(17, np.int64), np.array([1])], {}),
        ("Add", [np.ones(1, np.float16), np.ones(1, np.float16)], {}),
        ("Cast", [np.array([300], np.int64)], {"to": TensorProto.UINT8}),
        ("Cast", [np.array([1e20], np.float32)], {"to": TensorProto.INT64}),
        ("Cast", [np.array([2049], np.int64)], {"to": TensorProto.FLOAT16}),
        ("ReduceSum", [np.ones(3, np.float32)], {}),
        ("Exp", [np.ones(1, np.float32)], {}),
    ],
)
def test_what_is_not_certain_is_not_computed(op_type, arrays, attributes):
    node = ir.node(op_type, [ir.Value() for _ in arrays], attributes)
    assert compute(node, arrays, node.attributes) is None


def test_other_domains_are_not_known():
    assert not is_computed(ir.node("Add", [], domain="vendor"))
    assert is_computed(ir.node("Add", []))
