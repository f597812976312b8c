"""Which new names of inputs and outputs cannot be given, and why."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.model_io import reserved_names
from graphsurgery.names import Names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import onnx_ir as ir

__all__ = ["Port", "Wanted", "find_clashes"]


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or an output (``side``) by name."""

    side: str
    name: str


Wanted: TypeAlias = "tuple[tuple[Port, str], ...]"
"""Ports and what each is to be called."""


def find_clashes(model: ir.Model, wanted: Mapping[str, Wanted]) -> dict[str, str]:
    """Groups of renames that cannot be made as a whole, and one clause for each that says why.

    All are made at once, so that names may be exchanged. A group that is refused keeps its old names, which others may
    have wanted. An input and an output of one name are one value only if the graph says so.

    Args:
        model: the model.
        wanted: groups of renames by id.
    """
    ports = _ports(model)
    inner = _inner_names(model, {new for group in wanted.values() for _, new in group})
    remaining = dict(wanted)
    refused: dict[str, str] = {}
    while True:
        clash = _first_clashes(ports, inner, remaining)
        if not clash:
            return refused
        refused |= clash
        remaining = {key: group for key, group in remaining.items() if key not in clash}


def _first_clashes(ports: Mapping[Port, int], inner: Mapping[str, str], wanted: Mapping[str, Wanted]) -> dict[str, str]:
    """One round: all groups that want what they cannot get as things stand."""
    new_names = {port: new for group in wanted.values() for port, new in group}
    # Of each name, the values that would have it: a value that is an input and an output is one.
    holders: dict[str, dict[int, Port]] = {}
    for port, identity in ports.items():
        holders.setdefault(new_names.get(port, port.name), {}).setdefault(identity, port)
    found: dict[str, str] = {}
    for key, group in wanted.items():
        for port, new in group:
            if port.name == new:
                continue
            others = [other for identity, other in holders[new].items() if identity != ports[port]]
            cannot = f"{port.side} {port.name!r} cannot be called {new!r}"
            if new in inner:
                found[key] = f"{cannot}, which is {inner[new]}"
            elif others:
                also = others[0].name != new
                found[key] = (
                    f"{cannot}: {others[0].side} {others[0].name!r} is {'to be called so too' if also else 'called so'}"
                )
    return found


def _ports(model: ir.Model) -> dict[Port, int]:
    """Every input and output, and the value that it is."""
    graph = model.graph
    return {
        Port(side, value.name or ""): id(value)
        for side, values in (("input", graph.inputs), ("output", graph.outputs))
        for value in values
    }


def _inner_names(model: ir.Model, wanted: Collection[str]) -> dict[str, str]:
    """Names of values that are neither input nor output, subgraphs included, and what has them.

    None where nothing is called by one of the names ``wanted``: then they need not be looked for.
    """
    names = Names.of(model)
    if not any(names.has_value(name) for name in wanted):
        return {}
    found = dict.fromkeys(reserved_names(model), "a name that the file gives to a value that does not exist")
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            if not value.name or (graph is model.graph and (value.is_graph_input() or value.is_graph_output())):
                continue
            found[value.name] = "the name of an initializer" if value.is_initializer() else "the name of a value inside"
    return found
