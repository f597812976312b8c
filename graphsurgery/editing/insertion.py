"""Where the next node of an edit goes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

__all__ = ["InsertionPoint"]


class InsertionPoint:
    """A place in a graph, or in a body in the making, behind which nodes are inserted one after the other.

    Args:
        graph: where nodes go while no body is open.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._last: ir.Node | None = None
        self._next: ir.Node | None = None
        self._body: ir.Graph | None = None
        self._prologue_end: ir.Node | None = None
        self._in_prologue = True

    def at_start(self) -> None:
        """Insert what follows before all nodes of the graph, behind what has been put there already."""
        self._last, self._next = self._prologue_end, None
        self._in_prologue = True

    def after(self, value: ir.Value) -> None:
        """Insert what follows right behind the node that makes ``value`` (at the start where none does)."""
        node = value.producer()
        if node is None:
            self.at_start()
            return
        self._last, self._next = node, None
        self._in_prologue = node is self._prologue_end

    def before(self, node: ir.Node) -> None:
        """Insert what follows in front of ``node``, each behind the one before."""
        self._last, self._next, self._in_prologue = None, node, False

    @property
    def place(self) -> ir.Graph:
        """The graph in which nodes are being inserted: what is made in one body cannot be read in another."""
        return self._body if self._body is not None else self.graph

    @contextlib.contextmanager
    def prologue(self) -> Iterator[None]:
        """Insert at the start of the graph within the block, then go on where it was before."""
        with self.aside():
            self._body = None
            self.at_start()
            yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Insert wherever the block says, then go on where it was before."""
        saved = (self._last, self._next, self._in_prologue, self._body)
        yield
        self._last, self._next, self._in_prologue, self._body = saved
        if self._in_prologue:
            # It was at the start: what follows comes behind what was just inserted, and may read it.
            self._last = self._prologue_end

    @contextlib.contextmanager
    def inside(self, body: ir.Graph) -> Iterator[None]:
        """Append to ``body``, a subgraph in the making, within the block."""
        saved = self._body
        self._body = body
        yield
        self._body = saved

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Insert in the graph, where it was, within the block: what several bodies are to read."""
        saved = self._body
        self._body = None
        yield
        self._body = saved

    def insert(self, node: ir.Node) -> None:
        """Put ``node`` there; the next one goes behind it."""
        if self._body is not None:
            self._body.append(node)
            return
        if self._next is not None:
            graph = self._next.graph
            assert graph is not None
            graph.insert_before(self._next, node)
            return
        if self._last is not None:
            graph = self._last.graph
            assert graph is not None
            graph.insert_after(self._last, node)
        else:
            first = next(iter(self.graph), None)
            if first is None:
                self.graph.append(node)
            else:
                self.graph.insert_before(first, node)
        self._last = node
        if self._in_prologue:
            self._prologue_end = node
