"""What a mask says of each block of rows, found in one Loop for all layers, in vectors and columns but never S by T.

Where each layer walks over its query blocks in a Loop of its own, nothing made in one Loop can be read in another. What
all of them need of the mask is small: the first and last needed column of each block, and for each row whether it has
a key. One Loop in front of them finds these; each layer then makes only the part of the mask that a block needs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.slices import runs_along
from graphsurgery.editing.spans import Span, as_value, least

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.editing.slice_pushing import Cuts
    from graphsurgery.passes.blocking.writer import BlockWriter
    from graphsurgery.patterns.attention.masks import Mask
    from graphsurgery.patterns.attention.sites import AttentionSite

__all__ = ["Survey", "Surveyor", "row_block"]

_INT64 = ir.DataType.INT64
_BOOL = ir.DataType.BOOL


@dataclasses.dataclass(frozen=True)
class Survey:
    """What was found.

    Attributes:
        first: first needed column of each block, ``[n, 1]``; None where no mask was asked for.
        end: the column behind the last needed one, ``[n, 1]``.
        guard: the condition of the row guard, all rows; None where none was asked for.
    """

    first: ir.Value | None
    end: ir.Value | None
    guard: ir.Value | None


def row_block(writer: BlockWriter, number: ir.Value, size: int, length: ir.Value) -> Span:
    """The rows of block ``number``, a scalar, of ``size`` rows of ``length``; the last one shorter."""
    rewrite, emit, constant = writer.rewrite, writer.rewrite.emit, writer.rewrite.constant
    place = emit("Reshape", [number, constant([1], "one_element")], name="block_number", dtype=_INT64, shape=[1])
    start = emit("Mul", [place, constant([size], "block_size")], name="start", dtype=_INT64, shape=[1])
    past = emit("Add", [start, constant([size], "block_size")], name="start_of_next", dtype=_INT64, shape=[1])
    end = least(rewrite, past, length)
    return Span(start, end, emit("Sub", [end, start], name="rows", dtype=_INT64, shape=[1]))


class Surveyor:
    """Makes surveys, each once for all layers of a graph."""

    def __init__(self, writer: BlockWriter) -> None:
        self._writer = writer
        self._made: dict[tuple[Mask | None, ir.Value | None, int, int, Dim], Survey] = {}

    def survey(
        self, site: AttentionSite, mask: Mask | None, guard: ir.Value | None, size: int, limit: int
    ) -> Survey | None:
        """The survey of blocks of ``size`` rows.

        Args:
            site: the attention; whatever has the same mask gets the same survey.
            mask: whose needed columns are wanted.
            guard: condition of a row guard, whose rows are wanted.
            size: rows of a block.
            limit: below this many rows no survey is needed; 0 where it always is.
        """
        if mask is None and guard is None:
            return None
        key = (mask, guard, size, limit, site.length)
        if key not in self._made:
            with self._writer.rewrite.outside():
                self._made[key] = self._make(site, mask, guard, size, limit)
        return self._made[key]

    def columns(self, survey: Survey, number: ir.Value) -> Span | None:
        """The columns that block ``number`` needs; None where no mask was asked for."""
        emit = self._writer.rewrite.emit
        if survey.first is None or survey.end is None:
            return None
        attributes = {"axis": 0}
        first = emit("Gather", [survey.first, number], attributes, name="first_column", dtype=_INT64, shape=[1])
        end = emit("Gather", [survey.end, number], attributes, name="end_column", dtype=_INT64, shape=[1])
        return Span(first, end, emit("Sub", [end, first], name="columns", dtype=_INT64, shape=[1]))

    def _make(self, site: AttentionSite, mask: Mask | None, guard: ir.Value | None, size: int, limit: int) -> Survey:
        if not limit:
            return _survey(self._loop(site, mask, guard, size), mask, guard)
        rewrite = self._writer.rewrite
        many = rewrite.body("survey", ())
        with rewrite.inside(many):
            many.outputs.extend(self._loop(site, mask, guard, size))
        none = rewrite.body("no_survey", ())
        with rewrite.inside(none):
            for made in many.outputs:
                dtype = made.dtype or _BOOL
                empty = rewrite.constant(np.zeros((0, 1), dtype.numpy()), "nothing")
                none.outputs.append(rewrite.emit("Identity", [empty], name="nothing", dtype=dtype))
        few = self._writer.few_rows(site, limit)
        bodies = {"then_branch": none, "else_branch": many}
        outputs = rewrite.emit_holder("If", [few], bodies, name="survey_by_rows", outputs=len(many.outputs))
        for value, made in zip(outputs, many.outputs, strict=True):
            value.type = made.type
        return _survey(outputs, mask, guard)

    def _loop(self, site: AttentionSite, mask: Mask | None, guard: ir.Value | None, size: int) -> list[ir.Value]:
        """The Loop; first and end columns where there is a mask, then the guard where there is one."""
        writer, rewrite = self._writer, self._writer.rewrite
        emit, constant = rewrite.emit, rewrite.constant
        length = as_value(rewrite, writer.bound(site.length, (site.query, 2)))
        trips = writer.trips(site.length, length, size)
        dtype = (writer.shapes.dtype(guard) if guard is not None else None) or _BOOL
        sequence = ir.SequenceType(ir.TensorType(dtype))
        formals = [("number", ir.TensorType(_INT64), ()), ("go_on", ir.TensorType(_BOOL), ())]
        body = rewrite.body("surveyed_block", (*formals, *([("done", sequence, ())] if guard is not None else [])))
        scanned: list[ir.Value] = []
        with rewrite.inside(body):
            rows = row_block(writer, body.inputs[0], size, length)
            if mask is not None:
                needed = writer.needed(site, mask, rows)
                scanned = [as_value(rewrite, bound) for bound in (needed.start, needed.end)]
            body.outputs.append(emit("Identity", [body.inputs[1]], name="still", dtype=_BOOL, shape=[]))
            if guard is not None:
                body.inputs[2].shape = None
                part = writer.pusher(site).get(guard, writer.row_cuts(site, guard, rows))
                more = emit("SequenceInsert", [body.inputs[2], part], name="more_done", dtype=None)
                more.type = sequence
                body.outputs.append(more)
            body.outputs.extend(scanned)
        carried: list[ir.Value] = []
        if guard is not None:
            empty = emit("SequenceEmpty", [], {"dtype": int(dtype)}, name="nothing_done", dtype=None)
            empty.type = sequence
            carried.append(empty)
        always = constant(np.asarray(True), "always")
        count = len(carried) + len(scanned)
        outputs = rewrite.emit_holder("Loop", [trips, always, *carried], {"body": body}, name="surveyed", outputs=count)
        for value in outputs[len(carried) :]:
            value.type = ir.TensorType(_INT64)
        found = outputs[len(carried) :]
        if guard is not None:
            outputs[0].type = sequence
            axis = (writer.shapes.rank(guard) or 2) - 2
            found.append(emit("ConcatFromSequence", outputs[:1], {"axis": axis}, name="row_guard", dtype=dtype))
        return found


def _survey(found: list[ir.Value], mask: Mask | None, guard: ir.Value | None) -> Survey:
    first, end = found[:2] if mask is not None else (None, None)
    return Survey(first, end, found[-1] if guard is not None else None)


def row_cuts_of(shape: tuple[Dim, ...] | None, length: Dim, rows: Span) -> Cuts:
    """The cut of the second last axis of a value to ``rows``, where it runs along them."""
    if shape is None or len(shape) < 2 or not runs_along(shape[-2], length):
        return ()
    return ((len(shape) - 2, rows),)
