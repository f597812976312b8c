"""A prefill worker and a decode worker with a pipe between them: what both examples share.

Alphabet: B batch, S query length, P past, T = P + S keys, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnxruntime as ort

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["Arrays", "CacheChunk", "DecodeWorker", "chunks_of", "greedy", "open_model"]

Arrays: TypeAlias = "dict[str, npt.NDArray[np.generic]]"
Positions: TypeAlias = "Callable[[int], npt.NDArray[np.int64]]"

_LENGTH_AXIS = 2  # of a cache [B, G, T, D]


@dataclasses.dataclass(frozen=True)
class CacheChunk:
    """Positions ``start`` to ``start + n`` of every cache, ``[B, G, n, D]`` each, by name of the decoder's input.

    Values of no axis (the width of a window) are the same in every chunk.
    """

    start: int
    caches: Arrays


@dataclasses.dataclass(frozen=True)
class _Generate:
    token: npt.NDArray[np.int64]
    steps: int


def open_model(path: Path) -> ort.InferenceSession:
    """The model in ONNX Runtime, on the CPU."""
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def chunks_of(caches: Arrays, length: int, start: int = 0) -> Iterator[CacheChunk]:
    """Cut what a prefill returned, from position ``start``, into pieces of ``length`` positions.

    Args:
        caches: ``[B, G, T, D]`` each, or of no axis.
        length: positions in each chunk; the last has what is left.
        start: first position that has not been handed over yet.
    """
    total = next(array.shape[_LENGTH_AXIS] for array in caches.values() if array.ndim)
    for first in range(start, total, length):
        part = slice(first, first + length)
        yield CacheChunk(first, {name: array[:, :, part] if array.ndim else array for name, array in caches.items()})


def greedy(
    session: ort.InferenceSession,
    caches: Arrays,
    token: npt.NDArray[np.int64],
    steps: int,
    positions: Positions,
) -> npt.NDArray[np.int64]:
    """Generate ``steps`` tokens, one a call, each the most probable one.

    Args:
        session: the decoder.
        caches: by input name, as the prompt left them.
        token: the first token of the answer, ``[B]``.
        steps: how many more to generate.
        positions: number of tokens before this one to its ``position_ids``, with an axis S of 1.

    Returns:
        The answer, ``[B, 1 + steps]``.
    """
    outputs = [value.name for value in session.get_outputs()]
    others = {
        value.name: np.zeros([1 if isinstance(size, str) else size for size in value.shape], np.int32)
        for value in session.get_inputs()
        if value.name not in {*caches, "input_ids", "position_ids"}
    }
    past = next(array.shape[_LENGTH_AXIS] for array in caches.values() if array.ndim)
    answer = [token]
    for step in range(steps):
        feeds = {**others, **caches, "input_ids": answer[-1][:, None], "position_ids": positions(past + step)}
        results = dict(zip(outputs, session.run(None, feeds), strict=True))
        answer.append(np.argmax(results["logits"][:, -1], axis=-1))
        caches = {name: results[name.replace("input.", "output.", 1)] for name in caches}
    return np.stack(answer, axis=1)


class DecodeWorker:
    """A process of its own that holds the decoder, collects caches chunk by chunk, and then generates.

    Args:
        model: the decoder's file.
        positions: as :func:`greedy` takes it; a picklable callable.
    """

    def __init__(self, model: Path, positions: Positions) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(model, positions, far), daemon=True)
        self._process.start()
        far.close()

    def send(self, chunk: CacheChunk) -> int:
        """Hand over one chunk; the number of bytes that went over the pipe as cache."""
        self._pipe.send(chunk)
        return sum(array.nbytes for array in chunk.caches.values())

    def generate(self, token: npt.NDArray[np.int64], steps: int) -> npt.NDArray[np.int64]:
        """Generate from what has been handed over; see :func:`greedy`."""
        self._pipe.send(_Generate(token, steps))
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise RuntimeError(f"The decode worker failed: {answer}") from answer
        assert isinstance(answer, np.ndarray)
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve(model: Path, positions: Positions, pipe: Connection) -> None:
    session = open_model(model)
    arrived: list[CacheChunk] = []
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if isinstance(message, CacheChunk):
            arrived.append(message)
            continue
        try:
            answer = greedy(session, _joined(arrived), message.token, message.steps, positions)
        except Exception as error:  # the other side shows it
            pipe.send(error)
            return
        pipe.send(answer)
        arrived.clear()


def _joined(chunks: list[CacheChunk]) -> Arrays:
    """Whole caches from chunks that may have arrived in any order."""
    ordered = sorted(chunks, key=lambda chunk: chunk.start)
    expected = 0
    for chunk in ordered:
        if chunk.start != expected:
            raise ValueError(f"positions {expected} to {chunk.start} of the cache were not handed over")
        expected += _positions_in(chunk.caches)
    return {
        name: np.concatenate([chunk.caches[name] for chunk in ordered], axis=_LENGTH_AXIS) if array.ndim else array
        for name, array in ordered[-1].caches.items()
    }


def _positions_in(caches: Mapping[str, npt.NDArray[np.generic]]) -> int:
    return next(int(array.shape[_LENGTH_AXIS]) for array in caches.values() if array.ndim)
