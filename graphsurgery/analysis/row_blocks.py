"""Parts of a graph that turn rows into rows as a whole, though their nodes do not.

An expert block sorts its rows, cuts them up by expert and puts them back: no node of it keeps the order of rows, and
yet row t of the result depends on row t of its operands alone, whatever their number. :func:`row_block` checks that
the nodes hold nothing else that counts rows; the climb of rows then takes the block in one step.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis._row_sizes import is_size
from graphsurgery.analysis._row_types import Blocked, RowAxis
from graphsurgery.analysis.dims import Expr, free_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from graphsurgery.analysis._row_types import View
    from graphsurgery.analysis.dims import Dim

__all__ = ["Recount", "RowBlock", "row_block"]


_VIEWS = frozenset({"Reshape", "Identity", "Cast", "Flatten", "Squeeze", "Unsqueeze"})


@dataclasses.dataclass(frozen=True)
class Recount:
    """Input ``index`` of ``node`` tells the number of rows, and must tell the one that is left.

    Attributes:
        node: a node of the block.
        index: which input.
        factor: how often the number of rows it tells.
        flat: whether it counts the rows of all batches (B*S) rather than those of one (S).
        position: the entry of a list that tells it; None where the operand is 0, 1, 2 ... up to that number.
    """

    node: ir.Node
    index: int
    factor: int
    flat: bool
    position: int | None = None


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """Nodes that give row t of ``result`` from row t of ``operands``.

    Attributes:
        result: what they give.
        operands: the values whose rows they read, with where they carry them as ``rows`` of the result does.
        nodes: all of them, in execution order.
        reads: every (node, input) of them that reads an operand.
        recounts: the operands from elsewhere that number rows.
    """

    result: ir.Value
    operands: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]
    reads: tuple[tuple[ir.Node, int, ir.Value], ...]
    recounts: tuple[Recount, ...]

    def layout(self, value: ir.Value, rows: RowAxis, view: View) -> RowAxis | None:
        """Where operand ``value`` carries the rows that the result carries on ``rows``; None where that is not known."""
        mine, its = view.shape(self.result), view.shape(value)
        if mine is None or its is None:
            return None
        if len(its) == len(mine):
            return rows
        if len(its) == 2 and len(mine) == 3 and rows == RowAxis(1):
            return RowAxis(0, flat=True)
        return RowAxis(1) if len(its) == 3 and len(mine) == 2 and rows.flat else None


def row_block(
    result: ir.Value, operands: Sequence[ir.Value], nodes: Iterable[ir.Node], count: Dim, length: Dim, view: View
) -> RowBlock | Blocked:
    """The block of ``nodes`` between ``operands`` and ``result``, or why it cannot compute other than all rows.

    Args:
        result: what the nodes give; row t depends on row t of the operands only.
        operands: what they read of which rows can be left out.
        nodes: all of them, in execution order.
        count: the number of rows, T: B*S, or S of a packed stream.
        length: S.
        view: shapes.
    """
    inside = dict.fromkeys(_with_bodies(nodes))
    if isinstance(length, int):
        return Blocked(f"what makes {result.name!r} computes a fixed number of rows")
    reads: list[tuple[ir.Node, int, ir.Value]] = []
    recounts: list[Recount] = []
    known = dict.fromkeys(operands)
    for node in inside:
        for value in node.outputs:
            if value is not result and value.is_graph_output() and node.graph is result.graph:
                return Blocked(f"{value.name!r} inside the block is an output")
            if value is not result and any(use.node not in inside for use in value.uses()):
                return Blocked(f"{value.name!r} inside the block is read elsewhere")
        for index, item in enumerate(node.inputs):
            # Formal inputs of a body are made in the block too.
            if (
                item is None
                or item.producer() in inside
                or (item.graph is not result.graph and not item.is_initializer())
            ):
                continue
            # So do other views of an operand, and what is asked for its size alone.
            alike = is_size(node) or _is_view(item, operands)
            if item in known or (alike and _carries(item, count, length, view)):
                known.setdefault(item)
                reads.append((node, index, item))
                continue
            found = _counted(node, index, item, count, length, view)
            if isinstance(found, Blocked):
                return found
            recounts += found
    return RowBlock(result, tuple(known), tuple(inside), tuple(reads), tuple(recounts))


def _with_bodies(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """The nodes, and those of the bodies that they hold."""
    for node in nodes:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().all_nodes()


def _carries(item: ir.Value, count: Dim, length: Dim, view: View) -> bool:
    """Whether ``item`` has the rows on its first axis (``[T, ...]``), or behind the batch (``[B, S, ...]``)."""
    shape = view.shape(item)
    if not shape:
        return False
    return shape[0] == count or (
        len(shape) > 2 and shape[1] == length and not free_names(shape[0]) & free_names(length)
    )


def _is_view(item: ir.Value, operands: Sequence[ir.Value]) -> bool:
    """Whether ``item`` is one of ``operands`` in another shape or type."""
    while item not in operands:
        node = item.producer()
        if node is None or node.domain or node.op_type not in _VIEWS or node.inputs[0] is None:
            return False
        item = node.inputs[0]
    return True


def _counted(node: ir.Node, index: int, item: ir.Value, count: Dim, length: Dim, view: View) -> list[Recount] | Blocked:
    """What has to be done about an operand from elsewhere, so that it tells the number of rows that are left."""
    names = free_names(length)
    shape, contents = view.shape(item), view.shape_value(item)
    if shape is not None and contents is not None and len(shape) < 2:
        found = []
        for position, entry in enumerate(contents.items):
            if not free_names(entry) & names:
                continue
            told = _told(entry, count, length)
            if told is None:
                return Blocked(f"entry {position} of {item.name!r}, {entry}, is not a number of rows")
            found.append(Recount(node, index, *told, position))
        return found
    if shape is not None and not any(free_names(size) & names for size in shape):
        return []
    told = None if shape is None or len(shape) != 1 else _told(shape[0], count, length)
    producer = item.producer()
    if told is not None and producer is not None and _from_zero(producer, view):
        return [Recount(node, index, *told)]
    return Blocked(f"{item.name!r} counts the rows of the block and is computed elsewhere")


def _told(size: Dim, count: Dim, length: Dim) -> tuple[int, bool] | None:
    """How often which number of rows ``size`` is, and whether that of all batches."""
    for unit, flat in ((count, True), (length, False)):
        factor = multiple_of(size, unit)
        if factor is not None:
            return factor, flat
    return None


def multiple_of(size: Dim, count: Dim) -> int | None:
    """How often ``count`` goes into ``size``; None where it does not."""
    if not isinstance(size, Expr) or not isinstance(count, Expr) or len(size.terms) != 1 or len(count.terms) != 1:
        return None
    (monomial, coefficient), (unit, one) = size.terms[0], count.terms[0]
    return coefficient // one if monomial == unit and coefficient % one == 0 else None


def _from_zero(node: ir.Node, view: View) -> bool:
    """Whether ``node`` is a Range of 0, 1, 2 and so on."""
    if node.op_type != "Range" or node.domain or len(node.inputs) != 3:
        return False
    numbers = []
    for place in (0, 2):
        value = node.inputs[place]
        contents = view.shape_value(value) if value is not None else None
        numbers.append(contents.single if contents is not None else None)
    return numbers == [0, 1]
