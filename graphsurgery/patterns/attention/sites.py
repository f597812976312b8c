"""What the attention recogniser returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.patterns.matcher import is_op
from graphsurgery.patterns.site import Site

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.dims import Dim

__all__ = ["AttentionSite", "FusedAttention", "KeyValueSource", "Sink", "ValueProduct"]


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
class ValueProduct:
    """A product of the probabilities with values.

    Attributes:
        node: the product; its output is ``[B, H, S, Dv]``.
        source: where its values come from.
        scale: what the product itself multiplies by.
    """

    node: ir.Node
    source: KeyValueSource
    scale: float


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
        value_products: the product with the values; several where some share their probabilities.
        key: where the keys come from.
        score_scale: what the score product itself multiplies by.
        sink: the sink, where there is one.
        stabiliser: the (ReduceMax, Sub) nodes of the chain that subtract the row maximum: without effect on a softmax.
        exposed: what is made on the way from the scores to the probabilities and read by others too, ``[B, H, S, T]``.
        probabilities_read: the first of these others; None where there are none.
        batch: B.
        heads: H.
        length: S.
        total: T.
        body: the main graph or function body that it is in.
    """

    query: ir.Value
    scores: ir.Node
    chain: tuple[ir.Node, ...]
    softmax: ir.Node
    tail: tuple[ir.Node, ...]
    value_products: tuple[ValueProduct, ...]
    key: KeyValueSource
    score_scale: float
    sink: Sink | None
    stabiliser: tuple[ir.Node, ...]
    exposed: tuple[ir.Value, ...]
    probabilities_read: str | None
    batch: Dim
    heads: Dim
    length: Dim
    total: Dim
    body: Body

    @property
    def product(self) -> ir.Node:
        """The first value product, by which the site is known."""
        return self.value_products[0].node

    @property
    def value(self) -> KeyValueSource:
        """Where the values of the first value product come from."""
        return self.value_products[0].source

    @property
    def attended(self) -> tuple[ir.Value, ...]:
        """What its value products make, ``[B, H, S, Dv]`` each."""
        return tuple(item.node.outputs[0] for item in self.value_products)

    @property
    def graph(self) -> ir.Graph:
        """The graph that holds its nodes: that of the body, or a branch or loop in it."""
        graph = self.product.graph
        assert graph is not None
        return graph

    def chain_operands(self) -> list[ir.Value]:
        """The operands of the chain that come from outside it, each once, in order; shapes and axes are none."""
        inside = {output for node in (self.scores, *self.chain) for output in node.outputs}
        found = [
            item
            for node in self.chain
            for index, item in enumerate(node.inputs)
            if item is not None and item not in inside and not (index and is_op(node, "Reshape", "ReduceMax"))
        ]
        return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAttention(Site):
    """Attention that is one operator.

    Attributes:
        node: the operator.
        operator: its name.
        query: its query operand.
        past: its past key and value operands, where they are given.
        body: the main graph or function body that it is in.
    """

    node: ir.Node
    operator: str
    query: ir.Value
    past: tuple[ir.Value, ir.Value] | None
    body: Body

    @property
    def graph(self) -> ir.Graph:
        """The graph that holds its nodes: that of the body, or a branch or loop in it."""
        graph = self.node.graph
        assert graph is not None
        return graph
