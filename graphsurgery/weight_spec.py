"""Weights that are fed instead of stored: which bytes of which file each input of a skeleton stands for.

The model's ``graphsurgery.weights`` metadata holds it all, so that a skeleton alone can be turned back. For loaders there
is a file as well (:func:`spec_text`)::

    {"version": 1, "model": "skeleton.onnx",
     "files": [{"path": "model.onnx.data", "format": "raw"}],
     "inputs": [{"name": "w", "location": {"file": 0, "key": "w", "offset": 0, "length": 64},
                 "dtype": "float", "shape": [4, 4], "sha256": null}]}

``path`` is relative to the file itself, ``format`` is ``safetensors`` or ``raw``, ``key`` is the tensor's name in a
safetensors file and the initializer's elsewhere, ``offset`` and ``length`` are bytes in the file, ``dtype`` is ONNX's
name of the element type.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.model_files.graph_extras import extra_entries_of, set_extra_entries
from graphsurgery.model_files.locations import unsafe_location

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "WEIGHTS_KEY",
    "WeightEntry",
    "parse_weights",
    "read_weights",
    "rename_weights",
    "restored_proto",
    "safetensors_keys",
    "spec_text",
    "write_weights",
]

WEIGHTS_KEY = "graphsurgery.weights"
"""Metadata of a skeleton: JSON with ``version`` and ``weights``, an object for each weight that is an input."""

_VERSION = 1
_CHUNK = 1 << 20
_MAX_HEADER = 100 << 20


@dataclasses.dataclass(frozen=True)
class WeightEntry:
    """One weight that is an input.

    Attributes:
        name: the graph input.
        file: the data file, relative to the directory of the model that it was taken from.
        key: the tensor's name there.
        dtype: ONNX's name of the element type, in small letters.
        shape: its sizes.
        offset: first byte; None where the model did not say (0).
        length: bytes; None where the model did not say (what the shape needs).
        sha256: of the bytes, in hexadecimal; None where it was not asked for.
        position: its place among the initializers.
        default: it was an input before, with the weight as its default.
        info: it had a value_info besides.
        doc: the tensor's documentation.
        metadata: the tensor's metadata.
        extras: further entries of the external data (``checksum``).
    """

    name: str
    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None = None
    length: int | None = None
    sha256: str | None = None
    position: int = 0
    default: bool = False
    info: bool = False
    doc: str | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extras: tuple[tuple[str, str], ...] = ()

    @property
    def data_type(self) -> ir.DataType:
        """The element type."""
        return ir.DataType[self.dtype.upper()]

    @property
    def start(self) -> int:
        """First byte in the file."""
        return self.offset or 0

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.length if self.length is not None else self.tensor("").nbytes

    @classmethod
    def of(cls, value: ir.Value, position: int, key: str, *, info: bool) -> WeightEntry:
        """The entry of an initializer whose tensor is external."""
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        return cls(
            name=value.name or "",
            file=os.fspath(tensor.location),
            key=key,
            dtype=tensor.dtype.name.lower(),
            shape=tuple(int(size) for size in tensor.shape.numpy()),
            offset=tensor.offset,
            length=tensor.length,
            position=position,
            default=value.is_graph_input(),
            info=info,
            doc=tensor.doc_string,
            metadata=dict(tensor.metadata_props),
            extras=extra_entries_of(tensor),
        )

    def tensor(self, directory: str | os.PathLike[str]) -> ir.ExternalTensor:
        """The external tensor that the entry was made of; nothing is read."""
        tensor = ir.ExternalTensor(
            self.file,
            self.offset,
            self.length,
            self.data_type,
            shape=ir.Shape(self.shape),
            name=self.name,
            doc_string=self.doc,
            metadata_props=dict(self.metadata),
            base_dir=directory,
        )
        set_extra_entries(tensor, self.extras)
        return tensor

    def digest(self, directory: Path) -> str:
        """The sha256 of the bytes.

        Raises:
            UsageError: the file is missing or ends before them.
        """
        path = directory / self.file
        digest, left = hashlib.sha256(), self.nbytes
        try:
            with open(path, "rb") as file:
                file.seek(self.start)
                while left:
                    chunk = file.read(min(left, _CHUNK))
                    if not chunk:
                        raise UsageError(
                            f"sha256=true reads {path}, which ends before {self.name!r} does: bring the data."
                        )
                    digest.update(chunk)
                    left -= len(chunk)
        except OSError as error:
            raise UsageError(
                f"sha256=true reads {path}, which it cannot ({error.strerror}): bring the data."
            ) from error
        return digest.hexdigest()

    def to_data(self) -> dict[str, Any]:
        """What is written: fields that say nothing are left out."""
        data = dataclasses.asdict(self)
        # An offset of 0 that is stated is not the same as none.
        empty = {name for name, value in data.items() if value is None or value is False or value in ({}, ())}
        return {name: value for name, value in data.items() if name not in empty - {"shape"}}


# ---- in the model -------------------------------------------------------------------------------------------------


def parse_weights(text: str | None) -> tuple[WeightEntry, ...]:
    """Read the metadata entry; empty where there is none.

    Raises:
        InputRefusedError: it is not what ``weights-to-inputs`` writes, or names a file outside the model's directory.
    """
    if not text:
        return ()
    try:
        data = json.loads(text)
        if data["version"] != _VERSION:
            raise ValueError(data["version"])
        entries = tuple(_entry(item) for item in data["weights"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"The model's metadata {WEIGHTS_KEY!r} is not what this version of graphsurgery writes: remove it."
        raise InputRefusedError(message) from error
    for entry in entries:
        reason = unsafe_location(entry.file)
        if reason is not None:
            raise InputRefusedError(
                f"The model's weight {entry.name!r} lies in {entry.file!r}, which {reason}: correct it."
            )
    return entries


def _entry(item: dict[str, Any]) -> WeightEntry:
    shape = tuple(int(size) for size in item["shape"])
    extras = tuple((str(key), str(value)) for key, value in item.get("extras", ()))
    entry = WeightEntry(**{**item, "shape": shape, "extras": extras})
    if not all(isinstance(text, str) for text in (entry.name, entry.file, entry.key)):
        raise TypeError(item)
    # A name that is none raises here.
    entry.data_type.name  # noqa: B018
    return entry


def read_weights(model: ir.Model) -> tuple[WeightEntry, ...]:
    """The weights of ``model`` that are inputs, in the order of its initializers."""
    return parse_weights(model.metadata_props.get(WEIGHTS_KEY))


def write_weights(model: ir.Model, entries: Iterable[WeightEntry]) -> None:
    """Record ``entries`` in ``model``, replacing what was there."""
    data = [entry.to_data() for entry in sorted(entries, key=lambda entry: entry.position)]
    if data:
        text = json.dumps({"version": _VERSION, "weights": data}, separators=(",", ":"))
        model.metadata_props[WEIGHTS_KEY] = text
    else:
        model.metadata_props.pop(WEIGHTS_KEY, None)


def rename_weights(model: ir.Model, inputs: Mapping[str, str]) -> None:
    """Let the entries speak of inputs by their new names; where the bytes lie does not change."""
    entries = read_weights(model)
    if any(entry.name in inputs for entry in entries):
        moved = (dataclasses.replace(entry, name=inputs.get(entry.name, entry.name)) for entry in entries)
        write_weights(model, moved)


def restored_proto(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy of ``proto`` in which weights that are inputs are initializers again; None where there are none.

    Data locations are those of the entries. It is made to be run, so the order of initializers is not restored.
    """
    entries = parse_weights(next((item.value for item in proto.metadata_props if item.key == WEIGHTS_KEY), None))
    stored = {tensor.name for tensor in proto.graph.initializer}
    fed = {value.name for value in proto.graph.input} - stored
    missing = [entry for entry in entries if entry.name in fed]
    if not missing:
        return None
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    for entry in missing:
        changed.graph.initializer.append(ir.serde.serialize_tensor(entry.tensor("")))
    gone = {entry.name for entry in missing if not entry.default}
    kept = [value for value in changed.graph.input if value.name not in gone]
    inputs = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in kept]
    del changed.graph.input[:]
    changed.graph.input.extend(inputs)
    return changed


# ---- for loaders --------------------------------------------------------------------------------------------------


def spec_text(entries: Sequence[WeightEntry], model_name: str, directory: Path, spec_directory: Path) -> str:
    """The spec as JSON text; see the module.

    Args:
        entries: the weights.
        model_name: the file name of the skeleton.
        directory: what the entries' files are relative to.
        spec_directory: where the text will lie.
    """
    files = list(dict.fromkeys(entry.file for entry in entries))
    numbers = {file: number for number, file in enumerate(files)}
    base = os.path.relpath(os.path.realpath(directory), os.path.realpath(spec_directory))
    data = {
        "version": _VERSION,
        "model": model_name,
        "files": [{"path": Path(base, file).as_posix(), "format": _format(file)} for file in files],
        "inputs": [
            {
                "name": entry.name,
                "location": {
                    "file": numbers[entry.file],
                    "key": entry.key,
                    "offset": entry.start,
                    "length": entry.nbytes,
                },
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "sha256": entry.sha256,
            }
            for entry in entries
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _format(file: str) -> str:
    return "safetensors" if file.endswith(".safetensors") else "raw"


def safetensors_keys(path: Path) -> dict[tuple[int, int], str]:
    """Of each tensor in a safetensors file, first byte and number of bytes, and its key; only the header is read.

    Empty for a file of another kind, and for one that is absent or damaged.
    """
    if path.suffix != ".safetensors":
        return {}
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size <= _MAX_HEADER else {}
        ranges = {key: item["data_offsets"] for key, item in header.items() if key != "__metadata__"}
        return {(8 + size + start, end - start): key for key, (start, end) in ranges.items()}
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError):
        return {}
