"""Walking a graph the way recognisers need it: an op index, the order of nodes, see-through steps.

Everything here is linear in the number of nodes and reads no weights. Exporters wrap values in Identity, Cast and
Dropout nodes and write constants as nodes or initializers; the helpers look through both.
"""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis._order import HOLDERS, holds_graphs, inner_graphs, is_sorted
from graphsurgery.analysis.kept import kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "GraphIndex",
    "all_graphs",
    "holds_graphs",
    "index_of",
    "is_op",
    "is_sorted",
    "origin",
    "readers",
    "subgraphs",
    "through",
]

_TRANSPARENT = frozenset({"Identity", "Cast", "CastLike", "Dropout"})


class GraphIndex:
    """Nodes of a graph by operator, and their order.

    Attributes:
        order: position of each node of the graph and its subgraphs in execution order: a node of a subgraph
            comes before the node that holds the subgraph.
        owner: the node that holds each subgraph.
    """

    def __init__(self, model: ir.Model, graph: ir.Graph | None = None) -> None:
        """Index ``graph``, the main graph where none is given: that of a function for its body."""
        self.order: dict[ir.Node, int] = {}
        self.owner: dict[ir.Graph, ir.Node] = {}
        self._visit(model.graph if graph is None else graph)

    def _visit(self, graph: ir.Graph) -> None:
        # Subgraphs nest a few levels deep at most: recursion is over levels, not over nodes.
        order = self.order
        for node in graph:
            if (node.op_type in HOLDERS or node.domain) and holds_graphs(node):
                for inner in subgraphs(node):
                    self.owner[inner] = node
                    self._visit(inner)
            order[node] = len(order)

    @functools.cached_property
    def _by_op(self) -> Mapping[tuple[str, str], list[ir.Node]]:
        # Some ask for the number of nodes alone.
        found: collections.defaultdict[tuple[str, str], list[ir.Node]] = collections.defaultdict(list)
        for node in self.order:
            found[node.domain, node.op_type].append(node)
        return found

    def nodes(self, *op_types: str, domain: str = "") -> list[ir.Node]:
        """All nodes of these operators, in graph order."""
        found = [node for op_type in op_types for node in self._by_op.get((domain, op_type), ())]
        return sorted(found, key=self.order.__getitem__) if len(op_types) > 1 else found

    def operators(self) -> dict[tuple[str, str], int]:
        """How often each (domain, operator) occurs."""
        return {key: len(nodes) for key, nodes in self._by_op.items()}


def index_of(model: ir.Model, graph: ir.Graph | None = None) -> GraphIndex:
    """The index of ``graph``, the main graph where none is given, made once until the model is edited."""
    return kept(model, ("index", graph or model.graph), lambda: GraphIndex(model, graph))


def all_graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph, the bodies of all functions, and the subgraphs of each at any depth."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield graph
        yield from inner_graphs(graph)


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The subgraphs that ``node`` holds as attributes (If, Loop, Scan)."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def is_op(node: ir.Node | None, *op_types: str, domain: str = "") -> bool:
    """Whether ``node`` is one of these operators."""
    return node is not None and node.domain == domain and node.op_type in op_types


def through(value: ir.Value, transparent: Iterable[str] = _TRANSPARENT) -> ir.Value:
    """The value behind a chain of nodes that only pass on what they read (Identity, Cast, Dropout)."""
    kinds = frozenset(transparent)
    while True:
        node = value.producer()
        if node is None or node.domain or node.op_type not in kinds or not node.inputs or node.inputs[0] is None:
            return value
        value = node.inputs[0]


def origin(value: ir.Value) -> ir.Value:
    """The initializer, constant, graph input or computed value behind casts, transposes and dequantisation."""
    kinds = _TRANSPARENT | {"Transpose", "DequantizeLinear", "Reshape", "Unsqueeze", "Squeeze"}
    return through(value, kinds)


def readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read ``value``, each once, nodes of subgraphs included."""
    return list(dict.fromkeys(use.node for use in value.uses()))
