"""One model file that decodes: its logits, how long its calls may be, and how it takes batches of unequal rows.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.equivalence.handover import Cache, Manner, find_handover
from graphsurgery.equivalence.pairing import stated_contracts
from graphsurgery.equivalence.roles import FLOATS, OutputSpec, Role, letter_of
from graphsurgery.errors import CannotCheckError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

    from graphsurgery.contracts import RowSelection
    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.roles import Signature
    from graphsurgery.equivalence.tape import Side

__all__ = ["Decoder", "read_decoder"]

_ELSEWHERE = re.compile(r"(?<!de)encoder|cross|audio|pixel", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model and the convention by which it decodes.

    Attributes:
        path: the file, as messages call it.
        signature: of the model.
        caches: what it hands on; empty where it is fed the whole sequence anew.
        logits: the output ``[B, S, V]``, or fewer rows.
        contracts: which rows ``logits`` holds.
        drawn_as: input to the name under which it is drawn where its meaning is not known.
    """

    path: str
    signature: Signature
    caches: tuple[Cache, ...]
    logits: OutputSpec
    contracts: tuple[RowSelection, ...] = ()
    drawn_as: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether every call is fed the whole sequence: no cache is an input."""
        return not any(cache.counts_columns or cache.manner in _HELD for cache in self.fed)

    @property
    def fed(self) -> tuple[Cache, ...]:
        """The caches that are inputs."""
        return tuple(cache for cache in self.caches if cache.input is not None)

    @property
    def packed(self) -> bool:
        """Whether caches hold each row's tokens without gaps, whatever the other rows hold."""
        if any(cache.fused for cache in self.fed):
            return True
        counted = self.signature.having(Role.PAST_LENGTH) or any(c.manner is Manner.COUNTER for c in self.caches)
        placed = any(len(spec.dims) > 1 for spec in self.signature.having(Role.POSITIONS))
        return bool(self.signature.having(Role.SLOTS)) and placed and not counted

    @property
    def sides(self) -> tuple[Side, ...]:
        """On which sides the rows of a batch may be padded, the better first."""
        told = bool(self.signature.having(Role.MASK, Role.MASK_ND, Role.LAST_KEY))
        # Behind padding on the right, columns are not positions any more: these must be told too.
        placed = any(len(spec.dims) > 1 for spec in self.signature.having(Role.POSITIONS))
        sides: tuple[Side, ...] = ("left", "right") if told and placed else ("left",) if told else ()
        if self.whole:
            sides = ("left", "right") if told and self.length is None else ("right",)
        elif self.packed:
            sides = ("right",) if told or not self.signature.fused_attention else ()
        # A state takes up every token behind the last one too, and a static last row is then padding.
        state = any(cache.manner is Manner.STATE for cache in self.fed)
        if state or any(contract.index == "last" for contract in self.contracts):
            sides = tuple(side for side in sides if side != "right")
        return sides

    @property
    def batch(self) -> int | None:
        """B where it is fixed; 1 where nothing counts rows."""
        counted = "B" in self.signature.letters.values()
        return self.signature.fixed.get("B", None if counted else 1)

    @property
    def length(self) -> int | None:
        """S where it is fixed."""
        return self.signature.fixed.get("S")

    @property
    def slots(self) -> int | None:
        """N where it is fixed; the largest, where caches of windows are smaller."""
        sizes = [_size(cache) for cache in self.fed if cache.manner is Manner.SLOTS]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def past(self) -> int | None:
        """P where it is fixed and caches cannot be filled up to it."""
        sizes = [_size(cache) for cache in self.fed if cache.manner is Manner.GROW]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def filled(self) -> int | None:
        """P where it is fixed and caches are filled up to it."""
        sizes = [_size(cache) for cache in self.fed if cache.manner is Manner.FILL]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def capacity(self) -> int | None:
        """The largest number of columns, by slots, filled-up caches and the table of positions."""
        limits = [self.signature.positions] if self.signature.positions is not None else []
        if self.slots is not None:
            # Padding at position -1 is written to the last slot.
            spare = self.packed and any(contract.index == "position" for contract in self.contracts)
            limits.append(self.slots - spare)
        if "C" in self.signature.fixed:
            limits.append(self.signature.fixed["C"])
        if self.filled is not None:
            limits.append(self.filled + (self.length or 1))
        if self.whole and self.length is not None:
            limits.append(self.length)
        return min(limits, default=None)

    @property
    def vocabulary(self) -> int | None:
        """How many token ids it takes; None where the graph does not tell."""
        limits = [spec.limit for spec in self.signature.having(Role.TOKENS) if spec.limit]
        last = (self.logits.dims or ("",))[-1]
        return min([*limits, *([last] if isinstance(last, int) else [])], default=None)

    def takes(self, start: int, stop: int) -> str | None:
        """None where the columns ``start`` to ``stop`` can be one call; else a clause that says why not."""
        if self.capacity is not None and stop > self.capacity:
            return f"holds {self.capacity} positions"
        if self.whole and start:
            return "takes no past"
        if self.length is not None and stop - start != self.length:
            return f"takes {self.length} tokens a call"
        if self.past is not None and start != self.past:
            return f"takes exactly {self.past} cached positions"
        return None

    def rows(self, outputs: Mapping[str, Array], feed: Mapping[str, Array], length: int) -> tuple[Array, Array]:
        """Logits ``[B, R, V]`` of one call, and which of its S columns each row stands for, int64 ``[B, R]``.

        One row that no contract explains stands for whatever is wanted: -1.
        """
        value = outputs[self.logits.name]
        sequence = self.signature.sequence
        assert sequence is not None
        spec, axis = sequence
        batch = int(feed[spec.name].shape[0]) if axis else 1
        if self.contracts:
            numbers = self._numbers(value.ndim, batch, length)
            for contract in self.contracts:
                numbers = contract.apply(numbers, feed)
        if self._time_first():
            value = np.moveaxis(value, 0, 1)
            numbers = np.moveaxis(numbers, 0, 1) if self.contracts else value
        logits = value.reshape(batch, -1, value.shape[-1])
        if self.contracts:
            return logits, numbers.reshape(batch, -1)
        held = logits.shape[1]
        if held == 1 and length > 1:
            return logits, np.full((batch, 1), -1)
        return logits, np.broadcast_to(np.arange(length - held, length), (batch, held))

    def _numbers(self, rank: int, batch: int, length: int) -> Array:
        """For each place of the full logits the column that it stands for, as if V were 1."""
        first = self.contracts[0]
        shape = [1] * rank
        if first.flat:
            shape[first.row_axis] = batch * length
            return (np.arange(batch * length) % length).reshape(shape)
        shape[first.row_axis] = length
        numbers = np.arange(length).reshape(shape)
        if first.batch_axis is not None:
            shape[first.batch_axis] = batch
        return np.broadcast_to(numbers, shape)

    def _time_first(self) -> bool:
        if self.contracts:
            return (self.contracts[0].row_axis, self.contracts[0].batch_axis) == (0, 1)
        dims = self.logits.dims or ()
        return [letter_of(dim, self.signature.letters) for dim in dims[:2]] == ["S", "B"] and len(dims) == 3


_HELD = frozenset({Manner.RING, Manner.STATE})


def _size(cache: Cache) -> int | None:
    assert cache.input is not None
    assert cache.axis is not None
    dim = cache.input.dims[cache.axis]
    return dim if isinstance(dim, int) else None


def read_decoder(path: str, proto: onnx.ModelProto, signature: Signature, drawn_as: Mapping[str, str]) -> Decoder:
    """How a model decodes.

    Args:
        path: of the file, for messages.
        proto: its content.
        signature: read from it, inputs that choose rows marked.
        drawn_as: see :class:`Decoder`.

    Raises:
        CannotCheckError: it has no logits or no tokens, attends another sequence, or a cache is not handed on.
    """
    caches = find_handover(proto, signature)
    logits = _find_logits(signature, {cache.output for cache in caches})
    if logits is None:
        raise CannotCheckError(f"{path} has no logits, so nothing can be decoded: check it with --depth outputs.")
    if signature.sequence is None:
        raise CannotCheckError(f"{path} takes no tokens, so nothing can be decoded: check it with --depth outputs.")
    for spec in signature.inputs:
        if _ELSEWHERE.search(spec.name):
            raise CannotCheckError(
                f"{path} attends another sequence (input {spec.name}), which decoding does not make:"
                " check it with --depth outputs."
            )
    fed = {cache.input.name for cache in caches if cache.input is not None}
    for spec in signature.having(Role.CACHE, Role.SLOTS):
        if spec.name not in fed:
            raise CannotCheckError(
                f"{path} takes a cache, input {spec.name}, and no output hands it on: check it with --depth outputs."
            )
    contracts = tuple(contract for contract in stated_contracts(proto) if contract.output == logits.name)
    return Decoder(path, signature, caches, logits, contracts, drawn_as)


def _find_logits(signature: Signature, caches: set[str]) -> OutputSpec | None:
    """The output called logits, else the only float one as wide as the table of tokens."""
    floats = [
        output
        for output in signature.outputs
        if output.name not in caches and output.elem_type in FLOATS and len(output.dims or ("", "")) in (2, 3)
    ]
    for called in ("logits", r".*logits.*", r"(.*[._/])?lm_head.*"):
        named = [output for output in floats if re.fullmatch(called, output.name, re.IGNORECASE)]
        if named:
            return named[0]
    widths = {spec.limit for spec in signature.having(Role.TOKENS) if spec.limit}
    wide = [output for output in floats if output.dims is not None and output.dims[-1] in widths]
    return wide[0] if len(wide) == 1 else None
