"""Whether an inline tensor holds as many elements as its shape says; its bytes are not looked at."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir

__all__ = ["tensor_is_whole"]

_T = onnx.TensorProto

# Where a type has its elements if not in raw_data; each of int32_data holds one byte of two (four) smaller elements.
_FIELDS = {
    _T.FLOAT: "float_data",
    _T.COMPLEX64: "float_data",
    _T.DOUBLE: "double_data",
    _T.COMPLEX128: "double_data",
    _T.INT64: "int64_data",
    _T.UINT32: "uint64_data",
    _T.UINT64: "uint64_data",
    _T.STRING: "string_data",
}
_COMPLEX = frozenset({_T.COMPLEX64, _T.COMPLEX128})

# The length of raw_data is told by copying it: from here on the size of the whole message is looked at instead.
_LARGE_BYTES = 4096
_ROOM = 2**16


def tensor_is_whole(tensor: onnx.TensorProto) -> bool:
    """Whether the inline ``tensor`` has the elements that its dims ask for; its element type is a known one."""
    elements: int = math.prod(tensor.dims)
    kind = ir.DataType(tensor.data_type)
    if kind == ir.DataType.STRING:
        return bool(len(tensor.string_data) == elements)
    wanted: int = -(-elements * kind.bitwidth // 8)
    if tensor.HasField("raw_data"):
        size: int = tensor.ByteSize() - _rest(tensor)
        if wanted < _LARGE_BYTES:
            # A message that is far larger cannot be of this size, and would be copied.
            stored: int = len(tensor.raw_data) if size < wanted + _ROOM else -1
            return stored == wanted
        length_bytes = -(-wanted.bit_length() // 7)
        return wanted + 1 + length_bytes <= size < wanted + _ROOM
    stored = len(getattr(tensor, _FIELDS.get(tensor.data_type, "int32_data")))
    if tensor.data_type in _COMPLEX:
        return stored == 2 * elements
    return stored == (wanted if kind.bitwidth < 8 else elements)


def _rest(tensor: onnx.TensorProto) -> int:
    """Bytes of what else a tensor usually says."""
    rest = onnx.TensorProto(dims=tensor.dims, metadata_props=tensor.metadata_props)
    for field in ("name", "doc_string", "data_type", "data_location"):
        if tensor.HasField(field):
            setattr(rest, field, getattr(tensor, field))
    size: int = rest.ByteSize()
    return size
