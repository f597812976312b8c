"""Blocks of which only some rows are read: those rows are chosen before the experts, not behind them.

``prune-last-token`` leaves a Gather of rows behind the last layer's experts, because what is inside an expert block is
not made of rows of tokens. A block as a whole is: row n of its output comes from row n of what it reads.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.shapes import shapes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.sites import ExpertSite
    from graphsurgery.rewrite import Rewrite

__all__ = ["choose_rows", "rows_chosen_by"]


def rows_chosen_by(site: ExpertSite, shapes: ShapeView) -> ir.Node | None:
    """The one reader of the site's output, where it is a Gather of token rows ``[T, H]``; None where all are read."""
    uses = list(site.output.uses())
    if len(uses) != 1 or site.output.is_graph_output() or site.base is not None:
        return None
    node = uses[0].node
    if node.op_type != "Gather" or node.domain or uses[0].idx != 0 or node.graph is not site.interior[-1].graph:
        return None
    axis = node.attributes.get("axis")
    places = node.inputs[1]
    if (axis is not None and axis.as_int() != 0) or places is None or shapes.rank(places) != 1:
        return None
    values = [value for value in (site.tokens, site.indices, site.weights) if value is not None]
    return node if all(shapes.rank(value) == 2 for value in values) else None


def choose_rows(
    model: ir.Model, rewrite: Rewrite, sites: Sequence[ExpertSite], scopes: Sequence[str]
) -> list[ExpertSite]:
    """The sites, each on the rows that are read of it: its output is then that of the Gather behind it."""
    shapes_before = shapes_of(model)
    changed: dict[str, ExpertSite] = {}
    for site, scope in zip(sites, scopes, strict=True):
        node = rows_chosen_by(site, shapes_before)
        if node is None:
            continue
        rewrite.at_site(site.id, scope)
        rewrite.before(node)
        places = node.inputs[1]

        def read(value: ir.Value, name: str, places: ir.Value | None = places) -> ir.Value:
            dtype = shapes_before.dtype(value)
            return rewrite.emit("Gather", [value, places], {"axis": 0}, name=f"read_{name}", dtype=dtype)

        changed[site.id] = dataclasses.replace(
            site,
            output=node.outputs[0],
            tokens=read(site.tokens, "tokens"),
            indices=read(site.indices, "indices"),
            weights=None if site.weights is None else read(site.weights, "weights"),
        )
    if not changed:
        return list(sites)
    rewrite.commit()
    shapes = shapes_of(model)
    result = []
    for site in sites:
        found = changed.get(site.id)
        if found is None:
            result.append(site)
            continue
        count = shapes.dim(found.tokens, 0)
        assert count is not None
        result.append(dataclasses.replace(found, tokens_dim=count))
    return result
