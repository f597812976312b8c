"""Computing small nodes outright, to the bit that a runtime computes, where all their inputs are known numbers.

Sizes that take a detour through floats (``ceil(seq / 64)``) or through reductions are numbers once the sizes are,
although symbolic arithmetic cannot follow them. Only operators whose results IEEE 754 and the operator specification fix
to the last bit are computed, in float32, float64, integers and booleans.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MAX_COMPUTED", "compute", "is_computed"]

MAX_COMPUTED = 16
"""Nodes with a result of more elements are not computed."""

_Array: TypeAlias = "np.ndarray[Any, Any]"
_Operator: TypeAlias = "Callable[[Sequence[_Array], Mapping[str, ir.Attr]], _Array | None]"

_CAST_TARGETS = frozenset(
    {
        *(ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT32),
        *(ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.UINT32, ir.DataType.UINT64),
    }
)


def is_computed(node: ir.Node) -> bool:
    """Whether :func:`compute` knows the operator of ``node``."""
    return not node.domain and node.op_type in _OPERATORS


def compute(
    node: ir.Node, inputs: Sequence[np.ndarray[Any, Any]], attributes: Mapping[str, ir.Attr]
) -> np.ndarray[Any, Any] | None:
    """What ``node`` computes; None where that is not known to the bit.

    Args:
        node: a node of the default domain with one output.
        inputs: what all its inputs hold.
        attributes: its attributes, references to those of a function call resolved.
    """
    operator = _OPERATORS.get(node.op_type)
    if operator is None or not inputs or not all(_is_exact(array) for array in inputs):
        return None
    try:
        with np.errstate(all="raise"):
            result = operator(inputs, attributes)
    except (FloatingPointError, ValueError, IndexError, OverflowError):
        # What a division by zero gives, or operands that do not fit, is for the runtime to say.
        return None
    return result if result is not None and result.size <= MAX_COMPUTED else None


def _is_exact(array: _Array) -> bool:
    return array.dtype.kind in "iub" or array.dtype in (np.float32, np.float64)


def _number(attributes: Mapping[str, ir.Attr], name: str, default: int) -> int:
    return attributes[name].as_int() if name in attributes else default


def _same_type(function: Callable[..., Any]) -> _Operator:
    """An element-wise operator whose operands and result have one type."""

    def operator(inputs: Sequence[_Array], _attributes: Mapping[str, ir.Attr]) -> _Array:
        result = functools.reduce(function, inputs) if len(inputs) > 1 else function(inputs[0])
        return np.asarray(result).astype(inputs[0].dtype, copy=False)

    return operator


def _compared(function: Callable[..., Any]) -> _Operator:
    """An element-wise operator with a boolean result."""
    return lambda inputs, _attributes: np.asarray(function(*inputs), dtype=np.bool_)


def _divide(inputs: Sequence[_Array], _attributes: Mapping[str, ir.Attr]) -> _Array:
    left, right = inputs
    if left.dtype.kind == "f":
        return np.asarray(left / right)
    # Integers are divided towards zero; numpy divides towards minus infinity.
    quotient = np.abs(left) // np.abs(right)
    return np.asarray(quotient * np.sign(left) * np.sign(right)).astype(left.dtype)


def _cast(inputs: Sequence[_Array], attributes: Mapping[str, ir.Attr]) -> _Array | None:
    data, target = inputs[0], ir.DataType(_number(attributes, "to", 0))
    if target not in _CAST_TARGETS:
        return None
    wanted = target.numpy()
    if wanted.kind in "iu" and data.size:
        # What a number that does not fit becomes differs between platforms.
        limits = np.iinfo(wanted)
        if not limits.min <= float(data.min()) <= float(data.max()) <= limits.max:
            return None
    return data.astype(wanted)


def _where(inputs: Sequence[_Array], _attributes: Mapping[str, ir.Attr]) -> _Array:
    return np.where(inputs[0], inputs[1], inputs[2])


def _reduced(function: Callable[..., Any]) -> _Operator:
    """A reduction of integers: one of floats depends on the order in which it is done."""

    def operator(inputs: Sequence[_Array], attributes: Mapping[str, ir.Attr]) -> _Array | None:
        data = inputs[0]
        if data.dtype.kind == "f":
            return None
        axes: Sequence[int] = attributes["axes"].as_ints() if "axes" in attributes else ()
        if len(inputs) > 1:
            axes = [int(axis) for axis in inputs[1]]
        if not axes and _number(attributes, "noop_with_empty_axes", 0):
            return data
        keep = _number(attributes, "keepdims", 1) == 1
        return np.asarray(function(data, axis=tuple(axes) or None, keepdims=keep)).astype(data.dtype)

    return operator


_OPERATORS: dict[str, _Operator] = {
    "Add": _same_type(np.add),
    "Sub": _same_type(np.subtract),
    "Mul": _same_type(np.multiply),
    "Max": _same_type(np.maximum),
    "Min": _same_type(np.minimum),
    "Neg": _same_type(np.negative),
    "Abs": _same_type(np.abs),
    "Sign": _same_type(np.sign),
    "Sqrt": _same_type(np.sqrt),
    "Ceil": _same_type(np.ceil),
    "Floor": _same_type(np.floor),
    "Round": _same_type(np.rint),
    "Identity": _same_type(np.asarray),
    "Div": _divide,
    "Equal": _compared(np.equal),
    "Less": _compared(np.less),
    "LessOrEqual": _compared(np.less_equal),
    "Greater": _compared(np.greater),
    "GreaterOrEqual": _compared(np.greater_equal),
    "Cast": _cast,
    "Where": _where,
    "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min),
    "ReduceSum": _reduced(np.sum),
    "ReduceProd": _reduced(np.prod),
}
