"""Selecting sites by id, kind, layer and range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.errors import UsageError
from graphsurgery.patterns.site import Refusal, Site, select

SITES = [
    Site(id="attention:0", kinds=("attention", "sliding"), layer=0),
    Site(id="attention:1", kinds=("attention", "full"), layer=1),
    Refusal(id="attention:2", kinds=("attention", "full"), layer=2, reason="its mask is not understood"),
    Site(id="attention:10", kinds=("attention", "sliding"), layer=10),
    Site(id="vision:0-3", kinds=("attention", "vision")),
]


def _ids(sites: list[str], exclude: list[str]) -> list[str]:
    chosen, others = select(SITES, sites, exclude)
    assert [site for site in SITES if site in chosen] == chosen
    assert [site for site in SITES if site in others] == others
    assert len(chosen) + len(others) == len(SITES)
    return [site.id.rpartition(":")[2] for site in chosen]


@pytest.mark.parametrize(
    ("sites", "exclude", "chosen"),
    [
        ([], [], ["0", "1", "2", "10", "0-3"]),
        (["attention:1"], [], ["1"]),
        (["sliding"], [], ["0", "10"]),
        (["full", "vision"], [], ["1", "2", "0-3"]),
        (["1"], [], ["1"]),
        (["10"], [], ["10"]),
        (["0-1"], [], ["0", "1"]),
        (["1-10"], [], ["1", "2", "10"]),
        (["2-2"], [], ["2"]),
        (["0-99"], [], ["0", "1", "2", "10"]),
        (["vision:0-3"], [], ["0-3"]),
        ([], ["sliding"], ["1", "2", "0-3"]),
        (["attention"], ["1-2", "vision"], ["0", "10"]),
        (["sliding"], ["sliding"], []),
        (["0", "0"], [], ["0"]),
    ],
)
def test_selectors(sites, exclude, chosen):
    assert _ids(sites, exclude) == chosen


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        ("attention:3", "the closest are attention:"),
        ("slidin", "the closest are sliding"),
        ("7", "the closest are attention, attention:0, attention:1, attention:10, attention:2, full, sliding, vision"),
        ("3-9", "the closest are attention, attention:0"),
        ("9-3", "the closest are attention, attention:0"),
    ],
)
@pytest.mark.parametrize("where", ["sites", "exclude"])
def test_a_selector_that_matches_nothing_is_a_usage_error(selector, hint, where):
    arguments = {"sites": [], "exclude": [], where: ["attention", selector]}
    with pytest.raises(UsageError) as caught:
        select(SITES, **arguments)
    text = str(caught.value)
    assert text.startswith(f"Selector {selector!r} matches no site; {hint}")
    assert text.endswith(". Run inspect to list the sites.")
    assert caught.value.exit_code == 2


def test_a_range_that_runs_backwards_matches_nothing():
    with pytest.raises(UsageError, match="'2-0' matches no site"):
        select(SITES, ["2-0"], [])


def test_a_model_without_sites():
    assert select([], [], []) == ([], [])
    with pytest.raises(UsageError) as caught:
        select([], ["0-3"], [])
    assert str(caught.value) == (
        "Selector '0-3' matches no site; the model has no site of this pass. Run inspect to list the sites."
    )


@given(st.integers(0, 12), st.integers(0, 12))
def test_a_range_is_the_union_of_its_layers(first, last):
    sites = [Site(id=f"s{number}", layer=number) for number in range(13)]
    if first > last:
        with pytest.raises(UsageError):
            select(sites, [f"{first}-{last}"], [])
        return
    chosen, others = select(sites, [f"{first}-{last}"], [])
    assert chosen == sites[first : last + 1]
    assert others == sites[:first] + sites[last + 1 :]
