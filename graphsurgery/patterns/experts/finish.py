"""An expert block made a site: what was found is one set of tokens, choices and weights, and nothing else reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import product
from graphsurgery.patterns.experts.index_numbers import keeps_no_axis
from graphsurgery.patterns.experts.sites import ExpertSite
from graphsurgery.patterns.experts.terms import Step, UnreadableError, body_of
from graphsurgery.patterns.layer_names import layer_of
from graphsurgery.patterns.matcher import readers

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.rows import Found
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["exclusive", "finish"]


def finish(
    output: ir.Value,
    term: Step,
    found: Found,
    form: str,
    shapes: ShapeView,
    index: GraphIndex,
    *,
    weights_by_expert: bool = False,
    base: ir.Value | None = None,
) -> ExpertSite:
    """The site of a block whose sum is ``output``.

    Raises:
        UnreadableError: what was found does not make one.
    """
    root = _only(found.roots, "its rows are picked by different choices of experts")
    weights = _only(found.weights, "its rows meet different weights") if found.weights else None
    views = found.tokens[_only(found.tokens, "its rows start from different values")]
    rank = shapes.rank(output)
    tokens = views.get(rank or 0)
    if tokens is None:
        raise UnreadableError(f"its tokens are nowhere of the rank of its output {output.name!r}")
    if len(found.experts) != 1 or root not in found.experts:
        raise UnreadableError("nothing says how many experts there are")
    chosen, hidden = shapes.shape(root), shapes.dim(tokens, -1)
    if chosen is not None and keeps_no_axis(root):
        chosen = (*chosen, 1)
    if chosen is None or not isinstance(chosen[-1], int) or not isinstance(hidden, int):
        raise UnreadableError(f"the sizes of {root.name!r} and {tokens.name!r} are not known")
    if shapes.dim(output, -1) != hidden:
        raise UnreadableError(f"its output {output.name!r} is not as wide as its tokens {tokens.name!r}")
    last = output.producer()
    assert last is not None
    interior = exclusive(last, [value for value in (tokens, root, weights, base) if value is not None])
    _check_readers(found.nodes, interior, last)
    return ExpertSite(
        id="",
        kinds=("experts", form),
        layer=layer_of(last),
        form=form,
        tokens=tokens,
        indices=root,
        weights=weights,
        output=output,
        body=body_of(term),
        experts=found.experts[root],
        top_k=chosen[-1],
        tokens_dim=product(chosen[:-1]),
        hidden=hidden,
        interior=tuple(sorted(interior, key=index.order.__getitem__)),
        weights_by_expert=weights_by_expert,
        base=base,
    )


def _only(values: Iterable[ir.Value], otherwise: str) -> ir.Value:
    listed = list(values)
    if len(listed) != 1:
        names = " and ".join(repr(value.name) for value in listed) or "none is known"
        raise UnreadableError(f"{otherwise} ({names})")
    return listed[0]


def _check_readers(nodes: Iterable[ir.Node], interior: dict[ir.Node, None], last: ir.Node) -> None:
    """Nothing but the block reads what its experts compute."""
    for node in nodes:
        for value in node.outputs:
            if value.is_graph_output() and node is not last:
                raise UnreadableError(f"its value {value.name!r} is an output of the model")
    inside = {*interior, *nodes}
    for node in nodes:
        if node in interior:
            continue
        for value in node.outputs:
            for reader in readers(value):
                if reader not in inside:
                    where = f"{reader.op_type} {reader.name or reader.outputs[0].name!r}"
                    raise UnreadableError(f"its value {value.name!r} is read elsewhere, by {where}")
    for node in nodes:
        if node not in interior:
            raise UnreadableError(f"its value {node.outputs[0].name!r} is read elsewhere")


def exclusive(last: ir.Node, boundary: Iterable[ir.Value]) -> dict[ir.Node, None]:
    """``last`` and the nodes above it, up to ``boundary``, that nothing else reads."""
    edge = set(boundary)
    inside: dict[ir.Node, None] = {last: None}
    unread: dict[ir.Node, int] = {}
    pending = [last]
    while pending:
        node = pending.pop()
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if value is None or producer is None or value in edge or producer in inside:
                continue
            if producer not in unread:
                # Whoever makes an edge stays: it is read by what replaces the block.
                reads = sum(len(item.uses()) + item.is_graph_output() for item in producer.outputs)
                unread[producer] = reads + sum(item in edge for item in producer.outputs)
            unread[producer] -= 1
            if unread[producer] == 0:
                inside[producer] = None
                pending.append(producer)
    return inside
