"""Sizes that an exporter asks of scores or probabilities, answered from what these are made of.

A Shape of the scores would keep them alive as a whole, for four numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.editing.spans import Bound, Sizes, as_value
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.attention.sites import AttentionSite
    from graphsurgery.rewrite import Rewrite

__all__ = ["answer_sizes"]

_INT64 = ir.DataType.INT64


def answer_sizes(rewrite: Rewrite, shapes: ShapeView, bounds: Sizes, site: AttentionSite) -> frozenset[ir.Node]:
    """Let who reads a Shape or Size of what ``site`` makes between its scores and its value product read another value.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the body before the edit.
        bounds: sizes that are known at the start of the graph.
        site: the attention, whose old nodes are still there.

    Returns:
        The Shape and Size nodes that nothing reads any more, and those that no operand of the scores can answer.
    """
    asked: dict[ir.Node, None] = {}
    for value in _made(site):
        asking = [use.node for use in value.uses() if is_op(use.node, "Shape", "Size")]
        asked.update(dict.fromkeys(asking))
        if not asking:
            continue
        # Queries and keys are there in front of the scores, and whoever asks comes behind them.
        rewrite.before(site.scores)
        sizes = _sizes(shapes, bounds, site, value)
        if sizes is None:
            continue
        for node in asking:
            rewrite.replace_all_uses(node.outputs[0], _answer(rewrite, node, sizes))
    return frozenset(asked)


def _made(site: AttentionSite) -> Iterator[ir.Value]:
    for node in (site.scores, *site.chain, site.softmax, *site.tail):
        yield from node.outputs


def _sizes(shapes: ShapeView, bounds: Sizes, site: AttentionSite, value: ir.Value) -> list[Bound] | None:
    """The size of each axis; None where one is seen on no operand of the score product."""
    shape, query = shapes.shape(value), site.scores.inputs[0]
    if shape is None or query is None or shapes.rank(query) != len(shape):
        return None
    found: list[Bound] = []
    for axis, size in enumerate(shape):
        seen = _seen_on(shapes, bounds, site, size, (query, axis))
        if seen is None:
            return None
        found.append(bounds.bound(size, seen))
    return found


def _seen_on(
    shapes: ShapeView, bounds: Sizes, site: AttentionSite, size: Dim, like: tuple[ir.Value, int]
) -> tuple[ir.Value, int] | None:
    """An operand and an axis of it that has ``size``."""
    if isinstance(size, int) or bounds.is_shared(size) or shapes.dim(*like) == size:
        return like
    keys = (site.key.base, site.key.length_axis)
    return keys if shapes.dim(*keys) == size else None


def _answer(rewrite: Rewrite, node: ir.Node, sizes: list[Bound]) -> ir.Value:
    if is_op(node, "Shape"):
        first, last = (node.attributes.get(name) for name in ("start", "end"))
        sizes = sizes[first.as_int() if first is not None else 0 : last.as_int() if last is not None else None]
    if all(isinstance(size, int) for size in sizes):
        whole = rewrite.constant([size for size in sizes if isinstance(size, int)], "sizes")
    else:
        parts = [as_value(rewrite, size) for size in sizes]
        whole = rewrite.emit("Concat", parts, {"axis": 0}, name="sizes", dtype=_INT64, shape=[len(parts)])
    if is_op(node, "Shape"):
        return whole
    return rewrite.emit("ReduceProd", [whole], {"keepdims": 0}, name="number_of_scores", dtype=_INT64, shape=[])
