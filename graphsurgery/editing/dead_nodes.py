"""Removing what nothing reads any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["captured", "remove_dead"]


def remove_dead(values: Iterable[ir.Value]) -> int:
    """Remove the producers of ``values`` that nothing reads any more, and theirs in turn; initializers likewise.

    Graph inputs and outputs, and initializers that are graph inputs too, stay. Linear in the edges that are cut, however
    many readers a value and outputs a node has.

    Returns:
        Number of nodes removed.
    """
    return _Removal().run(values)


class _Removal:
    def __init__(self) -> None:
        self._left: dict[ir.Value, int] = {}  # readers that a value still has
        self._alive: dict[ir.Node, set[ir.Value]] = {}  # outputs that something reads, of nodes that lost one
        self._pending: list[ir.Value] = []

    def run(self, values: Iterable[ir.Value]) -> int:
        self._look_at(values)
        doomed: dict[ir.Node, None] = {}
        while self._pending:
            value = self._pending.pop()
            node = value.producer()
            if node is None:
                graph = value.graph
                if graph is not None and value.is_initializer() and not value.is_graph_input():
                    graph.initializers.pop(value.name or "", None)
            elif node.graph is not None and node not in doomed and not self._alive_outputs(node, value):
                self._cut(node)
                doomed[node] = None
        # All at once: each call of remove() collects the outputs of the graph, of which there are two a layer.
        by_graph: dict[ir.Graph, list[ir.Node]] = {}
        for node in doomed:
            assert node.graph is not None
            by_graph.setdefault(node.graph, []).append(node)
        for graph, nodes in by_graph.items():
            graph.remove(nodes)
        return len(doomed)

    def _look_at(self, values: Iterable[ir.Value]) -> None:
        """Count the readers of ``values``; those without any are next."""
        for value in dict.fromkeys(values):
            self._left[value] = len(value.uses())
            self._check(value)

    def _check(self, value: ir.Value) -> None:
        if not self._left[value] and not value.is_graph_output():
            self._pending.append(value)

    def _alive_outputs(self, node: ir.Node, lost: ir.Value) -> set[ir.Value]:
        if len(node.outputs) == 1:
            return set()
        alive = self._alive.get(node)
        if alive is None:
            alive = self._alive[node] = {item for item in node.outputs if item.is_graph_output() or item.uses()}
        alive.discard(lost)
        return alive

    def _cut(self, node: ir.Node) -> None:
        """End what ``node`` reads, and what its bodies read."""
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            if value not in self._left:
                self._left[value] = len(value.uses())
            node.replace_input_with(index, None)
            self._left[value] -= 1
            self._check(value)
        self._look_at(captured(node))


def captured(node: ir.Node) -> list[ir.Value]:
    """Outer values that the subgraphs of ``node`` read; their uses end with the subgraph."""
    captured: list[ir.Value] = []
    for attribute in node.attributes.values():
        if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            continue
        graphs = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else list(attribute.as_graphs())
        for graph in graphs:
            for inner in list(graph.all_nodes()):
                for index, item in enumerate(inner.inputs):
                    if item is not None and item.graph is not inner.graph:
                        captured.append(item)
                        inner.replace_input_with(index, None)
    return captured
