"""A shape walk under sizes that are given: declared names become numbers, and small arithmetic is computed outright."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphsurgery.analysis._facts import ShapeValue, static_shape
from graphsurgery.analysis._frame import INTEGERS, Frame, Session
from graphsurgery.analysis.arithmetic import MAX_COMPUTED, compute, is_computed
from graphsurgery.analysis.constants import constant_of
from graphsurgery.analysis.dims import free_names, substitute

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphsurgery.analysis._facts import Facts
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes

__all__ = ["BoundFrame", "bound_frame"]


class _BoundSession(Session):
    """A walk in which some declared names are numbers."""

    def __init__(self, model: ir.Model, numbers: Mapping[str, int]) -> None:
        super().__init__(model)
        self._numbers = numbers

    def size(self, text: str) -> Dim | None:
        """See :meth:`Session.size`."""
        parsed = super().size(text)
        return None if parsed is None else substitute(parsed, self._numbers)


class BoundFrame(Frame):
    """Facts under sizes that are given; a function body is walked in a frame of the same kind."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._computed: dict[ir.Value, np.ndarray[Any, Any]] = {}

    def _record(self, node: ir.Node, found: Facts) -> bool:
        inferred = super()._record(node, found)
        if len(node.outputs) == 1 and is_computed(node):
            self._compute(node)
        return inferred

    def _compute(self, node: ir.Node) -> None:
        output = node.outputs[0]
        fact = self.facts[output]
        shape = static_shape(fact.shape)
        if fact.value is not None or shape is None or prod(shape) > MAX_COMPUTED:
            return
        inputs = [None if value is None else self._array(value) for value in node.inputs]
        known = [array for array in inputs if array is not None]
        result = compute(node, known, self._resolved(node.attributes)) if len(known) == len(inputs) else None
        if result is None or result.shape != shape:
            return
        if result.dtype.kind in "iub":
            self.facts[output] = fact._replace(value=ShapeValue.of_array(result))
        else:
            self._computed[output] = result

    def _array(self, value: ir.Value) -> np.ndarray[Any, Any] | None:
        """What ``value`` holds, where that is known and small."""
        if value in self._computed:
            return self._computed[value]
        fact = self.fact(value)
        numbers = None if fact.value is None else fact.value.ints()
        if fact.value is not None and numbers is not None and fact.dtype is not None:
            if fact.dtype not in INTEGERS:
                return np.array(numbers, fact.dtype.numpy()).reshape(fact.value.shape)
            limits = np.iinfo(fact.dtype.numpy()) if fact.dtype.numpy().kind in "iu" else None
            if limits is not None and not all(limits.min <= number <= limits.max for number in numbers):
                return None
            return np.array(numbers, fact.dtype.numpy()).reshape(fact.value.shape)
        array = constant_of(value, overridable=self.session.overridable)
        return array if array is not None and array.size <= MAX_COMPUTED else None


def bound_frame(model: ir.Model, shapes: Shapes, numbers: Mapping[str, int]) -> BoundFrame:
    """The walk of ``model`` when the sizes called ``numbers`` have these numbers.

    Args:
        model: the model; it is not changed.
        shapes: its shapes as it is.
        numbers: number of each symbolic size; one without a name is called as ``shapes`` calls it (``?7``).
    """
    frame = BoundFrame(_BoundSession(model, numbers), model.opset_imports, None)
    renamed: dict[str, Dim] = dict(numbers)
    for value in model.graph.inputs:
        fact = frame.fact(value)
        shape = shapes.shape(value)
        unnamed = {name for size in shape or () for name in free_names(size) if name.startswith("?")}
        if shape is None or fact.shape is None or not unnamed:
            continue
        # Sizes that the file does not name: this walk has its own unknowns for those that stay open.
        for name in sorted(unnamed - set(renamed)):
            renamed[name] = frame.fresh()
        frame.facts[value] = fact._replace(shape=tuple(substitute(size, renamed) for size in shape))
    frame.walk(model.graph)
    return frame
