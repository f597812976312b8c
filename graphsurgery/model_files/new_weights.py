"""Where the weights that surgery makes come to lie: in the protobuf, or in a new data file.

A weight whose bytes have to be laid out anew from a data file goes into the new one. One that is made of weights inside
the .onnx stays inside as long as nothing is stored twice: as soon as one byte is needed in two places (the source is
still used, or two new weights share a part of it), the source moves to the new data file, once, and views of it are
references.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.errors import InternalError
from graphsurgery.weights.bytewise import bytewise
from graphsurgery.weights.expressions import Stack, Transpose, View, dtype_of, shape_of
from graphsurgery.weights.tensors import WeightTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphsurgery.model_files.survey import Survey
    from graphsurgery.weights.expressions import Part

__all__ = ["NewData", "NewRun", "Reference", "is_index", "plan_new_data"]

# Integer tensors below this are shapes and indices, which ONNX Runtime must find inline.
_INTEGER_WEIGHT_BYTES = 2**20
_INDEX_TYPES = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


@dataclasses.dataclass(frozen=True)
class NewRun:
    """Bytes ``start : start + nbytes`` of ``tensor``, which the new data file holds from ``offset`` on."""

    tensor: ir.TensorProtocol
    offset: int
    nbytes: int
    start: int = 0


@dataclasses.dataclass(frozen=True)
class Reference:
    """The initializer ``value`` is ``nbytes`` of the new data file from ``offset`` on."""

    value: ir.Value
    offset: int
    nbytes: int


@dataclasses.dataclass
class NewData:
    """A new data file: what it holds, in order, and which initializers refer to it.

    Attributes:
        runs: its contents.
        references: the initializers whose bytes are there.
        made: bytes that are laid out anew.
        moved: bytes that were inside the .onnx.
    """

    runs: list[NewRun] = dataclasses.field(default_factory=list)
    references: list[Reference] = dataclasses.field(default_factory=list)
    made: int = 0
    moved: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.runs[-1].offset + self.runs[-1].nbytes if self.runs else 0

    def append(self, tensor: ir.TensorProtocol, nbytes: int, start: int = 0) -> int:
        """Let the file hold ``nbytes`` more, from byte ``start`` of ``tensor``; where they will be."""
        offset = self.nbytes
        self.runs.append(NewRun(tensor, offset, nbytes, start))
        return offset


def is_index(dtype: ir.DataType, nbytes: int) -> bool:
    """Whether a tensor is (or may be) a shape or an index, which runtimes must find in the protobuf."""
    return dtype in _INDEX_TYPES and nbytes < _INTEGER_WEIGHT_BYTES


def plan_new_data(walked: Survey) -> NewData:
    """What has to be in a new data file for the weights that surgery made; nothing where all can stay inside."""
    plan = NewData()
    if walked.made:
        _Planner(walked, plan).run()
    return plan


class _Planner:
    def __init__(self, walked: Survey, plan: NewData) -> None:
        self._plan = plan
        self._made = [(value, _tensor(value)) for value in walked.made]
        self._holders: dict[int, list[ir.Value]] = {}
        for slot in walked.graphs:
            for value in slot.graph.initializers.values():
                if value.const_value is not None:
                    self._holders.setdefault(id(value.const_value), []).append(value)
        # Byte ranges of tensors in memory, by identity, and where they come to lie.
        self._sources: dict[int, ir.TensorProtocol] = {}
        self._views: dict[int, list[tuple[int, int]]] = {}
        self._placed: dict[int, list[tuple[int, int, int]]] = {}

    def run(self) -> None:
        used: dict[int, list[tuple[int, int]]] = {}
        for _, tensor in self._made:
            for key, ranges in self._ranges(tensor).items():
                used.setdefault(key, []).extend(ranges)
        contested = {key for key, ranges in used.items() if self._contested(key, ranges)}
        outside = [item for item in self._made if self._is_outside(item[1], contested)]
        for _, tensor in outside:
            self._lay_in_order(tensor, contested)
        for key in (key for key in self._sources if key in contested and key not in self._placed):
            self._lay_once(key)
        for value, tensor in outside:
            self._refer(value, tensor)

    def _ranges(self, tensor: WeightTensor) -> dict[int, list[tuple[int, int]]]:
        """The byte ranges of tensors in memory that ``tensor`` is made of, merged: those of one weight do not compete."""
        form = bytewise(tensor.expression)
        assert form is not None
        found: dict[int, list[tuple[int, int]]] = {}
        for view in _leaves(form.part):
            source = tensor.sources[view.source]  # type: ignore[index]
            if isinstance(source, ir.ExternalTensor):
                continue
            start = view.start * form.unit.itemsize
            found.setdefault(id(source), []).append((start, start + math.prod(view.shape) * form.unit.itemsize))
            self._sources[id(source)] = source
        merged = {key: _merge(ranges) for key, ranges in found.items()}
        if isinstance(tensor.expression, View) and not isinstance(tensor.expression.source, View | Stack | Transpose):
            for key, ranges in merged.items():
                self._views.setdefault(key, []).extend(ranges)
        return merged

    def _contested(self, key: int, ranges: list[tuple[int, int]]) -> bool:
        source = self._sources[key]
        if is_index(source.dtype, source.nbytes):
            return False
        if key in self._holders:
            return True
        ordered = sorted(ranges)
        return any(start < end for (_, end), (start, _) in itertools.pairwise(ordered))

    def _is_outside(self, tensor: WeightTensor, contested: set[int]) -> bool:
        return any(
            isinstance(source, ir.ExternalTensor) or id(source) in contested for source in tensor.sources.values()
        )

    def _lay_in_order(self, tensor: WeightTensor, contested: set[int]) -> None:
        """Where a stack is made of whole tensors that move, they move in its order, so that the stack is a view of them."""
        expression = tensor.expression
        if not isinstance(expression, Stack):
            return
        parts = [_whole_source(part) for part in expression.parts]
        sources = [tensor.sources[part] for part in parts if part is not None]
        keys = [id(source) for source in sources]
        bits = dtype_of(expression).bitwidth * math.prod(shape_of(expression)[1:])
        fits = len(keys) == len(parts) == len(set(keys)) and bits % 8 == 0
        if fits and all(key in contested and key not in self._placed and key in self._holders for key in keys):
            for key in keys:
                self._lay_once(key)

    def _lay_once(self, key: int) -> None:
        source = self._sources[key]
        held = self._holders.get(key, [])
        ranges = [(0, source.nbytes)] if held else _merge(self._views.get(key, []))
        placed = self._placed[key] = []
        for start, end in ranges:
            placed.append((start, end, self._plan.append(source, end - start, start)))
            self._plan.moved += end - start
        self._plan.references += [Reference(value, placed[0][2], source.nbytes) for value in held]

    def _refer(self, value: ir.Value, tensor: WeightTensor) -> None:
        offset = self._offset(tensor)
        if offset is None:
            offset = self._plan.append(tensor, tensor.nbytes)
            self._plan.made += tensor.nbytes
        self._plan.references.append(Reference(value, offset, tensor.nbytes))

    def _offset(self, tensor: WeightTensor) -> int | None:
        """Where the bytes of ``tensor`` already lie in one run; None where they do not."""
        expression = tensor.expression
        parts = expression.parts if isinstance(expression, Stack) else (expression,)
        each = tensor.nbytes // max(1, len(parts))
        first: int | None = None
        for number, part in enumerate(parts):
            view = part if isinstance(part, View) else View(part, 0, shape_of(part))
            source = view.source
            if isinstance(source, View | Stack | Transpose) or isinstance(part, Transpose):
                return None
            start = view.start * dtype_of(view).bitwidth // 8
            ranges = self._placed.get(id(tensor.sources[source]), [])
            found = next((to + start - low for low, high, to in ranges if low <= start and start + each <= high), None)
            if found is None or (first is not None and found != first + number * each):
                return None
            first = found if first is None else first
        return first


def _tensor(value: ir.Value) -> WeightTensor:
    tensor = value.const_value
    if not isinstance(tensor, WeightTensor):
        raise InternalError(f"initializer {value.name!r} is not a weight that surgery made.")
    return tensor


def _whole_source(part: Part) -> ir.Value | None:
    """The source that ``part`` is, all of it in its order."""
    if isinstance(part, View) and part.start == 0 and isinstance(part.source, ir.Value):
        return part.source if math.prod(part.shape) == math.prod(shape_of(part.source)) else None
    return part if isinstance(part, ir.Value) else None


def _leaves(part: Part) -> Iterable[View]:
    """The views of sources in a bytewise expression; a view of anything else is taken to need all of that."""
    if isinstance(part, Stack):
        for item in part.parts:
            yield from _leaves(item)
    elif isinstance(part, Transpose):
        yield from _leaves(part.part)
    elif isinstance(part, View):
        if isinstance(part.source, View | Stack | Transpose):
            yield from _leaves(part.source)
        else:
            yield part


def _merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
