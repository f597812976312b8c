"""The algebra of symbolic sizes: normal form, simplifications that must hold, and agreement with plain arithmetic."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphsurgery.analysis import dims
from graphsurgery.analysis.dims import (
    absolute,
    bounds,
    broadcast,
    equal,
    evaluate,
    exact_div,
    floordiv,
    free_names,
    is_nonnegative,
    is_positive,
    less,
    maximum,
    minimum,
    mod,
    parse_dim,
    select,
    slice_index,
    slice_length,
    substitute,
    symbol,
    truncdiv,
    unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

B, P, S = symbol("B"), symbol("P"), symbol("S", positive=True)
T = P + S


def test_equality_is_that_of_the_normal_form():
    assert (P + S) - P == S
    assert (P + S) * B == B * S + P * B
    assert S - S == 0
    assert isinstance(S - S, int)
    assert hash(P + S) == hash(S + P)
    assert S != 5
    assert symbol("S") == S
    assert symbol("S") != symbol("s")


def test_an_expression_prints_readably():
    assert str(P + S) == "P + S"
    assert str(2 * S - 1) == "2*S - 1"
    assert str(-S + B) == "B - S"
    assert str(-S) == "-S"
    assert str(B * S * 8) == "8*B*S"
    assert str(minimum(S, 4)) == "min(S, 4)"
    assert str(unknown(7)) == "?7"
    assert repr(P + S) == "Expr('P + S')"


def test_evaluate_needs_every_name():
    assert evaluate(2 * T + 1, {"P": 3, "S": 2}) == 11
    assert evaluate(T, {"P": 3}) is None
    assert evaluate(unknown(4) + 1, {"?4": 6}) == 7
    assert evaluate(12, {}) == 12
    assert evaluate(floordiv(P, S), {"P": 3, "S": 0}) is None
    assert evaluate(broadcast(P, S), {"P": 3, "S": 2}) is None


def test_names_and_substitution():
    assert isinstance(T, dims.Expr)
    assert (T * unknown(3)).symbols() == {"P", "S"}  # type: ignore[union-attr]
    assert free_names(minimum(T, unknown(3))) == {"P", "S", "?3"}
    assert substitute(minimum(T, 4 * B), {"P": 0, "B": S}) == S
    assert substitute(T, {"P": 1, "S": 2}) == 3
    assert substitute(3, {"P": 1}) == 3
    assert substitute(broadcast(P, B), {"P": 1}) == B


def test_division():
    assert exact_div(6 * B * S, 2 * S) == 3 * B
    assert exact_div(T * T * B, T) == T * B
    assert exact_div(T, S) is None
    assert exact_div(S, 0) is None
    assert floordiv(4 * S + 1, 2) == 2 * S
    assert floordiv(4 * S + 3, 2) == 2 * S + 1
    assert str(floordiv(3 * S, 2)) == "S + floordiv(S, 2)"
    assert truncdiv(-7, 2) == -3
    assert truncdiv(8 * S, 4) == 2 * S
    assert mod(4 * S + 3, 2) == 1
    assert str(mod(S, 64)) == "mod(S, 64)"
    for function in (floordiv, truncdiv, mod):
        with pytest.raises(ZeroDivisionError, match="by 0"):
            function(S, 0)


def test_a_size_that_divides_by_zero_has_no_value():
    size = substitute(floordiv(T, floordiv(S, 4)), {"S": 1})
    assert evaluate(size, {"P": 3}) is None


def test_order_is_proved_where_it_can_be():
    assert minimum(T, P) == P
    assert maximum(T, S) == T
    assert minimum(S, 1) == 1
    assert str(minimum(P, 1)) == "min(P, 1)"
    assert minimum(minimum(S, 9), minimum(S, 4)) == minimum(S, 4)
    assert is_positive(T)
    assert not is_positive(P)
    assert is_nonnegative(T - minimum(T, 9))
    assert is_nonnegative(maximum(P, S) - P)
    assert not is_nonnegative(P - S)
    assert bounds(minimum(P, 9)) == (0, 9)
    assert bounds(S * B + 2) == (2, None)
    assert bounds(mod(P, 8) * 2) == (0, 14)
    assert bounds(unknown(1, signed=True)) == (None, None)


def test_broadcast():
    assert broadcast(S, 1) == S
    assert broadcast(1, S) == S
    assert broadcast(7, S) == 7
    assert broadcast(S, S) == S
    assert broadcast(S + 2, P) == S + 2
    assert broadcast(minimum(T, 1024), T) == T
    assert broadcast(broadcast(P, B), P) == broadcast(B, P)
    assert str(broadcast(broadcast(P, B), S)) == "broadcast(B, P, S)"


def test_comparisons_know_what_sizes_are():
    assert equal(S, -1) == 0
    assert equal(T, P + S) == 1
    assert equal(S, 0) == 0
    assert str(equal(P, 0)) == "eq(P, 0)"
    assert less(P, T) == 1
    assert less(T, P) == 0
    assert select(equal(S, -1), 1, S) == S
    assert select(equal(P, 0), P, P) == P
    assert str(select(equal(P, 0), 0, S)) == "where(eq(P, 0), 0, S)"
    assert absolute(-T) == T


def test_slices():
    assert slice_length(0, 2**63 - 1, 1, T) == T
    assert slice_length(P, T, 1, T) == S
    assert slice_length(-S, 2**63 - 1, 1, T) == S
    assert slice_length(-1, 2**63 - 1, 1, S) == 1
    assert slice_length(0, -1, 1, S) == S - 1
    assert str(slice_length(-1, 2**63 - 1, 1, P)) == "min(P, 1)"
    assert slice_length(-1, -(2**63), -1, T) == T
    assert slice_length(3, 0, -1, T) is None
    assert slice_index(2, 5) == 2
    assert slice_index(-9, 5) == 0
    assert slice_index(2**40, T) == T


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", 2),
        ("S", symbol("S")),
        ("past_sequence_length + sequence_length", symbol("past_sequence_length") + symbol("sequence_length")),
        ("2*s0", 2 * symbol("s0")),
        ("batch*seq", symbol("batch") * symbol("seq")),
        ("s0 + s1 - 1", symbol("s0") + symbol("s1") - 1),
        ("(s0 + 1)//2", floordiv(symbol("s0") + 1, 2)),
        ("Max(1, s0)", maximum(1, symbol("s0"))),
        ("s0**2", symbol("s0") * symbol("s0")),
        ("Mod(s0, 4)", mod(symbol("s0"), 4)),
        ("batch-size", symbol("batch-size")),
        ("input.shape[0]", symbol("input.shape[0]")),
        ("a b", symbol("a b")),
        ("s0 / 0", symbol("s0 / 0")),
        ("f(x)", symbol("f(x)")),
        ("lambda", symbol("lambda")),
        ("", None),
        ("?", None),
        ("-1", None),
        ("None", None),
    ],
)
def test_dim_params_are_read(text, expected):
    assert parse_dim(text) == expected


# Random expressions: built once symbolically and once on plain numbers.

_NAMES = ("a", "b", "c")
_Tree = int | str | tuple[str, Any, Any]
_BINARY: dict[str, tuple[Callable[..., dims.Dim], Callable[..., int]]] = {
    "add": (operator.add, operator.add),
    "sub": (operator.sub, operator.sub),
    "mul": (operator.mul, operator.mul),
    "floordiv": (floordiv, operator.floordiv),
    "truncdiv": (truncdiv, lambda x, y: int(x / y)),
    "mod": (mod, operator.mod),
    "min": (minimum, min),
    "max": (maximum, max),
    "equal": (equal, lambda x, y: int(x == y)),
    "less": (less, lambda x, y: int(x < y)),
    "index": (slice_index, lambda x, y: range(max(y, 0))[slice(x, None)].start),
}
_TREES = st.recursive(
    st.one_of(st.sampled_from(_NAMES), st.integers(-4, 6)),
    lambda inner: st.tuples(st.sampled_from(sorted(_BINARY)), inner, inner),
    max_leaves=8,
)


class _NoValueError(Exception):
    """The tree divides by zero, or slices an axis of negative length."""


def _both(tree: _Tree, values: Mapping[str, int]) -> tuple[dims.Dim, int]:
    if isinstance(tree, int):
        return tree, tree
    if isinstance(tree, str):
        return symbol(tree), values[tree]
    op, left, right = tree
    (left_dim, left_number), (right_dim, right_number) = _both(left, values), _both(right, values)
    symbolic, plain = _BINARY[op]
    if op in {"floordiv", "truncdiv", "mod"} and (right_number == 0 or right_dim == 0):
        raise _NoValueError
    if op == "index" and (right_number < 0 or not is_nonnegative(right_dim)):
        raise _NoValueError
    return symbolic(left_dim, right_dim), plain(left_number, right_number)


@given(tree=_TREES, values=st.fixed_dictionaries({name: st.integers(0, 7) for name in _NAMES}))
def test_a_normalised_expression_has_the_value_of_the_plain_arithmetic(tree, values):
    try:
        dim, number = _both(tree, values)
    except _NoValueError:
        assume(False)
    assert evaluate(dim, values) == number
    low, high = bounds(dim)
    assert low is None or low <= number
    assert high is None or number <= high
    if is_nonnegative(dim):
        assert number >= 0


@given(tree=_TREES, values=st.fixed_dictionaries({name: st.integers(0, 7) for name in _NAMES}))
def test_substituting_numbers_one_by_one_gives_the_value(tree, values):
    try:
        dim, number = _both(tree, values)
        for name, value in values.items():
            dim = substitute(dim, {name: value})
    except (_NoValueError, ZeroDivisionError):
        assume(False)
    assert dim == number


@given(
    start=st.integers(-9, 9),
    end=st.integers(-9, 9),
    step=st.sampled_from([1, 2, 3, -1, -2]),
    size=st.integers(0, 7),
    symbolic=st.booleans(),
)
def test_slice_length_is_that_of_python_but_for_a_backward_start(start, end, step, size, symbolic):
    axis: dims.Dim = symbol("n") if symbolic else size
    # Walking backwards, ONNX clamps the start to the axis and the end to -1, which Python would read as the last element.
    stop = None if step < 0 and end < -size else end
    first = max(start, -size) if step < 0 and size else start
    length = slice_length(start, end, step, axis)
    if length is None:
        assert symbolic
        assert step < 0
    else:
        assert evaluate(length, {"n": size}) == len(range(size)[slice(first, stop, step)])


@given(
    left=st.lists(st.tuples(st.integers(-3, 3), st.lists(st.sampled_from(_NAMES), max_size=3)), min_size=1, max_size=4),
    right=st.lists(
        st.tuples(st.integers(-3, 3), st.lists(st.sampled_from(_NAMES), max_size=2)), min_size=1, max_size=3
    ),
)
def test_a_product_divides_by_its_factors(left, right):
    def polynomial(terms: list[tuple[int, list[str]]]) -> dims.Dim:
        return sum(
            (dims.product([coefficient, *(symbol(name) for name in names)]) for coefficient, names in terms), start=0
        )

    first, second = polynomial(left), polynomial(right)
    assume(second != 0)
    assert exact_div(first * second, second) == first


def test_a_signed_number_and_a_size_of_the_same_number_are_kept_apart():
    """What was worked out for one, and is kept, is not the answer for the other."""
    size, number = unknown(900), unknown(900, signed=True)
    assert str(maximum(size, 0)) == "?900"
    assert str(maximum(number, 0)) == "max(?900, 0)"
    assert number != size
