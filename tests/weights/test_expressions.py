"""What expressions give, their simplest forms, and what stands against them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_io import load
from graphsurgery.weights import (
    Part,
    SourceName,
    Stack,
    Transpose,
    View,
    WeightTensor,
    bytes_moved,
    evaluate,
    obstacle,
    parse_record,
    realise,
    record_of,
    shape_of,
    simplify,
    sources_of,
)
from tests.strategies.weight_trees import ELEMENT_TYPES, draw_array, expressions, write_model


def _value(name: str, array: np.ndarray) -> ir.Value:
    return ir.Value(name=name, const_value=ir.Tensor(array, name=name))


W = _value("w", np.arange(24, dtype=np.float32).reshape(4, 2, 3))
X = _value("x", np.arange(24, 48, dtype=np.float32).reshape(4, 2, 3))


def _arrays() -> dict[Any, np.ndarray]:
    return {value: np.asarray(value.const_value) for value in (W, X)}


PARTS = tuple(View(W, 6 * number, (2, 3)) for number in range(4))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (View(View(W, 6, (3, 6)), 6, (2, 3)), View(W, 12, (2, 3))),
        (View(W, 0, (4, 2, 3)), W),
        (Stack(PARTS), W),
        (Stack(PARTS[1:3]), View(W, 6, (2, 2, 3))),
        (Stack(PARTS[::-1]), Stack(PARTS[::-1])),
        (Stack((W,)), View(W, 0, (1, 4, 2, 3))),
        (View(Stack((W, X)), 30, (2, 3)), View(X, 6, (2, 3))),
        (View(Stack((X, W, X)), 24, (2, 4, 2, 3)), Stack((W, X))),
        (Transpose(Transpose(W, (1, 2, 0)), (2, 0, 1)), W),
        (Transpose(View(W, 0, (1, 4, 6)), (1, 0, 2)), View(W, 0, (4, 1, 6))),
        (Transpose(Stack((PARTS[0], PARTS[3])), (0, 2, 1)), Stack((Transpose(PARTS[0], (1, 0)), Transpose(PARTS[3], (1, 0))))),
        (View(Transpose(W, (0, 2, 1)), 6, (3, 2)), Transpose(PARTS[1], (1, 0))),
    ],
)  # fmt: skip
def test_simplest_forms(expression, expected):
    assert simplify(expression) == expected


@given(st.data())
def test_the_simplest_form_gives_the_same(data):
    arrays = _arrays()
    expression = data.draw(expressions([W, X]))
    whole = evaluate(expression, arrays)
    assert whole.shape == shape_of(expression)
    assert obstacle(expression) is None
    np.testing.assert_array_equal(evaluate(simplify(expression), arrays), whole)
    assert simplify(simplify(expression)) == simplify(expression)


@given(st.data())
def test_a_record_says_the_same_of_names(data):
    expression = data.draw(expressions([W, X]))
    text = record_of(expression)
    read = parse_record(text)
    arrays = _arrays()
    named = {source: arrays[{"w": W, "x": X}[str(source.name)]] for source in sources_of(read)}
    assert all(isinstance(source, SourceName) and source.shape == (4, 2, 3) for source in named)
    np.testing.assert_array_equal(evaluate(read, named), evaluate(expression, arrays))
    assert record_of(read) == text


def test_a_record_leads_back_to_the_first_sources():
    made = _value("made", np.zeros((2, 3), np.float32))
    assert made.const_value is not None
    made.const_value.metadata_props["graphsurgery.weight"] = record_of(PARTS[2])
    assert record_of(Transpose(made, (1, 0))) == (
        '["transpose",["view",["source","w",[4,2,3],"FLOAT"],12,[2,3]],[1,0]]'
    )


@pytest.mark.parametrize("text", ["", "7", "[]", '["view"]', '["source","w",[2],"NONE"]', '["sum",[]]', "[" * 5000])
def test_damaged_records_are_refused(text):
    with pytest.raises(InputRefusedError, match=r"graphsurgery\.weight.*remove it"):
        parse_record(text)


# ---- against the bytes of files ------------------------------------------------------------------------------------


@given(data=st.data(), dtype=st.sampled_from(ELEMENT_TYPES), external=st.booleans())
def test_bytes_are_those_of_numpy(data, dtype, external, tmp_path_factory):
    shape = data.draw(st.sampled_from([(4, 2, 3), (3, 2, 4), (2, 8), (5, 4), (6,)]))
    generator = np.random.default_rng(7)
    arrays = {name: draw_array(generator, dtype, shape) for name in ("w", "x", "y")}
    model = load(write_model(tmp_path_factory.mktemp("made") / "model.onnx", arrays, external=external))
    values = [model.graph.initializers[name] for name in arrays]
    expression = data.draw(expressions(values))
    expected = evaluate(expression, {value: arrays[str(value.name)] for value in values})
    reason = obstacle(expression)
    if reason is not None:
        assert dtype.bitwidth == 4
        assert reason.endswith("are 4 bits and would not begin at a byte.")
        return
    tensor = realise(simplify(expression), "made")
    if not expected.size:
        return
    assert tensor.tobytes() == ir.Tensor(expected).tobytes()
    np.testing.assert_array_equal(tensor.numpy(), expected)
    assert tuple(tensor.shape.numpy()) == expected.shape
    # What is a reference is one without a byte being moved, and nothing else is.
    if external:
        assert bytes_moved(expression) == (0 if isinstance(tensor, ir.ExternalTensor) else tensor.nbytes)


def test_neighbours_in_a_file_are_stacked_by_reference(tmp_path):
    arrays = {f"e{number}": np.full((2, 3), number, np.float32) for number in range(4)}
    model = load(write_model(tmp_path / "model.onnx", arrays, external=True))
    values = list(model.graph.initializers.values())
    tensor = realise(simplify(Stack(tuple(values[1:]))), "made")
    assert isinstance(tensor, ir.ExternalTensor)
    assert (tensor.offset, tensor.length, tensor.location) == (24, 72, "model.onnx.data")
    assert isinstance(realise(Stack((values[0], values[2])), "made"), WeightTensor)
    assert bytes_moved(Stack(tuple(values[1:]))) == 0
    assert bytes_moved(Stack((values[0], values[2]))) == 48


def test_without_the_data_file_views_are_possible_and_layouts_are_not(tmp_path):
    arrays = {"w": np.zeros((4, 2, 3), np.float32), "x": np.zeros((4, 2, 3), np.float32)}
    path = write_model(tmp_path / "model.onnx", arrays, external=True)
    data = path.with_name("model.onnx.data")
    data.unlink()
    model = load(path)
    w, x = model.graph.initializers.values()
    assert obstacle(View(w, 6, (2, 3))) is None
    assert obstacle(Stack((w, x))) is None  # neighbours
    assert obstacle(Stack((x, w))) == (
        f"the bytes of 'x' would have to be laid out anew and their file {data} is absent."
    )
    data.write_bytes(bytes(100))
    assert obstacle(Transpose(x, (1, 0, 2))) == (
        f"the bytes of 'x' would have to be laid out anew and their file {data} ends before them."
    )
    assert obstacle(Transpose(w, (1, 0, 2))) is None


def test_what_stands_against_an_expression():
    other = _value("other", np.zeros((2, 3), np.float16))
    lazy = ir.Value(name="lazy")
    lazy.const_value = ir.LazyTensor(lambda: ir.tensor([1.0]), ir.DataType.FLOAT, ir.Shape([1]))
    node = ir.Node("", "Constant", [], num_outputs=1)
    node.outputs[0].name, node.outputs[0].const_value = "c", ir.tensor([1.0])
    graph_input = _value("given", np.zeros(3, np.float32))
    ir.Graph([graph_input], [], nodes=[])
    words = ir.Value(name="words", const_value=ir.StringTensor([b"a"], shape=ir.Shape([1])))
    cases: dict[Part, str] = {
        View(W, 20, (2, 3)): "a view of elements 20 to 26 leaves 'w', which has 24.",
        View(W, -1, (2,)): "a view of elements -1 to 1 leaves 'w', which has 24.",
        Stack((W, PARTS[0])): "'w' and 'w' cannot be stacked: their shapes are [4, 2, 3] and [2, 3].",
        Stack((PARTS[0], other)): "'w' and 'other' cannot be stacked: their element types are FLOAT and FLOAT16.",
        Stack(()): "a stack has no parts.",
        Transpose(W, (0, 1)): "the axes (0, 1) are no permutation of those of 'w', [4, 2, 3].",
        View(ir.Value(name="v"), 0, (1,)): "'v' has no stored value, so that no weight can be made of it.",
        View(lazy, 0, (1,)): "'lazy' is a LazyTensor, whose layout is not known.",
        View(node.outputs[0], 0, (1,)): "'c' is made by a node, so that where its bytes lie is not known.",
        View(graph_input, 0, (1,)): "'given' is a graph input with a default, which callers may override.",
        View(words, 0, (1,)): "'words' holds strings, which have no fixed size.",
    }
    assert {expression: obstacle(expression) for expression in cases} == cases


def test_a_length_that_is_not_that_of_the_shape_is_an_unknown_layout():
    value = ir.Value(name="w")
    value.const_value = ir.ExternalTensor("d", 0, 30, ir.DataType.FLOAT, shape=ir.Shape([6]), name="w")
    assert obstacle(View(value, 0, (3,))) == (
        "'w' takes 24 bytes and its external data states 30: its layout is not known."
    )


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("perm", [None, (1, 0), (0, 2, 1), (2, 1, 0)])
def test_no_chunk_is_large_whatever_the_size(tmp_path, perm):
    """A sparse file of 80 MB: what is streamed comes in bounded chunks and holds the numbers that are there."""
    from graphsurgery.weights.streaming import CHUNK_BYTES, chunks

    shape = (2000, 10000) if perm is None or len(perm) == 2 else (10, 200, 10000)
    size = math.prod(shape) * 4
    value = ir.Value(name="w")
    value.const_value = ir.ExternalTensor(
        "data", 0, size, ir.DataType.FLOAT, shape=ir.Shape(shape), name="w", base_dir=tmp_path
    )
    with open(tmp_path / "data", "wb") as file:
        file.seek(size - 4)
        file.write(np.float32(1).tobytes())
    half = View(value, math.prod(shape) // 2, (shape[0] // 2, *shape[1:]))
    first = View(value, 0, half.shape)
    expression = Stack((half, first)) if perm is None else Transpose(value, perm)
    tensor = realise(simplify(expression), "made")
    assert isinstance(tensor, WeightTensor)
    total, ones = 0, []
    for chunk in chunks(tensor.pieces()):
        assert len(chunk) <= CHUNK_BYTES
        found = np.flatnonzero(np.frombuffer(chunk, np.float32))
        ones += [total // 4 + int(position) for position in found]
        total += len(chunk)
    assert total == size
    assert ones == [size // 8 - 1 if perm is None else size // 4 - 1]
