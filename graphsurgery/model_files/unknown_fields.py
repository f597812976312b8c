"""Whether a protobuf holds fields that this build of onnx does not know, which would be dropped at a save."""

from __future__ import annotations

import itertools
import math
import operator
from typing import TYPE_CHECKING

from google.protobuf.unknown_fields import UnknownFieldSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx

__all__ = ["discard_unknown_fields"]

# Telling the size of a message means encoding it, so that tensors from this number of elements on are looked at instead.
_LARGE_ELEMENTS = 1024

_size = operator.methodcaller("ByteSize")


def discard_unknown_fields(proto: onnx.ModelProto) -> bool:
    """Remove unknown fields from ``proto``, at any depth; whether there were any."""
    large = [tensor for tensor in proto.graph.initializer if math.prod(tensor.dims) >= _LARGE_ELEMENTS]
    if any(len(UnknownFieldSet(message)) for message in (proto, proto.graph, *large)):
        proto.DiscardUnknownFields()
        return True
    before = sum(map(_size, _parts(proto)))
    proto.DiscardUnknownFields()
    return bool(sum(map(_size, _parts(proto))) != before)


def _parts(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto | onnx.ValueInfoProto]:
    """The parts of ``proto`` that together hold all but its large initializers."""
    graph = proto.graph
    small = (tensor for tensor in graph.initializer if math.prod(tensor.dims) < _LARGE_ELEMENTS)
    return itertools.chain(
        graph.node,
        graph.value_info,
        graph.input,
        graph.output,
        graph.quantization_annotation,
        graph.metadata_props,
        small,
        proto.functions,
        proto.opset_import,
        proto.metadata_props,
        proto.configuration,
    )
