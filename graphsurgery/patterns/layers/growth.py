"""Growing equal groups of nodes upwards: what feeds one group alone joins it, at the same places in all groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.patterns.layers.flow import Flow

__all__ = ["Growth"]


class Growth:
    """Groups of nodes that stand for each other position by position, and grow together.

    A node joins when everything that reads it is in its group, so that a group stays one call: what leaves it leaves by
    the nodes that it began with.

    Args:
        flow: the graph.
        groups: equally long lists of nodes; they are extended in place.
    """

    def __init__(self, flow: Flow, groups: Sequence[list[ir.Node]]) -> None:
        self.flow = flow
        self.groups = groups
        self.members = [set(nodes) for nodes in groups]
        self.positions = [{node: at for at, node in enumerate(nodes)} for nodes in groups]
        self.everywhere: set[ir.Node] = set().union(*self.members)

    def may_join(self, node: ir.Node, number: int) -> bool:  # noqa: ARG002
        """Whether ``node`` may join group ``number``, as far as it is not a question of who reads it."""
        return True

    def upwards(self) -> None:
        """Take in what feeds one group alone, as long as there is something."""
        grown = -1
        # A node may have waited for another reader to join.
        while grown != len(self.groups[0]):
            grown = len(self.groups[0])
            position = 0
            while position < len(self.groups[0]):
                self._from(position)
                position += 1

    def sort(self) -> None:
        """Put all groups in the execution order of the first."""
        order = sorted(range(len(self.groups[0])), key=lambda at: self.flow.order[self.groups[0][at]])
        for nodes in self.groups:
            nodes[:] = [nodes[at] for at in order]

    def add(self, nodes: Sequence[ir.Node]) -> None:
        """One more node for each group."""
        for number, node in enumerate(nodes):
            self.positions[number][node] = len(self.groups[number])
            self.groups[number].append(node)
            self.members[number].add(node)
            self.everywhere.add(node)

    def _from(self, position: int) -> None:
        for slots in zip(*(self.flow.slots[nodes[position]] for nodes in self.groups), strict=True):
            first = slots[0]
            producer = first.producer() if first is not None else None
            if producer is None or producer in self.everywhere or is_op(producer, "Constant"):
                continue
            values = [value for value in slots if value is not None]
            producers = [node for value in values if (node := value.producer()) is not None]
            alike = len({value.index() for value in values}) == 1
            if alike and len(set(producers)) == len(self.groups) and self._fit(producers):
                self.add(producers)

    def _fit(self, nodes: Sequence[ir.Node]) -> bool:
        if len({self.flow.signature(node) for node in nodes}) > 1:
            return False
        return (
            all(self._joins(node, number) for number, node in enumerate(nodes))
            and self._read_alike(nodes)
            and self._weights_alike(nodes)
        )

    def _joins(self, node: ir.Node, number: int) -> bool:
        if node in self.everywhere or is_op(node, "Constant") or not self.may_join(node, number):
            return False
        members = self.members[number]
        return all(user in members for value in node.outputs for user, _ in self.flow.users.get(value, ()))

    def _read_alike(self, nodes: Sequence[ir.Node]) -> bool:
        """Whether the groups read the outputs of ``nodes`` at the same places."""
        places = set()
        for number, node in enumerate(nodes):
            positions = self.positions[number]
            places.add(
                frozenset(
                    (index, positions[user], slot)
                    for index, value in enumerate(node.outputs)
                    for user, slot in self.flow.users.get(value, ())
                )
            )
        return len(places) == 1

    def _weights_alike(self, nodes: Sequence[ir.Node]) -> bool:
        for slots in zip(*(self.flow.slots[node] for node in nodes), strict=True):
            if len({None if value is None else self.flow.marker(value) for value in slots}) > 1:
                return False
        return True
