"""Rows of a value, from which rows of its producer's inputs?

:func:`lift` answers the question for one node: if only some rows of an output are wanted, which inputs may be reduced
to the same rows, on which axis, and which are needed whole. Pruning climbs from the logits with it; a mask is pushed
back to its sources, and a bound on a cache to its readers, by the same question.

*Rows* are the sequence positions of the query, size S. :class:`RowAxis` says which axis of a value carries them:
alone (``[B, S, H]``, axis 1), or all batches behind one another (``flat``: ``[B*S, H]``, axis 0).

A Reshape, Expand or ConstantOfShape whose shape operand holds the number of rows must get another operand in the
reduced graph: the answer names those entries as :class:`Patch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis import _row_rules as rules
from graphsurgery.analysis._row_sizes import follows_sizes, is_size, row_sinks
from graphsurgery.analysis._row_types import Blocked, Context, Lift, Patch, RowAxis, View, runs_along, same_size

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Blocked", "Lift", "Patch", "RowAxis", "lift", "runs_along", "same_size"]


def lift(node: ir.Node, output: int, rows: RowAxis, view: View, model: ir.Model) -> Lift | Blocked:
    """What ``node`` needs of its inputs to give only chosen rows of one output.

    Args:
        node: any node but If, Loop and Scan, whose bodies the caller walks itself.
        output: which of its outputs.
        rows: where that output carries the rows.
        view: shapes of the values around ``node``.
        model: looked up for the body when ``node`` calls a local function.

    Returns:
        A :class:`Lift`, or :class:`Blocked` with the reason where the node mixes rows or is not known.
    """
    return _lift(node, output, rows, Context(view, model.opset_imports.get("", 1)), model)


def _lift(node: ir.Node, output: int, rows: RowAxis, context: Context, model: ir.Model) -> Lift | Blocked:
    shape = context.shape(node.outputs[output])
    if shape is None:
        return Blocked(f"the shape of {node.outputs[output].name!r} is not known")
    if rows.axis >= len(shape):
        return Blocked(f"{node.outputs[output].name!r} has no axis {rows.axis}")
    function = model.functions.get(node.op_identifier())
    if function is not None:
        return _Call(node, function, context, model).lift(output, rows)
    rule = rules.find(node)
    if rule is None:
        return Blocked(f"operator {_operator(node)} of node {node.name!r} is not known to keep rows apart")
    return rule(node, output, rows, context)


class _Call:
    """The body of a local function in one call: it keeps rows apart when all its nodes do."""

    def __init__(self, call: ir.Node, function: ir.Function, context: Context, model: ir.Model) -> None:
        self._call = call
        self._function = function
        self._outer = context
        self._model = model
        self._values: dict[ir.Value, RowAxis] = {}
        self._edges: set[tuple[ir.Node, int]] = set()
        self._patches: list[tuple[ir.Node, Patch]] = []
        self._contracts = False

    def lift(self, output: int, rows: RowAxis) -> Lift | Blocked:
        try:
            inner = self._outer.view.in_call(self._call)
        except ValueError:
            return Blocked(f"the body of function {self._function.name!r} was not looked into")
        context = Context(inner, self._function.opset_imports.get("", self._outer.opset))
        root = self._function.outputs[output]
        failure = self._climb(root, rows, context) or self._closed(root, context)
        if failure is not None:
            return failure
        formals = {value: position for position, value in enumerate(self._function.inputs)}
        needs = {formals[value]: axis for value, axis in self._values.items() if value in formals}
        return Lift(needs, contracts=self._contracts)

    def _climb(self, root: ir.Value, rows: RowAxis, context: Context) -> Blocked | None:
        name = self._function.name
        formals = set(self._function.inputs)
        pending = [(root, rows)]
        while pending:
            value, wanted = pending.pop()
            if value in self._values:
                if self._values[value] != wanted:
                    return Blocked(f"function {name!r} needs {value.name!r} in two layouts")
                continue
            self._values[value] = wanted
            if value in formals:
                continue
            node = value.producer()
            if node is None:
                return Blocked(f"function {name!r} holds {value.name!r}, which has rows of its own")
            step = _lift(node, value.index() or 0, wanted, context, self._model)
            if isinstance(step, Blocked):
                return Blocked(f"inside function {name!r}, {step.reason}")
            self._contracts |= step.contracts
            self._patches += [(node, patch) for patch in step.patches]
            for position, need in step.rows.items():
                item = node.inputs[position]
                assert item is not None
                self._edges.add((node, position))
                pending.append((item, need))
        return None

    def _closed(self, root: ir.Value, context: Context) -> Blocked | None:
        """Why the body cannot be left as it is: something else in it needs all rows, or their number."""
        name = self._function.name
        reduced = set(self._values)
        operands: set[tuple[ir.Node, int]] = set()
        for node, patch in self._patches:
            operand = node.inputs[patch.input]
            if operand is None or not follows_sizes(operand, patch.position, reduced, context):
                return Blocked(f"node {node.name!r} inside function {name!r} fixes the number of rows")
            operands.add((node, patch.input))
        for value, rows in self._values.items():
            if value.is_graph_output() and value is not root:
                return Blocked(f"function {name!r} returns all rows of {value.name!r}")
            shape = context.shape(value)
            for use in value.uses():
                if (use.node, use.idx) in self._edges:
                    continue
                sinks = None
                if is_size(use.node) and shape is not None:
                    sinks = row_sinks(use.node, rows.axis, len(shape), context)
                if sinks is None or not operands.issuperset(sinks):
                    return Blocked(f"function {name!r} uses all rows of {value.name!r}")
        return None


def _operator(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type
