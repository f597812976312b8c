"""What a file is, told from its first bytes, and the reading of files that are ONNX models."""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError

from graphsurgery.errors import InputRefusedError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PROTOBUF_LIMIT", "check_regular_file", "is_lfs_pointer", "read_model_proto", "refuse_if_foreign"]

PROTOBUF_LIMIT = 2**31 - 1
"""Bytes; no protobuf implementation reads a longer message."""

_HEAD_BYTES = 4096
_LFS_PREFIX = b"version https://git-lfs.github.com/spec/"

# Prefixes that no ONNX protobuf starts with: none is a valid tag of a ModelProto field.
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF\r\n", "an HDF5 (Keras) file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x7fELF", "an ELF binary"),
    (b"%PDF-", "a PDF document"),
)
_ONNX_TEXT = re.compile(
    rb'\s*(<\s*(ir_version|opset_import)\b|(ir_version|producer_name|graph)\s*[:{]|\{\s*"irVersion")'
)


def is_lfs_pointer(path: Path) -> bool:
    """Whether ``path`` is the text that Git LFS leaves in place of a file that was not fetched."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_LFS_PREFIX)) == _LFS_PREFIX
    except OSError:
        return False


def check_regular_file(path: Path) -> int:
    """The size in bytes of the regular file ``path``.

    Raises:
        InputRefusedError: it is missing, not a regular file, or cannot be looked at.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            message = f"{path} is a link to {os.readlink(path)}, which does not exist: fetch the model again."
        else:
            message = f"{path} does not exist: check the path."
        raise InputRefusedError(message) from None
    except (OSError, ValueError) as error:
        raise InputRefusedError(
            f"{path} cannot be read ({_reason(error)}): check the path and its permissions."
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise InputRefusedError(f"{path} is not a regular file: give the path of an .onnx file or a model directory.")
    return status.st_size


def read_model_proto(path: Path) -> onnx.ModelProto:
    """Parse the ONNX model at ``path``; external data is not looked at.

    Raises:
        InputRefusedError: it is missing, unreadable, empty, cut short, over 2 GiB, or not an ONNX model; the message
            says which, and the remedy.
    """
    size = check_regular_file(path)
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            refuse_if_foreign(path, head, size)
            file.seek(0)
            data = file.read()
    except OSError as error:
        raise InputRefusedError(f"{path} cannot be read ({_reason(error)}): check its permissions.") from error
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        _refuse_text(path, head)
        message = (
            f"{path} ({len(data)} bytes) cannot be parsed as an ONNX protobuf: it is cut short, damaged or not a "
            f"model; fetch or export it again."
        )
        raise InputRefusedError(message) from error
    _refuse_hollow(path, head, proto)
    return proto


def refuse_if_foreign(path: Path, head: bytes, size: int) -> None:
    """Refuse what cannot be an ONNX protobuf, named for what it is.

    Args:
        path: the file, for the message.
        head: its first bytes, 4096 or all.
        size: its size in bytes.

    Raises:
        InputRefusedError: the file is empty, a Git LFS pointer, of another format, or over 2 GiB.
    """
    if size == 0 or not head:
        raise InputRefusedError(f"{path} is empty (0 bytes): fetch or export the model again.")
    if head.startswith(_LFS_PREFIX):
        message = f"{path} is a Git LFS pointer, not the model itself: run `git lfs pull` in its repository."
        raise InputRefusedError(message)
    kind = _foreign_kind(head, size)
    if kind is not None:
        raise InputRefusedError(f"{path} is {kind}, not an ONNX model: export the model to ONNX first.")
    if size > PROTOBUF_LIMIT:
        message = (
            f"{path} is {size / 2**30:.2f} GiB and no runtime reads a protobuf over 2 GiB: re-export the model with "
            f"external data."
        )
        raise InputRefusedError(message)


def _foreign_kind(head: bytes, size: int) -> str | None:
    if head.startswith(b"PK\x03\x04"):
        return "a PyTorch checkpoint (zip)" if b"data.pkl" in head[:512] else "a zip archive"
    if len(head) > 1 and head[0] == 0x80 and head[1] in range(2, 6):
        return "a pickle (a PyTorch checkpoint or another Python object)"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= max(size - 8, 0):
        return "a safetensors file"
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model"
    if head[4:8] == b"ORTM":
        return "a model in ONNX Runtime's own ORT format"
    if head[257:262] == b"ustar":
        return "a tar archive"
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)


def _refuse_hollow(path: Path, head: bytes, proto: onnx.ModelProto) -> None:
    """Refuse a message that parses and yet holds no model: protobuf accepts many accidental byte strings."""
    if not proto.HasField("graph") or not proto.graph.node:
        _refuse_text(path, head)
        raise InputRefusedError(f"{path} holds no graph with nodes, so it is no ONNX model: fetch or export it again.")
    if proto.ir_version < 1:
        raise InputRefusedError(f"{path} states no ONNX IR version: it is damaged; fetch or export it again.")
    if not proto.opset_import:
        message = f"{path} imports no operator set, so it is cut short or damaged: fetch or export it again."
        raise InputRefusedError(message)


def _refuse_text(path: Path, head: bytes) -> None:
    if not _is_text(head):
        return
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        kind = "an HTML page, perhaps the error page of a download: fetch the model again"
    elif _ONNX_TEXT.match(head):
        kind = "an ONNX model in text form: convert it to a binary protobuf first"
    elif len(head) < 512 and b"\n" not in head.strip() and b"/" in head:
        kind = "a text file that holds a path, perhaps a link that was checked out as text: give the path it names"
    else:
        kind = "a text file, not an ONNX model: give the path of an .onnx file"
    raise InputRefusedError(f"{path} is {kind}.")


def _is_text(head: bytes) -> bool:
    try:
        # A multi-byte character may be cut at the end of the head.
        text = head.decode("utf-8", errors="strict" if len(head) < _HEAD_BYTES else "ignore")
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\t\n\r\f" for character in text)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
