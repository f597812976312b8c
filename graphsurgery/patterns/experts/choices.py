"""Whether a graph can choose experts at all, told from its operators: a dense model is not read any further."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.rewrite import PASS_KEY

if TYPE_CHECKING:
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["may_choose"]

_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_CHOOSING = ("TopK", "Multinomial", "OneHot", "NonZero", "Unique")


def may_choose(graph: ir.Graph, index: GraphIndex) -> bool:
    """Whether anything in ``graph`` may be numbers of chosen experts, ``[T, K]`` or ``[B, S, K]``.

    A choice is made by a TopK or another operator that turns scores into numbers, or by one whose inside is not seen
    (a function, a vendor's operator); or it comes in as integers with a fixed last axis: an input, or a table that maps
    tokens to experts. Linear in nodes; no shape is inferred.

    Args:
        graph: the main graph.
        index: its nodes.
    """
    if any(domain for domain, _ in index.operators()) or index.nodes(*_CHOOSING):
        return True
    # An ArgMax of ours looks for the last token or the columns that a mask leaves. A copy of a router's stands beside
    # the original.
    if any(PASS_KEY not in node.metadata_props for node in index.nodes("ArgMax", "ArgMin")):
        return True
    for node in index.nodes("Cast", "CastLike"):
        to = node.attributes.get("to")
        source = node.inputs[0]
        rounds = source is None or source.dtype is None or source.dtype.is_floating_point()
        if rounds and (to is None or to.as_int() in _INTEGERS):
            return True
    given = [value for value in graph.inputs if value.dtype is None or value.dtype in _INTEGERS]
    if any(value.shape is None or (len(value.shape) > 1 and isinstance(value.shape[-1], int)) for value in given):
        return True
    tables = [node.outputs[0] for node in index.nodes("Constant")] + list(graph.initializers.values())
    return any(_is_table(value) for value in tables)


def _is_table(value: ir.Value) -> bool:
    """Whether ``value`` holds integers along two axes or more."""
    tensor = value.const_value
    dtype = value.dtype if tensor is None else tensor.dtype
    shape = value.shape if tensor is None else tensor.shape
    if dtype is not None and dtype not in _INTEGERS:
        return False
    return dtype is None or shape is None or (len(shape) > 1 and 0 not in shape.numpy())
