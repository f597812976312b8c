"""Memory of this process as the kernel counts it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

__all__ = ["Reading", "read_memory", "reset_peak"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class Reading:
    """Bytes at one moment.

    Attributes:
        resident: in memory now (VmRSS); None where the system has no /proc.
        peak: the most since the process began, or since :func:`reset_peak` (VmHWM).
        anonymous: the part of ``resident`` that no file backs (RssAnon): mapped weights are not in it.
    """

    resident: int | None
    peak: int | None
    anonymous: int | None


def read_memory() -> Reading:
    """What /proc/self/status says; elsewhere the peak alone, from getrusage, or nothing."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return Reading(None, _rusage_peak(), None)
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return Reading(sizes.get("VmRSS"), sizes.get("VmHWM"), sizes.get("RssAnon"))


def _rusage_peak() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    # Darwin counts bytes, other systems KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> bool:
    """Count the peak anew from here; False where the kernel does not allow it."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
