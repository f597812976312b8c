"""The blocks of one site: heads, rows, loops and branches around them, and the operands of each block."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.slices import runs_along
from graphsurgery.editing.slice_pushing import Cuts, cut
from graphsurgery.editing.spans import TO_END, Span, as_value, blocks_of
from graphsurgery.passes.blocking.block import Block
from graphsurgery.passes.blocking.column_sums import ColumnSums
from graphsurgery.passes.blocking.plan import BlockPlan, Heads
from graphsurgery.passes.blocking.survey import row_block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.passes.blocking.survey import Survey
    from graphsurgery.passes.blocking.writer import BlockWriter
    from graphsurgery.patterns.attention.sites import AttentionSite, KeyValueSource

__all__ = ["SiteWriter"]

_INT64 = ir.DataType.INT64
_FLOAT = ir.DataType.FLOAT


class SiteWriter:
    """The blocks of one site."""

    def __init__(self, writer: BlockWriter, site: AttentionSite, plan: BlockPlan, guard: ir.Node | None) -> None:
        self.writer = writer
        self.rewrite = writer.rewrite
        self.shapes = writer.shapes
        self.pusher = writer.pusher(site)
        self.site = site
        self.plan = plan
        self.guard = guard
        self.dtype = self.shapes.dtype(site.scores.outputs[0])
        self.columns = Span(0, *(2 * (writer.bound(site.total, (site.key.base, site.key.length_axis)),)))
        self.few_rows = 0
        self._surveyed = False
        self._separated: dict[tuple[ir.Value, ir.Graph], ir.Value] = {}
        self._sliced: dict[tuple[int, Heads, Span, ir.Graph], ir.Value] = {}

    def write(self) -> list[ir.Value]:
        """The whole site, in the layout in which it is read: what each product attends, and each of ``site.exposed``."""
        attended, *exposed = self._by_rows()
        widths = [self.shapes.dim(value, -1) or -1 for value in self.site.attended]
        if self.merged:
            attended = self._together(attended, sum(widths) if len(widths) > 1 else widths[0])
        whole = self._apart_by_features(attended, widths) if len(widths) > 1 else [attended]
        for value, made in zip(self.site.exposed, exposed, strict=True):
            sizes = self.shapes.shape(value)
            whole.append(self._together(made, None) if sizes is not None and len(sizes) == 3 else made)
        return whole

    def _apart_by_features(self, attended: ir.Value, widths: list[Dim]) -> list[ir.Value]:
        """What several products attend, which is made side by side."""
        axis = (self.shapes.rank(self.site.product.outputs[0]) or 4) - 1
        parts, first = [], 0
        for width in widths:
            assert isinstance(width, int)
            span = Span(first, first + width, width)
            parts.append(cut(self.rewrite, attended, ((axis, span),), name="attended"))
            first += width
        return parts

    def _together(self, value: ir.Value, features: Dim | None) -> ir.Value:
        """``[B, H, S, x]`` as ``[B*H, S, x]``; x is read from the value where it is not given."""
        rewrite = self.rewrite
        dtype = value.dtype or self.dtype
        if features is None:
            sizes = rewrite.emit("Shape", [value], name="sizes_apart", dtype=_INT64, shape=[4])
            rest = [cut(rewrite, sizes, ((0, Span(2, 4, 2)),), name="rows_and_columns")]
        else:
            rows = as_value(rewrite, self.writer.bound(self.site.length, (self.site.query, 2)))
            rest = [rows, rewrite.constant([features if isinstance(features, int) else -1], "features")]
        parts = [rewrite.constant([-1], "merged"), *rest]
        target = rewrite.emit("Concat", parts, {"axis": 0}, name="shape_together", dtype=_INT64, shape=[3])
        return rewrite.emit("Reshape", [value, target], name="heads_together", dtype=dtype)

    def _by_rows(self) -> list[ir.Value]:
        """With ``min_rows``, both paths in an If on the number of rows."""
        plan = self.plan
        if not plan.min_rows or isinstance(self.site.length, int):
            return self._blocked()
        few = self.writer.few_rows(self.site, plan.min_rows)
        self.few_rows = plan.min_rows
        then = self._branch(self._whole_plan(), "few")
        self.few_rows = 0
        bodies = {"then_branch": then, "else_branch": self._branch(plan, "many")}
        results = self._results()
        outputs = self.rewrite.emit_holder("If", [few], bodies, name="by_rows", outputs=len(results))
        return [self._typed_like(made, value) for made, value in zip(outputs, results, strict=True)]

    def _results(self) -> tuple[ir.Value, ...]:
        """What the exporter's nodes make that is read outside: what is attended first."""
        return (self.site.product.outputs[0], *self.site.exposed)

    def _whole_plan(self) -> BlockPlan:
        return BlockPlan(fold=self.plan.fold)

    @property
    def merged(self) -> bool:
        """Whether the exporter has batch and heads on one axis."""
        return self.shapes.rank(self.site.scores.outputs[0]) == 3

    def _apart(
        self, value: ir.Value, shape: tuple[Dim, ...], heads: Heads, rows: Span, columns: Span, whole: bool
    ) -> ir.Value:
        """An operand ``[B*H, x, y]`` as ``[B, H, x, y]``, cut to the block."""
        rewrite = self.rewrite
        key = (value, rewrite.place)
        if key not in self._separated:
            count = rewrite.constant([-1, self.site.heads if isinstance(self.site.heads, int) else 1], "heads_apart")
            sizes = rewrite.emit("Shape", [value], name="merged_shape", dtype=_INT64, shape=[3])
            rest = cut(rewrite, sizes, ((0, Span(1, 3, 2)),), name="rest_of_shape")
            target = rewrite.emit("Concat", [count, rest], {"axis": 0}, name="shape_apart", dtype=_INT64, shape=[4])
            dtype = self.shapes.dtype(value)
            self._separated[key] = rewrite.emit("Reshape", [value, target], name="heads_apart", dtype=dtype)
        cuts: list[tuple[int, Span]] = []
        if not heads.whole:
            cuts.append((1, heads.span))
        if not whole and runs_along(shape[1], self.site.length):
            cuts.append((2, rows))
        if columns is not self.columns and runs_along(shape[2], self.site.total):
            cuts.append((3, columns))
        return cut(rewrite, self._separated[key], tuple(cuts), name="part_of_operand")

    def _all_rows(self, value: ir.Value) -> Cuts:
        """All rows, as a cut that makes the pusher replay how ``value`` is made and leaves its sources as they are."""
        rank = self.shapes.rank(value) or 0
        bound = self.writer.bound(self.site.length, (self.site.query, 2))
        size = self.shapes.dim(value, -2)
        if rank < 2 or size is None or not runs_along(size, self.site.length):
            return ()
        return ((rank - 2, Span(0, TO_END, bound)),)

    def _branch(self, plan: BlockPlan, name: str) -> ir.Graph:
        body = self.rewrite.body(name, ())
        with self.rewrite.inside(body), self._planned(plan):
            body.outputs.extend(self._blocked())
        return body

    @contextlib.contextmanager
    def _planned(self, plan: BlockPlan) -> Iterator[None]:
        saved, self.plan = self.plan, plan
        yield
        self.plan = saved

    def _typed_like(self, value: ir.Value, output: ir.Value) -> ir.Value:
        """``value`` declared to be of the type of ``output``."""
        dtype = self.shapes.dtype(output)
        if dtype is not None:
            value.type = ir.TensorType(dtype)
        return value

    def _blocked(self) -> list[ir.Value]:
        return self._join([self._write_heads(heads) for heads in self._head_blocks()], 1, "heads")

    def _write_heads(self, heads: Heads) -> list[ir.Value]:
        if self.plan.q_block_size is not None:
            return self._loop_rows(heads, self.plan.q_block_size)
        rows = self.writer.edges(self.site.length, self.plan.q_blocks, (self.site.query, 2))
        parts = [self._write_block(heads, span, len(rows) == 1) for span in rows]
        return self._join(parts, 2, "rows")

    def _loop_rows(self, heads: Heads, size: int) -> list[ir.Value]:
        """A Loop over query blocks of ``size`` rows, the last one shorter, whatever S is at run time."""
        surveyor, plan = self.writer.surveyor, self.plan
        trimmed = plan.mask if plan.skip == "trim" else None
        survey = surveyor.survey(self.site, trimmed, self._wide_guard(), size, plan.min_rows)
        rewrite, emit, constant = self.rewrite, self.rewrite.emit, self.rewrite.constant
        length = as_value(rewrite, self.writer.bound(self.site.length, (self.site.query, 2)))
        trips = self.writer.trips(self.site.length, length, size)
        kinds = [self.shapes.dtype(value) or self.dtype or _FLOAT for value in self._results()]
        sequences = [ir.SequenceType(ir.TensorType(kind)) for kind in kinds]
        done = [("done" if place == 0 else f"done_{place}", kind, ()) for place, kind in enumerate(sequences)]
        body = rewrite.body(
            "query_block",
            (("number", ir.TensorType(_INT64), ()), ("go_on", ir.TensorType(ir.DataType.BOOL), ()), *done),
        )
        number, go_on, *before = body.inputs
        for value in before:
            value.shape = None
        with rewrite.inside(body):
            span = row_block(self.writer, number, size, length)
            columns = surveyor.columns(survey, number) if survey is not None else None
            made = self._write_block(heads, span, whole=False, needed=columns, survey=survey)
            body.outputs.append(emit("Identity", [go_on], name="still", dtype=ir.DataType.BOOL, shape=[]))
            for value, out, sequence in zip(before, made, sequences, strict=True):
                more = emit("SequenceInsert", [value, out], name="more_done", dtype=None)
                more.type = sequence
                body.outputs.append(more)
        empty = []
        for kind, sequence in zip(kinds, sequences, strict=True):
            nothing = emit("SequenceEmpty", [], {"dtype": int(kind)}, name="nothing_done", dtype=None)
            nothing.type = sequence
            empty.append(nothing)
        always = constant(np.asarray(True), "always")
        blocks = rewrite.emit_holder(
            "Loop", [trips, always, *empty], {"body": body}, name="query_blocks", outputs=len(empty)
        )
        joined = []
        for block, kind, sequence in zip(blocks, kinds, sequences, strict=True):
            block.type = sequence
            joined.append(emit("ConcatFromSequence", [block], {"axis": 2}, name="rows", dtype=kind))
        return joined

    def _join(self, parts: list[list[ir.Value]], axis: int, name: str) -> list[ir.Value]:
        """The results of several blocks, each joined with its like."""
        if len(parts) == 1:
            return parts[0]
        return [
            self.rewrite.emit("Concat", list(alike), {"axis": axis}, name=name, dtype=alike[0].dtype)
            for alike in zip(*parts, strict=True)
        ]

    def _wide_guard(self) -> ir.Value | None:
        """The condition of the row guard, where it is made of something with rows and columns."""
        condition = self.guard.inputs[0] if self.guard is not None else None
        if condition is None or not self._all_rows(condition) or not self.pusher.is_wide(condition):
            return None
        return condition

    def _write_block(
        self, heads: Heads, rows: Span, whole: bool, needed: Span | None = None, survey: Survey | None = None
    ) -> list[ir.Value]:
        columns = self.columns
        self._surveyed = needed is not None
        if needed is not None:
            columns = needed
        elif self.plan.skip == "trim" and self.plan.mask is not None and not whole:
            columns = self.writer.needed(self.site, self.plan.mask, rows)
        query = self._query(heads, rows, whole)
        block = Block(self, heads, rows, whole, columns, query)
        spans = [columns]
        if self.plan.kv_block_size is not None:
            out = block.running_loop(columns, self.plan.kv_block_size)
        elif self.plan.kv_blocks == 1 and self.plan.lanes == 1:
            out = block.plain()
        else:
            spans = self._column_blocks(columns)
            out = block.running(spans)
        return [self._guarded(out, heads, rows, whole, spans, survey), *block.exposed]

    def block_is_needed(self, rows: Span, whole: bool, columns: Span) -> ir.Value | None:
        """Whether some row of a query block needs some column of a key block: a scalar; None where it always does."""
        mask = self.plan.mask
        if self.plan.skip not in ("if", "where") or mask is None:
            return None
        return self.writer.block_is_needed(self.site, mask, None if whole else rows, columns)

    def _column_blocks(self, columns: Span) -> list[Span]:
        plan, site = self.plan, self.site
        if columns is self.columns:
            return self.writer.edges(site.total, plan.kv_blocks, (site.key.base, site.key.length_axis))
        return blocks_of(self.rewrite, columns, plan.kv_blocks)

    # ---- heads ----------------------------------------------------------------------------------------------------

    def _head_blocks(self) -> list[Heads]:
        site, plan = self.site, self.plan
        repeats = site.key.repeats if isinstance(site.key.repeats, int) else 1
        if not isinstance(site.heads, int):
            bound = self.writer.bound(site.heads, (site.query, 1))
            return [Heads(Span(0, bound, bound), True, None, repeats)]
        count = site.heads
        spans = blocks_of(self.rewrite, Span(0, count, count), plan.head_blocks)
        return [self._heads(span, len(spans) == 1, repeats) for span in spans]

    def _heads(self, span: Span, whole: bool, repeats: int) -> Heads:
        first, last = span.start, span.end
        assert isinstance(first, int)
        assert isinstance(last, int)
        if first % repeats == 0 and last % repeats == 0:
            return Heads(span, whole, (first // repeats, last // repeats), repeats)
        if first // repeats == (last - 1) // repeats:
            group = first // repeats
            return Heads(span, whole, (group, group + 1), last - first)
        return Heads(span, whole, None, 1, tuple(head // repeats for head in range(first, last)))

    # ---- operands -------------------------------------------------------------------------------------------------

    def _query(self, heads: Heads, rows: Span, whole: bool) -> ir.Value:
        """The query block ``[B, h, s, D]``, with the scale that the exporter put on the keys."""
        cuts: list[tuple[int, Span]] = []
        if not heads.whole:
            cuts.append((1, heads.span))
        if not whole:
            cuts.append((2, rows))
        query = cut(self.rewrite, self.site.query, tuple(cuts), name="query")
        for node in self.site.key.scales:
            query = self.scaled(node, query)
        return self.multiplied(query, self.site.score_scale, "scaled_query")

    def multiplied(self, value: ir.Value, factor: float, name: str) -> ir.Value:
        """``value`` times what a product of the exporter's multiplies by itself."""
        if factor == 1:
            return value
        dtype = self.dtype or _FLOAT
        number = self.rewrite.constant(np.asarray(factor, dtype.numpy()), "factor")
        return self.rewrite.emit("Mul", [value, number], name=name, dtype=dtype)

    def scaled(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """``value`` multiplied as ``node`` multiplies what runs through it."""
        through = next(item for item in node.inputs if item is not None and (self.shapes.rank(item) or 0) > 1)
        inputs = [value if item is through else item for item in node.inputs]
        return self.rewrite.clone(node, inputs, name="scaled_query")

    def operand(self, source: KeyValueSource, which: int, heads: Heads, columns: Span) -> ir.Value:
        """A block of keys ``[B, g, D, t]`` (``which`` 0) or values ``[B, g, t, Dv]`` (1); made once."""
        key = (which, heads, columns, self.rewrite.place)
        if key not in self._sliced:
            self._sliced[key] = self._make_operand(source, which, heads, columns)
        return self._sliced[key]

    def _make_operand(self, source: KeyValueSource, which: int, heads: Heads, columns: Span) -> ir.Value:
        cuts: list[tuple[int, Span]] = []
        if columns is not self.columns:
            cuts.append((source.length_axis, columns))
        if heads.groups is not None and not heads.whole and source.head_axis is not None:
            first, last = heads.groups
            cuts.append((source.head_axis, Span(first, last, last - first)))
        name = "keys" if which == 0 else "values"
        block = cut(self.rewrite, source.base, tuple(sorted(cuts, key=lambda pair: pair[0])), name=name)
        block = self._laid_out(block, source, which)
        if heads.gather and source.head_axis is not None:
            indices = self.rewrite.constant(list(heads.gather), "head_indices")
            block = self.rewrite.emit(
                "Gather", [block, indices], {"axis": 1}, name=f"{name}_of_heads", dtype=block.dtype
            )
        return block

    def _laid_out(self, block: ir.Value, source: KeyValueSource, which: int) -> ir.Value:
        """Axes in the order batch, heads, and features and positions as the product wants them."""
        rank = self.shapes.rank(source.base) or 4
        last = (source.feature_axis, source.length_axis) if which == 0 else (source.length_axis, source.feature_axis)
        axes = [source.batch_axis, source.head_axis, *last]
        used = [axis for axis in axes if axis is not None]
        spare = [axis for axis in range(rank) if axis not in used]
        order = [axis if axis is not None else spare.pop(0) if spare else None for axis in axes]
        present = [axis for axis in order if axis is not None]
        dtype = self.shapes.dtype(source.base)
        if present != list(range(rank)):
            block = self.rewrite.emit(
                "Transpose",
                [block],
                {"perm": present},
                name="keys_transposed" if which == 0 else "values_in_order",
                dtype=dtype,
            )
        for position, axis in enumerate(order):
            if axis is None:
                block = self._unsqueeze(block, position, dtype)
        return block

    def _unsqueeze(self, value: ir.Value, axis: int, dtype: ir.DataType | None) -> ir.Value:
        if self.rewrite.opset < 13:
            return self.rewrite.emit("Unsqueeze", [value], {"axes": [axis]}, name="one_head", dtype=dtype)
        return self.rewrite.emit(
            "Unsqueeze", [value, self.rewrite.constant([axis], "axes")], name="one_head", dtype=dtype
        )

    def chain_operand(self, value: ir.Value, heads: Heads, rows: Span, whole: bool, columns: Span) -> ir.Value:
        """An outside operand of the chain, for one block."""
        shape = self.shapes.shape(value)
        if not shape:
            return value
        site, rank = self.site, len(shape)
        if rank == 3 and shape[0] != 1 and self.merged:
            return self._apart(value, shape, heads, rows, columns, whole)
        cuts: list[tuple[int, Span]] = []
        column_axis = None
        for axis, size in enumerate(shape):
            place = axis - rank
            if place == -1 and runs_along(size, site.total):
                column_axis = axis
            elif place == -2 and not whole and runs_along(size, site.length):
                cuts.append((axis, rows))
            elif place == -3:
                cuts += self._head_cut(shape, heads)
        if column_axis is None or columns is self.columns:
            everything = self._all_rows(value)
            if self.few_rows and everything and self.pusher.is_wide(value):
                return self.writer.few_rows_mask(site, value, everything, self.few_rows)
            return self.pusher.get(value, tuple(cuts))
        mask = self.plan.mask
        if self.plan.skip == "trim" and mask is not None and value in mask.values and not self._surveyed:
            return self.writer.mask_part(site, value, tuple(cuts), column_axis, columns)
        return self.pusher.get(value, (*cuts, (column_axis, columns)))

    def _head_cut(self, shape: tuple[Dim, ...], heads: Heads) -> Cuts:
        """The cut to a block of heads, where a value is not the same for all: a size without a number is theirs."""
        size = shape[-3] if len(shape) >= 3 else 1
        if heads.whole or size == 1 or (isinstance(size, int) and size != self.site.heads):
            return ()
        return ((len(shape) - 3, heads.span),)

    # ---- rows without a key ---------------------------------------------------------------------------------------

    def _guarded(
        self, out: ir.Value, heads: Heads, rows: Span, whole: bool, columns: list[Span], survey: Survey | None
    ) -> ir.Value:
        guard = self.guard
        if guard is None:
            return out
        condition = guard.inputs[0]
        assert condition is not None
        shape = self.shapes.shape(condition) or ()
        if len(shape) == 3 and shape[0] != 1 and self.merged:
            part = self._apart(condition, shape, heads, rows, self.columns, whole)
            return self._guarded_by(guard, part, out)
        # A bias of heads that is counted too makes a condition of each head.
        cuts: Cuts = self._head_cut(shape, heads)
        everything = self._all_rows(condition)
        if whole and self.few_rows and everything and self.pusher.is_wide(condition):
            part = self.writer.few_rows_mask(self.site, condition, everything, self.few_rows)
            return self._guarded_by(guard, part, out)
        if not whole and len(shape) >= 2 and runs_along(shape[-2], self.site.length):
            cuts = (*cuts, (len(shape) - 2, rows))
        key_block = self.plan.kv_block_size
        if whole and survey is None and key_block is not None:
            # No block of rows is made here, but the guard of all rows is not made of all rows and columns either.
            survey = self.writer.surveyor.survey(self.site, None, self._wide_guard(), key_block, self.plan.min_rows)
        if survey is not None and survey.guard is not None:
            part = cut(self.rewrite, survey.guard, cuts, name="rows_of_guard")
        elif len(columns) > 1 and columns[0].start == 0:
            parts = tuple((axis - len(shape), span) for axis, span in cuts)
            part = ColumnSums(self.rewrite, self.shapes, self.pusher, self.site.total, parts, columns).get(condition)
        else:
            part = self.pusher.get(condition, cuts)
        return self._guarded_by(guard, part, out)

    def _guarded_by(self, guard: ir.Node, condition: ir.Value, out: ir.Value) -> ir.Value:
        inputs = [
            condition if index == 0 else out if item in self.site.attended else item
            for index, item in enumerate(guard.inputs)
        ]
        return self.rewrite.clone(guard, inputs, name="rows_with_keys")
