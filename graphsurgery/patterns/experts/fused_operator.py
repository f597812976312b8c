"""Expert blocks that are one operator, ``com.microsoft::MoE``: what it does written as an expert's body.

The operator routes inside: of its choice nothing is in the graph. The site says how it chooses
(:class:`~graphsurgery.patterns.experts.sites.OperatorRouter`); its indices and weights are values of no graph.

Source: the operator's documentation, with what it leaves open settled by ONNX Runtime's CPU kernel (measured): weights
are those of a softmax over all experts, in float32; of equal ones the expert with the higher number goes first; GELU is
the one with tanh; types of 16 bits are widened for the activation and for the sum; the sparse mixer changes nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.dims import product
from graphsurgery.patterns.experts.sites import (
    ROUTE_WEIGHT,
    TOKEN_ROW,
    ExpertSite,
    ExpertStep,
    ExpertTensor,
    OperatorRouter,
    StepOutput,
)
from graphsurgery.patterns.experts.terms import UnreadableError, label
from graphsurgery.patterns.layer_names import layer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.sites import Operand

__all__ = ["OperatorReader", "number", "read_operator"]

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
    return OperatorReader(node, shapes).read()


class OperatorReader:
    """Reads one operator. Another one whose weights are stored differently overrides how it projects rows."""

    first, down, third = 2, 4, 6
    """Places of the matrices among the operands."""
    biases: ClassVar[Mapping[int, int]] = {2: 3, 4: 5, 6: 7}

    def __init__(self, node: ir.Node, shapes: ShapeView) -> None:
        self.node = node
        self.shapes = shapes
        self.steps: list[ExpertStep] = []
        dtype = shapes.dtype(self.operand(0, "tokens"))
        if dtype not in _FLOATS:
            raise UnreadableError(f"the type of {self.operand(0, 'tokens').name!r} is not known or not a float")
        self.dtype = dtype

    def read(self) -> ExpertSite:
        """The site; see :func:`read_operator`."""
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
            router=OperatorRouter(scores, self.normalised()),
        )

    def normalised(self) -> bool:
        """Whether the weights of the chosen experts are divided by their sum."""
        return self.integer("normalize_routing_weights", 0) == 1

    # ---- what an expert does ----------------------------------------------------------------------------------------

    def _body(self, experts: int, hidden: int) -> None:
        kind = self.text("activation_type", "relu")
        if kind not in _ACTIVATIONS:
            raise UnreadableError(f"its activation {kind!r} is not one of {', '.join(_ACTIVATIONS)}")
        fusion = self.integer("swiglu_fusion", 0) if kind == "swiglu" else _SEPARATE
        if fusion not in (_SEPARATE, _INTERLEAVED, _HALVES):
            raise UnreadableError(f"its swiglu_fusion={fusion} is not one of 0, 1, 2")
        separate = kind == "swiglu" and fusion == _SEPARATE
        if separate != (self.optional(self.third) is not None):
            what = "has no third matrix for its gate" if separate else f"has a third matrix besides activation {kind!r}"
            raise UnreadableError(f"it {what}")
        inner = self.inner_size()
        width = inner if fusion == _SEPARATE else 2 * inner
        first = self._widened(self._projected(TOKEN_ROW, self.first, experts, (width, hidden)))
        if kind == "swiglu":
            third = None
            if separate:
                third = self._widened(self._projected(TOKEN_ROW, self.third, experts, (inner, hidden)))
            active = self._gated(first, third, inner, fusion)
        else:
            active = self._activated(kind, first)
        last = self._widened(self._projected(self._narrowed(active), self.down, experts, (hidden, inner)))
        self.step("Mul", last, ROUTE_WEIGHT)

    def inner_size(self) -> int:
        """How many features an expert has between its matrices."""
        value = self.operand(self.down, f"matrices of input {self.down}")
        inner = self.shapes.dim(value, 2)
        if not isinstance(inner, int):
            raise UnreadableError(f"the sizes of {value.name!r} are not known")
        return inner

    def _projected(self, row: Operand, place: int, experts: int, shape: tuple[int, int]) -> StepOutput:
        result = self.product(row, place, experts, shape)
        bias = self.biases[place]
        if self.optional(bias) is None:
            return result
        return self.step("Add", result, self.tensor(bias, experts, shape[:1]), dtype=self.dtype)

    def product(self, row: Operand, place: int, experts: int, shape: tuple[int, int]) -> StepOutput:
        """The matrices ``[out, in]`` of operand ``place`` times the row, of the type of the tokens."""
        # Stored [out, in]: the matrix comes first and multiplies the row as a column.
        return self.step("MatMul", self.tensor(place, experts, shape), row, dtype=self.dtype)

    def _activated(self, kind: str, row: StepOutput) -> StepOutput:
        if kind == "relu":
            return self.step("Relu", row)
        if kind == "silu":
            return self.step("Mul", row, self.step("Sigmoid", row))
        if kind == "identity":
            return row
        cube = self.step("Mul", self.step("Mul", self.step("Mul", row, row), row), number(_GELU_CUBE))
        bent = self.step("Tanh", self.step("Mul", self.step("Add", row, cube), number(_GELU_SCALE)))
        return self.step("Mul", self.step("Mul", row, number(0.5)), self.step("Add", bent, number(1.0)))

    def _gated(self, first: StepOutput, third: StepOutput | None, inner: int, fusion: int) -> StepOutput:
        gate, linear = first, third
        if fusion == _INTERLEAVED:
            gate, linear = self.sliced(first, 0, 2 * inner, 2), self.sliced(first, 1, 2 * inner, 2)
        elif fusion == _HALVES:
            gate, linear = self.sliced(first, 0, inner, 1), self.sliced(first, inner, 2 * inner, 1)
        assert linear is not None
        limit = self.real("swiglu_limit", math.inf)
        if math.isfinite(limit):
            gate = self.step("Min", gate, number(limit))
            linear = self.step("Max", self.step("Min", linear, number(limit)), number(-limit))
        alpha, beta = self.real("activation_alpha", 1.0), self.real("activation_beta", 0.0)
        bent = self.step("Sigmoid", gate if alpha == 1.0 else self.step("Mul", gate, number(alpha)))
        moved = linear if beta == 0.0 else self.step("Add", linear, number(beta))
        return self.step("Mul", self.step("Mul", gate, bent), moved)

    def sliced(self, row: Operand, first: int, last: int, stride: int) -> StepOutput:
        """Features ``first`` to before ``last`` of a row, each ``stride``-th."""
        starts, ends, strides = (_constant(np.array([item], np.int64)) for item in (first, last, stride))
        return self.step(
            "Slice", row, starts, ends, None, strides, reads=(None, starts, ends, None, strides), axes=(-1,)
        )

    def _widened(self, row: StepOutput) -> StepOutput:
        return row if self.dtype == _FLOAT else self.cast(row, _FLOAT)

    def _narrowed(self, row: StepOutput) -> StepOutput:
        return row if self.dtype == _FLOAT else self.cast(row, self.dtype)

    def cast(self, value: Operand, dtype: ir.DataType, *, per_row: bool = True) -> StepOutput:
        """``value`` as another type."""
        return self.step("Cast", value, dtype=dtype, attributes=[ir.AttrInt64("to", int(dtype))], per_row=per_row)

    def step(
        self,
        op_type: str,
        *operands: Operand,
        dtype: ir.DataType = _FLOAT,
        reads: Sequence[ir.Value | None] = (),
        attributes: Sequence[ir.Attr] = (),
        axes: tuple[int, ...] = (),
        per_row: bool = True,
        domain: str = "",
    ) -> StepOutput:
        """One more step; its node is of no graph and reads constants only."""
        node = ir.Node(domain, op_type, reads, attributes, num_outputs=1)
        node.outputs[0].type = ir.TensorType(dtype)
        self.steps.append(ExpertStep(node, operands, per_row=per_row, axes=axes))
        return StepOutput(len(self.steps) - 1)

    # ---- what the operator is made of -------------------------------------------------------------------------------

    def optional(self, place: int) -> ir.Value | None:
        """An operand, where it is given."""
        inputs = self.node.inputs
        return inputs[place] if place < len(inputs) else None

    def operand(self, place: int, what: str) -> ir.Value:
        """An operand that must be given."""
        value = self.optional(place)
        if value is None:
            raise UnreadableError(f"its {what} are not given")
        return value

    def tensor(
        self, place: int, experts: int, shape: tuple[int, ...], stored: tuple[int, ...] | None = None
    ) -> ExpertTensor:
        """The parameter of operand ``place``: of each expert ``shape``, as it is stored or (``stored``) read anew."""
        value = self.operand(place, f"parameters of input {place}")
        found = self.shapes.shape(value)
        whole = (experts, *(shape if stored is None else stored))
        if found != whole:
            text = "unknown" if found is None else f"[{', '.join(map(str, found))}]"
            wanted = ", ".join(map(str, whole))
            raise UnreadableError(f"the sizes of {value.name!r} are {text}, not [{wanted}]")
        return ExpertTensor((value,), True, shape)

    def integer(self, name: str, default: int) -> int:
        """An attribute."""
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_int()

    def real(self, name: str, default: float) -> float:
        """An attribute."""
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_float()

    def text(self, name: str, default: str) -> str:
        """An attribute."""
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_string()

    def _attribute(self, name: str) -> ir.Attr | None:
        attribute = self.node.attributes.get(name)
        if attribute is not None and attribute.is_ref():
            raise UnreadableError(f"attribute {name!r} of {label(self.node)} is one of the function around it")
        return attribute


def number(value: float) -> ir.Value:
    """A float32 of no graph."""
    return _constant(np.asarray(value, np.float32))


def _constant(array: np.ndarray) -> ir.Value:
    """A constant of no graph."""
    tensor = ir.tensor(array)
    value = ir.Node("", "Constant", (), [ir.AttrTensor("value", tensor)], num_outputs=1).outputs[0]
    value.type, value.shape = ir.TensorType(tensor.dtype), tensor.shape  # type: ignore[assignment]
    return value


def _declared(name: str, dtype: ir.DataType, shape: tuple[int | None, ...]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
