"""Attributes that nodes of a function body take from its calls, where all calls give the same."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis._order import subgraphs_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["as_given", "differing", "first_reference"]

_Identifier = tuple[str, str, str]


@contextlib.contextmanager
def as_given(model: ir.Model) -> Iterator[None]:
    """Within, references to attributes of calls are what all calls give; what is untouched refers to them again after.

    A node that is copied within keeps what was given. References that calls give different values for, and those of
    functions that nothing calls, stay.
    """
    resolved = _resolve(model) if model.functions else []
    try:
        yield
    finally:
        for node, graph, reference, literal in resolved:
            if node.graph is graph and node.attributes.get(reference.name) is literal:
                node.attributes[reference.name] = reference


def first_reference(graph: ir.Graph) -> tuple[ir.Node, ir.Attr] | None:
    """A node below ``graph`` that takes an attribute from a call, and that attribute; None where none does."""
    for node in _nodes(graph):
        for attribute in node.attributes.values():
            if attribute.is_ref():
                return node, attribute
    return None


def differing(model: ir.Model) -> str | None:
    """The functions of which calls want different things, in a sentence; None where there is none. Within as_given only."""
    called = {node.op_identifier() for graph in _graphs(model) for node in _nodes(graph)}
    found = [
        (function, *reference)
        for identifier, function in model.functions.items()
        if identifier in called and (reference := first_reference(function.graph)) is not None
    ]
    if not found:
        return None
    function, node, attribute = found[0]
    more = f" (and {len(found) - 1} more functions)" if len(found) > 1 else ""
    name = node.name or node.outputs[0].name
    return (
        f"What {node.op_type} {name!r} of function {function.name!r} does is not known, nor what follows from it{more}: "
        f"its calls give attribute {attribute.name!r} different values."
    )


def _resolve(model: ir.Model) -> list[tuple[ir.Node, ir.Graph | None, ir.Attr, ir.Attr]]:
    calls: dict[_Identifier, list[ir.Node]] = {}
    for graph in _graphs(model):
        for node in _nodes(graph):
            if node.op_identifier() in model.functions:
                calls.setdefault(node.op_identifier(), []).append(node)
    done: list[tuple[ir.Node, ir.Graph | None, ir.Attr, ir.Attr]] = []
    # A function may hand on what it is given: as many rounds as calls are deep.
    while True:
        count = len(done)
        for identifier, function in model.functions.items():
            if calls.get(identifier):
                done += _resolve_body(function, calls[identifier])
        if len(done) == count:
            return done


def _resolve_body(
    function: ir.Function, calls: list[ir.Node]
) -> list[tuple[ir.Node, ir.Graph | None, ir.Attr, ir.Attr]]:
    done = []
    for node in _nodes(function.graph):
        for name, attribute in list(node.attributes.items()):
            literal = _agreed(function, calls, attribute) if attribute.is_ref() else None
            if literal is not None:
                node.attributes[name] = literal
                done.append((node, node.graph, attribute, literal))
    return done


def _agreed(function: ir.Function, calls: list[ir.Node], reference: ir.Attr) -> ir.Attr | None:
    """What all calls give for ``reference``; None where they differ, or one gives nothing."""
    name = reference.ref_attr_name or ""
    default = function.attributes.get(name)
    given = [call.attributes.get(name, default) for call in calls]
    first = given[0]
    if first is None or first.value is None or first.type != reference.type:
        return None
    for other in given:
        if other is None or other.is_ref() or other.type != first.type or not _same(other.value, first.value):
            return None
    return ir.Attr(reference.name, first.type, first.value)


def _same(left: object, right: object) -> bool:
    if left is right:
        return True
    if isinstance(left, ir.TensorProtocol) and isinstance(right, ir.TensorProtocol):
        alike = left.dtype == right.dtype and list(left.shape) == list(right.shape)
        return alike and not isinstance(left, ir.ExternalTensor) and left.tobytes() == right.tobytes()
    return type(left) is type(right) and not isinstance(left, ir.Graph) and left == right


def _graphs(model: ir.Model) -> list[ir.Graph]:
    return [model.graph, *(function.graph for function in model.functions.values())]


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph:
        yield node
        for inner in subgraphs_of(node):
            yield from _nodes(inner)
