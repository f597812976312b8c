"""One of the two models as regions need it: its nodes in order, what they read, and the shapes of its values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from graphsurgery.analysis.dims import evaluate, parse_dim
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.equivalence.roles import Role
from graphsurgery.model_io import load
from graphsurgery.patterns.matcher import is_sorted
from graphsurgery.registry import make_pass
from graphsurgery.rewrite import PASS_KEY, SITE_KEY
from graphsurgery.weight_spec import read_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from graphsurgery.equivalence.roles import Signature

__all__ = ["CALLED_KEY", "Side", "initializer_tensor", "reads"]

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
_MASKS = frozenset({Role.MASK, Role.MASK_ND, Role.ENCODER_MASK})

CALLED_KEY = "graphsurgery.regions.called"
"""On nodes of a function's body: the pass that made the call; the site is told where that of a made node is."""

_OUTER_KEY = "graphsurgery.regions.outer"

_WEIGHT_ELEMENTS = 512
"""Inline float tensors of more elements make what is computed from them an activation: tables of rotations are smaller."""


class Side:
    """A model whose functions are written out and whose weights are initializers.

    Attributes:
        path: its file.
        model: the model.
        nodes: nodes of the main graph, in order of execution.
        named: those whose names are in the file, where nodes of the other model may have them too.
        inputs: name of each graph input to the name under which it is fed.
    """

    def __init__(self, path: Path, renamed: Mapping[str, str]) -> None:
        """Load it; no weights are read.

        Args:
            path: the file.
            renamed: input to the name under which it is fed, where that is another.

        Raises:
            InputRefusedError: the file is no model.
        """
        self.path = path
        self.model = load(path)
        if read_weights(self.model):
            make_pass("weights-from-inputs")(self.model)
        own = set(self.model.graph)
        if self.model.functions:
            calls = {_origin(node) for node in own if node.op_identifier() in self.model.functions}
            InlinePass()(self.model)
            for node in self.model.graph.all_nodes():
                # What a call says of itself is handed on to all that it stood for: these are not what its pass made.
                if node not in own and _origin(node) in calls:
                    maker = node.metadata_props.pop(PASS_KEY, None)
                    if maker is not None:
                        node.metadata_props[CALLED_KEY] = maker
        if not is_sorted(self.model.graph):
            self.model.graph.sort()
        self.shapes = shapes_of(self.model)
        self.nodes = list(self.model.graph)
        # Names in function bodies are made unique by numbers, which say nothing.
        self.named = frozenset(node for node in self.nodes if node in own)
        self.inputs = {
            value.name or "": renamed.get(value.name or "", value.name or "")
            for value in self.model.graph.inputs
            if not value.is_initializer()
        }
        self._bindings: list[dict[str, int]] = []
        self._sizes: dict[ir.Value, tuple[tuple[int, ...], ...] | None] = {}

    def bind(self, feeds: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """Take the sizes that symbols have in each feed from the shapes of what is fed."""
        self._bindings = [self._bound(shapes) for shapes in feeds]

    def _bound(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        bound: dict[str, int] = {}
        for value in self.model.graph.inputs:
            shape = shapes.get(self.inputs.get(value.name or "", ""))
            if shape is None or value.shape is None or len(value.shape) != len(shape):
                continue
            for dim, size in zip(value.shape, shape, strict=True):
                if isinstance(dim, ir.SymbolicDim) and dim.value:
                    parsed = parse_dim(dim.value)
                    if parsed is not None and str(parsed) == dim.value:
                        bound.setdefault(dim.value, size)
        return bound

    def sizes(self, value: ir.Value) -> tuple[tuple[int, ...], ...] | None:
        """The shape of ``value`` on each feed; None where it is not known for all."""
        if value not in self._sizes:
            self._sizes[value] = self._evaluated(value)
        return self._sizes[value]

    def _evaluated(self, value: ir.Value) -> tuple[tuple[int, ...], ...] | None:
        dims = self.shapes.shape(value)
        if dims is None:
            return None
        found = []
        for bindings in self._bindings:
            sizes = [evaluate(dim, bindings) for dim in dims]
            known = tuple(size for size in sizes if size is not None)
            if len(known) != len(sizes):
                return None
            found.append(known)
        return tuple(found)

    def numbers(self, value: ir.Value) -> tuple[tuple[int, ...], ...] | None:
        """The integers that a small ``value`` holds on each feed; None where they are not known for all."""
        held = self.shapes.shape_value(value)
        if held is None:
            return None
        found = []
        for bindings in self._bindings:
            items = [evaluate(item, bindings) for item in held.items]
            known = tuple(item for item in items if item is not None)
            if len(known) != len(items):
                return None
            found.append(known)
        return tuple(found)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The element type of ``value``."""
        return self.shapes.dtype(value)

    def is_float(self, value: ir.Value) -> bool:
        """Whether ``value`` is known to hold floating-point numbers."""
        return self.dtype(value) in _FLOATS

    def fixed(self) -> frozenset[ir.Value]:
        """Values that no input has a part in: weights, constants, and what is computed from them alone."""
        found = {value for value in self.model.graph.initializers.values() if not value.is_graph_input()}
        for node in self.nodes:
            if all(value in found for value in reads(node)):
                found.update(node.outputs)
        return frozenset(found)

    def activations(self, signature: Signature) -> frozenset[ir.Value]:
        """Values that depend on weights or on float inputs other than masks: masks, positions and shapes do not."""
        masks = {spec.name for spec in signature.inputs if spec.role in _MASKS}
        found: set[ir.Value] = set()
        for value in self.model.graph.inputs:
            if self.is_float(value) and self.inputs.get(value.name or "") not in masks:
                found.add(value)
        for value in self.model.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and (isinstance(tensor, ir.ExternalTensor) or tensor.size > _WEIGHT_ELEMENTS):
                found.add(value)
        for node in self.nodes:
            if node.op_type not in ("Shape", "Size") and any(value in found for value in reads(node)):
                found.update(node.outputs)
        return frozenset(found)


def _origin(node: ir.Node) -> tuple[str | None, str | None]:
    return node.metadata_props.get(PASS_KEY), node.metadata_props.get(SITE_KEY)


def reads(node: ir.Node) -> tuple[ir.Value, ...]:
    """What ``node`` reads, inputs first, then what its subgraphs read of outer graphs; inputs left out are left out."""
    inputs = tuple(value for value in node.inputs if value is not None)
    if not has_bodies(node):
        return inputs
    # The model is ours alone and stays as it is.
    outer = node.meta.get(_OUTER_KEY)
    if outer is None:
        outer = node.meta[_OUTER_KEY] = tuple(dict.fromkeys(_captured(node)))
    return (*inputs, *outer)


def has_bodies(node: ir.Node) -> bool:
    """Whether ``node`` has subgraphs."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attributes.values())


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """The subgraphs of ``node``, in the order of its attributes' names."""
    for _, attribute in sorted(node.attributes.items()):
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    for body in bodies(node):
        own: set[ir.Value] = {*body.inputs, *body.initializers.values()}
        for inner in body:
            own.update(inner.outputs)
        wanted = [value for inner in body for value in (*inner.inputs, *_captured(inner)) if value is not None]
        yield from (value for value in (*wanted, *body.outputs) if value not in own)


def initializer_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer; None for anything else."""
    return value.const_value if value.producer() is None and value.is_initializer() else None


def element_count(tensor: ir.TensorProtocol) -> int:
    """Number of elements."""
    return math.prod(int(size) for size in tensor.shape.numpy())
