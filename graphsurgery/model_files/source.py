"""Where a loaded model came from: its file, its data files, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import onnx_ir as ir

__all__ = ["DataFile", "DataProblem", "InterfaceNames", "Source", "attach_source", "source_of"]

_SOURCE_KEY = "graphsurgery.source"
_NAMES_KEY = "graphsurgery.interface_names"


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file that holds external tensors.

    Attributes:
        location: the path relative to the model's directory, as the model states it.
        path: where that is.
        size: bytes; None where the file is absent.
        linked: whether a symbolic link lies between the model's directory and the bytes, as in a hub's cache.
            Runtimes refuse such a file once the model beside it is a regular file, so that it must be copied.
    """

    location: str
    path: Path
    size: int | None
    linked: bool


@dataclasses.dataclass(frozen=True)
class DataProblem:
    """A data file that is missing, or ends before tensors that it should hold.

    Attributes:
        path: the data file.
        kind: ``missing`` or ``short``.
        tensors: names of the tensors whose bytes are not there, in graph order.
        needed: bytes that the file must hold for these tensors.
        size: bytes that it holds; None where it is missing.
        hint: what may be the cause, or empty.
    """

    path: Path
    kind: Literal["missing", "short"]
    tensors: tuple[str, ...]
    needed: int
    size: int | None
    hint: str = ""

    @property
    def message(self) -> str:
        """One sentence: the file, the tensors, and what follows."""
        first = repr(self.tensors[0])
        more = len(self.tensors) - 1
        named = f"tensor {first}" if not more else f"tensors {first} and {more} more"
        what = (
            "is missing" if self.kind == "missing" else f"holds {self.size} of the {self.needed} bytes that it should"
        )
        hint = f" ({self.hint})" if self.hint else ""
        return f"the data file {self.path} {what}{hint}, so {named} cannot be verified"


@dataclasses.dataclass(frozen=True)
class Source:
    """The file that a model was loaded from.

    Attributes:
        path: the .onnx file, absolute; links are not resolved.
        directory: its directory, to which data locations are relative.
        root: the model directory: the one that was given to ``load``, else ``directory``.
        data_files: the external data files, in order of first use.
        problems: data files that are missing or too short.
        config_path: the genai_config.json of the model directory; None where there is none.
    """

    path: Path
    directory: Path
    root: Path
    data_files: tuple[DataFile, ...]
    problems: tuple[DataProblem, ...]
    config_path: Path | None

    def graph_hash(self) -> str:
        """The sha256 of the .onnx file in hexadecimal, read when first asked for; data files are not read."""
        return _file_hash(self.path)


@functools.lru_cache(maxsize=64)
def _hash_of(path: Path, _inode: int, _modified: int, _size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_hash(path: Path) -> str:
    # The stat is part of the key: a file that was replaced since is hashed anew.
    status = path.stat()
    return _hash_of(path, status.st_ino, status.st_mtime_ns, status.st_size)


def attach_source(model: ir.Model, source: Source) -> None:
    """Remember ``source`` in ``model``; it is not serialised."""
    model.meta[_SOURCE_KEY] = source
    # A clone of a model keeps the meta of its graph only.
    model.graph.meta[_SOURCE_KEY] = source


def source_of(model: ir.Model) -> Source | None:
    """Where ``model`` was loaded from; None where it did not come from ``graphsurgery.load``."""
    source = model.meta.get(_SOURCE_KEY) or model.graph.meta.get(_SOURCE_KEY)
    return source if isinstance(source, Source) else None


@dataclasses.dataclass(frozen=True)
class InterfaceNames:
    """Inputs and outputs of a model: from the name in the file that it was loaded from to the name now.

    What was added since is there under its own name.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @classmethod
    def of(cls, model: ir.Model) -> InterfaceNames:
        """The names of ``model``, as far as renames were recorded."""
        former = model.graph.meta.get(_NAMES_KEY)
        inputs, outputs = former if isinstance(former, tuple) else ({}, {})
        return cls(
            {inputs.get(name, name): name for name in _names(model.graph.inputs)},
            {outputs.get(name, name): name for name in _names(model.graph.outputs)},
        )

    @classmethod
    def record(cls, model: ir.Model, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
        """Remember that inputs and outputs are about to be renamed, from old name to new; it is not serialised."""
        known = cls.of(model)
        # A clone of a model keeps the meta of its graph only.
        model.graph.meta[_NAMES_KEY] = (
            {inputs.get(name, name): then for then, name in known.inputs.items()},
            {outputs.get(name, name): then for then, name in known.outputs.items()},
        )


def _names(values: Iterable[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]
