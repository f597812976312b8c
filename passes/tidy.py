"""Remove what nothing reads and merge constants that are there twice."""

from __future__ import annotations

import collections
import dataclasses
import os
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import onnx_ir as ir

from graphsurgery.analysis.constants import constant_of, small_array
from graphsurgery.analysis.shapes import invalidate
from graphsurgery.editing.dead_nodes import remove_dead
from graphsurgery.model_files.survey import LARGE_TENSOR_BYTES
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.matcher import all_graphs, is_op
from graphsurgery.patterns.site import Site
from graphsurgery.site_report import SiteReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphsurgery.site_report import Detail, PassReport

__all__ = ["Tidy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place(Site):
    """What is to be tidied in one graph.

    Attributes:
        graph: the graph.
        values: values that nothing reads; or that are replaced.
        replacements: what stands in for each of ``values``; empty where nothing reads them.
    """

    graph: ir.Graph
    values: tuple[ir.Value, ...]
    replacements: tuple[ir.Value, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Declared(Site):
    """Values whose declared shapes go."""

    values: tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Functions(Site):
    functions: tuple[ir.Function, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tidy(Pass):
    """Remove what nothing reads, and keep one of equal constants, in every graph, subgraph and function.

    * Nodes and initializers that nothing reads, and functions that nothing calls, go.
    * Of small initializers and Constant nodes with the same element type, shape and bytes the first stays; of external
      tensors, the first that refers to the same bytes (file, offset and length). No data file is read.
    * Identity nodes go on request only: people look for their names.
    * Shapes that are declared for values inside the graph go on request too. ONNX Runtime holds the buffer of a value that
      nothing reads any more for a later one that is declared to be as large: between two layers the buffers of an MLP
      are held through the whole attention. Where the shapes cannot be inferred, as behind an If, it gives them back.

    Graph inputs, also those with a default, all outputs and their names, and imports of operator sets stay; every output
    is bitwise equal.

    Attributes:
        duplicates: merge equal constants.
        identities: let readers of an Identity read what it reads; those that make an output of their graph stay.
        intermediate_shapes: ``drop`` the shapes that are declared for what default operators make inside a graph; element
            types, inputs and outputs stay as they are.
    """

    name: ClassVar[str] = "tidy"
    summary: ClassVar[str] = "remove what nothing reads and merge equal constants"

    duplicates: bool = True
    identities: bool = False
    intermediate_shapes: Literal["keep", "drop"] = "keep"

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        found: list[Site] = []
        seen: collections.Counter[str] = collections.Counter()
        places = {function.graph: f"{function.domain}::{function.name}" for function in model.functions.values()}
        places[model.graph] = "main"
        uncalled = _uncalled(model)
        dropped = {graph for function in uncalled for graph in (function.graph, *function.graph.subgraphs())}
        for graph in all_graphs(model):
            place = places.get(graph) or graph.name or "subgraph"
            seen[place] += 1
            where = f"{place}:{seen[place]}" if seen[place] > 1 else place
            if graph not in dropped:
                found += self._find_in(graph, where, overridable=model.ir_version >= 4)
        if uncalled:
            found.append(_Functions(id="functions:uncalled", kinds=("functions",), functions=tuple(uncalled)))
        return found

    def _find_in(self, graph: ir.Graph, where: str, *, overridable: bool) -> Iterator[Site]:
        nodes = list(graph)
        dead = _dead_nodes(nodes)
        if self.identities:
            passed = [node.outputs[0] for node in nodes if node not in dead and _is_idle(node)]
            if passed:
                # A chain of them reads what stands in front of the first.
                sources = tuple(_source(value) for value in passed)
                yield _Place(
                    id=f"identities:{where}",
                    kinds=("identities",),
                    graph=graph,
                    values=tuple(passed),
                    replacements=sources,
                )
        if self.duplicates:
            pairs = list(_duplicates(graph, nodes, dead, overridable=overridable))
            if pairs:
                yield _Place(
                    id=f"duplicates:{where}",
                    kinds=("duplicates",),
                    graph=graph,
                    values=tuple(value for value, _ in pairs),
                    replacements=tuple(first for _, first in pairs),
                )
        unused = [node.outputs[0] for node in dead if not any(value.uses() for value in node.outputs)]
        unused += [
            value
            for value in graph.initializers.values()
            if not (value.uses() or value.is_graph_output() or value.is_graph_input())
        ]
        if unused:
            yield _Place(id=f"unused:{where}", kinds=("unused",), graph=graph, values=tuple(unused))
        if self.intermediate_shapes == "drop":
            inside = [value for node in nodes if node.domain in ("", "ai.onnx") for value in node.outputs]
            declared = tuple(value for value in inside if value.shape is not None and not value.is_graph_output())
            if declared:
                yield _Declared(id=f"shapes:{where}", kinds=("shapes",), values=declared)

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        for site in sites:
            if isinstance(site, _Functions):
                detail: dict[str, Detail] = {"functions": [f"{item.domain}::{item.name}" for item in site.functions]}
                for function in site.functions:
                    del model.functions[function.identifier()]
                reason = f"{len(site.functions)} functions that nothing calls were removed"
            elif isinstance(site, _Declared):
                detail = {"shapes": len(site.values)}
                for value in site.values:
                    value.shape = None
                reason = f"{len(site.values)} shapes declared for values inside the graph were dropped"
            else:
                reason, detail = _tidy(model, site)
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail))
        invalidate(model)
        return frozenset()


def _tidy(model: ir.Model, site: _Place) -> tuple[str, dict[str, Detail]]:
    for value, replacement in zip(site.values, site.replacements, strict=bool(site.replacements)):
        for use in value.uses():
            use.node.replace_input_with(use.idx, replacement)
    # What a subgraph alone has read may have been an initializer of the main graph.
    graphs = {site.graph, model.graph}
    before = sum(len(graph.initializers) for graph in graphs)
    external = sum(isinstance(value.const_value, ir.ExternalTensor) for value in site.values)
    nodes = remove_dead(site.values)
    initializers = before - sum(len(graph.initializers) for graph in graphs)
    detail: dict[str, Detail] = {"nodes": nodes, "initializers": initializers}
    if site.kinds == ("identities",):
        return f"{nodes} Identity nodes were passed over", detail
    if site.kinds == ("unused",):
        return f"{nodes} nodes and {initializers} initializers that nothing reads were removed", detail
    detail["external"] = external
    return f"{nodes} Constant nodes and {initializers} initializers were merged with equal ones", detail


# ---- what nothing reads -------------------------------------------------------------------------------------------


def _dead_nodes(nodes: Sequence[ir.Node]) -> dict[ir.Node, None]:
    """Those of all ``nodes`` of a graph none of whose outputs anything alive reads, in the order in which they can go."""
    dead: dict[ir.Node, None] = {}
    pending = [node for node in nodes if not _is_read(node)]
    while pending:
        node = pending.pop()
        if node in dead or not _is_dead(node, dead):
            continue
        dead[node] = None
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer.graph is node.graph:
                pending.append(producer)
    return dead


def _is_read(node: ir.Node) -> bool:
    # A plain loop: it runs for every node of every graph.
    for value in node.outputs:  # noqa: SIM110
        if value.uses() or value.is_graph_output():
            return True
    return False


def _is_dead(node: ir.Node, dead: dict[ir.Node, None]) -> bool:
    if not node.outputs:
        return False
    return not any(
        value.is_graph_output() or any(use.node not in dead for use in value.uses()) for value in node.outputs
    )


def _uncalled(model: ir.Model) -> list[ir.Function]:
    """Functions that no node calls that is called itself."""
    if not model.functions:
        return []
    called: set[ir.OperatorIdentifier] = set()
    pending = [model.graph]
    while pending:
        for node in pending.pop().all_nodes():
            key = node.op_identifier()
            if key in model.functions and key not in called:
                called.add(key)
                pending.append(model.functions[key].graph)
    return [function for key, function in model.functions.items() if key not in called]


# ---- what is there twice ------------------------------------------------------------------------------------------


def _duplicates(
    graph: ir.Graph, nodes: Sequence[ir.Node], dead: dict[ir.Node, None], *, overridable: bool
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Constants of ``graph`` and the equal one before each: initializers first, since they are there from the start."""
    first: dict[object, ir.Value] = {}
    for value in _constants(graph, nodes, dead, overridable=overridable):
        key = _contents(value)
        if key is None:
            continue
        kept = first.setdefault(key, value)
        # An output keeps its own name; of an input the caller may change the value.
        if kept is not value and not value.is_graph_output() and not value.is_graph_input():
            yield value, kept


def _constants(
    graph: ir.Graph, nodes: Sequence[ir.Node], dead: dict[ir.Node, None], *, overridable: bool
) -> Iterator[ir.Value]:
    for value in graph.initializers.values():
        if (overridable and value.is_graph_input()) or all(use.node in dead for use in value.uses()):
            continue
        yield value
    for node in nodes:
        if node.op_type == "Constant" and not node.domain and node not in dead:
            yield node.outputs[0]


def _contents(value: ir.Value) -> object | None:
    """What two equal constants have in common; None for what is not compared."""
    tensor = value.const_value if value.is_initializer() else None
    if isinstance(tensor, ir.ExternalTensor):
        place = (os.fspath(tensor.base_dir), os.fspath(tensor.location), tensor.offset or 0, tensor.nbytes)
        return (tensor.dtype, tuple(tensor.shape.numpy()), *place)
    if tensor is not None:
        array = (
            small_array(tensor) if tensor.dtype != ir.DataType.STRING and tensor.nbytes < LARGE_TENSOR_BYTES else None
        )
        dtype = tensor.dtype
    else:
        array = constant_of(value)
        if array is None or array.nbytes >= LARGE_TENSOR_BYTES:
            return None
        dtype = _node_dtype(value) or ir.DataType.from_numpy(array.dtype)
    return None if array is None else (dtype, array.shape, array.tobytes())


def _node_dtype(value: ir.Value) -> ir.DataType | None:
    node = value.producer()
    attribute = node.attributes.get("value") if node is not None else None
    return attribute.as_tensor().dtype if attribute is not None and not attribute.is_ref() else None


# ---- Identity -----------------------------------------------------------------------------------------------------


def _is_idle(node: ir.Node) -> bool:
    """Whether ``node`` hands on a value that nobody outside looks for by the name of its output."""
    return is_op(node, "Identity") and not node.outputs[0].is_graph_output() and node.inputs[0] is not None


def _source(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and _is_idle(node):
        source = node.inputs[0]
        assert source is not None
        value, node = source, source.producer()
    return value
