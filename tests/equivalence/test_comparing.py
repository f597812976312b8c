from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.equivalence.comparing import compare, tolerance

NAN, INF = math.nan, math.inf


def f32(*values) -> Any:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("dtype", "half", "optimized", "expected"),
    [
        (np.float32, False, False, 1e-5),
        (np.float32, False, True, 1e-4),
        (np.float16, True, False, 2e-3),
        (np.float32, True, False, 2e-3),
        (np.float64, False, False, 1e-5),
        (np.int64, False, False, 0.0),
        (np.bool_, True, True, 0.0),
    ],
)
def test_tolerances(dtype, half, optimized, expected):
    assert tolerance(np.dtype(dtype), half=half, optimized=optimized) == expected


def test_the_error_is_relative_to_the_largest_reference_above_one():
    large = compare(f32(0, 100), f32(0.001, 100), 1e-5)
    assert large.error == pytest.approx(1e-5, rel=1e-3)
    small = compare(f32(0, 0.01), f32(0, 0.02), 1e-5)
    assert small.error == pytest.approx(0.01, rel=1e-3)
    assert small.index == (1,)
    assert small.problem is not None
    assert "above 1e-05, at [1]" in small.problem


@pytest.mark.parametrize(
    ("reference", "got", "equal"),
    [
        (f32(NAN, 1), f32(NAN, 1), True),
        (f32(NAN, 1), f32(1, NAN), False),
        (f32(INF, -INF), f32(INF, -INF), True),
        (f32(INF, 1), f32(-INF, 1), False),
        (f32(1, 1), f32(1, NAN), False),
        (f32(NAN, NAN), f32(NAN, NAN), True),
        (f32(INF, 1), f32(1e38, 1), False),
    ],
)
def test_nan_and_infinities_are_equal_to_themselves(reference, got, equal):
    result = compare(reference, got, 1e-5)
    assert (result.problem is None) is equal
    assert result.error == (0 if equal else INF)


def test_masking_constants_do_not_hide_errors():
    low = float(np.finfo(np.float32).min)
    assert compare(f32(low, 1.0), f32(low, 1.001), 1e-5).problem is not None
    assert compare(f32(-1e9, 1.0), f32(-1e9, 1.001), 1e-5).problem is not None


@pytest.mark.parametrize(
    ("reference", "got", "words"),
    [
        (np.array([1, 2]), np.array([1, 3]), "differs in 1 of 2 elements"),
        (np.array([True]), np.array([False]), "bitwise equal"),
        (np.array(["a"], object), np.array(["b"], object), "bitwise equal"),
        (f32(1), f32(1, 2), r"has shape \[2\], not \[1\]"),
        (f32(1), np.array([1.0]), "is float64, not float32"),
        (None, f32(1), "holds ndarray"),
    ],
)
def test_what_differs_is_said(reference, got, words):
    result = compare(reference, got, 0.0)
    assert result.problem is not None
    assert re.search(words, result.problem)


def test_bitwise_tells_what_a_tolerance_would_pass():
    a = f32(1.0)
    b = np.nextafter(a, f32(2))
    assert compare(a, b, 1e-5).problem is None
    assert compare(a, b, 0.0).problem is not None
    assert compare(f32(0.0), f32(-0.0), 0.0).problem is not None
    assert compare(f32(NAN), f32(NAN), 0.0).problem is None


def test_nothing_to_compare_is_equal():
    assert compare(np.zeros((2, 0, 3), np.float32), np.zeros((2, 0, 3), np.float32), 1e-5).error == 0
    assert compare(None, None, 1e-5).problem is None
    assert compare([], [], 1e-5).problem is None


def test_excluded_elements_are_not_looked_at():
    excluded = np.array([False, True])
    assert compare(f32(1, 2), f32(1, 9), 1e-5, excluded=excluded).problem is None
    assert compare(f32(1, 2), f32(1, NAN), 1e-5, excluded=excluded).problem is None
    assert compare(f32(1, 2), f32(3, 2), 1e-5, excluded=excluded).problem is not None
    assert compare(f32(1, 2), f32(3, 4), 0.0, excluded=np.array(True)).problem is None


def test_sequences_are_compared_one_by_one():
    good = compare([f32(1), f32(2)], [f32(1), f32(2)], 1e-5)
    assert good.problem is None
    bad = compare([f32(1), f32(2)], [f32(1), f32(3)], 1e-5)
    assert bad.problem is not None
    assert bad.index == (1, 0)
    short = compare([f32(1), f32(2)], [f32(1)], 1e-5)
    assert short.problem == "holds 1 tensors, not 2"


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    st.integers(0, 19),
    st.floats(2**-9, 8, width=32),
    st.sampled_from([np.float32, np.float16]),
)
def test_any_planted_error_is_found(values, place, shift, dtype):
    reference = np.array(values, dtype)
    wrong = reference.copy()
    place %= len(values)
    scale = max(1.0, float(np.abs(reference).max()))
    wrong[place] = reference[place] + dtype(shift * scale)
    limit = 1e-5 if dtype is np.float32 else 2e-4
    assert compare(reference, reference.copy(), limit).error == 0
    found = compare(reference, wrong, limit)
    assert found.problem is not None
    assert found.index == (place,)
