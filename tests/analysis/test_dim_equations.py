"""Solving for symbolic sizes, and explaining why that is not possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.analysis.dim_equations import DimSolver, Equation
from graphsurgery.analysis.dims import Dim, evaluate, parse_dim, unknown
from graphsurgery.errors import UsageError


def dim(text: str) -> Dim:
    parsed = parse_dim(text)
    assert parsed is not None
    return parsed


def equations(*rows: tuple[str, str, str]) -> list[Equation]:
    return [Equation(dim(left), dim(right), said, "axis 1 of input 'x'") for left, right, said in rows]


def test_order_does_not_matter():
    rows = equations(("past + seq", "24", "total=24"), ("3*seq", "24", "rows"), ("n - 1", "past", "n is past + 1"))
    for order in (rows, rows[::-1], rows[1:] + rows[:1]):
        solver = DimSolver(order)
        assert solver.numbers == {"seq": 8, "past": 16, "n": 17}
        assert solver.pending == []
    assert solver.said("past") == "total=24"


def test_what_is_open_stays_pending():
    rows = equations(("past + seq", "24", "total=24"))
    solver = DimSolver(rows)
    assert solver.numbers == {}
    assert solver.pending == rows
    solver.add(equations(("seq", "24", "seq=24")))
    assert solver.numbers == {"seq": 24, "past": 0}
    assert solver.pending == []


def test_products_and_functions_are_checked_and_not_solved():
    solver = DimSolver(equations(("batch*seq", "6", "rows=6"), ("max(seq, 4)", "4", "four")))
    assert (solver.numbers, len(solver.pending)) == ({}, 2)
    solver.add(equations(("seq", "3", "seq=3")))
    assert solver.numbers == {"seq": 3, "batch": 2}


def test_sizes_without_a_name():
    solver = DimSolver([Equation(unknown(7), 5, "seq=5", "axis 0 of input 'x'")])
    assert solver.numbers == {"?7": 5}
    with pytest.raises(UsageError, match=r"^Axis 0 of input 'x' cannot be both 6 \(S=6\) and 5 \(seq=5\)\.$"):
        solver.add([Equation(unknown(7), 6, "S=6", "axis 0 of input 'x'")])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("s", "3", "seq=3"), ("s", "4", "S=4")], "Dim 's' cannot be both 4 (S=4) and 3 (seq=3)."),
        ([("64", "3", "seq=3")], "Axis 1 of input 'x' cannot be both 3 (seq=3) and 64 (its fixed size)."),
        (
            [("s", "3", "seq=3"), ("p", "2", "past=2"), ("p + s", "9", "total=9")],
            "Dim 'p + s' cannot be both 9 (total=9) and 5 (with past=2 and seq=3).",
        ),
        (
            [("s", "3", "seq=3"), ("p", "2", "past=2"), ("t", "9", "total=9"), ("t", "p + s", "past + seq")],
            "Dim 't' cannot be both 5 (past + seq, with past=2 and seq=3) and 9 (total=9).",
        ),
        (
            [("s", "8", "seq=8"), ("p + s", "4", "total=4")],
            "No size of dim 'p' makes p + s equal to 4 (total=4), with seq=8.",
        ),
        ([("2*s", "7", "rows=7")], "No size of dim 's' makes 2*s equal to 7 (rows=7)."),
    ],
)
def test_contradictions(rows, message):
    with pytest.raises(UsageError) as caught:
        DimSolver(equations(*rows))
    assert str(caught.value) == message


_TERMS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from("abcd")), min_size=1, max_size=3)


@given(
    st.fixed_dictionaries({name: st.integers(0, 20) for name in "abcd"}),
    st.lists(_TERMS, min_size=1, max_size=6),
    st.integers(-3, 3),
)
def test_true_equations_never_contradict(numbers, sums, extra):
    rows = [dim(" + ".join(f"{factor}*{name}" for factor, name in terms)) + extra for terms in sums]
    solver = DimSolver(Equation(size, evaluate(size, numbers) or 0, "fact") for size in rows)
    assert all(numbers[name] == number for name, number in solver.numbers.items())
