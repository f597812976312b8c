"""Proof that layers are the same function: their nodes paired one by one, from what a layer gives back to what it reads.

The *core* of a layer is what depends on its hidden state and leads to the next one. A pattern, the layer with the smallest
core, is laid over every other one, position by position; what another core holds beside it (the rotary table and the mask
that the first layer happens to hold) must not depend on what was paired. Then nodes that serve one layer alone join:
dequantised weights, cross-attention keys of an encoder, what only leads to outputs of the model.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.patterns.layers.growth import Growth

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import onnx_ir as ir

    from graphsurgery.patterns.layers.chains import Segment
    from graphsurgery.patterns.layers.flow import Flow

__all__ = ["Layer", "Levels", "Stack", "match_layers"]

_MOST_PATTERNS = 8
_SPARED = 0.2  # of the nodes of a layer that may be left outside
_FEW = 16  # nodes between a layer and an output that it alone makes


@dataclasses.dataclass
class Layer:
    """One layer: the segment, and its nodes in the order of the pattern's."""

    segment: Segment
    nodes: list[ir.Node]


@dataclasses.dataclass
class Stack:
    """Layers that are the same function; ``layers[i].nodes[k]`` stand for each other, the first is the pattern."""

    layers: list[Layer]


class Levels:
    """How far down a stack each node is: the number of layer ends that it depends on.

    Attributes:
        of_node: the level of each node.
        members: the nodes of each level, in order.
    """

    def __init__(self, flow: Flow, segments: Sequence[Segment], source: ir.Value) -> None:
        ends: dict[ir.Node | None, None] = {}
        for segment in segments:
            ends.setdefault(segment.entry)
            ends.setdefault(segment.exit)
        numbers = {node: number + 1 for number, node in enumerate(ends)}
        self._cores: dict[Segment, list[ir.Node]] = {}
        self.of_node: dict[ir.Node, int] = {}
        self.members: dict[int, list[ir.Node]] = {}
        given: dict[ir.Node, int] = {}
        from_source = numbers.get(None, 0)
        for node in flow.nodes:
            level = 0
            for value in flow.slots[node]:
                producer = value.producer() if value is not None else None
                if producer is not None:
                    level = max(level, given.get(producer, 0))
                elif value is source:
                    level = max(level, from_source)
            self.of_node[node] = level
            given[node] = numbers.get(node, level)
            if level:
                self.members.setdefault(level, []).append(node)

    def core(self, flow: Flow, segment: Segment) -> list[ir.Node]:
        """What depends on the entry of ``segment`` and leads to its exit, in order; found once."""
        known = self._cores.get(segment)
        if known is None:
            known = self._cores[segment] = self._core(flow, segment)
        return known

    def _core(self, flow: Flow, segment: Segment) -> list[ir.Node]:
        level = self.of_node[segment.exit]
        found = {segment.exit}
        pending = [segment.exit]
        while pending:
            for value in flow.slots[pending.pop()]:
                producer = value.producer() if value is not None else None
                if producer is not None and producer not in found and self.of_node[producer] == level:
                    found.add(producer)
                    pending.append(producer)
        return sorted(found, key=flow.order.__getitem__)

    def cores(self, flow: Flow, segments: Sequence[Segment]) -> set[ir.Node]:
        """The cores of all ``segments`` and their entries: what no other layer can take in."""
        found = {segment.entry for segment in segments if segment.entry is not None}
        for segment in segments:
            found.update(self.core(flow, segment))
        return found


def match_layers(
    flow: Flow, levels: Levels, segments: Sequence[Segment], own: Collection[ir.Node]
) -> tuple[list[Stack], dict[Segment, str]]:
    """Sort ``segments`` into stacks of equal layers.

    Args:
        flow: the graph.
        levels: of the whole chain that the segments belong to.
        segments: layers that may be equal.
        own: nodes that may serve one layer alone: made of weights, of caches, or of data rather than of positions.

    Returns:
        The stacks, single layers included, and why a layer is not equal to the most similar other.
    """
    cores = {segment: levels.core(flow, segment) for segment in segments}
    stacks: list[tuple[list[ir.Node], list[tuple[Segment, dict[ir.Node, ir.Node]]]]] = []
    reasons: dict[Segment, str] = {}
    for segment in sorted(segments, key=lambda item: len(cores[item])):
        core = cores[segment]
        for pattern, members in stacks[:_MOST_PATTERNS]:
            paired = _pair(flow, members[0][0], pattern, segment, core)
            if not isinstance(paired, str):
                members.append((segment, paired))
                break
            reasons[segment] = paired
        else:
            stacks.append((core, [(segment, {node: node for node in core})]))
    stacks = [item for stack in stacks for item in _untangled(flow, levels, *stack, reasons)]
    position = {segment: number for number, segment in enumerate(segments)}
    found: list[Stack] = []
    for pattern, members in stacks:
        layers = [Layer(segment, [paired[node] for node in pattern]) for segment, paired in members]
        stack = Stack(layers)
        if len(layers) > 1:
            _LayerGrowth(flow, levels, stack, own).run()
        stack.layers[1:] = sorted(stack.layers[1:], key=lambda layer: position[layer.segment])
        found.append(stack)
    return found, reasons


# ---- pairing ------------------------------------------------------------------------------------------------------


def _called(node: ir.Node) -> str:
    return f"{node.op_type} {node.name or (node.outputs[0].name if node.outputs else '')!r}"


def _where(node: ir.Node, twin: ir.Node) -> str:
    """In which attributes nodes of one operator differ."""
    if node.op_identifier() != twin.op_identifier():
        return ""
    names = sorted({*node.attributes, *twin.attributes})
    unlike = [name for name in names if node.attributes.get(name) != twin.attributes.get(name)]
    return f" in {', '.join(unlike)}" if unlike else ""


def _pair(
    flow: Flow, one: Segment, pattern: Sequence[ir.Node], other: Segment, core: Sequence[ir.Node]
) -> dict[ir.Node, ir.Node] | str:
    """The node of ``core`` for each of ``pattern``, or why there is none."""
    inside, available = set(pattern), set(core)
    paired: dict[ir.Node, ir.Node] = {one.exit: other.exit}
    taken = {other.exit}
    pending = [one.exit]
    outside: list[tuple[ir.Value, ir.Value]] = []
    while pending:
        node = pending.pop()
        twin = paired[node]
        if flow.signature(node) != flow.signature(twin):
            return f"{_called(node)} and {_called(twin)} differ{_where(node, twin)}"
        for a, b in zip(flow.slots[node], flow.slots[twin], strict=True):
            if a is None or b is None:
                if a is not b:
                    return f"{_called(node)} and {_called(twin)} leave out different inputs"
                continue
            producer = a.producer()
            if producer not in inside:
                outside.append((a, b))
                if flow.marker(a) != flow.marker(b):
                    return f"weights {a.name!r} and {b.name!r} have other sizes or types"
                continue
            partner = b.producer()
            if partner not in available or a.index() != b.index():
                return f"{_called(node)} computes {a.name!r} itself, and {_called(twin)} reads {b.name!r} from outside"
            if producer in paired:
                if paired[producer] is not partner:
                    return f"{_called(node)} and {_called(twin)} share other values"
            elif partner in taken:
                return f"{_called(node)} and {_called(twin)} share other values"
            else:
                paired[producer] = partner
                taken.add(partner)
                pending.append(producer)
    for a, b in outside:
        if b.producer() in taken:
            return f"{a.name!r} comes from outside and {b.name!r} does not"
    return paired


def _untangled(
    flow: Flow,
    levels: Levels,
    pattern: list[ir.Node],
    members: list[tuple[Segment, dict[ir.Node, ir.Node]]],
    reasons: dict[Segment, str],
) -> list[tuple[list[ir.Node], list[tuple[Segment, dict[ir.Node, ir.Node]]]]]:
    """Layers without what something else must be computed from before they can go on.

    The first layer may hold what all others read too: a mask made of the shape of its hidden state lies between two of
    its nodes. Where it needs little of a layer (that shape), every layer leaves that little to the graph around it;
    otherwise the layer stays as it is.
    """
    needed: dict[Segment, set[ir.Node]] = {}
    for segment, paired in members:
        found, between = _needed_before(flow, levels, segment, set(paired.values()))
        if found:
            back = {node: one for one, node in paired.items()}
            needed[segment] = {back[node] for node in found}
            reasons[segment] = f"{_called(between)} lies between nodes of the layer and is part of no other"
    if not needed:
        return [(pattern, members)]
    left = set().union(*needed.values())
    if len(members) > 1 and len(left) <= _SPARED * len(pattern):
        for segment in needed:
            reasons.pop(segment)
        return [([node for node in pattern if node not in left], members)]
    whole = [member for member in members if member[0] not in needed]
    alone = [
        ([*paired.values()], [(item, {node: node for node in paired.values()})])
        for item, paired in members
        if item in needed
    ]
    return [*([(pattern, whole)] if whole else []), *alone]


def _needed_before(
    flow: Flow, levels: Levels, segment: Segment, core: Collection[ir.Node]
) -> tuple[set[ir.Node], ir.Node]:
    """The nodes of ``core`` that nodes outside of it need which others of ``core`` need in turn; and one of the latter."""
    members = levels.members.get(levels.of_node[segment.exit], [])
    after: set[ir.Node] = set()
    for node in members:
        if node in core or any(item in after for item in _makers(flow, node)):
            after.add(node)
    before: set[ir.Node] = set()  # what nodes of the core depend on, of what depends on others
    between: list[ir.Node] = []
    for node in reversed(members):
        if node in core or node in before:
            makers = [item for item in _makers(flow, node) if item in after and item not in core]
            before.update(makers)
            between += makers
    needed: set[ir.Node] = set()
    pending = list(between)
    seen = set(between)
    while pending:
        for item in _makers(flow, pending.pop()):
            if item in after and item not in seen:
                seen.add(item)
                pending.append(item)
                if item in core:
                    needed.add(item)
    return needed, between[0] if between else segment.exit


def _makers(flow: Flow, node: ir.Node) -> list[ir.Node]:
    return [maker for value in flow.slots[node] if value is not None and (maker := value.producer()) is not None]


# ---- what serves one layer alone ----------------------------------------------------------------------------------


class _LayerGrowth(Growth):
    """Layers take in what feeds one of them alone, then what one alone leads to outputs of the model."""

    def __init__(self, flow: Flow, levels: Levels, stack: Stack, own: Collection[ir.Node]) -> None:
        self._lists = [layer.nodes for layer in stack.layers]
        super().__init__(flow, self._lists)
        self._levels = levels
        self._ends = [levels.of_node[layer.segment.exit] for layer in stack.layers]
        self._own = own

    def run(self) -> None:
        """Grow as far as it goes, and put the nodes in execution order."""
        self.upwards()
        self._downwards()
        self.sort()

    def may_join(self, node: ir.Node, number: int) -> bool:
        """See :meth:`Growth.may_join`."""
        return node in self._own and self._levels.of_node[node] < self._ends[number]

    def _downwards(self) -> None:
        """Nodes that depend on the layer and lead to outputs of the model alone, such as the rows of a window."""
        after = [self._dependents(number) for number in range(len(self._lists))]
        position = 0
        while position < len(self._lists[0]):
            offers = [self._offers(number, position) for number in range(len(self._lists))]
            for key in offers[0]:
                nodes = [offer.get(key) for offer in offers]
                chosen = [node for node in nodes if node is not None]
                if len(chosen) == len(nodes) and self._reads_alike(chosen, after):
                    self.add(chosen)
            position += 1

    def _dependents(self, number: int) -> set[ir.Node]:
        found: set[ir.Node] = set()
        level = self._ends[number]
        for node in self._levels.members.get(level, ()):
            producers = [value.producer() for value in self.flow.slots[node] if value is not None]
            if node in self.members[number] or any(item in found for item in producers):
                found.add(node)
        return found

    def _offers(self, number: int, position: int) -> dict[tuple[int, int, int], ir.Node]:
        """The users of the node at ``position`` that might join, by output, slot and signature; none of two alike."""
        level = self._ends[number]
        found: dict[tuple[int, int, int], ir.Node] = {}
        double: collections.Counter[tuple[int, int, int]] = collections.Counter()
        for index, value in enumerate(self._lists[number][position].outputs):
            for user, slot in self.flow.users.get(value, ()):
                if user in self.everywhere or self._levels.of_node[user] != level:
                    continue
                if not self._only_leads_out(user):
                    continue
                key = (index, slot, self.flow.signature(user))
                double[key] += 1
                found[key] = user
        return {key: user for key, user in found.items() if double[key] == 1}

    def _only_leads_out(self, node: ir.Node) -> bool:
        pending = [node]
        for _ in range(_FEW):
            if not pending:
                return True
            for value in pending.pop().outputs:
                pending += [user for user, _ in self.flow.users.get(value, ())]
        return not pending

    def _reads_alike(self, nodes: Sequence[ir.Node], after: Sequence[set[ir.Node]]) -> bool:
        shapes = set()
        for number, node in enumerate(nodes):
            if node in self.everywhere:
                return False
            reads: list[object] = []
            for value in self.flow.slots[node]:
                producer = value.producer() if value is not None else None
                if value is None:
                    reads.append(None)
                elif producer in self.positions[number]:
                    reads.append((self.positions[number][producer], value.index()))
                elif producer in after[number]:
                    return False
                else:
                    reads.append(("outside", self.flow.marker(value)))
            shapes.add(tuple(reads))
        return len(shapes) == 1
