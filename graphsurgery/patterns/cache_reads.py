"""Attention over caches of a fixed size: which columns of which operands are slots of the cache.

From each attention the keys and values are followed up, slot by slot, to the cache after the write: through layout,
expansion over heads, casts and dequantisation, products that make keys of a latent cache, and reads by index. What is
found is a :class:`CacheRead`: the edges on which columns of slots could be left out together. In the body of a function
that must hold for all calls: where it takes keys from a parameter, what each call hands over is followed. Alphabet: B
batch, S query length, N slots, G KV heads, H heads, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.slices import Blocked, RowAxis, lift
from graphsurgery.patterns.attention.finding import find_attentions
from graphsurgery.patterns.attention.products import read_product
from graphsurgery.patterns.attention.sites import AttentionSite, FusedAttention
from graphsurgery.patterns.column_sinks import sink_end
from graphsurgery.patterns.function_bodies import body_view
from graphsurgery.patterns.fused_reads import fused_operands
from graphsurgery.patterns.kv_cache import find_caches
from graphsurgery.patterns.matcher import is_op
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.patterns.written_caches import Written, written_caches

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes, ShapeView
    from graphsurgery.patterns.kv_cache import CacheSite
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["CacheRead", "ColumnEdge", "find_cache_reads"]

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


def find_cache_reads(model: ir.Model, shapes: Shapes, index: GraphIndex) -> list[CacheRead | Refusal]:
    """Every attention, as a :class:`CacheRead` or a refusal that says why its columns cannot be bounded."""
    caches = find_caches(model, shapes)
    if not any(cache.axis is not None for cache in caches):
        reason = "not applicable: no cache is fed, and none is returned"
        return [
            site
            if isinstance(site, Refusal)
            else Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=reason)
            for site in find_attentions(model, shapes, index)
        ]
    finder = _Finder(model, shapes, written_caches(model, shapes, caches), {item.output: item for item in caches})
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
    def __init__(
        self,
        model: ir.Model,
        main: Shapes,
        written: Mapping[Body, Mapping[ir.Value, Written]],
        caches: Mapping[ir.Value, CacheSite],
    ) -> None:
        self._model = model
        self._main = main
        self._written = written
        self._origins: dict[tuple[ir.Value, int, Body], _Origin] = {}
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
        if anchor.graph is not site.body.graph:
            raise _NotBoundedError(
                f"the attention around {anchor.op_type} {anchor.name!r} is inside a branch or loop, which cannot be "
                "bounded"
            )
        if not site.body.closed:
            function = site.body.function
            raise _NotBoundedError(
                f"the attention around {anchor.op_type} {anchor.name!r} is inside function "
                f"{function.name if function is not None else ''!r}, which a function without calls calls too, so that "
                "it cannot get a bound: run inline-functions first"
            )
        if isinstance(site, FusedAttention):
            operands = fused_operands(site, site.body.view)
            if isinstance(operands, str):
                raise _NotBoundedError(operands)
            edges = [ColumnEdge(site.node, position, axis) for position, axis in operands]
        else:
            edges = self._decomposed(site)
            end = self._inside(site)
        caches: dict[ir.Value, CacheSite] = {}
        for edge in edges[: 1 + len(site.value_products) if isinstance(site, AttentionSite) else 2]:
            caches.update(self._behind(edge, site.body))
        slots = self._size(edges[0], site.body.view)
        # A function may serve layers of both kinds.
        some_or_all = any if site.body.function is None else all
        windows = some_or_all(cache.sliding for cache in caches.values())
        kinds = tuple(kind for kind in site.kinds if kind not in ("sliding", "chunked", "full"))
        masked = next((kind for kind in ("sliding", "chunked") if kind in site.kinds), None)
        return CacheRead(
            id=site.id,
            kinds=(*kinds, masked or ("sliding" if windows else "full"), "fixed"),
            layer=site.layer,
            attention=site,
            edges=tuple(edges),
            slots=slots,
            caches=tuple(caches.values()),
            sink_end=end,
        )

    def _size(self, edge: ColumnEdge, view: ShapeView) -> Dim:
        value = edge.node.inputs[edge.index]
        size = view.dim(value, edge.axis) if value is not None else None
        if size is None:
            raise _NotBoundedError(f"the shape of its keys {value.name if value else ''!r} is not known")
        return size

    # ---- the edges ------------------------------------------------------------------------------------------------

    def _decomposed(self, site: AttentionSite) -> list[ColumnEdge]:
        if site.probabilities_read is not None:
            remedy = "" if site.body.function is None else ": a caller may want them whole; run inline-functions first"
            raise _NotBoundedError(f"its scores or probabilities are also read by {site.probabilities_read}{remedy}")
        edges = []
        products = [(item.node, (-2, -1)) for item in site.value_products]
        for node, plain in ((site.scores, (-1, -2)), *products):
            value = node.inputs[1]
            rank = site.body.view.rank(value) if value is not None else None
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
                self._check_reshape(node, site.body.view, joined=joined)
            elif is_op(node, "Concat") or (is_op(node, "Slice") and node in site.tail):
                raise _NotBoundedError(f"node {node.name!r} ({node.op_type}) works along its columns")
            for reader in (use.node for value in node.outputs for use in value.uses()):
                if is_op(reader, "Size") or (joined and is_op(reader, "Shape")):
                    raise _NotBoundedError(f"node {reader.name!r} ({reader.op_type}) counts its columns")
        end = sink_end(site, site.body.view) if site.sink is not None else None
        if isinstance(end, str):
            raise _NotBoundedError(end)
        return end

    def _check_reshape(self, node: ir.Node, view: ShapeView, *, joined: bool) -> None:
        rank = view.rank(node.outputs[0])
        step = lift(node, 0, RowAxis((rank or 1) - 1), view, self._model)
        if isinstance(step, Blocked):
            raise _NotBoundedError(step.reason)
        known = node.inputs[1] is not None and view.shape_value(node.inputs[1]) is not None
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
                shape = site.body.view.shape(value)
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

    def _behind(self, edge: ColumnEdge, root: Body) -> dict[ir.Value, CacheSite]:
        """The caches of a fixed size whose slots are the columns of an operand; of all calls where it is in a body."""
        value = edge.node.inputs[edge.index]
        assert value is not None
        origin = self._origin(value, edge.axis, root)
        if not origin.caches:
            reason = next(iter(origin.others), f"{value.name!r} comes from no cache of a fixed size")
            raise _NotBoundedError(reason)
        return origin.caches

    def _origin(self, value: ir.Value, axis: int, root: Body) -> _Origin:
        """What axis ``axis`` of ``value``, which is in ``root``, comes from."""
        known = self._origins.get((value, axis, root))
        if known is not None:
            return known
        origin = self._origins[value, axis, root] = _Origin()
        try:
            self._walk(_Place(value, axis, None), root, origin)
        except _NotBoundedError:
            # Half a walk is not to be taken for a whole one by the next that comes here.
            del self._origins[value, axis, root]
            raise
        return origin

    def _walk(self, start: _Place, root: Body, origin: _Origin) -> None:
        pending = [start]
        seen: set[tuple[ir.Value, int, ir.Node | None]] = set()
        while pending and len(seen) < _MAX_VALUES:
            for place in self._above(pending.pop(), root, origin):
                key = (place.value, place.axis, place.body.call if place.body is not None else None)
                if key not in seen:
                    seen.add(key)
                    pending.append(place)

    def _above(self, place: _Place, root: Body, origin: _Origin) -> list[_Place]:
        """The values one node up that carry the columns; what ends here is noted."""
        value, axis, body = place.value, place.axis, place.body
        written = self._written[root].get(value)
        if written is not None:
            self._check_axis(value, axis, written, root)
            origin.caches.update((cache.output, cache) for cache in written.caches)
            return []
        if body is not None and value in body.arguments:
            argument = body.arguments[value]
            return [_Place(argument, axis, body.outer)] if argument is not None else []
        node = value.producer()
        other = self._by_output.get(value) or self._by_input.get(value)
        if other is not None or node is None:
            if other is not None:
                origin.others.setdefault(_unbounded(other))
            elif root.function is not None:
                self._handed_over(value, axis, root, origin)
            return []
        view = root.view if body is None else body.view
        step = lift(node, value.index() or 0, RowAxis(axis), view, self._model)
        if isinstance(step, Blocked):
            inner = self._into(node, view, body)
            if inner is not None:
                return [_Place(inner.function.outputs[value.index() or 0], axis, inner)]
            origin.others.setdefault(self._blocked(node, step.reason, root))
            return []
        if is_op(node, *_INDEXED) and 1 in step.rows and 0 not in step.rows:
            self._read_by_index(node, body, root, origin)
        found = []
        for position, need in step.rows.items():
            item = node.inputs[position]
            if item is not None and not need.flat:
                found.append(_Place(item, need.axis, body))
        return found

    def _handed_over(self, formal: ir.Value, axis: int, root: Body, origin: _Origin) -> None:
        """What the columns of a parameter come from in the calls: caches in all of them, or in none."""
        given = [self._origin(value, axis, caller) for value, caller in root.arguments(formal)]
        for found in given:
            origin.caches.update(found.caches)
            origin.others.update(found.others)
        if any(found.caches for found in given) and not all(found.caches for found in given):
            name = root.function.name if root.function is not None else ""
            why = next(iter(origin.others), f"{formal.name!r} is something else in others")
            raise _NotBoundedError(
                f"some calls of function {name!r} hand over a cache of a fixed size for {formal.name!r}, others do not: "
                f"{why}; run inline-functions first"
            )

    def _into(self, call: ir.Node, view: ShapeView, outer: _Body | None) -> _Body | None:
        inner = body_view(call, view, self._model)
        if inner is None:
            return None
        function = self._model.functions[call.op_identifier()]
        return _Body(call, function, inner, dict(zip(function.inputs, call.inputs, strict=True)), outer)

    def _check_axis(self, value: ir.Value, axis: int, written: Written, root: Body) -> None:
        # A mask over slots, or a function, does not tell where they are.
        if not is_op(written.node, "ScatterND", "ScatterElements", "Scatter", "TensorScatter"):
            return
        for cache in written.caches:
            name = cache.output.name
            if written.same_layout and cache.axis is not None and axis != cache.axis:
                raise _NotBoundedError(
                    f"its columns are axis {axis} of {value.name!r}, whose slots are axis {cache.axis}"
                )
            size, slots = root.view.dim(value, axis), self._main.dim(cache.output, cache.axis or 0)
            if isinstance(size, int) and isinstance(slots, int) and size != slots:
                raise _NotBoundedError(f"its columns are not the slots of {name!r}")

    def _read_by_index(self, node: ir.Node, body: _Body | None, root: Body, origin: _Origin) -> None:
        """A read of chosen slots: the indices have the columns, the cache is what they point into."""
        value, steps = node.inputs[0], 0
        while value is not None and steps < _MAX_VALUES:
            steps += 1
            written = self._written[root].get(value)
            if written is not None:
                origin.caches.update((cache.output, cache) for cache in written.caches)
                return
            if body is not None and value in body.arguments:
                value, body = body.arguments[value], body.outer
                continue
            above = value.producer()
            if above is None and root.function is not None:
                self._read_from_parameter(value, root, origin)
                return
            if above is None or above.domain or above.op_type not in (*_LAYOUT, "Gather"):
                return
            value = above.inputs[0]

    def _read_from_parameter(self, formal: ir.Value, root: Body, origin: _Origin) -> None:
        """The same where what is read comes from the calls: of all of them, or of none."""
        given = []
        for value, caller in root.arguments(formal):
            found = _Origin()
            written = self._written[caller].get(value)
            if written is not None:
                found.caches.update((cache.output, cache) for cache in written.caches)
            elif value.producer() is None and caller.function is not None:
                self._read_from_parameter(value, caller, found)
            given.append(found)
        if given and all(found.caches for found in given):
            for found in given:
                origin.caches.update(found.caches)

    def _blocked(self, node: ir.Node, reason: str, root: Body) -> str:
        """Why the walk ended at ``node``, in the words of caches where one is near."""
        for item in node.inputs:
            value, body = item, root
            for _ in range(8):
                if value is None:
                    break
                cache = self._by_input.get(value)
                if cache is not None:
                    return _unbounded(cache)
                above = value.producer()
                given = body.arguments(value) if above is None else ()
                if given:
                    value, body = given[0]
                    continue
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
