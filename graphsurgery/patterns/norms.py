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

_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2"})
_OPERATORS = frozenset(
    {
        "LayerNormalization",
        "LpNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }
)
_CASTS = frozenset({"Cast", "CastLike", "Identity", "Dropout"})
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Neg", "Abs", "Clip", "Max", "Sum"})
# What stands between a normalisation and the head: a head may be flattened or quantised.
_LAYOUT = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "QuantizeLinear", "DequantizeLinear"})
_PASSING = _CASTS | _ELEMENTWISE | _LAYOUT | _REDUCTIONS
_MAX_NODES = 40


@dataclasses.dataclass(frozen=True)
class Norm:
    """A normalisation.

    Attributes:
        nodes: the nodes that make it up, and those between it and the value that was asked for.
        entries: the values it normalises, ``[..., H]``: one, or two where the operator adds a residual itself.
    """

    nodes: frozenset[ir.Node]
    entries: tuple[ir.Value, ...]


def norm_above(value: ir.Value, rows: RowAxis, view: ShapeView, index: GraphIndex, model: ir.Model) -> Norm | None:
    """The normalisation whose result is ``value``, reshaped or cast or not; None where it is something else.

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
    while open_values and len(nodes) < _MAX_NODES:
        if len(open_values) == 1 and _is_more(nodes, best):
            best = Norm(frozenset(nodes), tuple(open_values))
        # The latest node first: everything that reads its output has then been seen.
        latest = max(open_values, key=lambda item: _position(item, index))
        node = latest.producer()
        if node is None or node not in index.order:
            break
        whole = _is_whole(node, latest, model)
        if not whole and not _passes(node, view):
            break
        lifted = lift(node, latest.index() or 0, open_values.pop(latest), view, model)
        if isinstance(lifted, Blocked) or lifted.contracts:
            break
        nodes.add(node)
        needs = [(node.inputs[position], need) for position, need in lifted.rows.items()]
        if any(item is not None and open_values.setdefault(item, need) != need for item, need in needs):
            break
        if whole:
            return Norm(frozenset(nodes), tuple(open_values)) if len(open_values) <= 2 else best
    return best


def _is_whole(node: ir.Node, value: ir.Value, model: ir.Model) -> bool:
    """Whether ``node`` is a normalisation of its own: an operator, or a function."""
    if node.op_identifier() in model.functions:
        return True
    return node.op_type in _OPERATORS and value.index() == 0


def _passes(node: ir.Node, view: ShapeView) -> bool:
    if node.domain or node.op_type not in _PASSING:
        return False
    return node.op_type not in _REDUCTIONS or _over_features(node, view)


def _is_more(nodes: set[ir.Node], best: Norm | None) -> bool:
    """Whether ``nodes`` hold more of a normalisation than ``best``: a reduction, or casts of what it reads."""
    added = nodes if best is None else nodes - best.nodes
    if any(node.op_type in _REDUCTIONS for node in added):
        return True
    return best is not None and bool(added) and all(node.op_type in _CASTS for node in added)


def _over_features(node: ir.Node, view: ShapeView) -> bool:
    """Whether a reduction is over the last axis and no other."""
    source = node.inputs[0]
    before = None if source is None else view.shape(source)
    after = view.shape(node.outputs[0])
    return before is not None and after in ((*before[:-1], 1), before[:-1])


def _position(value: ir.Value, index: GraphIndex) -> int:
    node = value.producer()
    return -1 if node is None else index.order.get(node, -1)
