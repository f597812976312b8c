"""Attention that is one operator: which of its inputs have a column for each key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.patterns.attention.spelled import SpelledAttention

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.attention.sites import FusedAttention

__all__ = ["fused_operands"]


def fused_operands(site: FusedAttention, shapes: ShapeView) -> list[tuple[int, int]] | str:
    """(input, axis) of keys, values and masks, in this order, or why columns cannot be left out.

    Leaving out the last columns of all of them is exact where a mask, causality from the first key on, or the number of
    valid keys says that no row attends them, and nothing else that the operator returns is read.
    """
    node = site.node
    if site.operator == "Attention":
        return _standard(node, shapes)
    if site.operator == "MultiHeadAttention":
        return _multi_head(node, shapes)
    if site.operator in ("GroupQueryAttention", "PagedAttention", "SparseAttention"):
        return f"node {node.name!r} is {site.operator}, whose kernel reads only the positions that are in use"
    if isinstance(site, SpelledAttention):
        return f"the attention of node {node.name!r} has a spelling of its own, in which its columns are not bounded"
    return f"node {node.name!r} is {site.operator}, whose keys cannot be cut"


def _given(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None


def _past_or_outputs(node: ir.Node, past: int) -> str | None:
    """Why no columns can be left out, whatever masks them: a past that grows, or outputs that have them all."""
    given = _given(node, past)
    if given is not None:
        return (
            f"not applicable: node {node.name!r} joins new keys to its past {given.name!r}, which has no unused slots"
        )
    for value in node.outputs[1:]:
        if value.name and (value.uses() or value.is_graph_output()):
            return f"output {value.name!r} of node {node.name!r}, which has all columns, is read"
    return None


def _columns(
    node: ir.Node, shapes: ShapeView, inputs: tuple[int, int], three: tuple[int, int]
) -> list[tuple[int, int]] | str:
    """Where keys and values, of rank 4 ``[B, G, T, D]`` or 3 ``[B, T, G*D]``, have their columns."""
    found: list[tuple[int, int]] = []
    for position, axis in zip(inputs, three, strict=True):
        value = _given(node, position)
        rank = shapes.rank(value) if value is not None else None
        if value is None or rank not in (3, 4):
            return f"node {node.name!r} takes keys and values in a form that cannot be cut"
        found.append((position, 2 if rank == 4 else axis))
    return found


def _standard(node: ir.Node, shapes: ShapeView) -> list[tuple[int, int]] | str:
    """The operator of opset 23 and later."""
    why = _past_or_outputs(node, past=4)
    if why is not None:
        return why
    found = _columns(node, shapes, (1, 2), (1, 1))
    if isinstance(found, str):
        return found
    mask = _given(node, 3)
    masked = _given(node, 6) is not None or bool(_number(node, "is_causal"))
    if mask is not None:
        shape = shapes.shape(mask)
        if shape is None:
            return f"the shape of mask {mask.name!r} is not known"
        if shape and shape[-1] != 1:
            masked = True
            found.append((3, len(shape) - 1))
    return found if masked else "nothing masks its keys: every slot of the cache is attended"


def _multi_head(node: ir.Node, shapes: ShapeView) -> list[tuple[int, int]] | str:
    """MultiHeadAttention of ONNX Runtime: a padding mask ``[B, T]`` and an additive one ``[.., S, T]``."""
    why = _past_or_outputs(node, past=6)
    if why is not None:
        return why
    if _given(node, 8) is not None or _given(node, 9) is not None:
        return f"node {node.name!r} keeps a past of its own"
    found = _columns(node, shapes, (1, 2), (1, 1))
    if isinstance(found, str):
        return found
    if _number(node, "unidirectional"):
        return f"node {node.name!r} counts its causal mask from the last key, which leaving out keys would move"
    masked = False
    for position in (4, 5):
        mask = _given(node, position)
        shape = shapes.shape(mask) if mask is not None else None
        if mask is None:
            continue
        if shape is None or len(shape) < 2:
            return f"mask {mask.name!r} of node {node.name!r} has no column for each key"
        if shape[-1] != 1:
            masked = True
            found.append((position, len(shape) - 1))
    return found if masked else "nothing masks its keys: every slot of the cache is attended"


def _number(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return attribute.as_int() if attribute is not None else 0
