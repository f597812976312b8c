from __future__ import annotations

from graphsurgery.equivalence.coverage import coverage_warning, uncovered_kinds
from graphsurgery.equivalence.feeds import Sizes


def test_only_kinds_that_were_to_be_compared_are_missed():
    assert uncovered_kinds([Sizes(1, 5, 0)], []) == ()
    assert uncovered_kinds([Sizes(1, 5, 0)], [Sizes(1, 3, 0)]) == ()
    assert uncovered_kinds([Sizes(1, 5, 0)], [Sizes(1, 1, 7), Sizes(2, 5, 0)]) == (
        "batch above 1",
        "past",
        "single token",
    )
    assert uncovered_kinds([Sizes(1, 1, 7), Sizes(1, 5, 0)], [Sizes(1, 3, 4)]) == ("several tokens behind a past",)
    assert uncovered_kinds([Sizes(1, 1, 7), Sizes(2, 1, 0)], [Sizes(2, 1, 6), Sizes(1, 5, 0)]) == (
        "several tokens at once",
        "batch above 1 behind a past",
    )


def test_what_is_missed_is_told_once():
    assert coverage_warning(()) is None
    assert coverage_warning(("past", "batch above 1")) == (
        "every feed of these kinds was left out, so nothing was compared there: past, batch above 1"
    )
