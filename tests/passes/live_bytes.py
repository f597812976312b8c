"""Bytes of the tensors that are alive at a time, counted from their shapes: what a runtime that frees early must hold."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from graphsurgery.analysis.shapes import Shapes

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["peak_bytes"]

# They give out what they read.
_VIEWS = frozenset({"Reshape", "Identity", "Unsqueeze", "Squeeze"})


def peak_bytes(model: ir.Model, scope: str) -> int:
    """The most bytes that the values made under ``scope`` take at one time, in the order of the main graph.

    Args:
        model: a model whose sizes are all fixed.
        scope: in the names of the nodes that count.
    """
    shapes = Shapes(model)
    nodes = [node for node in model.graph if scope in (node.name or "")]
    root: dict[ir.Value, ir.Value] = {}
    last: dict[ir.Value, int] = {}
    for place, node in enumerate(nodes):
        for value in node.inputs:
            if value is not None:
                last[root.get(value, value)] = place
        source = node.inputs[0] if node.inputs and node.op_type in _VIEWS else None
        for value in node.outputs:
            root[value] = root.get(source, source) if source is not None else value
            last.setdefault(root[value], place)
    alive: dict[ir.Value, int] = {}
    peak = 0
    for place, node in enumerate(nodes):
        for value in node.outputs:
            if root[value] is value:
                alive[value] = _bytes(value, shapes)
        peak = max(peak, sum(alive.values()))
        alive = {value: size for value, size in alive.items() if last[value] > place}
    return peak


def _bytes(value: ir.Value, shapes: Shapes) -> int:
    sizes = shapes.shape(value)
    dtype = shapes.dtype(value)
    assert sizes is not None, value.name
    assert dtype is not None, value.name
    return int(prod(int(size) if isinstance(size, int) else 1 for size in sizes) * dtype.itemsize)
