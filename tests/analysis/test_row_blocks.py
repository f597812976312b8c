"""Parts that compute rows as a whole: what they read, what counts rows in them, and when they cannot be cut."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphsurgery.analysis.dims import symbol
from graphsurgery.analysis.row_blocks import RowBlock, multiple_of, row_block
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.analysis.slices import Blocked, RowAxis

# Rows are turned around by an order from outside, and back: no node of it keeps them.
_TEXT = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[t, 4] x, int64[{chosen}] order) => (float[t, 4] y, float[n, 4] other) <int64 zero = {{0}}, int64 one = {{1}}> {{
        sizes = Shape<start=0, end=1>(x)
        axes = Constant<value_ints=[0]>()
        count = Squeeze(sizes, axes)
        numbers = Range(zero, count, one)
        sorted = Gather<axis=0>(x, numbers)
        doubled = Add(sorted, sorted)
        y = Gather<axis=0>(doubled, numbers)
        other = {other}
    }}
"""


def _model(other: str = "Gather(x, order)", chosen: str = "n") -> ir.Model:
    return ir.from_onnx_text(_TEXT.format(other=other, chosen=chosen))


def _block(model: ir.Model, first: str, last: str = "y") -> RowBlock | Blocked:
    nodes = [node for node in model.graph if node.outputs[0].name != "other"]
    names = [node.outputs[0].name for node in nodes]
    inside = nodes[names.index(first) : names.index(last) + 1]
    return row_block(inside[-1].outputs[0], [model.graph.inputs[0]], inside, symbol("t"), symbol("t"), shapes_of(model))


def test_everything_that_reads_an_operand_is_told_even_its_size():
    model = _model()
    block = _block(model, "sizes")
    assert isinstance(block, RowBlock)
    assert [(node.op_type, index) for node, index, _ in block.reads] == [("Shape", 0), ("Gather", 0)]
    assert block.recounts == ()


def test_numbers_from_outside_are_made_anew():
    block = _block(_model(), "sorted")
    assert isinstance(block, RowBlock)
    assert [(item.node.op_type, item.index, item.factor) for item in block.recounts] == [
        ("Gather", 1, 1),
        ("Gather", 1, 1),
    ]


def test_a_list_that_tells_the_number_of_rows_is_told_the_new_one():
    block = _block(_model(), "numbers")
    assert isinstance(block, RowBlock)
    assert [(item.node.op_type, item.index, item.factor, item.position) for item in block.recounts] == [
        ("Range", 1, 1, 0)
    ]


@pytest.mark.parametrize(
    ("model", "first", "reason"),
    [
        (_model("Identity(doubled)"), "sorted", "'doubled' inside the block is read elsewhere"),
        (_model(), "doubled", "'sorted' counts the rows of the block and is computed elsewhere"),
    ],
)
def test_what_cannot_be_cut_is_said(model, first, reason):
    block = _block(model, first)
    assert isinstance(block, Blocked)
    assert block.reason == reason


def test_a_fixed_number_of_rows_stays():
    model = _model()
    nodes = list(model.graph)[:-1]
    block = row_block(nodes[-1].outputs[0], [model.graph.inputs[0]], nodes, 8, 8, shapes_of(model))
    assert isinstance(block, Blocked)
    assert block.reason == "what makes 'y' computes a fixed number of rows"


def test_an_operand_of_another_rank_carries_the_rows_elsewhere():
    model = _model()
    block = _block(model, "sizes")
    assert isinstance(block, RowBlock)
    x = model.graph.inputs[0]
    assert block.layout(x, RowAxis(0, flat=True), shapes_of(model)) == RowAxis(0, flat=True)


def test_multiples():
    t, k = symbol("t"), symbol("k")
    assert multiple_of(3 * t, t) == 3
    assert multiple_of(3 * t * k, t * k) == 3
    assert multiple_of(t + 1, t) is None
    assert multiple_of(3 * t, 2 * t) is None
    assert multiple_of(6, t) is None
