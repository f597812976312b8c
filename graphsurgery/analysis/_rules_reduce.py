"""Shape rules of reductions, normalisations and random or image ops that keep the rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis import dims
from graphsurgery.analysis._facts import Fact, ShapeValue, normal_axis, rule_table
from graphsurgery.analysis._rules_elementwise import same

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.analysis._facts import Call, Rule, Shape
    from graphsurgery.analysis.dims import Dim

__all__ = ["TABLE"]

_INT64 = ir.DataType.INT64


def _reduction(fold: Callable[[Dim, Dim], Dim] | None) -> Rule:
    """A rule for ``Reduce*``; ``fold`` combines two elements where contents can be followed."""

    def rule(call: Call) -> Fact:
        shape = call.shape(0)
        if shape is None:
            return Fact(None, call.dtype(0))
        if call.gives_axes(1):
            axes = call.axes(1)
            if axes is None:
                return Fact(_reduced_somewhere(call, shape), call.dtype(0))
        else:
            axes = ()
        if not axes:
            if call.number("noop_with_empty_axes", 0):
                return call.fact(0)
            axes = tuple(range(len(shape)))
        places = {axis + len(shape) if axis < 0 else axis for axis in axes}
        keep = call.number("keepdims", 1) == 1
        result = _without(shape, places, keep)
        return Fact(result, call.dtype(0), _folded(call, fold, keep) if fold is not None and places else None)

    return rule


def _without(shape: Shape, places: set[int], keep: bool) -> Shape:
    if keep:
        return tuple(1 if axis in places else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in places)


def _reduced_somewhere(call: Call, shape: Shape) -> Shape | None:
    """The axes are computed at run time: only the rank may be known."""
    if call.number("keepdims", 1) == 1:
        return call.fresh_shape(len(shape))
    count = call.shape(1)
    dropped = count[0] if count else None
    return call.fresh_shape(len(shape) - dropped) if isinstance(dropped, int) and 0 < dropped <= len(shape) else None


def _folded(call: Call, fold: Callable[[Dim, Dim], Dim], keep: bool) -> ShapeValue | None:
    value = call.value(0)
    if value is None or value.rank != 1 or not value.items:
        return None
    total = value.items[0]
    for item in value.items[1:]:
        total = fold(total, item)
    return ShapeValue((total,), (1,) if keep else ())


def _arg_extremum(call: Call) -> Fact:
    shape = call.shape(0)
    axis = None if shape is None else normal_axis(call.number("axis", 0), len(shape))
    if shape is None or axis is None:
        return Fact(None, _INT64)
    return Fact(_without(shape, {axis}, call.number("keepdims", 1) == 1), _INT64)


def _layer_normalization(call: Call) -> list[Fact]:
    shape = call.shape(0)
    axis = None if shape is None else normal_axis(call.number("axis", -1), len(shape))
    stash = ir.DataType(call.number("stash_type", 1))
    if shape is None or axis is None:
        return [same(call), Fact(None, stash), Fact(None, stash)]
    statistics = Fact(shape[:axis] + (1,) * (len(shape) - axis), stash)
    return [same(call), statistics, statistics]


def _batch_normalization(call: Call) -> list[Fact]:
    channels = call.fact(1)
    return [same(call), *[Fact(channels.shape, channels.dtype)] * 4]


def _random_like(call: Call) -> Fact:
    target = call.number("dtype", 0)
    return Fact(call.shape(0), ir.DataType(target) if target else call.dtype(0))


def _random(call: Call) -> Fact:
    return Fact(call.numbers("shape"), ir.DataType(call.number("dtype", 1)))


def _multinomial(call: Call) -> Fact:
    shape = call.shape(0)
    rows: Dim = call.fresh() if not shape else shape[0]
    return Fact((rows, call.number("sample_size", 1)), ir.DataType(call.number("dtype", int(ir.DataType.INT32))))


TABLE = rule_table(
    ("", "ReduceMean ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare", _reduction(None)),
    ("", "ReduceSum", _reduction(lambda a, b: a + b)),
    ("", "ReduceProd", _reduction(lambda a, b: a * b)),
    ("", "ReduceMax", _reduction(dims.maximum)),
    ("", "ReduceMin", _reduction(dims.minimum)),
    ("", "ArgMax ArgMin", _arg_extremum),
    ("", "LayerNormalization SimplifiedLayerNormalization", _layer_normalization),
    ("", "RMSNormalization GroupNormalization InstanceNormalization", same),
    ("", "BatchNormalization", _batch_normalization),
    ("", "RandomNormalLike RandomUniformLike", _random_like),
    ("", "RandomNormal RandomUniform", _random),
    ("", "Multinomial", _multinomial),
)
