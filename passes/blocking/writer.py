"""What all sites of a model share: sizes, block edges, slices of masks, the columns that a block needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.editing.slice_pushing import Cuts, SlicePusher, cut
from graphsurgery.editing.spans import Bound, Sizes, Span, as_value, blocks_of
from graphsurgery.passes.blocking.asked_sizes import answer_sizes
from graphsurgery.passes.blocking.plan import BlockPlan, row_guards
from graphsurgery.passes.blocking.site_writer import SiteWriter
from graphsurgery.passes.blocking.survey import Surveyor, row_cuts_of
from graphsurgery.patterns.attention.masks import LOW, Mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.attention.sites import AttentionSite
    from graphsurgery.rewrite import Rewrite

__all__ = ["BlockWriter"]

_INT64 = ir.DataType.INT64
_FLOAT = ir.DataType.FLOAT


class BlockWriter:
    """Writes the blocks of one site after the other; masks, sizes and block edges are shared by all of them.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the body before the edit.
    """

    def __init__(self, rewrite: Rewrite, shapes: ShapeView) -> None:
        self.rewrite = rewrite
        self.shapes = shapes
        self._sizes = Sizes(rewrite, shapes)
        self._pushers: dict[tuple[Dim, Dim], SlicePusher] = {}
        self._edges: dict[tuple[Dim, int], list[Span]] = {}
        self._needed: dict[tuple[Mask, Span | None, ir.Graph], Span] = {}
        self._columns_needed: dict[tuple[Mask, Span | None, ir.Graph], ir.Value] = {}
        self._blocks_needed: dict[tuple[Mask, Span | None, Span, ir.Graph], ir.Value] = {}
        self._mask_parts: dict[tuple[ir.Value, Span, ir.Graph], ir.Value] = {}
        self._few_masks: dict[tuple[ir.Value, int], ir.Value] = {}
        self._counts: dict[tuple[Dim, str, int], ir.Value] = {}
        self.surveyor = Surveyor(self)

    def write(self, site: AttentionSite, plan: BlockPlan) -> list[tuple[ir.Value, ir.Value]]:
        """Emit ``site`` as blocks.

        Returns:
            Each value that is replaced and what replaces it: first those of the products, or of the row guards behind
            them.
        """
        guards = row_guards(site)
        ends = [node.outputs[0] for node in guards] or site.attended
        self.rewrite.before(guards[0] if guards else site.product)
        made = SiteWriter(self, site, plan, guards[0] if guards else None).write()
        return list(zip((*ends, *site.exposed), made, strict=True))

    def answer_sizes(self, site: AttentionSite) -> frozenset[ir.Node]:
        """See :func:`graphsurgery.passes.blocking.asked_sizes.answer_sizes`."""
        return answer_sizes(self.rewrite, self.shapes, self._sizes, site)

    def pusher(self, site: AttentionSite) -> SlicePusher:
        """The slices of everything with the rows and columns of ``site``."""
        key = (site.length, site.total)
        if key not in self._pushers:
            self._pushers[key] = SlicePusher(self.rewrite, self.shapes, site.length, site.total)
        return self._pushers[key]

    def finished(self, site: AttentionSite) -> list[str]:
        """Names of values with the rows and columns of ``site`` that had to be sliced as a whole."""
        pusher = self._pushers.get((site.length, site.total))
        return [value.name or "" for value in pusher.finished] if pusher is not None else []

    def bound(self, size: Dim, seen_on: tuple[ir.Value, int]) -> Bound:
        """A size as a bound: see :meth:`graphsurgery.editing.spans.Sizes.bound`."""
        return self._sizes.bound(size, seen_on)

    def few_rows(self, site: AttentionSite, limit: int) -> ir.Value:
        """Whether S is below ``limit``: the condition of an If, made once."""
        length = as_value(self.rewrite, self.bound(site.length, (site.query, 2)))

        def make() -> ir.Value:
            less = self.rewrite.emit(
                "Less",
                [length, self.rewrite.constant([limit], "limit")],
                name="few",
                dtype=ir.DataType.BOOL,
                shape=[1],
            )
            return self.rewrite.emit("Squeeze", [less], name="few_rows", dtype=ir.DataType.BOOL, shape=[])

        return self._shared((site.length, "few", limit), make)

    def few_rows_mask(self, site: AttentionSite, value: ir.Value, cuts: Cuts, limit: int) -> ir.Value:
        """An operand of the chain for the path of few rows: computed in an If of its own, once for all layers.

        It is not the exporter's finished mask, which would be computed on the other path too.
        """
        if not self.pusher(site).is_made(value):
            return value
        if not self._sizes.is_shared(site.length):
            # S is only asked for where the queries are there already, which other layers are in front of.
            return self.pusher(site).get(value, cuts)
        key = (value, limit)
        if key not in self._few_masks:
            few = self.few_rows(site, limit)
            made = self.rewrite.body("mask_of_few", ())
            with self.rewrite.inside(made):
                part = self.pusher(site).get(value, cuts)
            if part.graph is not made:
                # Nothing of it can be made here: it is there already.
                self._few_masks[key] = part
                return part
            made.outputs.append(part)
            none = self.rewrite.body("no_mask", ())
            with self.rewrite.inside(none):
                dtype = self.shapes.dtype(value) or _FLOAT
                empty = self.rewrite.constant(np.zeros((0,), dtype.numpy()), "no_mask")
                none.outputs.append(self.rewrite.emit("Identity", [empty], name="no_mask", dtype=dtype))
            with self.rewrite.outside():
                bodies = {"then_branch": made, "else_branch": none}
                mask = self.rewrite.emit_holder("If", [few], bodies, name="mask_by_rows")[0]
            mask.type = ir.TensorType(dtype)
            self._few_masks[key] = mask
        return self._few_masks[key]

    def trips(self, size: Dim, length: ir.Value, block: int) -> ir.Value:
        """How many blocks of ``block`` cover ``length``: a scalar, made once for a size that is known at the start."""

        def make() -> ir.Value:
            emit, constant = self.rewrite.emit, self.rewrite.constant
            padded = emit("Add", [length, constant([block - 1], "round_up")], name="padded", dtype=_INT64, shape=[1])
            count = emit("Div", [padded, constant([block], "block_size")], name="blocks", dtype=_INT64, shape=[1])
            return emit("Squeeze", [count], name="trips", dtype=_INT64, shape=[])

        return self._shared((size, "trips", block), make)

    def _shared(self, key: tuple[Dim, str, int], make: Callable[[], ir.Value]) -> ir.Value:
        if not self._sizes.is_shared(key[0]):
            return make()
        if key not in self._counts:
            with self.rewrite.prologue():
                self._counts[key] = make()
        return self._counts[key]

    def row_cuts(self, site: AttentionSite, value: ir.Value, rows: Span) -> Cuts:
        """The cut of ``value`` to some rows of ``site``; none where it has no rows."""
        return row_cuts_of(self.shapes.shape(value), site.length, rows)

    def edges(self, size: Dim, count: int, seen_on: tuple[ir.Value, int]) -> list[Span]:
        """The blocks of an axis of ``size``; computed once where they can be at the start of the graph."""
        key = (size, count)
        if key in self._edges:
            return self._edges[key]
        bound = self._sizes.bound(size, seen_on)
        shared = isinstance(bound, int) or self._sizes.is_shared(size)
        if shared:
            with self.rewrite.prologue():
                spans = blocks_of(self.rewrite, Span(0, bound, bound), count)
            self._edges[key] = spans
            return spans
        return blocks_of(self.rewrite, Span(0, bound, bound), count)

    def needed(self, site: AttentionSite, mask: Mask, rows: Span | None) -> Span:
        """From the first to the last column that some row of a block needs, whatever the batch row and head; all rows for None."""
        key = (mask, rows, self.rewrite.place)
        if key not in self._needed:
            emit, one = self.rewrite.emit, self.rewrite.constant([1], "one")
            columns = self._needed_columns(site, mask, rows)
            first = emit("ArgMax", [columns], {"axis": 0, "keepdims": 1}, name="first_column", dtype=_INT64, shape=[1])
            attributes = {"axis": 0, "keepdims": 1, "select_last_index": 1}
            last = emit("ArgMax", [columns], attributes, name="last_column", dtype=_INT64, shape=[1])
            end = emit("Add", [last, one], name="end_column", dtype=_INT64, shape=[1])
            length = emit("Sub", [end, first], name="columns", dtype=_INT64, shape=[1])
            self._needed[key] = Span(first, end, length)
        return self._needed[key]

    def block_is_needed(self, site: AttentionSite, mask: Mask, rows: Span | None, columns: Span) -> ir.Value:
        """Whether some row of a block needs some column of another: a boolean scalar, made once for all layers."""
        key = (mask, rows, columns, self.rewrite.place)
        if key not in self._blocks_needed:
            emit = self.rewrite.emit
            part = cut(self.rewrite, self._needed_columns(site, mask, rows), ((0, columns),), name="needed_of_block")
            most = self.reduce("ReduceMax", part, 0, keep=False, name="most_needed", dtype=_FLOAT)
            half = self.rewrite.constant(np.asarray(0.5, np.float32), "half")
            self._blocks_needed[key] = emit(
                "Greater", [most, half], name="block_needed", dtype=ir.DataType.BOOL, shape=[]
            )
        return self._blocks_needed[key]

    def _needed_columns(self, site: AttentionSite, mask: Mask, rows: Span | None) -> ir.Value:
        """1 for each column that some row of a block needs, 0 for the others, float32 ``[T]``."""
        key = (mask, rows, self.rewrite.place)
        if key not in self._columns_needed:
            self._columns_needed[key] = self._find_needed(site, mask, rows)
        return self._columns_needed[key]

    def _find_needed(self, site: AttentionSite, mask: Mask, rows: Span | None) -> ir.Value:
        emit, constant = self.rewrite.emit, self.rewrite.constant
        boolean = ir.DataType.BOOL
        rank = max(self.shapes.rank(value) or 4 for value in mask.values)
        if mask.boolean:
            part = self._rows_of(site, mask.value, rows)
            attended = part if mask.attended else emit("Not", [part], name="attended", dtype=boolean)
            number = emit("Cast", [attended], {"to": int(_FLOAT)}, name="attended_number", dtype=_FLOAT)
            some = self.reduce("ReduceMax", number, rank - 1, name="row_has_key", dtype=_FLOAT)
            # A row with a key needs what is attended; a row without needs every column.
            keep = emit("GreaterOrEqual", [number, some], name="needed", dtype=boolean)
        else:
            last = mask.steps[-1].outputs[0] if mask.steps else mask.value
            dtype = self.shapes.dtype(last) or _FLOAT
            part = self._masked_zeros(site, mask, rows)
            top = self.reduce("ReduceMax", part, rank - 1, name="row_maximum", dtype=dtype)
            limit = emit("Add", [top, constant(np.asarray(LOW, dtype.numpy()), "low")], name="limit", dtype=dtype)
            below = emit("Less", [part, limit], name="not_needed", dtype=boolean)
            keep = emit("Not", [below], name="needed", dtype=boolean)
        number = emit("Cast", [keep], {"to": int(_FLOAT)}, name="needed_number", dtype=_FLOAT)
        return self.reduce("ReduceMax", number, *range(rank - 1), keep=False, name="needed_columns", dtype=_FLOAT)

    def _rows_of(self, site: AttentionSite, value: ir.Value, rows: Span | None) -> ir.Value:
        cuts = () if rows is None else self.row_cuts(site, value, rows)
        return self.pusher(site).get(value, cuts)

    def _masked_zeros(self, site: AttentionSite, mask: Mask, rows: Span | None) -> ir.Value:
        """What the masks make of scores that are all zero."""
        if not mask.steps:
            return self._rows_of(site, mask.value, rows)
        inside = {output for node in (site.scores, *site.chain) for output in node.outputs}
        start = next(item for item in mask.steps[0].inputs if item in inside)
        assert start is not None
        dtype = self.shapes.dtype(start) or _FLOAT
        made = {start: self.rewrite.constant(np.asarray(0, dtype.numpy()), "no_score")}
        for node in mask.steps:
            inputs = [
                item if item is None else made[item] if item in made else self._rows_of(site, item, rows)
                for item in node.inputs
            ]
            made[node.outputs[0]] = self.rewrite.clone(node, inputs, name=f"masked_{node.op_type.lower()}")
        return made[mask.steps[-1].outputs[0]]

    def mask_part(self, site: AttentionSite, mask: ir.Value, rows: Cuts, column_axis: int, columns: Span) -> ir.Value:
        """The columns that a block of rows needs, cut from the mask of these rows; made once for all layers."""
        part = self.pusher(site).get(mask, rows)
        key = (part, columns, self.rewrite.place)
        if key not in self._mask_parts:
            self._mask_parts[key] = cut(self.rewrite, part, ((column_axis, columns),), name="mask_columns")
        return self._mask_parts[key]

    def reduce(
        self, op_type: str, value: ir.Value, *axes: int, name: str, dtype: ir.DataType | None, keep: bool = True
    ) -> ir.Value:
        """A reduction, in the form of the model's opset."""
        first = 13 if op_type == "ReduceSum" else 18
        if self.rewrite.opset < first:
            attributes = {"axes": list(axes), "keepdims": int(keep)}
            return self.rewrite.emit(op_type, [value], attributes, name=name, dtype=dtype)
        operand = self.rewrite.constant(list(axes), "axes")
        return self.rewrite.emit(op_type, [value, operand], {"keepdims": int(keep)}, name=name, dtype=dtype)
