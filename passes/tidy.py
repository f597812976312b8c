"""Remove what nothing reads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.site import Site
from graphsurgery.rewrite import remove_dead
from graphsurgery.site_report import PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

__all__ = ["Tidy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unused(Site):
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
        for graph in model.graphs():
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
                where = "main" if graph is model.graph else graph.name or "inner"
                found.append(_Unused(id=f"unused:{where}:{len(found)}", kinds=("unused",), values=tuple(unused)))
        return found

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        for site in sites:
            removed = remove_dead(site.values)
            reason = f"{removed} nodes and what only they used were removed"
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, {"nodes": removed}))
        invalidate(model)
        return frozenset()
