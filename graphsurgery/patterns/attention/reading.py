"""Attention: scores, what is done to them, softmax, and the product with the values, in every spelling.

Anchored on the softmax. From there up to the product of queries and keys, through the exporter's own element-wise
chain (scale, softcap, mask, bias, sink); down to the product with the values, through casts, guards and the slice that
drops the sink. Keys and values are traced back through scaling, transposition and expansion over query heads to the
unexpanded cache.

Source of the computation: Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; sinks: Xiao et al. 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import is_nonnegative
from graphsurgery.analysis.slices import runs_along, same_size
from graphsurgery.patterns.attention.climbing import MAX_CHAIN, chain_above
from graphsurgery.patterns.attention.key_value_sources import (
    UnreadableError,
    broadcast_heads,
    find_source,
    regroups_heads,
)
from graphsurgery.patterns.attention.mask_kinds import mask_kinds, signed_operands
from graphsurgery.patterns.attention.products import is_product, read_product
from graphsurgery.patterns.attention.sites import AttentionSite, Sink, ValueProduct
from graphsurgery.patterns.layer_names import layer_in
from graphsurgery.patterns.matcher import is_op, readers
from graphsurgery.patterns.site import Refusal

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.attention.kinds import Origins
    from graphsurgery.patterns.attention.sites import KeyValueSource
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["Reader"]

_SCORE_CHAIN = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Tanh", "Where", "Cast", "CastLike", "Identity", "Clip", "Max", "Min", "Neg"),
        *("Concat", "ReduceMax", "Dropout", "IsNaN", "Not", "Reshape"),
    }
)
_PROBABILITY_CHAIN = frozenset({"Cast", "CastLike", "Identity", "Dropout", "Where", "IsNaN", "Mul", "Slice", "Reshape"})


class Reader:
    """Reads the attention around one softmax."""

    def __init__(self, softmax: ir.Node, number: int, body: Body, origins: Origins, index: GraphIndex) -> None:
        self._order = index.order
        self._softmax = softmax
        self._origins = origins
        self._number = number
        self._body = body
        self._shapes = body.view

    def read(self) -> AttentionSite | Refusal | None:
        """The site; a refusal; None where the softmax belongs to something else (a router, a head)."""
        tail, products = self._down()
        if not products:
            return None
        try:
            return self._site(tail, products)
        except UnreadableError as why:
            return Refusal(
                id=f"attention:{self._number}",
                kinds=("attention",),
                layer=layer_in(self._softmax, self._body),
                reason=str(why),
            )

    def _site(self, tail: tuple[ir.Node, ...], products: tuple[ir.Node, ...]) -> AttentionSite | None:
        softmax, shapes, product = self._softmax, self._shapes, products[0]
        self._check_softmax()
        scores, chain = self._up()
        if scores is None:
            self._check_nothing_missed()
            return None
        query, keys = scores.inputs[0], scores.inputs[1]
        values = product.inputs[1]
        assert query is not None
        assert keys is not None
        assert values is not None
        shape = shapes.shape(scores.outputs[0])
        if shape is None:
            raise UnreadableError(f"the shape of the scores {scores.outputs[0].name!r} is not known")
        if len(shape) not in (3, 4):
            raise UnreadableError(f"the scores {scores.outputs[0].name!r} have rank {len(shape)}, not 3 or 4")
        query = self._query_by_heads(query) if len(shape) == 3 else query
        length, total = shape[-2:]
        if total == 1:
            raise UnreadableError(
                f"the scores {scores.outputs[0].name!r} have one column: each row attends that one key"
            )
        batch, heads = shape[0], shape[1]
        query_shape = shapes.shape(query)
        if query_shape is not None and len(query_shape) == 4:
            batch, heads = query_shape[0], query_shape[1]
        apart = [node for node in (scores, *chain, *tail, product) if node.graph is not softmax.graph]
        if apart:
            raise UnreadableError(f"node {apart[0].name!r} and softmax {softmax.name!r} are in different graphs")
        sink = _sink(chain, tail)
        score_product, value_product = read_product(scores), read_product(product)
        key = find_source(keys, *score_product.axes((-1, -2)), shapes, "keys", batch)
        value = find_source(values, *value_product.axes((-2, -1)), shapes, "values", batch)
        if not isinstance(heads, int) and isinstance(key.heads, int) and isinstance(key.repeats, int):
            heads = key.heads * key.repeats
        key, value = (broadcast_heads(source, heads) for source in (key, value))
        if (key.heads, key.repeats) != (value.heads, value.repeats):
            raise UnreadableError(
                f"keys {key.base.name!r} have {key.heads} heads for {heads}, values {value.base.name!r} {value.heads}"
            )
        more = [self._value_product(node, key, batch, heads) for node in products[1:]]
        value_products = (
            ValueProduct(product, value, value_product.scale),
            *(item for item in more if item is not None),
        )
        inside = (scores, *chain, softmax, *tail)
        exposed, read_by = self._read_elsewhere(inside, {item.node for item in value_products})
        self._check_one_way(exposed, {*inside, *(item.node for item in value_products)})
        lengths = {
            _dim(shapes, source.base, source.length_axis) for source in (key, *(item.source for item in value_products))
        }
        if len(lengths) > 1 and all(isinstance(size, int) for size in lengths):
            # Lengths under different names are the same in every run: the product with the values asks for it.
            raise UnreadableError(f"keys {key.base.name!r} and values {value.base.name!r} have different lengths")
        return AttentionSite(
            id=f"attention:{self._number}",
            kinds=("attention", "decomposed", *self._kinds(scores, chain, key.base, length, total)),
            layer=layer_in(softmax, self._body),
            query=query,
            scores=scores,
            chain=chain,
            softmax=softmax,
            tail=tail,
            value_products=value_products,
            key=key,
            score_scale=score_product.scale,
            sink=sink,
            stabiliser=_stabiliser(chain, softmax),
            exposed=exposed,
            probabilities_read=read_by,
            batch=batch,
            heads=heads,
            length=length,
            total=self._common_total(scores, chain, length, total),
            body=self._body,
        )

    def _common_total(self, scores: ir.Node, chain: tuple[ir.Node, ...], length: Dim, total: Dim) -> Dim:
        """T under the name that the mask has for it.

        Some exporters name the past of each layer anew; the one mask of all layers is as long as each of them.
        """
        if isinstance(total, int) or not is_nonnegative(total - length):
            return total
        sizes = [self._shapes.dim(value, -1) for value in _operands(scores, chain)]
        named = [size for size in sizes if size is not None and not isinstance(size, int) and size != length]
        best = next((size for size in named if is_nonnegative(size - length)), total)
        # A padding mask may count its columns by a name of its own, or cut them from a table that ends somewhere; added
        # to the scores they are as many as the keys.
        unlike = [size for size in named if not runs_along(size, best)]
        for node in chain:
            made = self._shapes.dim(node.outputs[0], -1)
            if made in (None, best) or not same_size(made, best):
                continue
            if any(same_size(size, made) for size in unlike):
                return made
        return best

    def _query_by_heads(self, query: ir.Value) -> ir.Value:
        """The queries ``[B, H, S, D]`` behind ``[B*H, S, D]``."""
        node = query.producer()
        source = node.inputs[0] if node is not None else None
        if node is None or source is None or not regroups_heads(node, self._shapes) or self._shapes.rank(source) != 4:
            raise UnreadableError(
                f"the queries {query.name!r} have batch and heads on one axis, and are not made of any with two"
            )
        return source

    def _kinds(
        self, scores: ir.Node, chain: tuple[ir.Node, ...], key: ir.Value, length: Dim, total: Dim
    ) -> tuple[str, ...]:
        outside = _operands(scores, chain)
        masks = mask_kinds(signed_operands(scores, chain, self._body), length, total, self._body)
        query = scores.inputs[0]
        if "causal" in masks or "sliding" in masks or query is None:
            return masks
        namespace = self._softmax.metadata_props.get("namespace", "")
        return (*masks, *self._origins.kinds(namespace, query, key, length, total, outside))

    def _check_softmax(self) -> None:
        softmax = self._softmax
        shape = self._shapes.shape(softmax.outputs[0])
        rank = len(shape) if shape is not None else 4
        version = softmax.version or self._body.opset
        attribute = softmax.attributes.get("axis")
        if attribute is not None and attribute.is_ref():
            raise UnreadableError(f"the axis of softmax {softmax.name!r} is chosen by each call of its function")
        axis = attribute.as_int() if attribute is not None else (-1 if version >= 13 else 1)
        if axis % rank != rank - 1:
            raise UnreadableError(f"softmax {softmax.name!r} runs over axis {axis}, not over the keys")

    # ---- down to the value product --------------------------------------------------------------------------------

    def _down(self) -> tuple[tuple[ir.Node, ...], tuple[ir.Node, ...]]:
        """The nodes behind the softmax up to the products with values, and these."""
        tail: list[ir.Node] = []
        value = self._softmax.outputs[0]
        while len(tail) < MAX_CHAIN:
            following = readers(value)
            products = [node for node in following if is_product(node) and node.inputs[0] is value]
            if products:
                return tuple(tail), tuple(dict.fromkeys(products))
            node = self._next(value, following, tail)
            if node is None:
                return tuple(tail), ()
            tail.append(node)
            value = node.outputs[0]
        return tuple(tail), ()

    def _value_product(self, node: ir.Node, key: KeyValueSource, batch: Dim, heads: Dim) -> ValueProduct | None:
        """A further product of the probabilities, where its values are laid out as the keys are; else only a reader."""
        values = node.inputs[1]
        if values is None or node.graph is not self._softmax.graph:
            return None
        try:
            product = read_product(node)
            source = find_source(values, *product.axes((-2, -1)), self._shapes, "values", batch)
        except UnreadableError:
            return None
        source = broadcast_heads(source, heads)
        features = self._shapes.dim(node.outputs[0], -1)
        alike = (key.heads, key.repeats) == (source.heads, source.repeats) and isinstance(features, int)
        return ValueProduct(node, source, product.scale) if alike else None

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
        products, chain = chain_above(start, self._is_score_product, self._is_step)
        if len(products) > 1:
            names = " and ".join(repr(node.name) for node in products)
            raise UnreadableError(f"the scores are a sum of several products ({names})")
        return (products[0], chain) if products else (None, ())

    def _is_score_product(self, node: ir.Node) -> bool:
        return is_product(node) and (self._shapes.rank(node.outputs[0]) or 0) >= 3 and node.inputs[0] is not None

    def _is_step(self, node: ir.Node) -> bool:
        if node.domain or node.op_type not in _SCORE_CHAIN:
            return False
        return node.op_type != "Reshape" or regroups_heads(node, self._shapes)

    def _check_nothing_missed(self) -> None:
        """Refuse, with its name, what stands between a product of two computed values and the softmax.

        Logits of a router are made with a weight: they are not taken for scores.
        """
        pending: list[tuple[ir.Value | None, ir.Node | None]] = [(self._softmax.inputs[0], None)]
        seen: set[ir.Node] = set()
        while pending and len(seen) < MAX_CHAIN:
            value, between = pending.pop(0)
            node = value.producer() if value is not None else None
            if node is None or node.domain or node in seen:
                continue
            seen.add(node)
            if not is_product(node):
                between = between or (node if node.op_type not in _SCORE_CHAIN else None)
                pending += [(item, between) for item in node.inputs]
            elif between is not None and self._multiplies_computed(node):
                raise UnreadableError(
                    f"node {between.name!r} ({between.op_type}) between the scores and softmax {self._softmax.name!r} "
                    "cannot be replayed on blocks"
                )

    def _multiplies_computed(self, node: ir.Node) -> bool:
        """Whether a product has batch axes and no weight on its right."""
        right = node.inputs[1]
        computed = right is not None and right.producer() is not None and self._body.constant(right) is None
        return computed and (self._shapes.rank(node.outputs[0]) or 0) >= 3

    # ---- who else looks -------------------------------------------------------------------------------------------

    def _read_elsewhere(
        self, nodes: tuple[ir.Node, ...], products: set[ir.Node]
    ) -> tuple[tuple[ir.Value, ...], str | None]:
        """What ``nodes`` make on the way and others read too, and the first of these others."""
        inside = {*nodes, *products}
        exposed: list[ir.Value] = []
        first: str | None = None
        for node in nodes:
            for value in node.outputs:
                others = [
                    reader for reader in readers(value) if reader not in inside and not is_op(reader, "Shape", "Size")
                ]
                if not others and not value.is_graph_output():
                    continue
                exposed.append(value)
                told = f"graph output {value.name!r}" if value.is_graph_output() else ""
                first = first or told or f"node {others[0].name!r} ({others[0].op_type})"
        return tuple(exposed), first

    def _check_one_way(self, exposed: tuple[ir.Value, ...], inside: set[ir.Node]) -> None:
        """Nothing that others make of its scores may come back into it: blocks have theirs before the whole is there."""
        last = max(self._order.get(node, 0) for node in inside)
        pending = [reader for value in exposed for reader in readers(value) if reader not in inside]
        seen = set(pending)
        while pending:
            node = pending.pop()
            for value in node.outputs:
                for reader in readers(value):
                    if reader in inside:
                        raise UnreadableError(
                            f"node {node.name!r} ({node.op_type}) makes of its scores what node {reader.name!r} "
                            f"({reader.op_type}) brings back into them"
                        )
                    if reader not in seen and self._order.get(reader, last) < last:
                        seen.add(reader)
                        pending.append(reader)


def _operands(scores: ir.Node, chain: tuple[ir.Node, ...]) -> list[ir.Value]:
    """What the chain takes from outside."""
    inside = {output for node in (scores, *chain) for output in node.outputs}
    return [item for node in chain for item in node.inputs if item is not None and item not in inside]


def _sink(chain: tuple[ir.Node, ...], tail: tuple[ir.Node, ...]) -> Sink | None:
    joins = [node for node in chain if is_op(node, "Concat")]
    cuts = [node for node in tail if is_op(node, "Slice")]
    if not joins and not cuts:
        return None
    if len(joins) != 1 or len(cuts) != 1 or len(joins[0].inputs) != 2:
        raise UnreadableError("columns are joined to the scores in a way that is no sink")
    before = [node.outputs[0] for node in chain[: chain.index(joins[0])]]
    position = next((place for place, item in enumerate(joins[0].inputs) if item in before or _is_product(item)), None)
    sink = joins[0].inputs[1]
    if position != 0 or sink is None:
        raise UnreadableError(f"node {joins[0].name!r} puts columns in front of the scores")
    return Sink(joins[0], sink, cuts[0])


def _is_product(value: ir.Value | None) -> bool:
    return value is not None and is_product(value.producer())


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
