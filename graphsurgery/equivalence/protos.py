"""Model files as protobufs: read without weights, walked through functions and subgraphs, their data files looked at.

The verifier looks at the very bytes that ONNX Runtime gets, so it reads protobufs and builds no other model.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_files.soundness import refuse_endless_calls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "DataPlace",
    "Scope",
    "all_nodes",
    "all_tensors",
    "external_location",
    "foreign_ops",
    "missing_data",
    "model_bytes",
    "read_proto",
]

_LFS_MARK = b"version https://git-lfs"
# Domains whose operators ONNX Runtime registers itself.
_KNOWN_DOMAINS = frozenset(
    {
        "",
        "ai.onnx",
        "ai.onnx.ml",
        "ai.onnx.training",
        "ai.onnx.preview.training",
        "com.microsoft",
        "com.ms.internal.nhwc",
    }
)


def read_proto(path: Path) -> onnx.ModelProto:
    """Read a model file without its external data.

    Raises:
        InputRefusedError: the file is absent, empty, a Git LFS pointer, truncated or no model, or a function of it
            calls itself.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputRefusedError(f"{path} cannot be read: {error.strerror}.") from error
    if not data:
        raise InputRefusedError(f"{path} is an empty file: fetch or export the model again.")
    if data.startswith(_LFS_MARK):
        raise InputRefusedError(f"{path} is a Git LFS pointer, not the model: run `git lfs pull`.")
    try:
        proto = onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise InputRefusedError(f"{path} is truncated or no ONNX model: fetch or export it again.") from error
    if not proto.HasField("graph"):
        raise InputRefusedError(f"{path} holds no graph: it is no ONNX model.")
    refuse_endless_calls(proto, path)
    return proto


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _nodes(graph.node)


def all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the graph, of its subgraphs and of the functions."""
    yield from _nodes(proto.graph.node)
    for function in proto.functions:
        yield from _nodes(function.node)


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    yield proto.graph
    for node in all_nodes(proto):
        yield from _subgraphs(node)


def all_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that the model stores: initializers and attributes, at any depth."""
    for graph in _graphs(proto):
        yield from graph.initializer
    for node in all_nodes(proto):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


@dataclasses.dataclass(frozen=True)
class DataPlace:
    """Where the bytes of an external tensor lie: a file beside the model, first byte, number of bytes."""

    file: str
    offset: int
    length: int | None


def external_location(tensor: onnx.TensorProto) -> DataPlace | None:
    """Where an external tensor lies (file, offset and length in bytes); None for an inline tensor."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = entries.get("length")
    return DataPlace(entries.get("location", ""), int(entries.get("offset", 0)), int(length) if length else None)


def missing_data(proto: onnx.ModelProto, directory: Path) -> str | None:
    """One sentence that names the first external tensor whose bytes are not there; None when all are."""
    sizes: dict[str, int | None] = {}
    for tensor in all_tensors(proto):
        place = external_location(tensor)
        if place is None:
            continue
        if place.file not in sizes:
            try:
                sizes[place.file] = os.stat(directory / place.file).st_size
            except OSError:
                sizes[place.file] = None
        size = sizes[place.file]
        if size is None:
            return f"the data of tensor {tensor.name} is missing: there is no file {place.file} in {directory}"
        end = place.offset + (place.length or 0)
        if end > size:
            return (
                f"the data of tensor {tensor.name} is short: it ends at byte {end} of {place.file},"
                f" which has {size} bytes"
            )
    return None


def model_bytes(proto: onnx.ModelProto, path: Path, folder: Path | None = None) -> int:
    """Bytes of the model file and of the external data files that it names, beside it or in ``folder``."""
    files = {place.file for tensor in all_tensors(proto) if (place := external_location(tensor)) is not None}
    return os.stat(path).st_size + sum(os.stat((folder or path.parent) / file).st_size for file in files)


def foreign_ops(proto: onnx.ModelProto) -> list[str]:
    """Operators of domains that ONNX Runtime does not register and the model does not define, as ``domain::Op``."""
    own = {(function.domain, function.name) for function in proto.functions}
    found = {
        f"{node.domain}::{node.op_type}"
        for node in all_nodes(proto)
        if node.domain not in _KNOWN_DOMAINS and (node.domain, node.op_type) not in own
    }
    return sorted(found)


class Scope:
    """A graph, or the body of a function as called from one node, indexed by value name.

    Attributes:
        consumers: value name to the (node, input slot) pairs that read it.
        producers: value name to the node that writes it.
        outputs: value name to the position among the outputs of the graph or function.
        formals: parameter name to its position, in a function body.
        constants: names of stored tensors and of Constant nodes' values.
    """

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        outputs: Sequence[str],
        dims: Mapping[str, tuple[int, ...]],
        functions: Mapping[tuple[str, str], onnx.FunctionProto],
        caller: tuple[Scope, onnx.NodeProto] | None = None,
        formals: Sequence[str] = (),
    ) -> None:
        self.consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        self.producers: dict[str, onnx.NodeProto] = {}
        for node in nodes:
            for slot, name in enumerate(node.input):
                self.consumers.setdefault(name, []).append((node, slot))
            for name in node.output:
                self.producers[name] = node
        self.outputs = {name: position for position, name in enumerate(outputs)}
        self.constants = set(dims) | {node.output[0] for node in nodes if node.op_type == "Constant"}
        self._dims = dims
        self._functions = functions
        self.caller = caller
        self.formals = {name: position for position, name in enumerate(formals)}
        self._called: dict[int, Scope] = {}

    @classmethod
    def of(cls, proto: onnx.ModelProto) -> Scope:
        """The scope of the main graph."""
        graph = proto.graph
        dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        functions = {(function.domain, function.name): function for function in proto.functions}
        return cls(graph.node, [value.name for value in graph.output], dims, functions)

    def body(self, node: onnx.NodeProto) -> Scope | None:
        """The body of the function that ``node`` calls; None for an operator."""
        function = self._functions.get((node.domain, node.op_type))
        if function is None:
            return None
        key = id(node)
        if key not in self._called:
            self._called[key] = Scope(function.node, function.output, {}, self._functions, (self, node), function.input)
        return self._called[key]

    def formal(self, name: str) -> tuple[Scope, str] | None:
        """The caller's scope and value behind a parameter of this function body."""
        position = self.formals.get(name)
        if position is None or self.caller is None or position >= len(self.caller[1].input):
            return None
        return self.caller[0], self.caller[1].input[position]

    def static_dims(self, name: str) -> tuple[int, ...] | None:
        """Dims of a stored tensor seen through parameters, Identity, Cast, dequantisation and Transpose."""
        scope, order = self, list[tuple[int, ...]]()
        while True:
            if name in scope._dims:
                dims = scope._dims[name]
                break
            outer = scope.formal(name)
            if outer is not None:
                scope, name = outer
                continue
            node = scope.producers.get(name)
            if node is None:
                return None
            if node.op_type == "Constant":
                tensors = [attribute.t for attribute in node.attribute if attribute.name == "value"]
                if not tensors:
                    return None
                dims = tuple(tensors[0].dims)
                break
            if node.op_type == "Transpose":
                order.append(tuple(next((a.ints for a in node.attribute if a.name == "perm"), ())))
            elif node.op_type not in {"Identity", "Cast", "DequantizeLinear", "QuantizeLinear"}:
                return None
            name = node.input[0]
        for permutation in reversed(order):
            dims = tuple(dims[axis] for axis in permutation) if permutation else dims[::-1]
        return dims

    def reached(self, name: str, through: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[Scope, onnx.NodeProto, int]]:
        """First uses of a value behind operators that hand it on, inside called functions and after them too.

        Args:
            name: the value.
            through: operator type to the input slots that it hands on to its first output.

        Yields:
            The scope, node and input slot of every other use.
        """
        stack, seen = [(self, name)], set[tuple[int, str]]()
        while stack:
            scope, value = stack.pop()
            if (id(scope), value) in seen:
                continue
            seen.add((id(scope), value))
            if scope.caller is not None and value in scope.outputs:
                outer, call = scope.caller
                if scope.outputs[value] < len(call.output):
                    stack.append((outer, call.output[scope.outputs[value]]))
            for node, slot in scope.consumers.get(value, ()):
                body = scope.body(node)
                if body is not None:
                    stack.extend((body, formal) for formal, position in body.formals.items() if position == slot)
                elif slot in through.get(node.op_type, ()):
                    stack.append((scope, node.output[0]))
                else:
                    yield scope, node, slot
