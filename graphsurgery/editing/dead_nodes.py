"""Removing what nothing reads any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis._order import holds_graphs

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
        gone: set[ir.Value] = set()  # initializers
        while self._pending:
            value = self._pending.pop()
            node = value.producer()
            if node is None:
                graph = value.graph
                if graph is not None and value.is_initializer() and not value.is_graph_input():
                    graph.initializers.pop(value.name or "", None)
                    gone.add(value)
            elif node not in doomed and node.graph is not None and not self._alive_outputs(node, value):
                doomed[node] = None
                self._cut(node)
        # All at once: each call of remove() collects the outputs of the graph, of which there are two a layer.
        by_graph: dict[ir.Graph, list[ir.Node]] = {}
        for node in doomed:
            assert node.graph is not None
            by_graph.setdefault(node.graph, []).append(node)
            for index, read in enumerate(node.inputs):
                # Nobody asks any more who reads what has gone with it.
                if read is not None and read not in gone and read.producer() not in doomed:
                    node.replace_input_with(index, None)
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
        """Count what ``node`` reads as read once less, and end what its bodies read."""
        left = self._left
        for value in node.inputs:
            if value is None:
                continue
            readers = left.get(value)
            if readers is None:
                readers = len(value.uses())
            left[value] = readers - 1
            if readers == 1:
                self._check(value)
        if holds_graphs(node):
            ended = captured(node)
            for value in [value for value in ended if value in left]:
                left[value] -= 1
            for value in dict.fromkeys(ended):
                # What was counted before has readers that have gone and are still listed.
                if value not in left:
                    left[value] = len(value.uses())
                self._check(value)


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
