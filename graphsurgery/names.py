"""Names for what surgery inserts: telling, and unique over the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.model_io import reserved_names
from graphsurgery.patterns.matcher import all_graphs

if TYPE_CHECKING:
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
        for graph in all_graphs(model):
            self._values.update(value.name for value in graph.inputs if value.name)
            self._values.update(graph.initializers)
            self._nodes.update([node.name for node in graph if node.name])
            self._values.update([value.name for node in graph for value in node.outputs if value.name])

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
        return claim(self._values, hint)

    def node(self, hint: str) -> str:
        """A node name that is not in use: ``hint``, or ``hint_1`` and so on."""
        return claim(self._nodes, hint)

    def has_value(self, name: str) -> bool:
        """Whether a value is called ``name``."""
        return name in self._values


def claim(taken: set[str], hint: str, *, number: int = 0) -> str:
    """Add a name to ``taken``: ``hint``, or with a number behind it that is larger than ``number``."""
    name = hint
    while name in taken:
        number += 1
        name = f"{hint}_{number}"
    taken.add(name)
    return name
