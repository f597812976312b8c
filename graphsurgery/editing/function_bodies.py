"""Making the body of a local function of nodes of a graph, and taking nodes of a body back into a graph.

Bodies hold no weights: what a node reads from outside is a parameter, but for small constants, which become Constant nodes.
A Constant node that stands for an initializer remembers its name, so that inlining gives the initializer back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.function_keys import OWN, SHARED_KEY, STORED_KEY
from graphsurgery.patterns.layer_names import inner_name
from graphsurgery.patterns.layers.bodies import Fixed, Inner, Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from graphsurgery.names import Names
    from graphsurgery.patterns.layers.bodies import Body, ConstantColumn

__all__ = ["build_function", "clone_node"]

_NUMBER = re.compile(r"(?<=layers[./]|blocks[./])\d+(?![0-9])")


def build_function(body: Body, domain: str, name: str, names: Names) -> ir.Function:
    """The function of ``body``, named after its first instance; it imports nothing yet."""
    local: dict[str, int] = {}
    pattern = body.instances[0]
    formals = [_formal(column, local) for column in body.parameters]
    constants = [_constant(column, local, names.node(f"{name}/constant")) for column in body.constants]
    nodes: list[ir.Node] = list(constants)
    made: list[ir.Node] = []
    for position, node in enumerate(pattern):
        slots: list[ir.Value | None] = []
        for ref in body.slots[position]:
            if isinstance(ref, Inner):
                slots.append(made[ref.position].outputs[ref.index])
            elif isinstance(ref, Parameter):
                slots.append(formals[ref.number])
            else:
                slots.append(constants[ref.number].outputs[0] if isinstance(ref, Fixed) else None)
        widest = max((instance[position] for instance in body.instances), key=lambda item: len(item.outputs))
        copy = clone_node(
            node,
            slots,
            len(widest.outputs),
            lambda text: _claim(inner_name(text), local),
            lambda text: names.node(f"{name}/{inner_name(text)}"),
        )
        for index, value in enumerate(copy.outputs):
            twins = [item[position].outputs[index] for item in body.instances if index < len(item[position].outputs)]
            _describe(value, twins, local)
        for key, text in node.metadata_props.items():
            copy.metadata_props[key] = _NUMBER.sub(OWN, text) if key == "namespace" else text
        made.append(copy)
        nodes.append(copy)
    outputs = [made[ref.position].outputs[ref.index] for ref in body.outputs]
    graph = ir.Graph(formals, outputs, nodes=nodes, name=name)
    return ir.Function(domain, name, "", graph=graph, attributes={})


def _claim(hint: str, local: dict[str, int]) -> str:
    """A name that is not in ``local``: the names of a body, each with the last number that was put behind it."""
    name = first = hint or "value"
    number = local.get(first, 0)
    while name in local:
        number += 1
        name = f"{hint}_{number}"
    if name is not first:
        local[first] = number
    local[name] = 0
    return name


def _formal(column: Sequence[ir.Value], local: dict[str, int]) -> ir.Value:
    first = column[0]
    origin = first.metadata_props.get("pkg.onnxscript.optimizer.folded_from", "")
    found = re.search(r"'([^']+)'", origin)
    value = ir.Value(name=_claim(inner_name(found[1] if found else first.name or "input"), local))
    _describe(value, column, local)
    return value


def _describe(value: ir.Value, twins: Sequence[ir.Value], local: dict[str, int]) -> None:
    """Type and shape of ``value`` as far as all that it stands for have them in common."""
    if not value.name:
        named = next((twin.name for twin in twins if twin.name), "")
        if named:
            value.name = _claim(inner_name(named), local)
    types = {twin.type for twin in twins}
    if len(types) == 1:
        value.type = twins[0].type
    shapes = {None if twin.shape is None else tuple(str(size) for size in twin.shape) for twin in twins}
    if len(shapes) == 1 and twins[0].shape is not None:
        value.shape = twins[0].shape.copy()


def _constant(column: ConstantColumn, local: dict[str, int], node_name: str) -> ir.Node:
    first = column.values[0]
    producer = first.producer()
    if producer is not None:
        attributes = list(producer.attributes.values())
    else:
        assert first.const_value is not None
        attributes = [ir.AttrTensor("value", first.const_value)]
    node = ir.Node("", "Constant", [], attributes, num_outputs=1, name=node_name)
    value = node.outputs[0]
    value.name = _claim(inner_name(first.name or "constant"), local)
    _describe(value, column.values, local)
    notes = {} if producer is None else producer.metadata_props
    if STORED_KEY in notes or SHARED_KEY in notes:
        # It is a constant of a body itself.
        node.metadata_props.update({key: notes[key] for key in (STORED_KEY, SHARED_KEY) if key in notes})
        return node
    shared = len(set(column.values)) == 1
    if producer is None:
        node.metadata_props[STORED_KEY] = (first.name or "") if shared else OWN
    elif shared:
        node.metadata_props[SHARED_KEY] = first.name or ""
    return node


# ---- clones -------------------------------------------------------------------------------------------------------


def clone_node(
    node: ir.Node,
    slots: Sequence[ir.Value | None],
    outputs: int,
    value_name: Callable[[str], str],
    node_name: Callable[[str], str],
    given: Mapping[str, ir.Attr] | None = None,
) -> ir.Node:
    """A node like ``node`` that reads ``slots``: its inputs, then what its subgraphs capture, use by use.

    Args:
        node: what is copied, with its subgraphs.
        slots: as :func:`graphsurgery.patterns.layers.flow.slots_of` lists them.
        outputs: how many outputs the copy has.
        value_name: makes the name of a value of that of the original.
        node_name: the same for nodes.
        given: attributes of the call that the copy is made for: references to them are resolved. None keeps references.
    """
    inputs, captured = slots[: len(node.inputs)], iter(slots[len(node.inputs) :])
    clone = _Clone(captured, value_name, node_name, given)
    attributes = clone.attributes(node)
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        attributes,
        overload=node.overload,
        num_outputs=outputs,
        version=node.version,
        name=node_name(node.name or node.op_type),
        doc_string=node.doc_string,
    )
    for value, original in zip(copy.outputs, node.outputs, strict=False):
        value.name = value_name(original.name) if original.name else ""
    return copy


class _Clone:
    """The copies of the subgraphs of one node."""

    def __init__(
        self,
        captured: Iterator[ir.Value | None],
        value_name: Callable[[str], str],
        node_name: Callable[[str], str],
        given: Mapping[str, ir.Attr] | None,
    ) -> None:
        self._captured = captured
        self._value_name = value_name
        self._node_name = node_name
        self._given = given
        self._inside: dict[ir.Value, ir.Value] = {}

    def attributes(self, node: ir.Node) -> list[ir.Attr]:
        """The attributes of the copy of ``node``."""
        found: dict[str, ir.Attr] = {}
        # Captures are listed in the order of names.
        for name, attribute in sorted(node.attributes.items()):
            if attribute.is_ref():
                resolved = self._resolved(attribute)
                if resolved is not None:
                    found[name] = resolved
            elif attribute.type == ir.AttributeType.GRAPH:
                found[name] = ir.AttrGraph(name, self._graph(attribute.as_graph()))
            elif attribute.type == ir.AttributeType.GRAPHS:
                found[name] = ir.AttrGraphs(name, [self._graph(item) for item in attribute.as_graphs()])
            else:
                found[name] = attribute
        return [found[name] for name in node.attributes if name in found]

    def _resolved(self, attribute: ir.Attr) -> ir.Attr | None:
        if self._given is None:
            return attribute
        value = self._given.get(attribute.ref_attr_name or "")
        return None if value is None else ir.Attr(attribute.name, value.type, value.value)

    def _graph(self, graph: ir.Graph) -> ir.Graph:
        formals = [self._value(value) for value in graph.inputs]
        stored = [self._inside.get(value) or self._value(value) for value in graph.initializers.values()]
        nodes = [self._node(node) for node in graph]
        outputs = [self._known(value) for value in graph.outputs]
        made = ir.Graph(
            formals,
            [value for value in outputs if value is not None],
            nodes=nodes,
            initializers=stored,
            name=graph.name,
            doc_string=graph.doc_string,
        )
        made.metadata_props.update(graph.metadata_props)
        return made

    def _node(self, node: ir.Node) -> ir.Node:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [self._known(value) for value in node.inputs],
            self.attributes(node),
            overload=node.overload,
            num_outputs=len(node.outputs),
            version=node.version,
            # onnx-ir names what has no name, without a look at the graphs around.
            name=self._node_name(node.name or node.op_type),
            doc_string=node.doc_string,
        )
        copy.metadata_props.update(node.metadata_props)
        for value, original in zip(copy.outputs, node.outputs, strict=True):
            self._copy(value, original)
        return copy

    def _known(self, value: ir.Value | None) -> ir.Value | None:
        if value is None:
            return None
        return self._inside[value] if value in self._inside else next(self._captured)

    def _value(self, value: ir.Value) -> ir.Value:
        copy = ir.Value(const_value=value.const_value)
        self._copy(copy, value)
        return copy

    def _copy(self, copy: ir.Value, value: ir.Value) -> None:
        self._inside[value] = copy
        copy.name = self._value_name(value.name) if value.name else ""
        copy.type = value.type
        copy.shape = value.shape.copy() if value.shape is not None else None
        copy.metadata_props.update(value.metadata_props)
