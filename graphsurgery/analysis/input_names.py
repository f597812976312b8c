"""What the name of an input tells of it, where nothing else does."""

from __future__ import annotations

import re

__all__ = ["is_image_name"]

_IMAGES = re.compile("pixel|image", re.IGNORECASE)


def is_image_name(name: str | None) -> bool:
    """Whether an input is called one of pixels."""
    return name is not None and _IMAGES.search(name) is not None
