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
from graphsurgery.analysis._row_types import Blocked, Lift, Patch, RowAxis, View, same_size

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Blocked", "Lift", "Patch", "RowAxis", "lift", "same_size"]


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
    shape = view.shape(node.outputs[output])
    if shape is None:
        return Blocked(f"the shape of {node.outputs[output].name!r} is not known")
    if rows.axis >= len(shape):
        return Blocked(f"{node.outputs[output].name!r} has no axis {rows.axis}")
    function = model.functions.get(node.op_identifier())
    if function is not None:
        return _lift_call(node, function, output, rows, view, model)
    rule = rules.find(node)
    if rule is None:
        return Blocked(f"operator {_operator(node)} of node {node.name!r} is not known to keep rows apart")
    return rule(node, output, rows, view)


def _lift_call(
    call: ir.Node, function: ir.Function, output: int, rows: RowAxis, view: View, model: ir.Model
) -> Lift | Blocked:
    """A function keeps rows apart when its body does, with no operand that would have to change."""
    inner = view.in_call(call)
    formals = {value: position for position, value in enumerate(function.inputs)}
    needs: dict[int, RowAxis] = {}
    contracts = False
    pending = [(function.outputs[output], rows)]
    seen: dict[ir.Value, RowAxis] = {}
    while pending:
        value, wanted = pending.pop()
        if value in seen:
            if seen[value] != wanted:
                return Blocked(f"function {function.name!r} needs {value.name!r} in two layouts")
            continue
        seen[value] = wanted
        if value in formals:
            needs[formals[value]] = wanted
            continue
        node = value.producer()
        if node is None:
            return Blocked(f"function {function.name!r} holds {value.name!r}, which has rows of its own")
        step = lift(node, value.index() or 0, wanted, inner, model)
        if isinstance(step, Blocked):
            return Blocked(f"inside function {function.name!r}, {step.reason}")
        if step.patches:
            return Blocked(f"node {node.name!r} inside function {function.name!r} fixes the number of rows")
        contracts |= step.contracts
        for position, need in step.rows.items():
            item = node.inputs[position]
            assert item is not None
            pending.append((item, need))
    for value in seen:
        others = [use.node for use in value.uses() if not any(item in seen for item in use.node.outputs)]
        if value not in formals and (others or (value.is_graph_output() and value is not function.outputs[output])):
            return Blocked(f"function {function.name!r} uses all rows of {value.name!r}")
    return Lift(needs, contracts=contracts)


def _operator(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type
