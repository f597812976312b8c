"""Drawing the arrays of one feed, input by input, by what each stands for.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache, R replaced tokens,
E what an encoder has read.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx

from graphsurgery.equivalence.dims import evaluate
from graphsurgery.equivalence.roles import FLOATS, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.equivalence.dims import Dim
    from graphsurgery.equivalence.feeds import Sizes
    from graphsurgery.equivalence.roles import InputSpec, Signature

__all__ = ["Array", "Draw"]

Array = np.ndarray[Any, np.dtype[Any]]


def _resolve(dims: tuple[Dim, ...], sizes: Sizes, signature: Signature) -> tuple[int | None, ...]:
    """Sizes of declared dims; None where a symbol stands for nothing known."""
    values = sizes.letters()
    symbols = {symbol: values[letter] for symbol, letter in signature.letters.items()}
    return tuple(evaluate(dim, symbols) for dim in dims)


@dataclasses.dataclass(frozen=True)
class Draw:
    """Builds the arrays of one feed."""

    signature: Signature
    sizes: Sizes
    seed: int
    number: int
    pad_position: int | None

    def __call__(self) -> dict[str, Array]:
        """Arrays by input name."""
        return {spec.name: self.array(spec) for spec in self.signature.inputs}

    def rng(self, name: str) -> np.random.Generator:
        """The generator of one input: what others are fed does not shift it."""
        return np.random.default_rng([self.seed, self.number, zlib.crc32(name.encode())])

    def real(self) -> Array:
        """Which keys are no padding, bool ``[B, T]``: row 0 is full, later rows are shorter and shorter."""
        sizes = self.sizes
        total = sizes.past + sizes.length
        real = np.ones((sizes.batch, total), dtype=np.bool_)
        for row in range(1, sizes.batch):
            if sizes.padding == "right":
                # The cached part was written by real tokens.
                kept = max(1, sizes.length - row * max(1, sizes.length // 2))
                real[row, sizes.past + kept :] = False
            elif sizes.padding == "left":
                real[row, : min(row * max(1, total // 3), total - 1)] = False
        return real

    def shape(self, spec: InputSpec) -> tuple[int, ...]:
        """The shape of one input."""
        # What a file declares goes before what its operators ask for at least.
        known = {axis: size for axis, size in spec.size if isinstance(spec.dims[axis], str)}
        sizes = _resolve(spec.dims, self.sizes, self.signature)
        spare = [self.sizes.batch] + [2] * len(sizes)
        # Sequences of equal length: two where that goes.
        streams = 2 if self.sizes.length % 2 == 0 and self.signature.having(Role.BORDERS) else 1
        if spec.role is Role.GRID:
            # Of each image frames, rows and columns of patches.
            spare[:2] = [streams, 3]
        if spec.role is Role.BORDERS:
            spare[0] = streams + 1
        if spec.role is Role.MARKED_ROWS:
            spare[0] = self.sizes.letters()["R"]
        return tuple(known.get(axis, spare[axis] if size is None else size) for axis, size in enumerate(sizes))

    def array(self, spec: InputSpec) -> Array:
        """The array of one input, of its declared type."""
        shape = self.shape(spec)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(spec.elem_type)
        built: Array = np.asarray(_BUILDERS.get(spec.role, _unknown)(self, spec, shape))
        array: Array = built.astype(dtype).reshape(shape)
        return array

    def base_positions(self) -> Array:
        """Positions ``[B, S]`` that go with the mask: the running count of real tokens less one, at least 0."""
        real = self.real()
        window = slice(real.shape[1] - self.sizes.length, None)
        positions: Array = np.maximum(np.cumsum(real, axis=1) - 1, 0)[:, window]
        if self.sizes.padding == "right":
            if self.pad_position is not None:
                positions = np.where(real[:, window], positions, self.pad_position)
            elif self.signature.having(Role.SLOTS):
                # Positions may be the slots to write: they go on through the padding, each its own.
                positions = np.broadcast_to(np.arange(self.sizes.length) + self.sizes.past, positions.shape)
        return positions


def _batch_rows(array: Array, count: int) -> Array:
    """As many rows as an input has: one for all, or more by beginning anew."""
    return array[np.arange(count) % len(array)]


def _tokens(draw: Draw, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return draw.rng(spec.name).integers(0, spec.limit or 8, shape)


def _floats(draw: Draw, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return draw.rng(spec.name).standard_normal(shape)


def _mask(draw: Draw, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    real = _batch_rows(draw.real(), shape[0])
    mask = np.zeros(shape, dtype=np.bool_)
    width = min(shape[1], real.shape[1])
    # A mask of the new tokens alone holds the last columns, one over all slots the first.
    mask[:, :width] = real[:, -shape[1] :] if 0 < shape[1] <= real.shape[1] else real[:, :width]
    return _low(mask, spec)


def _encoder_mask(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    """What an encoder has read: shorter rows end in padding, in most feeds the first one too."""
    rows, width = shape
    missing = (np.arange(rows) + draw.number) % (width // 2 + 1)
    return np.arange(width)[None, :] < (width - missing)[:, None]


def _mask_nd(draw: Draw, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    real = _batch_rows(draw.real(), shape[0])
    rows, columns = shape[-2], shape[-1]
    query = np.arange(rows)[:, None] + (draw.sizes.past if rows > 1 else draw.sizes.past + draw.sizes.length - 1)
    causal = np.arange(columns)[None, :] <= query
    keys = np.zeros((shape[0], columns), dtype=np.bool_)
    keys[:, : real.shape[1]] = real[:, :columns]
    mask = causal[None] & keys[:, None, :]
    if draw.signature.bounded:
        # Padding has to attend something, or it would be the mean of however many slots are read: itself.
        mask |= (np.arange(columns)[None, :] == query)[None] & ~mask.any(axis=-1, keepdims=True)
    return _low(np.broadcast_to(mask.reshape(shape[0], *[1] * (len(shape) - 3), rows, columns), shape), spec)


def _positions(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    base = draw.base_positions()
    if shape[-1] != base.shape[1]:
        base = np.broadcast_to(np.arange(shape[-1]), (len(base), shape[-1]))
    base = _batch_rows(base, shape[-2]) if len(shape) > 1 else base[0]
    if len(shape) < 3:
        return np.broadcast_to(base, shape)
    # Row 0 of 3 is the temporal axis; row 0 of 4 the text position. Image axes run slower where S allows it.
    slower = np.where(base > 0, base - (np.arange(base.shape[-1]) % 2) * (draw.number % 2), base)
    planes = [base, *([base] if shape[0] == 4 else []), slower, slower]
    return np.stack(planes)[np.minimum(np.arange(shape[0]), len(planes) - 1)]


def _patches(_draw: Draw, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    """Row after row of a square, as far as the patches go."""
    length, directions = shape
    side = max(1, int(np.ceil(np.sqrt(length))))
    numbers = np.arange(length)
    places = np.resize(np.stack([numbers // side, numbers % side], axis=-1), (length, directions))
    return places % (spec.limit or side)


def _borders(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    """From 0 to S in steps that are as equal as can be."""
    return np.arange(shape[0]) * draw.sizes.length // max(1, shape[0] - 1)


def _past_length(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return np.full(shape, draw.sizes.past)


def _total_length(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return np.full(shape, draw.sizes.past + draw.sizes.length)


def _last_key(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    last = draw.real().sum(axis=1) - 1
    return np.resize(last, shape)


def _window(_draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return np.full(shape, 8)


def _keep(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return np.full(shape, (0, 1, min(3, draw.sizes.length))[draw.number % 3])


def _beams(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return np.resize(np.arange(draw.sizes.batch)[::-1], shape)


def _branch(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return np.full(shape, draw.sizes.past > 0)


def _grid(_draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return np.resize(np.array([1, 4, 4]), shape)


def _row_index(draw: Draw, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    """The last real token of each row in half of the feeds, any row from 0 on in the others."""
    batch, length = draw.sizes.batch, draw.sizes.length
    count = int(np.prod(shape))
    if draw.number % 2 == 0 or not count:
        last = length - 1 - np.argmax(draw.real()[:, : -length - 1 : -1], axis=1)
        return np.resize(last, count).reshape(shape)
    rows = draw.rng(spec.name).integers(0, length, count)
    rows[draw.rng(spec.name + "/zero").integers(0, max(1, min(batch, count)))] = 0
    return rows.reshape(shape)


def _order(draw: Draw, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    return draw.rng(spec.name).permutation(shape[0])


def _bound(_draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    """Only its length tells anything."""
    return np.zeros(shape)


def _marked(draw: Draw, _spec: InputSpec, shape: tuple[int, ...]) -> Array:
    marked = np.zeros(shape, dtype=np.bool_)
    start = (draw.sizes.length - draw.sizes.marked) // 2
    marked[:, start : start + draw.sizes.marked] = True
    return marked


def _unknown(draw: Draw, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    """A small safe default: normal floats, a coin for booleans, 0 or 1 for integers (rows of a table it indexes)."""
    rng = draw.rng(spec.name)
    if spec.elem_type in FLOATS:
        return rng.standard_normal(shape)
    if spec.elem_type == onnx.TensorProto.BOOL:
        return rng.integers(0, 2, shape)
    return rng.integers(0, min(spec.limit or 2, 2), shape) if shape else np.zeros(())


def _low(mask: Array, spec: InputSpec) -> Array:
    """A boolean mask as it is declared: floats are added to scores, 0 or the least finite number."""
    if spec.elem_type not in FLOATS or spec.role is Role.MASK:
        return mask
    dtype = onnx.helper.tensor_dtype_to_np_dtype(spec.elem_type)
    return np.where(mask, 0.0, float(ml_dtypes.finfo(dtype).min))


_BUILDERS: dict[Role, Callable[[Draw, InputSpec, tuple[int, ...]], Array]] = {
    Role.TOKENS: _tokens,
    Role.EMBEDS: _floats,
    Role.MASK: _mask,
    Role.MASK_ND: _mask_nd,
    Role.ENCODER_MASK: _encoder_mask,
    Role.ENCODER_STATES: _floats,
    Role.POSITIONS: _positions,
    Role.PATCHES: _patches,
    Role.BORDERS: _borders,
    Role.CACHE: _floats,
    Role.SLOTS: _floats,
    Role.STATE: _floats,
    Role.PAST_LENGTH: _past_length,
    Role.TOTAL_LENGTH: _total_length,
    Role.LAST_KEY: _last_key,
    Role.WINDOW: _window,
    Role.KEEP: _keep,
    Role.BEAMS: _beams,
    Role.BRANCH: _branch,
    Role.GRID: _grid,
    Role.ROW_INDEX: _row_index,
    Role.ORDER: _order,
    Role.BOUND: _bound,
    Role.MARKED: _marked,
    Role.MARKED_ROWS: _floats,
}
