"""Remove what nothing reads."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.matcher import all_graphs
from graphsurgery.patterns.site import Site
from graphsurgery.rewrite import remove_dead
from graphsurgery.site_report import SiteReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.site_report import Detail, PassReport

__all__ = ["Tidy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unused(Site):
    graph: ir.Graph
    values: tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tidy(Pass):
    """Remove nodes that nothing reads and initializers that nothing uses, in every graph, subgraph and function.

    No tensor is read. Graph inputs, also those with a default, and all outputs stay; every output is bitwise equal.
    """

    name: ClassVar[str] = "tidy"
    summary: ClassVar[str] = "remove nodes and initializers that nothing reads"

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        found: list[Site] = []
        seen: collections.Counter[str] = collections.Counter()
        places = {function.graph: f"{function.domain}::{function.name}" for function in model.functions.values()}
        places[model.graph] = "main"
        for graph in all_graphs(model):
            place = places.get(graph) or graph.name or "subgraph"
            seen[place] += 1
            unused = [
                node.outputs[0]
                for node in graph
                if node.outputs and not any(value.uses() or value.is_graph_output() for value in node.outputs)
            ]
            unused += [
                value
                for value in graph.initializers.values()
                if not (value.uses() or value.is_graph_output() or value.is_graph_input())
            ]
            if unused:
                number = f":{seen[place]}" if seen[place] > 1 else ""
                site_id = f"unused:{place}{number}"
                found.append(_Unused(id=site_id, kinds=("unused",), graph=graph, values=tuple(unused)))
        return found

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        for site in sites:
            # What a subgraph alone has read may have been an initializer of the main graph.
            graphs = {site.graph, model.graph}
            before = sum(len(graph.initializers) for graph in graphs)
            nodes = remove_dead(site.values)
            initializers = before - sum(len(graph.initializers) for graph in graphs)
            reason = f"{nodes} nodes and {initializers} initializers that nothing reads were removed"
            detail: dict[str, Detail] = {"nodes": nodes, "initializers": initializers}
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail))
        invalidate(model)
        return frozenset()
