"""What repeats inside a layer: experts that are joined by a Concat or a Sum, or that add to one sum in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.patterns.layers.bodies import Body, describe_body
from graphsurgery.patterns.layers.flow import Flow
from graphsurgery.patterns.layers.growth import Growth
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    import onnx_ir as ir

__all__ = ["find_inner_repeats"]

_JOINING = ("Concat", "Sum", "Max", "Min", "Mean", "SequenceConstruct")
_FEWEST = 3
_MANY = 8  # nodes that are worth a function even where none of them is a product
_PRODUCTS = ("MatMul", "Gemm", "Conv", "MatMulNBits", "MatMulInteger", "QLinearMatMul", "Einsum")


def find_inner_repeats(
    graph: ir.Graph, functions: Iterable[ir.OperatorIdentifier], min_repeats: int, *, nested: bool
) -> list[Body]:
    """Repeated groups of nodes of ``graph`` that share no node, in graph order.

    Args:
        graph: the main graph or the body of a function.
        functions: identifiers of the local functions.
        min_repeats: how many equal groups make a function.
        nested: ``graph`` is the body of a function.
    """
    called = frozenset(functions)
    flow = Flow(graph, called)
    trees = _Trees(flow)
    taken: set[ir.Node] = set()
    found: list[Body] = []
    for anchors, through in _anchors(flow):
        groups: dict[Hashable, list[ir.Node]] = {}
        for node in anchors:
            if node not in taken and node.op_identifier() not in called:
                groups.setdefault(trees.of(node, through), []).append(node)
        for nodes in groups.values():
            if len(nodes) < min_repeats:
                continue
            grown = _InnerGrowth(flow, [[node] for node in nodes], called)
            grown.upwards()
            grown.sort()
            if grown.everywhere & taken or not _is_worth(grown.groups[0]):
                continue
            taken |= grown.everywhere
            found.append(describe_body(flow, grown.groups, nested=nested))
    return found


class _InnerGrowth(Growth):
    """Calls of functions stay outside: a layer is not part of what feeds something else."""

    def __init__(self, flow: Flow, groups: Sequence[list[ir.Node]], called: frozenset[ir.OperatorIdentifier]) -> None:
        super().__init__(flow, groups)
        self._called = called

    def may_join(self, node: ir.Node, number: int) -> bool:  # noqa: ARG002
        """See :meth:`Growth.may_join`."""
        return node.op_identifier() not in self._called


def _is_worth(nodes: list[ir.Node]) -> bool:
    return len(nodes) >= _FEWEST and (len(nodes) >= _MANY or any(node.op_type in _PRODUCTS for node in nodes))


def _anchors(flow: Flow) -> Iterator[tuple[list[ir.Node], int | None]]:
    """Nodes that groups may end in, with the slot by which they hang together where they form a chain."""
    following: dict[tuple[ir.Node, int], ir.Node] = {}
    has_before: set[tuple[ir.Node, int]] = set()
    for node in flow.nodes:
        if is_op(node, *_JOINING):
            makers = [value.producer() for value in node.inputs if value is not None]
            yield list(dict.fromkeys(maker for maker in makers if maker is not None)), None
        for slot, value in enumerate(flow.slots[node][:2]):
            before = value.producer() if value is not None else None
            if (
                before is not None
                and flow.signature(before) == flow.signature(node)
                and (before, slot) not in following
            ):
                following[before, slot] = node
                has_before.add((node, slot))
    for node, slot in list(following):
        if (node, slot) in has_before:
            continue
        chain = [node]
        while (chain[-1], slot) in following:
            chain.append(following[chain[-1], slot])
        yield chain, slot


class _Trees:
    """A number for what feeds a node alone: equal for nodes that may be the ends of equal groups."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._known: dict[ir.Node, int] = {}
        last: dict[ir.Node, set[ir.Node]] = {}
        for value, users in flow.users.items():
            maker = value.producer()
            if maker is not None:
                last.setdefault(maker, set()).update(user for user, _ in users)
        self._alone = {maker for maker, users in last.items() if len(users) == 1}
        for node in flow.nodes:
            self._known[node] = self._number(node, None)

    def of(self, node: ir.Node, through: int | None) -> int:
        """The number of ``node``, slot ``through`` left out."""
        return self._known[node] if through is None else self._number(node, through)

    def _number(self, node: ir.Node, through: int | None) -> int:
        slots: list[Hashable] = []
        for slot, value in enumerate(self._flow.slots[node]):
            maker = value.producer() if value is not None else None
            if maker in self._alone and slot != through and not is_op(maker, "Constant"):
                assert maker is not None
                assert value is not None
                slots.append((self._known[maker], value.index()))
            else:
                slots.append(None if value is None or slot == through else self._flow.marker(value))
        return self._flow.intern(("tree", self._flow.signature(node), tuple(slots)))
