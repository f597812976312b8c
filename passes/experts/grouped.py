"""``grouped``: each expert multiplies its own rows, with a weight of its own.

Rows are sorted by expert once. A step that needs a matrix of the expert is written E times, on the rows of each; all
other steps run once on all rows, and vectors of the experts (biases, scales) are looked up for each row. So a gated
block is two or three nodes an expert, which is what counts when one token is decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.passes.experts.parameters import one_expert, vectors, why_not
from graphsurgery.passes.experts.program import tensors_of
from graphsurgery.passes.experts.steps import StepWriter
from graphsurgery.passes.experts.unpacking import why_not_picked
from graphsurgery.patterns.experts.sites import ExpertTensor, RowInput, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.passes.experts.program import Program
    from graphsurgery.passes.experts.routing import BlockSource, Sorted
    from graphsurgery.patterns.experts.sites import ExpertSite, Operand

__all__ = ["why_not_grouped", "write_grouped"]

_INT64 = ir.DataType.INT64


def why_not_grouped(site: ExpertSite, program: Program) -> str | None:
    """Why an expert's own weights cannot be had, in words."""
    for tensor in tensors_of(site):
        if not tensor.stacked:
            continue
        reason = why_not(one_expert(tensor, site.experts - 1), site.home)
        if reason is not None and not _looked_up(program, tensor, site.home):
            return f"the weights of one expert cannot be viewed: {reason}"
        if reason is not None and (picked := why_not_picked(program)) is not None:
            return picked
    return None


def write_grouped(source: BlockSource) -> ir.Value:
    """Write the site; returns its output."""
    order = source.sorted()
    results = _Grouped(source, order).run()
    return source.summed(results, order.place)


def _looked_up(program: Program, tensor: ExpertTensor, home: Body | None) -> bool:
    """Whether ``tensor`` is a vector that is looked up for each row wherever it is read."""
    readers = [number for number, step in enumerate(program.steps) if tensor in step.operands]
    return all(program.vector(number) == tensor for number in readers) and _can_look_up(tensor, program.experts, home)


def _can_look_up(tensor: ExpertTensor, experts: int, home: Body | None) -> bool:
    return why_not(vectors(tensor, experts), home) is None


class _Grouped:
    """The core, step by step: a result is on all rows, or in one part for each expert."""

    def __init__(self, source: BlockSource, order: Sorted) -> None:
        self.source = source
        self.rewrite = source.rewrite
        self.program = source.program
        self.site = source.site
        self.order = order
        self.whole: dict[Operand, ir.Value] = {}
        self.parts: dict[Operand, list[ir.Value]] = {}
        self._edges: list[ir.Value] = []
        self._expert_of_row: ir.Value | None = None
        rows = source.rows_of(order.flat, spare=False)
        for kind, value in rows.items():
            assert isinstance(kind, RowInput)
            self.whole[kind] = value
        self.together = StepWriter(self.rewrite, self.program, 0, self._looked_up)
        self.experts = [
            StepWriter(self.rewrite, self.program, 0, self._own(number), f"experts.{number}/")
            for number in range(self.site.experts)
        ]

    def run(self) -> ir.Value:
        for number in range(self.program.core):
            step = self.program.steps[number]
            vector = self.program.vector(number)
            if not step.per_row or (
                self.program.is_per_expert(number)
                and (vector is None or not _can_look_up(vector, self.site.experts, self.site.home))
            ):
                self._each(number)
            else:
                self._all(number)
        return self._on_all_rows(StepOutput(self.program.result))

    def _each(self, number: int) -> None:
        """One node for each expert."""
        if self.experts[0].transposed_by_product(number):
            return
        step = self.program.steps[number]
        if not any(self.program.is_parameter(item) or self.program.is_row(item) for item in step.operands):
            self.whole[StepOutput(number)] = self.together.step(number, {}, {})
            return
        for item in step.operands:
            if self.program.is_row(item):
                self._by_expert(item)
        read = [(item, self.parts[item]) for item in self._read(number) if item in self.parts]
        results = []
        for expert, writer in enumerate(self.experts):
            rows = {item: values[expert] for item, values in read if isinstance(item, RowInput)}
            done = {item.step: values[expert] for item, values in read if isinstance(item, StepOutput)}
            results.append(writer.step(number, rows, done))
        self.parts[StepOutput(number)] = results

    def _read(self, number: int) -> list[Operand]:
        """What a step reads, with what is behind a transposition that its product makes itself."""
        operands = list(self.program.steps[number].operands)
        for item in self.program.steps[number].operands:
            if isinstance(item, StepOutput) and self.experts[0].transposed_by_product(item.step):
                operands += self.program.steps[item.step].operands
        return operands

    def _all(self, number: int) -> None:
        """One node for all rows."""
        step = self.program.steps[number]
        for item in step.operands:
            if self.program.is_row(item):
                self._on_all_rows(item)
        rows = {kind: self.whole[kind] for kind in RowInput if kind in self.whole}
        done = {item.step: value for item, value in self.whole.items() if isinstance(item, StepOutput)}
        self.whole[StepOutput(number)] = self.together.step(number, rows, done)

    def _on_all_rows(self, operand: Operand) -> ir.Value:
        if operand not in self.whole:
            parts = self.parts[operand]
            name = f"rows_of_experts_{operand.step}" if isinstance(operand, StepOutput) else "rows_of_experts"
            self.whole[operand] = self.rewrite.emit("Concat", parts, {"axis": 0}, name=name, dtype=parts[0].dtype)
        return self.whole[operand]

    def _by_expert(self, operand: Operand) -> None:
        if operand in self.parts:
            return
        value = self.whole[operand]
        name = f"rows_{operand.step}" if isinstance(operand, StepOutput) else f"{operand.value}_rows"  # type: ignore[union-attr]
        names = [f"experts.{number}/{name}" for number in range(self.site.experts)]
        if self.rewrite.opset >= 13:
            parts = self.rewrite.emit_parts("Split", [value, self.order.counts], {"axis": 0}, names)
        else:
            parts = [self._cut(value, number, text) for number, text in enumerate(names)]
        self.parts[operand] = parts

    def _cut(self, value: ir.Value, number: int, name: str) -> ir.Value:
        """Before opset 13 a Split has fixed sizes."""
        if not self._edges:
            ends = self.source.emit("CumSum", [self.order.counts, self.rewrite.constant(0, "axis")], name="ends")
            self._edges = [self.rewrite.constant([0], "first")]
            self._edges += [self.source.part(ends, place, place + 1, "end") for place in range(self.site.experts)]
        axis = self.rewrite.constant([0], "axis")
        bounds = [self._edges[number], self._edges[number + 1], axis]
        return self.rewrite.emit("Slice", [value, *bounds], name=name, dtype=value.dtype)

    # ---- parameters -----------------------------------------------------------------------------------------------

    def _own(self, expert: int) -> Callable[[ExpertTensor], ir.Value]:
        def get(tensor: ExpertTensor) -> ir.Value:
            name = tensor.values[0 if tensor.stacked else expert].name or "weight"
            return self.source.parameters.get(one_expert(tensor, expert), f"experts.{expert}/{_last(name)}")

        return get

    def _looked_up(self, tensor: ExpertTensor) -> ir.Value:
        """The vector of each row's expert, ``[T*K, F]``."""
        name = _last(tensor.values[0].name or "vector")
        table = self.source.parameters.get(vectors(tensor, self.site.experts), f"{name}_of_experts")
        if self._expert_of_row is None:
            self._expert_of_row = self.rewrite.emit(
                "Gather", [self.source.experts(), self.order.flat], {"axis": 0}, name="expert_of_row", dtype=_INT64
            )
        dtype = self.source.shapes.dtype(tensor.values[0])
        return self.rewrite.emit(
            "Gather", [table, self._expert_of_row], {"axis": 0}, name=f"{name}_of_rows", dtype=dtype
        )


def _last(name: str) -> str:
    return name.replace("/", ".")
