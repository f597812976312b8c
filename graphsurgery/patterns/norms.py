"""The normalisation that ends at a value: RMSNorm or LayerNorm, decomposed in any spelling, or one operator.

Found by structure: everything between the value and the one place through which all of it is fed (the residual
stream), made of element-wise operators and reductions over the last axis, with at least one reduction or a
normalisation operator inside. Source of the form: Zhang and Sennrich 2019 (RMSNorm), Ba et al. 2016 (LayerNorm).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.slices import Blocked, RowAxis, lift

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["Norm", "norm_above"]

_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "LpNormalization"})
_OPERATORS = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }
)
_ELEMENTWISE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Neg", "Abs", "Clip", "Max"),
        *("Cast", "Identity", "Unsqueeze", "Squeeze"),
    }
)
_MAX_NODES = 40


@dataclasses.dataclass(frozen=True)
class Norm:
    """A normalisation.

    Attributes:
        nodes: the nodes that make it up.
        entries: the values it normalises, ``[..., H]``: one, or two where the operator adds a residual itself.
    """

    nodes: frozenset[ir.Node]
    entries: tuple[ir.Value, ...]


def norm_above(value: ir.Value, rows: RowAxis, view: ShapeView, index: GraphIndex, model: ir.Model) -> Norm | None:
    """The normalisation whose result is ``value``; None where it is something else.

    Args:
        value: ``[..., H]``.
        rows: where it carries the rows; they must stay apart all the way.
        view: shapes.
        index: the order of nodes.
        model: the model.
    """
    open_values: dict[ir.Value, RowAxis] = {value: rows}
    nodes: set[ir.Node] = set()
    best: Norm | None = None
    reduced = False
    while open_values and len(nodes) < _MAX_NODES:
        if len(open_values) == 1 and reduced:
            best = Norm(frozenset(nodes), tuple(open_values))
        # The latest node first: everything that reads its output has then been seen.
        latest = max(open_values, key=lambda item: _position(item, index))
        node = latest.producer()
        if node is None or node not in index.order:
            break
        operator = node.op_type in _OPERATORS
        called = node.op_identifier() in model.functions
        if not (operator or called or node.op_type in _REDUCTIONS or node.op_type in _ELEMENTWISE):
            break
        if node.op_type in _REDUCTIONS and not _over_features(node, view):
            break
        lifted = lift(node, latest.index() or 0, open_values.pop(latest), view, model)
        if isinstance(lifted, Blocked) or lifted.contracts:
            break
        nodes.add(node)
        reduced |= operator or called or node.op_type in _REDUCTIONS
        conflict = False
        for position, need in lifted.rows.items():
            item = node.inputs[position]
            assert item is not None
            conflict |= open_values.setdefault(item, need) != need
        if conflict:
            break
        if operator or called:
            return Norm(frozenset(nodes), tuple(open_values)) if len(open_values) <= 2 else best
    return best


def _over_features(node: ir.Node, view: ShapeView) -> bool:
    """Whether a reduction is over the last axis and no other."""
    source = node.inputs[0]
    before = None if source is None else view.shape(source)
    after = view.shape(node.outputs[0])
    return before is not None and after in ((*before[:-1], 1), before[:-1])


def _position(value: ir.Value, index: GraphIndex) -> int:
    node = value.producer()
    return -1 if node is None else index.order.get(node, -1)
