"""Operations on symbolic sizes that polynomials cannot express, each with the simplifications that are provable."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from graphsurgery.analysis._expr import SIMPLIFIERS, Call, Dim, Expr, opaque, sort_key
from graphsurgery.analysis._polynomials import bounds, exact_div

if TYPE_CHECKING:
    from collections.abc import Callable

# How many nested min/max atoms a proof of sign opens before it gives up.
_PROOF_DEPTH = 3
_INT32_MAX = 2**31 - 1


def is_nonnegative(dim: Dim) -> bool:
    """Whether ``dim >= 0`` is provable for every value that sizes can have."""
    return _at_least_zero(dim, _PROOF_DEPTH)


def is_positive(dim: Dim) -> bool:
    """Whether ``dim >= 1`` is provable for every value that sizes can have."""
    if isinstance(dim, int):
        return dim >= 1
    # Contents are asked about element by element, mostly bare atoms: of those nothing but their bounds is known.
    atom = dim.atom
    if atom is not None and not (isinstance(atom, Call) and atom.op in {"max", "min"}):
        return atom.low is not None and atom.low >= 1
    return is_nonnegative(dim - 1)


def _at_least_zero(dim: Dim, depth: int) -> bool:
    if isinstance(dim, int):
        return dim >= 0
    low = bounds(dim)[0]
    if low is not None and low >= 0:
        return True
    if depth == 0:
        return False
    # max(a, b) >= a and -min(a, b) >= -a: the claim holds if it holds for one argument. It holds with -max and min if it
    # holds for every argument.
    for monomial, coefficient in dim.terms:
        if len(monomial) != 1 or not isinstance(monomial[0], Call):
            continue
        call = monomial[0]
        rest = dim - coefficient * _bare(call)
        below = _below(call, coefficient)
        if below is not None and _at_least_zero(rest + below, depth - 1):
            return True
        if call.op not in {"max", "min"}:
            continue
        enough = any if (call.op == "max") == (coefficient > 0) else all
        if enough(_at_least_zero(rest + coefficient * arg, depth - 1) for arg in call.args):
            return True
    return False


def _below(call: Call, coefficient: int) -> Dim | None:
    """A multiple of the dividend that ``coefficient * (a // b)`` or ``coefficient * (a % b)`` cannot be less than."""
    if coefficient > 0 or call.op not in {"floordiv", "mod"}:
        return None
    dividend, divisor = call.args
    if not is_positive(divisor) or bounds(dividend)[0] is None or not is_nonnegative(dividend):
        return None
    if call.op == "mod" or not isinstance(divisor, int):
        return coefficient * dividend
    return coefficient // divisor * dividend


def _bare(call: Call) -> Expr:
    return Expr((((call,), 1),))


def floordiv(a: Dim, b: Dim) -> Dim:
    """``a // b`` rounded down. Terms that ``b`` divides leave the opaque part: ``(4*s + 1) // 2 == 2*s``.

    Raises:
        ZeroDivisionError: if ``b`` is the int 0.
    """
    if b == 0:
        raise ZeroDivisionError("floor division of a tensor size by 0")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    quotient = exact_div(a, b)
    if quotient is not None:
        return quotient
    if isinstance(b, int) and isinstance(a, Expr):
        whole, rest = _split_multiples(a, b)
        if whole != 0:
            return whole + floordiv(rest, b)
        low, high = bounds(rest)
        if low is not None and high is not None and low // b == high // b:
            return low // b
    low = 0 if is_nonnegative(a) and is_nonnegative(b) else None
    return opaque("floordiv", a, b, bound=(low, None))


def _split_multiples(a: Expr, b: int) -> tuple[Dim, Dim]:
    """(q, r) with ``a == q * b + r``, every coefficient of r in range(b)."""
    whole: Dim = 0
    rest: Dim = 0
    for monomial, coefficient in a.terms:
        factor: Dim = Expr(((monomial, 1),)) if monomial else 1
        times, left = divmod(coefficient, b)
        # A negative coefficient stays as it is: 5*s - 3*s//4 reads better than 2*s + (s)//4.
        if coefficient < 0 and left:
            times, left = 0, coefficient
        whole = whole + times * factor
        rest = rest + left * factor
    return whole, rest


def truncdiv(a: Dim, b: Dim) -> Dim:
    """``a / b`` rounded towards zero, as ONNX ``Div`` does on integers.

    Raises:
        ZeroDivisionError: if ``b`` is the int 0.
    """
    if b == 0:
        raise ZeroDivisionError("division of a tensor size by 0")
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    quotient = exact_div(a, b)
    if quotient is not None:
        return quotient
    if is_nonnegative(a) and is_nonnegative(b):
        return floordiv(a, b)
    return opaque("truncdiv", a, b)


def mod(a: Dim, b: Dim) -> Dim:
    """``a - b * floor(a / b)``: the remainder with the sign of ``b``.

    Raises:
        ZeroDivisionError: if ``b`` is the int 0.
    """
    if b == 0:
        raise ZeroDivisionError("remainder of a tensor size by 0")
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if exact_div(a, b) is not None:
        return 0
    if isinstance(b, int) and isinstance(a, Expr) and b > 0:
        _, rest = _split_multiples(a, b)
        low, high = bounds(rest)
        if low is not None and high is not None and low >= 0 and high < b:
            return rest
        return opaque("mod", rest, b, bound=(0, b - 1)) if isinstance(rest, Expr) else rest % b
    return opaque("mod", a, b, bound=(0, None) if is_nonnegative(b) else (None, None))


def maximum(a: Dim, b: Dim) -> Dim:
    """The larger of ``a`` and ``b``."""
    return _extremum("max", a, b, lambda x, y: is_nonnegative(x - y))


def minimum(a: Dim, b: Dim) -> Dim:
    """The smaller of ``a`` and ``b``."""
    return _extremum("min", a, b, lambda x, y: is_nonnegative(y - x))


def _extremum(op: str, a: Dim, b: Dim, wins: Callable[[Dim, Dim], bool]) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b) if op == "max" else min(a, b)
    if a == b or wins(a, b):
        return a
    if wins(b, a):
        return b
    parts = (*_arguments(op, a), *_arguments(op, b))
    # Two of which neither wins, as was just found.
    kept: list[Dim] = list(parts) if len(parts) == 2 else []
    for dim in parts if not kept else ():
        if any(wins(other, dim) for other in kept):
            continue
        kept = [other for other in kept if not wins(dim, other)] + [dim]
    if len(kept) == 1:
        return kept[0]
    kept.sort(key=sort_key)
    lows, highs = zip(*(bounds(dim) for dim in kept), strict=True)
    known_lows = [low for low in lows if low is not None]
    known_highs = [high for high in highs if high is not None]
    if op == "max":
        low = max(known_lows, default=None)
        high = max(known_highs) if len(known_highs) == len(highs) else None
    else:
        low = min(known_lows) if len(known_lows) == len(lows) else None
        high = min(known_highs, default=None)
    return opaque(op, *kept, bound=(low, high))


def _arguments(op: str, dim: Dim) -> tuple[Dim, ...]:
    atom = dim.atom if isinstance(dim, Expr) else None
    return atom.args if isinstance(atom, Call) and atom.op == op else (dim,)


def broadcast(a: Dim, b: Dim) -> Dim:
    """The size of two axes that are broadcast against each other, granted that they can be.

    Where neither is provably the result it stays an opaque ``broadcast(a, b)``.
    """
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int):
        return a
    if isinstance(b, int):
        return b
    if is_nonnegative(a - 2):
        return a
    if is_nonnegative(b - 2):
        return b
    parts: list[Dim] = []
    for part in (*_arguments("broadcast", a), *_arguments("broadcast", b)):
        if part not in parts and not any(_fits_under(part, other) for other in parts):
            parts = [other for other in parts if not _fits_under(other, part)] + [part]
    if len(parts) == 1:
        return parts[0]
    low = 0 if all(is_nonnegative(part) for part in parts) else None
    return opaque("broadcast", *sorted(parts, key=sort_key), bound=(low, None))


def _fits_under(inner: Dim, outer: Dim) -> bool:
    """Whether ``inner`` is ``min(outer, n)``: it broadcasts with ``outer`` only where it equals it or is 1."""
    limits = _arguments("min", inner)
    return outer in limits and all(limit == outer or is_positive(limit) for limit in limits)


def slice_index(at: Dim, size: Dim) -> Dim:
    """Where a slice bound ``at`` lands on an axis of ``size``: negative counts from the end, clamped to 0..size."""
    if isinstance(at, int):
        if at >= _INT32_MAX:
            return size
        if at <= -_INT32_MAX:
            return 0
        if isinstance(size, int):
            return min(max(at + size if at < 0 else at, 0), size)
        return minimum(at, size) if at >= 0 else size - minimum(size, -at)
    if is_nonnegative(at):
        return minimum(at, size)
    if is_positive(-at):
        return size - minimum(size, -at)
    return opaque("index", at, size, bound=(0, bounds(size)[1]))


def slice_length(start: Dim, end: Dim, step: int, size: Dim) -> Dim | None:
    """How many elements ``start:end:step`` takes from an axis of ``size``; None where that cannot be expressed.

    Args:
        start: as in ONNX ``Slice``: may be negative or far out of range.
        end: likewise.
        step: not 0.
        size: length of the axis.
    """
    if step > 0:
        distance = slice_index(end, size) - slice_index(start, size)
        return maximum(distance if step == 1 else -floordiv(-distance, step), 0)
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        return _backward_length(start, end, step, size)
    # The only symbolic walk backwards that exporters write is the whole axis, x[::-k].
    from_the_end = start == -1 or start == size - 1 or (isinstance(start, int) and start >= _INT32_MAX)
    if from_the_end and isinstance(end, int) and end <= -_INT32_MAX:
        return -floordiv(-size, -step)
    return None


def _backward_length(start: int, end: int, step: int, size: int) -> int:
    first, stop = backward_bounds(start, end, size)
    return len(range(first, stop, step)) if size else 0


def backward_bounds(start: int, end: int, size: int) -> tuple[int, int]:
    """First index and the index before which a backward slice stops, -1 for the beginning.

    ONNX clamps the start to the axis where Python would take nothing: ``-3:-9:-1`` of two elements holds the first.
    """
    first = min(max(start + size if start < 0 else start, 0), size - 1)
    stop = min(max(end + size if end < 0 else end, -1), size - 1)
    return first, stop


def equal(a: Dim, b: Dim) -> Dim:
    """1 where ``a == b``, 0 where not, symbolic where that depends on the sizes."""
    difference = a - b
    if isinstance(difference, int):
        return int(difference == 0)
    if is_positive(difference) or is_positive(-difference):
        return 0
    return opaque("eq", *sorted((a, b), key=sort_key), bound=(0, 1))


def less(a: Dim, b: Dim) -> Dim:
    """1 where ``a < b``, 0 where not, symbolic where that depends on the sizes."""
    more = b - a
    if is_positive(more):
        return 1
    if is_nonnegative(-more):
        return 0
    return opaque("less", a, b, bound=(0, 1))


def select(condition: Dim, a: Dim, b: Dim) -> Dim:
    """``a`` where ``condition`` is not 0, else ``b``."""
    if a == b or is_positive(condition):
        return a
    least = bounds(condition)[0]
    # What is never below 0 needs no proof that it is not always below 0.
    if (least is None or least < 0) and is_positive(-condition):
        return a
    if condition == 0:
        return b
    low = 0 if is_nonnegative(a) and is_nonnegative(b) else None
    return opaque("where", condition, a, b, bound=(low, None))


def absolute(a: Dim) -> Dim:
    """``|a|``."""
    if is_nonnegative(a):
        return a
    if is_nonnegative(-a):
        return -a
    return opaque("abs", a, bound=(0, None))


SIMPLIFIERS.update(
    {
        "mul": lambda a, b: a * b,
        "floordiv": floordiv,
        "truncdiv": truncdiv,
        "mod": mod,
        "max": lambda *args: functools.reduce(maximum, args),
        "min": lambda *args: functools.reduce(minimum, args),
        "broadcast": lambda *args: functools.reduce(broadcast, args),
        "index": slice_index,
        "eq": equal,
        "less": less,
        "where": select,
        "abs": absolute,
    }
)
