"""Values that are known without reading weights.

A value is constant when it is the output of a ``Constant`` node or an initializer whose bytes are inside the ``.onnx``
file, seen through ``Identity``. External and lazily computed tensors are never read, nor are tensors of more than
:data:`MAX_ELEMENTS` elements: both count as unknown.

An initializer that is also a graph input is a default that the caller may override, so it is unknown too. Before IR
version 4 every initializer *had* to be listed as an input and runtimes do not let callers override it; callers that
know the model pass ``overridable=model.ir_version >= 4``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_ELEMENTS", "const_int", "const_ints", "const_scalar", "constant_of", "corners_of", "small_array"]

MAX_ELEMENTS = 4096
_MAX_TABLE = 1 << 26

# Whatever else there is may read a data file, or compute something from one, when it is asked for its contents.
_IN_MEMORY = (ir.Tensor, ir.TensorProtoTensor, ir.PackedTensor)
_STANDARD_DOMAINS = ("", "ai.onnx")


def constant_of(value: ir.Value | None, *, overridable: bool = True) -> np.ndarray | None:
    """The contents of ``value`` if they are known without reading weights.

    Args:
        value: any value of a graph or function body; None (an absent optional input) is unknown.
        overridable: whether an initializer that is also a graph input may be fed (IR version 4 and later).

    Returns:
        An array of the value's own shape and dtype that must not be written to, or None.
    """
    value = _behind_identities(value)
    if value is None:
        return None
    node = value.producer()
    if node is not None:
        return _constant_node(node)
    if not value.is_initializer() or (overridable and value.is_graph_input()):
        return None
    return small_array(value.const_value)


def const_int(value: ir.Value | None, *, overridable: bool = True) -> int | None:
    """The one integer (or boolean) that ``value`` holds, of any rank; None where unknown, not integral or not single."""
    array = constant_of(value, overridable=overridable)
    if array is None or array.size != 1 or array.dtype.kind not in "iub":
        return None
    return int(array.reshape(-1)[0])


def const_ints(value: ir.Value | None, *, overridable: bool = True) -> tuple[int, ...] | None:
    """The integers that ``value`` holds, flattened; None where unknown or not integral."""
    array = constant_of(value, overridable=overridable)
    if array is None or array.dtype.kind not in "iub":
        return None
    return tuple(int(item) for item in array.reshape(-1))


def const_scalar(value: ir.Value | None, *, overridable: bool = True) -> float | int | bool | None:
    """The one number that ``value`` holds, of any rank and number type; None where unknown or not single."""
    array = constant_of(value, overridable=overridable)
    if array is None or array.size != 1:
        return None
    item = array.reshape(-1)[0]
    if array.dtype.kind == "b":
        return bool(item)
    if array.dtype.kind in "iu":
        return int(item)
    # Strings are no number; float16, bfloat16 and the 8-bit floats convert through float().
    return None if array.dtype.kind in "OUS" else float(item)


def corners_of(value: ir.Value | None) -> tuple[float, float, float] | None:
    """Three elements of a square table ``[.., N, N]`` of one kind of rows, of any size: a mask for all positions.

    Returns:
        The last element of the first row, and the first and last elements of the last row; None where ``value`` is no
        table whose bytes are inside the file.
    """
    value = _behind_identities(value)
    node = value.producer() if value is not None else None
    if value is None or (value.is_graph_input() and value.is_initializer()):
        return None
    attribute = node.attributes.get("value") if node is not None and node.op_type == "Constant" else None
    tensor = value.const_value if node is None else attribute.value if attribute is not None else None
    if not isinstance(tensor, _IN_MEMORY) or tensor.size > _MAX_TABLE or tensor.dtype == ir.DataType.STRING:
        return None
    sizes = tuple(tensor.shape.numpy())
    if len(sizes) < 2 or sizes[-1] != sizes[-2] or sizes[-1] < 2 or tensor.size != sizes[-1] ** 2:
        return None
    table = tensor.numpy().reshape(sizes[-2:])
    return float(table[0, -1]), float(table[-1, 0]), float(table[-1, -1])


def _behind_identities(value: ir.Value | None) -> ir.Value | None:
    seen = 0
    while value is not None:
        node = value.producer()
        if node is None or node.op_type != "Identity" or node.domain not in _STANDARD_DOMAINS or not node.inputs:
            return value
        value = node.inputs[0]
        seen += 1
        if seen > MAX_ELEMENTS:  # a cycle of Identities in a broken file
            return None
    return None


def small_array(tensor: ir.TensorProtocol | None) -> np.ndarray | None:
    """The contents of a small number tensor whose bytes are in the file itself; None for every other."""
    if not isinstance(tensor, _IN_MEMORY) or tensor.dtype == ir.DataType.STRING or tensor.size > MAX_ELEMENTS:
        return None
    return np.asarray(tensor.numpy())


def _constant_node(node: ir.Node) -> np.ndarray | None:
    if node.op_type != "Constant" or node.domain not in _STANDARD_DOMAINS:
        return None
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return None
        if name == "value":
            return small_array(attribute.value)
        if name in {"value_int", "value_ints"}:
            return _listed(attribute.value, np.int64)
        if name in {"value_float", "value_floats"}:
            return _listed(attribute.value, np.float32)
    return None


def _listed(value: Sequence[float] | float, dtype: type[np.generic]) -> np.ndarray | None:
    array = np.array(value, dtype=dtype)
    return array if array.size <= MAX_ELEMENTS else None
