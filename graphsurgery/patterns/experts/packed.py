"""Expert blocks that are the operator ``com.microsoft::QMoE``: matrices in 4 or 8 bits, dequantised as it computes.

Source: the operator's documentation, with what it leaves open settled by ONNX Runtime's CPU kernel (measured): the
weights of the chosen experts add up to one whatever ``normalize_routing_weights`` says; scales of whole rows are
computed with in float32, whatever ``accuracy_level`` says, and so are blocks of 4 bits, unless that is 4; blocks of 8 bits
always meet activations in 8 bits, as in ``MatMulNBits`` with ``accuracy_level`` 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphsurgery.patterns.experts.fused_operator import OperatorReader, number
from graphsurgery.patterns.experts.terms import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.sites import ExpertSite, ExpertTensor, Operand, StepOutput

__all__ = ["read_packed_operator"]

_FLOAT = ir.DataType.FLOAT
_BITS = (4, 8)
_ROUTER_WEIGHTS = 14
_LAST_READ = 13
_INT8_ACTIVATIONS = 4
_SMALLEST_BLOCK = 16


def read_packed_operator(node: ir.Node, shapes: ShapeView) -> ExpertSite:
    """The site of a ``com.microsoft::QMoE`` node, of form ``op``.

    Raises:
        UnreadableError: what it is made of is not known, or no writing of it is known to be right.
    """
    return _PackedReader(node, shapes).read()


class _PackedReader(OperatorReader):
    first, down, third = 2, 5, 8
    biases: ClassVar[Mapping[int, int]] = {2: 4, 5: 7, 8: 10}
    scales: ClassVar[Mapping[int, int]] = {2: 3, 5: 6, 8: 9}
    zero_points: ClassVar[Mapping[int, int]] = {2: 11, 5: 12, 8: 13}
    numbers: ClassVar[Mapping[int, int]] = {2: 1, 5: 2, 8: 3}

    def __init__(self, node: ir.Node, shapes: ShapeView) -> None:
        super().__init__(node, shapes)
        kind = self.text("quant_type", "int")
        if kind != "int":
            raise UnreadableError(f"its quant_type={kind!r} is not 'int'")
        if self.optional(_ROUTER_WEIGHTS) is not None:
            raise UnreadableError("it weighs its experts by scores other than those that it chooses by")
        if any(item is not None for item in node.inputs[_LAST_READ + 1 :]):
            raise UnreadableError("it has scales besides those of its matrices")
        if self.integer("weights_prepacked", -1) == 1:
            raise UnreadableError("its weights are laid out for one provider (weights_prepacked=1)")
        if self.integer("swiglu_limit_after_activation", 0):
            raise UnreadableError("it clamps its gate behind the activation")
        self.block = self.integer("block_size", 0)

    def normalised(self) -> bool:
        """See :meth:`OperatorReader.normalised`."""
        return True

    def bits(self, place: int) -> int:
        """In how many bits the matrices of operand ``place`` are stored."""
        found = self.integer(f"fc{self.numbers[place]}_expert_weight_bits", self.integer("expert_weight_bits", 4))
        if found not in _BITS:
            raise UnreadableError(f"its weights are stored in {found} bits, not in 4 or 8")
        return found

    def inner_size(self) -> int:
        """See :meth:`OperatorReader.inner_size`."""
        return super().inner_size() * 8 // self.bits(self.down)

    def product(self, row: Operand, place: int, experts: int, shape: tuple[int, int]) -> StepOutput:
        """See :meth:`OperatorReader.product`."""
        value = self.operand(place, f"matrices of input {place}")
        if self.shapes.dtype(value) != ir.DataType.UINT8:
            raise UnreadableError(f"its matrices {value.name!r} are not known to be of type uint8")
        if self.block:
            return self._by_block(row, place, experts, shape)
        return self._by_row(row, place, experts, shape)

    # ---- a scale for each block of a row ----------------------------------------------------------------------------

    def _by_block(self, row: Operand, place: int, experts: int, shape: tuple[int, int]) -> StepOutput:
        """As MatMulNBits, which stores the matrix of one expert in the same bytes."""
        (out, features), bits = shape, self.bits(place)
        if self.block < _SMALLEST_BLOCK or self.block & (self.block - 1) or features % self.block:
            raise UnreadableError(f"its blocks of {self.block} do not divide rows of {features}")
        blocks = features // self.block
        bytes_of_row = features * bits // 8
        matrix = self.tensor(place, experts, (out, blocks, bytes_of_row // blocks), (out, bytes_of_row))
        scale: Operand = self.tensor(self.scales[place], experts, (out, blocks))
        if self._type_of(self.scales[place]) != self.dtype:
            scale = self.cast(scale, self.dtype, per_row=False)
        operands = [row, matrix, scale]
        if self.optional(self.zero_points[place]) is not None:
            operands.append(self.tensor(self.zero_points[place], experts, (out, -(-blocks * bits // 8))))
        level = self.integer("accuracy_level", 0)
        level = _INT8_ACTIVATIONS if bits == 8 or level == _INT8_ACTIVATIONS else 0
        given = {"K": features, "N": out, "bits": bits, "block_size": self.block, "accuracy_level": level}
        attributes = [ir.AttrInt64(name, value) for name, value in given.items()]
        return self.step("MatMulNBits", *operands, dtype=self.dtype, attributes=attributes, domain="com.microsoft")

    # ---- a scale for each row ---------------------------------------------------------------------------------------

    def _by_row(self, row: Operand, place: int, experts: int, shape: tuple[int, int]) -> StepOutput:
        """In float32, the scale behind the product: of a byte with two numbers each meets its own half of the row."""
        (out, features), bits = shape, self.bits(place)
        wide = row if self.dtype == _FLOAT else self.cast(row, _FLOAT)
        if bits == 8:
            stored = self.cast(self.tensor(place, experts, (out, features)), _FLOAT, per_row=False)
            total = self._times(self._centred(stored, place, experts, out), wide)
        else:
            if self.optional(self.zero_points[place]) is not None:
                name = self.operand(self.zero_points[place], "zero points").name
                raise UnreadableError(f"its zero points {name!r}, one for each row, are two in a byte")
            pairs = self.cast(self.tensor(place, experts, (out, features // 2)), _FLOAT, per_row=False)
            high = self._parameter("Floor", self._parameter("Mul", pairs, number(1 / 16)))
            low = self._parameter("Sub", pairs, self._parameter("Mul", high, number(16)))
            even, odd = (self.sliced(wide, first, features, 2) for first in (0, 1))
            total = self.step(
                "Add",
                self._times(self._centred(low, place, experts, out), even),
                self._times(self._centred(high, place, experts, out), odd),
            )
        scale: Operand = self.tensor(self.scales[place], experts, (out,))
        if self._type_of(self.scales[place]) != _FLOAT:
            scale = self.cast(scale, _FLOAT, per_row=False)
        scaled = self.step("Mul", total, scale)
        return scaled if self.dtype == _FLOAT else self.cast(scaled, self.dtype)

    def _centred(self, stored: StepOutput, place: int, experts: int, out: int) -> StepOutput:
        zero: Operand = number(2.0 ** (self.bits(place) - 1))
        if self.optional(self.zero_points[place]) is not None:
            points: ExpertTensor = self.tensor(self.zero_points[place], experts, (out, 1), (out,))
            zero = self.cast(points, _FLOAT, per_row=False)
        return self._parameter("Sub", stored, zero)

    def _times(self, matrix: StepOutput, row: Operand) -> StepOutput:
        return self.step("MatMul", matrix, row)

    def _parameter(self, op_type: str, *operands: Operand) -> StepOutput:
        """A step on what each expert has of its own."""
        return self.step(op_type, *operands, per_row=False)

    def _type_of(self, place: int) -> ir.DataType:
        value = self.operand(place, f"scales of input {place}")
        found = self.shapes.dtype(value)
        if found is None or not found.is_floating_point():
            raise UnreadableError(f"the type of its scales {value.name!r} is not known or not a float")
        return found
