"""What an unfolded model is made of: cells, and where the values come from that they read.

A *cell* is one node in one call of the function that holds it: the body of a function that is called 32 times gives 32
cells a node. Values are numbered; the number tells nothing, :attr:`View.sources` tells where a value comes from.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import onnx_ir as ir

__all__ = ["ABSENT", "Body", "Cell", "Dangling", "Formal", "Given", "Made", "Scope", "Source", "Stored", "View"]

ABSENT = -1
"""Number of an optional input that is left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """Output ``index`` of the cell ``cell``."""

    cell: int
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A graph input, which may have a default."""

    value: ir.Value

    @property
    def name(self) -> str:
        """Its name."""
        return self.value.name or ""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """An initializer."""

    value: ir.Value


@dataclasses.dataclass(frozen=True, slots=True)
class Formal:
    """Input ``position`` of the subgraph that is the scope ``scope``."""

    scope: int
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Dangling:
    """A value that is read and that nothing makes."""

    name: str


Source: TypeAlias = Made | Given | Stored | Formal | Dangling


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A subgraph that a cell holds: the attribute (``then_branch``), its scope, and the values that it gives."""

    label: str
    scope: int
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The main graph (number 0) or a subgraph of one cell.

    Attributes:
        label: the attribute that holds it; empty for the main graph.
        depth: how many subgraphs lie around its cells.
        inputs: how many inputs it has.
    """

    label: str
    depth: int
    inputs: int


@dataclasses.dataclass(slots=True)
class Cell:
    """One node in one call.

    Attributes:
        node: the node.
        op: ``domain::operator``, without the domain where it is the default.
        version: the version of the operator set that defined this operator last.
        attributes: without subgraphs, references to attributes of a function resolved.
        inputs: numbers of the values that it reads, ``ABSENT`` for those left out, none of these at the end.
        bodies: its subgraphs, in order of their labels.
        outputs: numbers of the values that it makes, without unnamed ones at the end.
        scope: number of the graph that holds it.
        path: the calls around it, ``decoder_0/norm_1/``.
    """

    node: ir.Node
    op: str
    version: int
    attributes: Mapping[str, ir.Attr]
    inputs: tuple[int, ...]
    bodies: tuple[Body, ...]
    outputs: tuple[int, ...]
    scope: int
    path: str

    @property
    def name(self) -> str:
        """What a person finds it by: the name of the node, else that of what it makes."""
        name = self.node.name or next((value.name for value in self.node.outputs if value.name), None)
        return f"{self.path}{name or self.op}"

    def reads(self) -> Iterator[int]:
        """Numbers of the values that it depends on, those that its subgraphs give included."""
        for number in self.inputs:
            if number != ABSENT:
                yield number
        for body in self.bodies:
            yield from body.outputs


@dataclasses.dataclass
class View:
    """A model as one flat list of cells, calls of local functions seen through.

    Attributes:
        cells: every cell.
        sources: where each value comes from, by number.
        scopes: the main graph and the subgraphs.
        inputs: number of each graph input.
        outputs: name and number of each graph output.
        stored: initializers that constants of function bodies stand for.
        order: numbers of the cells so that each comes after what it reads, the same for any names and any order in
            the file, but for cells on which no output depends, which come last.
        visits: steps that the comparison took on this side; linear in cells and edges.
    """

    cells: list[Cell]
    sources: list[Source]
    scopes: list[Scope]
    inputs: dict[str, int]
    outputs: list[tuple[str, int]]
    stored: list[ir.Value] = dataclasses.field(default_factory=list)
    order: list[int] = dataclasses.field(default_factory=list)
    visits: int = 0

    @functools.cached_property
    def readers(self) -> list[list[tuple[int, int]]]:
        """For each value the cells that read it as an input, and the position among their inputs."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.sources]
        for number, cell in enumerate(self.cells):
            for slot, value in enumerate(cell.inputs):
                if value != ABSENT:
                    found[value].append((number, slot))
        return found

    def maker(self, value: int) -> int | None:
        """The cell that makes ``value``; None where none does."""
        source = self.sources[value] if value != ABSENT else None
        return source.cell if isinstance(source, Made) else None
