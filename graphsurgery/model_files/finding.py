"""Which models a directory holds."""

from __future__ import annotations

import os
from pathlib import Path

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_files.staging import is_temporary

__all__ = ["find_models"]

_BOOKKEEPING = frozenset({".git", ".cache"})


def find_models(directory: Path) -> dict[str, Path]:
    """The .onnx files in ``directory`` and below, by their paths relative to it, with slashes on every system.

    Half-written results and the bookkeeping of version control and of download tools are passed over.

    Raises:
        InputRefusedError: a directory cannot be listed, or there is no model in it.
    """
    found: dict[str, Path] = {}

    def refuse(error: OSError) -> None:
        message = f"{error.filename} cannot be listed ({error.strerror}): check the path and its permissions."
        raise InputRefusedError(message) from error

    for top, directories, names in os.walk(directory, onerror=refuse):
        directories[:] = [name for name in directories if name not in _BOOKKEEPING and not is_temporary(name)]
        for name in names:
            if name.endswith(".onnx") and not is_temporary(name):
                path = Path(top, name)
                found[path.relative_to(directory).as_posix()] = path
    if not found:
        raise InputRefusedError(f"{directory} holds no .onnx file: give the directory of a model, or an .onnx file.")
    return found
