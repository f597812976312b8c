"""Remove what exporters note for debugging: documentation, stack traces, scopes."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import onnx_ir as ir

from graphsurgery.pass_base import Pass
from graphsurgery.patterns.matcher import all_graphs
from graphsurgery.patterns.site import Site
from graphsurgery.rewrite import CHANGED_KEY, PASS_KEY, SITE_KEY
from graphsurgery.site_report import SiteReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphsurgery.site_report import Detail, PassReport

__all__ = ["StripMetadata"]

_Scope = Literal["model", "graphs", "nodes", "values", "tensors"]
_OWN = "graphsurgery."


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Notes(Site):
    """What one kind of object carries: (its metadata, keys that go) and objects whose documentation goes."""

    entries: tuple[tuple[dict[str, str], tuple[str, ...]], ...]
    documented: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StripMetadata(Pass):
    """Remove documentation strings and metadata of graphs, functions, nodes, values and tensors.

    In a stock export they are half of the file without its weights, and hold paths of the machine that made it. Names,
    types and shapes stay, and so does the model's own metadata, which applications read, and what this package records
    in it (contracts, renames, provenance). Recognisers lose the scopes of layers: run it last. No tensor is read; every
    output is bitwise equal.

    Attributes:
        keep: metadata keys that stay, with ``*`` for any text: ``keep=[namespace]``.
        own: remove the names of passes and sites from nodes that this package inserted, too.
        model: remove the metadata and documentation of the model itself too, but for what this package records.
        docs: remove documentation strings.
    """

    name: ClassVar[str] = "strip-metadata"
    summary: ClassVar[str] = "remove documentation and metadata of nodes and values"

    keep: tuple[str, ...] = ()
    own: bool = False
    model: bool = False
    docs: bool = True

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        scopes: dict[_Scope, list[Any]] = {"model": [model] if self.model else []}
        graphs = list(all_graphs(model))
        scopes["graphs"] = list(graphs)
        scopes["nodes"] = [node for graph in graphs for node in graph]
        scopes["values"] = list(dict.fromkeys(value for graph in graphs for value in _values(graph)))
        scopes["tensors"] = [value.const_value for value in scopes["values"] if value.const_value is not None]
        scopes["tensors"] += [tensor for node in scopes["nodes"] for tensor in _attribute_tensors(node)]
        found: list[Site] = []
        for scope, items in scopes.items():
            entries = []
            for item in items:
                keys = tuple(key for key in item.metadata_props if not self._stays(key))
                if keys:
                    entries.append((item.metadata_props, keys))
            documented = [item for item in items if self.docs and item.doc_string]
            if entries or documented:
                site_id = f"metadata:{scope}"
                kinds = ("metadata", scope)
                found.append(_Notes(id=site_id, kinds=kinds, entries=tuple(entries), documented=tuple(documented)))
        return found

    def _stays(self, key: str) -> bool:
        if key in (CHANGED_KEY, PASS_KEY, SITE_KEY):
            return not self.own
        return key.startswith(_OWN) or any(fnmatch.fnmatchcase(key, pattern) for pattern in self.keep)

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:  # noqa: ARG002
        """See :meth:`Pass.rewrite`."""
        for site in sites:
            removed = characters = 0
            for store, keys in site.entries:
                for key in keys:
                    characters += len(key) + len(store.pop(key))
                    removed += 1
            for item in site.documented:
                characters += len(item.doc_string)
                _drop_documentation(item)
            docs = len(site.documented)
            reason = f"{removed} entries and {docs} documentation strings, {characters} characters, were removed"
            detail: dict[str, Detail] = {"entries": removed, "documented": docs, "characters": characters}
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail))
        return frozenset()


def _drop_documentation(item: Any) -> None:
    if isinstance(item, ir.serde.TensorProtoTensor):
        # It is written as the protobuf that it was read from.
        item.raw.ClearField("doc_string")
    else:
        item.doc_string = None


def _attribute_tensors(node: ir.Node) -> Iterator[ir.TensorProtocol]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
            yield attribute.as_tensor()


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs
