"""``MatMulNBits`` for several experts side by side: it takes one matrix, so that theirs are unpacked and multiplied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.editing.versioned_ops import slice_axis, unsqueeze

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphsurgery.passes.experts.program import Program
    from graphsurgery.patterns.experts.sites import ExpertStep, Operand
    from graphsurgery.rewrite import Rewrite

__all__ = ["times_unpacked", "why_not_picked", "why_not_unpacked"]

_FLOAT = ir.DataType.FLOAT
_BITS = (4, 8)
_GROUPS, _BIAS = 4, 5
_INT8_ACTIVATIONS = 4


def why_not_unpacked(step: ExpertStep) -> str | None:
    """Why a ``MatMulNBits`` cannot be written with its matrix unpacked, in words; None where it can."""
    node = step.node
    if _integer(node, "bits", 4) not in _BITS:
        return f"its weights are in {_integer(node, 'bits', 4)} bits"
    if _integer(node, "accuracy_level", 0) == _INT8_ACTIVATIONS:
        return "accuracy_level=4 lets it compute on activations in 8 bits"
    if len(step.operands) > _GROUPS and step.operands[_GROUPS] is not None:
        return "its rows are in groups of another order"
    if len(step.operands) > _BIAS and step.operands[_BIAS] is not None:
        return "it adds a bias by itself"
    if _integer(node, "K", 0) % _integer(node, "block_size", 1):
        return f"its blocks of {_integer(node, 'block_size', 1)} do not divide rows of {_integer(node, 'K', 0)}"
    return None


def why_not_picked(program: Program) -> str | None:
    """Why no product may take a matrix that is picked at run time, in words; None where all may.

    ONNX Runtime rounds the activations to 8 bits for a constant matrix only, so that another one gives other numbers.
    """
    for step in program.steps:
        if step.node.op_type == "MatMulNBits" and _integer(step.node, "accuracy_level", 0) == _INT8_ACTIVATIONS:
            who = f"node {step.node.name!r} (MatMulNBits)" if step.node.graph is not None else "its product in few bits"
            return (
                f"{who} computes on activations in 8 bits (accuracy_level=4), which it does for constant weights only"
            )
    return None


def times_unpacked(
    rewrite: Rewrite,
    step: ExpertStep,
    values: Sequence[ir.Value | None],
    name: str,
    lead: int,
    is_parameter: Callable[[Operand], bool],
) -> ir.Value:
    """Rows ``[*lead, C, K]`` times matrices in few bits, ``[*lead, N, K / block, bytes]``; float32 inside.

    Args:
        rewrite: inserts what it takes.
        step: the product, :func:`why_not_unpacked` has nothing against it.
        values: its operands in this layout.
        name: first part of the names.
        lead: number of leading axes.
        is_parameter: whether each expert has an operand of its own: others have no leading axes.
    """
    return _Unpacking(rewrite, step, name, lead).product(values, is_parameter)


class _Unpacking:
    def __init__(self, rewrite: Rewrite, step: ExpertStep, name: str, lead: int) -> None:
        self._rewrite = rewrite
        self._step = step
        self._name = name
        self._lead = lead
        self._bits = _integer(step.node, "bits", 4)
        self._block = _integer(step.node, "block_size", 32)
        self._rows = _integer(step.node, "N", 0)
        self._blocks = _integer(step.node, "K", 0) // self._block

    def product(self, values: Sequence[ir.Value | None], is_parameter: Callable[[Operand], bool]) -> ir.Value:
        row, packed, scale = values[:3]
        zero = values[3] if len(values) > 3 else None
        own = [is_parameter(item) for item in self._step.operands]
        dtype = self._step.node.outputs[0].dtype or _FLOAT
        rows, blocks, lead = self._rows, self._blocks, self._lead
        numbers = self._numbers(packed, [rows, blocks, self._block], own[1], "numbers")
        if zero is None:
            points = self._rewrite.constant(np.asarray(2 ** (self._bits - 1), np.float32), "zero_point")
        else:
            points = self._points(zero, own[3])
        centred = self._emit("Sub", [numbers, points], "centred")
        wide = self._cast(scale, "scales")
        wide = self._shaped(wide, [rows, blocks, 1], own[2], "scale_of_block")
        weight = self._shaped(
            self._emit("Mul", [centred, wide], "scaled"), [rows, blocks * self._block], own[1], "weight"
        )
        perm = [*range(lead), lead + 1, lead] if own[1] else [1, 0]
        weight = self._emit("Transpose", [weight], "turned", {"perm": perm})
        result = self._emit("MatMul", [self._cast(row, "wide_rows"), weight], "product")
        return result if dtype == _FLOAT else self._emit("Cast", [result], "narrow", {"to": int(dtype)}, dtype)

    def _points(self, zero: ir.Value, own: bool) -> ir.Value:
        """Zero points, ``[N, K / block, 1]``; those of a row begin at a byte."""
        if zero.dtype is not None and zero.dtype.is_floating_point():
            return self._shaped(self._cast(zero, "zero_points"), [self._rows, self._blocks, 1], own, "point_of_block")
        count = -(-self._blocks * self._bits // 8)
        whole = count * 8 // self._bits
        points = self._numbers(zero, [self._rows, whole], own, "zero_points")
        axis = (self._lead if own else 0) + 1
        if whole != self._blocks:
            points = slice_axis(self._rewrite, points, (0, self._blocks), axis, name=f"{self._name}_points")
        return unsqueeze(self._rewrite, points, [axis + 1], name=f"{self._name}_point_of_block")

    def _numbers(self, packed: ir.Value | None, shape: list[int], own: bool, name: str) -> ir.Value:
        """What is packed, the lower half of each byte first, as ``shape`` in float32."""
        stored = self._cast(packed, f"{name}_bytes")
        if self._bits == 8:
            return self._shaped(stored, shape, own, name)
        places = [*shape[:-1], shape[-1] // 2, 1]
        stored = self._shaped(stored, places, own, f"{name}_in_bytes")
        sixteen, part = (self._rewrite.constant(np.asarray(item, np.float32), "sixteen") for item in (16, 1 / 16))
        high = self._emit("Floor", [self._emit("Mul", [stored, part], f"{name}_shifted")], f"{name}_high")
        low = self._emit("Sub", [stored, self._emit("Mul", [high, sixteen], f"{name}_above")], f"{name}_low")
        both = self._emit("Concat", [low, high], f"{name}_pairs", {"axis": -1})
        return self._shaped(both, shape, own, name)

    def _shaped(self, value: ir.Value, shape: list[int], own: bool, name: str) -> ir.Value:
        # 0 keeps a leading size, which may be 0 itself.
        sizes = self._rewrite.constant([0] * (self._lead if own else 0) + shape, "sizes")
        return self._emit("Reshape", [value, sizes], name)

    def _cast(self, value: ir.Value | None, name: str) -> ir.Value:
        assert value is not None
        if value.dtype == _FLOAT:
            return value
        return self._emit("Cast", [value], name, {"to": int(_FLOAT)})

    def _emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: dict[str, object] | None = None,
        dtype: ir.DataType = _FLOAT,
    ) -> ir.Value:
        return self._rewrite.emit(op_type, inputs, attributes, name=f"{self._name}_{name}", dtype=dtype)


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()
