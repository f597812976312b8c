"""Names for what surgery inserts: telling, and unique over the whole model."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from graphsurgery.model_io import reserved_names
from graphsurgery.patterns.matcher import all_graphs

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx_ir as ir

__all__ = ["Names", "claim"]

_KEY = "graphsurgery.names"


class Names:
    """All names in use in a model: graphs, subgraphs, functions, inputs, initializers, and type information in the file.

    Values and nodes have separate name spaces. ONNX Runtime refuses two equal non-empty node names, and a value of
    a subgraph may not shadow one of an outer graph, so a new name is unique over everything.
    """

    def __init__(self, model: ir.Model) -> None:
        self._values: set[str] = set(reserved_names(model))
        self._nodes: set[str] = set()
        # Thousands of nodes have one hint, and names are never given back: each search goes on where the last one ended.
        self._value_numbers: dict[str, int] = {}
        self._node_numbers: dict[str, int] = {}
        for graph in all_graphs(model):
            nodes = list(graph)
            self._values.update(graph.initializers)
            self._add(self._values, graph.inputs)
            self._add(self._values, itertools.chain.from_iterable([node.outputs for node in nodes]))
            self._add(self._nodes, nodes)

    @staticmethod
    def _add(names: set[str], named: Iterable[ir.Node | ir.Value]) -> None:
        names.update({name for item in named if (name := item.name)})

    @classmethod
    def of(cls, model: ir.Model) -> Names:
        """The names of ``model``, collected once and kept up to date by rewrites."""
        names: Names | None = model.meta.get(_KEY)
        if names is None:
            names = cls(model)
            model.meta[_KEY] = names
        return names

    @staticmethod
    def forget(model: ir.Model) -> None:
        """Drop what was collected: names were changed by something other than a rewrite."""
        model.meta.pop(_KEY, None)

    def value(self, hint: str) -> str:
        """A value name that is not in use: ``hint``, or ``hint_1`` and so on."""
        return claim(self._values, hint, numbers=self._value_numbers)

    def node(self, hint: str) -> str:
        """A node name that is not in use: ``hint``, or ``hint_1`` and so on."""
        return claim(self._nodes, hint, numbers=self._node_numbers)

    def has_value(self, name: str) -> bool:
        """Whether a value is called ``name``."""
        return name in self._values


def claim(taken: set[str], hint: str, *, number: int = 0, numbers: dict[str, int] | None = None) -> str:
    """Add a name to ``taken``: ``hint``, or with a number behind it that is larger than ``number``.

    Args:
        taken: names that are in use.
        hint: what is asked for.
        number: no number up to this one is put behind it.
        numbers: the last number behind each hint, kept by who never gives names back.
    """
    if hint not in taken:
        taken.add(hint)
        return hint
    name = hint
    number = max(number, numbers.get(hint, 0)) if numbers is not None else number
    while name in taken:
        number += 1
        name = f"{hint}_{number}"
    if numbers is not None:
        numbers[hint] = number
    taken.add(name)
    return name
