"""Shape rules of ops that pick, place, split, pad or order elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis import dims
from graphsurgery.analysis._dim_ops import backward_bounds
from graphsurgery.analysis._facts import MAX_VALUE_ITEMS, Fact, ShapeValue, normal_axis, rule_table
from graphsurgery.analysis._rules_elementwise import agreed, same
from graphsurgery.analysis._rules_shape import sizes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis._facts import Call, Shape
    from graphsurgery.analysis.dims import Dim

__all__ = ["TABLE"]

_INT64 = ir.DataType.INT64


def _gather(call: Call) -> Fact:
    data, indices = call.shape(0), call.shape(1)
    if data is None or indices is None:
        return Fact(None, call.dtype(0))
    axis = normal_axis(call.number("axis", 0), len(data))
    if axis is None:
        return Fact(None, call.dtype(0))
    value = _picked(call) if len(data) == 1 and len(indices) <= 1 else None
    return Fact(data[:axis] + indices + data[axis + 1 :], call.dtype(0), value)


def _picked(call: Call) -> ShapeValue | None:
    at = call.fact(1).value
    places = None if at is None else at.ints()
    value = None if places is None else call.value(0)
    if at is None or places is None or value is None:
        return None
    if any(not -len(value) <= place < len(value) for place in places):
        return None
    return ShapeValue(tuple(value.items[place] for place in places), at.shape)


def _gather_nd(call: Call) -> Fact:
    data, indices = call.shape(0), call.shape(1)
    if data is None or not indices:
        return Fact(None, call.dtype(0))
    depth, batch = indices[-1], call.number("batch_dims", 0)
    if not isinstance(depth, int):
        return Fact(None, call.dtype(0))
    # The batch axes of both are equal, and may go by two names: those of the data are kept.
    rows = tuple(map(agreed, zip(data[:batch], indices[:batch], strict=False)))
    return Fact(rows + indices[batch:-1] + data[batch + depth :], call.dtype(0))


def _gather_elements(call: Call) -> Fact:
    return Fact(call.shape(1), call.dtype(0))


def _slice(call: Call) -> Fact:
    data = call.shape(0)
    if data is None:
        return Fact(None, call.dtype(0))
    bounds = _slice_bounds(call, len(data))
    if bounds is None:
        return Fact(_slice_unknown(call, data), call.dtype(0))
    sizes = list(data)
    for axis, start, end, step in bounds:
        length = dims.slice_length(start, end, step, data[axis]) if isinstance(step, int) and step else None
        sizes[axis] = call.fresh() if length is None else length
    return Fact(tuple(sizes), call.dtype(0), _sliced(call, bounds))


_Bounds = list[tuple[int, "Dim", "Dim", "Dim"]]


def _slice_bounds(call: Call, rank: int) -> _Bounds | None:
    """(axis, start, end, step) of every sliced axis; None where they are not known."""
    if call.version < 10 and not call.has(1):
        starts: Sequence[Dim] | None = call.numbers("starts")
        ends: Sequence[Dim] | None = call.numbers("ends")
        axes: Sequence[Dim] | None = call.numbers("axes")
        steps: Sequence[Dim] | None = None
    else:
        starts, ends = sizes_of(call, 1), sizes_of(call, 2)
        axes = sizes_of(call, 3) if call.has(3) else None
        steps = sizes_of(call, 4) if call.has(4) else None
        if (call.has(3) and axes is None) or (call.has(4) and steps is None):
            return None
    if starts is None or ends is None or len(starts) != len(ends):
        return None
    places = (
        range(len(starts)) if axes is None else [normal_axis(a, rank) if isinstance(a, int) else None for a in axes]
    )
    steps = (1,) * len(starts) if steps is None else steps
    if len(places) != len(starts) or len(steps) != len(starts):
        return None
    bounds: _Bounds = []
    for place, start, end, step in zip(places, starts, ends, steps, strict=True):
        if place is None or place >= rank:
            return None
        bounds.append((place, start, end, step))
    return bounds


def _slice_unknown(call: Call, data: Shape) -> Shape:
    """Axes that are named keep none of their size; without names every axis may be cut."""
    value = call.value(3) if call.has(3) else None
    named = None if value is None else value.ints()
    if named is None:
        return call.fresh_shape(len(data))
    places = {normal_axis(axis, len(data)) for axis in named}
    return tuple(call.fresh() if axis in places else size for axis, size in enumerate(data))


def _sliced(call: Call, bounds: _Bounds) -> ShapeValue | None:
    value = call.fact(0).value
    if value is None or value.rank == 0:
        return None
    cuts = [slice(None)] * value.rank
    for axis, start, end, step in bounds:
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(step, int) or not step:
            return None
        if step > 0:
            cuts[axis] = slice(start, end, step)
            continue
        first, stop = backward_bounds(start, end, value.shape[axis])
        cuts[axis] = slice(first, None if stop < 0 else stop, step)
    return ShapeValue.of_array(value.array()[tuple(cuts)])


def _split(call: Call) -> list[Fact]:
    data, dtype = call.shape(0), call.dtype(0)
    count = len(call.node.outputs)
    axis = None if data is None else normal_axis(call.number("axis", 0), len(data))
    if data is None or axis is None:
        return [Fact(None, dtype)] * count
    parts = _split_sizes(call, data[axis], count)
    value = call.fact(0).value
    facts: list[Fact] = []
    start: Dim = 0
    for part in parts:
        piece = None
        if value is not None and value.rank == 1 and isinstance(start, int) and isinstance(part, int):
            piece = ShapeValue.listed(value.items[start : start + part])
        facts.append(Fact(data[:axis] + (part,) + data[axis + 1 :], dtype, piece))
        start = start + part
    return facts


def _split_sizes(call: Call, size: Dim, count: int) -> list[Dim]:
    listed: Sequence[Dim] | None = call.numbers("split")
    if listed is None and call.has(1):
        listed = sizes_of(call, 1)
        if listed is None:
            return [call.fresh() for _ in range(count)]
    if listed is not None:
        parts = list(listed[:count])
        return parts + [call.fresh() for _ in range(count - len(parts))]
    chunk = dims.exact_div(size, count)
    if chunk is not None:
        return [chunk] * count
    # Opset 18: chunks of ceil(size / n), the last one smaller.
    chunk = -dims.floordiv(-size, count)
    return [chunk] * (count - 1) + [size - chunk * (count - 1)]


def _non_zero(call: Call) -> Fact:
    shape = call.shape(0)
    # ORT gives a scalar one row, as if it were a list of one.
    rows: Dim = call.fresh() if shape is None else max(len(shape), 1)
    return Fact((rows, call.fresh()), _INT64)


def _compress(call: Call) -> Fact:
    shape = call.shape(0)
    axis = call.attribute("axis")
    if axis is None:
        return Fact((call.fresh(),), call.dtype(0))
    place = None if shape is None else normal_axis(int(axis), len(shape))
    if shape is None or place is None:
        return Fact(None, call.dtype(0))
    return Fact(shape[:place] + (call.fresh(),) + shape[place + 1 :], call.dtype(0))


def _unique(call: Call) -> list[Fact]:
    shape = call.shape(0)
    axis = call.attribute("axis")
    found = call.fresh()
    lists = [Fact((found,), _INT64), Fact((call.fresh(),), _INT64), Fact((found,), _INT64)]
    if axis is None:
        if shape is not None:
            lists[1] = Fact((dims.product(shape),), _INT64)
        return [Fact((found,), call.dtype(0)), *lists]
    place = None if shape is None else normal_axis(int(axis), len(shape))
    if shape is None or place is None:
        return [Fact(None, call.dtype(0)), *lists]
    lists[1] = Fact((shape[place],), _INT64)
    return [Fact(shape[:place] + (found,) + shape[place + 1 :], call.dtype(0)), *lists]


def _top_k(call: Call) -> list[Fact]:
    shape = call.shape(0)
    axis = None if shape is None else normal_axis(call.number("axis", -1), len(shape))
    if shape is None or axis is None:
        return [Fact(None, call.dtype(0)), Fact(None, _INT64)]
    value = call.value(1) if call.has(1) else None
    wanted = call.attribute("k") if value is None else value.single
    chosen: Dim = call.fresh() if wanted is None else wanted
    result = shape[:axis] + (chosen,) + shape[axis + 1 :]
    return [Fact(result, call.dtype(0)), Fact(result, _INT64)]


def _one_hot(call: Call) -> Fact:
    shape = call.shape(0)
    value = call.value(1)
    depth = None if value is None else value.single
    if shape is None:
        return Fact(None, call.dtype(2))
    axis = normal_axis(call.number("axis", -1), len(shape) + 1)
    if axis is None:
        return Fact(None, call.dtype(2))
    sizes = shape[:axis] + (call.fresh() if depth is None else depth,) + shape[axis:]
    return Fact(sizes, call.dtype(2), _marked(call, axis, depth))


def _marked(call: Call, axis: int, depth: Dim | None) -> ShapeValue | None:
    """The elements: how often to repeat each axis, where one of them is repeated, is written so."""
    at = call.value(0)
    places = None if at is None else at.ints()
    choices = None if places is None else call.value(2)
    if at is None or places is None or choices is None or len(choices) != 2 or not isinstance(depth, int):
        return None
    if depth < 1 or len(places) * depth > MAX_VALUE_ITEMS:
        return None
    # Indices count from the end where they are negative; those outside mark nothing.
    chosen = np.array([place + depth if place < 0 else place for place in places]).reshape(at.shape)
    marks = np.expand_dims(chosen, axis) == np.arange(depth).reshape(
        [-1 if n == axis else 1 for n in range(at.rank + 1)]
    )
    items = tuple(choices[1] if mark else choices[0] for mark in marks.reshape(-1).tolist())
    return ShapeValue(items, marks.shape)


def _eye_like(call: Call) -> Fact:
    target = call.number("dtype", 0)
    return Fact(call.shape(0), ir.DataType(target) if target else call.dtype(0))


def _pad(call: Call) -> Fact:
    shape = call.shape(0)
    if shape is None:
        return Fact(None, call.dtype(0))
    pads: Sequence[Dim] | None = call.numbers("pads") or call.numbers("paddings")
    if pads is None:
        pads = sizes_of(call, 1)
    axes: Sequence[int | None] | None = list(range(len(shape)))
    if call.has(3):
        value = call.value(3)
        listed = None if value is None else value.ints()
        axes = None if listed is None else [normal_axis(axis, len(shape)) for axis in listed]
    if pads is None or axes is None or None in axes or len(pads) != 2 * len(axes):
        return Fact(call.fresh_shape(len(shape)), call.dtype(0))
    sizes = list(shape)
    for position, axis in enumerate(axes):
        if axis is not None:
            sizes[axis] = sizes[axis] + pads[position] + pads[position + len(axes)]
    return Fact(tuple(sizes), call.dtype(0))


def _reverse(call: Call) -> Fact:
    return Fact(call.shape(0), call.dtype(0))


def _resize(call: Call) -> Fact:
    shape = call.shape(0)
    if shape is None:
        return Fact(None, call.dtype(0))
    sizes = sizes_of(call, 3) if call.has(3) else None
    axes = call.numbers("axes")
    places = range(len(shape)) if axes is None else [axis + len(shape) if axis < 0 else axis for axis in axes]
    plain = call.text("keep_aspect_ratio_policy", "stretch") == "stretch"
    if sizes is None or not plain or len(sizes) != len(places):
        return Fact(_scaled(call, shape, list(places)), call.dtype(0))
    result = list(shape)
    for place, size in zip(places, sizes, strict=True):
        result[place] = size
    return Fact(tuple(result), call.dtype(0))


def _scaled(call: Call, shape: Shape, places: list[int]) -> Shape:
    """Sizes multiplied by constant scales: floor(size * scale), exact for whole scales and for known sizes."""
    from graphsurgery.analysis.constants import constant_of

    listed = call.attribute("scales")
    operand = 2 if call.version >= 11 else 1
    scales = np.asarray(listed) if listed is not None else None
    if scales is None and call.has(operand):
        scales = constant_of(call.node.inputs[operand])
    result = [call.fresh() if axis in places else size for axis, size in enumerate(shape)]
    if scales is None or scales.size != len(places):
        return tuple(result)
    for place, scale in zip(places, scales.reshape(-1).tolist(), strict=True):
        size = shape[place]
        if float(scale).is_integer():
            result[place] = size * int(scale)
        elif isinstance(size, int):
            result[place] = int(np.floor(np.float32(size) * np.float32(scale)))
    return tuple(result)


def _space_to_depth(call: Call) -> Fact:
    shape, block = call.shape(0), call.number("blocksize", 1)
    if shape is None or len(shape) != 4 or block < 1:
        return Fact(call.fresh_shape(4), call.dtype(0))
    batch, channels, height, width = shape
    return Fact(
        (batch, channels * block * block, dims.floordiv(height, block), dims.floordiv(width, block)), call.dtype(0)
    )


def _depth_to_space(call: Call) -> Fact:
    shape, block = call.shape(0), call.number("blocksize", 1)
    if shape is None or len(shape) != 4 or block < 1:
        return Fact(call.fresh_shape(4), call.dtype(0))
    batch, channels, height, width = shape
    return Fact((batch, dims.floordiv(channels, block * block), height * block, width * block), call.dtype(0))


TABLE = rule_table(
    ("", "Gather", _gather),
    ("", "GatherND", _gather_nd),
    ("", "GatherElements", _gather_elements),
    ("", "Scatter ScatterElements ScatterND TensorScatter Trilu ReverseSequence", same),
    ("", "Slice", _slice),
    ("", "Split", _split),
    ("", "NonZero", _non_zero),
    ("", "Compress", _compress),
    ("", "Unique", _unique),
    ("", "TopK", _top_k),
    ("", "OneHot", _one_hot),
    ("", "EyeLike", _eye_like),
    ("", "Pad", _pad),
    ("", "Resize Upsample", _resize),
    ("", "SpaceToDepth", _space_to_depth),
    ("", "DepthToSpace", _depth_to_space),
)
