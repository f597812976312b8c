"""The order in which a walk visits the nodes of one graph: producers first, whatever the order in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["HOLDERS", "holds_graphs", "inner_graphs", "is_sorted", "producers_first", "reads_from", "subgraphs_of"]

HOLDERS = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""The default operators that hold graphs."""

_GRAPH_TYPES = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


def producers_first(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """The nodes of one graph or function body, each after those whose outputs it (or a subgraph of it) reads.

    Linear in nodes and edges, without recursion. File order is kept where it is sorted already. Nodes on a cycle, which
    no valid graph has, still come once each.
    """
    listed = list(nodes)
    return listed if _is_in_order(listed) else list(_reordered(listed))


def _is_in_order(nodes: Sequence[ir.Node]) -> bool:
    waiting = set(nodes)
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.producer() in waiting:
                return False
        if (node.op_type in HOLDERS or node.domain) and any(before in waiting for before in reads_from(node)):
            return False
        waiting.remove(node)
    return True


def _reordered(nodes: Sequence[ir.Node]) -> Iterator[ir.Node]:
    waiting = dict.fromkeys(nodes)
    for node in nodes:
        if node not in waiting:
            continue
        stack = [node]
        opened: set[ir.Node] = set()
        while stack:
            current = stack[-1]
            missing = [] if current in opened else [before for before in reads_from(current) if before in waiting]
            opened.add(current)
            if missing:
                stack.extend(before for before in missing if before not in opened)
                if stack[-1] is not current:
                    continue
            stack.pop()
            if current in waiting:
                del waiting[current]
                yield current


def holds_graphs(node: ir.Node) -> bool:
    """Whether ``node`` holds subgraphs: asked of every node in most walks, where looking at attributes takes longest."""
    # Walks over all nodes ask that much themselves.
    if node.op_type not in HOLDERS and not node.domain:
        return False
    return any(attribute.type in _GRAPH_TYPES for attribute in node.attributes.data.values())


def inner_graphs(graph: ir.Graph | ir.Function) -> list[ir.Graph]:
    """The subgraphs of ``graph`` at any depth, outer ones first."""
    # Asked for several times a pass, on all nodes: onnx-ir's own walk (a generator and a mapping view a node) costs
    # more than twice as much.
    found: list[ir.Graph] = []
    for node in [node for node in graph if (node.op_type in HOLDERS or node.domain) and holds_graphs(node)]:
        for inner in subgraphs_of(node):
            found += [inner, *inner_graphs(inner)]
    return found


def reads_from(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes whose outputs ``node``, or a subgraph of it, reads; nodes within its subgraphs included."""
    for value in node.inputs:
        producer = value.producer() if value is not None else None
        if producer is not None:
            yield producer
    for graph in subgraphs_of(node):
        for inner in graph.all_nodes():
            for value in inner.inputs:
                producer = value.producer() if value is not None else None
                if producer is not None:
                    yield producer
        for value in graph.outputs:
            producer = value.producer()
            if producer is not None:
                yield producer


def subgraphs_of(node: ir.Node) -> Iterator[ir.Graph]:
    """The bodies that ``node`` holds as attributes."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield attribute.value
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from attribute.value


def is_sorted(graph: ir.Graph | ir.Function) -> bool:
    """Whether every node of ``graph`` and its subgraphs comes after the producers of what it reads."""
    return _is_sorted(graph, set())


def _is_sorted(graph: ir.Graph | ir.Function, seen: set[ir.Node]) -> bool:
    for node in graph:
        for value in node.inputs:
            if value is not None and (producer := value.producer()) is not None and producer not in seen:
                return False
        if (node.op_type in HOLDERS or node.domain) and not all(_is_sorted(body, seen) for body in subgraphs_of(node)):
            return False
        # Its own results are not there for its bodies.
        seen.add(node)
    return True
