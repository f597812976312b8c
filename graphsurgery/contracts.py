"""What a rewrite promises about a model's outputs, written into the model so that a verifier can hold it to it.

A pass that changes what an output means (fewer rows, another name) records a :class:`RowSelection` in the model's
``graphsurgery.contracts`` metadata. The verifier applies the contracts to the reference outputs before it compares,
so it knows nothing of passes and works on two bare files.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Literal

import numpy as np

from graphsurgery.errors import InputRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import onnx_ir as ir

__all__ = [
    "CONTEXT_BOUND_KEY",
    "CONTRACTS_KEY",
    "EXACT_OUTPUTS_KEY",
    "ContextBound",
    "IndexMode",
    "RowSelection",
    "parse_context_bound",
    "parse_contracts",
    "parse_exact_outputs",
    "read_context_bound",
    "read_contracts",
    "write_context_bound",
    "write_contracts",
]

CONTRACTS_KEY = "graphsurgery.contracts"
EXACT_OUTPUTS_KEY = "graphsurgery.exact_outputs"
"""Metadata of a rewritten model: names of outputs that are bitwise what they were."""

CONTEXT_BOUND_KEY = "graphsurgery.context_bound"
"""Metadata of a rewritten model whose attention reads only the first slots of its caches."""

IndexMode = Literal["last", "mask", "position", "runtime"]


@dataclasses.dataclass(frozen=True)
class RowSelection:
    """Output ``output`` holds only ``keep`` rows of what it held before.

    The row that is kept last is, for each batch row b (S is the size of ``sequence`` on ``sequence_axis``):

    * ``last``: S - 1;
    * ``mask``: the last non-zero column of ``source [B, T]`` within its last S columns (S - 1 where none is);
    * ``position``: the last column that holds the largest position of ``source``: ``[B, S]``, row 0 of ``[4, B, S]``,
      the maximum over the first axis of ``[3, B, S]``;
    * ``runtime``: what is fed as ``source``, int32 ``[B, 1, 1]`` or int64 ``[B]``.

    ``keep = N`` keeps rows i-N+1 .. i, clamped at 0.

    Attributes:
        output: name of the output.
        index: how the row is chosen.
        keep: number of rows kept, N.
        source: the graph input that ``index`` reads; None for ``last``.
        sequence: the graph input whose axis ``sequence_axis`` has size S.
        sequence_axis: see above.
        row_axis: the axis of the output that had size S (B*S where ``flat``).
        batch_axis: the axis of the output that has size B; None where there is none (packed streams, flat rows).
        flat: rows of all batches lie behind one another on ``row_axis`` (size B*S before, B*N after).
    """

    output: str
    index: IndexMode
    keep: int
    source: str | None
    sequence: str
    sequence_axis: int
    row_axis: int
    batch_axis: int | None
    flat: bool = False

    def rows(self, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        """Row numbers that are kept, int64 ``[B, N]`` (``[1, N]`` for a packed stream, ``[R, N]`` for R runtime rows)."""
        sequence = feeds[self.sequence]
        length = sequence.shape[self.sequence_axis]
        if self.index == "last":
            batch = self._batch(sequence)
            last = np.full((batch,), length - 1, dtype=np.int64)
        else:
            assert self.source is not None
            source = feeds[self.source]
            if self.index == "mask":
                window = source[:, source.shape[1] - length :] != 0
                last = length - 1 - np.argmax(window[:, ::-1], axis=1)
            elif self.index == "position":
                if source.ndim == 3:
                    source = source[0] if source.shape[0] == 4 else source.max(axis=0)
                source = np.atleast_2d(source)
                last = length - 1 - np.argmax(source[:, ::-1], axis=1)
            else:
                last = source.reshape(-1)
        offsets = np.arange(-self.keep + 1, 1, dtype=np.int64)
        rows: np.ndarray = np.maximum(last.astype(np.int64)[:, None] + offsets[None, :], 0)
        return rows

    def _batch(self, sequence: np.ndarray) -> int:
        if self.batch_axis is None and not self.flat:
            return 1
        return int(sequence.shape[self.sequence_axis - 1]) if self.sequence_axis else 1

    def apply(self, reference: np.ndarray, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        """What the output must hold, from the full output ``reference`` and what was fed."""
        rows = self.rows(feeds)
        if self.flat:
            length = feeds[self.sequence].shape[self.sequence_axis]
            rows = rows + np.arange(rows.shape[0], dtype=np.int64)[:, None] * length
        if self.batch_axis is None:
            return np.take(reference, rows.reshape(-1), axis=self.row_axis)
        moved = np.moveaxis(reference, (self.batch_axis, self.row_axis), (0, 1))
        picked = moved[np.arange(rows.shape[0])[:, None], rows]
        return np.moveaxis(picked, (0, 1), (self.batch_axis, self.row_axis))


def read_contracts(model: ir.Model) -> tuple[RowSelection, ...]:
    """The contracts that earlier passes recorded in ``model``, in the order in which they were made.

    Raises:
        InputRefusedError: the metadata is not what a pass writes.
    """
    return parse_contracts(model.metadata_props.get(CONTRACTS_KEY))


def parse_contracts(text: str | None) -> tuple[RowSelection, ...]:
    """The contracts in the metadata ``text`` of a model; none where there is no text.

    Raises:
        InputRefusedError: it is not what a pass writes.
    """
    if not text:
        return ()
    try:
        return tuple(RowSelection(**entry) for entry in json.loads(text))
    except (ValueError, TypeError) as error:
        message = f"The model's metadata {CONTRACTS_KEY!r} is not what graphsurgery writes: remove it."
        raise InputRefusedError(message) from error


def parse_exact_outputs(text: str | None) -> frozenset[str]:
    """The outputs that the metadata ``text`` says are bitwise what they were; none where there is no text.

    Raises:
        InputRefusedError: it is not what a pipeline writes.
    """
    if not text:
        return frozenset()
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputRefusedError(
            f"The model's metadata {EXACT_OUTPUTS_KEY!r} is not what graphsurgery writes: remove it."
        )
    return frozenset(names)


def write_contracts(model: ir.Model, contracts: Iterable[RowSelection]) -> None:
    """Record ``contracts`` in ``model``, replacing what was there."""
    entries = [dataclasses.asdict(contract) for contract in contracts]
    if entries:
        model.metadata_props[CONTRACTS_KEY] = json.dumps(entries, separators=(",", ":"))
    else:
        model.metadata_props.pop(CONTRACTS_KEY, None)


@dataclasses.dataclass(frozen=True)
class ContextBound:
    """Attention reads only the first C slots of caches of a fixed size; the feeds that are valid are so for it.

    In a valid feed C is more than every slot that is in use, and each row of queries attends a key (or the graph says
    what a row without one gives).

    Attributes:
        input: the graph input ``[C]`` whose length is the bound; None where it follows from the positions.
        multiple: what C is rounded up to, where it follows from the positions.
    """

    input: str | None
    multiple: int = 1


def read_context_bound(model: ir.Model) -> ContextBound | None:
    """The bound that an earlier pass recorded in ``model``.

    Raises:
        InputRefusedError: the metadata is not what a pass writes.
    """
    return parse_context_bound(model.metadata_props.get(CONTEXT_BOUND_KEY))


def parse_context_bound(text: str | None) -> ContextBound | None:
    """The bound in the metadata ``text`` of a model; None where there is no text.

    Raises:
        InputRefusedError: it is not what a pass writes.
    """
    if not text:
        return None
    try:
        bound = ContextBound(**json.loads(text))
    except (ValueError, TypeError) as error:
        message = f"The model's metadata {CONTEXT_BOUND_KEY!r} is not what graphsurgery writes: remove it."
        raise InputRefusedError(message) from error
    return bound


def write_context_bound(model: ir.Model, bound: ContextBound) -> None:
    """Record ``bound`` in ``model``."""
    model.metadata_props[CONTEXT_BOUND_KEY] = json.dumps(dataclasses.asdict(bound), separators=(",", ":"))
