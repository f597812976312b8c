"""Garbage collection around work that makes millions of objects, none of them garbage."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["paused_gc"]


@dataclasses.dataclass
class _Followed:
    """How many objects the collector follows.

    Attributes:
        kept: after it looked at all of them; at first, after the first work.
        now: after the last work.
    """

    kept: int = 0
    now: int = 0


_followed = _Followed()


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collection within.

    What was made goes to the oldest generation unseen: the next collection of the young would walk all of it. The
    interpreter does not count what comes there in this way, and would never collect models that were dropped. So all
    is collected before other work begins, once there is half as much again as was kept.
    """
    enabled = gc.isenabled()
    if enabled and _followed.now > _followed.kept * 3 // 2:
        gc.collect()
        _followed.kept = _followed.now = _made_old()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _followed.now = _made_old()
            _followed.kept = _followed.kept or _followed.now
            gc.enable()


def _made_old() -> int:
    """Move all objects to the oldest generation; how many they are.

    0 where the caller froze some, which would be thawed: the interpreter counts on its own then.
    """
    if gc.get_freeze_count():
        return 0
    gc.freeze()
    count = gc.get_freeze_count()
    gc.unfreeze()
    return count
