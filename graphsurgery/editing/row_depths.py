"""How deep fewer rows go: which part of the graph computes only the wanted rows, for several heads at once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, TypeAlias

from graphsurgery.analysis.cones import Cone, Edge, climb, join, outside_readers
from graphsurgery.analysis.deep_cones import deepen
from graphsurgery.analysis.row_blocks import RowBlock, row_block
from graphsurgery.analysis.slices import Blocked, Lift, RowAxis, lift
from graphsurgery.editing.row_edit import unplaced
from graphsurgery.editing.row_selection import frame_of, place
from graphsurgery.patterns.dynamic_products import is_dynamic_product
from graphsurgery.patterns.experts.finding import find_experts
from graphsurgery.patterns.experts.sites import ExpertSite
from graphsurgery.patterns.hidden_output import HiddenOutput
from graphsurgery.patterns.lm_head import LMHead
from graphsurgery.patterns.matcher import index_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.interface import TokenInput

__all__ = ["Depth", "Target", "depths_of"]

Target: TypeAlias = LMHead | HiddenOutput


@dataclasses.dataclass(frozen=True)
class Depth:
    """What computes fewer rows for one site.

    Attributes:
        cone: None where nothing above the output does: rows are then selected from the output itself.
        note: where it stops earlier than was asked for, and why; empty where it does not.
        deeper: whether it goes further than the head.
    """

    cone: Cone | None
    note: str = ""
    deeper: bool = False


def depths_of(
    sites: Sequence[Target],
    depth: Literal["head", "norm", "layer"],
    model: ir.Model,
    shapes: Shapes,
    tokens: TokenInput,
) -> list[Depth]:
    """The cone of each site, at the depth asked for or as deep as it goes.

    Args:
        sites: heads that share no rows with anything that is not pruned.
        depth: in front of the head, of the final normalisation, or through the last layer.
        model: the model.
        shapes: its shapes.
        tokens: where B and S come from.

    Returns:
        One entry a site; their cones can be joined.
    """
    shallow = [Depth(site.cone if isinstance(site, LMHead) else None) for site in sites]
    if depth == "head":
        return shallow
    depths = [_through_norm(site, base, model, shapes, tokens) for site, base in zip(sites, shallow, strict=True)]
    stopped = True
    while stopped:
        # What one head needs whole, another cannot have reduced: it then stops in front of its products.
        whole = join([depth.cone for depth in depths if depth.deeper and depth.cone is not None])
        stopped = False
        for number, (deep, base) in enumerate(zip(depths, shallow, strict=True)):
            if not deep.deeper or deep.cone is None:
                continue
            known = base.cone.values if base.cone is not None else {}
            reason = _needed(whole, [value for value in deep.cone.values if value not in known])
            if reason is not None:
                depths[number] = _stopped(base, reason)
                stopped = True
    return _through_layers(depths, model, shapes, tokens) if depth == "layer" else depths


def _through_layers(depths: list[Depth], model: ir.Model, shapes: Shapes, tokens: TokenInput) -> list[Depth]:
    """The cones, all of them together followed through the last layer; each keeps what it shares with the others."""
    cones = [depth.cone for depth in depths if depth.cone is not None]
    whole = join(cones)
    if not cones or isinstance(whole, Blocked):
        return depths

    deep = _deepened(whole, model, shapes, tokens, merged=True)
    if unplaced(deep, shapes, tokens) is not None:
        # It ends where batch and heads are on one axis, on which rows cannot be selected.
        deep = _deepened(whole, model, shapes, tokens, merged=False)
    if unplaced(deep, shapes, tokens) is not None or len(deep.nodes) == len(whole.nodes):
        reason = unplaced(deep, shapes, tokens) or next(
            iter(deep.stops.values()), "nothing above it is read by it alone"
        )
        return [dataclasses.replace(item, note=item.note or f"; stopped at the norm: {reason}") for item in depths]
    first = next(number for number, item in enumerate(depths) if item.cone is not None)
    note = _where_it_stopped(deep)
    return [
        dataclasses.replace(item, cone=deep if number == first else item.cone, note=item.note + note, deeper=True)
        for number, item in enumerate(depths)
    ]


def _deepened(whole: Cone, model: ir.Model, shapes: Shapes, tokens: TokenInput, *, merged: bool) -> Cone:
    """``whole`` followed through the last layer; with ``merged`` past values that have batch and heads on one axis."""

    def admit(made: list[ir.Value], needs: list[Edge], rows: RowAxis) -> bool:
        reader = place(made[0], rows, shapes, tokens, merged=merged) if made else None
        if reader is None:
            return False
        # One scale for all rows is computed from what such a product reads.
        if any(is_dynamic_product(use.node, model) for value in made for use in value.uses()):
            return False
        return all(
            place(edge.value, edge.rows, shapes, tokens, frame_of(edge, reader, shapes), merged=merged) is not None
            for edge in needs
        )

    order = index_of(model).order
    blocks: dict[ir.Node, RowBlock | Blocked] = {}
    asked: set[ir.Node] = set()
    while True:
        deep = deepen(whole, shapes, model, order, admit, blocks)
        # Blocks are read where the climb comes to them, which is in one layer of many.
        inside = {node for block in deep.blocks for node in block.nodes}
        reached = {*deep.nodes, *(node for value in deep.stops if (node := value.producer()) is not None)}
        reached -= asked | inside
        asked |= reached
        found = _expert_blocks(model, shapes, tokens.length, reached) if reached else {}
        if not found:
            return deep
        blocks |= found


def _where_it_stopped(cone: Cone) -> str:
    """How deep the cone goes, for the report."""
    products = len(cone.contractions)
    blocks = len(cone.blocks)
    ends = list(dict.fromkeys(edge.value.name or "" for edge in cone.frontier))
    listed = ", ".join(repr(name) for name in ends[:4]) + (f" and {len(ends) - 4} more" if len(ends) > 4 else "")
    experts = f" and {blocks} expert block{'s' if blocks > 1 else ''}" if blocks else ""
    return f", through {products} matrix products{experts} up to {listed}"


def _expert_blocks(
    model: ir.Model, shapes: Shapes, length: Dim, ends: set[ir.Node]
) -> dict[ir.Node, RowBlock | Blocked]:
    """The expert blocks that end in ``ends`` as parts that compute rows, by the node that makes their result."""
    found: dict[ir.Node, RowBlock | Blocked] = {}
    for site in find_experts(model, ends):
        if not isinstance(site, ExpertSite) or site.router is not None:
            continue  # of an operator the rows are known without its choice
        node = site.output.producer()
        operands = [value for value in (site.tokens, site.indices, site.weights, site.base) if value is not None]
        if node is not None:
            found[node] = row_block(site.output, operands, site.interior, site.tokens_dim, length, shapes)
    return found


def _stopped(base: Depth, reason: str) -> Depth:
    return Depth(base.cone, f"; stopped at the head: {reason}")


def _through_norm(site: Target, base: Depth, model: ir.Model, shapes: Shapes, tokens: TokenInput) -> Depth:
    """The cone that takes in the final normalisation."""
    if site.norm is None:
        return _stopped(base, _no_norm(base.cone, shapes, model))
    known = base.cone.values if base.cone is not None else {}
    inside = site.norm.nodes

    def into(edge: Edge, _lifted: Lift) -> bool:
        return edge.value.producer() in inside or edge.value in known

    deeper = climb(site.output, site.rows, shapes, model, into)
    if isinstance(deeper, Blocked):
        return _stopped(base, deeper.reason)
    reason = unplaced(deeper, shapes, tokens)
    if reason is None and not deeper.values.keys() - known.keys():
        reason = next(iter(deeper.stops.values()), "its normalisation is not in front of it")
    return _stopped(base, reason) if reason is not None else Depth(deeper, deeper=True)


def _no_norm(cone: Cone | None, shapes: Shapes, model: ir.Model) -> str:
    """Why there is no normalisation to go through: one scale over all rows, or nothing that looks like one."""
    for edge in cone.frontier if cone is not None else ():
        node = edge.value.producer()
        if node is not None and node.op_type.startswith("DynamicQuantize"):
            lifted = lift(node, edge.value.index() or 0, edge.rows, shapes, model)
            if isinstance(lifted, Blocked):
                return lifted.reason
    return "no final normalisation was recognised above it"


def _needed(whole: Cone | Blocked, values: Iterable[ir.Value]) -> str | None:
    """Why ``values`` cannot hold fewer rows."""
    if isinstance(whole, Blocked):
        return whole.reason
    reader = next(iter(outside_readers(whole, values).items()), None)
    return None if reader is None else f"every row of {reader[0].name!r} is needed by {reader[1]}"
