"""The part of a graph that can do with chosen rows: climbing from a value to where its rows come from.

:func:`climb` starts at a value of which only some rows are wanted and walks up with
:func:`graphsurgery.analysis.slices.lift`. The result is a :class:`Cone`: the nodes that will compute fewer rows, and
the *frontier*, the edges on which rows have to be selected. It changes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.analysis.slices import Blocked, Lift, Patch, RowAxis, lift

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["Cone", "Edge", "climb", "outside_reader"]


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
        root: the value that the climb started at.
        values: every value that will hold fewer rows, and where.
        nodes: the nodes that make them, those of If branches included.
        frontier: edges into the cone on which rows are selected, in a stable order.
        patches: shape operands that must change.
        contractions: the matrix products in the cone.
        stops: why the climb stopped below a value of the frontier, where the node above could not be lifted.
    """

    root: ir.Value
    values: dict[ir.Value, RowAxis]
    nodes: tuple[ir.Node, ...]
    frontier: tuple[Edge, ...]
    patches: tuple[tuple[ir.Node, Patch], ...]
    contractions: tuple[ir.Node, ...]
    stops: dict[ir.Value, str]


Into: TypeAlias = "Callable[[Edge, Lift], bool]"


def climb(root: ir.Value, rows: RowAxis, view: ShapeView, model: ir.Model, into: Into) -> Cone | Blocked:
    """Walk up from ``root``.

    Args:
        root: only some rows of it are wanted.
        rows: where it carries them.
        view: shapes around it.
        model: looked up for function bodies.
        into: whether to climb past an edge that needs rows, into the producer of its value; where it says no, the
            edge is part of the frontier. Given the edge and what its node needs.

    Returns:
        The cone, or Blocked where the producer of ``root`` itself cannot be lifted, or a value is needed in two
        layouts.
    """
    walk = _Climb(view, model, into)
    failure = walk.open(root, rows)
    if failure is None:
        failure = walk.run()
    return failure if failure is not None else walk.result(root)


class _Climb:
    def __init__(self, view: ShapeView, model: ir.Model, into: Into) -> None:
        self._view = view
        self._model = model
        self._into = into
        self._values: dict[ir.Value, RowAxis] = {}
        self._nodes: dict[ir.Node, None] = {}
        self._edges: list[Edge] = []
        self._frontier: list[Edge] = []
        self._patches: dict[tuple[ir.Node, Patch], None] = {}
        self._contractions: dict[ir.Node, None] = {}
        self._stops: dict[ir.Value, str] = {}

    def open(self, value: ir.Value, rows: RowAxis) -> Blocked | None:
        """Take the producer of ``value`` into the cone, or say why it cannot be."""
        known = self._values.get(value)
        if known is not None:
            return None if known == rows else Blocked(f"{value.name!r} is needed in two layouts")
        node = value.producer()
        if node is None:
            return Blocked(f"{value.name!r} is an input or a constant")
        if node.op_type == "If" and not node.domain:
            return self._open_branches(node, value, rows)
        lifted = lift(node, value.index() or 0, rows, self._view, self._model)
        if isinstance(lifted, Blocked):
            return lifted
        self._take(node, value, rows, lifted)
        return None

    def _take(self, node: ir.Node, value: ir.Value, rows: RowAxis, lifted: Lift) -> None:
        self._values[value] = rows
        self._nodes.setdefault(node)
        for patch in lifted.patches:
            self._patches.setdefault((node, patch))
        if lifted.contracts:
            self._contractions.setdefault(node)
        for index, need in sorted(lifted.rows.items()):
            item = node.inputs[index]
            assert item is not None
            edge = Edge(node, index, item, need)
            if self._into(edge, lifted):
                self._edges.append(edge)
            elif edge not in self._frontier:
                self._frontier.append(edge)

    def _open_branches(self, node: ir.Node, value: ir.Value, rows: RowAxis) -> Blocked | None:
        """Both branches of an If must give the chosen rows; what they capture is then reduced like any other value."""
        position = value.index() or 0
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        for graph in branches:
            inner = graph.outputs[position]
            producer = inner.producer()
            if producer is None or producer.graph is not graph or producer.op_type in ("If", "Loop", "Scan"):
                return Blocked(f"a branch of If node {node.name!r} does not compute {inner.name!r} itself")
            step = lift(producer, inner.index() or 0, rows, self._view, self._model)
            if isinstance(step, Blocked):
                return Blocked(f"in a branch of If node {node.name!r}, {step.reason}")
        self._values[value] = rows
        self._nodes.setdefault(node)
        for graph in branches:
            failure = self.open(graph.outputs[position], rows)
            if failure is not None:
                return failure
        return None

    def run(self) -> Blocked | None:
        """Follow all open edges; an edge whose producer cannot be lifted joins the frontier."""
        while self._edges:
            edge = self._edges.pop(0)
            known = self._values.get(edge.value)
            if known is not None and known != edge.rows:
                return Blocked(f"{edge.value.name!r} is needed in two layouts")
            failure = self.open(edge.value, edge.rows)
            if failure is not None:
                self._stops[edge.value] = failure.reason
                if edge not in self._frontier:
                    self._frontier.append(edge)
        return None

    def result(self, root: ir.Value) -> Cone:
        return Cone(
            root,
            self._values,
            tuple(self._nodes),
            tuple(self._frontier),
            tuple(self._patches),
            tuple(self._contractions),
            self._stops,
        )


def outside_reader(cone: Cone, values: dict[ir.Value, RowAxis] | None = None) -> tuple[ir.Value, str] | None:
    """The first value of ``cone`` of which something outside it reads all rows, and who reads it.

    The root may be read by anything that the caller answers for; so is it here only where it is read by a node
    outside. Sizes (Shape, Size) of a value may be read where they end in nothing but the cone's own shape operands:
    they then follow the rows.

    Args:
        cone: the cone.
        values: look at these values of it only.
    """
    inside = set(cone.nodes)
    operands = {(node, patch.input) for node, patch in cone.patches}
    for value in values if values is not None else cone.values:
        if value is not cone.root and value.is_graph_output() and value.graph is not None and _is_top(value, inside):
            return value, f"graph output {value.name!r}"
        for use in value.uses():
            if use.node in inside:
                continue
            if use.node.op_type in ("Shape", "Size") and not use.node.domain and _ends_in(use.node, inside, operands):
                continue
            return (
                value,
                f"node {use.node.name!r} ({use.node.op_type})" if use.node.name else f"a {use.node.op_type} node",
            )
    return None


def _is_top(value: ir.Value, inside: set[ir.Node]) -> bool:
    """Whether ``value`` is an output of a graph whose holder is not in the cone."""
    for node in inside:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and any(item is value for item in attribute.as_graph().outputs):
                return False
    return True


def _ends_in(node: ir.Node, inside: set[ir.Node], operands: set[tuple[ir.Node, int]]) -> bool:
    """Whether everything that is computed from the outputs of ``node`` is a shape operand of a node inside."""
    pending = [node]
    seen: set[ir.Node] = set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if len(seen) > 64:
            return False
        for value in current.outputs:
            if value.is_graph_output():
                return False
            for use in value.uses():
                if use.node in inside:
                    if use.node.op_type not in ("Reshape", "Expand", "ConstantOfShape"):
                        return False
                    continue
                pending.append(use.node)
    return True
