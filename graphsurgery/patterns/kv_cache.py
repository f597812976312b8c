"""Caches and states: what a model hands on to its next call, and how it is brought up to date.

Structure tells first: the output is the input with new positions joined to it or written into it, behind layout
operators and inside called functions, or it is what a fused attention operator returns. Names pair the states of linear
attention, which are computed anew, and tell keys from values and the number of the layer. Alphabet: B batch, S query
length, P past, T = P + S keys, N slots of a fixed-size cache, W window, G KV heads, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.patterns._cache_names import CacheKind, cache_key, is_cache_name, kind_of_name, layer_of_name
from graphsurgery.patterns._cache_writes import CacheForm, Write, find_write, kind_by_use
from graphsurgery.patterns.interface import FLOATS, fed_inputs
from graphsurgery.patterns.matcher import subgraphs
from graphsurgery.patterns.site import Site

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphsurgery.analysis.shapes import Shapes

__all__ = ["CacheForm", "CacheKind", "CacheSite", "find_caches"]

_ATTENDED: frozenset[CacheKind] = frozenset({"key", "value", "key-value", "latent", "rope"})
_INTEGERS = frozenset({ir.DataType.INT64, ir.DataType.INT32})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSite(Site):
    """One cache or state of one layer: an input, and the output that takes its place in the next call.

    Attributes:
        input: what is fed; None where a model of the prompt alone only returns it (``fresh``).
        output: what is returned.
        kind: ``key``, ``value``, ``key-value`` (both in one tensor), ``latent`` and ``rope`` (the two parts of latent
            attention), ``conv`` and ``recurrent`` (linear attention), ``window`` and ``length`` (scalars), ``state``.
        form: how the output comes from the input: ``concat`` (new positions are joined), ``scatter`` (written into
            slots), ``fused`` (by an attention operator), ``passthrough`` (unchanged), ``counter`` (a number that is
            added to), ``state`` (computed anew), ``fresh`` (there is no input).
        axis: the axis of the input (of the output where ``fresh``) that counts positions; None where there is none.
        window: W, where the operators that write the cache tell it.
        sliding: the layer attends a window, as the cache or another state of the layer tells.
        grows: the output is longer than the input: by S a call.
        cross: it holds another sequence, an encoder's.
    """

    input: ir.Value | None
    output: ir.Value
    kind: CacheKind
    form: CacheForm
    axis: int | None
    window: int | None = None
    sliding: bool = False
    grows: bool = False
    cross: bool = False


@dataclasses.dataclass(frozen=True)
class _Pair:
    input: ir.Value | None
    output: ir.Value
    write: Write


def find_caches(model: ir.Model, shapes: Shapes) -> list[CacheSite]:
    """Every cache and state of ``model``, in the order of its outputs; time is linear in the nodes."""
    pairs = _written(model, shapes)
    pairs += _states(model, shapes, pairs)
    pairs += _fresh(model, pairs)
    order = {value: number for number, value in enumerate(model.graph.outputs)}
    pairs.sort(key=lambda pair: order[pair.output])
    return _numbered(pairs, shapes)


# ---- pairs of input and output ------------------------------------------------------------------------------------


def _written(model: ir.Model, shapes: Shapes) -> list[_Pair]:
    """Outputs that are an input with something written to it."""
    inputs = {value: number for number, value in enumerate(fed_inputs(model))}
    taken: set[ir.Value] = set()
    pairs = []
    for output in dict.fromkeys(model.graph.outputs):
        write = find_write(model, output, inputs, shapes)
        if write is None or write.past in taken or not _plausible(write, output, shapes):
            continue
        taken.add(write.past)
        pairs.append(_Pair(write.past, output, write))
    return pairs


def _plausible(write: Write, output: ir.Value, shapes: Shapes) -> bool:
    """Whether what was found is a cache and not, say, a mask that the graph makes longer or ids that it returns."""
    past = write.past
    rank = shapes.rank(past)
    named = is_cache_name(past.name) or is_cache_name(output.name)
    if write.form == "fused":
        return True
    if write.form == "counter" or (write.form == "passthrough" and rank in (0, 1)):
        return past.dtype in _INTEGERS and rank in (0, 1) and named
    if rank is None or rank < 3 or past.dtype in _INTEGERS or past.dtype == ir.DataType.BOOL:
        return False
    if write.form == "passthrough":
        return named
    return named or (rank >= 4 and not _is_medium(past.name))


def _is_medium(name: str | None) -> bool:
    return any(word in (name or "").lower() for word in ("pixel", "image", "video", "audio", "mask", "embeds"))


def _states(model: ir.Model, shapes: Shapes, known: Iterable[_Pair]) -> list[_Pair]:
    """Outputs that are computed anew from an input of the same shape and name."""
    used = {value for pair in known for value in (pair.input, pair.output)}
    inputs = [value for value in fed_inputs(model) if value not in used and _is_state(value)]
    outputs = [value for value in dict.fromkeys(model.graph.outputs) if value not in used and _is_state(value)]
    if not inputs or not outputs:
        return []
    by_key = {cache_key(value.name): value for value in reversed(inputs)}
    reach = _Reach(model, inputs)
    pairs = []
    for output in outputs:
        found = by_key.get(cache_key(output.name))
        if found is None or not _same_shape(found, output, shapes) or not reach.reaches(found, output):
            continue
        pairs.append(_Pair(found, output, Write(found, "state", None)))
    return pairs


def _is_state(value: ir.Value) -> bool:
    return value.dtype in FLOATS and is_cache_name(value.name)


def _same_shape(a: ir.Value, b: ir.Value, shapes: Shapes) -> bool:
    """Whether both have one shape; an output whose shape is not known counts as what it declares."""
    ours, theirs = shapes.shape(a), shapes.shape(b)
    if ours is None or theirs is None:
        return False
    if len(ours) != len(theirs) or len(ours) < 2:
        return False
    fixed = [(m, n) for m, n in zip(ours, theirs, strict=True) if isinstance(m, int) and isinstance(n, int)]
    return all(m == n for m, n in fixed)


class _Reach:
    """From which of some inputs each value is computed: a bit for each input, carried through the nodes once."""

    def __init__(self, model: ir.Model, inputs: list[ir.Value]) -> None:
        self._bits = {value: 1 << number for number, value in enumerate(inputs)}
        self._from: dict[ir.Value, int] = dict(self._bits)
        for node in model.graph:
            self._visit(node)

    def _visit(self, node: ir.Node) -> int:
        bits = 0
        for value in node.inputs:
            if value is not None:
                bits |= self._from.get(value, 0)
        for graph in subgraphs(node):
            for inner in graph:
                bits |= self._visit(inner)
        if bits:
            for value in node.outputs:
                self._from[value] = bits
        return bits

    def reaches(self, source: ir.Value, target: ir.Value) -> bool:
        return bool(self._from.get(target, 0) & self._bits[source])


def _fresh(model: ir.Model, known: Iterable[_Pair]) -> list[_Pair]:
    """Keys and values that a model of the prompt alone returns: called so, and attended in the graph."""
    used = {pair.output for pair in known}
    pairs = []
    for output in dict.fromkeys(model.graph.outputs):
        if output in used or output.dtype not in FLOATS or not is_cache_name(output.name) or not output.uses():
            continue
        if kind_of_name(output.name) in ("key", "value") and kind_by_use(output) is not None:
            pairs.append(_Pair(None, output, Write(output, "fresh", None)))
    return pairs


# ---- sites --------------------------------------------------------------------------------------------------------


def _numbered(pairs: list[_Pair], shapes: Shapes) -> list[CacheSite]:
    kinds = [_kind(pair) for pair in pairs]
    crosses = [_is_cross(pair) for pair in pairs]
    layers = _layers(pairs, kinds, crosses)
    windowed = {
        layer
        for pair, kind, layer in zip(pairs, kinds, layers, strict=True)
        if kind == "window" or (kind in _ATTENDED and pair.write.window is not None)
    }
    return [
        _site(pair, kind, layer, shapes, cross=cross, sliding=layer in windowed)
        for pair, kind, layer, cross in zip(pairs, kinds, layers, crosses, strict=True)
    ]


def _kind(pair: _Pair) -> CacheKind:
    """What the operator says, then what the names say, then what reads it."""
    if pair.write.kind is not None:
        return pair.write.kind
    scalar = pair.write.form in ("passthrough", "counter")
    for value in (pair.input, pair.output):
        named = kind_of_name(value.name if value is not None else None)
        if named is not None and (scalar or named not in ("window", "length")):
            return named
    if pair.write.form == "counter":
        return "length"
    return kind_by_use(pair.write.value or pair.output) or "state"


def _is_cross(pair: _Pair) -> bool:
    names = [(value.name or "").lower() for value in (pair.input, pair.output) if value is not None]
    return any(word in name for name in names for word in ("cross", ".encoder.", "encoder_key", "encoder_value"))


def _layers(pairs: list[_Pair], kinds: list[CacheKind], crosses: list[bool]) -> list[int]:
    """The layer of each pair: as the names say, by order where they do not or say the same twice."""
    groups: dict[tuple[CacheKind, bool], list[int]] = {}
    for position, key in enumerate(zip(kinds, crosses, strict=True)):
        groups.setdefault(key, []).append(position)
    layers = [0] * len(pairs)
    for positions in groups.values():
        named = [_named_layer(pairs[position]) for position in positions]
        # One number missing or told twice: the names number something else.
        usable = None not in named and len(set(named)) == len(named)
        for rank, position in enumerate(positions):
            number = named[rank]
            layers[position] = number if usable and number is not None else rank
    return layers


def _named_layer(pair: _Pair) -> int | None:
    for value in (pair.input, pair.output):
        layer = layer_of_name(value.name) if value is not None else None
        if layer is not None:
            return layer
    return None


def _site(pair: _Pair, kind: CacheKind, layer: int, shapes: Shapes, *, cross: bool, sliding: bool) -> CacheSite:
    write = pair.write
    grows = _grows(pair, shapes)
    attended = kind in _ATTENDED
    kinds: list[str] = ["cache", kind]
    if attended:
        kinds.append("cross" if cross else "sliding" if sliding else "full")
        kinds.append("fresh" if write.form == "fresh" else "growing" if grows else "fixed")
    return CacheSite(
        id=f"cache:{layer}.{'cross.' if cross else ''}{kind}",
        kinds=tuple(kinds),
        layer=layer,
        input=pair.input,
        output=pair.output,
        kind=kind,
        form=write.form,
        axis=_axis(pair, shapes) if attended else None,
        window=write.window,
        sliding=attended and sliding and not cross,
        grows=grows,
        cross=cross,
    )


def _grows(pair: _Pair, shapes: Shapes) -> bool:
    if pair.input is None:
        return False
    if pair.write.form == "concat":
        return not pair.write.cut
    if pair.write.form != "fused":
        return False
    # What an operator returns has the size that is declared: its kernel writes in place where both are one.
    if pair.input.shape is not None and pair.output.shape is not None:
        return bool(pair.input.shape != pair.output.shape)
    return shapes.shape(pair.input) != shapes.shape(pair.output)


def _axis(pair: _Pair, shapes: Shapes) -> int | None:
    if pair.write.axis is not None:
        return pair.write.axis
    value = pair.input if pair.input is not None else pair.output
    rank = shapes.rank(value)
    if rank is None:
        return None
    # A layout that hides the axis: the one that is not the same before and after, by custom the last but one.
    before, after = shapes.shape(value) or (), shapes.shape(pair.output) or ()
    moved = [axis for axis, (m, n) in enumerate(zip(before, after, strict=False)) if m != n]
    return moved[0] if len(moved) == 1 and len(before) == len(after) else max(rank - 2, 0)
