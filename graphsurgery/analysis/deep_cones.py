"""Following chosen rows as deep as the graph allows: through the last layer, and further where nothing needs more.

:func:`deepen` extends a cone node by node, latest first. A node joins when everything that reads its results is in the
cone, or reads only their sizes: so the query path, the projections and the MLP of the last layer compute the chosen
rows, while its keys and values, which read the same residual stream, make the climb stop there and keep every row.
Layers that take their keys and values from an earlier layer are followed too.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.analysis._row_sizes import is_size
from graphsurgery.analysis.cones import Cone, Edge, Members
from graphsurgery.analysis.slices import Blocked, Lift, RowAxis, lift

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import onnx_ir as ir

    from graphsurgery.analysis.row_blocks import RowBlock
    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["Admit", "deepen"]

Admit: TypeAlias = "Callable[[list[ir.Value], list[Edge], RowAxis], bool]"

_HOLDERS = frozenset({"If", "Loop", "Scan"})


def deepen(
    cone: Cone,
    view: ShapeView,
    model: ir.Model,
    order: Mapping[ir.Node, int],
    admit: Admit,
    blocks: Mapping[ir.Node, RowBlock | Blocked] | None = None,
) -> Cone:
    """Extend ``cone`` upwards as far as its nodes are read by nothing else.

    Args:
        cone: where to go on from.
        view: shapes.
        model: looked up for function bodies.
        order: execution order of the nodes of the main graph.
        admit: asked for each node that could join, with its results, the edges that need rows, and where the result
            carries them; where it says no, the climb stops below that node.
        blocks: parts that join as a whole, or why they cannot, by the node that makes their result.

    Returns:
        The larger cone, with a reason in ``stops`` for each value at which it ended.
    """
    return _Deepening(cone, view, model, order, admit, blocks or {}).run()


class _Deepening:
    def __init__(
        self,
        cone: Cone,
        view: ShapeView,
        model: ir.Model,
        order: Mapping[ir.Node, int],
        admit: Admit,
        blocks: Mapping[ir.Node, RowBlock | Blocked],
    ) -> None:
        self._cone, self._view, self._model, self._order, self._admit = cone, view, model, order, admit
        self._known_blocks = blocks
        self._members = Members(cone)
        self._wanted: dict[ir.Value, dict[tuple[ir.Node, int], Edge]] = {}
        self._heap: list[tuple[int, int, ir.Node]] = []
        self._queued: set[ir.Node] = set()
        for edge in cone.frontier:
            self._want(edge)

    def run(self) -> Cone:
        while self._heap:
            _, _, node = heapq.heappop(self._heap)
            reason = self._join(node)
            if reason is not None:
                for value in node.outputs:
                    if value in self._wanted:
                        self._members.stops.setdefault(value, reason)
        frontier = [
            edge
            for value, edges in self._wanted.items()
            for edge in edges.values()
            if self._members.values.get(value) != edge.rows
        ]
        return self._members.cone(self._cone.roots, frontier)

    def _want(self, edge: Edge) -> None:
        self._members.edges.add((edge.node, edge.index))
        if edge.value in self._members.values:
            return
        self._wanted.setdefault(edge.value, {})[edge.node, edge.index] = edge
        node = edge.value.producer()
        if node is not None and node in self._order and node not in self._queued and node not in self._members.nodes:
            self._queued.add(node)
            heapq.heappush(self._heap, (-self._order[node], len(self._queued), node))

    def _join(self, node: ir.Node) -> str | None:
        """Take ``node`` into the cone, or say why it stays outside."""
        named = f"node {node.name!r}" if node.name else f"a {node.op_type} node"
        if node.graph is not self._model.graph or (node.op_type in _HOLDERS and not node.domain):
            return f"{named} holds a graph of its own"
        block = self._known_blocks.get(node)
        if block is not None:
            return block.reason if isinstance(block, Blocked) else self._join_block(block)
        lifts: list[tuple[ir.Value, RowAxis, Lift]] = []
        for value in node.outputs:
            reader = self._other_reader(value)
            if reader is not None:
                return f"every row of {value.name!r} is needed by {reader}"
            rows = self._layout(value)
            if rows is None:
                continue
            if isinstance(rows, str):
                return rows
            lifted = lift(node, value.index() or 0, rows, self._view, self._model)
            if isinstance(lifted, Blocked):
                return lifted.reason
            needs = [
                Edge(node, index, item, need)
                for index, need in lifted.rows.items()
                if (item := node.inputs[index]) is not None
            ]
            if not self._admit([item for item in node.outputs if item.uses()], needs, rows):
                return f"rows cannot be selected from what {named} reads"
            lifts.append((value, rows, lifted))
        for value, rows, lifted in lifts:
            for edge in self._members.take(node, value, rows, lifted):
                self._want(edge)
        return None

    def _layout(self, value: ir.Value) -> RowAxis | str | None:
        """Where the rows of ``value`` are wanted; None where nobody wants them, a reason where two want different ones."""
        edges = self._wanted.get(value)
        if edges is None:
            return None
        layouts = {edge.rows for edge in edges.values()}
        return f"{value.name!r} is needed in two layouts" if len(layouts) > 1 else next(iter(layouts))

    def _join_block(self, block: RowBlock) -> str | None:
        """Take a whole block in, or say why it stays outside."""
        value = block.result
        rows = self._layout(value)
        if rows is None or isinstance(rows, str):
            return rows
        reader = self._other_reader(value)
        if reader is not None:
            return f"every row of {value.name!r} is needed by {reader}"
        needs: dict[ir.Value, RowAxis] = {}
        for item in block.operands:
            need = block.layout(item, rows, self._view)
            if need is None:
                return f"where {item.name!r} carries its rows is not known"
            needs[item] = need
        edges = [Edge(node, index, item, needs[item]) for node, index, item in block.reads]
        if not self._admit([value], edges, rows):
            return f"rows cannot be selected from what the block of {value.name!r} reads"
        self._members.take_block(block, rows)
        for edge in edges:
            self._want(edge)
        return None

    def _other_reader(self, value: ir.Value) -> str | None:
        """Who, outside the cone, reads all rows of ``value``."""
        if value.is_graph_output():
            return f"graph output {value.name!r}"
        for use in value.uses():
            if (use.node, use.idx) in self._members.edges or is_size(use.node):
                continue
            return f"node {use.node.name!r} ({use.node.op_type})" if use.node.name else f"a {use.node.op_type} node"
        return None
