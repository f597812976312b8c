"""What an attention is for, as far as the graph tells: within one sequence, across two, of an encoder, of images.

* ``cross``: its keys depend on nothing that is as long as the queries, and the queries do: they attend to another
  sequence, such as what an encoder made.
* ``encoder``: queries and keys are one sequence of its own, without a cache, and no mask tells rows apart.
* ``vision``: the queries come from an input for pixels, or the exporter's scope says so.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from graphsurgery.analysis._order import producers_first, subgraphs_of
from graphsurgery.analysis.input_names import is_image_name
from graphsurgery.analysis.slices import runs_along

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.dims import Dim

__all__ = ["Origins"]

_VISION = re.compile(r"visual|vision|image_encoder", re.IGNORECASE)
# They read sizes, not data: keys that are laid out by the batch size of the queries do not come from them.
_SIZES = frozenset({"Shape", "Size"})


class Origins:
    """Which inputs the values of a body depend on; each question about inputs is one walk of the body."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._of_length: dict[Dim, frozenset[ir.Value]] = {}
        self._of_pixels: frozenset[ir.Value] | None = None

    def kinds(
        self, namespace: str, query: ir.Value, key: ir.Value, length: Dim, total: Dim, masks: Iterable[ir.Value]
    ) -> tuple[str, ...]:
        """The kinds of an attention that is not known to be causal.

        Args:
            namespace: the exporter's scope.
            query: the queries.
            key: where the keys come from.
            length: S.
            total: T.
            masks: what its chain takes from outside.
        """
        found = []
        if self._is_cross(query, key, length, total):
            found.append("cross")
        elif total == length and not key.is_graph_output() and not any(self._has_rows(item, length) for item in masks):
            found.append("encoder")
        if _VISION.search(namespace) or query in self._pixels():
            found.append("vision")
        return tuple(found)

    def _is_cross(self, query: ir.Value, key: ir.Value, length: Dim, total: Dim) -> bool:
        if total == length or length == 1:
            return False
        if length not in self._of_length:
            # Of a fixed length, only token ids, positions and masks are known to be the sequence of the queries.
            named = not isinstance(length, int)
            self._of_length[length] = self._reached(
                lambda value: any(
                    runs_along(size, length) and (named or str(self._body.view.dtype(value)) == "INT64")
                    for size in self._body.view.shape(value) or ()
                )
            )
        reached = self._of_length[length]
        return query in reached and key not in reached

    def _has_rows(self, value: ir.Value, length: Dim) -> bool:
        size = self._body.view.dim(value, -2)
        return size is not None and size != 1 and runs_along(size, length)

    def _pixels(self) -> frozenset[ir.Value]:
        if self._of_pixels is None:
            self._of_pixels = self._reached(lambda value: self._body.function is None and is_image_name(value.name))
        return self._of_pixels

    def _reached(self, is_source: Callable[[ir.Value], bool]) -> frozenset[ir.Value]:
        """Everything that is computed from the inputs that ``is_source`` tells."""
        reached = {value for value in self._body.graph.inputs if not value.is_initializer() and is_source(value)}
        if reached:
            self._spread(self._body.graph, reached)
        return frozenset(reached)

    def _spread(self, graph: ir.Graph, reached: set[ir.Value]) -> None:
        for node in producers_first(graph):
            if node.op_type in _SIZES and not node.domain:
                continue
            found = any(item in reached for item in node.inputs)
            for inner in subgraphs_of(node):
                if found:
                    reached.update(inner.inputs)
                self._spread(inner, reached)
                found |= any(item in reached for item in inner.outputs)
            if found:
                reached.update(node.outputs)
