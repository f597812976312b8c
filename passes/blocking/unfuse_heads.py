"""MultiHeadAttention and Attention of the domain com.microsoft, written out so that they can be blocked.

Source: the operators' specifications, with what they leave open settled by ONNX Runtime's kernel on the CPU (measured):
masks are added to the scaled scores, after the bias; a padding mask gives ``mask_filter_value``, also to the keys
behind the causal frontier of a row, which get the lowest finite number; the frontier starts behind the past; of a mask of
3B+2 numbers the first B are the numbers of keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.passes.blocking.operator_writer import FLOATS, OperatorWriter, has_input, has_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.patterns.attention.sites import FusedAttention

__all__ = ["HeadsWriter", "PackedWriter", "why_not_heads", "why_not_packed"]

_INT64 = ir.DataType.INT64
_BOOL = ir.DataType.BOOL
_QUERY, _KEY, _VALUE, _BIAS, _MASK, _SCORE_BIAS, _PAST_KEY, _PAST_VALUE = range(8)
"""The inputs of MultiHeadAttention."""
_KEPT_PAST = 8
_INPUT, _WEIGHT, _INPUT_BIAS, _INPUT_MASK, _PAST, _INPUT_SCORE_BIAS = range(6)
"""The inputs of Attention."""


def why_not_heads(site: FusedAttention) -> str | None:
    """Why a MultiHeadAttention cannot be written out, or need not be; None where it can."""
    node, view = site.node, site.body.view
    named = f"node {node.name!r}"
    if any(has_input(node, index) for index in range(_KEPT_PAST, len(node.inputs))):
        return f"{named} writes into a cache of fixed length"
    if has_output(node, 3):
        return f"the scores of {named} are used as {node.outputs[3].name!r}"
    optional = (_MASK, _SCORE_BIAS, _PAST_KEY, _PAST_VALUE)
    presents = [has_output(node, index) for index in (1, 2)]
    unidirectional = node.attributes.get("unidirectional")
    causal = unidirectional is not None and bool(unidirectional.as_int())
    packed = view.rank(site.query) == 5 or (has_input(node, _KEY) and view.rank(_given(node, _KEY)) == 5)
    if not (causal or packed or any(presents) or any(has_input(node, index) for index in optional)):
        return f"{named} is a MultiHeadAttention without mask and past, which the runtime's own kernel streams"
    if has_input(node, _PAST_KEY) != has_input(node, _PAST_VALUE):
        return f"{named} has a past of keys or of values alone"
    if has_input(node, _PAST_KEY) and not all(index < len(node.outputs) for index in (1, 2)):
        return f"{named} has a past and no present"
    if view.dtype(site.query) not in FLOATS:
        return f"the type of {site.query.name!r} is not known or not a float"
    heads = node.attributes.get("num_heads")
    if heads is None or heads.is_ref():
        return f"the number of heads of {named} is not known"
    operands = [index for index in (_QUERY, _KEY, _VALUE) if has_input(node, index)]
    ranks = tuple(view.rank(_given(node, index)) for index in operands)
    if ranks not in ((5,), (3, 5), (3, 3, 3), (3, 4, 4)):
        return f"the operands of {named} have ranks {ranks}, which are no layout of the operator"
    for index in operands:
        features = view.dim(_given(node, index), -1)
        if not isinstance(features, int) or (ranks[operands.index(index)] == 3 and features % heads.as_int()):
            return f"the feature size of {_given(node, index).name!r} is not known"
    if ranks == (3, 4, 4) and (has_input(node, _BIAS) or has_input(node, _PAST_KEY)):
        return f"{named} has keys by head together with a bias or a past"
    if has_input(node, _MASK) and view.rank(_given(node, _MASK)) not in (1, 2, 3, 4):
        return f"the rank of the mask {_given(node, _MASK).name!r} of {named} is not known"
    return None


def why_not_packed(site: FusedAttention) -> str | None:
    """Why an Attention of com.microsoft cannot be written out; None where it can."""
    node, view = site.node, site.body.view
    named = f"node {node.name!r}"
    for name in ("do_rotary", "past_present_share_buffer"):
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.as_int():
            return f"{named} has {name}"
    heads = node.attributes.get("num_heads")
    if heads is None or heads.is_ref():
        return f"the number of heads of {named} is not known"
    if view.dtype(site.query) not in FLOATS:
        return f"the type of {site.query.name!r} is not known or not a float"
    if not has_input(node, _WEIGHT) or view.rank(_given(node, _WEIGHT)) != 2:
        return f"the weight of {named} is not known"
    sizes = _hidden_sizes(site)
    if sizes is None or any(size % heads.as_int() for size in sizes):
        return f"the feature sizes of {named} are not known"
    if has_input(node, 6):
        return f"{named} writes into a cache of fixed length"
    if has_input(node, _PAST) and len(node.outputs) < 2:
        return f"{named} has a past and no present"
    if has_input(node, _INPUT_MASK):
        mask = _given(node, _INPUT_MASK)
        rank = view.rank(mask)
        lengths = (view.dim(site.query, 0), 2 * (view.dim(site.query, 0) or 0))
        if rank not in (1, 2, 3) or (rank == 1 and view.dim(mask, 0) not in lengths):
            return f"the mask {mask.name!r} of {named} is in none of the forms [B], [2B], [B, T] and [B, S, T]"
    return None


def _given(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _hidden_sizes(site: FusedAttention) -> tuple[int, int, int] | None:
    """The features of queries, keys and values of an Attention, all heads together."""
    attribute = site.node.attributes.get("qkv_hidden_sizes")
    if attribute is not None:
        sizes = tuple(attribute.as_ints())
        return (sizes[0], sizes[1], sizes[2]) if len(sizes) == 3 else None
    width = site.body.view.dim(_given(site.node, _WEIGHT), 1)
    return (width // 3, width // 3, width // 3) if isinstance(width, int) and width % 3 == 0 else None


class _Writer(OperatorWriter):
    """What both operators do with queries, keys and values by head."""

    def attend(
        self,
        operands: tuple[ir.Value, ir.Value, ir.Value],
        sizes: tuple[int, int],
        past: tuple[ir.Value, ir.Value] | None,
        mask: ir.Value | None,
        score_bias: ir.Value | None,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The value product ``[B, H, S, Dv]``, and the present keys and values.

        Args:
            operands: queries, keys and values ``[B, H, S, D]``.
            sizes: number of heads, and features of a query head.
            past: the past keys and values.
            mask: the padding mask as the operator has it.
            score_bias: what is added to the scores.
        """
        query, key, value = operands
        if past is not None:
            key = self.emit("Concat", [past[0], key], "present_key", {"axis": 2})
            value = self.emit("Concat", [past[1], value], "present_value", {"axis": 2})
        turned = self.emit("Transpose", [key], "keys_transposed", {"perm": [0, 1, 3, 2]})
        scores = self.emit("MatMul", [query, turned], "scores")
        scale = self.attribute_float("scale", 0.0) or 1 / math.sqrt(sizes[1])
        scores = self.emit("Mul", [scores, self.number(scale)], "scaled")
        if score_bias is not None:
            scores = self.emit("Add", [scores, score_bias], "biased")
        masked = self._mask(query, key, past, mask)
        if masked is not None:
            scores = self.emit("Add", [scores, masked], "masked")
        weights = self.emit("Softmax", [scores], "weights", {"axis": -1})
        return self.emit("MatMul", [weights, value], "attended"), key, value

    def _mask(
        self, query: ir.Value, key: ir.Value, past: tuple[ir.Value, ir.Value] | None, mask: ir.Value | None
    ) -> ir.Value | None:
        """What is added to the scores: zero, ``mask_filter_value``, or the lowest number."""
        zero = self.number(0.0)
        added = None
        if mask is not None:
            filler = self.number(self.attribute_float("mask_filter_value", -10000.0))
            added = self.emit("Where", [self._allowed(mask, query, key), zero, filler], "padding")
        if self.attribute_int("unidirectional"):
            causal = self.causal(query, 2, key, past[0] if past is not None else None)
            lowest = self.number(float(np.finfo(self.dtype.numpy()).min))
            added = self.emit("Where", [causal, zero if added is None else added, lowest], "mask")
        return added

    def _allowed(self, mask: ir.Value, query: ir.Value, key: ir.Value) -> ir.Value:
        """Which keys the padding mask leaves: bool ``[B, 1, 1 or S, T]``."""
        rank = self.view.rank(mask)
        if rank == 1:
            return self.unsqueeze(self._within(mask, query, key), [1, 2], "keys_given", _BOOL)
        zero = self.rewrite.constant(np.asarray(0, (self.view.dtype(mask) or ir.DataType.INT32).numpy()), "zero")
        allowed = self.emit("Greater", [mask, zero], "keys_given", dtype=_BOOL)
        axes = {2: [1, 2], 3: [1]}.get(rank or 4)
        return allowed if axes is None else self.unsqueeze(allowed, axes, "keys_of_rows", _BOOL)

    def _within(self, mask: ir.Value, query: ir.Value, key: ir.Value) -> ir.Value:
        """Keys before the end, and from the start on where both are given: bool ``[B, T]``."""
        constant = self.rewrite.constant
        columns = self.numbers(key, 2)
        batch = self.unsqueeze(self.size(query, 0), [0], "batch", _INT64)
        bounds = self.emit("Cast", [mask], "bounds", {"to": int(_INT64)}, dtype=_INT64)
        zero, axis = constant([0], "zero"), constant([0], "axis")
        ends = self.emit("Slice", [bounds, zero, batch, axis], "ends", dtype=_INT64)
        before = self.emit("Less", [columns, self.unsqueeze(ends, [1], "ends", _INT64)], "before_end", dtype=_BOOL)
        if not self.starts_given:
            return before
        twice = self.emit("Add", [batch, batch], "both", dtype=_INT64)
        starts = self.emit("Slice", [bounds, batch, twice, axis], "starts", dtype=_INT64)
        late = self.unsqueeze(starts, [1], "starts", _INT64)
        behind = self.at_most(late, columns, "from_start")
        return self.emit("And", [before, behind], "between", dtype=_BOOL)

    @property
    def starts_given(self) -> bool:
        """Whether a mask of rank 1 has starts behind its ends."""
        return False


class HeadsWriter(_Writer):
    """Writes a MultiHeadAttention out."""

    def write(self) -> ir.Node:
        """Insert the nodes, let everything read them; the value product."""
        node = self.node
        heads = self.attribute_int("num_heads")
        query, key, value = self._operands(heads)
        features, value_features = self._features(heads)
        past = (_given(node, _PAST_KEY), _given(node, _PAST_VALUE)) if has_input(node, _PAST_KEY) else None
        mask = _given(node, _MASK) if has_input(node, _MASK) else None
        score_bias = _given(node, _SCORE_BIAS) if has_input(node, _SCORE_BIAS) else None
        product, key, value = self.attend((query, key, value), (heads, features), past, mask, score_bias)
        results = (self.together(product, heads * value_features), key, value)
        for output, replacement in zip(node.outputs, results, strict=False):
            self.rewrite.replace_all_uses(output, replacement)
        made = product.producer()
        assert made is not None
        return made

    def _features(self, heads: int) -> tuple[int, int]:
        """Features of a query head and of a value head."""
        sizes = []
        for index in (_QUERY, _VALUE if has_input(self.node, _VALUE) else _QUERY):
            value = _given(self.node, index)
            size = self.view.dim(value, -1)
            assert isinstance(size, int)
            sizes.append(size // heads if self.view.rank(value) == 3 else size)
        return sizes[0], sizes[1]

    def _operands(self, heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values ``[B, H, S, D]``, biases added."""
        node, view = self.node, self.view
        query = _given(node, _QUERY)
        features, value_features = self._features(heads)
        widths = (heads * features, heads * features, heads * value_features)
        if view.rank(query) == 5:
            packed = [self._picked(query, place) for place in range(3)]
            return self._from_packed(packed, widths, 0, heads)
        first = self._biased(query, 0, widths)
        by_head = self.by_heads(first, heads, features, "query")
        key = _given(node, _KEY)
        if view.rank(key) == 5:
            pair = [self._picked(key, place) for place in range(2)]
            _, keys, values = self._from_packed([None, *pair], widths, 1, heads)
            return by_head, keys, values
        value = _given(node, _VALUE)
        if view.rank(key) == 4:
            return by_head, key, value
        keys = self.by_heads(self._biased(key, 1, widths), heads, features, "key")
        values = self.by_heads(self._biased(value, 2, widths), heads, value_features, "value")
        return by_head, keys, values

    def _picked(self, value: ir.Value, place: int) -> ir.Value:
        """One of the operands that are packed as ``[B, S, H, 2 or 3, D]``: ``[B, S, H, D]``."""
        index = self.rewrite.constant(place, "place")
        return self.emit("Gather", [value, index], ("query", "key", "value")[place], {"axis": 3})

    def _from_packed(
        self, packed: Sequence[ir.Value | None], widths: tuple[int, int, int], first: int, heads: int
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        made: list[ir.Value] = []
        for place, item in enumerate(packed):
            if item is None or place < first:
                made.append(self.site.query)
                continue
            if has_input(self.node, _BIAS):
                shape = self.rewrite.constant([heads, widths[place] // heads], "bias_by_head")
                bias = self.emit("Reshape", [self._bias(place, widths), shape], "bias_by_head")
                item = self.emit("Add", [item, bias], "with_bias")
            made.append(self.heads_first(item, ("query", "key", "value")[place]))
        return made[0], made[1], made[2]

    def _bias(self, place: int, widths: tuple[int, int, int]) -> ir.Value:
        start = sum(widths[:place])
        return self.part(_given(self.node, _BIAS), 0, start, start + widths[place], "bias")

    def _biased(self, value: ir.Value, place: int, widths: tuple[int, int, int]) -> ir.Value:
        if not has_input(self.node, _BIAS):
            return value
        return self.emit("Add", [value, self._bias(place, widths)], "with_bias")


class PackedWriter(_Writer):
    """Writes an Attention of com.microsoft out: one projection for queries, keys and values."""

    def write(self) -> ir.Node:
        """Insert the nodes, let everything read them; the value product."""
        node, rewrite = self.node, self.rewrite
        heads = self.attribute_int("num_heads")
        widths = _hidden_sizes(self.site)
        assert widths is not None
        projected = self.emit("MatMul", [_given(node, _INPUT), _given(node, _WEIGHT)], "projected")
        if has_input(node, _INPUT_BIAS):
            projected = self.emit("Add", [projected, _given(node, _INPUT_BIAS)], "with_bias")
        operands = []
        for place, name in enumerate(("query", "key", "value")):
            start = sum(widths[:place])
            part = self.part(projected, 2, start, start + widths[place], name)
            operands.append(self.by_heads(part, heads, widths[place] // heads, name))
        past = None
        if has_input(node, _PAST):
            pair = [rewrite.constant(place, "place") for place in (0, 1)]
            states = [self.emit("Gather", [_given(node, _PAST), index], "past", {"axis": 0}) for index in pair]
            past = (states[0], states[1])
        mask = _given(node, _INPUT_MASK) if has_input(node, _INPUT_MASK) else None
        score_bias = _given(node, _INPUT_SCORE_BIAS) if has_input(node, _INPUT_SCORE_BIAS) else None
        triple = (operands[0], operands[1], operands[2])
        product, key, value = self.attend(triple, (heads, widths[0] // heads), past, mask, score_bias)
        rewrite.replace_all_uses(node.outputs[0], self.together(product, widths[2]))
        if has_output(node, 1):
            apart = [self.unsqueeze(item, [0], "state", self.dtype) for item in (key, value)]
            rewrite.replace_all_uses(node.outputs[1], self.emit("Concat", apart, "present", {"axis": 0}))
        made = product.producer()
        assert made is not None
        return made

    @property
    def starts_given(self) -> bool:
        """See the base: a mask of 2B numbers has them."""
        return self.view.dim(_given(self.node, _INPUT_MASK), 0) != self.view.dim(self.site.query, 0)
