"""What the body of an expert block says: which steps need an expert's parameters, and what can follow the choice.

All row numbers are those of a *sorted row*: one for each (token, choice).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.patterns.experts.sites import ROUTE_WEIGHT, ExpertStep, ExpertTensor, RowInput, StepOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.sites import ExpertSite, Operand

__all__ = ["Program", "tensors_of"]

_ROW_RANK = 2
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})


@dataclasses.dataclass(frozen=True)
class Program:
    """The body of a site, divided.

    Attributes:
        steps: all steps.
        core: number of steps before the tail.
        experts: E.
        shapes: of the model.

    The steps from ``core`` on are the *tail*: they read neither parameters of experts nor the token, only the one
    result before them, the route weight and constants. So they can run on the results of all experts at once.
    """

    steps: tuple[ExpertStep, ...]
    core: int
    experts: int
    shapes: ShapeView

    @classmethod
    def of(cls, site: ExpertSite, shapes: ShapeView) -> Program:
        """The program of ``site``."""
        steps = site.body
        core = len(steps)
        while core > 1 and _is_tail(steps, core - 1):
            core -= 1
        return cls(steps, core, site.experts, shapes)

    @property
    def result(self) -> int:
        """The step whose result the tail begins with."""
        return self.core - 1

    @property
    def core_needs_weight(self) -> bool:
        """Whether a step before the tail reads the route weight."""
        return any(ROUTE_WEIGHT in step.operands for step in self.steps[: self.core])

    def is_per_expert(self, number: int) -> bool:
        """Whether a step reads something of which each expert has its own."""
        return any(self.is_parameter(operand) for operand in self.steps[number].operands)

    def is_parameter(self, operand: Operand) -> bool:
        """Whether each expert has its own ``operand``, whatever the row."""
        if isinstance(operand, StepOutput):
            return not self.steps[operand.step].per_row
        return isinstance(operand, ExpertTensor)

    def is_row(self, operand: Operand) -> bool:
        """Whether ``operand`` differs from row to row."""
        if isinstance(operand, StepOutput):
            return self.steps[operand.step].per_row
        return isinstance(operand, RowInput)

    def rank(self, operand: Operand) -> int | None:
        """Number of axes of one expert's part of ``operand``; of rows: 2; None where it is not known."""
        if isinstance(operand, ExpertTensor):
            return len(operand.shape)
        if operand is None or isinstance(operand, RowInput):
            return _ROW_RANK
        if isinstance(operand, ir.Value):
            return self.shapes.rank(operand)
        step = self.steps[operand.step]
        if step.per_row:
            return _ROW_RANK
        ranks = [self.rank(item) for item in step.operands if item is not None]
        kind = step.node.op_type
        if kind in ("Unsqueeze", "Squeeze") and ranks[0] is not None:
            return ranks[0] + (len(step.axes) if kind == "Unsqueeze" else -len(step.axes))
        if kind in _ELEMENTWISE:
            return None if None in ranks else max(rank for rank in ranks if rank is not None)
        return ranks[0]

    def dtype(self, number: int, rows: Mapping[RowInput, ir.DataType | None]) -> ir.DataType | None:
        """The element type that step ``number`` gives; None where it is not known.

        Args:
            number: which step.
            rows: the types of what rows start from.
        """
        step = self.steps[number]
        known = self.shapes.dtype(step.node.outputs[step.output])
        if known is not None or step.node.graph is not None:
            return known
        # A product that stands for a part of the exporter's node: it has the type of its operands.
        for item in step.operands:
            if isinstance(item, StepOutput):
                known = self.dtype(item.step, rows)
            elif isinstance(item, RowInput):
                known = rows[item]
            elif item is not None:
                known = self.shapes.dtype(item.values[0] if isinstance(item, ExpertTensor) else item)
            if known is not None:
                return known
        return None

    def vector(self, number: int) -> ExpertTensor | None:
        """The parameter of an element-wise step that is one row or number for each expert; None for other steps.

        Such a step needs no loop over experts: the row that belongs to the expert of each row is looked up.
        """
        step = self.steps[number]
        found = [item for item in step.operands if isinstance(item, ExpertTensor)]
        others = [item for item in step.operands if self.is_parameter(item) and not isinstance(item, ExpertTensor)]
        if not step.per_row or step.node.domain or step.node.op_type not in _ELEMENTWISE or others or len(found) != 1:
            return None
        tensor = found[0]
        return tensor if all(size == 1 for size in tensor.shape[:-1]) else None


def tensors_of(site: ExpertSite) -> list[ExpertTensor]:
    """The parameters that the body of ``site`` reads, each once, in order of first use."""
    found = [item for step in site.body for item in step.operands if isinstance(item, ExpertTensor)]
    return list(dict.fromkeys(found))


def _is_tail(steps: tuple[ExpertStep, ...], number: int) -> bool:
    """Whether step ``number``, all later ones being tail, reads only the result before it, weights and constants."""
    step = steps[number]
    before = StepOutput(number - 1)
    if not step.per_row or not steps[number - 1].per_row or before not in step.operands:
        return False
    if any(isinstance(item, ExpertTensor) or item is RowInput.TOKEN for item in step.operands):
        return False
    if any(isinstance(item, StepOutput) and item != before for item in step.operands):
        return False
    return not any(before in later.operands for later in steps[number + 1 :])
