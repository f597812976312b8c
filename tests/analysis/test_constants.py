"""Constants are known where they are in the file, and nothing else is read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.analysis.constants import MAX_ELEMENTS, const_int, const_ints, const_scalar, constant_of


def _initializer(data, name: str = "w") -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.asarray(data), name=name))
    ir.Graph([], [], nodes=[], initializers=[value])
    return value


@pytest.mark.parametrize(
    ("name", "attribute", "expected", "dtype"),
    [
        ("value", ir.tensor(np.array([[1, 2]], np.int32)), [[1, 2]], np.int32),
        ("value_int", 7, 7, np.int64),
        ("value_ints", [1, -1], [1, -1], np.int64),
        ("value_float", 0.5, 0.5, np.float32),
        ("value_floats", [0.5, 2.0], [0.5, 2.0], np.float32),
    ],
)
def test_every_spelling_of_a_constant_node(name, attribute, expected, dtype):
    value = ir.node("Constant", [], {name: attribute}).outputs[0]
    array = constant_of(value)
    assert array is not None
    assert array.dtype == dtype
    assert array.tolist() == expected


def test_a_text_constant_is_unknown():
    assert constant_of(ir.node("Constant", [], {"value_string": "x"}).outputs[0]) is None
    tensor = ir.StringTensor([b"x"], shape=ir.Shape([1]))
    assert constant_of(ir.node("Constant", [], {"value": tensor}).outputs[0]) is None


def test_identities_are_seen_through():
    value = _initializer([3])
    for _ in range(3):
        value = ir.node("Identity", [value]).outputs[0]
    assert const_ints(value) == (3,)
    other = ir.node("Identity", [_initializer([3])], domain="vendor").outputs[0]
    assert constant_of(other) is None


def test_an_initializer_that_is_an_input_is_unknown_unless_told_otherwise():
    value = ir.Value(name="w", const_value=ir.tensor([3], name="w"))
    ir.Graph([value], [], nodes=[], initializers=[value])
    assert constant_of(value) is None
    assert const_int(value, overridable=False) == 3


def test_nothing_outside_the_file_is_read(tmp_path):
    absent = ir.ExternalTensor("absent.data", 0, 8, ir.DataType.INT64, shape=ir.Shape([1]), name="w", base_dir=tmp_path)

    def compute():
        raise AssertionError("a lazy tensor was computed")

    lazy = ir.LazyTensor(compute, dtype=ir.DataType.INT64, shape=ir.Shape([1]), name="lazy")
    for tensor in (absent, lazy):
        value = ir.Value(name="w", const_value=tensor)
        ir.Graph([], [], nodes=[], initializers=[value])
        assert constant_of(value) is None
        assert constant_of(ir.node("Constant", [], {"value": tensor}).outputs[0]) is None


def test_large_tensors_count_as_unknown():
    assert constant_of(_initializer(np.zeros(MAX_ELEMENTS))) is not None
    assert constant_of(_initializer(np.zeros(MAX_ELEMENTS + 1))) is None


def test_absent_and_computed_values_are_unknown():
    assert constant_of(None) is None
    assert constant_of(ir.Value(name="x")) is None
    assert constant_of(ir.node("Neg", [_initializer([1])]).outputs[0]) is None


def test_conveniences():
    assert const_int(_initializer(np.array([[4]]))) == 4
    assert const_int(_initializer(np.array(True))) == 1
    assert const_int(_initializer([1, 2])) is None
    assert const_int(_initializer([1.0])) is None
    assert const_ints(_initializer(np.array([[1, 2], [3, 4]]))) == (1, 2, 3, 4)
    assert const_ints(_initializer([0.5])) is None
    assert const_scalar(_initializer(np.float32(0.125))) == 0.125
    assert const_scalar(_initializer(np.array([2], np.uint8))) == 2
    assert const_scalar(_initializer(np.array(False))) is False
    assert const_scalar(_initializer([1.0, 2.0])) is None
    assert const_scalar(_initializer(np.array([0.5], ml_dtypes.bfloat16))) == 0.5
    assert const_scalar(_initializer(np.array([0.5], np.float16))) == 0.5
