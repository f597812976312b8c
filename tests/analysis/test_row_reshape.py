"""Following rows through a Reshape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.analysis._row_reshape import reshape_axis, reshape_groups
from graphsurgery.analysis._row_types import RowAxis
from graphsurgery.analysis.dims import Dim, symbol, unknown

B, S, H = symbol("B"), symbol("S"), 6
Q = unknown(7)


def groups(before: tuple[Dim, ...], after: tuple[Dim, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(left), tuple(right)) for left, right in reshape_groups(before, after)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 3, 4), (6, 2, 2), [((0, 1), (0,)), ((2,), (1, 2))]),
        ((B, S, H), (B * S, H), [((0, 1), (0,)), ((2,), (1,))]),
        ((B, S, H), (B, S, 2, 3), [((0,), (0,)), ((1,), (1,)), ((2,), (2, 3))]),
        ((Q, H), (B, S, H), [((0,), (0, 1)), ((1,), (2,))]),
        ((B, S, 1), (B, S), [((0,), (0,)), ((1,), (1,)), ((2,), ())]),
        ((1, S, H), (S, H), [((0, 1), (0,)), ((2,), (1,))]),
    ],
)
def test_groups_of_axes(before, after, expected):
    assert groups(before, after) == expected


FLAT = RowAxis(0, flat=True)


@pytest.mark.parametrize(
    ("rows", "before", "after", "expected"),
    [
        (FLAT, (B, S, H), (B * S, H), RowAxis(1)),
        (RowAxis(1), (B * S, H), (B, S, H), FLAT),
        (RowAxis(1), (Q, H), (B, S, H), FLAT),
        (RowAxis(1), (S, H), (1, S, H), RowAxis(0)),
        (RowAxis(0), (1, S, H), (S, H), RowAxis(1)),
        (RowAxis(1), (B, S, 2, 3), (B, S, H), RowAxis(1)),
        (RowAxis(2), (B, S, H), (B, 1, S, H), RowAxis(1)),
        (FLAT, (B * S, H), (B * S, 2, 3), FLAT),
        (RowAxis(2), (B, S, H), (B, S, 2, 3), None),
        (RowAxis(0), (S, B, H), (S * B * 2, 3), None),
        (RowAxis(0), (S * B, H), (S, B, H), None),
        (FLAT, (B, S, 2, 3), (B * S * 2, 3), None),
    ],
)
def test_where_rows_were(rows, before, after, expected):
    assert reshape_axis(rows, before, after) == expected


@st.composite
def reshapes(draw) -> tuple[int, int, tuple[int, ...], tuple[int, ...], RowAxis]:
    """B, S, and two shapes of one tensor of which the second has rows, alone or behind one another."""
    batch, length = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    rest = draw(st.sampled_from([(6,), (2, 3), (1, 6), (6, 1), (3, 2, 1)]))
    forms = [
        ((batch, length, *rest), RowAxis(1)),
        ((batch * length, *rest), FLAT),
        ((batch, length, 6), RowAxis(1)),
        ((batch, 1, length, 6), RowAxis(2)),
        ((1, batch * length, 6), RowAxis(1, flat=True)),
        ((batch * length, 6, 1), FLAT),
    ]
    before, _ = draw(st.sampled_from(forms))
    after, rows = draw(st.sampled_from(forms))
    return batch, length, before, after, rows


def taken(array: np.ndarray, rows: RowAxis, wanted: np.ndarray, batch: int, length: int) -> np.ndarray:
    if rows.flat:
        wanted = (np.arange(batch)[:, None] * length + wanted[None, :]).reshape(-1)
    return np.take(array, wanted, axis=rows.axis)


@given(reshapes(), st.integers(0, 9))
def test_rows_taken_before_are_the_rows_after(drawn, seed):
    batch, length, before, after, rows = drawn
    source = reshape_axis(rows, before, after)
    if source is None:
        return
    array = np.arange(np.prod(before)).reshape(before)
    wanted = np.random.default_rng(seed).integers(0, length, 3)
    sizes = list(after)
    sizes[rows.axis] = 3 * batch if rows.flat else 3
    got = taken(array, source, wanted, batch, length).reshape(sizes)
    np.testing.assert_array_equal(got, taken(array.reshape(after), rows, wanted, batch, length))
