"""What masks let queries see: earlier keys, a window or a chunk of them; wherever the mask is and whatever its sizes are called."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.passes.block_attention import BlockAttention
from graphsurgery.patterns.attention.finding import find_attentions
from graphsurgery.patterns.matcher import GraphIndex

EARLIER = "seen = LessOrEqual(columns, rows)"
WINDOW = """width = Constant<value = int64 {4}>()
    first = Sub(rows, width)
    later = Greater(columns, first)
    earlier = LessOrEqual(columns, rows)
    seen = And(earlier, later)"""
CHUNK = """size = Constant<value = int64 {4}>()
    row_chunks = Div(rows, size)
    column_chunks = Div(columns, size)
    alike = Equal(column_chunks, row_chunks)
    earlier = LessOrEqual(columns, rows)
    seen = And(earlier, alike)"""
SEGMENTS = """of_rows = Identity(rows)
    alike = Equal(columns, of_rows)
    earlier = LessOrEqual(columns, rows)
    seen = And(earlier, alike)"""
DECOMPOSED = """turned = Transpose<perm = [0, 1, 3, 2]>(key)
    scores = MatMul(query, turned)
    masked = Add(scores, mask)
    weights = Softmax<axis = -1>(masked)
    out = MatMul(weights, value)"""
MASKS = [(EARLIER, "full"), (WINDOW, "sliding"), (CHUNK, "chunked"), (SEGMENTS, "full")]


def model_of(allowed: str, attention: str, total: str = "T") -> ir.Model:
    text = f"""<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
    attend (float[B,2,S,4] query, float[B,2,{total},4] key, float[B,2,{total},4] value, int64[S,1] rows, int64[T] columns)
        => (float[B,2,S,4] out)
    {{
        {allowed}
        zero = Constant<value = float {{0.0}}>()
        low = Constant<value = float {{-1000000.0}}>()
        mask = Where(seen, zero, low)
        {attention}
    }}"""
    model: ir.Model = ir.from_proto(onnx.parser.parse_model(text))
    return model


def kinds(model: ir.Model) -> tuple[str, ...]:
    (site,) = find_attentions(model, Shapes(model), GraphIndex(model))
    return site.kinds[1:]


@pytest.mark.parametrize(("allowed", "span"), MASKS)
def test_added_to_the_scores(allowed: str, span: str) -> None:
    assert kinds(model_of(allowed, DECOMPOSED)) == ("decomposed", "causal", span)


@pytest.mark.parametrize(("allowed", "span"), MASKS)
def test_the_symbol_of_another_layer(allowed: str, span: str) -> None:
    """The mask is made once, for a cache whose length has another name than that of this layer."""
    assert kinds(model_of(allowed, DECOMPOSED, total="U")) == ("decomposed", "causal", span)


@pytest.mark.parametrize(("allowed", "span"), MASKS)
def test_given_to_an_operator(allowed: str, span: str) -> None:
    assert kinds(model_of(allowed, "out = Attention(query, key, value, mask)")) == ("fused", "causal", span)


def test_sites_are_chosen_by_it() -> None:
    model = model_of(WINDOW, "out = Attention(query, key, value, mask)")
    (site,) = BlockAttention(q_blocks=2, sites=("sliding",)).find(model)
    assert "sliding" in site.kinds


def _table(width: int | None, spelling: str) -> ir.TensorProtocol:
    """A mask for 6 positions ``[1, 1, 6, 6]``, causal where a width is given, within it."""
    rows, columns = np.arange(6)[:, None], np.arange(6)[None, :]
    seen = (columns <= rows) & (columns > rows - (width or 6))
    table = {"seen": seen, "hidden": ~seen, "added": np.where(seen, 0.0, -1e9), "slopes": columns - 3.0 * rows}[
        spelling
    ]
    return ir.tensor(table.reshape(1, 1, 6, 6).astype(np.float32 if table.dtype.kind == "f" else np.bool_))


@pytest.mark.parametrize(
    ("spelling", "width", "found"),
    [
        ("seen", 4, ("causal", "sliding")),
        ("seen", None, ("causal", "full")),
        ("hidden", 4, ("causal", "sliding")),
        ("added", 4, ("causal", "sliding")),
        ("added", None, ("causal", "full")),
        ("slopes", 4, ("full",)),
    ],
)
def test_a_stored_table_tells_by_its_corners(spelling: str, width: int | None, found: tuple[str, ...]) -> None:
    step = {"seen": "Where(part, zero, low)", "hidden": "Where(part, low, zero)"}.get(spelling, "Identity(part)")
    model = model_of(
        f"""from = Constant<value = int64[2] {{0, 0}}>()
        axes = Constant<value = int64[2] {{2, 3}}>()
        S1 = Shape<start = 2, end = 3>(query)
        T1 = Shape<start = 2, end = 3>(key)
        to = Concat<axis = 0>(S1, T1)
        none = Constant<value = float {{0.0}}>()
        least = Constant<value = float {{-1000000.0}}>()
        part = Slice(table, from, to, axes)
        given = {step.replace("zero", "none").replace("low", "least")}
        seen = Constant<value = bool {{1}}>()""",
        DECOMPOSED.replace("Add(scores, mask)", "Add(scores, given)"),
    )
    stored = _table(width, spelling)
    table = ir.Value(name="table", const_value=stored, shape=ir.Shape([1, 1, 6, 6]), type=ir.TensorType(stored.dtype))
    model.graph.initializers.add(table)
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            if value is not None and value.name == "table":
                node.replace_input_with(index, table)
    # Keys are another input here, and nothing but a mask of both says that they are not another sequence.
    assert tuple(kind for kind in kinds(model)[1:] if kind != "cross") == found


@pytest.mark.parametrize(
    ("name", "span"), [("attention_mask", "full"), ("mask.sliding_attention", "sliding"), ("chunked_mask", "chunked")]
)
def test_the_name_of_a_mask_that_is_fed(name: str, span: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
    attend (float[B,2,S,4] query, float[B,2,T,4] key, float[B,2,T,4] value, float[B,1,S,T] mask) => (float[B,2,S,4] out)
    {{ {DECOMPOSED} }}"""
    model: ir.Model = ir.from_proto(onnx.parser.parse_model(text))
    model.graph.inputs[3].name = name
    assert span in kinds(model)


@pytest.mark.parametrize(
    "seen",
    [
        "seen = LessOrEqual(distance, width)",
        "seen = Greater(width, distance)",
        "far = Greater(distance, width)\n seen = Not(far)",
    ],
)
def test_a_window_to_both_sides(seen: str) -> None:
    allowed = f"""width = Constant<value = int64 {{4}}>()
        difference = Sub(rows, columns)
        distance = Abs(difference)
        {seen}"""
    assert kinds(model_of(allowed, DECOMPOSED))[:2] == ("decomposed", "sliding")
