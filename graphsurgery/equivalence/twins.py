"""float32 twins of bfloat16 models: ONNX Runtime's CPU provider has no bfloat16 kernels for arithmetic.

Every bfloat16 weight, constant, cast and declared type becomes float32; the twin computes what the model means,
without its rounding.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, BinaryIO

import ml_dtypes
import numpy as np
import onnx

from graphsurgery.equivalence.protos import all_nodes, all_tensors, external_location
from graphsurgery.errors import CannotCheckError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["float32_twin", "holds_bfloat16"]

_BF16, _F32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
# Attributes that hold an element type.
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "softmax_precision", "stash_type"})
_CHUNK = 1 << 24


def holds_bfloat16(proto: onnx.ModelProto) -> bool:
    """Whether anything in the model is bfloat16."""
    if any(tensor.data_type == _BF16 for tensor in all_tensors(proto)):
        return True
    if any(kind.elem_type == _BF16 for kind in _declared_types(proto)):
        return True
    return any(
        attribute.name in _TYPE_ATTRIBUTES and attribute.i == _BF16
        for node in all_nodes(proto)
        for attribute in node.attribute
    )


def _declared_types(proto: onnx.ModelProto) -> Iterator[onnx.TypeProto.Tensor]:
    graphs = [proto.graph]
    for node in all_nodes(proto):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                graphs.append(attribute.g)
            graphs.extend(attribute.graphs)
            if attribute.HasField("tp"):
                yield from _tensor_types(attribute.tp)
    for graph in graphs:
        for values in (graph.input, graph.output, graph.value_info):
            for value in values:
                yield from _tensor_types(value.type)
    for function in proto.functions:
        for value in function.value_info:
            yield from _tensor_types(value.type)


def _tensor_types(kind: onnx.TypeProto) -> Iterator[onnx.TypeProto.Tensor]:
    if kind.HasField("tensor_type"):
        yield kind.tensor_type
    elif kind.HasField("sequence_type"):
        yield from _tensor_types(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        yield from _tensor_types(kind.optional_type.elem_type)


def float32_twin(proto: onnx.ModelProto, directory: Path, target: Path) -> onnx.ModelProto:
    """Make the twin.

    Args:
        proto: the model.
        directory: where its external data lies.
        target: an empty directory for the twin's external data; nothing is written without external data.

    Raises:
        CannotCheckError: ``target`` has no room for the twin's data, or the twin would exceed a protobuf's 2 GiB.
    """
    twin = onnx.ModelProto()
    twin.CopyFrom(proto)
    external = [tensor for tensor in all_tensors(twin) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    if external:
        _rewrite_data(external, directory, target)
    for tensor in all_tensors(twin):
        if tensor.data_type == _BF16 and tensor.data_location != onnx.TensorProto.EXTERNAL:
            _widen(tensor)
        elif tensor.data_type == _BF16:
            tensor.data_type = _F32
    for kind in _declared_types(twin):
        if kind.elem_type == _BF16:
            kind.elem_type = _F32
    for node in all_nodes(twin):
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == _BF16:
                attribute.i = _F32
    if twin.ByteSize() >= 2**31:
        raise CannotCheckError("The float32 twin of this bfloat16 model is over 2 GiB without external data.")
    return twin


def _widen(tensor: onnx.TensorProto) -> None:
    values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
    name, doc = tensor.name, tensor.doc_string
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
    tensor.doc_string = doc


def _rewrite_data(tensors: list[onnx.TensorProto], directory: Path, target: Path) -> None:
    """Stream every external tensor into one new file, bfloat16 widened, tensors that overlap written apart."""
    places = [external_location(tensor) for tensor in tensors]
    sizes = [_stored_bytes(tensor) for tensor in tensors]
    need = sum(size * (2 if tensor.data_type == _BF16 else 1) for tensor, size in zip(tensors, sizes, strict=True))
    free = shutil.disk_usage(target).free
    if need > free:
        raise CannotCheckError(
            f"The float32 twin of this bfloat16 model needs {need / 1e9:.1f} GB in {target}, which has"
            f" {free / 1e9:.1f} GB free: set TMPDIR to a larger disk."
        )
    with (target / "twin.data").open("wb") as out:
        for tensor, place, size in zip(tensors, places, sizes, strict=True):
            assert place is not None
            start = out.tell()
            with (directory / place.file).open("rb") as source:
                source.seek(place.offset)
                _copy(source, out, size, widen=tensor.data_type == _BF16)
            del tensor.external_data[:]
            for key, value in (("location", "twin.data"), ("offset", start), ("length", out.tell() - start)):
                tensor.external_data.add(key=key, value=str(value))


def _stored_bytes(tensor: onnx.TensorProto) -> int:
    place = external_location(tensor)
    if place is not None and place.length is not None:
        return place.length
    count = int(np.prod(tensor.dims, dtype=np.int64))
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _copy(source: BinaryIO, out: BinaryIO, size: int, *, widen: bool) -> None:
    while size > 0:
        data = source.read(min(_CHUNK, size))
        if not data:
            break
        size -= len(data)
        out.write(np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32).tobytes() if widen else data)
