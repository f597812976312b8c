"""What becomes constant in one graph or function body: planned backwards from what is needed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis._frame import INTEGERS
from graphsurgery.analysis._order import producers_first, subgraphs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphsurgery.analysis._facts import Fact
    from graphsurgery.analysis._frame import Frame
    from graphsurgery.analysis.folding import FunctionVariant

__all__ = ["BodyPlan", "BodyPlanner"]

# A list that is read as data is folded up to this length: no tensor has more axes than that.
_MAX_LISTED = 16
# Operands that say how large, where or how many: (operator, position).
_SHAPE_OPERANDS: Mapping[str, frozenset[int]] = {
    "Reshape": frozenset({1}),
    "Expand": frozenset({1}),
    "Tile": frozenset({1}),
    "ConstantOfShape": frozenset({0}),
    "Range": frozenset({0, 1, 2}),
    "Slice": frozenset({1, 2, 3, 4}),
    "Split": frozenset({1}),
    "Unsqueeze": frozenset({1}),
    "Squeeze": frozenset({1}),
    "Pad": frozenset({1, 3}),
    "Resize": frozenset({3}),
    "TopK": frozenset({1}),
    "OneHot": frozenset({1}),
    "Trilu": frozenset({1}),
    "CumSum": frozenset({1}),
    "If": frozenset({0}),
    "Loop": frozenset({0, 1}),
}
_AXES = frozenset({1})


@dataclasses.dataclass
class BodyPlan:
    """What to do to one graph with its subgraphs, or to one function body.

    Attributes:
        constants: values that are replaced, and by what.
        taken: each If whose condition is known, and the branch that is taken.
        bypassed: outputs of loops that never run, and what they hold instead.
        dead: nodes that nothing needs then, consumers first.
        certain: nodes that stay and run in every call: not those in branches and loops.
        calls: the variant of a function that each call that stays is of.
    """

    constants: dict[ir.Value, np.ndarray] = dataclasses.field(default_factory=dict)
    taken: dict[ir.Node, ir.Graph] = dataclasses.field(default_factory=dict)
    bypassed: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    dead: list[ir.Node] = dataclasses.field(default_factory=list)
    certain: list[ir.Node] = dataclasses.field(default_factory=list)
    calls: dict[ir.Node, FunctionVariant] = dataclasses.field(default_factory=dict)


class BodyPlanner:
    """Goes through one body backwards, from what is needed to what it needs."""

    def __init__(self, frame: Frame, *, in_function: bool) -> None:
        self._frame = frame
        self._functions = frame.session.model.functions
        self._in_function = in_function
        self._needed: set[ir.Value] = set()
        self._shape_needed: set[ir.Value] = set()
        self._sequences: set[ir.Value] = set()
        self._overflown: set[ir.Value] = set()
        self._orders: dict[ir.Graph | ir.Function, list[ir.Node]] = {}
        self.plan = BodyPlan()
        self.calls: list[ir.Node] = []

    def run(self, nodes: ir.Graph | ir.Function, outputs: Iterable[ir.Value]) -> None:
        """Plan the body."""
        self._look_at(nodes)
        self._needed.update(outputs)
        self._visit_all(nodes, certain=True)

    # ---- forwards: what must not be folded ----

    def _look_at(self, nodes: ir.Graph | ir.Function) -> None:
        order = producers_first(nodes)
        self._orders[nodes] = order
        for node in order:
            for graph in subgraphs_of(node):
                self._look_at(graph)
            self._mark(node)

    def _mark(self, node: ir.Node) -> None:
        facts = [(value, self._frame.fact(value)) for value in node.outputs]
        facts = [(value, fact) for value, fact in facts if fact.value is not None]
        if not facts:
            return
        counts = node.op_type == "Range" and not node.domain
        # The size of a range is a number like any other, and so is one element that is picked from it.
        follows = node.op_type not in ("Shape", "Size") and any(value in self._sequences for value in node.inputs)
        wrong = any(value in self._overflown for value in node.inputs)
        for value, fact in facts:
            if counts or (follows and fact.value is not None and fact.value.rank):
                self._sequences.add(value)
            if wrong or not _fits(fact, value):
                # It wraps around at run time, and whatever is computed from it is not what it seems.
                self._overflown.add(value)

    # ---- backwards: what is needed ----

    def _visit_all(self, nodes: ir.Graph | ir.Function, *, certain: bool) -> None:
        for node in reversed(self._orders[nodes]):
            self._visit(node, certain=certain)

    def _visit(self, node: ir.Node, *, certain: bool) -> None:
        left = []
        for value in node.outputs:
            if value not in self._needed:
                continue
            array = self._constant(value, node)
            if array is None:
                left.append(value)
            else:
                self.plan.constants[value] = array
        if not left:
            self.plan.dead.append(node)
            return
        branch = self._branch(node)
        if branch is not None:
            self.plan.taken[node] = branch
            for value, inner in zip(node.outputs, branch.outputs, strict=True):
                if value in left:
                    self._need(inner, as_shape=value in self._shape_needed)
            self._visit_all(branch, certain=certain)
            return
        if self._never_runs(node) and all((value.index() or 0) < len(node.inputs) - 2 for value in left):
            for value in left:
                start = node.inputs[(value.index() or 0) + 2]
                assert start is not None
                self.plan.bypassed[value] = start
                self._need(start, as_shape=value in self._shape_needed)
            return
        self._keep(node, certain=certain)

    def _keep(self, node: ir.Node, *, certain: bool) -> None:
        if certain:
            self.plan.certain.append(node)
        if self._functions and node.op_identifier() in self._functions:
            self.calls.append(node)
        operands = frozenset[int]()
        if not node.domain:
            operands = _AXES if node.op_type.startswith("Reduce") else _SHAPE_OPERANDS.get(node.op_type, operands)
        for index, value in enumerate(node.inputs):
            if value is not None:
                self._need(value, as_shape=index in operands)
        for graph in subgraphs_of(node):
            self._needed.update(graph.outputs)
            self._visit_all(graph, certain=False)

    def _need(self, value: ir.Value, *, as_shape: bool) -> None:
        self._needed.add(value)
        if as_shape:
            self._shape_needed.add(value)

    def _constant(self, value: ir.Value, node: ir.Node) -> np.ndarray | None:
        """What ``value`` always holds, where it is shape arithmetic."""
        fact = self._frame.fact(value)
        if fact.value is None or value in self._overflown or (node.op_type == "Constant" and not node.domain):
            return None
        numbers, dtype = fact.value.ints(), fact.dtype or value.dtype
        if numbers is None or dtype not in INTEGERS:
            return None
        listed = fact.value.rank <= 1 and len(numbers) <= _MAX_LISTED and value not in self._sequences
        if not listed and value not in self._shape_needed:
            return None
        assert dtype is not None
        return np.array(numbers, dtype=dtype.numpy()).reshape(fact.value.shape)

    def _branch(self, node: ir.Node) -> ir.Graph | None:
        """The branch that ``node``, an If, takes in every call."""
        if node.op_type != "If" or node.domain or node.inputs[0] is None:
            return None
        taken = self._number(node.inputs[0])
        attribute = node.attributes.get("then_branch" if taken else "else_branch")
        if taken is None or attribute is None or attribute.is_ref():
            return None
        branch = attribute.as_graph()
        # A function has no place for the branch's initializers.
        return None if self._in_function and branch.initializers else branch

    def _never_runs(self, node: ir.Node) -> bool:
        if node.op_type != "Loop" or node.domain or len(node.inputs) < 2:
            return False
        trips, goes_on = (None if value is None else self._number(value) for value in node.inputs[:2])
        return (trips is not None and trips <= 0) or goes_on == 0

    def _number(self, value: ir.Value) -> int | None:
        contents = self._frame.fact(value).value
        single = None if contents is None or value in self._overflown else contents.single
        return single if isinstance(single, int) else None


def _fits(fact: Fact, value: ir.Value) -> bool:
    """Whether the known elements are within the range of the element type."""
    dtype = fact.dtype or value.dtype
    if fact.value is None or dtype not in INTEGERS:
        return True
    assert dtype is not None
    if dtype == ir.DataType.BOOL:
        low, high = 0, 1
    else:
        limits = np.iinfo(dtype.numpy())
        low, high = int(limits.min), int(limits.max)
    return all(low <= item <= high for item in fact.value.items if isinstance(item, int))
