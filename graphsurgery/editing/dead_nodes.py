"""Removing what nothing reads any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["captured", "remove_dead"]


def remove_dead(values: Iterable[ir.Value]) -> int:
    """Remove the producers of ``values`` that nothing reads any more, and theirs in turn; initializers likewise.

    Graph inputs and outputs, and initializers that are graph inputs too, stay.

    Returns:
        Number of nodes removed.
    """
    pending = list(values)
    doomed: dict[ir.Node, None] = {}
    while pending:
        value = pending.pop()
        if value.uses() or value.is_graph_output():
            continue
        node = value.producer()
        if node is None:
            graph = value.graph
            if graph is not None and value.is_initializer() and not value.is_graph_input():
                graph.initializers.pop(value.name or "", None)
            continue
        if node in doomed or node.graph is None:
            continue
        if any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue
        pending += [item for item in node.inputs if item is not None]
        pending += captured(node)
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
        doomed[node] = None
    # All at once: each call of remove() collects the outputs of the graph, of which there are two a layer.
    by_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in doomed:
        assert node.graph is not None
        by_graph.setdefault(node.graph, []).append(node)
    for graph, nodes in by_graph.items():
        graph.remove(nodes)
    return len(doomed)


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
