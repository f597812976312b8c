"""What one call of a decoder is fed: columns of a tape, told as the inputs of the model ask for them.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx

from graphsurgery.equivalence.dims import evaluate
from graphsurgery.equivalence.drawing import Draw
from graphsurgery.equivalence.feeds import Sizes
from graphsurgery.equivalence.roles import FLOATS, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.equivalence.dims import Dim
    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.roles import InputSpec, Signature
    from graphsurgery.equivalence.tape import Tape

__all__ = ["Call"]


@dataclasses.dataclass(frozen=True)
class Call:
    """The columns ``start`` to ``stop`` of a tape, for one model.

    Attributes:
        signature: of the model.
        tape: what has been decoded, these columns included.
        start: first column; all before it are in the caches.
        stop: behind the last column.
        past: P of the caches as they are fed.
        slots: N; 0 without fixed-size caches.
        wanted: the column of each row whose logits are asked for, int64 ``[B]``, clamped into the call.
        packed: caches hold each row's tokens without gaps: by position, not by column.
        pad_position: position of columns that are padding behind the tokens; None to go on counting.
        table: float ``[V, H]``, what token ids stand for where the model takes hidden states.
        seed: what inputs of unknown meaning are drawn from.
        number: distinguishes draws of one seed.
        filled: caches hold their columns last, with zeros before them.
    """

    signature: Signature
    tape: Tape
    start: int
    stop: int
    past: int
    slots: int
    wanted: Array
    packed: bool
    pad_position: int | None
    table: Array | None
    seed: int
    number: int
    filled: bool

    @property
    def length(self) -> int:
        """S."""
        return self.stop - self.start

    def array(self, spec: InputSpec, drawn_as: str) -> Array:
        """What the input ``spec`` is fed; ``drawn_as`` is the name under which it is drawn if its meaning is not known."""
        build = _BUILDERS.get(spec.role)
        draw = Draw(self.signature, self._sizes(), self.seed, self.number, None)
        if build is None:
            return draw.array(dataclasses.replace(spec, name=drawn_as))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(spec.elem_type)
        array: Array = np.asarray(build(self, spec, draw)).astype(dtype)
        return array

    def _sizes(self) -> Sizes:
        return Sizes(self.tape.batch, self.length, self.past, "none", self.slots)

    def size(self, dim: Dim) -> int | None:
        """The size that a declared dim has in this call; None where that is not known."""
        letters = self._sizes().letters()
        return evaluate(dim, {symbol: letters[letter] for symbol, letter in self.signature.letters.items()})

    def positions(self) -> Array:
        """Positions ``[B, S]``: real tokens are counted, padding before them is at 0."""
        real = self.tape.real[:, : self.stop]
        counted = np.cumsum(real, axis=1) - 1
        behind = ~real & (counted >= 0)
        positions: Array = np.maximum(counted, 0)
        if self.pad_position is not None:
            positions = np.where(behind, self.pad_position, positions)
        elif self.packed:
            # Positions may be the slots to write: each its own, and none that is in use.
            positions = np.where(behind, np.arange(self.stop), positions)
        return positions[:, self.start :]

    def keys(self, width: int) -> Array:
        """Which keys are no padding, bool ``[B, width]``, in the order of the caches followed by this call's columns."""
        real = self.tape.real[:, : self.stop]
        keys = np.zeros((self.tape.batch, width), dtype=np.bool_)
        if width == self.length < self.stop:
            return real[:, self.start :]
        if self.filled and width > self.stop:
            keys[:, width - self.stop :] = real
        elif self.packed and self.slots:
            keys[:] = np.arange(width) < self.tape.counts(self.stop)[:, None]
        else:
            keys[:, : min(width, self.stop)] = real[:, :width]
        return keys


def _tokens(call: Call, spec: InputSpec, _draw: Draw) -> Array:
    tokens = call.tape.tokens[:, call.start : call.stop]
    return tokens if len(spec.dims) > 1 else tokens.reshape(-1)


def _embeds(call: Call, spec: InputSpec, _draw: Draw) -> Array:
    assert call.table is not None
    embeds: Array = call.table[call.tape.tokens[:, call.start : call.stop]]
    return embeds if len(spec.dims) > 2 else embeds.reshape(-1, embeds.shape[-1])


def _width(call: Call, dim: Dim) -> int:
    size = call.size(dim)
    return call.stop if size is None else size


def _mask(call: Call, spec: InputSpec, _draw: Draw) -> Array:
    rows = call.size(spec.dims[0]) or call.tape.batch
    return call.keys(_width(call, spec.dims[1]))[np.arange(rows) % call.tape.batch]


def _mask_nd(call: Call, spec: InputSpec, _draw: Draw) -> Array:
    width = _width(call, spec.dims[-1])
    rows = 1 if spec.dims[-2] == 1 else call.length
    keys = call.keys(width)
    if call.packed and call.slots:
        query = call.positions()
    else:
        # What is filled up in front comes before the first column.
        before = width - call.stop if call.filled and width > call.stop else 0
        query = np.broadcast_to(np.arange(call.start, call.stop) + before, (call.tape.batch, call.length))
    query = query[:, -1:] if rows == 1 else query
    seen = keys[:, None, :] & (np.arange(width)[None, None, :] <= query[:, :, None])
    if width == call.length < call.stop:
        seen = keys[:, None, :] & (np.arange(call.start, call.stop)[None, None, :] <= query[:, :, None])
    between = [1 if size is None else size for size in map(call.size, spec.dims[1:-2])]
    batch = call.size(spec.dims[0]) or call.tape.batch
    seen = seen.reshape(call.tape.batch, *[1] * len(between), rows, width)[:batch]
    mask = np.broadcast_to(seen, (batch, *between, rows, width))
    if spec.elem_type not in FLOATS:
        return mask
    dtype = onnx.helper.tensor_dtype_to_np_dtype(spec.elem_type)
    return np.where(mask, 0.0, float(ml_dtypes.finfo(dtype).min))


def _positions(call: Call, spec: InputSpec, _draw: Draw) -> Array:
    if len(spec.dims) == 1:
        # Places in the cache, common to all rows.
        return np.arange(call.start, call.stop) if "cache" in spec.name.lower() else call.positions()[0]
    positions = call.positions()
    rows = call.size(spec.dims[-2])
    if rows == 1:
        positions = positions[:1]
    # Text alone: the temporal and the image axes have one position.
    return np.broadcast_to(positions, (*[int(dim) for dim in spec.dims[:-2]], *positions.shape))


def _shaped(value: Callable[[Call], Array | int]) -> Callable[[Call, InputSpec, Draw], Array]:
    def build(call: Call, spec: InputSpec, draw: Draw) -> Array:
        return np.resize(np.asarray(value(call)), draw.shape(spec))

    return build


def _none_marked(call: Call, spec: InputSpec, draw: Draw) -> Array:
    shape = draw.shape(spec)
    return np.zeros(shape if spec.role is Role.MARKED else (0, *shape[1:]))


_BUILDERS: dict[Role, Callable[[Call, InputSpec, Draw], Array]] = {
    Role.TOKENS: _tokens,
    Role.EMBEDS: _embeds,
    Role.MASK: _mask,
    Role.MASK_ND: _mask_nd,
    Role.POSITIONS: _positions,
    Role.PAST_LENGTH: _shaped(lambda call: call.tape.counts(call.start) if call.packed else call.start),
    Role.TOTAL_LENGTH: _shaped(lambda call: call.stop),
    Role.LAST_KEY: _shaped(lambda call: call.tape.counts(call.stop) - 1),
    Role.BRANCH: _shaped(lambda call: int(call.start > 0)),
    Role.KEEP: _shaped(lambda _: 0),
    Role.BEAMS: _shaped(lambda call: np.arange(call.tape.batch)),
    Role.ROW_INDEX: _shaped(lambda call: np.clip(call.wanted - call.start, 0, call.length - 1)),
    Role.MARKED: _none_marked,
    Role.MARKED_ROWS: _none_marked,
}
