"""Shape rules of ops that read, make or change shapes."""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis import dims
from graphsurgery.analysis._facts import MAX_VALUE_ITEMS, Fact, ShapeValue, normal_axis, rule_table, static_shape
from graphsurgery.analysis._rules_elementwise import agreed, broadcast_shapes, zipped
from graphsurgery.analysis.constants import constant_of, small_array
from graphsurgery.analysis.dims import Expr

if TYPE_CHECKING:
    import numpy as np

    from graphsurgery.analysis._facts import Call, Shape
    from graphsurgery.analysis.dims import Dim

__all__ = ["TABLE", "sizes_of"]


def sizes_of(call: Call, index: int) -> Shape | None:
    """The sizes that input ``index``, a list of sizes, holds; fresh unknowns where only their number is known."""
    value = call.value(index)
    if value is not None:
        return value.items
    shape = call.shape(index)
    if shape is not None and len(shape) == 1 and isinstance(shape[0], int):
        return call.fresh_shape(shape[0])
    return None


def _constant(call: Call) -> Fact | None:
    array = constant_of(call.node.outputs[0])
    if array is not None:
        return Fact(array.shape, _constant_dtype(call, array), ShapeValue.of_constant(array))
    tensor = call.attribute("value")
    if tensor is not None:
        return Fact(tuple(tensor.shape.numpy()), tensor.dtype)
    for name, dtype in (("value_ints", ir.DataType.INT64), ("value_floats", ir.DataType.FLOAT)):
        listed = call.attribute(name)
        if listed is not None:
            return Fact((len(listed),), dtype)
    for name, dtype in (("value_int", ir.DataType.INT64), ("value_float", ir.DataType.FLOAT)):
        if call.attribute(name) is not None:
            # A reference to an attribute of the function call, which constant_of does not follow.
            value = ShapeValue.scalar(call.number(name, 0)) if dtype == ir.DataType.INT64 else None
            return Fact((), dtype, value)
    return None


def _constant_dtype(call: Call, array: np.ndarray) -> ir.DataType:
    tensor = call.attribute("value")
    return tensor.dtype if tensor is not None else ir.DataType.from_numpy(array.dtype)


def _shape(call: Call) -> Fact:
    shape = call.shape(0)
    if shape is None:
        return Fact((call.fresh(),), ir.DataType.INT64)
    end = call.attribute("end")
    part = shape[call.number("start", 0) : None if end is None else int(end)]
    return Fact((len(part),), ir.DataType.INT64, ShapeValue.listed(part))


def _size(call: Call) -> Fact:
    shape = call.shape(0)
    value = None if shape is None else ShapeValue.scalar(dims.product(shape))
    return Fact((), ir.DataType.INT64, value)


def _constant_of_shape(call: Call) -> Fact:
    tensor = call.attribute("value")
    dtype = ir.DataType.FLOAT if tensor is None else tensor.dtype
    shape = sizes_of(call, 0)
    value = None
    static = static_shape(shape)
    if static is not None and len(static) <= 1 and 0 <= prod(static) <= MAX_VALUE_ITEMS:
        fill = ShapeValue.scalar(0) if tensor is None else ShapeValue.of_constant(small_array(tensor))
        if fill is not None and fill.single is not None:
            value = ShapeValue((fill.single,) * prod(static), static)
    return Fact(shape, dtype, value)


def _range(call: Call) -> Fact:
    start, limit, step = (_single(call, position) for position in range(3))
    dtype = call.dtype(0) or call.dtype(1)
    if start is None or limit is None or not isinstance(step, int) or step == 0:
        return Fact((call.fresh(),), dtype)
    count = _steps(start, limit, step)
    value = None
    if isinstance(count, int) and count <= MAX_VALUE_ITEMS:
        value = ShapeValue.listed(start + position * step for position in range(count))
    return Fact((count,), dtype, value)


@functools.lru_cache(maxsize=4096)
def _steps(start: Dim, limit: Dim, step: int) -> Dim:
    """How many steps lead from ``start`` to ``limit``: of an expert's rows, asked for by each of its products."""
    distance = limit - start if step > 0 else start - limit
    return dims.maximum(distance if abs(step) == 1 else -dims.floordiv(-distance, abs(step)), 0)


def _single(call: Call, index: int) -> Dim | None:
    value = call.value(index)
    return None if value is None else value.single


def _reshape(call: Call) -> Fact:
    source = call.shape(0)
    listed = call.numbers("shape")  # opset 1
    wanted: Shape | None = listed if listed is not None else sizes_of(call, 1)
    if wanted is None:
        return Fact(None, call.dtype(0))
    shape = _reshaped(call, source, wanted)
    return Fact(shape, call.dtype(0), _relabelled(call, shape))


def _reshaped(call: Call, source: Shape | None, wanted: Shape) -> Shape:
    keep_zero = call.number("allowzero", 0) == 1
    sizes: list[Dim | None] = []
    for position, size in enumerate(wanted):
        if size == -1:
            sizes.append(None)
        elif size == 0 and not keep_zero:
            sizes.append(source[position] if source is not None and position < len(source) else call.fresh())
        elif isinstance(size, Expr) and _may_be_special(size):
            sizes.append(None)
        else:
            sizes.append(size)
    open_axes = [position for position, size in enumerate(sizes) if size is None]
    if len(open_axes) == 1:
        sizes[open_axes[0]] = _remaining(source, [size for size in sizes if size is not None])
    return tuple(call.fresh() if size is None else size for size in sizes)


def _may_be_special(size: Expr) -> bool:
    """Whether an operand of Reshape that nobody knows may be -1 or 0, and so may not be the size itself."""
    return size.atom is not None and dims.bounds(size)[0] is None


def _remaining(source: Shape | None, others: list[Dim]) -> Dim | None:
    if source is None:
        return None
    left = list(source)
    divisors: list[Dim] = []
    # Equal sizes cancel before anything is multiplied out: products of sums would grow.
    for size in others:
        if size in left:
            left.remove(size)
        else:
            divisors.append(size)
    divisor = dims.product(divisors)
    if divisor == 0 or 0 in left:
        return None
    total = dims.product(left)
    quotient = dims.exact_div(total, divisor)
    return dims.floordiv(total, divisor) if quotient is None else quotient


def _expand(call: Call) -> Fact:
    target = sizes_of(call, 1)
    source = call.shape(0)
    shape = None if target is None else broadcast_shapes((source, target))
    value, static = call.fact(0).value, static_shape(shape)
    if value is not None and static is not None and prod(static) <= MAX_VALUE_ITEMS:
        # The repetition of a value is that value broadcast with one of zeros.
        value = zipped(lambda item, _: item, value, ShapeValue((0,) * prod(static), static))
    else:
        value = None
    return Fact(shape, call.dtype(0), value)


def _tile(call: Call) -> Fact:
    source, repeats = call.shape(0), sizes_of(call, 1)
    if source is None or repeats is None or len(source) != len(repeats):
        return Fact(None if source is None else call.fresh_shape(len(source)), call.dtype(0))
    value = call.fact(0).value
    if value is not None and value.rank <= 1:
        times = repeats[0] if repeats else 1
        value = ShapeValue.listed(value.items * times) if isinstance(times, int) and value.rank else None
    return Fact(tuple(a * b for a, b in zip(source, repeats, strict=True)), call.dtype(0), value)


def _transpose(call: Call) -> Fact:
    shape = call.shape(0)
    if shape is None:
        permutation = call.numbers("perm")
        return Fact(None if permutation is None else call.fresh_shape(len(permutation)), call.dtype(0))
    order = call.numbers("perm") or tuple(reversed(range(len(shape))))
    if sorted(order) != list(range(len(shape))):
        return Fact(call.fresh_shape(len(shape)), call.dtype(0))
    value = call.fact(0).value
    if value is not None:
        value = ShapeValue.of_array(value.array().transpose(order))
    return Fact(tuple(shape[axis] for axis in order), call.dtype(0), value)


def _unsqueeze(call: Call) -> Fact:
    shape, axes = call.shape(0), call.axes(1)
    if shape is None:
        return Fact(None, call.dtype(0))
    if axes is None:
        count = call.shape(1)
        added = count[0] if count else None
        return Fact(call.fresh_shape(len(shape) + added) if isinstance(added, int) else None, call.dtype(0))
    rank = len(shape) + len(axes)
    places = {normal_axis(axis, rank) for axis in axes}
    if None in places or len(places) != len(axes):
        return Fact(call.fresh_shape(rank), call.dtype(0))
    rest = iter(shape)
    widened: Shape = tuple(1 if axis in places else next(rest) for axis in range(rank))
    return Fact(widened, call.dtype(0), _relabelled(call, widened))


def _squeeze(call: Call) -> Fact:
    shape = call.shape(0)
    if shape is None:
        return Fact(None, call.dtype(0))
    if not call.gives_axes(1):
        # Which axes have size 1 must be known of all of them.
        if static_shape(shape) is None:
            return Fact(None, call.dtype(0))
        places = {axis for axis, size in enumerate(shape) if size == 1}
    else:
        axes = call.axes(1)
        if axes is None:
            count = call.shape(1)
            dropped = count[0] if count else None
            if not isinstance(dropped, int) or dropped > len(shape):
                return Fact(None, call.dtype(0))
            return Fact(call.fresh_shape(len(shape) - dropped), call.dtype(0))
        places = {axis + len(shape) if axis < 0 else axis for axis in axes}
    narrowed = tuple(size for axis, size in enumerate(shape) if axis not in places)
    return Fact(narrowed, call.dtype(0), _relabelled(call, narrowed))


def _relabelled(call: Call, shape: Shape) -> ShapeValue | None:
    """The contents of the first input under another static shape of as many elements."""
    value, static = call.fact(0).value, static_shape(shape)
    if value is None or static is None or prod(static) != len(value):
        return None
    return ShapeValue(value.items, static)


def _flatten(call: Call) -> Fact:
    shape = call.shape(0)
    if shape is None:
        return Fact(call.fresh_shape(2), call.dtype(0))
    axis = call.number("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return Fact((dims.product(shape[:axis]), dims.product(shape[axis:])), call.dtype(0))


def _concat(call: Call) -> Fact:
    shapes = [fact.shape for fact in call.inputs]
    dtype = next((fact.dtype for fact in call.inputs if fact.dtype is not None), None)
    known = [shape for shape in shapes if shape is not None]
    axis = normal_axis(call.number("axis", 1), len(known[0])) if known else None
    if axis is None or any(len(shape) != len(known[0]) for shape in known):
        return Fact(None, dtype)
    value = _joined(call) if len(known[0]) == 1 else None
    joined = call.fresh() if len(known) != len(shapes) else dims.total(shape[axis] for shape in known)
    sizes = [agreed([shape[place] for shape in known]) for place in range(len(known[0]))]
    sizes[axis] = joined
    return Fact(tuple(sizes), dtype, value)


def _joined(call: Call) -> ShapeValue | None:
    if all(fact.value is None for fact in call.inputs):
        return None
    items: list[Dim] = []
    for position in range(len(call.inputs)):
        value = call.value(position)
        if value is None:
            return None
        items.extend(value.items)
    return ShapeValue.listed(items) if len(items) <= MAX_VALUE_ITEMS else None


TABLE = rule_table(
    ("", "Constant", _constant),
    ("", "Shape", _shape),
    ("", "Size", _size),
    ("", "ConstantOfShape", _constant_of_shape),
    ("", "Range", _range),
    ("", "Reshape", _reshape),
    ("", "Expand", _expand),
    ("", "Tile", _tile),
    ("", "Transpose", _transpose),
    ("", "Unsqueeze", _unsqueeze),
    ("", "Squeeze", _squeeze),
    ("", "Flatten", _flatten),
    ("", "Concat", _concat),
)
