"""What computes a mask, cut out of the graph: from its inputs and from sizes, without weights and without the layers.

Sizes are known from the shapes of the graph, so that a length that is read off a hidden state needs no hidden state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from graphsurgery.analysis.constants import constant_of
from graphsurgery.analysis.dims import evaluate
from graphsurgery.patterns.matcher import subgraphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graphsurgery.analysis.shapes import Shapes

__all__ = ["MaskCone", "UnclearMaskError"]

_MAX_NODES = 4000
_MAX_INLINE_BYTES = 64 * 2**20
_IN_MEMORY = (ir.Tensor, ir.TensorProtoTensor, ir.PackedTensor)


class UnclearMaskError(Exception):
    """Why a mask cannot be computed, as a clause."""


class MaskCone:
    """The nodes above one value.

    Attributes:
        inputs: names of the graph inputs whose contents the value depends on, in graph order.
    """

    def __init__(self, model: ir.Model, value: ir.Value, shapes: Shapes, sizes: Mapping[str, int]) -> None:
        """Climb from ``value``.

        Args:
            model: its model.
            value: the mask.
            shapes: of the model.
            sizes: numbers for the names of sizes.

        Raises:
            UnclearMaskError: it depends on weights, or on more than a mask should.
        """
        self._model = model
        self._value = value
        self._shapes = shapes
        self._sizes = sizes
        self._constants: dict[str, np.ndarray[Any, Any]] = {}
        found = self._climb()
        order = {node: number for number, node in enumerate(model.graph)}
        self._nodes = sorted(found, key=order.__getitem__)
        self.inputs = tuple(item.name or "" for item in model.graph.inputs if item.name in self._fed)

    def _climb(self) -> set[ir.Node]:
        self._fed: set[str] = set()
        nodes: set[ir.Node] = set()
        pending, seen = [self._value], set[ir.Value]()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            known = self._known(value)
            if known is not None:
                self._constants[value.name or ""] = known
                continue
            node = value.producer()
            if node is None:
                self._fed.add(value.name or "")
                continue
            if node.graph is not self._model.graph:
                raise UnclearMaskError(f"node {node.name!r} ({node.op_type}) is inside a branch or loop")
            nodes.add(node)
            if len(nodes) > _MAX_NODES:
                raise UnclearMaskError(f"more than {_MAX_NODES} nodes are behind {self._value.name!r}")
            pending += [item for item in node.inputs if item is not None]
            pending += [item for inner in subgraphs(node) for item in _from_outside(inner)]
        return nodes

    def _known(self, value: ir.Value) -> np.ndarray[Any, Any] | None:
        """Its contents where they are constants or sizes; None where it is computed or fed."""
        constant = constant_of(value)
        if constant is not None:
            return constant
        symbolic = self._shapes.shape_value(value)
        dtype = self._shapes.dtype(value)
        if symbolic is not None and dtype is not None:
            items = [evaluate(item, self._sizes) for item in symbolic.items]
            if None not in items:
                return np.asarray(items, dtype=dtype.numpy()).reshape(symbolic.shape)
        if value.producer() is not None or (value.is_graph_input() and not value.is_initializer()):
            return None
        tensor = value.const_value
        if not isinstance(tensor, _IN_MEMORY) or tensor.nbytes > _MAX_INLINE_BYTES:
            raise UnclearMaskError(f"it depends on weight {value.name!r}")
        return tensor.numpy()

    def model_proto(self) -> onnx.ModelProto:
        """The cone as a model of its own, with the mask as its only output."""
        model = self._model
        inputs = [ir.serde.serialize_value(item) for item in model.graph.inputs if item.name in self.inputs]
        output = onnx.ValueInfoProto(name=self._value.name or "")
        graph = onnx.helper.make_graph(
            [ir.serde.serialize_node(node) for node in self._nodes],
            "mask",
            inputs,
            [output],
            [onnx.numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in self._constants.items()],
        )
        imports = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
        functions = [ir.serde.serialize_function(function) for function in model.functions.values()]
        return onnx.helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=model.ir_version)


def _from_outside(graph: ir.Graph) -> Iterator[ir.Value]:
    """Values of outer graphs that ``graph`` reads; those of graphs within it too."""
    inside = {*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)}
    for node in graph:
        read = [item for item in node.inputs if item is not None]
        read += [item for inner in subgraphs(node) for item in _from_outside(inner)]
        yield from (item for item in read if item not in inside)
    yield from (item for item in graph.outputs if item not in inside)
