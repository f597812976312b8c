"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from graphsurgery.errors import UsageError

__all__ = ["parse_size"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str, option: str) -> int:
    """Bytes from ``256MiB``, ``8GB``, ``1.5GiB`` or a bare number.

    Raises:
        UsageError: ``text``, given for ``option``, is no size.

    Example:
        >>> parse_size("256MiB", "--memory")
        268435456
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise UsageError(f"{option} {text!r} is not a size: write a number with KB, MB, GB, KiB, MiB or GiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])
