"""Attention operators written out so that they can be blocked; here Attention of opsets 23 and 24.

Source: the operator's specification, with what it leaves open settled by ONNX Runtime's kernel (measured): the softcap
comes before the mask; a causal frontier starts behind the past where past keys are operands, else at the first key;
rows without a single attended key give zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.passes.blocking.operator_writer import FLOATS, OperatorWriter
from graphsurgery.passes.blocking.respell import Respeller
from graphsurgery.passes.blocking.unfuse_heads import HeadsWriter, PackedWriter, why_not_heads, why_not_packed
from graphsurgery.patterns.attention.spelled import SpelledAttention

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.attention.sites import FusedAttention
    from graphsurgery.rewrite import Rewrite

__all__ = ["unfuse", "why_not_unfused"]

_BOOL = ir.DataType.BOOL


def why_not_unfused(site: FusedAttention) -> str | None:
    """Why the operator of ``site`` cannot be written out; None where it can."""
    if isinstance(site, SpelledAttention):
        known = site.body.view.dtype(site.query) in FLOATS
        return None if known else f"the type of {site.query.name!r} is not known or not a float"
    if site.operator == "MultiHeadAttention":
        return why_not_heads(site)
    if site.operator == "com.microsoft Attention":
        return why_not_packed(site)
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
    if view.dtype(site.query) not in FLOATS:
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
    if isinstance(site, SpelledAttention):
        return Respeller(rewrite, site).write()
    if site.operator == "MultiHeadAttention":
        return HeadsWriter(rewrite, site).write()
    if site.operator == "com.microsoft Attention":
        return PackedWriter(rewrite, site).write()
    return _Writer(rewrite, site).write()


def _heads(node: ir.Node, view: ShapeView, operand: int) -> int | None:
    value = node.inputs[operand]
    assert value is not None
    size: Dim | None = view.dim(value, 1)
    if view.rank(value) == 3:
        attribute = node.attributes.get("q_num_heads" if operand == 0 else "kv_num_heads")
        return attribute.as_int() if attribute is not None else None
    return size if isinstance(size, int) else None


class _Writer(OperatorWriter):
    """Writes an Attention of opset 23 or 24 out."""

    def write(self) -> ir.Node:
        rewrite, node = self.rewrite, self.node
        query, key, value = (self._by_heads(index) for index in range(3))
        past = [node.inputs[index] if index < len(node.inputs) else None for index in (4, 5)]
        if past[0] is not None and past[1] is not None:
            key = self.emit("Concat", [past[0], key], "present_key", {"axis": 2})
            value = self.emit("Concat", [past[1], value], "present_value", {"axis": 2})
        presents = (key, value)
        key, value = self._expanded(key, "keys"), self._expanded(value, "values")
        transposed = self.emit("Transpose", [key], "keys_transposed", {"perm": [0, 1, 3, 2]})
        scores = self.emit("MatMul", [query, transposed], "scores")
        scores = self.emit("Mul", [scores, self.number(self._scale())], "scaled")
        scores = self._masked(self._capped(scores), presents[0], past[0])
        weights = self.emit("Softmax", [scores], "weights", {"axis": -1})
        nothing = self.emit("IsNaN", [weights], "no_key", dtype=_BOOL)
        weights = self.emit("Where", [nothing, self.number(0.0), weights], "weights_or_zero")
        product = self.emit("MatMul", [weights, value], "attended")
        result = self._like_output(product)
        for output, replacement in zip(node.outputs, (result, *presents), strict=False):
            rewrite.replace_all_uses(output, replacement)
        made = product.producer()
        assert made is not None
        return made

    def _by_heads(self, operand: int) -> ir.Value:
        """An operand as ``[B, H, S, D]``."""
        value = self.node.inputs[operand]
        assert value is not None
        if self.view.rank(value) == 4:
            return value
        heads = _heads(self.node, self.view, operand)
        features = self.view.dim(value, -1)
        assert isinstance(heads, int)
        assert isinstance(features, int)
        return self.by_heads(value, heads, features // heads, "operand")

    def _expanded(self, value: ir.Value, name: str) -> ir.Value:
        """Key heads repeated for their group of query heads; blocking reads the unexpanded ones again."""
        query_heads, key_heads = _heads(self.node, self.view, 0), _heads(self.node, self.view, 1)
        assert query_heads is not None
        assert key_heads is not None
        repeats = query_heads // key_heads
        if repeats == 1:
            return value
        operand = 1 if name == "keys" else 2
        source = self.node.inputs[operand]
        features = self.view.dim(source, -1) if source is not None else None
        assert isinstance(features, int)
        if source is not None and self.view.rank(source) == 3:
            features //= key_heads
        constant = self.rewrite.constant
        apart = self.emit("Unsqueeze", [value, constant([2], "group")], f"{name}_grouped")
        spread = self.emit("Expand", [apart, constant([1, 1, repeats, 1, 1], "repeats")], f"{name}_repeated")
        return self.emit("Reshape", [spread, constant([0, query_heads, -1, features], "shape")], f"{name}_expanded")

    def _scale(self) -> float:
        attribute = self.node.attributes.get("scale")
        if attribute is not None:
            return attribute.as_float()
        value = self.node.inputs[0]
        assert value is not None
        features = self.view.dim(value, -1)
        assert isinstance(features, int)
        if self.view.rank(value) == 3:
            features //= _heads(self.node, self.view, 0) or 1
        return 1 / math.sqrt(features)

    def _capped(self, scores: ir.Value) -> ir.Value:
        attribute = self.node.attributes.get("softcap")
        cap = attribute.as_float() if attribute is not None else 0.0
        if cap <= 0:
            return scores
        number = self.number(cap)
        scores = self.emit("Div", [scores, number], "over_cap")
        scores = self.emit("Tanh", [scores], "bent")
        return self.emit("Mul", [scores, number], "capped")

    def _masked(self, scores: ir.Value, key: ir.Value, past: ir.Value | None) -> ir.Value:
        mask = self.node.inputs[3] if len(self.node.inputs) > 3 else None
        low = self.number(-math.inf)
        if mask is not None and self.view.dtype(mask) == _BOOL:
            scores = self.emit("Where", [mask, scores, low], "masked")
        elif mask is not None:
            scores = self.emit("Add", [scores, mask], "masked")
        attribute = self.node.attributes.get("is_causal")
        if attribute is None or not attribute.as_int():
            return scores
        query = self.node.inputs[0]
        assert query is not None
        allowed = self.causal(query, 2 if self.view.rank(query) == 4 else 1, key, past)
        return self.emit("Where", [allowed, scores, low], "masked_causal")

    def _like_output(self, product: ir.Value) -> ir.Value:
        query = self.node.inputs[0]
        assert query is not None
        if self.view.rank(query) == 4:
            return product
        heads = _heads(self.node, self.view, 0)
        values = self.node.inputs[2]
        features = self.view.dim(values, -1) if values is not None else None
        assert isinstance(heads, int)
        assert isinstance(features, int)
        key_heads = _heads(self.node, self.view, 1) or 1
        per_head = features // key_heads if values is not None and self.view.rank(values) == 3 else features
        return self.together(product, heads * per_head)
