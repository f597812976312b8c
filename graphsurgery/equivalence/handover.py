"""What a model hands on to its next call: each cache or state, how it is fed, and what of it is defined.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache, W window.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.equivalence.roles import Role, axis_letters, cache_axis
from graphsurgery.patterns._cache_names import cache_key, is_cache_name, kind_of_name, layer_of_name
from graphsurgery.patterns.kv_cache import find_caches
from graphsurgery.patterns.matcher import GraphIndex, through

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import onnx

    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.roles import InputSpec, Signature
    from graphsurgery.patterns.kv_cache import CacheSite

__all__ = ["Cache", "Manner", "columns_of", "find_handover", "placed"]


class Manner(enum.Enum):
    """How a cache is fed."""

    GROW = "as long as what is in it"
    FILL = "of a fixed length, what is in it last, zeros before it"
    SLOTS = "N slots, of which the first are in use"
    RING = "a ring of one window"
    STATE = "a state, zeros at first"
    COUNTER = "a number that the model adds to"
    CONSTANT = "passed on unchanged"


@dataclasses.dataclass(frozen=True)
class Cache:
    """One cache or state of one layer.

    Attributes:
        key: what it is, alike in every file of a model, such as ``cache:0.key``.
        input: the input; None where a model of the prompt alone only returns it.
        output: the output that takes its place in the next call.
        manner: how it is fed.
        axis: the axis that counts positions; None where there is none.
        batch_axis: the axis of size B; None for scalars.
        fused: GroupQueryAttention or its like reads and returns it: rows are packed, whatever their length.
    """

    key: str
    input: InputSpec | None
    output: str
    manner: Manner
    axis: int | None
    batch_axis: int | None
    fused: bool = False

    @property
    def counts_columns(self) -> bool:
        """Whether it holds something for each position."""
        return self.axis is not None and self.manner in (Manner.GROW, Manner.FILL, Manner.SLOTS)


def find_handover(proto: onnx.ModelProto, signature: Signature) -> tuple[Cache, ...]:
    """Every cache and state of a model, in the order of its outputs; weights are not looked at.

    Which output takes the place of which input is told by their names, as runtimes go by them, and by the graph where
    names do not tell; how a cache is fed is told by the graph.
    """
    model = ir.from_proto(proto)
    sites = find_caches(model, shapes_of(model))
    placed = bool(signature.having(Role.POSITIONS)) or _counts_mask(model, signature)
    caches = [_cache(site, signature, placed=placed) for site in sites]
    named = _outputs_by_words(signature)
    # Names only exchange outputs: each is handed on once.
    mates = [named.get(cache_key(cache.input.name)) if cache.input is not None else None for cache in caches]
    if sorted(filter(None, mates)) == sorted(cache.output for cache, mate in zip(caches, mates, strict=True) if mate):
        caches = [
            cache if mate is None else dataclasses.replace(cache, output=mate)
            for cache, mate in zip(caches, mates, strict=True)
        ]
    return (*caches, *_by_name_alone(signature, caches, named))


def _outputs_by_words(signature: Signature) -> dict[tuple[str, ...], str]:
    """Outputs that are called caches or states, by the words of their names that are not of direction."""
    found: dict[tuple[str, ...], list[str]] = {}
    for output in signature.outputs:
        if is_cache_name(output.name):
            found.setdefault(cache_key(output.name), []).append(output.name)
    return {words: names[0] for words, names in found.items() if words and len(names) == 1}


_MANNERS = {
    Role.CACHE: Manner.GROW,
    Role.SLOTS: Manner.SLOTS,
    Role.STATE: Manner.STATE,
    Role.PAST_LENGTH: Manner.COUNTER,
    Role.WINDOW: Manner.CONSTANT,
}


def _by_name_alone(
    signature: Signature, caches: Sequence[Cache], named: Mapping[tuple[str, ...], str]
) -> Iterator[Cache]:
    """Inputs that an output is called after, where the graph does not tell how the one comes of the other."""
    inputs = {cache.input.name for cache in caches if cache.input is not None}
    outputs = {cache.output for cache in caches}
    for spec in signature.inputs:
        manner, output = _MANNERS.get(spec.role), named.get(cache_key(spec.name))
        if manner is None or output is None or spec.name in inputs or output in outputs:
            continue
        if not is_cache_name(spec.name):
            continue
        key = f"cache:{layer_of_name(spec.name) or 0}.{kind_of_name(spec.name) or 'state'}"
        axis = cache_axis(spec) if manner in (Manner.GROW, Manner.SLOTS) else None
        yield Cache(key, spec, output, manner, axis, 0 if spec.dims else None)


def _counts_mask(model: ir.Model, signature: Signature) -> bool:
    """Whether positions are counted in the mask: then padding in front of the tokens does not move them."""
    masks = {spec.name for spec in signature.having(Role.MASK)}
    found = {through(node.inputs[0]).name for node in GraphIndex(model).nodes("CumSum") if node.inputs[0] is not None}
    return bool(masks & found)


def _cache(site: CacheSite, signature: Signature, *, placed: bool) -> Cache:
    output = site.output.name or ""
    spec = signature.input(site.input.name or "") if site.input is not None else None
    fused = site.form == "fused" and signature.fused_attention
    if spec is None:
        return Cache(site.id, None, output, Manner.GROW, site.axis, 0, fused)
    manner = _manner(site, spec, signature, placed=placed)
    axis = site.axis if manner in (Manner.GROW, Manner.FILL, Manner.SLOTS, Manner.RING) else None
    return Cache(site.id, spec, output, manner, axis, _batch_axis(spec, signature), fused)


def _batch_axis(spec: InputSpec, signature: Signature) -> int | None:
    if not spec.dims:
        return None
    named = [a for a, dim in enumerate(spec.dims) if isinstance(dim, str) and signature.letters.get(dim) == "B"]
    return (named + [a for a, letter in enumerate(axis_letters(spec)) if letter == "B"] + [0])[0]


def _manner(site: CacheSite, spec: InputSpec, signature: Signature, *, placed: bool) -> Manner:
    if site.form == "counter":
        return Manner.COUNTER
    if site.form == "passthrough":
        return Manner.CONSTANT
    if site.form == "state" or site.axis is None:
        return Manner.STATE
    fixed = isinstance(spec.dims[site.axis], int)
    if site.form == "fused" and spec.role is Role.STATE:
        return Manner.RING
    if site.form == "fused" and signature.fused_attention:
        # Its kernel is told how much of the cache is in use; a cache of no slots is that of a prompt.
        return Manner.GROW if (site.grows and not fixed) or spec.dims[site.axis] == 0 else Manner.SLOTS
    if site.form == "scatter":
        return Manner.SLOTS
    # What cuts its own output to a fixed length is brought up to date by the model.
    if site.form == "concat" and not site.grows and fixed:
        return Manner.STATE
    # Positions that follow from the length of the cache would be those of a full one.
    padded = placed and bool(signature.having(Role.MASK, Role.MASK_ND))
    return Manner.FILL if fixed and spec.dims[site.axis] and padded else Manner.GROW


def columns_of(cache: Cache, array: Array, stop: int) -> Array:
    """The part of a returned cache that stands for the first ``stop`` columns (the last of them, where it is cut)."""
    if not cache.counts_columns or cache.axis is None:
        return array
    size = array.shape[cache.axis]
    if size <= stop:
        return array
    part = slice(size - stop, size) if cache.manner is Manner.FILL else slice(0, stop)
    index = [slice(None)] * array.ndim
    index[cache.axis] = part
    return array[tuple(index)]


def placed(cache: Cache, columns: Array, size: int | None) -> Array:
    """What is fed for a cache, from the columns that it holds.

    Args:
        cache: of the model that is fed.
        columns: what :func:`columns_of` gave.
        size: its length on ``axis``; None for as long as it is.
    """
    if not cache.counts_columns or cache.axis is None or size is None:
        return columns
    have = columns.shape[cache.axis]
    index = [slice(None)] * columns.ndim
    if have > size:
        # The oldest go where the newest are last.
        index[cache.axis] = slice(have - size, have) if cache.manner is Manner.FILL else slice(0, size)
        return columns[tuple(index)]
    shape = list(columns.shape)
    shape[cache.axis] = size
    array = np.zeros(shape, dtype=columns.dtype)
    index[cache.axis] = slice(size - have, size) if cache.manner is Manner.FILL else slice(0, have)
    array[tuple(index)] = columns
    return array
