from __future__ import annotations

import numpy as np

from graphsurgery.equivalence.tape import Tape

ROWS = [(5, 6, 7), (8,)]


def test_rows_are_padded_on_one_side():
    left, right = Tape.of(ROWS, 4, "left"), Tape.of(ROWS, 4, "right")
    assert left.tokens.tolist() == [[0, 5, 6, 7], [0, 0, 0, 8]]
    assert left.real.tolist() == [[False, True, True, True], [False, False, False, True]]
    assert right.tokens.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert (left.batch, left.width) == (2, 4)


def test_counts_and_last_columns_are_those_of_real_tokens():
    right = Tape.of(ROWS, 4, "right")
    assert right.counts(2).tolist() == [2, 1]
    assert right.last_real(4).tolist() == [2, 0]
    assert Tape.of(ROWS, 4, "left").last_real(4).tolist() == [3, 3]


def test_a_step_is_a_column_of_real_tokens():
    tape = Tape.of(ROWS, 3, "right").then(np.array([1, 2]))
    assert tape.tokens.tolist() == [[5, 6, 7, 1], [8, 0, 0, 2]]
    assert tape.real[1].tolist() == [True, False, False, True]
    assert tape.counts(4).tolist() == [4, 2]


def test_rows_are_laid_out_anew_without_gaps():
    tape = Tape.of(ROWS, 3, "right").then(np.array([1, 2]))
    assert tape.relaid(4, 5, "right").tokens.tolist() == [[5, 6, 7, 1, 0], [8, 2, 0, 0, 0]]
    assert tape.relaid(4, 4, "left").tokens.tolist() == [[5, 6, 7, 1], [0, 0, 8, 2]]
