from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from graphsurgery.equivalence.dims import declared_dims, evaluate


def test_digits_are_numbers_and_undeclared_dims_are_marked():
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "2", 3, None, "a + b"])
    assert declared_dims(value) == ("batch", 2, 3, "?", "a + b")


def test_no_shape_and_no_tensor():
    assert declared_dims(helper.make_tensor_value_info("x", TensorProto.FLOAT, None)) is None
    assert declared_dims(helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)) is None


@pytest.mark.parametrize(
    ("dim", "size"),
    [
        (4, 4),
        ("s", 5),
        ("past + s", 12),
        ("past - s", 2),
        ("2*s", 10),
        ("batch*(past + s)", 36),
        ("past//2", 3),
        ("unknown + s", None),
        ("s / 0", None),
        ("s s", None),
        ("max(s, past)", None),
    ],
)
def test_evaluate(dim, size):
    assert evaluate(dim, {"s": 5, "past": 7, "batch": 3}) == size
