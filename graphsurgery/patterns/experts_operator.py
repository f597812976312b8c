"""Expert blocks that are one operator, ``com.microsoft::MoE``: what it does written as an expert's body.

The operator routes inside: of its choice nothing is in the graph. The site says how it chooses
(:class:`~graphsurgery.patterns.expert_sites.OperatorRouter`); its indices and weights are values of no graph.

Source: the operator's documentation, with what it leaves open settled by ONNX Runtime's CPU kernel (measured): weights
are those of a softmax over all experts, in float32; of equal ones the expert with the higher number goes first; GELU is
the one with tanh; types of 16 bits are widened for the activation and for the sum; the sparse mixer changes nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.dims import product
from graphsurgery.patterns.attention import layer_of
from graphsurgery.patterns.expert_sites import (
    ROUTE_WEIGHT,
    TOKEN_ROW,
    ExpertSite,
    ExpertStep,
    ExpertTensor,
    OperatorRouter,
    StepOutput,
)
from graphsurgery.patterns.experts_terms import UnreadableError, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.expert_sites import Operand

__all__ = ["read_operator"]

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64
_FLOATS = (_FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_ACTIVATIONS = ("relu", "gelu", "silu", "identity", "swiglu")
_GELU_CUBE, _GELU_SCALE = 0.044715, math.sqrt(2 / math.pi)
_SEPARATE, _INTERLEAVED, _HALVES = 0, 1, 2
_SPARSE_CHOICES = 2


def read_operator(node: ir.Node, shapes: ShapeView) -> ExpertSite:
    """The site of a ``com.microsoft::MoE`` node, of form ``op``.

    Raises:
        UnreadableError: what it is made of is not known, or no writing of it is known to be right.
    """
    return _Reader(node, shapes).read()


class _Reader:
    def __init__(self, node: ir.Node, shapes: ShapeView) -> None:
        self.node = node
        self.shapes = shapes
        self.steps: list[ExpertStep] = []
        dtype = shapes.dtype(self.operand(0, "tokens"))
        if dtype not in _FLOATS:
            raise UnreadableError(f"the type of {self.operand(0, 'tokens').name!r} is not known or not a float")
        self.dtype = dtype

    def read(self) -> ExpertSite:
        node, shapes = self.node, self.shapes
        tokens, scores = self.operand(0, "tokens"), self.operand(1, "scores")
        sizes, scored = shapes.shape(tokens), shapes.shape(scores)
        if sizes is None or len(sizes) not in (2, 3) or not isinstance(sizes[-1], int):
            raise UnreadableError(f"the sizes of its tokens {tokens.name!r} are not known")
        if scored is None or len(scored) != 2 or not isinstance(scored[1], int):
            raise UnreadableError(f"the sizes of its scores {scores.name!r} are not known")
        experts, choices = scored[1], self.integer("k", 1)
        if not 1 <= choices <= experts:
            raise UnreadableError(f"it chooses {choices} of {experts} experts")
        if self.integer("use_sparse_mixer", 0) == 1 and choices != _SPARSE_CHOICES:
            raise UnreadableError(f"its sparse mixer chooses {choices} experts, and it is for {_SPARSE_CHOICES}")
        self._body(experts, sizes[-1])
        indices = _declared("chosen_experts", _INT64, (None, choices))
        weights = _declared("route_weights", _FLOAT, (None, choices))
        return ExpertSite(
            id="",
            kinds=("experts", "op"),
            layer=layer_of(node),
            form="op",
            tokens=tokens,
            indices=indices,
            weights=weights,
            output=node.outputs[0],
            body=tuple(self.steps),
            experts=experts,
            top_k=choices,
            tokens_dim=product(sizes[:-1]),
            hidden=sizes[-1],
            interior=(node,),
            router=OperatorRouter(scores, self.integer("normalize_routing_weights", 0) == 1),
        )

    # ---- what an expert does ----------------------------------------------------------------------------------------

    def _body(self, experts: int, hidden: int) -> None:
        kind = self.text("activation_type", "relu")
        if kind not in _ACTIVATIONS:
            raise UnreadableError(f"its activation {kind!r} is not one of {', '.join(_ACTIVATIONS)}")
        fusion = self.integer("swiglu_fusion", 0) if kind == "swiglu" else _SEPARATE
        if fusion not in (_SEPARATE, _INTERLEAVED, _HALVES):
            raise UnreadableError(f"its swiglu_fusion={fusion} is not one of 0, 1, 2")
        separate = kind == "swiglu" and fusion == _SEPARATE
        if separate != (self.optional(6) is not None):
            what = "has no third matrix for its gate" if separate else f"has a third matrix besides activation {kind!r}"
            raise UnreadableError(f"it {what}")
        down = self._matrix(4, experts, (hidden, None))
        inner = down.shape[1]
        width = inner if fusion == _SEPARATE else 2 * inner
        first = self._widened(self._projected(TOKEN_ROW, self._matrix(2, experts, (width, hidden)), 3, experts))
        if kind == "swiglu":
            third = None
            if separate:
                matrix = self._matrix(6, experts, (inner, hidden))
                third = self._widened(self._projected(TOKEN_ROW, matrix, 7, experts))
            active = self._gated(first, third, inner, fusion)
        else:
            active = self._activated(kind, first)
        last = self._widened(self._projected(self._narrowed(active), down, 5, experts))
        self.step("Mul", last, ROUTE_WEIGHT)

    def _projected(self, row: Operand, matrix: ExpertTensor, bias: int, experts: int) -> StepOutput:
        # Stored [out, in]: the matrix comes first and multiplies the row as a column.
        result = self.step("MatMul", matrix, row, dtype=self.dtype)
        if self.optional(bias) is None:
            return result
        return self.step("Add", result, self._tensor(bias, experts, matrix.shape[:1]), dtype=self.dtype)

    def _activated(self, kind: str, row: StepOutput) -> StepOutput:
        if kind == "relu":
            return self.step("Relu", row)
        if kind == "silu":
            return self.step("Mul", row, self.step("Sigmoid", row))
        if kind == "identity":
            return row
        cube = self.step("Mul", self.step("Mul", self.step("Mul", row, row), row), _number(_GELU_CUBE))
        bent = self.step("Tanh", self.step("Mul", self.step("Add", row, cube), _number(_GELU_SCALE)))
        return self.step("Mul", self.step("Mul", row, _number(0.5)), self.step("Add", bent, _number(1.0)))

    def _gated(self, first: StepOutput, third: StepOutput | None, inner: int, fusion: int) -> StepOutput:
        gate, linear = first, third
        if fusion == _INTERLEAVED:
            gate, linear = self._sliced(first, 0, 2 * inner, 2), self._sliced(first, 1, 2 * inner, 2)
        elif fusion == _HALVES:
            gate, linear = self._sliced(first, 0, inner, 1), self._sliced(first, inner, 2 * inner, 1)
        assert linear is not None
        limit = self.real("swiglu_limit", math.inf)
        if math.isfinite(limit):
            gate = self.step("Min", gate, _number(limit))
            linear = self.step("Max", self.step("Min", linear, _number(limit)), _number(-limit))
        alpha, beta = self.real("activation_alpha", 1.0), self.real("activation_beta", 0.0)
        bent = self.step("Sigmoid", gate if alpha == 1.0 else self.step("Mul", gate, _number(alpha)))
        moved = linear if beta == 0.0 else self.step("Add", linear, _number(beta))
        return self.step("Mul", self.step("Mul", gate, bent), moved)

    def _sliced(self, row: StepOutput, first: int, last: int, stride: int) -> StepOutput:
        starts, ends, strides = (_constant(np.array([item], np.int64)) for item in (first, last, stride))
        return self.step(
            "Slice", row, starts, ends, None, strides, reads=(None, starts, ends, None, strides), axes=(-1,)
        )

    def _widened(self, row: StepOutput) -> StepOutput:
        return row if self.dtype == _FLOAT else self._cast(row, _FLOAT)

    def _narrowed(self, row: StepOutput) -> StepOutput:
        return row if self.dtype == _FLOAT else self._cast(row, self.dtype)

    def _cast(self, row: StepOutput, dtype: ir.DataType) -> StepOutput:
        return self.step("Cast", row, dtype=dtype, attributes=[ir.AttrInt64("to", int(dtype))])

    def step(
        self,
        op_type: str,
        *operands: Operand,
        dtype: ir.DataType = _FLOAT,
        reads: Sequence[ir.Value | None] = (),
        attributes: Sequence[ir.Attr] = (),
        axes: tuple[int, ...] = (),
    ) -> StepOutput:
        """One more step; its node is of no graph and reads constants only."""
        node = ir.Node("", op_type, reads, attributes, num_outputs=1)
        node.outputs[0].type = ir.TensorType(dtype)
        self.steps.append(ExpertStep(node, operands, axes=axes))
        return StepOutput(len(self.steps) - 1)

    # ---- what the operator is made of -------------------------------------------------------------------------------

    def optional(self, place: int) -> ir.Value | None:
        inputs = self.node.inputs
        return inputs[place] if place < len(inputs) else None

    def operand(self, place: int, what: str) -> ir.Value:
        value = self.optional(place)
        if value is None:
            raise UnreadableError(f"its {what} are not given")
        return value

    def _matrix(self, place: int, experts: int, shape: tuple[int, int | None]) -> ExpertTensor:
        value = self.operand(place, f"matrices of input {place}")
        inner = self.shapes.dim(value, 2)
        if shape[1] is None and not isinstance(inner, int):
            raise UnreadableError(f"the sizes of {value.name!r} are not known")
        return self._tensor(place, experts, tuple(inner if size is None else size for size in shape))  # type: ignore[misc]

    def _tensor(self, place: int, experts: int, shape: tuple[int, ...]) -> ExpertTensor:
        value = self.operand(place, f"parameters of input {place}")
        found = self.shapes.shape(value)
        if found != (experts, *shape):
            text = "unknown" if found is None else f"[{', '.join(map(str, found))}]"
            wanted = ", ".join(map(str, (experts, *shape)))
            raise UnreadableError(f"the sizes of {value.name!r} are {text}, not [{wanted}]")
        return ExpertTensor((value,), True, shape)

    def integer(self, name: str, default: int) -> int:
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_int()

    def real(self, name: str, default: float) -> float:
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_float()

    def text(self, name: str, default: str) -> str:
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_string()

    def _attribute(self, name: str) -> ir.Attr | None:
        attribute = self.node.attributes.get(name)
        if attribute is not None and attribute.is_ref():
            raise UnreadableError(f"attribute {name!r} of {label(self.node)} is one of the function around it")
        return attribute


def _number(number: float) -> ir.Value:
    return _constant(np.asarray(number, np.float32))


def _constant(array: np.ndarray) -> ir.Value:
    """A constant of no graph."""
    tensor = ir.tensor(array)
    value = ir.Node("", "Constant", (), [ir.AttrTensor("value", tensor)], num_outputs=1).outputs[0]
    value.type, value.shape = ir.TensorType(tensor.dtype), tensor.shape  # type: ignore[assignment]
    return value


def _declared(name: str, dtype: ir.DataType, shape: tuple[int | None, ...]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
