"""Attention: every softmax that turns scores into weights of values, and every operator that is attention as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.bodies import bodies_of
from graphsurgery.patterns.attention.kinds import Origins
from graphsurgery.patterns.attention.mask_kinds import mask_kinds
from graphsurgery.patterns.attention.reading import Reader
from graphsurgery.patterns.attention.sites import AttentionSite, FusedAttention
from graphsurgery.patterns.attention.spelled import is_softmax_by_hand, read_spelled
from graphsurgery.patterns.layer_names import layer_in
from graphsurgery.patterns.matcher import GraphIndex, index_of
from graphsurgery.patterns.site import Refusal

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.shapes import Shapes

__all__ = ["find_attentions"]

_FUSED = {
    ("", "Attention"): "Attention",
    ("com.microsoft", "MultiHeadAttention"): "MultiHeadAttention",
    ("com.microsoft", "GroupQueryAttention"): "GroupQueryAttention",
    ("com.microsoft", "Attention"): "com.microsoft Attention",
    ("com.microsoft", "PagedAttention"): "PagedAttention",
    ("com.microsoft", "SparseAttention"): "SparseAttention",
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): "DecoderMaskedMultiHeadAttention",
}
_MASKS = {"Attention": 3, "MultiHeadAttention": 5, "com.microsoft Attention": 5}


def find_attentions(
    model: ir.Model, shapes: Shapes, index: GraphIndex
) -> list[AttentionSite | FusedAttention | Refusal]:
    """Every attention of the main graph, in graph order, then those of function bodies, each once for all its calls.

    Branches and loop bodies belong to the graph that holds them. What looks like attention and cannot be read is refused.
    """
    found: list[AttentionSite | FusedAttention | Refusal] = []
    for body in bodies_of(model, shapes):
        origins = Origins(body)
        known = index if body.function is None else index_of(model, body.graph)
        anchors = [
            *known.nodes("Softmax"),
            *(node for node in known.nodes("Div") if is_softmax_by_hand(node, body.view)),
        ]
        for domain, operator in _FUSED:
            anchors = [*anchors, *known.nodes(operator, domain=domain)]
        for node in sorted(anchors, key=known.order.__getitem__):
            number = len(found)
            site = _read(node, number, body, origins, known)
            if site is not None:
                found.append(site)
    return found


def _read(
    node: ir.Node, number: int, body: Body, origins: Origins, index: GraphIndex
) -> AttentionSite | FusedAttention | Refusal | None:
    """The attention that ``node`` is, or in which it ends the softmax."""
    if node.op_type not in ("Softmax", "Div"):
        return _fused(node, number, body)
    site = Reader(node, number, body, origins, index).read() if node.op_type == "Softmax" else None
    if site is None or isinstance(site, Refusal):
        return read_spelled(node, number, layer_in(node, body), body) or site
    return site


def _fused(node: ir.Node, number: int, body: Body) -> FusedAttention | None:
    query = node.inputs[0] if node.inputs else None
    if query is None:
        return None
    operator = _FUSED[node.domain, node.op_type]
    slots = {"Attention": (4, 5), "MultiHeadAttention": (6, 7), "GroupQueryAttention": (3, 4)}.get(operator)
    past = None
    if slots is not None and len(node.inputs) > slots[1]:
        key, value = node.inputs[slots[0]], node.inputs[slots[1]]
        past = (key, value) if key is not None and value is not None else None
    window = node.attributes.get("local_window_size")
    sliding = window is not None and window.as_int() > 0
    causal = operator == "GroupQueryAttention" or any(
        (attribute := node.attributes.get(name)) is not None and bool(attribute.as_int())
        for name in ("is_causal", "unidirectional")
    )
    seen = _mask_kinds_of(node, operator, body)
    causal = causal or "causal" in seen
    span = "sliding" if sliding else seen[-1] if seen else "full"
    return FusedAttention(
        id=f"attention:{number}",
        kinds=("attention", "fused", *(("causal",) if causal else ()), span),
        layer=layer_in(node, body),
        node=node,
        operator=operator,
        query=query,
        past=past,
        body=body,
    )


def _mask_kinds_of(node: ir.Node, operator: str, body: Body) -> tuple[str, ...]:
    """What the mask that an operator is given lets a query see."""
    slot = _MASKS.get(operator)
    mask = node.inputs[slot] if slot is not None and len(node.inputs) > slot else None
    shape = body.view.shape(mask) if mask is not None else None
    return mask_kinds([(mask, 1)], shape[-2], shape[-1], body) if mask is not None and shape and len(shape) > 1 else ()
