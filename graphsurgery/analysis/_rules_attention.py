"""Shape rules of attention ops, of the standard and of the contrib domain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis import dims
from graphsurgery.analysis._facts import Fact, rule_table

if TYPE_CHECKING:
    from graphsurgery.analysis._facts import Call, Shape
    from graphsurgery.analysis.dims import Dim

__all__ = ["TABLE"]


def _over(dim: Dim, divisor: Dim) -> Dim | None:
    """``dim / divisor`` where that is whole."""
    return None if divisor == 0 else dims.exact_div(dim, divisor)


def _known(call: Call, dim: Dim | None) -> Dim:
    return call.fresh() if dim is None else dim


def _standard(call: Call) -> list[Fact]:
    """Attention 23 and up: ``[B, H, S, D]``, or ``[B, S, H*D]`` with head counts as attributes; P + T keys."""
    dtype = call.dtype(0)
    query = _heads_first(call, 0, "q_num_heads")
    key = _heads_first(call, 1, "kv_num_heads")
    value = _heads_first(call, 2, "kv_num_heads")
    if query is None or key is None or value is None:
        return [Fact(None, dtype)] * 4
    past = call.shape(4) if call.has(4) else None
    before: Dim = 0 if not call.has(4) else call.fresh() if past is None else past[2]
    batch, heads, rows, _ = query
    flat = len(call.shape(0) or ()) == 3
    output: Shape = (batch, rows, heads * value[3]) if flat else (batch, heads, rows, value[3])
    present_key = (key[0], key[1], before + key[2], key[3])
    present_value = (value[0], value[1], before + value[2], value[3])
    scores = (batch, heads, rows, before + key[2])
    return [
        Fact(output, dtype),
        Fact(present_key, call.dtype(1)),
        Fact(present_value, call.dtype(2)),
        Fact(scores, dtype),
    ]


def _heads_first(call: Call, index: int, count: str) -> Shape | None:
    """Input ``index`` as ``[B, heads, rows, head size]``."""
    shape = call.shape(index)
    if shape is None or len(shape) == 4:
        return shape
    heads = call.number(count, 0)
    if len(shape) != 3 or heads < 1:
        return None
    return shape[0], heads, shape[1], _known(call, _over(shape[2], heads))


def _grouped(call: Call) -> list[Fact]:
    """GroupQueryAttention: packed or separate query, key and value.

    The cache holds max(P, total) positions; with ``sliding_window_cache`` it keeps the capacity that it is given.
    """
    query, dtype = call.shape(0), call.dtype(0)
    heads, kv_heads = call.number("num_heads", 1), call.number("kv_num_heads", 1)
    if query is None or len(query) != 3:
        return [Fact(None, dtype)] * 4
    size = _known(call, _over(query[2], heads if call.has(1) else heads + 2 * kv_heads))
    past = call.shape(3) if call.has(3) else None
    total = call.value(6) if call.has(6) else None
    length = None if total is None else total.single
    if call.number("sliding_window_cache", 0) and past is not None:
        kept: Dim = past[2]
    elif length is None or (call.has(3) and past is None):
        kept = call.fresh()
    else:
        kept = length if past is None else dims.maximum(past[2], length)
    cache = (query[0], kv_heads, kept, size)
    scores = (query[0], heads, query[1], _known(call, length))
    return [
        Fact((query[0], query[1], heads * size), dtype),
        Fact(cache, call.dtype(3) or dtype),
        Fact(cache, call.dtype(4) or dtype),
        Fact(scores, dtype),
    ]


def _multi_head(call: Call) -> list[Fact]:
    """MultiHeadAttention: query ``[B, S, H*D]`` or packed ``[B, S, H, 3, D]``; key flat, per head or packed with value."""
    query, key, value, dtype = call.shape(0), call.shape(1), call.shape(2), call.dtype(0)
    heads = call.number("num_heads", 1)
    if query is None or len(query) not in {3, 5}:
        return [Fact(None, dtype)] * 4
    size = query[4] if len(query) == 5 else _known(call, _over(query[2], heads))
    value_size: Dim = size
    length: Dim | None = query[1]
    if len(query) == 3 and call.has(1):
        length = None
        if key is not None:
            length = key[2] if len(key) == 4 else key[1]
        if value is not None and call.has(2):
            value_size = value[3] if len(value) == 4 else _known(call, _over(value[2], heads))
    keys = _known(call, length)
    total = _with_past(call, keys)
    return [
        Fact((query[0], query[1], heads * value_size), dtype),
        Fact((query[0], heads, total, size), dtype),
        Fact((query[0], heads, total, value_size), dtype),
        Fact((query[0], heads, query[1], total), dtype),
    ]


def _with_past(call: Call, keys: Dim) -> Dim:
    if not call.has(6):
        return keys
    past = call.shape(6)
    if call.has(8):  # past_sequence_length: past and present share one buffer
        return call.fresh() if past is None else past[2]
    return call.fresh() if past is None else past[2] + keys


def _packed(call: Call) -> list[Fact]:
    """com.microsoft Attention: input ``[B, S, N]``, weights ``[N, q + k + v]``, past ``[2, B, H, P, D]``."""
    data, weights, dtype = call.shape(0), call.shape(1), call.dtype(0)
    heads = call.number("num_heads", 1)
    if data is None or len(data) != 3:
        return [Fact(None, dtype), Fact(None, dtype)]
    listed = call.numbers("qkv_hidden_sizes")
    if listed is not None and len(listed) == 3:
        hidden: Dim | None = listed[2]
    else:
        hidden = None if weights is None else _over(weights[-1], 3)
    width = _known(call, hidden)
    past = call.shape(4) if call.has(4) else None
    total: Dim = data[1]
    if call.has(4):
        total = (
            call.fresh()
            if past is None
            else past[3]
            if call.number("past_present_share_buffer", 0)
            else past[3] + total
        )
    present = (2, data[0], heads, total, _known(call, _over(width, heads)))
    return [Fact((data[0], data[1], width), dtype), Fact(present, dtype)]


def _rotary(call: Call) -> Fact:
    return Fact(call.shape(0), call.dtype(0))


def _embed_layer_normalization(call: Call) -> list[Fact]:
    ids, table, dtype = call.shape(0), call.shape(2), call.dtype(2)
    if ids is None or table is None:
        return [Fact(None, dtype), Fact(None, ir.DataType.INT32), Fact(None, dtype)]
    hidden = ids + table[1:]
    return [Fact(hidden, dtype), Fact(ids[:1], ir.DataType.INT32), Fact(hidden, dtype)]


TABLE = rule_table(
    ("", "Attention", _standard),
    ("", "RotaryEmbedding", _rotary),
    ("com.microsoft", "RotaryEmbedding", _rotary),
    ("com.microsoft", "GroupQueryAttention", _grouped),
    ("com.microsoft", "MultiHeadAttention", _multi_head),
    ("com.microsoft", "Attention", _packed),
    ("com.microsoft", "EmbedLayerNormalization", _embed_layer_normalization),
)
