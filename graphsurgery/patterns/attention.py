"""Attention: scores, what is done to them, softmax, and the product with the values, in every spelling.

Anchored on the softmax. From there up to the product of queries and keys, through the exporter's own element-wise
chain (scale, softcap, mask, bias, sink); down to the product with the values, through casts, guards and the slice that
drops the sink. Keys and values are traced back through scaling, transposition and expansion over query heads to the
unexpanded cache. Fused operators are recognised by name.

Source of the computation: Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; sinks: Xiao et al. 2023.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import is_nonnegative, product
from graphsurgery.patterns.axes import LAYOUT_OPS, AxisTrace, trace_axes
from graphsurgery.patterns.mask_kinds import mask_kinds
from graphsurgery.patterns.matcher import GraphIndex, is_op, readers
from graphsurgery.patterns.site import Refusal, Site

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes, ShapeView

__all__ = ["AttentionSite", "FusedAttention", "KeyValueSource", "Sink", "find_attentions", "regroups_heads"]

_SCORE_CHAIN = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Tanh", "Where", "Cast", "CastLike", "Identity", "Clip", "Max", "Min", "Neg"),
        *("Concat", "ReduceMax", "Dropout", "IsNaN", "Not", "Reshape"),
    }
)
_PROBABILITY_CHAIN = frozenset({"Cast", "CastLike", "Identity", "Dropout", "Where", "IsNaN", "Mul", "Slice", "Reshape"})
_FUSED = {
    ("", "Attention"): "Attention",
    ("com.microsoft", "MultiHeadAttention"): "MultiHeadAttention",
    ("com.microsoft", "GroupQueryAttention"): "GroupQueryAttention",
    ("com.microsoft", "Attention"): "com.microsoft Attention",
    ("com.microsoft", "PagedAttention"): "PagedAttention",
    ("com.microsoft", "SparseAttention"): "SparseAttention",
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): "DecoderMaskedMultiHeadAttention",
}
_MAX_CHAIN = 24
_VISION = re.compile(r"visual|vision|image_encoder", re.IGNORECASE)
_LAYER = re.compile(r"(?:layers?|blocks?|h|encoder|decoder)[._/](\d+)(?:[._/]|$)")


@dataclasses.dataclass(frozen=True)
class KeyValueSource:
    """Where keys or values come from.

    Attributes:
        base: the unexpanded value, ``[B, G, T, D]`` up to the order of its axes: the cache after the write.
        steps: the nodes between it and the product, in execution order: layout and multiplication by a constant.
        scales: those of the steps that multiply or divide by a constant.
        batch_axis: axis of ``base`` that is the batch; None where it is 1 or absent.
        head_axis: axis of ``base`` that is the heads; None where there is one head for all.
        length_axis: axis of ``base`` of size T.
        feature_axis: axis of ``base`` of size D.
        heads: G.
        repeats: query heads for each key head, R = H / G.
    """

    base: ir.Value
    steps: tuple[ir.Node, ...]
    scales: tuple[ir.Node, ...]
    batch_axis: int | None
    head_axis: int | None
    length_axis: int
    feature_axis: int
    heads: Dim
    repeats: Dim


@dataclasses.dataclass(frozen=True)
class Sink:
    """A learned score that takes part in the softmax and is dropped behind it.

    Attributes:
        join: the Concat that puts it behind the scores.
        value: the sink, ``[B, H, S, 1]`` as joined.
        cut: the Slice behind the softmax that drops its probability.
    """

    join: ir.Node
    value: ir.Value
    cut: ir.Node


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSite(Site):
    """One decomposed attention.

    Attributes:
        query: left operand of the score product, ``[B, H, S, D]``.
        scores: the score product.
        chain: the nodes from the scores to the softmax, both excluded, in execution order.
        softmax: the softmax.
        tail: the nodes from the softmax to the value product, both excluded.
        product: the value product; its output is ``[B, H, S, Dv]``.
        key: where the keys come from.
        value: where the values come from.
        sink: the sink, where there is one.
        stabiliser: the (ReduceMax, Sub) nodes of the chain that subtract the row maximum: without effect on a softmax.
        probabilities_read: who else reads the scores or probabilities; None where nobody does.
        batch: B.
        heads: H.
        length: S.
        total: T.
    """

    query: ir.Value
    scores: ir.Node
    chain: tuple[ir.Node, ...]
    softmax: ir.Node
    tail: tuple[ir.Node, ...]
    product: ir.Node
    key: KeyValueSource
    value: KeyValueSource
    sink: Sink | None
    stabiliser: tuple[ir.Node, ...]
    probabilities_read: str | None
    batch: Dim
    heads: Dim
    length: Dim
    total: Dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAttention(Site):
    """Attention that is one operator.

    Attributes:
        node: the operator.
        operator: its name.
        query: its query operand.
        past: its past key and value operands, where they are given.
    """

    node: ir.Node
    operator: str
    query: ir.Value
    past: tuple[ir.Value, ir.Value] | None


def find_attentions(
    model: ir.Model, shapes: Shapes, index: GraphIndex
) -> list[AttentionSite | FusedAttention | Refusal]:
    """Every attention of the main graph, in graph order; what looks like one and cannot be read is refused."""
    found: list[AttentionSite | FusedAttention | Refusal] = []
    anchors = index.nodes("Softmax")
    for domain, operator in _FUSED:
        anchors = [*anchors, *index.nodes(operator, domain=domain)]
    for node in sorted(anchors, key=index.order.__getitem__):
        number = len(found)
        if node.graph is not model.graph:
            if node.op_type != "Softmax" or _Reader(node, number, shapes).read() is not None:
                found.append(_inner(node, number))
            continue
        site = _fused(node, number) if node.op_type != "Softmax" else _Reader(node, number, shapes).read()
        if site is not None:
            found.append(site)
    return [*found, *_in_functions(model, shapes, index, len(found))]


def _in_functions(model: ir.Model, shapes: Shapes, index: GraphIndex, number: int) -> list[Refusal]:
    """Attention inside local functions, one entry for each body."""
    found: list[Refusal] = []
    for function in model.functions.values():
        calls = index.nodes(function.name, domain=function.domain)
        if not calls:
            continue
        view = shapes.in_call(calls[0])
        for node in function:
            fused = (node.domain, node.op_type) in _FUSED
            if not fused and (not is_op(node, "Softmax") or _Reader(node, number, view).read() is None):
                continue
            where = f"the attention around {node.op_type} {node.name!r} is inside function {function.name!r}"
            found.append(Refusal(id=f"attention:{number + len(found)}", kinds=("attention",), reason=where))
    return found


def _inner(node: ir.Node, number: int) -> Refusal:
    reason = f"the attention around {node.op_type} {node.name!r} is inside a branch or loop of the graph"
    return Refusal(id=f"attention:{number}", kinds=("attention",), layer=layer_of(node), reason=reason)


def layer_of(node: ir.Node) -> int | None:
    """The layer that a node belongs to, by its scope metadata or its name."""
    for text in (node.metadata_props.get("namespace", ""), node.name or "", node.outputs[0].name or ""):
        match = _LAYER.search(text)
        if match is not None:
            return int(match[1])
    return None


def _fused(node: ir.Node, number: int) -> FusedAttention | None:
    query = node.inputs[0] if node.inputs else None
    if query is None:
        return None
    operator = _FUSED[node.domain, node.op_type]
    slots = {"Attention": (4, 5), "MultiHeadAttention": (6, 7), "GroupQueryAttention": (3, 4)}.get(operator)
    past = None
    if slots is not None and len(node.inputs) > slots[1]:
        key, value = node.inputs[slots[0]], node.inputs[slots[1]]
        past = (key, value) if key is not None and value is not None else None
    window = node.attributes.get("local_window_size")
    sliding = window is not None and window.as_int() > 0
    return FusedAttention(
        id=f"attention:{number}",
        kinds=("attention", "fused", "sliding" if sliding else "full"),
        layer=layer_of(node),
        node=node,
        operator=operator,
        query=query,
        past=past,
    )


class _UnreadableError(Exception):
    """Why a softmax that looks like attention cannot be read."""


class _Reader:
    """Reads the attention around one softmax."""

    def __init__(self, softmax: ir.Node, number: int, shapes: ShapeView) -> None:
        self._softmax = softmax
        self._number = number
        self._shapes = shapes

    def read(self) -> AttentionSite | Refusal | None:
        """The site; a refusal; None where the softmax belongs to something else (a router, a head)."""
        tail, product = self._down()
        if product is None:
            return None
        fused = self._fused_scores()
        if fused is not None:
            reason = f"its scores are made by {fused.name!r}, a FusedMatMul of ONNX Runtime's optimizer: use the export"
            return Refusal(
                id=f"attention:{self._number}", kinds=("attention",), layer=layer_of(self._softmax), reason=reason
            )
        try:
            return self._site(tail, product)
        except _UnreadableError as why:
            return Refusal(
                id=f"attention:{self._number}",
                kinds=("attention",),
                layer=layer_of(self._softmax),
                reason=str(why),
            )

    def _site(self, tail: tuple[ir.Node, ...], product: ir.Node) -> AttentionSite | None:
        softmax, shapes = self._softmax, self._shapes
        self._check_softmax()
        scores, chain = self._up()
        if scores is None:
            return None
        query, keys = scores.inputs[0], scores.inputs[1]
        values = product.inputs[1]
        assert query is not None
        assert keys is not None
        assert values is not None
        shape = shapes.shape(scores.outputs[0])
        if shape is None:
            raise _UnreadableError(f"the shape of the scores {scores.outputs[0].name!r} is not known")
        if len(shape) not in (3, 4):
            raise _UnreadableError(f"the scores {scores.outputs[0].name!r} have rank {len(shape)}, not 3 or 4")
        query = self._query_by_heads(query) if len(shape) == 3 else query
        length, total = shape[-2:]
        batch, heads = shape[0], shape[1]
        query_shape = shapes.shape(query)
        if query_shape is not None and len(query_shape) == 4:
            batch, heads = query_shape[0], query_shape[1]
        sink = _sink(chain, tail)
        key = _source(keys, -1, -2, shapes, "keys", batch)
        value = _source(values, -2, -1, shapes, "values", batch)
        if not isinstance(heads, int) and isinstance(key.heads, int) and isinstance(key.repeats, int):
            heads = key.heads * key.repeats
        key, value = (_broadcast_heads(source, heads) for source in (key, value))
        if (key.heads, key.repeats) != (value.heads, value.repeats):
            raise _UnreadableError(
                f"keys {key.base.name!r} have {key.heads} heads for {heads}, values {value.base.name!r} {value.heads}"
            )
        lengths = {_dim(shapes, source.base, source.length_axis) for source in (key, value)}
        if len(lengths) > 1 and all(isinstance(size, int) for size in lengths):
            # Lengths under different names are the same in every run: the product with the values asks for it.
            raise _UnreadableError(f"keys {key.base.name!r} and values {value.base.name!r} have different lengths")
        return AttentionSite(
            id=f"attention:{self._number}",
            kinds=("attention", "decomposed", *self._kinds(scores, chain, length, total)),
            layer=layer_of(softmax),
            query=query,
            scores=scores,
            chain=chain,
            softmax=softmax,
            tail=tail,
            product=product,
            key=key,
            value=value,
            sink=sink,
            stabiliser=_stabiliser(chain, softmax),
            probabilities_read=self._other_reader(scores, chain, tail, product),
            batch=batch,
            heads=heads,
            length=length,
            total=self._common_total(scores, chain, length, total),
        )

    def _common_total(self, scores: ir.Node, chain: tuple[ir.Node, ...], length: Dim, total: Dim) -> Dim:
        """T under the name that the mask has for it.

        Some exporters name the past of each layer anew; the one mask of all layers is as long as each of them.
        """
        if isinstance(total, int) or not is_nonnegative(total - length):
            return total
        for value in _operands(scores, chain):
            size = self._shapes.dim(value, -1)
            if size is None or isinstance(size, int) or size == length:
                continue
            if is_nonnegative(size - length):
                return size
        return total

    def _query_by_heads(self, query: ir.Value) -> ir.Value:
        """The queries ``[B, H, S, D]`` behind ``[B*H, S, D]``."""
        node = query.producer()
        source = node.inputs[0] if node is not None else None
        if node is None or source is None or not regroups_heads(node, self._shapes) or self._shapes.rank(source) != 4:
            raise _UnreadableError(
                f"the queries {query.name!r} have batch and heads on one axis, and are not made of any with two"
            )
        return source

    def _kinds(self, scores: ir.Node, chain: tuple[ir.Node, ...], length: Dim, total: Dim) -> tuple[str, ...]:
        outside = _operands(scores, chain)
        vision = ("vision",) if _VISION.search(self._softmax.metadata_props.get("namespace", "")) else ()
        return (*mask_kinds(outside, length, total, self._shapes), *vision)

    def _check_softmax(self) -> None:
        softmax = self._softmax
        shape = self._shapes.shape(softmax.outputs[0])
        rank = len(shape) if shape is not None else 4
        version = softmax.version or (softmax.graph.opset_imports.get("", 13) if softmax.graph is not None else 13)
        attribute = softmax.attributes.get("axis")
        axis = attribute.as_int() if attribute is not None else (-1 if version >= 13 else 1)
        if axis % rank != rank - 1:
            raise _UnreadableError(f"softmax {softmax.name!r} runs over axis {axis}, not over the keys")

    def _fused_scores(self) -> ir.Node | None:
        """A product of ONNX Runtime's own domain above the softmax."""
        value = self._softmax.inputs[0]
        for _ in range(_MAX_CHAIN):
            node = value.producer() if value is not None else None
            if node is None:
                return None
            if node.op_type == "FusedMatMul":
                return node
            if node.domain or node.op_type not in _SCORE_CHAIN:
                return None
            inputs = [item for item in node.inputs if item is not None]
            value = max(inputs, key=lambda item: item.producer() is not None and self._is_scores(item), default=None)
        return None

    def _is_scores(self, value: ir.Value) -> bool:
        node = value.producer()
        return node is not None and (node.op_type == "FusedMatMul" or node.op_type in ("Add", "Mul", "Div", "Where"))

    # ---- down to the value product --------------------------------------------------------------------------------

    def _down(self) -> tuple[tuple[ir.Node, ...], ir.Node | None]:
        """The nodes behind the softmax up to the product with the values."""
        tail: list[ir.Node] = []
        value = self._softmax.outputs[0]
        while len(tail) < _MAX_CHAIN:
            following = readers(value)
            product = next((node for node in following if is_op(node, "MatMul") and node.inputs[0] is value), None)
            if product is not None:
                return tuple(tail), product
            node = self._next(value, following, tail)
            if node is None:
                return tuple(tail), None
            tail.append(node)
            value = node.outputs[0]
        return tuple(tail), None

    def _next(self, value: ir.Value, following: list[ir.Node], tail: list[ir.Node]) -> ir.Node | None:
        """The next node of the chain; the IsNaN of a guard is taken together with the Where that it steers."""
        usable = [node for node in following if not node.domain and node.op_type in _PROBABILITY_CHAIN]
        guard = next((node for node in usable if node.op_type == "IsNaN"), None)
        if guard is not None:
            selects = [node for node in usable if node.op_type == "Where"]
            if len(selects) == 1 and selects[0].inputs[0] is guard.outputs[0]:
                tail.append(guard)
                return selects[0]
            return None
        rank = self._shapes.rank(value)
        usable = [
            node for node in usable if self._shapes.rank(node.outputs[0]) == rank or regroups_heads(node, self._shapes)
        ]
        return usable[0] if len(usable) == 1 else None

    # ---- up to the score product ----------------------------------------------------------------------------------

    def _up(self) -> tuple[ir.Node | None, tuple[ir.Node, ...]]:
        """The score product and the nodes between it and the softmax, in execution order."""
        start = self._softmax.inputs[0]
        assert start is not None
        reached: dict[ir.Node, None] = {}
        products: dict[ir.Node, None] = {}
        leads: dict[ir.Value, bool] = {}
        self._leads_to_product(start, reached, products, leads, 0)
        if not products:
            return None, ()
        if len(products) > 1:
            names = " and ".join(repr(node.name) for node in products)
            raise _UnreadableError(f"the scores are a sum of several products ({names})")
        return next(iter(products)), tuple(reached)

    def _leads_to_product(
        self,
        value: ir.Value,
        reached: dict[ir.Node, None],
        products: dict[ir.Node, None],
        leads: dict[ir.Value, bool],
        depth: int,
    ) -> bool:
        """Whether the chain above ``value`` ends in a score product; records it, producers first."""
        if value in leads:
            return leads[value]
        leads[value] = False
        node = value.producer()
        if node is None or depth > _MAX_CHAIN:
            return False
        if is_op(node, "MatMul"):
            left = node.inputs[0]
            found = (self._shapes.rank(node.outputs[0]) or 0) >= 3 and left is not None
            if found:
                products.setdefault(node)
            leads[value] = found
            return found
        if node.domain or node.op_type not in _SCORE_CHAIN:
            return False
        if node.op_type == "Reshape" and not regroups_heads(node, self._shapes):
            return False
        found = False
        for item in node.inputs:
            if item is not None:
                found |= self._leads_to_product(item, reached, products, leads, depth + 1)
        if found:
            reached.setdefault(node)
        leads[value] = found
        return found

    # ---- who else looks -------------------------------------------------------------------------------------------

    def _other_reader(
        self, scores: ir.Node, chain: tuple[ir.Node, ...], tail: tuple[ir.Node, ...], product: ir.Node
    ) -> str | None:
        inside = {scores, *chain, self._softmax, *tail, product}
        for node in (scores, *chain, self._softmax, *tail):
            for value in node.outputs:
                if value.is_graph_output():
                    return f"graph output {value.name!r}"
                for reader in readers(value):
                    if reader not in inside and not is_op(reader, "Shape", "Size"):
                        return f"node {reader.name!r} ({reader.op_type})"
        return None


def _operands(scores: ir.Node, chain: tuple[ir.Node, ...]) -> list[ir.Value]:
    """What the chain takes from outside."""
    inside = {output for node in (scores, *chain) for output in node.outputs}
    return [item for node in chain for item in node.inputs if item is not None and item not in inside]


def regroups_heads(node: ir.Node, view: ShapeView) -> bool:
    """Whether a Reshape only puts batch and heads on one axis, ``[B, H, ..] -> [B*H, ..]``, or apart again."""
    source = node.inputs[0] if node.inputs else None
    if not is_op(node, "Reshape") or source is None:
        return False
    before, after = view.shape(source), view.shape(node.outputs[0])
    if before is None or after is None:
        return False
    longer, shorter = (before, after) if len(before) > len(after) else (after, before)
    return len(longer) == 4 and len(shorter) == 3 and product(longer[:2]) == shorter[0] and longer[2:] == shorter[1:]


def _sink(chain: tuple[ir.Node, ...], tail: tuple[ir.Node, ...]) -> Sink | None:
    joins = [node for node in chain if is_op(node, "Concat")]
    cuts = [node for node in tail if is_op(node, "Slice")]
    if not joins and not cuts:
        return None
    if len(joins) != 1 or len(cuts) != 1 or len(joins[0].inputs) != 2:
        raise _UnreadableError("columns are joined to the scores in a way that is no sink")
    before = [node.outputs[0] for node in chain[: chain.index(joins[0])]]
    position = next((place for place, item in enumerate(joins[0].inputs) if item in before or _is_product(item)), None)
    sink = joins[0].inputs[1]
    if position != 0 or sink is None:
        raise _UnreadableError(f"node {joins[0].name!r} puts columns in front of the scores")
    return Sink(joins[0], sink, cuts[0])


def _is_product(value: ir.Value | None) -> bool:
    return value is not None and is_op(value.producer(), "MatMul")


def _stabiliser(chain: tuple[ir.Node, ...], softmax: ir.Node) -> tuple[ir.Node, ...]:
    """A row maximum that is subtracted right in front of the softmax."""
    last = softmax.inputs[0].producer() if softmax.inputs[0] is not None else None
    if last is None or not is_op(last, "Sub") or last not in chain:
        return ()
    maximum = last.inputs[1].producer() if last.inputs[1] is not None else None
    if maximum is None or not is_op(maximum, "ReduceMax") or maximum.inputs[0] is not last.inputs[0]:
        return ()
    return (maximum, last)


def _dim(view: ShapeView, value: ir.Value, axis: int) -> Dim:
    size = view.dim(value, axis)
    assert size is not None
    return size


def _source(operand: ir.Value, length: int, feature: int, view: ShapeView, what: str, batch: Dim) -> KeyValueSource:
    """Trace an operand ``[B, H, ...]`` or ``[B*H, ...]``, with T and D on the given axes, to the unexpanded cache."""
    chain: list[ir.Node] = []
    scales: set[ir.Node] = set()
    value = operand
    stops = [operand]
    while len(chain) < _MAX_CHAIN:
        node = value.producer()
        if node is None or (value is not operand and value.is_graph_output()):
            break
        step = _layout_step(node, view)
        if step is None:
            break
        if step is not node.inputs[0] or node.op_type in ("Mul", "Div"):
            scales.add(node)
        chain.append(node)
        value = step
        stops.append(value)
    # The highest place that still has heads and features apart: nothing of it is laid out anew as a whole.
    found = (
        _describe(base, tuple(reversed(chain[:position])), scales, (length, feature), view, batch)
        for position, base in reversed(list(enumerate(stops)))
    )
    best = next((source for source in found if source is not None), None)
    if best is None:
        raise _UnreadableError(f"the {what} {operand.name!r} cannot be traced to a cache [B, G, T, D]")
    return best


def _broadcast_heads(source: KeyValueSource, heads: Dim) -> KeyValueSource:
    """One key head that the product broadcasts serves all query heads."""
    if source.heads == 1 and source.repeats == 1 and heads != 1:
        return dataclasses.replace(source, repeats=heads)
    return source


def _layout_step(node: ir.Node, view: ShapeView) -> ir.Value | None:
    """The value that ``node`` only lays out anew or multiplies by one number."""
    if node.domain:
        return None
    if node.op_type in LAYOUT_OPS:
        return node.inputs[0]
    if node.op_type == "Mul":
        left, right = node.inputs[0], node.inputs[1]
        if left is not None and right is not None:
            if _is_number(right, view):
                return left
            if _is_number(left, view):
                return right
    if node.op_type == "Div" and node.inputs[1] is not None and _is_number(node.inputs[1], view):
        return node.inputs[0]
    return None


def _is_number(value: ir.Value, view: ShapeView) -> bool:
    shape = view.shape(value)
    return shape is not None and all(size == 1 for size in shape) and len(shape) <= 1


def _describe(
    base: ir.Value,
    steps: tuple[ir.Node, ...],
    scales: set[ir.Node],
    axes: tuple[int, int],
    view: ShapeView,
    batch: Dim,
) -> KeyValueSource | None:
    layout = [node for node in steps if node not in scales]
    trace = trace_axes(base, layout, view)
    if trace is not None and len(trace) == 3:
        # Batch and heads on one axis: the batch is its first factor, where it is not 1.
        merged = trace[0]
        apart = 1 if merged and batch != 1 and merged[0].size == batch else 0
        trace = (merged[:apart], merged[apart:], *trace[1:])
    if trace is None or len(trace) != 4:
        return None
    length, feature = axes
    batch_axis = _only_axis(trace[0])
    length_axis, feature_axis = _only_axis(trace[length]), _only_axis(trace[feature])
    if length_axis is None or length_axis < 0 or feature_axis is None or feature_axis < 0:
        return None
    heads = _head_axes(trace)
    if heads is None or (trace[0] and (batch_axis is None or batch_axis < 0)):
        return None
    head_axis, count, repeats = heads
    used = {batch_axis, length_axis, feature_axis, head_axis}
    shape = view.shape(base)
    if shape is None or len(shape) > 4 or any(axis not in used and size != 1 for axis, size in enumerate(shape)):
        return None
    return KeyValueSource(
        base=base,
        steps=steps,
        scales=tuple(node for node in steps if node in scales),
        batch_axis=batch_axis,
        head_axis=head_axis,
        length_axis=length_axis,
        feature_axis=feature_axis,
        heads=count,
        repeats=repeats,
    )


def _only_axis(factors: tuple[object, ...]) -> int | None:
    """The source axis that makes up an axis alone; -1 for a repetition; None where there are none or several."""
    if len(factors) != 1:
        return None
    axis: int = factors[0].axis  # type: ignore[attr-defined]
    return axis


def _head_axes(trace: AxisTrace) -> tuple[int | None, Dim, Dim] | None:
    """The head axis of the source, G and R, from the factors ``(g)``, ``(g, r)``, ``(r)`` or ``()`` of the head axis."""
    factors = trace[1]
    if not factors:
        return None, 1, 1
    if len(factors) == 1:
        single = factors[0]
        return (None, 1, single.size) if single.axis < 0 else (single.axis, single.size, 1)
    if len(factors) == 2 and factors[0].axis >= 0 and factors[1].axis < 0:
        return factors[0].axis, factors[0].size, factors[1].size
    return None
