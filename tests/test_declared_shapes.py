"""Declared shapes after sizes became known."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphsurgery.analysis.dims import Dim, parse_dim
from graphsurgery.editing.declared_shapes import redeclare


def shape(*texts: str | int) -> tuple[Dim, ...]:
    sizes = tuple(text if isinstance(text, int) else parse_dim(text) for text in texts)
    return tuple(size for size in sizes if size is not None)


def value(*sizes: str | int | None) -> ir.Value:
    return ir.Value(name="v", shape=ir.Shape(sizes))


def declared(found: ir.Value) -> list[int | str | None] | None:
    return None if found.shape is None else [size if isinstance(size, int) else size.value for size in found.shape]


@pytest.mark.parametrize(
    ("before", "inferred", "numbers", "after"),
    [
        (("B", "S", 4), shape(2, 3, 4), {"B": 2, "S": 3}, [2, 3, 4]),
        (("B", "S", 4), shape("B", 3, 4), {"S": 3}, ["B", 3, 4]),
        # Numbers that are inferred are right, whatever was declared.
        (("B", 7, None), shape("B", 3, 4), {}, ["B", 3, 4]),
        (("2", "P + S"), shape(2, "P + 3"), {"S": 3}, [2, "P + 3"]),
        (("B*S", "P + S"), None, {"B": 2, "S": 3}, [6, "P + 3"]),
        (("S - 5",), None, {"S": 3}, [None]),
        (("P // (S // 4)", "P // (S // 4)"), None, {"S": 8}, ["floordiv(P, 2)", "floordiv(P, 2)"]),
        (("6 // (S // 4)",), None, {"S": 3}, [None]),
        (("B", "S"), shape(2, 3, 4), {}, [2, 3, 4]),
        (("B", "S"), shape("X", 3, 4), {}, [None, 3, 4]),
        (("seq-len",), None, {"seq": 3}, ["seq-len"]),
    ],
)
def test_one_context(before, inferred, numbers, after):
    found = value(*before)
    redeclare(found, [inferred], numbers)
    assert declared(found) == after


def test_contexts_that_differ():
    found = value("B", "S", None)
    redeclare(found, [shape(2, 3, 4), shape(2, 5, 4)], {})
    assert declared(found) == [2, "S", 4]


def test_shapes_are_made_for_outputs_only():
    found = ir.Value(name="v")
    redeclare(found, [shape(2, "S")], {})
    assert declared(found) is None
    redeclare(found, [shape(2, "S")], {}, create=True)
    assert declared(found) == [2, None]
    other = ir.Value(name="v")
    redeclare(other, [None], {}, create=True)
    assert declared(other) is None


def test_an_unchanged_shape_is_the_same_object():
    found = value("B", 4)
    before = found.shape
    redeclare(found, [shape("B", 4)], {"S": 3})
    assert found.shape is before
