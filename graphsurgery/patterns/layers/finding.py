"""Repeated layers: decoder, encoder and vision blocks, found without names and proved equal node by node.

:func:`find_layers` looks for the stack over every source of data (token ids, embeddings, pixels), sorts its layers into
kinds, and describes for each kind the function that its layers have in common. Layers that no other is like are
refused with the reason.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.patterns.interface import FLOATS, fed_inputs
from graphsurgery.patterns.kv_cache import find_caches
from graphsurgery.patterns.layer_names import class_of, layer_number, role_of
from graphsurgery.patterns.layers.bodies import Body, describe_body
from graphsurgery.patterns.layers.chains import PRODUCTS, Chain, Segment, find_chain, mixing_nodes
from graphsurgery.patterns.layers.flow import Flow
from graphsurgery.patterns.layers.matching import Layer, Levels, match_layers
from graphsurgery.patterns.layers.unlike import unlike
from graphsurgery.patterns.site import Done, Refusal, Site

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from graphsurgery.analysis.shapes import Shapes

__all__ = ["LayerKind", "find_layers"]

_FEWEST_NODES = 4  # of a layer: a function of fewer is no gain, and repeated calls are functions already
_MOST_IDS = 4
_MOST_DATA = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind(Site):
    """Layers that are one function.

    Attributes:
        name: what the function may be called.
        numbers: the number of each layer.
        body: what they have in common; ``body.instances[i]`` are the nodes of layer ``numbers[i]``.
    """

    name: str
    numbers: tuple[int, ...]
    body: Body
    ends: tuple[ir.Value, ...]
    flow: Flow

    @property
    def layers(self) -> tuple[int, ...]:
        """See :attr:`Site.layers`."""
        return self.numbers

    def only(self, numbers: Collection[int]) -> LayerKind:
        """The same kind with the layers of these numbers alone."""
        kept = [at for at, number in enumerate(self.numbers) if number in numbers]
        body = describe_body(self.flow, [self.body.instances[at] for at in kept], self.ends)
        layers = tuple(self.numbers[at] for at in kept)
        return dataclasses.replace(self, numbers=layers, layer=layers[0], body=body)


def find_layers(model: ir.Model, shapes: Shapes, min_repeats: int = 2) -> list[LayerKind | Refusal | Done]:
    """The kinds of repeated layers of the main graph, in graph order; layers that cannot be extracted are refused.

    Args:
        model: in execution order.
        shapes: of the model.
        min_repeats: how many equal layers make a kind.
    """
    flow = Flow(model.graph, model.functions)
    caches = find_caches(model, shapes)
    states = [value for site in caches for value in (site.input, site.output) if value is not None]
    mixers = mixing_nodes(flow, states)
    chains = _chains(model, flow, states, mixers)
    own = _own_nodes(flow, states, chains)
    found: list[LayerKind | Refusal | Done] = []
    names: collections.Counter[str] = collections.Counter()
    for chain in chains:
        found += _kinds(flow, chain, own, set(states), names, min_repeats, model.functions)
    return found


# ---- where stacks start -------------------------------------------------------------------------------------------


def _chains(model: ir.Model, flow: Flow, states: Collection[ir.Value], mixers: Collection[ir.Node]) -> list[Chain]:
    ids, data = _sources(model, flow, frozenset(states))
    # A decoder's stack is part of what depends on its encoder's tokens, and what depends on rotary positions is part of
    # the stack: the order that leaves whole layers is right.
    orders = [[first, *(value for value in ids if value is not first)] for first in ids] or [[]]
    tried = [_in_order([*order, *data], flow, mixers) for order in orders]
    best = max(tried, key=lambda chains: sum(chain.covered for chain in chains))
    return sorted(best, key=lambda chain: flow.order[chain.segments[0].exit])


def _in_order(sources: Sequence[ir.Value], flow: Flow, mixers: Collection[ir.Node]) -> list[Chain]:
    known: set[ir.Node] = set()
    found: list[Chain] = []
    for source in sources:
        chain = find_chain(flow, source, known, mixers)
        known |= chain.cone.keys()
        if chain.segments:
            found.append(chain)
    return found


def _sources(model: ir.Model, flow: Flow, states: Collection[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
    """Token ids; then float inputs, those that most depends on first."""
    heights = _heights(flow)
    ids: list[ir.Value] = []
    data: list[ir.Value] = []
    for value in fed_inputs(model):
        if value in states:
            continue
        if value.dtype in FLOATS and (value.shape is None or len(value.shape) > 1):
            data.append(value)
        elif value.dtype in (ir.DataType.INT64, ir.DataType.INT32) and _embeds(flow, value):
            ids.append(value)
    for found in (ids, data):
        found.sort(key=lambda value: -heights.get(value, 0))
    return ids[:_MOST_IDS], data[:_MOST_DATA]


def _heights(flow: Flow) -> dict[ir.Value, int]:
    """For each value the number of nodes on the longest path from it."""
    heights: dict[ir.Value, int] = {}
    for node in reversed(flow.nodes):
        own = 1 + max((heights.get(value, 0) for value in node.outputs), default=0)
        for value in flow.slots[node]:
            if value is not None:
                heights[value] = max(heights.get(value, 0), own)
    return heights


_LAYOUT = frozenset({"Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten", "Clip", "Expand", "Slice"})
_LOOKUPS = frozenset({"Gather", "GatherBlockQuantized", "EmbedLayerNormalization"})
_MOST_STEPS = 64


def _embeds(flow: Flow, value: ir.Value) -> bool:
    """Whether ``value`` picks rows of a table: plain, quantised, or inside a called function."""
    pending = [value]
    for _ in range(_MOST_STEPS):
        if not pending:
            return False
        for node, slot in flow.users.get(pending.pop(), ()):
            table = node.inputs[0] if node.inputs else None
            if node.op_type in _LOOKUPS and slot == 1 and table is not None and _is_table(table):
                return True
            if node.op_type == "EmbedLayerNormalization":
                return True
            if node.op_type in _LAYOUT and slot == 0:
                pending.append(node.outputs[0])
    return False


def _is_table(value: ir.Value) -> bool:
    for _ in range(_MOST_STEPS):
        node = value.producer()
        if node is None:
            return value.dtype in FLOATS or value.const_value is not None or value.is_graph_input()
        if node.op_type == "Constant":
            return True
        if not node.inputs or node.inputs[0] is None or node.op_type in ("Shape", "Gather"):
            return False
        value = node.inputs[0]
    return False


def _own_nodes(flow: Flow, states: Iterable[ir.Value], chains: Iterable[Chain]) -> set[ir.Node]:
    """Nodes that may be one layer's own: made of weights, of caches, or of data; not of positions, masks and shapes."""
    found: set[ir.Node] = set().union(*(chain.cone for chain in chains))
    data = set(found)
    allowed = set(states)
    for node in flow.nodes:
        if node in data:
            continue
        mine = True
        for value in flow.slots[node]:
            producer = value.producer() if value is not None else None
            if (
                value is None
                or value in allowed
                or (producer is not None and producer in found and producer not in data)
            ):
                continue
            if producer is None and value.is_initializer():
                continue
            mine = False
            break
        if mine:
            found.add(node)
    return found


# ---- from a chain to kinds ----------------------------------------------------------------------------------------


def _kinds(
    flow: Flow,
    chain: Chain,
    own: set[ir.Node],
    states: Collection[ir.Value],
    names: collections.Counter[str],
    min_repeats: int,
    functions: Collection[tuple[str, str, str]],
) -> list[LayerKind | Refusal | Done]:
    levels = Levels(flow, chain.segments, chain.source)
    own = own - levels.cores(flow, chain.segments)
    groups: dict[object, list[Segment]] = {}
    for segment in chain.segments:
        groups.setdefault(segment.word, []).append(segment)
    numbers = _numbers(flow, levels, chain)
    found: list[LayerKind | Refusal | Done] = []
    for segments in groups.values():
        stacks, reasons = match_layers(flow, levels, segments, own)
        for stack in stacks:
            nodes = stack.layers[0].nodes
            layers = tuple(numbers[layer.segment] for layer in stack.layers)
            keeps = any(_touches(node, states) for node in nodes)
            role = role_of(nodes, keeps_state=keeps)
            kinds = tuple(dict.fromkeys(("layer", role)))
            if len(nodes) == 1 and nodes[0].op_identifier() in functions:
                found.append(_done(nodes[0], layers, kinds))
                continue
            if len(layers) < min_repeats or len(nodes) < _FEWEST_NODES:
                if not any(_multiplies(node, functions) for layer in stack.layers for node in layer.nodes):
                    continue  # steps of positions or of a layout: no layer, so nothing is refused
                segment = stack.layers[0].segment
                if segment not in reasons:
                    cores = {item: levels.core(flow, item) for item in chain.segments}
                    reasons[segment] = unlike(segment, cores, numbers)
                found.append(_refusal(stack.layers, layers, kinds, reasons, min_repeats))
                continue
            name = class_of(nodes) or {"vision": "VisionLayer", "encoder": "EncoderLayer"}.get(role, "DecoderLayer")
            names[name] += 1
            name = f"{name}_{names[name]}" if names[name] > 1 else name
            found.append(_kind(flow, chain.source, stack.layers, layers, kinds, name))
    return sorted(found, key=lambda site: site.layer or 0)


def _multiplies(node: ir.Node, functions: Collection[tuple[str, str, str]]) -> bool:
    return node.op_type in PRODUCTS or node.op_identifier() in functions


def _touches(node: ir.Node, states: Collection[ir.Value]) -> bool:
    return any(value in states for value in (*node.inputs, *node.outputs) if value is not None)


def _numbers(flow: Flow, levels: Levels, chain: Chain) -> dict[Segment, int]:
    """The number of each layer: as its nodes are named where that numbers all layers apart, else by position."""
    named = {segment: layer_number(levels.core(flow, segment)) for segment in chain.segments}
    known = [number for number in named.values() if number is not None]
    if len(known) == len(named) and len(set(known)) == len(known):
        return {segment: number for segment, number in named.items() if number is not None}
    return {segment: position for position, segment in enumerate(chain.segments)}


def _kind(
    flow: Flow, source: ir.Value, stack: Sequence[Layer], numbers: tuple[int, ...], kinds: tuple[str, ...], name: str
) -> LayerKind:
    order = sorted(range(len(stack)), key=lambda at: numbers[at])
    ends = (source, *(value for layer in stack for value in _end_values(layer.segment)))
    body = describe_body(flow, [stack[at].nodes for at in order], ends)
    layers = tuple(numbers[at] for at in order)
    return LayerKind(
        id=f"layers:{name}", kinds=kinds, layer=layers[0], name=name, numbers=layers, body=body, ends=ends, flow=flow
    )


def _end_values(segment: Segment) -> list[ir.Value]:
    return [*(segment.entry.outputs if segment.entry is not None else ()), *segment.exit.outputs]


def _done(call: ir.Node, numbers: tuple[int, ...], kinds: tuple[str, ...]) -> Done:
    listed = ", ".join(str(number) for number in numbers)
    which = f"layer {listed} is a call" if len(numbers) == 1 else f"layers {listed} are calls"
    why = f"{which} of function {call.op_type!r} already"
    return Done(id=f"layer:{'_'.join((*kinds[1:], str(numbers[0])))}", kinds=kinds, layer=numbers[0], reason=why)


def _refusal(
    stack: Sequence[Layer],
    numbers: tuple[int, ...],
    kinds: tuple[str, ...],
    reasons: dict[Segment, str],
    min_repeats: int,
) -> Refusal:
    listed = ", ".join(str(number) for number in numbers)
    which = f"layer {listed} is" if len(numbers) == 1 else f"layers {listed} are"
    if len(stack[0].nodes) < _FEWEST_NODES:
        count = len(stack[0].nodes)
        why = f"{which} {count} node{'s' if count > 1 else ''} only, too few for a function"
    else:
        why = f"{which} like no other" if len(numbers) == 1 else f"{which} alike and no others"
        why += f" (min_repeats={min_repeats})"
        reason = next((reasons[layer.segment] for layer in stack if layer.segment in reasons), "")
        why += f": {reason}" if reason else ""
    return Refusal(id=f"layer:{'_'.join((*kinds[1:], str(numbers[0])))}", kinds=kinds, layer=numbers[0], reason=why)
