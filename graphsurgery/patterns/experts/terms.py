"""What the reader of an expert block builds while it walks up: terms, and the body made of them.

A term says how a row (or a parameter) of one expert is computed: a :class:`Step` over other terms, the token's row, the
route weight, a parameter that each expert has its own, or a value that is the same for all of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.patterns.experts.sites import ExpertStep, ExpertTensor, RowInput, StepOutput

if TYPE_CHECKING:
    from graphsurgery.patterns.experts.sites import Operand

__all__ = ["Part", "Stack", "Step", "Term", "UnreadableError", "attribute_key", "body_of", "label"]


class UnreadableError(Exception):
    """An expert block that cannot be read, with the reason: a clause that names the node or value."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One node of what an expert does; ``value`` is what the exporter's graph holds for it, where it does."""

    node: ir.Node
    operands: tuple[Term, ...]
    output: int = 0
    per_row: bool = True
    axes: tuple[int, ...] = ()
    value: ir.Value | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """A parameter of all ``count`` experts; ``shape`` is one expert's part."""

    values: tuple[ir.Value, ...]
    stacked: bool
    shape: tuple[int, ...]
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One expert's part of a parameter of all experts; ``whole`` is a :class:`Stack` or a step over some."""

    whole: Term
    number: int


Term: TypeAlias = "Step | Stack | Part | RowInput | ir.Value | None"


def label(node: ir.Node) -> str:
    """How a sentence names a node."""
    return f"{node.op_type} {node.name or node.outputs[0].name!r}"


def attribute_key(node: ir.Node) -> tuple[object, ...]:
    """What two nodes that do the same have in common: operator, attributes, number of outputs."""
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR and value is not None:
            value = (value.dtype, tuple(value.shape), value.tobytes() if value.size <= 64 else id(value))
        elif isinstance(value, list):
            value = tuple(value)
        attributes.append((name, value))
    return (node.domain, node.op_type, tuple(attributes), len(node.outputs))


def body_of(term: Step) -> tuple[ExpertStep, ...]:
    """The steps below ``term`` in execution order, ``term`` last."""
    steps: list[ExpertStep] = []
    numbers: dict[Step, int] = {}
    operands: dict[Stack, ExpertTensor] = {}

    def operand(item: Term) -> Operand:
        if isinstance(item, Step):
            return StepOutput(numbers[item])
        if isinstance(item, Stack):
            return operands.setdefault(item, ExpertTensor(item.values, item.stacked, item.shape))
        if isinstance(item, Part):
            raise UnreadableError("a part of one expert is used by all of them")
        return item

    pending: list[tuple[Step, bool]] = [(term, False)]
    while pending:
        step, ready = pending.pop()
        if step in numbers:
            continue
        if not ready:
            pending.append((step, True))
            pending += [(item, False) for item in reversed(step.operands) if isinstance(item, Step)]
            continue
        numbers[step] = len(steps)
        read = tuple(operand(item) for item in step.operands)
        steps.append(ExpertStep(step.node, read, step.output, step.per_row, step.axes))
    return tuple(steps)
