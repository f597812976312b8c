"""To which slots a cache of a fixed size is written in a call: the integers that say so, as near to the inputs as they are.

Writes and what they read are looked for inside functions too, and out of them again where parameters are handed over.
Alphabet: B batch, S query length, N slots, K indexed axes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.constants import constant_of
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes, ShapeView
    from graphsurgery.patterns.kv_cache import CacheSite

__all__ = ["WrittenSlots", "written_slots"]

_LAYOUT = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "QuantizeLinear"})
_KEEPS_ELEMENTS = frozenset({"Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Cast", "Tile"})
# Inputs of the vendor's write that are positions, whether or not the model defines it as a function.
_VENDOR = {"CtxScatter": 1, "CtxScatterCB": 2}
_FAR = 2**31 - 1
"""What padding is sent to, so that it is not written."""
_MAX_STEPS = 48

_Place: TypeAlias = tuple[ir.Value, tuple[ir.Node, ...]]
"""A value, and the calls that lead to the body in which it is."""


@dataclasses.dataclass(frozen=True)
class WrittenSlots:
    """The slots that a call writes.

    Attributes:
        value: int32 or int64 of any shape, each element a slot (or less than 0: none); or the first slot of each row.
            It is in the main graph.
        length: 1; S, the number of slots of each row, where ``value`` holds first slots (None where S is not known).
    """

    value: ir.Value
    length: Dim | None = 1


def written_slots(cache: CacheSite, shapes: Shapes, model: ir.Model) -> WrittenSlots | None:
    """The slots that ``cache`` is written to; None where the write does not tell, or only inside a function."""
    return _Tracer(shapes, model).slots(cache)


class _Tracer:
    def __init__(self, shapes: Shapes, model: ir.Model) -> None:
        self._shapes = shapes
        self._model = model

    def slots(self, cache: CacheSite) -> WrittenSlots | None:
        place: _Place | None = (cache.output, ())
        for _ in range(_MAX_STEPS):
            place = self._settled(place)
            node = place[0].producer() if place is not None else None
            if place is None or node is None:
                return None
            if node.domain or node.op_type not in _LAYOUT:
                return self._of_write(node, place[1])
            place = self._input(node, 0, place[1])
        return None

    def _of_write(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> WrittenSlots | None:
        if node.op_type in _VENDOR:
            return self._plain(self._input(node, _VENDOR[node.op_type], calls))
        if is_op(node, "ScatterElements", "Scatter"):
            return self._plain(self._input(node, 1, calls))
        if is_op(node, "ScatterND"):
            return self._plain(self._last_component(self._input(node, 1, calls)))
        if is_op(node, "TensorScatter"):
            return self._tensor_scatter(node, calls)
        return None

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _input(self, node: ir.Node, position: int, calls: tuple[ir.Node, ...]) -> _Place | None:
        value = node.inputs[position] if position < len(node.inputs) else None
        return None if value is None else (value, calls)

    def _settled(self, place: _Place | None) -> _Place | None:
        """Where ``place`` is really made: inside called functions, or by the caller of the one that it is in."""
        for _ in range(_MAX_STEPS):
            if place is None:
                return None
            value, calls = place
            node = value.producer()
            if node is None and calls and not value.is_initializer():
                formals = self._model.functions[calls[-1].op_identifier()].inputs
                position = next((number for number, item in enumerate(formals) if item is value), None)
                place = None if position is None else self._input(calls[-1], position, calls[:-1])
                continue
            function = self._model.functions.get(node.op_identifier()) if node is not None else None
            if node is None or function is None or node.op_type in _VENDOR:
                return place
            place = (function.outputs[value.index() or 0], (*calls, node))
        return None

    def _view(self, calls: tuple[ir.Node, ...]) -> ShapeView | None:
        view: ShapeView = self._shapes
        try:
            for call in calls:
                view = view.in_call(call)
        except ValueError:
            return None
        return view

    # ---- what is written to ---------------------------------------------------------------------------------------

    def _tensor_scatter(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> WrittenSlots | None:
        first = self._settled(self._input(node, 2, calls))
        mode = node.attributes.get("mode")
        if first is None or first[1] or (mode is not None and mode.as_string() == "circular"):
            return None
        attribute = node.attributes.get("axis")
        view, updates = self._view(calls), node.inputs[1]
        if view is None or updates is None:
            return None
        return WrittenSlots(first[0], view.dim(updates, attribute.as_int() if attribute is not None else -2))

    def _last_component(self, indices: _Place | None) -> _Place | None:
        """Of indices ``[.., K]`` that point to K axes, those to the last, which counts slots; None where mixed."""
        for _ in range(_MAX_STEPS):
            indices = self._settled(indices)
            view = self._view(indices[1]) if indices is not None else None
            if indices is None or view is None:
                return None
            value, calls = indices
            if view.dim(value, -1) == 1:
                return indices
            node = value.producer()
            if node is None or node.domain:
                return None
            if node.op_type == "Concat":
                rank = view.rank(value)
                axis = node.attributes["axis"].as_int()
                if rank is None or axis % rank != rank - 1:
                    return None
                indices = self._input(node, len(node.inputs) - 1, calls)
            elif node.op_type in ("Identity", "Cast"):
                indices = self._input(node, 0, calls)
            else:
                return None
        return None

    def _plain(self, place: _Place | None) -> WrittenSlots | None:
        """``place`` without the nodes that only repeat its elements, or send those that are not wanted away."""
        for _ in range(_MAX_STEPS):
            place = self._settled(place)
            if place is None:
                return None
            value, calls = place
            node = value.producer()
            following = None
            if node is not None and not node.domain and node.op_type in _KEEPS_ELEMENTS:
                following = self._input(node, 0, calls)
            elif is_op(node, "Where"):
                assert node is not None
                kept = [item for item in node.inputs[1:] if item is not None and not self._is_away(item, calls)]
                following = (kept[0], calls) if len(kept) == 1 else None
            if following is None:
                return None if calls else WrittenSlots(value)
            place = following
        return None

    def _is_away(self, value: ir.Value, calls: tuple[ir.Node, ...]) -> bool:
        place: _Place | None = (value, calls)
        for _ in range(_MAX_STEPS):
            place = self._settled(place)
            if place is None:
                return False
            array = constant_of(place[0])
            if array is not None:
                return bool(array.size) and bool(np.all(array >= _FAR))
            node = place[0].producer()
            if not is_op(node, "Cast", "Expand", "Identity", "Unsqueeze"):
                return False
            assert node is not None
            place = self._input(node, 0, place[1])
        return False
