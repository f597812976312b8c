"""The bytes of a weight expression, in order and in bounded memory.

What lies in one run of a file is given as a range of it, to be copied by the kernel. Everything else is read through a
memory map, a box of the result at a time, and the pages are given back after each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import onnx_ir as ir

from graphsurgery.errors import SaveError
from graphsurgery.weights.bytewise import bytewise
from graphsurgery.weights.expressions import Stack, Transpose, View, shape_of
from graphsurgery.weights.tensors import external_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from graphsurgery.weights.expressions import Expression, Part, SourceName

__all__ = ["CHUNK_BYTES", "FileRange", "Piece", "chunks", "pieces"]

CHUNK_BYTES = 16 * 2**20
"""No chunk is larger."""

_SPAN_BYTES = 64 * 2**20
"""No more of a source is touched before its pages are given back."""

_Box: TypeAlias = "tuple[tuple[int, int], ...]"


@dataclasses.dataclass(frozen=True)
class FileRange:
    """The bytes ``start : start + length`` of the file ``path``."""

    path: Path
    start: int
    length: int


Piece: TypeAlias = "FileRange | bytes | memoryview"


def pieces(expression: Expression, sources: Mapping[ir.Value | SourceName, ir.TensorProtocol]) -> Iterator[Piece]:
    """The bytes of ``expression``, in order.

    Args:
        expression: in its simplest form, without an obstacle.
        sources: the tensors of its sources.

    Raises:
        SaveError: the data file of a source is absent or ends too early.
    """
    form = bytewise(expression)
    assert form is not None
    with _Sources(sources, form.unit) as opened:
        yield from _pieces(form.part, opened)


def chunks(found: Iterable[Piece]) -> Iterator[bytes | memoryview]:
    """``found`` with the ranges of files read, in chunks of at most :data:`CHUNK_BYTES`."""
    for piece in found:
        if not isinstance(piece, FileRange):
            yield piece
            continue
        with _reading(piece.path), open(piece.path, "rb") as file:
            file.seek(piece.start)
            left = piece.length
            while left:
                data = file.read(min(left, CHUNK_BYTES))
                if not data:
                    raise SaveError(
                        f"the data file {piece.path} ends before a weight in it does: bring the whole file."
                    )
                yield data
                left -= len(data)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SaveError(
            f"the data file {path} is absent and weights are to be laid out anew from it: bring it."
        ) from error


class _Sources:
    """The sources of one expression as flat arrays of units; files are mapped when they are first read."""

    def __init__(self, tensors: Mapping[ir.Value | SourceName, ir.TensorProtocol], unit: np.dtype) -> None:
        self.tensors = tensors
        self.unit = unit
        self._maps: dict[Path, mmap.mmap] = {}
        self._arrays: dict[ir.Value | SourceName, np.ndarray] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays.clear()
        for mapped in self._maps.values():
            # An array that an exception still holds keeps the map open; it goes with the array.
            with contextlib.suppress(BufferError):
                mapped.close()

    def flat(self, source: ir.Value | SourceName) -> np.ndarray:
        """All units of ``source``; a file is mapped, not read."""
        found = self._arrays.get(source)
        if found is None:
            tensor = self.tensors[source]
            if isinstance(tensor, ir.ExternalTensor):
                start = tensor.offset or 0
                data = np.frombuffer(self._map(external_path(tensor), start + tensor.nbytes), np.uint8)
                found = data[start : start + tensor.nbytes].view(self.unit)
            else:
                found = np.frombuffer(tensor.tobytes(), self.unit)
            self._arrays[source] = found
        return found

    def _map(self, path: Path, end: int) -> mmap.mmap:
        if path not in self._maps:
            with _reading(path), open(path, "rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._maps[path]) < end:
            raise SaveError(f"the data file {path} ends before a weight in it does: bring the whole file.")
        return self._maps[path]

    def release(self) -> None:
        """Give the pages that were touched back to the system."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)


def _pieces(part: View | Stack | Transpose, sources: _Sources) -> Iterator[Piece]:
    if isinstance(part, Stack):
        for item in part.parts:
            yield from _pieces(item, sources)  # type: ignore[arg-type]
    elif isinstance(part, View) and not isinstance(part.source, View | Stack | Transpose):
        yield from _run(part, part.source, sources)
    else:
        whole = tuple((0, size) for size in shape_of(part))
        yield from _boxes(part, whole, sources)


def _run(view: View, source: ir.Value | SourceName, sources: _Sources) -> Iterator[Piece]:
    size = sources.unit.itemsize
    count = math.prod(view.shape)
    tensor = sources.tensors[source]
    if isinstance(tensor, ir.ExternalTensor):
        yield FileRange(external_path(tensor), (tensor.offset or 0) + view.start * size, count * size)
        return
    data = sources.flat(source)[view.start : view.start + count].data.cast("B")
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _boxes(part: Part, box: _Box, sources: _Sources) -> Iterator[Piece]:
    """The bytes of a box of ``part``, cut along its first axis until each fits into a chunk."""
    size = math.prod(end - start for start, end in box) * sources.unit.itemsize
    if not size:
        return
    if size <= CHUNK_BYTES:
        data = np.ascontiguousarray(_read(part, box, sources)).tobytes()
        sources.release()
        yield data
        return
    axis = next(number for number, (start, end) in enumerate(box) if end - start > 1)
    start, end = box[axis]
    step = max(1, (end - start) * CHUNK_BYTES // size)
    for first in range(start, end, step):
        yield from _boxes(part, (*box[:axis], (first, min(first + step, end)), *box[axis + 1 :]), sources)


def _read(part: Part, box: _Box, sources: _Sources) -> np.ndarray:
    """A box of ``part``, copied."""
    if isinstance(part, Stack):
        (first, last), *rest = box
        return np.stack([_read(item, tuple(rest), sources) for item in part.parts[first:last]])
    if isinstance(part, Transpose):
        inner: list[tuple[int, int]] = [(0, 0)] * len(box)
        for axis, item in zip(part.perm, box, strict=True):
            inner[axis] = item
        return _read(part.part, tuple(inner), sources).transpose(part.perm)
    assert isinstance(part, View)
    if isinstance(part.source, View | Stack | Transpose):
        return _read_runs(part, box, sources)
    flat = sources.flat(part.source)
    whole = flat[part.start : part.start + math.prod(part.shape)].reshape(part.shape)
    return _copy(whole[tuple(slice(start, end) for start, end in box)], sources)


def _copy(array: np.ndarray, sources: _Sources) -> np.ndarray:
    span = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    if span <= _SPAN_BYTES or not array.shape or len(array) < 2:
        return array.copy()
    result = np.empty(array.shape, array.dtype)
    step = max(1, len(array) * _SPAN_BYTES // span)
    for first in range(0, len(array), step):
        result[first : first + step] = _copy(array[first : first + step], sources)
        sources.release()
    return result


def _read_runs(view: View, box: _Box, sources: _Sources) -> np.ndarray:
    """A box of a view of something that is not one run itself."""
    result = np.empty(tuple(end - start for start, end in box), sources.unit)
    # Axes behind ``front`` are taken whole, so that a run goes over them and a range of the one before.
    front = len(box)
    while front > 1 and box[front - 1] == (0, view.shape[front - 1]):
        front -= 1
    inner = math.prod(view.shape[front:])
    strides = [math.prod(view.shape[axis + 1 :]) for axis in range(len(view.shape))]
    outer = [range(start, end) for start, end in box[: front - 1]] if front else []
    for index in itertools.product(*outer):
        base = view.start + sum(number * stride for number, stride in zip(index, strides, strict=False))
        start, end = box[front - 1] if front else (0, 1)
        run = _flat(view.source, (), base + start * inner, base + end * inner, sources)
        place = tuple(number - low for number, (low, _) in zip(index, box, strict=False))
        result[place] = np.concatenate(run).reshape(result[place].shape)
    return result


def _flat(part: Part, index: tuple[int, ...], start: int, end: int, sources: _Sources) -> list[np.ndarray]:
    """The units ``start : end`` of entry ``index`` of ``part``, in row-major order, as flat arrays."""
    shape = shape_of(part)
    rest = shape[len(index) :]
    fixed = tuple((number, number + 1) for number in index)
    if end <= start:
        return []
    if not rest:
        return [_read(part, fixed, sources).reshape(-1)]
    each = math.prod(rest[1:])
    if len(rest) == 1:
        return [_read(part, (*fixed, (start, end)), sources).reshape(-1)]
    first, last = start // each, end // each
    found = []
    if start % each or first == last:
        stop = min(end, (first + 1) * each)
        found += _flat(part, (*index, first), start - first * each, stop - first * each, sources)
        start, first = stop, first + 1
    if first < last:
        whole = (*fixed, (first, last), *((0, size) for size in rest[1:]))
        found.append(_read(part, whole, sources).reshape(-1))
        start = last * each
    if start < end:
        found += _flat(part, (*index, last), start - last * each, end - last * each, sources)
    return found
