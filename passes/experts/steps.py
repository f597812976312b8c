"""Replaying the steps of an expert's body, for one expert or for several side by side.

With ``lead`` 0 rows are ``[N, F]`` and a parameter is one expert's part. With ``lead`` n rows are ``[*lead, C, F]`` and
parameters ``[*lead, *part]``: each of the leading positions has an expert and rows of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.analysis.constants import constant_of
from graphsurgery.editing.versioned_ops import squeeze, unsqueeze
from graphsurgery.passes.experts.unpacking import times_unpacked, why_not_unpacked
from graphsurgery.patterns.experts.sites import ExpertStep, ExpertTensor, RowInput, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.passes.experts.program import Program
    from graphsurgery.patterns.experts.sites import Operand
    from graphsurgery.rewrite import Rewrite

__all__ = ["StepWriter", "why_not_batched", "why_not_replayed"]

_AXIS = frozenset({
    "ArgMax", "ArgMin", "Concat", "Gather", "GatherElements", "Hardmax", "LayerNormalization", "LogSoftmax",
    "LpNormalization", "RMSNormalization", "Softmax", "Split",
})  # fmt: skip
"""Operators with one axis, an attribute."""
_AXES = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare", "Slice", "Squeeze", "Unsqueeze",
})  # fmt: skip
"""Operators with several axes, an attribute or an operand as the opset has it."""
_SPREADING = frozenset({
    "Add", "And", "BitwiseAnd", "BitwiseOr", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max",
    "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
"""Operators whose operands are broadcast against each other."""
_ONE_TO_ONE = frozenset({
    "Abs", "Cast", "CastLike", "Celu", "Ceil", "Clip", "Cos", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu",
    "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal",
    "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
    "ThresholdedRelu",
})  # fmt: skip
_VENDOR_ONE_TO_ONE = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu"})
_PRODUCTS = frozenset({"FusedMatMul", "Gemm", "MatMul"})
_SMALL = 8


def why_not_replayed(program: Program) -> str | None:
    """The first step that cannot be replayed at all, in words; None where all can."""
    for step in program.steps:
        node = step.node
        if step.axes and node.op_type in _AXES and not node.domain and _named_axes(step, program.shapes) is None:
            return f"the axes of node {node.name!r} ({node.op_type}) are not known"
        if step.per_row and node.op_type.startswith("Reduce") and not _keeps(node):
            return f"node {node.name!r} ({node.op_type}) takes the last axis of its rows away"
    return None


def why_not_batched(program: Program) -> str | None:
    """The first step that cannot be replayed for several experts side by side, in words; None where all can."""
    for step in program.steps:
        if not any(program.is_parameter(item) or program.is_row(item) for item in step.operands):
            continue
        node = step.node
        if not _batches(program, step):
            why = why_not_unpacked(step) if node.op_type == "MatMulNBits" else None
            who = f"node {node.name!r} ({node.op_type})" if node.graph is not None else "its product in few bits"
            return f"{who} works on the weights of one expert at a time" + (f": {why}" if why else "")
    return None


def _batches(program: Program, step: ExpertStep) -> bool:
    node = step.node
    if node.domain == "com.microsoft" and node.op_type == "MatMulNBits":
        return why_not_unpacked(step) is None
    if node.domain:
        known = node.op_type in _VENDOR_ONE_TO_ONE or (node.op_type == "FusedMatMul" and step.per_row)
        return (
            known
            and node.domain == "com.microsoft"
            and not (
                node.op_type in ("BiasGelu", "FastGelu") and any(program.is_parameter(item) for item in step.operands)
            )
        )
    if node.op_type in ("LayerNormalization", "RMSNormalization"):
        # Scale and bias are broadcast to the rows in one direction: an experts' axis in front does not fit.
        return not any(program.is_parameter(item) for item in step.operands[1:])
    if node.op_type == "Gemm":
        return not _integer(node, "transA")
    if node.op_type == "DequantizeLinear":
        return program.rank(step.operands[1]) is not None
    if node.op_type in _SPREADING:
        return all(program.rank(item) is not None for item in step.operands)
    return node.op_type in _AXIS | _AXES | _ONE_TO_ONE | {"MatMul", "Transpose"}


class StepWriter:
    """Replays steps of one site in one layout.

    Args:
        rewrite: where nodes are inserted.
        program: the body.
        lead: number of leading axes, see the module.
        parameter: gives the value of a parameter in this layout.
        prefix: of the names of what is inserted.
    """

    def __init__(
        self,
        rewrite: Rewrite,
        program: Program,
        lead: int,
        parameter: Callable[[ExpertTensor], ir.Value],
        prefix: str = "",
    ) -> None:
        self.rewrite = rewrite
        self.program = program
        self.lead = lead
        self.parameter = parameter
        self.prefix = prefix
        self._replayed: dict[tuple[ir.Node, tuple[ir.Value | None, ...]], list[ir.Value]] = {}

    def run(
        self, numbers: Iterable[int], rows: Mapping[RowInput, ir.Value], done: dict[int, ir.Value]
    ) -> dict[int, ir.Value]:
        """Replay the steps ``numbers``; results go into ``done``, which holds those of earlier steps."""
        for number in numbers:
            if not self.transposed_by_product(number):
                done[number] = self.step(number, rows, done)
        return done

    def step(self, number: int, rows: Mapping[RowInput, ir.Value], done: Mapping[int, ir.Value]) -> ir.Value:
        """Replay one step."""
        step = self.program.steps[number]
        values = [self._value(item, rows, done) for item in step.operands]
        name = f"{self.prefix}{step.node.op_type.lower()}_{number}"
        kind = step.node.op_type if not step.node.domain else ""
        if kind in _SPREADING or (self.lead and step.node.op_type in _VENDOR_ONE_TO_ONE):
            values = self._aligned(step, values)
        if kind == "MatMul" and self.program.is_parameter(step.operands[0]):
            return self._times_column(step, values[0], values[1], name)
        if kind == "MatMul" and len(step.operands) > 1:
            untransposed = self._untransposed(step, rows, done)
            if untransposed is not None:
                return self._times_column(step, untransposed, values[0], name)
        if self.lead and kind == "Gemm":
            return self._batched_gemm(step, values, name)
        if self.lead and step.node.op_type == "MatMulNBits":
            return times_unpacked(self.rewrite, step, values, name, self.lead, self.program.is_parameter)
        if self.lead and kind == "DequantizeLinear" and not _integer(step.node, "block_size"):
            return self._dequantised(step, values, name)
        overrides = self._overrides(step)
        values = self._axes_operand(step, self._known_bounds(step, values))
        key = (step.node, tuple(values))
        if key not in self._replayed:
            dtypes = [self.program.shapes.dtype(output) for output in step.node.outputs]
            self._replayed[key] = self.rewrite.replay(step.node, values, name=name, overrides=overrides, dtypes=dtypes)
        return self._replayed[key][step.output]

    # ---- operands -------------------------------------------------------------------------------------------------

    def _value(
        self, operand: Operand, rows: Mapping[RowInput, ir.Value], done: Mapping[int, ir.Value]
    ) -> ir.Value | None:
        if isinstance(operand, StepOutput):
            # A transpose that a Gemm makes by itself is not written.
            return done.get(operand.step)
        if isinstance(operand, RowInput):
            return rows[operand]
        if isinstance(operand, ExpertTensor):
            return self.parameter(operand)
        return operand

    def _aligned(self, step: ExpertStep, values: list[ir.Value | None]) -> list[ir.Value | None]:
        """Operands such that their last axes meet, whatever the leading ones are."""
        ranks = [self.program.rank(item) if item is not None else None for item in step.operands]
        own = [
            rank
            for item, rank in zip(step.operands, ranks, strict=True)
            if rank is not None and (self.program.is_row(item) or self.program.is_parameter(item))
        ]
        whole = 2 if step.per_row else max(own, default=0)
        aligned = []
        for item, value, rank in zip(step.operands, values, ranks, strict=True):
            lead = self.lead if self.program.is_parameter(item) else 0
            if value is not None and rank is not None and rank > whole and not self.program.is_row(item):
                # Leading axes of size 1 were harmless in the exporter's rank; here they would add some.
                axes = list(range(lead, lead + rank - whole))
                value = squeeze(self.rewrite, value, axes, name=f"{self.prefix}fewer_axes")
            elif value is not None and lead and rank is not None and rank < whole:
                axes = list(range(lead, lead + whole - rank))
                value = unsqueeze(self.rewrite, value, axes, name=f"{self.prefix}beside")
            aligned.append(value)
        return aligned

    # ---- products -------------------------------------------------------------------------------------------------

    def transposed_by_product(self, number: int) -> bool:
        """Whether step ``number`` transposes a weight that only products read, which can take it as it is."""
        step = self.program.steps[number]
        if step.per_row or step.node.op_type != "Transpose" or step.axes != (1, 0):
            return False
        operand = StepOutput(number)
        readers = [item for item in self.program.steps if operand in item.operands]
        return all(
            item.per_row
            and not item.node.domain
            and item.node.op_type == "MatMul"
            and item.operands[1] == operand
            and self.program.is_row(item.operands[0])
            for item in readers
        )

    def _untransposed(
        self, step: ExpertStep, rows: Mapping[RowInput, ir.Value], done: Mapping[int, ir.Value]
    ) -> ir.Value | None:
        operand = step.operands[1]
        if not isinstance(operand, StepOutput) or not self.transposed_by_product(operand.step):
            return None
        return self._value(self.program.steps[operand.step].operands[0], rows, done)

    def _times_column(self, step: ExpertStep, weight: ir.Value | None, rows: ir.Value | None, name: str) -> ir.Value:
        """Rows times the transposed part ``[O, I]``, without a copy of the part that is transposed.

        Gemm transposes what it reads as it goes. It has no batch: there the rows, which are fewer, become columns.
        """
        dtype = self.program.shapes.dtype(step.node.outputs[0])
        emit = self.rewrite.emit
        if not self.lead:
            return emit("Gemm", [rows, weight], {"transB": 1}, name=name, dtype=dtype)
        perm = [*range(self.lead), self.lead + 1, self.lead]
        columns = emit("Transpose", [rows], {"perm": perm}, name=f"{name}_columns", dtype=dtype)
        product = emit("MatMul", [weight, columns], name=f"{name}_product", dtype=dtype)
        return emit("Transpose", [product], {"perm": perm}, name=name, dtype=dtype)

    def _batched_gemm(self, step: ExpertStep, values: list[ir.Value | None], name: str) -> ir.Value:
        """``alpha * rows @ weight + beta * bias``: Gemm has no batch."""
        node, emit = step.node, self.rewrite.emit
        dtype = self.program.shapes.dtype(node.outputs[0])
        rows, weight = values[0], values[1]
        if _integer(node, "transB"):
            rank = self.lead + 2 if self.program.is_parameter(step.operands[1]) else 2
            perm = [*range(rank - 2), rank - 1, rank - 2]
            weight = emit("Transpose", [weight], {"perm": perm}, name=f"{name}_weight", dtype=dtype)
        out = emit("MatMul", [rows, weight], name=name, dtype=dtype)
        out = self._times(out, _float(node, "alpha"), dtype, name)
        bias = values[2] if len(values) > 2 else None
        if bias is None:
            return out
        operand = step.operands[2]
        rank = self.program.rank(operand) or 0
        if self.program.is_parameter(operand) and rank < 2:
            axes = list(range(self.lead, self.lead + 2 - rank))
            bias = unsqueeze(self.rewrite, bias, axes, name=f"{name}_bias")
        return emit("Add", [out, self._times(bias, _float(node, "beta"), dtype, name)], name=f"{name}_sum", dtype=dtype)

    def _times(self, value: ir.Value, factor: float, dtype: ir.DataType | None, name: str) -> ir.Value:
        if factor == 1.0 or dtype is None:
            return value
        number = self.rewrite.constant(np.asarray(factor, dtype.numpy()), "factor")
        return self.rewrite.emit("Mul", [value, number], name=f"{name}_scaled", dtype=dtype)

    # ---- weights in fewer bits ------------------------------------------------------------------------------------

    def _dequantised(self, step: ExpertStep, values: list[ir.Value | None], name: str) -> ir.Value:
        """``(x - zero_point) * scale`` written out: the operator has one axis of scales, here experts are another."""
        emit = self.rewrite.emit
        dtype = self.program.shapes.dtype(step.node.outputs[0])
        assert dtype is not None
        whole = self.program.rank(step.operands[0]) or 0
        axis = step.axes[0] + (whole if step.axes[0] < 0 else 0) if step.axes else 1
        number = emit("Cast", [values[0]], {"to": int(dtype)}, name=f"{name}_number", dtype=dtype)
        if len(values) > 2 and values[2] is not None:
            zero = emit("Cast", [values[2]], {"to": int(dtype)}, name=f"{name}_zero_number", dtype=dtype)
            zero = self._along(step.operands[2], zero, axis, whole, name)
            number = emit("Sub", [number, zero], name=f"{name}_centred", dtype=dtype)
        assert values[1] is not None
        scale = self._along(step.operands[1], values[1], axis, whole, name)
        return emit("Mul", [number, scale], name=name, dtype=dtype)

    def _along(self, operand: Operand, value: ir.Value, axis: int, whole: int, name: str) -> ir.Value:
        """A scale or zero point, one for each position of ``axis`` or one in all, laid along the weight."""
        rank = self.program.rank(operand) or 0
        lead = self.lead if self.program.is_parameter(operand) else 0
        if rank > 1 or (rank == 0 and not lead):
            return value
        places = [place for place in range(whole) if rank == 0 or place != axis]
        return unsqueeze(self.rewrite, value, [lead + place for place in places], name=f"{name}_along")

    # ---- axes -----------------------------------------------------------------------------------------------------

    def _overrides(self, step: ExpertStep) -> dict[str, object]:
        node, kind = step.node, step.node.op_type
        if node.domain or not step.axes:
            return {}
        if kind == "Transpose":
            return {"perm": [*range(self.lead), *(self.lead + axis for axis in step.axes)]}
        if kind == "DequantizeLinear":
            # Of a weight, which may be counted from the front: there the leading axes come first.
            return {"axis": step.axes[0] + (self.lead if step.axes[0] >= 0 else 0)}
        if kind in _AXIS:
            return {"axis": step.axes[0]}
        if kind in _AXES and "axes" in node.attributes:
            return {"axes": list(step.axes)}
        return {}

    def _known_bounds(self, step: ExpertStep, values: list[ir.Value | None]) -> list[ir.Value | None]:
        """Bounds that the exporter reckons from the shape of what is cut, as the numbers that they are.

        Read as they are written they would keep the exporter's own rows alive, for the sake of their shape.
        """
        if step.node.domain or step.node.op_type not in ("Slice", "Split"):
            return values
        known = [values[0]]
        for item, value in zip(step.operands[1:], values[1:], strict=True):
            numbers = None if value is None or value is not item else _reckoned(value, self.program.shapes)
            known.append(value if numbers is None else self.rewrite.constant(numbers, "bounds"))
        return known

    def _axes_operand(self, step: ExpertStep, values: list[ir.Value | None]) -> list[ir.Value | None]:
        """Operands with the axes counted from the end, where they are an operand."""
        node, kind = step.node, step.node.op_type
        if node.domain or not step.axes or kind not in _AXES or "axes" in node.attributes:
            return values
        place = 3 if kind == "Slice" else 1
        padded = values + [None] * (place + 1 - len(values))
        padded[place] = self.rewrite.constant(list(step.axes), "axes")
        return padded


def _named_axes(step: ExpertStep, shapes: ShapeView) -> int | None:
    """How many axes the node names; None where it is not known or not what the step says."""
    node = step.node
    if "axes" in node.attributes:
        count = len(node.attributes["axes"].as_ints())
    elif node.op_type == "Slice":
        sizes = None if node.inputs[1] is None else shapes.shape(node.inputs[1])
        if not sizes or not isinstance(sizes[0], int):
            return None
        count = sizes[0]
    else:
        return len(step.axes)
    return count if count == len(step.axes) else None


def _reckoned(value: ir.Value, shapes: ShapeView) -> list[int] | None:
    """The integers of a vector that nodes compute from shapes; None for a constant, and where they are not known."""
    if constant_of(value) is not None or shapes.rank(value) != 1:
        return None
    contents = shapes.shape_value(value)
    if contents is None:
        return None
    numbers = [item for item in contents.items if isinstance(item, int)]
    return numbers if len(numbers) == len(contents.items) else None


def _keeps(node: ir.Node) -> bool:
    return _integer(node, "keepdims", 1) == 1


def _integer(node: ir.Node, name: str, default: int = 0) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _float(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None else attribute.as_float()
