"""Computing small integers at the start of the graph, though the exporter computes them later."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.rewrite import Rewrite

__all__ = ["Replayer", "nodes_above"]

_MAX_NODES = 48
_CHEAP = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Min", "Max", "Clip", "Where", "Cast", "Identity", "CumSum"),
        *("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Abs", "Sign"),
        *("Range", "Shape", "Size", "Gather", "Slice", "Squeeze", "Unsqueeze", "Concat", "Reshape", "Expand"),
        *("ReduceMax", "ReduceMin", "ReduceSum", "ConstantOfShape", "Constant", "Transpose"),
    }
)


class Replayer:
    """Copies of what values are computed by, from graph inputs and initializers on, at the start of the graph.

    Args:
        rewrite: where nodes are inserted.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self._made: dict[ir.Value, ir.Value] = {}

    def at_start(self, value: ir.Value) -> ir.Value | None:
        """``value`` as it is known at the start of the graph; None where too much or the model itself is needed."""
        order = nodes_above(value)
        if order is None:
            return None
        with self._rewrite.prologue():
            for node in order:
                output = node.outputs[0]
                if output not in self._made:
                    inputs = [None if item is None else self._made.get(item, item) for item in node.inputs]
                    self._made[output] = self._rewrite.clone(node, inputs, name="written")
        return self._made.get(value, value)


def nodes_above(value: ir.Value) -> list[ir.Node] | None:
    """The nodes that make ``value`` from inputs and initializers, producers first; None where they are many or heavy."""
    order: dict[ir.Node, None] = {}
    pending = [(value, False)]
    while pending:
        current, done = pending.pop()
        node = current.producer()
        if node is None or node in order:
            continue
        if done:
            order[node] = None
            continue
        if node.domain or node.op_type not in _CHEAP or len(node.outputs) != 1 or len(pending) > _MAX_NODES:
            return None
        pending.append((current, True))
        pending += [(item, False) for item in node.inputs if item is not None and item.producer() is not None]
    return list(order) if len(order) <= _MAX_NODES else None
