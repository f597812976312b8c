"""What masks let queries see: earlier keys, a window or a chunk of them; wherever the mask is and whatever its sizes are called."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.passes.block_attention import BlockAttention
from graphsurgery.patterns.attention import find_attentions
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
