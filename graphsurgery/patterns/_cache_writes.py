"""How an output comes from a cache that is fed: walked backwards through layout operators, branches and functions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from graphsurgery.analysis.constants import const_int
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from graphsurgery.analysis.shapes import Shapes, ShapeView
    from graphsurgery.patterns._cache_names import CacheKind

__all__ = ["CacheForm", "Write", "find_write", "kind_by_use"]

CacheForm = Literal["concat", "scatter", "fused", "passthrough", "counter", "state", "fresh"]

_MAX_STEPS = 48

_LAYOUT = frozenset(
    {
        *("Identity", "Cast", "CastLike", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Dropout"),
        *("QuantizeLinear", "DequantizeLinear"),
    }
)
# The order of batch rows, as beam search changes it, on the way in; a window that drops the oldest on the way out.
_INWARDS = _LAYOUT | {"Gather", "Expand"}
_OUTWARDS = _LAYOUT | {"Slice"}
_KEEPS_AXES = frozenset({"Identity", "Cast", "CastLike", "Dropout", "QuantizeLinear", "DequantizeLinear", "Gather"})

_SCATTERS = frozenset({"ScatterND", "ScatterElements", "Scatter", "TensorScatter"})
# Vendor names of a write into slots, ``[B, G, N, D]``, where the model does not define them as functions.
_VENDOR_SCATTERS = frozenset({"CtxScatter", "CtxScatterCB"})

_FUSED: dict[tuple[str, str], dict[int, tuple[int, CacheKind]]] = {
    # Position of the output: position of the past among the inputs, and what it holds.
    ("com.microsoft", "GroupQueryAttention"): {1: (3, "key"), 2: (4, "value")},
    ("com.microsoft", "SparseAttention"): {1: (3, "key"), 2: (4, "value")},
    ("com.microsoft", "PagedAttention"): {1: (3, "key"), 2: (4, "value")},
    ("com.microsoft", "MultiHeadAttention"): {1: (6, "key"), 2: (7, "value")},
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): {1: (5, "key"), 2: (6, "value")},
    ("com.microsoft", "Attention"): {1: (4, "key-value")},
    ("", "Attention"): {1: (4, "key"), 2: (5, "value")},
}

_Call = tuple[ir.Node, ...]
_Place = tuple[ir.Value, _Call]


@dataclasses.dataclass(frozen=True)
class Write:
    """How an output takes up a cache.

    Attributes:
        past: the graph input.
        form: see :class:`~graphsurgery.patterns.kv_cache.CacheSite`.
        axis: the axis of ``past`` that counts positions, where the write tells.
        kind: what it holds, where the operator tells.
        window: W, where an operator tells.
        cut: the output drops the oldest positions.
        value: what was written, in the scope of the write.
    """

    past: ir.Value
    form: CacheForm
    axis: int | None
    kind: CacheKind | None = None
    window: int | None = None
    cut: bool = False
    value: ir.Value | None = None


class _Walk:
    """Steps to producers, into the bodies of called functions and branches and out of them again."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model

    def resolve(self, place: _Place) -> Iterator[_Place]:
        """The places where ``place`` is really made: behind calls, parameters and branches."""
        pending, steps = [place], 0
        while pending and steps < _MAX_STEPS:
            value, calls = pending.pop()
            steps += 1
            node = value.producer()
            if node is None:
                outer = self._argument(value, calls)
                if outer is None:
                    yield value, calls
                else:
                    pending.append(outer)
                continue
            function = self._model.functions.get(node.op_identifier())
            index = value.index() or 0
            if function is not None and index < len(function.outputs):
                pending.append((function.outputs[index], (*calls, node)))
            elif is_op(node, "If"):
                for name in ("else_branch", "then_branch"):
                    branch = node.attributes.get(name)
                    if branch is not None and index < len(branch.as_graph().outputs):
                        pending.append((branch.as_graph().outputs[index], calls))
            else:
                yield value, calls

    def _argument(self, value: ir.Value, calls: _Call) -> _Place | None:
        """What the innermost call passes for the parameter ``value``; None for a value of the main graph."""
        if not calls:
            return None
        function = self._model.functions.get(calls[-1].op_identifier())
        if function is None:
            return None
        for position, formal in enumerate(function.inputs):
            if formal is value:
                arguments = calls[-1].inputs
                argument = arguments[position] if position < len(arguments) else None
                return None if argument is None else (argument, calls[:-1])
        return None

    def source(
        self, value: ir.Value | None, calls: _Call, inputs: Container[ir.Value], trail: frozenset[str] = _INWARDS
    ) -> tuple[ir.Value, list[ir.Node]] | None:
        """The graph input behind ``value``, and the layout nodes between, the last first; None where there is none."""
        if value is None:
            return None
        pending: list[tuple[_Place, list[ir.Node]]] = [((value, calls), [])]
        steps = 0
        while pending and steps < _MAX_STEPS:
            place, nodes = pending.pop()
            for found, inner in self.resolve(place):
                steps += 1
                if found in inputs:
                    return found, nodes
                node = found.producer()
                if node is not None and not node.domain and node.op_type in trail and node.inputs:
                    first = node.inputs[0]
                    if first is not None:
                        pending.append(((first, inner), [*nodes, node]))
        return None


def find_write(model: ir.Model, output: ir.Value, inputs: Container[ir.Value], shapes: Shapes) -> Write | None:
    """How ``output`` takes up one of ``inputs``; None where it does not."""
    walk = _Walk(model)
    pending: list[tuple[_Place, int | None, bool]] = [((output, ()), None, False)]
    steps = 0
    while pending and steps < _MAX_STEPS:
        place, window, cut = pending.pop()
        for value, calls in walk.resolve(place):
            steps += 1
            if value in inputs:
                return Write(value, "passthrough", None)
            node = value.producer()
            if node is None:
                continue
            write = _write_of(walk, node, value, calls, inputs, _inside(shapes, calls))
            if write is not None:
                if cut and write.form == "concat":
                    return dataclasses.replace(write, window=window, cut=True)
                return write
            if not node.domain and node.op_type in _OUTWARDS and node.inputs and node.inputs[0] is not None:
                dropped = node.op_type == "Slice"
                pending.append(((node.inputs[0], calls), _kept(node) if dropped else window, cut or dropped))
    return None


def _inside(shapes: ShapeView, calls: _Call) -> ShapeView:
    """The shapes in the body of the innermost of ``calls``; those of the main graph where they are not known."""
    view = shapes
    for call in calls:
        try:
            view = view.in_call(call)
        except ValueError:
            return shapes
    return view


def _kept(node: ir.Node) -> int | None:
    """W of a Slice that keeps the last W positions."""
    start = const_int(node.inputs[1]) if len(node.inputs) > 1 else None
    return -start if start is not None and start < 0 else None


def _write_of(
    walk: _Walk, node: ir.Node, value: ir.Value, calls: _Call, inputs: Container[ir.Value], shapes: ShapeView
) -> Write | None:
    fused = _FUSED.get((node.domain, node.op_type))
    if fused is not None:
        return _fused(walk, node, value, calls, inputs)
    if node.op_type in _VENDOR_SCATTERS:
        found = walk.source(node.inputs[0], calls, inputs) if node.inputs else None
        return Write(found[0], "scatter", _before(2, found[1]), value=value) if found else None
    if node.domain:
        return None
    if node.op_type == "Concat":
        return _concat(walk, node, value, calls, inputs)
    if node.op_type in _SCATTERS:
        found = walk.source(node.inputs[0], calls, inputs)
        return Write(found[0], "scatter", _before(_slot_axis(node, shapes), found[1]), value=value) if found else None
    if node.op_type == "Where" and len(node.inputs) == 3:
        # A mask over the slots says where the new positions go.
        sources = [walk.source(item, calls, inputs) for item in node.inputs[1:]]
        found = next((item for item in sources if item is not None), None)
        return Write(found[0], "scatter", None, value=value) if found else None
    if node.op_type in ("Add", "Sum"):
        sources = [walk.source(item, calls, inputs, _LAYOUT) for item in node.inputs]
        counted = [item for item in sources if item is not None and _is_counter(item[0])]
        return Write(counted[0][0], "counter", None) if len(counted) == 1 else None
    return None


def _is_counter(value: ir.Value) -> bool:
    shape = value.shape
    one = shape is not None and (len(shape) == 0 or (len(shape) == 1 and shape[0] == 1))
    return one and value.dtype in (ir.DataType.INT64, ir.DataType.INT32)


def _fused(walk: _Walk, node: ir.Node, value: ir.Value, calls: _Call, inputs: Container[ir.Value]) -> Write | None:
    slot = _FUSED[node.domain, node.op_type].get(value.index() or 0)
    if slot is None or slot[0] >= len(node.inputs):
        return None
    found = walk.source(node.inputs[slot[0]], calls, inputs)
    if found is None:
        return None
    attribute = node.attributes.get("local_window_size")
    window = attribute.as_int() if attribute is not None and not attribute.is_ref() else -1
    axis = 3 if slot[1] == "key-value" else 2
    return Write(found[0], "fused", _before(axis, found[1]), slot[1], window if window > 0 else None, value=value)


def _concat(walk: _Walk, node: ir.Node, value: ir.Value, calls: _Call, inputs: Container[ir.Value]) -> Write | None:
    for item in node.inputs:
        found = walk.source(item, calls, inputs)
        if found is not None:
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else None
            return Write(found[0], "concat", _before(axis, found[1], _rank(found[0])), value=value)
    return None


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _slot_axis(node: ir.Node, shapes: ShapeView) -> int | None:
    """The axis of the data of a scatter that its indices count positions on."""
    if node.op_type == "ScatterND":
        # Indices ``[.., K]`` address the first K axes, the positions last.
        indices = node.inputs[1]
        depth = shapes.dim(indices, -1) if indices is not None else None
        if depth is None and indices is not None and indices.shape is not None and len(indices.shape):
            last = indices.shape[-1]
            depth = last if isinstance(last, int) else None
        return depth - 1 if isinstance(depth, int) else None
    default = -2 if node.op_type == "TensorScatter" else 0
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else default
    data = node.inputs[0]
    rank = _rank(data) if data is not None else None
    rank = rank if rank is not None or data is None else shapes.rank(data)
    return axis if axis >= 0 else axis + rank if rank is not None else None


def _before(axis: int | None, nodes: list[ir.Node], rank: int | None = None) -> int | None:
    """Which axis of the graph input ``axis`` was, before the layout nodes (the last first) between them."""
    for node in nodes:
        if axis is None:
            return None
        if node.op_type in _KEEPS_AXES:
            continue
        order = node.attributes.get("perm") if node.op_type == "Transpose" else None
        if order is None:
            return None
        permutation = order.as_ints()
        axis = permutation[axis]
        axis = axis + len(permutation) if axis < 0 else axis
    if axis is not None and axis < 0:
        return axis + rank if rank is not None else None
    return axis


# ---- key or value -------------------------------------------------------------------------------------------------

_TO_PRODUCT = _LAYOUT | {"Expand", "Tile", "Mul", "Div", "Concat", "Slice", "Gather", "Split"}
# A softmax that goes block by block is written with Exp.
_SOFTMAX = ("Softmax", "Exp")
_PROBABILITIES = frozenset({"Cast", "Identity", "Dropout", "Where", "Mul", "Slice", "Reshape", "Transpose", "Split"})
_SCORES = frozenset(
    {
        *("Mul", "Div", "Add", "Sub", "Where", "Tanh", "Cast", "Identity", "Reshape", "Concat", "Max", "Clip"),
        *("Transpose",),
    }
)


def kind_by_use(value: ir.Value) -> CacheKind | None:
    """``key`` where ``value`` is multiplied with queries for a softmax, ``value`` where with what comes from one."""
    pending, seen = [value], {value}
    while pending and len(seen) < 4 * _MAX_STEPS:
        current = pending.pop(0)
        for use in current.uses():
            node = use.node
            if node.op_type in ("MatMul", "FusedMatMul", "Einsum") and len(node.inputs) >= 2:
                other = node.inputs[1 - use.idx] if use.idx < 2 else None
                if other is not None and _from_softmax(other):
                    return "value"
                if _to_softmax(node.outputs[0]):
                    return "key"
            elif (node.domain, node.op_type) in _FUSED and use.idx in (1, 2):
                return "key" if use.idx == 1 else "value"
            elif not node.domain and node.op_type in _TO_PRODUCT:
                made = [output for output in node.outputs if output not in seen]
                seen.update(made)
                pending += made
    return None


def _from_softmax(value: ir.Value) -> bool:
    pending, steps = [value], 0
    while pending and steps < _MAX_STEPS:
        node = pending.pop().producer()
        steps += 1
        if node is None:
            continue
        if is_op(node, *_SOFTMAX):
            return True
        if not node.domain and node.op_type in _PROBABILITIES:
            pending += [item for item in node.inputs if item is not None]
    return False


def _to_softmax(value: ir.Value) -> bool:
    pending, seen = [value], {value}
    while pending and len(seen) < _MAX_STEPS:
        for use in pending.pop(0).uses():
            if is_op(use.node, *_SOFTMAX):
                return True
            made = use.node.outputs[0] if use.node.outputs else None
            if not use.node.domain and use.node.op_type in _SCORES and made is not None and made not in seen:
                seen.add(made)
                pending.append(made)
    return False
