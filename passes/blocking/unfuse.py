"""The operator Attention of opsets 23 and 24, written out so that it can be blocked.

Source: the operator's specification, with what it leaves open settled by ONNX Runtime's kernel (measured): the softcap
comes before the mask; a causal frontier starts behind the past where past keys are operands, else at the first key;
rows without a single attended key give zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.attention_sites import FusedAttention
    from graphsurgery.rewrite import Rewrite

__all__ = ["unfuse", "why_not_unfused"]

_INT64 = ir.DataType.INT64
_BOOL = ir.DataType.BOOL
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)


def why_not_unfused(site: FusedAttention) -> str | None:
    """Why the operator of ``site`` cannot be written out; None where it can."""
    node, view = site.node, site.body.view
    named = f"node {node.name!r}"
    if site.operator != "Attention":
        return f"{named} is a fused {site.operator}, left to the runtime's own kernel"
    if len(node.inputs) > 6 and node.inputs[6] is not None:
        return f"{named} takes the number of keys of each batch row as an operand"
    if len(node.outputs) > 3 and (node.outputs[3].uses() or node.outputs[3].is_graph_output()):
        return f"the scores of {named} are used as {node.outputs[3].name!r}"
    if any(name in node.attributes for name in ("left_window_size", "right_window_size")):
        return f"{named} has a window of its own"
    precision = node.attributes.get("softmax_precision")
    if precision is not None and precision.as_int() not in (0, int(ir.DataType.FLOAT)):
        return f"{named} asks for a softmax in another type"
    if view.dtype(site.query) not in _FLOATS:
        return f"the type of {site.query.name!r} is not known or not a float"
    for value in node.inputs[:3]:
        rank = view.rank(value) if value is not None else None
        if rank not in (3, 4):
            return f"{value.name if value is not None else 'an operand'!r} of {named} has no known rank of 3 or 4"
        if not isinstance(view.dim(value, -1) if value is not None else None, int):
            return f"the feature size of {value.name if value is not None else 'an operand'!r} is not known"
    query_heads, key_heads = _heads(node, view, 0), _heads(node, view, 1)
    if query_heads is None or key_heads is None or query_heads % key_heads:
        return f"the numbers of heads of {named} are not known"
    return None


def unfuse(rewrite: Rewrite, site: FusedAttention) -> ir.Node:
    """Write the operator out in front of itself, and let everything read that.

    Returns:
        The value product, by which the attention is found again.
    """
    return _Writer(rewrite, site).write()


def _heads(node: ir.Node, view: ShapeView, operand: int) -> int | None:
    value = node.inputs[operand]
    assert value is not None
    size: Dim | None = view.dim(value, 1)
    if view.rank(value) == 3:
        attribute = node.attributes.get("q_num_heads" if operand == 0 else "kv_num_heads")
        return attribute.as_int() if attribute is not None else None
    return size if isinstance(size, int) else None


class _Writer:
    def __init__(self, rewrite: Rewrite, site: FusedAttention) -> None:
        self._rewrite = rewrite
        self._node = site.node
        self._view = view = site.body.view
        dtype = view.dtype(site.query)
        assert dtype is not None
        self._dtype = dtype

    def write(self) -> ir.Node:
        rewrite, node = self._rewrite, self._node
        rewrite.before(node)
        query, key, value = (self._by_heads(index) for index in range(3))
        past = [node.inputs[index] if index < len(node.inputs) else None for index in (4, 5)]
        if past[0] is not None and past[1] is not None:
            key = self._emit("Concat", [past[0], key], "present_key", {"axis": 2})
            value = self._emit("Concat", [past[1], value], "present_value", {"axis": 2})
        presents = (key, value)
        key, value = self._expanded(key, "keys"), self._expanded(value, "values")
        transposed = self._emit("Transpose", [key], "keys_transposed", {"perm": [0, 1, 3, 2]})
        scores = self._emit("MatMul", [query, transposed], "scores")
        scores = self._emit("Mul", [scores, self._number(self._scale())], "scaled")
        scores = self._masked(self._capped(scores), presents[0], past[0])
        weights = self._emit("Softmax", [scores], "weights", {"axis": -1})
        nothing = self._emit("IsNaN", [weights], "no_key", dtype=_BOOL)
        weights = self._emit("Where", [nothing, self._number(0.0), weights], "weights_or_zero")
        product = self._emit("MatMul", [weights, value], "attended")
        result = self._like_output(product)
        for output, replacement in zip(node.outputs, (result, *presents), strict=False):
            rewrite.replace_all_uses(output, replacement)
        made = product.producer()
        assert made is not None
        return made

    def _emit(
        self,
        op_type: str,
        inputs: list[ir.Value | None],
        name: str,
        attributes: dict[str, object] | None = None,
        *,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        return self._rewrite.emit(op_type, inputs, attributes, name=name, dtype=dtype or self._dtype)

    def _number(self, number: float) -> ir.Value:
        return self._rewrite.constant(np.asarray(number, dtype=self._dtype.numpy()), "number")

    def _by_heads(self, operand: int) -> ir.Value:
        """An operand as ``[B, H, S, D]``."""
        value = self._node.inputs[operand]
        assert value is not None
        if self._view.rank(value) == 4:
            return value
        heads = _heads(self._node, self._view, operand)
        features = self._view.dim(value, -1)
        assert isinstance(heads, int)
        assert isinstance(features, int)
        shape = self._rewrite.constant([0, 0, heads, features // heads], "heads_apart")
        apart = self._emit("Reshape", [value, shape], "heads_apart")
        return self._emit("Transpose", [apart], "heads_first", {"perm": [0, 2, 1, 3]})

    def _expanded(self, value: ir.Value, name: str) -> ir.Value:
        """Key heads repeated for their group of query heads; blocking reads the unexpanded ones again."""
        query_heads, key_heads = _heads(self._node, self._view, 0), _heads(self._node, self._view, 1)
        assert query_heads is not None
        assert key_heads is not None
        repeats = query_heads // key_heads
        if repeats == 1:
            return value
        operand = 1 if name == "keys" else 2
        source = self._node.inputs[operand]
        features = self._view.dim(source, -1) if source is not None else None
        assert isinstance(features, int)
        if source is not None and self._view.rank(source) == 3:
            features //= key_heads
        constant = self._rewrite.constant
        apart = self._emit("Unsqueeze", [value, constant([2], "group")], f"{name}_grouped")
        spread = self._emit("Expand", [apart, constant([1, 1, repeats, 1, 1], "repeats")], f"{name}_repeated")
        return self._emit("Reshape", [spread, constant([0, query_heads, -1, features], "shape")], f"{name}_expanded")

    def _scale(self) -> float:
        attribute = self._node.attributes.get("scale")
        if attribute is not None:
            return attribute.as_float()
        value = self._node.inputs[0]
        assert value is not None
        features = self._view.dim(value, -1)
        assert isinstance(features, int)
        if self._view.rank(value) == 3:
            features //= _heads(self._node, self._view, 0) or 1
        return 1 / math.sqrt(features)

    def _capped(self, scores: ir.Value) -> ir.Value:
        attribute = self._node.attributes.get("softcap")
        cap = attribute.as_float() if attribute is not None else 0.0
        if cap <= 0:
            return scores
        number = self._number(cap)
        scores = self._emit("Div", [scores, number], "over_cap")
        scores = self._emit("Tanh", [scores], "bent")
        return self._emit("Mul", [scores, number], "capped")

    def _masked(self, scores: ir.Value, key: ir.Value, past: ir.Value | None) -> ir.Value:
        mask = self._node.inputs[3] if len(self._node.inputs) > 3 else None
        low = self._number(-math.inf)
        if mask is not None and self._view.dtype(mask) == _BOOL:
            scores = self._emit("Where", [mask, scores, low], "masked")
        elif mask is not None:
            scores = self._emit("Add", [scores, mask], "masked")
        attribute = self._node.attributes.get("is_causal")
        if attribute is None or not attribute.as_int():
            return scores
        query = self._node.inputs[0]
        assert query is not None
        rows = self._count(query, 2 if self._view.rank(query) == 4 else 1)
        columns = self._count(key, 2)
        if past is not None:
            rows = self._emit("Add", [rows, self._count(past, 2)], "row_numbers", dtype=_INT64)
        rows = self._emit("Unsqueeze", [rows, self._rewrite.constant([1], "column")], "row_column", dtype=_INT64)
        allowed = self._emit("LessOrEqual", [columns, rows], "causal", dtype=_BOOL)
        return self._emit("Where", [allowed, scores, low], "masked_causal")

    def _count(self, value: ir.Value, axis: int) -> ir.Value:
        """0, 1, .. size-1 of an axis; for the past, its size alone."""
        constant = self._rewrite.constant
        sizes = self._emit("Shape", [value], "sizes", dtype=_INT64)
        size = self._emit("Gather", [sizes, constant(axis, "axis")], "size", {"axis": 0}, dtype=_INT64)
        if value in self._node.inputs[4:5]:
            return size
        return self._emit("Range", [constant(0, "zero"), size, constant(1, "one")], "numbers", dtype=_INT64)

    def _like_output(self, product: ir.Value) -> ir.Value:
        query = self._node.inputs[0]
        assert query is not None
        if self._view.rank(query) == 4:
            return product
        together = self._emit("Transpose", [product], "heads_last", {"perm": [0, 2, 1, 3]})
        heads = _heads(self._node, self._view, 0)
        values = self._node.inputs[2]
        features = self._view.dim(values, -1) if values is not None else None
        assert isinstance(heads, int)
        assert isinstance(features, int)
        key_heads = _heads(self._node, self._view, 1) or 1
        per_head = features // key_heads if values is not None and self._view.rank(values) == 3 else features
        shape = self._rewrite.constant([0, 0, heads * per_head], "joined")
        return self._emit("Reshape", [together, shape], "joined")
