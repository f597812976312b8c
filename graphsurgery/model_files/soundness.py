"""What must hold of a parsed model before anything walks it: producers in some order, calls that end, text that is text.

Every later walk follows producers and calls without looking back, which would never end on a cycle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import onnx_ir as ir

from graphsurgery.analysis._order import is_sorted, reads_from
from graphsurgery.errors import InputRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    import onnx

__all__ = ["refuse_endless_calls", "refuse_unsound"]

_Item = TypeVar("_Item")
_GRAPH_TYPES = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})
_TEXT = frozenset({str, type(None)})
_REMEDY = "the file is damaged: export it again"


def refuse_unsound(model: ir.Model, path: Path) -> None:
    """Check ``model``; linear in nodes.

    Args:
        model: as it was read.
        path: its file, for the message.

    Raises:
        InputRefusedError: values depend on themselves, a function calls itself, nodes of a body or function are not in
            execution order, or a name is not valid UTF-8.
    """
    _refuse_other_text(model, path)
    calls: dict[ir.OperatorIdentifier, list[ir.OperatorIdentifier]] = {}
    for identifier, function in model.functions.items():
        _refuse_cycles(function, path)
        calls[identifier] = [
            called for node in function.all_nodes() if (called := node.op_identifier()) in model.functions
        ]
    _refuse_recursion(calls, path)
    in_order = is_sorted(model.graph)
    if not in_order:
        _refuse_cycles(model.graph, path)
    _refuse_disorder(model, calls, in_order, path)


def refuse_endless_calls(proto: onnx.ModelProto, path: Path) -> None:
    """The same for the functions of a model that is read as a protobuf: ONNX Runtime would inline them without end.

    Raises:
        InputRefusedError: a function calls itself.
    """
    if not proto.functions:
        return
    defined = {(function.domain, function.name, function.overload) for function in proto.functions}
    calls = {
        (function.domain, function.name, function.overload): [
            called
            for node in _nodes(function.node)
            if (called := (node.domain, node.op_type, node.overload)) in defined
        ]
        for function in proto.functions
    }
    _refuse_recursion(calls, path)


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)


# ---- cycles ---------------------------------------------------------------------------------------------------------------


def _refuse_cycles(graph: ir.Graph | ir.Function, path: Path) -> None:
    # A graph is nearly always sorted, and then has no cycle: one look at each input.
    if isinstance(graph, ir.Function) and is_sorted(graph):
        return
    for level in (graph, *graph.subgraphs()):
        node = _on_cycle(level)
        if node is not None:
            what = f"node {node.name!r} ({node.op_type}) depends on its own results"
            raise InputRefusedError(f"{path}: {what}; {_REMEDY}.")


def _on_cycle(graph: ir.Graph | ir.Function) -> ir.Node | None:
    """A node of ``graph`` itself that reads, in a body of its own perhaps, what depends on it; None where there is none."""
    nodes = dict.fromkeys(graph)
    return _led_back_to(nodes, lambda node: (other for other in reads_from(node) if other in nodes))


def _refuse_disorder(
    model: ir.Model, calls: Mapping[ir.OperatorIdentifier, list[ir.OperatorIdentifier]], in_order: bool, path: Path
) -> None:
    """The nodes of the main graph may be in any order; those of bodies and of functions that are called may not."""
    called = dict.fromkeys(node.op_identifier() for node in model.graph.all_nodes()) if calls else {}
    pending = [item for item in called if item in calls]
    reached = dict.fromkeys(pending)
    while pending:
        more = [item for item in calls[pending.pop()] if item not in reached]
        reached.update(dict.fromkeys(more))
        pending += more
    for identifier in reached:
        where = f"of function {identifier[0]}::{identifier[1]}"
        _refuse_late(model.functions[identifier].graph, set(), None, where, path)
    if not in_order:
        _refuse_late(model.graph, set(), model.graph, "of the model", path)


def _refuse_late(graph: ir.Graph, made: set[ir.Node], free: ir.Graph | None, where: str, path: Path) -> None:
    """Refuse a node that reads what only a later node makes, unless that is of graph ``free``."""
    for node in graph:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if value is not None and producer is not None and producer not in made and producer.graph is not free:
                what = f"node {node.name!r} ({node.op_type}) {where} reads {value.name!r} before"
                raise InputRefusedError(f"{path}: {what} node {producer.name!r} makes it; sort its nodes.")
        for attribute in node.attributes.data.values():
            if attribute.type in _GRAPH_TYPES and not attribute.is_ref():
                bodies = attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else [attribute.as_graph()]
                for body in bodies:
                    _refuse_late(body, made, free, f"in a body {where}", path)
        made.add(node)


def _refuse_recursion(calls: Mapping[ir.OperatorIdentifier, list[ir.OperatorIdentifier]], path: Path) -> None:
    called = _led_back_to(calls, lambda function: iter(calls[function]))
    if called is not None:
        raise InputRefusedError(f"{path}: function {called[0]}::{called[1]} calls itself; {_REMEDY}.")


def _led_back_to(items: Iterable[_Item], following: Callable[[_Item], Iterator[_Item]]) -> _Item | None:
    """The first of ``items`` from which ``following`` leads back to it; each is followed once, without recursion."""
    done: set[_Item] = set()
    for first in items:
        if first in done:
            continue
        stack = [(first, following(first))]
        opened = {first}
        while stack:
            item, rest = stack[-1]
            other = next(rest, None)
            if other is None:
                stack.pop()
                opened.discard(item)
                done.add(item)
            elif other in opened:
                return other
            elif other not in done:
                stack.append((other, following(other)))
                opened.add(other)
    return None


# ---- text -----------------------------------------------------------------------------------------------------------------


def _refuse_other_text(model: ir.Model, path: Path) -> None:
    """Protobuf hands out text that is not UTF-8 as bytes, which no later step expects."""
    texts: list[object] = [model.producer_name, model.producer_version, model.domain, model.doc_string]
    texts += [*model.opset_imports, *model.metadata_props, *model.metadata_props.values()]
    _add_texts(model.graph, texts)
    for function in model.functions.values():
        texts += [function.domain, function.overload, *function.opset_imports]
        _add_texts(function, texts)
    # Of all texts of a large model at once: a look at each would take as long as the other checks together.
    if set(map(type, texts)) <= _TEXT:
        return
    text = next(item for item in texts if type(item) not in _TEXT)
    raise InputRefusedError(f"{path}: the name {text!r} is not valid UTF-8; {_REMEDY}.")


def _add_texts(graph: ir.Graph | ir.Function, texts: list[object]) -> None:
    """All names that are made in ``graph`` and its bodies, of axes too; what is read is the name of something made."""
    nodes = list(graph)
    values = [*graph.inputs, *graph.outputs, *(value for node in nodes for value in node.outputs)]
    if isinstance(graph, ir.Graph):
        values += graph.initializers.values()
    # Many values share the shape that the file declares for them.
    shapes = {id(shape): shape for value in values if (shape := value.shape) is not None}.values()
    texts.append(graph.name)
    texts += [value.name for value in values]
    texts += [size.value for shape in shapes for size in shape.dims if not isinstance(size, int)]
    for node in nodes:
        texts += (node.name, node.op_type, node.domain)
        attributes = node.attributes.data
        if attributes:
            texts += attributes
            for attribute in attributes.values():
                if attribute.type in _GRAPH_TYPES and not attribute.is_ref():
                    several = attribute.type == ir.AttributeType.GRAPHS
                    for body in attribute.as_graphs() if several else [attribute.as_graph()]:
                        _add_texts(body, texts)
