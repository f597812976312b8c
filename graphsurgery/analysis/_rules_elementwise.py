"""Shape rules of ops that work element by element, with broadcasting, and their arithmetic on shape values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis import dims
from graphsurgery.analysis._facts import MAX_VALUE_ITEMS, Fact, ShapeValue, rule_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from graphsurgery.analysis._facts import Call, Rule, Shape
    from graphsurgery.analysis.dims import Dim, Expr

__all__ = ["TABLE", "agreed", "broadcast_shapes", "same", "zipped"]

_ROUNDING = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_MAX_UNKNOWN = 16
"""Elements of a value that is computed of numbers that are not known: no shape has more axes."""


def broadcast_shapes(shapes: Iterable[Shape | None]) -> Shape | None:
    """The shape of operands of these shapes broadcast against each other; None where one is unknown."""
    result: Shape | None = None
    for shape in shapes:
        if shape is None:
            return None
        if result is None or shape == result:
            result = shape
            continue
        longer, shorter = (result, shape) if len(result) >= len(shape) else (shape, result)
        lead = len(longer) - len(shorter)
        merged = (dims.broadcast(a, b) for a, b in zip(longer[lead:], shorter, strict=True))
        result = longer[:lead] + tuple(merged)
    return result


def agreed(sizes: Sequence[Dim]) -> Dim:
    """The one size of axes that must be equal: a number if one is known, else the plainest expression."""
    return min(sizes, key=lambda size: 0 if isinstance(size, int) else size.weight + _anonymous(size) * 1000)


def _anonymous(size: Expr) -> bool:
    return any(name.startswith("?") for name in dims.free_names(size))


def same(call: Call) -> Fact:
    """Shape and element type of the first input."""
    return Fact(call.shape(0), call.dtype(0))


def _identity(call: Call) -> Fact:
    return call.fact(0)


def _boolean(call: Call) -> Fact:
    return Fact(call.shape(0), ir.DataType.BOOL)


def _cast(call: Call) -> Fact:
    target = ir.DataType(call.number("to", 0))
    return Fact(call.shape(0), target, _cast_value(call.fact(0).value, target))


def _cast_like(call: Call) -> Fact:
    target = call.dtype(1)
    return Fact(call.shape(0), target, None if target is None else _cast_value(call.fact(0).value, target))


def _cast_value(value: ShapeValue | None, target: ir.DataType) -> ShapeValue | None:
    if value is None or target in _ROUNDING:
        return None
    if target == ir.DataType.BOOL:
        return ShapeValue(tuple(_truth(item) for item in value.items), value.shape)
    return value


def _truth(item: Dim) -> Dim:
    return 1 if dims.is_positive(item) else dims.select(dims.equal(item, 0), 0, 1)


def _mapped(function: Callable[[Dim], Dim]) -> Rule:
    """A rule for a unary op that applies ``function`` to shape values."""

    def rule(call: Call) -> Fact:
        value = call.fact(0).value
        mapped = None if value is None else ShapeValue(tuple(function(item) for item in value.items), value.shape)
        return Fact(call.shape(0), call.dtype(0), mapped)

    return rule


def _combined(function: Callable[[Dim, Dim], Dim | None] | None, dtype: ir.DataType | None = None) -> Rule:
    """A rule for a broadcasting op that folds ``function`` over shape values; ``dtype`` where the op fixes it."""

    def rule(call: Call) -> Fact:
        shape = _operands_shape(call)
        value = _fold(call, function) if function is not None and shape is not None and len(shape) <= 2 else None
        return Fact(shape, dtype or _operands_dtype(call), value)

    return rule


def _operands_shape(call: Call) -> Shape | None:
    if len(call.inputs) == 2 and call.attribute("broadcast") == 1:
        # Opset 1 to 6: the second operand is fitted to the first.
        return call.shape(0)
    return broadcast_shapes(fact.shape for fact in call.inputs)


def _operands_dtype(call: Call) -> ir.DataType | None:
    return next((fact.dtype for fact in call.inputs if fact.dtype is not None), None)


def _fold(call: Call, function: Callable[[Dim, Dim], Dim | None]) -> ShapeValue | None:
    values: list[ShapeValue] = []
    for position in range(len(call.inputs)):
        value = call.value(position)
        if value is None:
            return None
        values.append(value)
    if not values:
        return None
    total: ShapeValue | None = values[0]
    for value in values[1:]:
        total = None if total is None else zipped(function, total, value)
    return total


def zipped(function: Callable[[Dim, Dim], Dim | None], a: ShapeValue, b: ShapeValue) -> ShapeValue | None:
    """``function`` on the pairs of elements of two values, with broadcasting; None where it gives None for one."""
    if _says_nothing(a, b):
        return None
    if a.shape == b.shape:
        items = tuple(function(x, y) for x, y in zip(a.items, b.items, strict=True))
        shape = a.shape
    else:
        try:
            left, right = np.broadcast_arrays(a.array(), b.array())
        except ValueError:  # the graph is broken here: it says nothing
            return None
        if left.size > MAX_VALUE_ITEMS:
            return None
        items = tuple(function(x, y) for x, y in zip(left.reshape(-1), right.reshape(-1), strict=True))
        shape = left.shape
    complete = tuple(item for item in items if item is not None)
    return ShapeValue(complete, shape) if len(complete) == len(items) else None


def _says_nothing(*values: ShapeValue) -> bool:
    """Whether what is computed of ``values`` is a long row of numbers that are not known: of rows, and never of sizes."""
    return max(len(value.items) for value in values) > _MAX_UNKNOWN and any(
        not isinstance(item, int) for value in values for item in value.items
    )


def _divide(call: Call) -> Fact:
    shape = _operands_shape(call)
    dtype = _operands_dtype(call)
    exact_only = dtype in {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}

    def quotient(a: Dim, b: Dim) -> Dim | None:
        if exact_only or b == 0:
            return dims.exact_div(a, b)
        return dims.truncdiv(a, b)

    return Fact(shape, dtype, _fold(call, quotient) if shape is not None and len(shape) <= 2 else None)


def _modulo(call: Call) -> Fact:
    def remainder(a: Dim, b: Dim) -> Dim | None:
        if b == 0 or (call.number("fmod", 0) and not (dims.is_nonnegative(a) and dims.is_nonnegative(b))):
            return None
        return dims.mod(a, b)

    shape = _operands_shape(call)
    return Fact(shape, _operands_dtype(call), _fold(call, remainder) if shape is not None and len(shape) <= 1 else None)


def _power(call: Call) -> Fact:
    def power(a: Dim, b: Dim) -> Dim | None:
        return dims.product([a] * b) if isinstance(b, int) and 0 <= b <= 4 else None

    shape = _operands_shape(call)
    known = call.fact(0).value is not None and call.fact(1).value is not None
    return Fact(shape, call.dtype(0), _fold(call, power) if known else None)


def _where(call: Call) -> Fact:
    shape = _operands_shape(call)
    dtype = call.dtype(1) or call.dtype(2)
    value = None
    if shape is not None and len(shape) <= 1:
        value = _selected(call)
    return Fact(shape, dtype, value)


def _selected(call: Call) -> ShapeValue | None:
    condition, chosen, other = call.value(0), call.value(1), call.value(2)
    if condition is None or chosen is None or other is None:
        return None
    # Where is min/max of nothing we can name, so the three operands are aligned first and then taken one by one.
    if _says_nothing(condition, chosen, other):
        return None
    try:
        arrays = np.broadcast_arrays(condition.array(), chosen.array(), other.array())
    except ValueError:
        return None
    if arrays[0].size > MAX_VALUE_ITEMS:
        return None
    rows = zip(*(array.reshape(-1) for array in arrays), strict=True)
    return ShapeValue(tuple(dims.select(c, a, b) for c, a, b in rows), arrays[0].shape)


def _clip(call: Call) -> Fact:
    value = call.fact(0).value
    low, high = call.value(1), call.value(2)
    if value is not None and call.attribute("min") is None and call.attribute("max") is None:
        if low is not None and low.single is not None:
            value = zipped(dims.maximum, value, ShapeValue.scalar(low.single))
        if high is not None and high.single is not None and value is not None:
            value = zipped(dims.minimum, value, ShapeValue.scalar(high.single))
        if (call.has(1) and low is None) or (call.has(2) and high is None):
            value = None
    else:
        value = None
    return Fact(call.shape(0), call.dtype(0), value)


def _bernoulli(call: Call) -> Fact:
    target = call.number("dtype", 0)
    return Fact(call.shape(0), ir.DataType(target) if target else call.dtype(0))


def _dropout(call: Call) -> list[Fact]:
    return [call.fact(0), Fact(call.shape(0), ir.DataType.BOOL if call.version >= 10 else call.dtype(0))]


def _sign(call: Call) -> Fact:
    value = call.fact(0).value
    known = value is not None and all(dims.is_nonnegative(item) for item in value.items)
    signs = ShapeValue(tuple(dims.minimum(item, 1) for item in value.items), value.shape) if value and known else None
    return Fact(call.shape(0), call.dtype(0), signs)


def _not(item: Dim) -> Dim:
    return 1 - item


def _and(a: Dim, b: Dim) -> Dim:
    return dims.select(a, b, 0)


def _or(a: Dim, b: Dim) -> Dim:
    return dims.select(a, 1, b)


_BOOL = ir.DataType.BOOL

_PLAIN = (
    "Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp HardSigmoid HardSwish LeakyRelu Log Mish "
    "Reciprocal Relu Selu Shrink Sigmoid Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Gelu "
    "BitwiseNot Softmax LogSoftmax Hardmax LpNormalization MeanVarianceNormalization LRN CumSum CumProd"
)

TABLE = rule_table(
    ("", _PLAIN, same),
    ("", "Identity Ceil Floor Round", _identity),
    ("", "Neg", _mapped(lambda item: -item)),
    ("", "Abs", _mapped(dims.absolute)),
    ("", "Sign", _sign),
    ("", "Not", _mapped(_not)),
    ("", "IsNaN IsInf", _boolean),
    ("", "Cast", _cast),
    ("", "CastLike", _cast_like),
    ("", "Add Sum", _combined(lambda a, b: a + b)),
    ("", "Sub", _combined(lambda a, b: a - b)),
    ("", "Mul", _combined(lambda a, b: a * b)),
    ("", "Min", _combined(dims.minimum)),
    ("", "Max", _combined(dims.maximum)),
    ("", "Mean PRelu BitShift BitwiseAnd BitwiseOr BitwiseXor", _combined(None)),
    ("", "Div", _divide),
    ("", "Mod", _modulo),
    ("", "Pow", _power),
    ("", "And", _combined(_and, _BOOL)),
    ("", "Or", _combined(_or, _BOOL)),
    ("", "Xor", _combined(lambda a, b: 1 - dims.equal(a, b), _BOOL)),
    ("", "Equal", _combined(dims.equal, _BOOL)),
    ("", "Less", _combined(dims.less, _BOOL)),
    ("", "Greater", _combined(lambda a, b: dims.less(b, a), _BOOL)),
    ("", "LessOrEqual", _combined(lambda a, b: 1 - dims.less(b, a), _BOOL)),
    ("", "GreaterOrEqual", _combined(lambda a, b: 1 - dims.less(a, b), _BOOL)),
    ("", "Where", _where),
    ("", "Clip", _clip),
    ("", "Bernoulli", _bernoulli),
    ("", "Dropout", _dropout),
)
