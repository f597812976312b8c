"""What the search for repeated layers knows of each node: what it reads, who reads it, and what it is.

A node that holds subgraphs reads what they capture: each place where an outer value is read counts as one more slot behind
the inputs. Two nodes of one *signature* compute the same function of their slots. Time is linear in nodes and edges; no
weight is read.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.analysis.constants import constant_of
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

__all__ = ["Constant", "Flow", "constant_key", "ordered_subgraphs", "slots_of"]

_GRAPH_TYPES = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})
# Trailing outputs of others are optional: whether they are there tells nothing about what the rest computes.
_VARIADIC = frozenset({"Split", "If", "Loop", "Scan", "SequenceMap"})
_MAX_INTEGERS = 64
_LONG = 256  # bytes of a tensor inside an attribute that are compared by content

Constant: TypeAlias = "tuple[ir.DataType, tuple[int, ...], bytes]"


def slots_of(node: ir.Node) -> list[ir.Value | None]:
    """What ``node`` reads: its inputs, then what its subgraphs capture, once for each place that reads it."""
    if not any(attribute.type in _GRAPH_TYPES for attribute in node.attributes.data.values()):
        return list(node.inputs)
    slots = list(node.inputs)
    for graph in ordered_subgraphs(node):
        slots += _captures(graph, set())
    return slots


def ordered_subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The subgraphs that ``node`` holds, in the order of their attributes' names."""
    for _, attribute in sorted(node.attributes.items()):
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from attribute.as_graphs()


def _captures(graph: ir.Graph, inside: set[ir.Value]) -> Iterator[ir.Value]:
    inside.update(graph.inputs, graph.initializers.values())
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in inside:
                yield value
        for inner in ordered_subgraphs(node):
            yield from _captures(inner, inside)
        inside.update(node.outputs)
    for value in graph.outputs:
        if value not in inside:
            yield value


def constant_key(value: ir.Value) -> Constant | None:
    """The contents of a small constant: a number, or a few integers (axes, shapes); None for weights and the rest."""
    if value.producer() is None:
        tensor = value.const_value
        if tensor is None or tensor.size > _MAX_INTEGERS or value.is_graph_input() or not value.is_initializer():
            return None
    elif not is_op(value.producer(), "Constant"):
        return None
    array = constant_of(value)
    if array is None or array.size > _MAX_INTEGERS or (array.size > 1 and array.dtype.kind not in "iub"):
        return None
    dtype = value.const_value.dtype if value.const_value is not None else ir.DataType.from_numpy(array.dtype)
    return dtype, array.shape, array.tobytes()


class Flow:
    """The nodes of one graph, in execution order, with what they read and who reads them.

    Args:
        graph: a graph in execution order.
        functions: identifiers of the local functions.

    Attributes:
        nodes: its nodes.
        slots: what each node reads.
        users: who reads each value: node and slot.
        order: position of each node.
    """

    def __init__(self, graph: ir.Graph, functions: Iterable[ir.OperatorIdentifier] = ()) -> None:
        self.graph = graph
        self.nodes: list[ir.Node] = list(graph)
        self.slots: dict[ir.Node, list[ir.Value | None]] = {}
        self.users: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
        self.order: dict[ir.Node, int] = {}
        self._functions = frozenset(functions)
        self._numbers: dict[Hashable, int] = {}
        self._signatures: dict[ir.Node, int] = {}
        self._constants: dict[ir.Value, Constant | None] = {}
        self._markers: dict[ir.Value, Hashable] = {}
        for position, node in enumerate(self.nodes):
            self.order[node] = position
            slots = self.slots[node] = slots_of(node)
            for slot, value in enumerate(slots):
                if value is not None:
                    self.users.setdefault(value, []).append((node, slot))

    def intern(self, key: Hashable) -> int:
        """A small integer that stands for ``key``."""
        return self._numbers.setdefault(key, len(self._numbers))

    def constant(self, value: ir.Value) -> Constant | None:
        """See :func:`constant_key`."""
        if value not in self._constants:
            self._constants[value] = constant_key(value)
        return self._constants[value]

    def is_leaf(self, value: ir.Value) -> bool:
        """Whether nothing is computed for ``value``: an input, an initializer or a constant."""
        node = value.producer()
        return node is None or is_op(node, "Constant")

    def marker(self, value: ir.Value) -> Hashable:
        """What two leaves must have in common where two layers read them in one place: the type and sizes of a weight."""
        if value not in self._markers:
            tensor = value.const_value
            shaped = tensor is not None and self.is_leaf(value) and tensor.size > 1 and self.constant(value) is None
            self._markers[value] = (
                (tensor.dtype, tuple(tensor.shape.numpy())) if shaped and tensor is not None else None
            )
        return self._markers[value]

    def signature(self, node: ir.Node) -> int:
        """The number of what ``node`` computes of its slots."""
        known = self._signatures.get(node)
        if known is None:
            known = self._signatures[node] = self.intern(_signature(node, self._functions))
        return known


def _signature(node: ir.Node, functions: frozenset[ir.OperatorIdentifier]) -> Hashable:
    called = node.op_identifier() in functions
    outputs = len(node.outputs) if called or node.op_type in _VARIADIC else None
    inputs = tuple(value is not None for value in node.inputs)
    attributes = tuple((name, _attribute(attribute, functions)) for name, attribute in sorted(node.attributes.items()))
    return (node.domain, node.op_type, node.overload, node.version, inputs, outputs, attributes)


def _attribute(attribute: ir.Attr, functions: frozenset[ir.OperatorIdentifier]) -> Hashable:
    kind, value = attribute.type, attribute.value
    if attribute.is_ref():
        return ("reference", kind, attribute.ref_attr_name)
    if kind == ir.AttributeType.GRAPH:
        return (kind, _body(value, functions))
    if kind == ir.AttributeType.GRAPHS:
        return (kind, tuple(_body(graph, functions) for graph in value))
    if kind == ir.AttributeType.FLOAT:
        return (kind, struct.pack("<d", value))
    if kind == ir.AttributeType.FLOATS:
        return (kind, struct.pack(f"<{len(value)}d", *value))
    if kind in (ir.AttributeType.INT, ir.AttributeType.STRING):
        return (kind, value)
    if kind in (ir.AttributeType.INTS, ir.AttributeType.STRINGS):
        return (kind, tuple(value))
    if kind == ir.AttributeType.TENSOR:
        return (kind, _tensor(value))
    return (kind, id(value))


def _tensor(tensor: ir.TensorProtocol) -> Hashable:
    in_memory = not isinstance(tensor, ir.ExternalTensor | ir.LazyTensor) and tensor.dtype != ir.DataType.STRING
    if in_memory and tensor.nbytes <= _LONG:
        return (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
    return id(tensor)


def _body(graph: ir.Graph, functions: frozenset[ir.OperatorIdentifier]) -> Hashable:
    """The structure of a subgraph, with its values numbered; what it captures are nameless slots."""
    numbers: dict[ir.Value, Hashable] = {}
    return _structure(graph, numbers, functions)


def _structure(
    graph: ir.Graph, numbers: dict[ir.Value, Hashable], functions: frozenset[ir.OperatorIdentifier]
) -> Hashable:
    listed: list[Hashable] = []
    for value in graph.inputs:
        numbers[value] = len(numbers)
    for value in graph.initializers.values():
        if value not in numbers:
            numbers[value] = len(numbers)
            listed.append(("initializer", None if value.const_value is None else _tensor(value.const_value)))
    for node in graph:
        reads = tuple(None if value is None else numbers.get(value, "captured") for value in node.inputs)
        attributes: list[Hashable] = []
        for name, attribute in sorted(node.attributes.items()):
            if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                attributes.append((name, _structure(attribute.as_graph(), numbers, functions)))
            elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
                inner = tuple(_structure(item, numbers, functions) for item in attribute.as_graphs())
                attributes.append((name, inner))
            else:
                attributes.append((name, _attribute(attribute, functions)))
        listed.append(
            (node.domain, node.op_type, node.overload, node.version, reads, len(node.outputs), tuple(attributes))
        )
        for value in node.outputs:
            numbers[value] = len(numbers)
    outputs = tuple(numbers.get(value, "captured") for value in graph.outputs)
    return (len(graph.inputs), tuple(listed), outputs)
