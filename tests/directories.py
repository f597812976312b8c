"""What lies in a directory, to be compared."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def digests(directory: Path) -> dict[str, str]:
    """The sha256 of every file below ``directory``, temporaries and hidden files included."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
