"""Copies of byte ranges between files, made by the kernel where it can, in bounded memory."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from graphsurgery.errors import SaveError
from graphsurgery.weights.streaming import FileRange
from graphsurgery.weights.tensors import WeightTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from graphsurgery.model_files.new_weights import NewRun

__all__ = ["Meter", "copy_range", "write_runs"]

_CHUNK_BYTES = 64 * 2**20
_BUFFER_BYTES = 2**20

# What a kernel or file system answers that cannot copy between these two files: read and write instead.
_UNSUPPORTED = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY, errno.EIO}
)


class Meter:
    """Adds up what was written and tells the caller: the bytes done and the bytes to do in all."""

    def __init__(self, total: int, callback: Callable[[int, int], None] | None) -> None:
        self.done = 0
        self.total = total
        self._callback = callback

    def advance(self, count: int) -> None:
        """Note that ``count`` more bytes are written."""
        self.done += count
        if self._callback is not None:
            self._callback(self.done, self.total)


def copy_range(source: int, target: int, start: int, length: int, meter: Meter, path: Path) -> None:
    """Append bytes ``start : start + length`` of the open file ``source`` to ``target``.

    Args:
        source: file descriptor to read from, wherever its position is.
        target: file descriptor to write to, at its position.
        start: first byte.
        length: number of bytes.
        meter: told after every chunk.
        path: what ``source`` is, for messages.

    Raises:
        SaveError: the source ends early.
        OSError: writing failed.
    """
    copied = _kernel_copy(source, target, start, length, meter)
    while copied < length:
        os.lseek(source, start + copied, os.SEEK_SET)
        data = os.read(source, min(_BUFFER_BYTES, length - copied))
        if not data:
            raise SaveError(f"{path} became shorter while it was copied: leave it alone and save again.")
        _write_all(target, data)
        copied += len(data)
        meter.advance(len(data))


def write_runs(target: int, runs: Iterable[NewRun], meter: Meter) -> None:
    """Append ``runs`` to the open file ``target``; what they are made of is read a chunk at a time.

    Raises:
        SaveError: a data file that a run is made of is absent or ends early.
        OSError: writing failed.
    """
    opened: dict[Path, int] = {}
    try:
        for run in runs:
            if not isinstance(run.tensor, WeightTensor):
                data = memoryview(run.tensor.tobytes())[run.start : run.start + run.nbytes]
                _write_all(target, data)
                meter.advance(len(data))
                continue
            for piece in run.tensor.pieces():
                if isinstance(piece, FileRange):
                    if piece.path not in opened:
                        opened[piece.path] = _open(piece.path)
                    copy_range(opened[piece.path], target, piece.start, piece.length, meter, piece.path)
                else:
                    _write_all(target, piece)
                    meter.advance(len(piece))
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise SaveError(f"the data file {path} is absent and weights are to be laid out from it: bring it.") from error


def _kernel_copy(source: int, target: int, start: int, length: int, meter: Meter) -> int:
    """Let the kernel copy what it can; the number of bytes that it did."""
    if not hasattr(os, "copy_file_range"):
        return 0
    copied = 0
    while copied < length:
        try:
            count = os.copy_file_range(source, target, min(_CHUNK_BYTES, length - copied), offset_src=start + copied)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return copied
            raise
        if count == 0:
            return copied
        copied += count
        meter.advance(count)
    return copied


def _write_all(target: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
