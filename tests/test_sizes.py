"""Sizes as people write them."""

from __future__ import annotations

import pytest

from graphsurgery.errors import UsageError
from graphsurgery.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("12B", 12),
        ("256MiB", 256 * 2**20),
        ("256mib", 256 * 2**20),
        (" 8 GB ", 8 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("10KB", 10_000),
        ("10KiB", 10_240),
        ("3MB", 3_000_000),
    ],
)
def test_a_number_and_a_unit(text, size):
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "lots", "GB", "1TB", "-1", "1e3", "1,5GB", "1..5GB", "256 Mi B"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--memory")
    assert str(caught.value) == (f"--memory {text!r} is not a size: write a number with KB, MB, GB, KiB, MiB or GiB.")
