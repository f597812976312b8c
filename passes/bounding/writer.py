"""One attention that reads C slots in place of N: keys, values and masks lose their last columns together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.patterns.attention.sites import AttentionSite
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.editing.column_bounds import Bounds, ColumnCutter
    from graphsurgery.editing.spans import Span
    from graphsurgery.patterns.cache_reads import CacheRead, ColumnEdge
    from graphsurgery.rewrite import Rewrite
    from graphsurgery.site_report import Detail

__all__ = ["ReadWriter"]


class ReadWriter:
    """Writes one site after the other; masks and bounds are shared by all of them.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the model before the edit.
        cutter: makes what has C columns.
        bounds: C for each N.
    """

    def __init__(self, rewrite: Rewrite, shapes: ShapeView, cutter: ColumnCutter, bounds: Bounds) -> None:
        self._rewrite = rewrite
        self._shapes = shapes
        self._cutter = cutter
        self._bounds = bounds

    def share(self, site: CacheRead) -> None:
        """Make what ``site`` has in common with others."""
        self._bounds.share(site.slots, (self._value(site.keys), site.keys.axis))

    def write(self, site: CacheRead) -> dict[str, Detail]:
        """Bound ``site``; what the report says of it."""
        seen_on = (self._value(site.keys), site.keys.axis)
        self._rewrite.before(site.keys.node)
        span = self._bounds.span(site.slots, seen_on)
        before = [self._value(edge) for edge in site.edges]
        query = site.attention.query
        after = [self._cut(edge, span) for edge in site.edges]
        outputs = [site.keys.node.outputs[0]]
        if isinstance(site.attention, AttentionSite):
            outputs = [item.node.outputs[0] for item in site.attention.value_products]
            self._patch_chain(site.attention, site.sink_end, span)
            self._forget_columns(site.attention, site, seen_on)
        names = [output.name or "" for output in outputs]
        bound = [span.end] if isinstance(span.end, ir.Value) and span.end.uses() else []
        function = site.attention.body.function
        scope = "main" if function is None else function.name
        self._rewrite.record([query, *before], names, [query, *after, *bound], names, scope)
        if isinstance(span.end, ir.Value):
            # Callers that hand over what is cut already leave nothing to do with it here.
            self._rewrite.release(span.end)
        return {"caches": [cache.output.name for cache in site.caches]}

    def _value(self, edge: ColumnEdge) -> ir.Value:
        value = edge.node.inputs[edge.index]
        assert value is not None
        return value

    def _cut(self, edge: ColumnEdge, span: Span) -> ir.Value:
        self._rewrite.before(edge.node)
        made = self._cutter.get(self._value(edge), ((edge.axis, span),))
        self._rewrite.reroute(edge.node, edge.index, made)
        return made

    def _patch_chain(self, site: AttentionSite, sink_end: int | None, span: Span) -> None:
        """Reshapes among the scores and probabilities name the number of columns."""
        for node in (*site.chain, *site.tail):
            if is_op(node, "Reshape"):
                rank = self._shapes.rank(node.outputs[0])
                assert rank is not None
                self._rewrite.before(node)
                self._cutter.patched(node, rank - 1, span)
        if site.sink is not None and sink_end is not None:
            self._rewrite.reroute(site.sink.cut, 2, self._rewrite.constant([sink_end], "end"))

    def _forget_columns(self, site: AttentionSite, read: CacheRead, seen_on: tuple[ir.Value, int]) -> None:
        """Correct what is declared of scores and probabilities, and let who asks for their size hear the old one."""
        for node in (site.scores, *site.chain, site.softmax, *site.tail):
            for value in node.outputs:
                rank = self._shapes.rank(value)
                if rank is None or self._shapes.dim(value, -1) == 1:
                    continue
                self._bounds.keep_sizes(value, read.slots, seen_on)
                if value.shape is not None and len(value.shape) == rank:
                    value.shape = ir.Shape([*value.shape[:-1], None])
                elif value.shape is not None:
                    value.shape = None
