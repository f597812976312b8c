"""The part of a graph that can do with chosen rows: climbing from a value to where its rows come from.

:func:`climb` starts at a value of which only some rows are wanted and walks up with
:func:`graphsurgery.analysis.slices.lift`. The result is a :class:`Cone`: the nodes that will compute fewer rows, and
the *frontier*, the edges on which rows have to be selected. It changes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.analysis._row_sizes import is_size
from graphsurgery.analysis.slices import Blocked, Lift, Patch, RowAxis, lift

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from graphsurgery.analysis.row_blocks import RowBlock
    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["Cone", "Edge", "Into", "Lifter", "Members", "climb", "join", "outside_readers", "size_readers"]


@dataclasses.dataclass(frozen=True)
class Edge:
    """Input ``index`` of ``node`` reads ``value``, which carries the rows on ``rows``."""

    node: ir.Node
    index: int
    value: ir.Value
    rows: RowAxis


@dataclasses.dataclass(frozen=True)
class Cone:
    """What computes fewer rows.

    Attributes:
        roots: the values that the climb started at.
        values: every value that will hold fewer rows, and where.
        nodes: the nodes that make them, those of If branches included.
        edges: every (node, input) that will read fewer rows.
        frontier: those of them on which rows are selected, in a stable order.
        patches: shape operands that must change.
        contractions: the matrix products in the cone.
        stops: why the climb stopped below a value of the frontier, where the node above could not be lifted.
        blocks: parts that compute fewer rows as a whole.
    """

    roots: tuple[ir.Value, ...]
    values: dict[ir.Value, RowAxis]
    nodes: tuple[ir.Node, ...]
    edges: frozenset[tuple[ir.Node, int]]
    frontier: tuple[Edge, ...]
    patches: tuple[tuple[ir.Node, Patch], ...]
    contractions: tuple[ir.Node, ...]
    stops: dict[ir.Value, str]
    blocks: tuple[RowBlock, ...] = ()


_EMPTY = Cone((), {}, (), frozenset(), (), (), (), {})


class Members:
    """What a cone holds while it grows.

    Attributes:
        values: as in :class:`Cone`.
        nodes: in the order in which they were taken.
        edges: as in :class:`Cone`.
        stops: as in :class:`Cone`.
        blocks: in the order in which they were taken.
    """

    def __init__(self, cone: Cone = _EMPTY) -> None:
        """Nothing yet, or what ``cone`` holds."""
        self.values: dict[ir.Value, RowAxis] = dict(cone.values)
        self.nodes: dict[ir.Node, None] = dict.fromkeys(cone.nodes)
        self.edges: set[tuple[ir.Node, int]] = set(cone.edges)
        self.stops: dict[ir.Value, str] = dict(cone.stops)
        self.blocks: dict[RowBlock, None] = dict.fromkeys(cone.blocks)
        self._patches: dict[tuple[ir.Node, Patch], None] = dict.fromkeys(cone.patches)
        self._contractions: dict[ir.Node, None] = dict.fromkeys(cone.contractions)

    def take(self, node: ir.Node, value: ir.Value, rows: RowAxis, lifted: Lift) -> list[Edge]:
        """Take ``node`` in for ``value``, which it makes; the edges that will read fewer rows for it."""
        self.values[value] = rows
        self.nodes.setdefault(node)
        self.stops.pop(value, None)
        for patch in lifted.patches:
            self._patches.setdefault((node, patch))
        if lifted.contracts:
            self._contractions.setdefault(node)
        found = []
        for index, need in sorted(lifted.rows.items()):
            item = node.inputs[index]
            assert item is not None
            found.append(Edge(node, index, item, need))
        self.edges.update((edge.node, edge.index) for edge in found)
        return found

    def take_block(self, block: RowBlock, rows: RowAxis) -> None:
        """Take the whole of ``block`` in; the edges into it are the caller's to add."""
        self.values[block.result] = rows
        self.blocks.setdefault(block)
        self.nodes.update(dict.fromkeys(block.nodes))
        self.stops.pop(block.result, None)

    def cone(self, roots: tuple[ir.Value, ...], frontier: Iterable[Edge]) -> Cone:
        """The cone of all that was taken."""
        return Cone(
            roots,
            self.values,
            tuple(self.nodes),
            frozenset(self.edges),
            tuple(frontier),
            tuple(self._patches),
            tuple(self._contractions),
            self.stops,
            tuple(self.blocks),
        )


Into: TypeAlias = "Callable[[Edge, Lift], bool]"
Lifter: TypeAlias = "Callable[[ir.Node, int, RowAxis, ShapeView, ir.Model], Lift | Blocked]"


def climb(
    root: ir.Value, rows: RowAxis, view: ShapeView, model: ir.Model, into: Into, lifter: Lifter = lift
) -> Cone | Blocked:
    """Walk up from ``root``.

    Args:
        root: only some rows of it are wanted.
        rows: where it carries them.
        view: shapes around it.
        model: looked up for function bodies.
        into: whether to climb past an edge that needs rows, into the producer of its value; where it says no, the
            edge is part of the frontier. Given the edge and what its node needs.
        lifter: what one node needs, where the caller knows more of some operator than the rules do.

    Returns:
        The cone, or Blocked where the producer of ``root`` itself cannot be lifted, or a value is needed in two
        layouts.
    """
    walk = _Climb(view, model, into, lifter)
    failure = walk.open(root, rows)
    if failure is not None:
        return failure
    walk.run()
    return walk.conflict or walk.result(root)


class _Climb:
    def __init__(self, view: ShapeView, model: ir.Model, into: Into, lifter: Lifter) -> None:
        self._lifter = lifter
        self._view = view
        self._model = model
        self._into = into
        self._members = Members()
        self._pending: list[Edge] = []
        self._frontier: dict[tuple[ir.Node, int], Edge] = {}
        self.conflict: Blocked | None = None

    def open(self, value: ir.Value, rows: RowAxis) -> Blocked | None:
        """Take the producer of ``value`` into the cone, or say why it cannot be."""
        known = self._members.values.get(value)
        if known is not None:
            if known != rows:
                self.conflict = Blocked(f"{value.name!r} is needed in two layouts")
            return self.conflict
        lifts = self._lifts(value, rows)
        if isinstance(lifts, Blocked):
            return lifts
        for node, made, lifted in lifts:
            self._take(node, made, rows, lifted)
        return None

    def _lifts(self, value: ir.Value, rows: RowAxis) -> list[tuple[ir.Node, ir.Value, Lift]] | Blocked:
        """What makes ``value``: its producer, or that of each branch behind it where it is an If."""
        node = value.producer()
        if node is None:
            return Blocked(f"{value.name!r} is an input or a constant")
        if node.op_type != "If" or node.domain:
            lifted = self._lifter(node, value.index() or 0, rows, self._view, self._model)
            return lifted if isinstance(lifted, Blocked) else [(node, value, lifted)]
        # The branches must both give the chosen rows; what they capture is then reduced like any other value.
        found: list[tuple[ir.Node, ir.Value, Lift]] = [(node, value, Lift({}))]
        for name in ("then_branch", "else_branch"):
            graph = node.attributes[name].as_graph()
            inner = graph.outputs[value.index() or 0]
            producer = inner.producer()
            if producer is None or producer.graph is not graph:
                return Blocked(f"a branch of If node {node.name!r} does not compute {inner.name!r} itself")
            lifts = self._lifts(inner, rows)
            if isinstance(lifts, Blocked):
                return Blocked(f"in a branch of If node {node.name!r}, {lifts.reason}")
            found += lifts
        return found

    def _take(self, node: ir.Node, value: ir.Value, rows: RowAxis, lifted: Lift) -> None:
        for edge in self._members.take(node, value, rows, lifted):
            if self._into(edge, lifted):
                self._pending.append(edge)
            else:
                self._frontier[edge.node, edge.index] = edge

    def run(self) -> None:
        """Follow all open edges; an edge whose producer cannot be lifted joins the frontier."""
        position = 0
        while position < len(self._pending) and self.conflict is None:
            edge = self._pending[position]
            position += 1
            failure = self.open(edge.value, edge.rows)
            if failure is not None:
                self._members.stops[edge.value] = failure.reason
                self._frontier[edge.node, edge.index] = edge

    def result(self, root: ir.Value) -> Cone | Blocked:
        frontier = _uncovered(self._frontier.values(), self._members.values)
        return frontier if isinstance(frontier, Blocked) else self._members.cone((root,), frontier)


def _uncovered(frontier: Iterable[Edge], values: dict[ir.Value, RowAxis]) -> tuple[Edge, ...] | Blocked:
    """The edges whose value does not hold fewer rows already."""
    kept: list[Edge] = []
    for edge in frontier:
        inside = values.get(edge.value)
        if inside is None:
            kept.append(edge)
        elif inside != edge.rows:
            return Blocked(f"{edge.value.name!r} is needed in two layouts")
    return tuple(kept)


def join(cones: Iterable[Cone]) -> Cone | Blocked:
    """Several cones as one; Blocked where they need one value in two layouts."""
    parts = list(cones)
    values: dict[ir.Value, RowAxis] = {}
    for part in parts:
        for value, rows in part.values.items():
            if values.setdefault(value, rows) != rows:
                return Blocked(f"{value.name!r} is needed in two layouts")
    edges = {(edge.node, edge.index): edge for part in parts for edge in part.frontier}
    frontier = _uncovered(edges.values(), values)
    if isinstance(frontier, Blocked):
        return frontier
    return Cone(
        tuple(dict.fromkeys(root for part in parts for root in part.roots)),
        values,
        tuple(dict.fromkeys(node for part in parts for node in part.nodes)),
        frozenset().union(*(part.edges for part in parts)),
        frontier,
        tuple(dict.fromkeys(patch for part in parts for patch in part.patches)),
        tuple(dict.fromkeys(node for part in parts for node in part.contractions)),
        {value: reason for part in parts for value, reason in part.stops.items()},
        tuple(dict.fromkeys(block for part in parts for block in part.blocks)),
    )


# ---- who else reads -----------------------------------------------------------------------------------------------


def outside_readers(cone: Cone, values: Iterable[ir.Value] | None = None) -> dict[ir.Value, str]:
    """The values of ``cone`` of which something outside it reads all rows, and who reads each.

    The roots are outputs of the graph as they are meant to be. Readers of a shape do not count: see
    :func:`size_readers`. A node that computes fewer rows does so for all its outputs: readers of the others count
    against the one that is in the cone.

    Args:
        cone: the cone.
        values: look at these values of it only.
    """
    returned = _branch_outputs(cone.nodes)
    found: dict[ir.Value, str] = {}
    for value in cone.values if values is None else values:
        node = value.producer()
        made = [value]
        # The branches of an If compute each output on their own.
        if node is not None and (node.op_type != "If" or node.domain):
            made += [item for item in node.outputs if item not in cone.values]
        for item in made:
            reader = _outside_reader(cone, item, returned)
            if reader is not None:
                found[value] = reader if item is value else f"{reader}, through {item.name!r}"
                break
    return found


def _outside_reader(cone: Cone, value: ir.Value, returned: set[ir.Value]) -> str | None:
    if value.is_graph_output() and value not in cone.roots and value not in returned:
        return f"graph output {value.name!r}"
    for use in value.uses():
        if value in cone.values and ((use.node, use.idx) in cone.edges or is_size(use.node)):
            continue
        return f"node {use.node.name!r} ({use.node.op_type})" if use.node.name else f"a {use.node.op_type} node"
    return None


def _branch_outputs(nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """What the branches of If nodes among ``nodes`` return."""
    return {
        value
        for node in nodes
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.GRAPH
        for value in attribute.as_graph().outputs
    }


def size_readers(cone: Cone) -> Iterator[tuple[ir.Node, ir.Value, RowAxis]]:
    """The Shape nodes that read a value of ``cone``, with the value and where it carries the rows.

    Those inside a block are to see the rows that are left.
    """
    inside = {node for block in cone.blocks for node in block.nodes}
    for value, rows in cone.values.items():
        for use in value.uses():
            if is_size(use.node) and use.node not in inside:
                yield use.node, value, rows
