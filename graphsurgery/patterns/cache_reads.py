"""Attention over caches of a fixed size: which columns of which operands are slots of the cache.

From each attention the keys and values are followed up, slot by slot, to the cache after the write: through layout,
expansion over heads, casts and dequantisation, products that make keys of a latent cache, and reads by index. What is
found is a :class:`CacheRead`: the edges on which columns of slots could be left out together. Alphabet: B batch, S query
length, N slots, G KV heads, H heads, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.analysis.slices import Blocked, RowAxis, lift
from graphsurgery.patterns.attention import find_attentions
from graphsurgery.patterns.attention_sites import AttentionSite, FusedAttention
from graphsurgery.patterns.column_sinks import sink_end
from graphsurgery.patterns.function_bodies import body_view
from graphsurgery.patterns.fused_reads import fused_operands
from graphsurgery.patterns.kv_cache import find_caches
from graphsurgery.patterns.matcher import is_op
from graphsurgery.patterns.products import read_product
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.patterns.write_positions import write_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes, ShapeView
    from graphsurgery.patterns.kv_cache import CacheSite
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["CacheRead", "ColumnEdge", "find_cache_reads", "written_values"]

_LAYOUT = frozenset(
    {
        *("Identity", "Cast", "CastLike", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Dropout"),
        *("QuantizeLinear", "DequantizeLinear", "Slice"),
    }
)
_INDEXED = frozenset({"Gather", "GatherND", "GatherElements"})
_MAX_VALUES = 256


@dataclasses.dataclass(frozen=True)
class ColumnEdge:
    """Input ``index`` of ``node`` has the slots on ``axis``."""

    node: ir.Node
    index: int
    axis: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheRead(Site):
    """An attention that reads caches of a fixed size.

    Attributes:
        attention: it.
        edges: where it takes what has a column for each slot: keys, values, masks.
        slots: N, the number of columns.
        caches: the caches behind the keys and values.
        sink_end: what must be the end of the Slice that drops a sink, where it is a number of columns now.
    """

    attention: AttentionSite | FusedAttention
    edges: tuple[ColumnEdge, ...]
    slots: Dim
    caches: tuple[CacheSite, ...]
    sink_end: int | None = None

    @property
    def keys(self) -> ColumnEdge:
        """The edge of the keys."""
        return self.edges[0]

    @property
    def sliding(self) -> bool:
        """Whether the caches hold a window."""
        return "sliding" in self.kinds


Written: TypeAlias = "Mapping[ir.Value, CacheSite]"


def written_values(caches: Iterable[CacheSite]) -> dict[ir.Value, CacheSite]:
    """Each cache of a fixed size after the write, in every layout between the write and the output."""
    found: dict[ir.Value, CacheSite] = {}
    for cache in caches:
        if cache.form != "scatter" or cache.cross or cache.axis is None:
            continue
        value: ir.Value | None = cache.output
        while value is not None:
            found[value] = cache
            node = value.producer()
            if node is None or node.domain or node.op_type not in _LAYOUT:
                break
            value = node.inputs[0]
    return found


def find_cache_reads(model: ir.Model, shapes: Shapes, index: GraphIndex) -> list[CacheRead | Refusal]:
    """Every attention, as a :class:`CacheRead` or a refusal that says why its columns cannot be bounded."""
    caches = find_caches(model, shapes)
    finder = _Finder(model, shapes, written_values(caches), {item.output: item for item in caches})
    return [site if isinstance(site, Refusal) else finder.read(site) for site in find_attentions(model, shapes, index)]


class _NotBoundedError(Exception):
    """Why the columns of an attention cannot be bounded."""


@dataclasses.dataclass
class _Origin:
    """What the columns of a value come from."""

    caches: dict[ir.Value, CacheSite] = dataclasses.field(default_factory=dict)
    others: dict[str, None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Body:
    """A function's body in one call."""

    call: ir.Node
    function: ir.Function
    view: ShapeView
    arguments: dict[ir.Value, ir.Value | None]
    outer: _Body | None


@dataclasses.dataclass(frozen=True)
class _Place:
    """A value that carries the columns on ``axis``, in the main graph or in a body."""

    value: ir.Value
    axis: int
    body: _Body | None


class _Finder:
    def __init__(self, model: ir.Model, shapes: Shapes, written: Written, caches: Mapping[ir.Value, CacheSite]) -> None:
        self._model = model
        self._shapes = shapes
        self._written = written
        self._by_output = caches
        self._by_input = {item.input: item for item in caches.values() if item.input is not None}

    def read(self, site: AttentionSite | FusedAttention) -> CacheRead | Refusal:
        try:
            return self._read(site)
        except _NotBoundedError as why:
            return Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=str(why))

    def _read(self, site: AttentionSite | FusedAttention) -> CacheRead:
        end: int | None = None
        anchor = site.softmax if isinstance(site, AttentionSite) else site.node
        if anchor.graph is not self._model.graph:
            raise _NotBoundedError(
                f"the attention around {anchor.op_type} {anchor.name!r} is inside a function, branch or loop: bound the "
                "context before layers become functions, or inline them first"
            )
        if isinstance(site, FusedAttention):
            operands = fused_operands(site, self._shapes)
            if isinstance(operands, str):
                raise _NotBoundedError(operands)
            edges = [ColumnEdge(site.node, position, axis) for position, axis in operands]
        else:
            edges = self._decomposed(site)
            end = self._inside(site)
        keys, values = (self._behind(edge) for edge in edges[:2])
        slots = self._size(edges[0])
        caches = {**keys, **values}
        windows = any(cache.sliding for cache in caches.values())
        kinds = tuple(kind for kind in site.kinds if kind not in ("sliding", "full"))
        sliding = windows or "sliding" in site.kinds
        return CacheRead(
            id=site.id,
            kinds=(*kinds, "sliding" if sliding else "full", "fixed"),
            layer=site.layer,
            attention=site,
            edges=tuple(edges),
            slots=slots,
            caches=tuple(caches.values()),
            sink_end=end,
        )

    def _size(self, edge: ColumnEdge) -> Dim:
        value = edge.node.inputs[edge.index]
        size = self._shapes.dim(value, edge.axis) if value is not None else None
        if size is None:
            raise _NotBoundedError(f"the shape of its keys {value.name if value else ''!r} is not known")
        return size

    # ---- the edges ------------------------------------------------------------------------------------------------

    def _decomposed(self, site: AttentionSite) -> list[ColumnEdge]:
        if site.probabilities_read is not None:
            raise _NotBoundedError(f"its scores or probabilities are also read by {site.probabilities_read}")
        edges = []
        for node, plain in ((site.scores, (-1, -2)), (site.product, (-2, -1))):
            value = node.inputs[1]
            rank = self._shapes.rank(value) if value is not None else None
            if rank is None:
                raise _NotBoundedError(f"the shape of {value.name if value else ''!r} is not known")
            edges.append(ColumnEdge(node, 1, rank + read_product(node).axes(plain)[0]))
        masks = self._masks(site)
        if not masks:
            raise _NotBoundedError("nothing masks its keys: every slot of the cache is attended")
        return edges + masks

    def _inside(self, site: AttentionSite) -> int | None:
        """Check what works on scores and probabilities; see :attr:`CacheRead.sink_end`."""
        joined = False
        for node in (site.scores, *site.chain, site.softmax, *site.tail):
            if site.sink is not None and node in (site.sink.join, site.sink.cut):
                joined = node is site.sink.join
                continue
            if is_op(node, "Reshape"):
                self._check_reshape(node, joined=joined)
            elif is_op(node, "Concat") or (is_op(node, "Slice") and node in site.tail):
                raise _NotBoundedError(f"node {node.name!r} ({node.op_type}) works along its columns")
            for reader in (use.node for value in node.outputs for use in value.uses()):
                if is_op(reader, "Size") or (joined and is_op(reader, "Shape")):
                    raise _NotBoundedError(f"node {reader.name!r} ({reader.op_type}) counts its columns")
        end = sink_end(site, self._shapes) if site.sink is not None else None
        if isinstance(end, str):
            raise _NotBoundedError(end)
        return end

    def _check_reshape(self, node: ir.Node, *, joined: bool) -> None:
        rank = self._shapes.rank(node.outputs[0])
        step = lift(node, 0, RowAxis((rank or 1) - 1), self._shapes, self._model)
        if isinstance(step, Blocked):
            raise _NotBoundedError(step.reason)
        known = node.inputs[1] is not None and self._shapes.shape_value(node.inputs[1]) is not None
        if step.patches and (joined or not known):
            raise _NotBoundedError(f"node {node.name!r} fixes the number of columns")

    def _masks(self, site: AttentionSite) -> list[ColumnEdge]:
        """The operands of the chain and of what follows the softmax that have columns."""
        inside = {output for node in (site.scores, *site.chain, site.softmax, *site.tail) for output in node.outputs}
        found = []
        for node in (*site.chain, *site.tail):
            for position, value in enumerate(node.inputs):
                if value is None or value in inside or self._is_layout_operand(node, position, site):
                    continue
                shape = self._shapes.shape(value)
                if shape is None:
                    raise _NotBoundedError(f"the shape of {value.name!r}, which its scores meet, is not known")
                if not shape or shape[-1] == 1:
                    continue
                if isinstance(shape[-1], int) and isinstance(site.total, int) and shape[-1] != site.total:
                    raise _NotBoundedError(f"{value.name!r} has {shape[-1]} columns where there are {site.total} slots")
                # A size under another name is the number of slots, or 1, in every run that the model allows: then
                # taking the first C of it is right too.
                found.append(ColumnEdge(node, position, len(shape) - 1))
        return found

    def _is_layout_operand(self, node: ir.Node, position: int, site: AttentionSite) -> bool:
        if site.sink is not None and node is site.sink.join:
            return True
        return position > 0 and is_op(node, "Reshape", "Slice", "ReduceMax", "Clip", "Dropout", "CastLike")

    # ---- up to the caches -----------------------------------------------------------------------------------------

    def _behind(self, edge: ColumnEdge) -> dict[ir.Value, CacheSite]:
        """The caches of a fixed size whose slots are the columns of an operand."""
        value = edge.node.inputs[edge.index]
        assert value is not None
        origin = _Origin()
        pending = [_Place(value, edge.axis, None)]
        seen: set[tuple[ir.Value, int, ir.Node | None]] = set()
        while pending and len(seen) < _MAX_VALUES:
            for place in self._above(pending.pop(), origin):
                key = (place.value, place.axis, place.body.call if place.body is not None else None)
                if key not in seen:
                    seen.add(key)
                    pending.append(place)
        if not origin.caches:
            reason = next(iter(origin.others), f"{value.name!r} comes from no cache of a fixed size")
            raise _NotBoundedError(reason)
        return origin.caches

    def _above(self, place: _Place, origin: _Origin) -> list[_Place]:
        """The values one node up that carry the columns; what ends here is noted."""
        value, axis, body = place.value, place.axis, place.body
        cache = self._written.get(value)
        if cache is not None:
            self._check_axis(value, axis, cache)
            origin.caches.setdefault(cache.output, cache)
            return []
        if body is not None and value in body.arguments:
            argument = body.arguments[value]
            return [_Place(argument, axis, body.outer)] if argument is not None else []
        node = value.producer()
        other = self._by_output.get(value) or self._by_input.get(value)
        if other is not None or node is None:
            if other is not None:
                origin.others.setdefault(_unbounded(other))
            return []
        view = self._shapes if body is None else body.view
        step = lift(node, value.index() or 0, RowAxis(axis), view, self._model)
        if isinstance(step, Blocked):
            inner = self._into(node, view, body)
            if inner is not None:
                return [_Place(inner.function.outputs[value.index() or 0], axis, inner)]
            origin.others.setdefault(self._blocked(node, step.reason))
            return []
        if is_op(node, *_INDEXED) and 1 in step.rows and 0 not in step.rows:
            self._read_by_index(node, body, origin)
        found = []
        for position, need in step.rows.items():
            item = node.inputs[position]
            if item is not None and not need.flat:
                found.append(_Place(item, need.axis, body))
        return found

    def _into(self, call: ir.Node, view: ShapeView, outer: _Body | None) -> _Body | None:
        inner = body_view(call, view, self._model)
        if inner is None:
            return None
        function = self._model.functions[call.op_identifier()]
        return _Body(call, function, inner, dict(zip(function.inputs, call.inputs, strict=True)), outer)

    def _check_axis(self, value: ir.Value, axis: int, cache: CacheSite) -> None:
        # A mask over slots, or a function, does not tell where they are.
        told = is_op(write_of(cache), "ScatterND", "ScatterElements", "Scatter", "TensorScatter")
        if not told:
            return
        if value is cache.output and cache.axis is not None and axis != cache.axis:
            raise _NotBoundedError(f"its columns are axis {axis} of {value.name!r}, whose slots are axis {cache.axis}")
        size, slots = self._shapes.dim(value, axis), self._shapes.dim(cache.output, cache.axis or 0)
        if isinstance(size, int) and isinstance(slots, int) and size != slots:
            raise _NotBoundedError(f"its columns are not the slots of {cache.output.name!r}")

    def _read_by_index(self, node: ir.Node, body: _Body | None, origin: _Origin) -> None:
        """A read of chosen slots: the indices have the columns, the cache is what they point into."""
        value, steps = node.inputs[0], 0
        while value is not None and steps < _MAX_VALUES:
            steps += 1
            cache = self._written.get(value)
            if cache is not None:
                origin.caches.setdefault(cache.output, cache)
                return
            if body is not None and value in body.arguments:
                value, body = body.arguments[value], body.outer
                continue
            above = value.producer()
            if above is None or above.domain or above.op_type not in (*_LAYOUT, "Gather"):
                return
            value = above.inputs[0]

    def _blocked(self, node: ir.Node, reason: str) -> str:
        """Why the walk ended at ``node``, in the words of caches where one is near."""
        for item in node.inputs:
            value = item
            for _ in range(8):
                if value is None:
                    break
                cache = self._by_input.get(value)
                if cache is not None:
                    return _unbounded(cache)
                above = value.producer()
                if above is None or above.domain or above.op_type not in (*_LAYOUT, "Gather", "Expand"):
                    break
                value = above.inputs[0]
        return f"its columns cannot be followed to a cache of a fixed size: {reason}"


def _unbounded(cache: CacheSite) -> str:
    name = (cache.input or cache.output).name
    if cache.cross:
        return f"cache {name!r} holds another sequence, all of which is attended"
    if cache.form == "concat" and not cache.grows:
        return f"cache {name!r} holds the last positions behind one another, and is read as a whole: it keeps its own bound"
    return f"not applicable: cache {name!r} grows with each call and has no unused slots"
