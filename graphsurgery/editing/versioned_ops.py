"""Operators whose form depends on the opset: operands were attributes once.

What surgery inserts is valid at the model's own opset; these helpers emit the form that it has there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.rewrite import Rewrite

    Sizes: TypeAlias = Sequence[int | str | None] | None

__all__ = ["INT64_MAX", "reduce_max", "reshape", "slice_axis", "squeeze", "unsqueeze"]

INT64_MAX = int(np.iinfo(np.int64).max)
"""As the end of a slice: to the end."""


def slice_axis(
    rewrite: Rewrite,
    value: ir.Value,
    bounds: tuple[int, int],
    axis: int,
    *,
    name: str,
    dtype: ir.DataType | None = None,
    shape: Sizes = None,
) -> ir.Value:
    """``value`` from ``bounds[0]`` to before ``bounds[1]`` on one axis; ``dtype`` where ``value`` does not tell."""
    start, end = bounds
    dtype = dtype if dtype is not None else value.dtype
    if rewrite.opset < 10:
        attributes = {"starts": [start], "ends": [end], "axes": [axis]}
        return rewrite.emit("Slice", [value], attributes, name=name, dtype=dtype, shape=shape)
    operands = [rewrite.constant([item], f"{name}_bounds") for item in (start, end, axis)]
    return rewrite.emit("Slice", [value, *operands], name=name, dtype=dtype, shape=shape)


def unsqueeze(rewrite: Rewrite, value: ir.Value, axes: Sequence[int], *, name: str, shape: Sizes = None) -> ir.Value:
    """``value`` with axes of size 1 put in: they are at ``axes`` in the result."""
    return _with_axes(rewrite, "Unsqueeze", value, axes, name, shape)


def squeeze(rewrite: Rewrite, value: ir.Value, axes: Sequence[int], *, name: str, shape: Sizes = None) -> ir.Value:
    """``value`` without its ``axes`` of size 1."""
    return _with_axes(rewrite, "Squeeze", value, axes, name, shape)


def _with_axes(
    rewrite: Rewrite, op_type: str, value: ir.Value, axes: Sequence[int], name: str, shape: Sizes
) -> ir.Value:
    if rewrite.opset < 13:
        return rewrite.emit(op_type, [value], {"axes": [*axes]}, name=name, dtype=value.dtype, shape=shape)
    operand = rewrite.constant([*axes], "axes")
    return rewrite.emit(op_type, [value, operand], name=name, dtype=value.dtype, shape=shape)


def reduce_max(rewrite: Rewrite, value: ir.Value, axis: int, *, name: str) -> ir.Value:
    """The maximum over one axis, which goes."""
    if rewrite.opset < 18:
        attributes = {"axes": [axis], "keepdims": 0}
        return rewrite.emit("ReduceMax", [value], attributes, name=name, dtype=value.dtype)
    operand = rewrite.constant([axis], "axes")
    return rewrite.emit("ReduceMax", [value, operand], {"keepdims": 0}, name=name, dtype=value.dtype)


def reshape(rewrite: Rewrite, value: ir.Value, sizes: Sequence[int], *, name: str, shape: Sizes = None) -> ir.Value:
    """``value`` with other sizes; 0 and -1 as in Reshape."""
    operand = rewrite.constant([*sizes], "sizes")
    return rewrite.emit("Reshape", [value, operand], name=name, dtype=value.dtype, shape=shape)
