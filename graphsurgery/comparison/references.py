"""What a tensor or an attribute is, as a key that two models can share: weights by reference, never by content.

* An external tensor is its element type, its shape and where its bytes are: file, offset, length. The file is not read,
  and its name does not count: the data files of two models stand for each other one to one (see :class:`DataFiles`).
* An inline tensor is its element type, its shape and its bytes, of which long ones are kept as a digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphsurgery.analysis._order import subgraphs_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

__all__ = ["Census", "DataFiles", "Keys", "census", "describe_attribute", "describe_place", "describe_shape"]

_DIGEST_FROM = 64  # bytes; shorter contents are their own key
_SHOWN = 60  # characters of an attribute in a report


@dataclasses.dataclass(frozen=True)
class Census:
    """What a model holds, functions and subgraphs counted once.

    Attributes:
        nodes: how many nodes.
        tensors: the initializers, in the order of the file.
    """

    nodes: int
    tensors: tuple[ir.Value, ...]


def census(model: ir.Model) -> Census:
    """Count what ``model`` holds; no tensor is read."""
    nodes = 0
    tensors: list[ir.Value] = []
    waiting: list[ir.Graph | ir.Function] = [*reversed(model.functions.values()), model.graph]
    while waiting:
        graph = waiting.pop()
        if isinstance(graph, ir.Graph):
            tensors += [value for value in graph.initializers.values() if value.const_value is not None]
        nodes += len(graph)
        waiting += [inner for node in graph if node.attributes for inner in subgraphs_of(node)][::-1]
    return Census(nodes, tuple(tensors))


class DataFiles:
    """Which data file of B stands for which of A.

    Files of one name do; of the others, those that hold tensors of the same types and shapes at the same places; what
    is left is paired in order of first use when equally many are left.
    """

    def __init__(self, a: Iterable[ir.Value], b: Iterable[ir.Value]) -> None:
        ours, theirs = _profiles(a), _profiles(b)
        self._theirs = frozenset(theirs)
        self._alias = {name: name for name in theirs if name in ours}
        free = [name for name in ours if name not in self._alias]
        left = [name for name in theirs if name not in self._alias]
        by_profile: dict[Hashable, list[str]] = defaultdict(list)
        for name in free:
            by_profile[frozenset(ours[name])].append(name)
        for name in left:
            same = by_profile.get(frozenset(theirs[name]))
            if same:
                self._alias[name] = same.pop(0)
        taken = set(self._alias.values())
        free = [name for name in free if name not in taken]
        left = [name for name in left if name not in self._alias]
        if len(free) == len(left):
            self._alias.update(zip(left, free, strict=True))

    def of_b(self, location: str) -> str:
        """The name in A of B's file ``location``; one that A cannot have where there is no counterpart."""
        if location in self._alias:
            return self._alias[location]
        return f"B/../{location}" if location in self._theirs else location


def _profiles(values: Iterable[ir.Value]) -> dict[str, list[Hashable]]:
    found: dict[str, list[Hashable]] = {}
    for value in values:
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            place = (tensor.dtype, _dims(tensor), tensor.offset or 0, _length(tensor))
            found.setdefault(os.fspath(tensor.location), []).append(place)
    return found


def _dims(tensor: ir.TensorProtocol) -> tuple[int | str | None, ...]:
    return tuple(size if isinstance(size, int) else size.value for size in tensor.shape)


def _length(tensor: ir.ExternalTensor) -> int:
    return tensor.nbytes if tensor.length is None else tensor.length


class Keys:
    """Keys of the tensors and attributes of one side.

    Args:
        files: which data files stand for each other.
        is_b: whether this is side B, whose files get A's names.
    """

    def __init__(self, files: DataFiles, *, is_b: bool) -> None:
        self._files = files
        self._is_b = is_b
        # The objects are kept with their keys, so that no other object can take over an id.
        self._tensors: dict[int, tuple[Hashable, Any]] = {}
        self._attributes: dict[int, tuple[Hashable, Any]] = {}

    def tensor(self, tensor: ir.TensorProtocol | None) -> Hashable:
        """The key of a tensor."""
        known = self._tensors.get(id(tensor))
        if known is None:
            known = self._tensors[id(tensor)] = (self._tensor(tensor), tensor)
        return known[0]

    def _tensor(self, tensor: ir.TensorProtocol | None) -> Hashable:
        if tensor is None:
            return None
        return (tensor.dtype, _dims(tensor), self._bytes(tensor))

    def _bytes(self, tensor: ir.TensorProtocol) -> Hashable:
        if isinstance(tensor, ir.ExternalTensor):
            location = os.fspath(tensor.location)
            file = self._files.of_b(location) if self._is_b else location
            return (file, tensor.offset or 0, _length(tensor))
        if isinstance(tensor, ir.LazyTensor):
            return ("lazy", id(tensor))
        if tensor.dtype == ir.DataType.STRING:
            return tuple(tensor.string_data()) if isinstance(tensor, ir.StringTensor) else _strings(tensor)
        content = tensor.tobytes()
        return content if len(content) < _DIGEST_FROM else hashlib.blake2b(content, digest_size=20).digest()

    def attribute(self, attribute: ir.Attr) -> Hashable:
        """The key of an attribute that is no subgraph."""
        known = self._attributes.get(id(attribute))
        if known is None:
            known = self._attributes[id(attribute)] = (self._attribute(attribute), attribute)
        return known[0]

    def _attribute(self, attribute: ir.Attr) -> Hashable:
        kind, value = attribute.type, attribute.value
        if kind == ir.AttributeType.FLOAT:
            # By bits: a NaN is the same as itself.
            return (kind, struct.pack("<d", value))
        if kind == ir.AttributeType.FLOATS:
            return (kind, struct.pack(f"<{len(value)}d", *value))
        if kind == ir.AttributeType.TENSOR:
            return (kind, self.tensor(value))
        if kind == ir.AttributeType.TENSORS:
            return (kind, tuple(self.tensor(item) for item in value))
        if kind in (ir.AttributeType.INTS, ir.AttributeType.STRINGS):
            return (kind, tuple(value))
        if kind in (ir.AttributeType.INT, ir.AttributeType.STRING):
            return (kind, value)
        return (kind, str(value))


def _strings(tensor: ir.TensorProtocol) -> Hashable:
    return tuple(str(item) for item in tensor.numpy().reshape(-1))


def describe_attribute(attribute: ir.Attr | None) -> str:
    """An attribute as a report shows it."""
    if attribute is None:
        return "absent"
    value = attribute.value
    if attribute.type == ir.AttributeType.TENSOR:
        return f"{value.dtype.name}{describe_shape(value)}"
    if attribute.type == ir.AttributeType.TENSORS:
        return f"{len(value)} tensors"
    text = " ".join(str(list(value) if isinstance(value, tuple) else value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def describe_shape(tensor: ir.TensorProtocol) -> str:
    """``[4, 8]``."""
    return f"[{', '.join(str(size) for size in tensor.shape)}]"


def describe_place(tensor: ir.TensorProtocol) -> str:
    """Where the bytes of a tensor are."""
    if isinstance(tensor, ir.ExternalTensor):
        offset = tensor.offset or 0
        return f"{os.fspath(tensor.location)}[{offset}:{offset + _length(tensor)}]"
    return "inline"
