"""One walk over an IR model that finds its graphs and tensors, and where each is in the serialised protobuf.

onnx-ir writes a graph as its initializers and then its nodes, so that a graph or tensor can be addressed by index: what
must differ from the plain serialisation (the location of moved data) is changed in the protobuf, and the model itself
stays as it is.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphsurgery.errors import InternalError
from graphsurgery.weights.tensors import WeightTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx

__all__ = ["LARGE_TENSOR_BYTES", "GraphSlot", "InlineWeight", "Survey", "TensorSlot", "survey"]

LARGE_TENSOR_BYTES = 1024
"""Inline tensors from this size on count as weights."""

_Locate = Callable[[Any], Any]

_TENSOR, _TENSORS = ir.AttributeType.TENSOR, ir.AttributeType.TENSORS
_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS
_INTERESTING = frozenset({_TENSOR, _TENSORS, _GRAPH, _GRAPHS})


@dataclasses.dataclass(frozen=True)
class GraphSlot:
    """A graph of the model and where its GraphProto is."""

    graph: ir.Graph
    locate: Callable[[onnx.ModelProto], onnx.GraphProto]


@dataclasses.dataclass(frozen=True)
class TensorSlot:
    """An external tensor of the model and where its TensorProto is."""

    tensor: ir.ExternalTensor
    locate: Callable[[onnx.ModelProto], onnx.TensorProto]


@dataclasses.dataclass(frozen=True)
class InlineWeight:
    """An initializer of LARGE_TENSOR_BYTES or more whose bytes are in the protobuf."""

    value: ir.Value
    nbytes: int


@dataclasses.dataclass
class Survey:
    """What the walk found.

    Attributes:
        graphs: the main graph, then subgraphs, in order of serialisation, those of functions last.
        external: external tensors in the same order.
        inline_weights: large inline initializers in the same order.
        inline_bytes: bytes of all large inline tensors, those in attributes included.
        made: initializers that surgery made of others and whose bytes lie nowhere yet.
    """

    graphs: list[GraphSlot] = dataclasses.field(default_factory=list)
    external: list[TensorSlot] = dataclasses.field(default_factory=list)
    inline_weights: list[InlineWeight] = dataclasses.field(default_factory=list)
    inline_bytes: int = 0
    made: list[ir.Value] = dataclasses.field(default_factory=list)


def survey(model: ir.Model) -> Survey:
    """Walk ``model`` once; no tensor is read.

    Raises:
        InternalError: an initializer has no value, so that it could not be written.
    """
    found = Survey()
    _survey_graph(found, model.graph, _root)
    for number, function in enumerate(model.functions.values()):
        locate = _at(_root_functions, number)
        _survey_nodes(found, function, locate)
        valued = (attribute for attribute in function.attributes.values() if attribute.value is not None)
        _survey_attributes(found, valued, _in(locate, "attribute_proto"))
    return found


_root: _Locate = operator.attrgetter("graph")
_root_functions: _Locate = operator.attrgetter("functions")


def _in(locate: _Locate, field: str) -> _Locate:
    return lambda proto: getattr(locate(proto), field)


def _at(locate: _Locate, number: int) -> _Locate:
    return lambda proto: locate(proto)[number]


def _survey_graph(found: Survey, graph: ir.Graph, locate: _Locate) -> None:
    found.graphs.append(GraphSlot(graph, locate))
    initializers = _in(locate, "initializer")
    for number, value in enumerate(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None:
            raise InternalError(f"initializer {value.name!r} has no value: give it one, or make it an input.")
        if isinstance(tensor, ir.ExternalTensor):
            found.external.append(TensorSlot(tensor, _at(initializers, number)))
        else:
            if isinstance(tensor, WeightTensor):
                found.made.append(value)
            nbytes = _inline_bytes(tensor)
            if nbytes >= LARGE_TENSOR_BYTES:
                found.inline_weights.append(InlineWeight(value, nbytes))
                found.inline_bytes += nbytes
    _survey_nodes(found, graph, locate)


def _survey_nodes(found: Survey, nodes: Iterable[ir.Node], locate: _Locate) -> None:
    node_protos = _in(locate, "node")
    for number, node in enumerate(nodes):
        attributes = node.attributes.data.values()
        if attributes and any(attribute.type in _INTERESTING for attribute in attributes):
            _survey_attributes(found, attributes, _in(_at(node_protos, number), "attribute"))


def _survey_attributes(found: Survey, attributes: Iterable[ir.Attr], locate: _Locate) -> None:
    for number, attribute in enumerate(attributes):
        kind = attribute.type
        if kind not in _INTERESTING or attribute.is_ref():
            continue
        here = _at(locate, number)
        if kind == _TENSOR:
            _survey_tensor(found, attribute.value, _in(here, "t"))
        elif kind == _TENSORS:
            for item, tensor in enumerate(attribute.value):
                _survey_tensor(found, tensor, _at(_in(here, "tensors"), item))
        elif kind == _GRAPH:
            _survey_graph(found, attribute.value, _in(here, "g"))
        else:
            for item, graph in enumerate(attribute.value):
                _survey_graph(found, graph, _at(_in(here, "graphs"), item))


def _survey_tensor(found: Survey, tensor: ir.TensorProtocol, locate: _Locate) -> None:
    if isinstance(tensor, ir.ExternalTensor):
        found.external.append(TensorSlot(tensor, locate))
        return
    nbytes = _inline_bytes(tensor)
    if nbytes >= LARGE_TENSOR_BYTES:
        found.inline_bytes += nbytes


def _inline_bytes(tensor: ir.TensorProtocol) -> int:
    """Bytes that ``tensor`` takes in the protobuf, nearly; strings count as nothing, since they are never weights."""
    if tensor.dtype == ir.DataType.STRING:
        return 0
    return tensor.nbytes
