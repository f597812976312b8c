"""What must hold for a model after every pass.

Checked after each pass in the tests and with ``--check``. A violation is one sentence; an input that already breaks a
rule keeps its violations, so only new ones count against a pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.patterns.matcher import is_sorted, subgraphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim

__all__ = ["violations"]


def violations(model: ir.Model) -> list[str]:
    """Every rule that ``model`` breaks.

    * each graph is in execution order;
    * no two values of nested graphs, and no two nodes of a graph, share a name;
    * everything that is read is made by a node, is an initializer, an input, or a value of an outer graph;
    * no declared shape contradicts what is inferred from the inputs;
    * every domain that is used is imported.
    """
    shapes = Shapes(model)
    found = [*_scope(model.graph, "the main graph")]
    for function in model.functions.values():
        found += _scope(function.graph, f"function {function.domain}::{function.name}")
    found += _domains(model)
    found += _declared(model.graph, shapes)
    return found


def _scope(graph: ir.Graph, where: str) -> Iterator[str]:
    if not is_sorted(graph):
        yield f"the nodes of {where} are not in execution order"
    yield from _names(graph, where, frozenset(), set())


def _names(graph: ir.Graph, where: str, outer: frozenset[str], node_names: set[str]) -> Iterator[str]:
    visible: set[str] = set()
    for source in dict.fromkeys((*graph.inputs, *graph.initializers.values())):
        if source.name in outer:
            yield f"value {source.name!r} of a subgraph of {where} hides one of an outer graph"
        visible.add(source.name or "")
    for node in graph:
        if node.name and node.name in node_names:
            yield f"two nodes of {where} are called {node.name!r}"
        node_names.add(node.name or "")
        yield from _reads(node, where, visible, outer)
        for made in node.outputs:
            if made.name and (made.name in visible or made.name in outer):
                yield f"two values of {where} are called {made.name!r}"
            visible.add(made.name or "")
        for inner in subgraphs(node):
            yield from _names(inner, where, outer | visible, node_names)
    for value in graph.outputs:
        if value.name and value.name not in visible and value.name not in outer:
            yield f"output {value.name!r} of {where} is made by nothing"


def _reads(node: ir.Node, where: str, visible: set[str], outer: frozenset[str]) -> Iterator[str]:
    who = f"node {node.name or node.op_type!r} of {where}"
    for value in node.inputs:
        if value is None or not value.name:
            continue
        producer = value.producer()
        if producer is not None and producer.graph is None:
            yield f"{who} reads {value.name!r} of a removed node"
        elif value.name not in visible and value.name not in outer:
            yield f"{who} reads {value.name!r}, which nothing makes"


def _domains(model: ir.Model) -> Iterator[str]:
    used = {node.domain for node in model.graph.all_nodes()}
    for domain in sorted(used - set(model.opset_imports)):
        yield f"operator domain {domain!r} is used and not imported"
    for function in model.functions.values():
        used = {node.domain for node in function.graph.all_nodes()}
        for domain in sorted(used - set(function.opset_imports)):
            where = f"function {function.domain}::{function.name}"
            yield f"operator domain {domain!r} is used in {where} and not imported there"


def _declared(graph: ir.Graph, shapes: Shapes) -> Iterator[str]:
    values = [value for node in graph.all_nodes() for value in node.outputs]
    for value in values:
        inferred = shapes.shape(value)
        if value.shape is None or inferred is None:
            continue
        if len(value.shape) != len(inferred):
            yield f"value {value.name!r} declares rank {len(value.shape)} and has rank {len(inferred)}"
            continue
        for axis, (declared, actual) in enumerate(zip(value.shape, inferred, strict=True)):
            if _contradicts(declared, actual):
                yield f"value {value.name!r} declares size {declared} on axis {axis} and has size {actual}"


def _contradicts(declared: object, actual: Dim) -> bool:
    if isinstance(actual, int):
        text = declared if isinstance(declared, int) else getattr(declared, "value", None)
        if isinstance(text, str):
            return text.isdigit() and int(text) != actual
        return text is not None and text != actual
    return False
