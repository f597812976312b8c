"""``packed``: rows sorted by expert, in chunks of a fixed size, several experts side by side as lanes.

Places in a chunk that no row takes read one spare row of zeros. With ``loop`` a work list of non-empty (expert, chunk)
pairs is walked, `lanes` of them at a time, so that the number of nodes depends on no size. With ``unroll`` everything
is written out for a fixed number of tokens: every expert gets as many chunks as it could need.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.editing.versioned_ops import squeeze, unsqueeze
from graphsurgery.passes.experts.parameters import one_expert, some_experts, why_not
from graphsurgery.passes.experts.program import tensors_of
from graphsurgery.passes.experts.routing import reduce_sum
from graphsurgery.passes.experts.side_by_side import stack_of, why_not_stacked
from graphsurgery.passes.experts.steps import StepWriter, why_not_batched
from graphsurgery.passes.experts.unpacking import why_not_picked

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.passes.experts.program import Program
    from graphsurgery.passes.experts.routing import BlockSource, Sorted
    from graphsurgery.patterns.experts.sites import ExpertSite, ExpertTensor, RowInput

__all__ = ["why_not_loop", "why_not_unroll", "write_loop", "write_unroll"]

_INT64 = ir.DataType.INT64
_INT32 = ir.DataType.INT32
_BOOL = ir.DataType.BOOL


def why_not_loop(site: ExpertSite, program: Program, lanes: int) -> str | None:
    """Why the loop cannot be written, in words."""
    reason = why_not_batched(program) if lanes > 1 else why_not_picked(program)
    return reason if reason is not None else why_not_stacked(site)


def why_not_unroll(site: ExpertSite, program: Program, lanes: int) -> str | None:
    """Why the experts cannot be written out, in words."""
    if lanes > 1:
        reason = why_not_batched(program)
        if reason is not None:
            return reason
    for tensor in tensors_of(site):
        for first in range(0, site.experts, lanes):
            count = min(lanes, site.experts - first)
            reason = why_not(some_experts(tensor, first, count) if lanes > 1 else one_expert(tensor, first), site.home)
            if reason is not None:
                return f"the weights of {count} experts cannot be taken together: {reason}"
            if tensor.stacked:
                break
    return None


# ---- loop ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _WorkList:
    """Chunks in the order of their experts.

    Attributes:
        chunk: rows of a chunk, int64 ``[1]``, at least 1.
        first: number of the first chunk of each expert, ``[E]``.
        past: number of the chunk after its last, ``[E]``.
        start: sorted place of its first row, ``[E]``.
        end: sorted place after its last row, ``[E]``.
        order: the pair at each sorted place, and T*K as the spare one, ``[T*K + 1]``.
        pairs: T*K, scalar.
    """

    chunk: ir.Value
    first: ir.Value
    past: ir.Value
    start: ir.Value
    end: ir.Value
    order: ir.Value
    pairs: ir.Value


def write_loop(source: BlockSource, chunk_size: int, lanes: int) -> ir.Value:
    """Write the site as a Loop over a work list; returns its output."""
    rewrite, emit, constant = source.rewrite, source.emit, source.rewrite.constant
    lanes = min(lanes, source.site.experts)
    order = source.sorted()
    work = _work_list(source, order, chunk_size)
    # At least one round: a scan output of no rounds has no shape, and all its rows are spare.
    total = source.part(work.past, source.site.experts - 1, None, "chunks_in_all")
    if lanes > 1:
        total = emit("Add", [total, constant([lanes - 1], "round_up")], name="padded_chunks", shape=[1])
        total = emit("Div", [total, constant([lanes], "lanes")], name="rounds_needed", shape=[1])
    rounds = squeeze(rewrite, _largest(source, total, constant([1], "one")), [0], name="rounds")
    for tensor in tensors_of(source.site):
        stack_of(source, tensor)
    body = rewrite.body("chunks", (("round", ir.TensorType(_INT64), ()), ("go_on", ir.TensorType(_BOOL), ())))
    source.add_spare(body)
    with rewrite.inside(body):
        result = _round(source, work, body.inputs[0], lanes)
        body.outputs.append(rewrite.emit("Identity", [body.inputs[1]], name="still", dtype=_BOOL, shape=[]))
        body.outputs.append(result)
    always = constant(np.asarray(True), "always")
    found = rewrite.emit_holder("Loop", [rounds, always], {"body": body}, name="walk_chunks")[0]
    if source.core_dtype is not None:
        found.type = ir.TensorType(source.core_dtype)
    axis = 3 if lanes > 1 else 2
    rows = rewrite.emit("Flatten", [found], {"axis": axis}, name="packed_rows", dtype=source.core_dtype)
    # Place p of expert e is in row p - start[e] of its own chunks, which begin at first[e] * chunk.
    moved = emit("Mul", [work.first, work.chunk], name="first_packed_row")
    shift = emit("Sub", [moved, work.start], name="shift")
    shift_of_pair = emit("Gather", [shift, source.experts()], {"axis": 0}, name="shift_of_pair")
    return source.summed(rows, emit("Add", [order.place, shift_of_pair], name="packed_row_of_pair"))


def _work_list(source: BlockSource, order: Sorted, chunk_size: int) -> _WorkList:
    emit, constant = source.emit, source.rewrite.constant
    pairs = source.pairs()
    if source.size is not None:
        chunk = constant([max(1, min(chunk_size, source.size))], "chunk")
    else:
        tokens = emit("Div", [pairs, constant([source.site.top_k], "top_k")], name="tokens_count", shape=[1])
        some = _largest(source, tokens, constant([1], "one"))
        chunk = _smallest(source, some, constant([chunk_size], "chunk_size"))
    one = constant([1], "one")
    axis = constant(0, "axis")
    end = emit("CumSum", [order.counts, axis], name="end_of_expert")
    start = emit("Sub", [end, order.counts], name="start_of_expert")
    padded = emit("Sub", [emit("Add", [order.counts, chunk], name="counts_and_chunk"), one], name="padded_counts")
    chunks = emit("Div", [padded, chunk], name="chunks_of_expert")
    past = emit("CumSum", [chunks, axis], name="past_chunk_of_expert")
    first = emit("Sub", [past, chunks], name="first_chunk_of_expert")
    with_spare = emit("Concat", [order.flat, pairs], {"axis": 0}, name="order_and_spare")
    return _WorkList(chunk, first, past, start, end, with_spare, pairs)


def _round(source: BlockSource, work: _WorkList, number: ir.Value, lanes: int) -> ir.Value:
    """One round of the loop: ``lanes`` chunks, ``[lanes, C, F]`` (``[C, F]`` for one)."""
    rewrite, emit, constant = source.rewrite, source.emit, source.rewrite.constant
    place = unsqueeze(rewrite, number, [0], name="round_number")
    if lanes > 1:
        first = emit("Mul", [place, constant([lanes], "lanes")], name="first_chunk_of_round", shape=[1])
        place = emit("Add", [first, constant(list(range(lanes)), "lane")], name="chunk_of_lane", shape=[lanes])
    column = unsqueeze(rewrite, place, [1], name="chunk_column")
    later = emit("Less", [column, work.past], name="is_before_end", dtype=_BOOL)
    over = emit("Not", [later], name="is_over", dtype=_BOOL)
    number_over = emit("Cast", [over], {"to": int(_INT32)}, name="is_over_number", dtype=_INT32)
    count = reduce_sum(rewrite, number_over, [1], keep=False, name="experts_over")
    passed = emit("Cast", [count], {"to": int(_INT64)}, name="expert_or_past", shape=[lanes])
    expert = _smallest(source, passed, constant([source.site.experts - 1], "last_expert"), "expert")
    start, end, begin = (
        emit("Gather", [vector, expert], {"axis": 0}, name=name, shape=[lanes])
        for vector, name in ((work.start, "lane_start"), (work.end, "lane_end"), (work.first, "lane_first"))
    )
    nth = emit("Sub", [place, begin], name="nth_chunk", shape=[lanes])
    offset = emit("Mul", [nth, work.chunk], name="lane_offset", shape=[lanes])
    lowest = emit("Add", [start, offset], name="lane_place", shape=[lanes])
    if lanes > 1:
        lowest, end = (unsqueeze(rewrite, item, [1], name="lane_column") for item in (lowest, end))
    within = source.counting(work.chunk, "row_in_chunk")
    places = emit("Add", [lowest, within], name="places")
    flat = _taken(source, places, end, work.order, work.pairs)[1]
    rows = source.rows_of(flat, spare=True)
    if lanes == 1:
        expert = squeeze(rewrite, expert, [0], name="the_expert")

    def parameter(tensor: ExpertTensor) -> ir.Value:
        stack = stack_of(source, tensor)
        return rewrite.emit("Gather", [stack, expert], {"axis": 0}, name="weights_of_lane", dtype=stack.dtype)

    return _run_core(source, rows, 1 if lanes > 1 else 0, parameter, "")


def _taken(
    source: BlockSource, places: ir.Value, end: ir.Value, order: ir.Value, pairs: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Which places are before ``end``, and the pairs at them; the spare pair at the others."""
    emit = source.emit
    taken = emit("Less", [places, end], name="is_taken", dtype=_BOOL)
    safe = emit("Where", [taken, places, pairs], name="place_or_spare")
    return taken, emit("Gather", [order, safe], {"axis": 0}, name="pair_of_row")


def _run_core(
    source: BlockSource,
    rows: dict[RowInput, ir.Value],
    lead: int,
    parameter: Callable[[ExpertTensor], ir.Value],
    prefix: str,
) -> ir.Value:
    cached: dict[ExpertTensor, ir.Value] = {}

    def once(tensor: ExpertTensor) -> ir.Value:
        if tensor not in cached:
            cached[tensor] = parameter(tensor)
        return cached[tensor]

    program = source.program
    writer = StepWriter(source.rewrite, program, lead, once, prefix)
    return writer.run(range(program.core), rows, {})[program.result]


def _smallest(source: BlockSource, left: ir.Value, right: ir.Value, name: str = "smaller") -> ir.Value:
    # Before opset 12 Min takes floats only.
    less = source.emit("Less", [left, right], name="is_less", dtype=_BOOL)
    return source.emit("Where", [less, left, right], name=name)


def _largest(source: BlockSource, left: ir.Value, right: ir.Value) -> ir.Value:
    less = source.emit("Less", [left, right], name="is_less", dtype=_BOOL)
    return source.emit("Where", [less, right, left], name="larger")


# ---- unroll -------------------------------------------------------------------------------------------------------


def write_unroll(source: BlockSource, chunk_size: int, lanes: int, most_rows: int) -> ir.Value:
    """Write the site out; returns its output.

    Args:
        source: the site; its number of tokens is fixed.
        chunk_size: rows of a chunk.
        lanes: experts side by side.
        most_rows: how many rows one expert can get.
    """
    rewrite, emit, constant = source.rewrite, source.emit, source.rewrite.constant
    site = source.site
    assert source.size is not None
    pairs = source.size * site.top_k
    order = source.sorted()
    end = emit("CumSum", [order.counts, constant(0, "axis")], name="end_of_expert")
    start = emit("Sub", [end, order.counts], name="start_of_expert")
    with_spare = emit("Concat", [order.flat, source.pairs()], {"axis": 0}, name="order_and_spare")
    source.add_spare()
    chunk = max(1, min(chunk_size, most_rows))
    width = min(lanes, site.experts) * chunk
    # Not from the last step: exporters also multiply columns, [F, 1].
    known = source.shapes.dim(site.output, -1)
    features = known if isinstance(known, int) else site.hidden
    assert source.core_dtype is not None
    # Rows of no pair go to spare rows of their own: no row is written twice in one step.
    buffer = constant([pairs + width, features], "buffer_shape")
    zero = ir.tensor(np.zeros((1,), source.core_dtype.numpy()))
    held = rewrite.emit("ConstantOfShape", [buffer], {"value": zero}, name="no_rows", dtype=source.core_dtype)
    for slot, first in enumerate(range(0, site.experts, lanes)):
        count = min(lanes, site.experts - first)
        bounds = [source.part(vector, first, first + count, f"slots.{slot}/bounds") for vector in (start, end)]
        if count > 1 or lanes > 1:
            bounds = [unsqueeze(rewrite, item, [1], name=f"slots.{slot}/bounds_column") for item in bounds]
        for number, low in enumerate(range(0, max(most_rows, 1), chunk)):
            rows = min(chunk, most_rows - low) if most_rows else chunk
            prefix = f"slots.{slot}/chunks.{number}/"
            held = _chunk(source, _Slot(first, count, lanes > 1, prefix), bounds, (low, rows), with_spare, held)
    whole = source.part(held, 0, pairs, "rows_of_pairs")
    whole.type = ir.TensorType(source.core_dtype)
    sizes = constant([source.size, site.top_k, features], "choices")
    grid = rewrite.emit("Reshape", [whole, sizes], name="rows_of_choices", dtype=source.core_dtype)
    return source.shaped(source.tail_and_sum(grid))


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Experts ``first`` to before ``first + count``, as a batch or one alone."""

    first: int
    count: int
    batched: bool
    prefix: str


def _chunk(
    source: BlockSource, slot: _Slot, bounds: list[ir.Value], span: tuple[int, int], order: ir.Value, held: ir.Value
) -> ir.Value:
    """One chunk of the experts of a slot: its results are put where their pairs are."""
    rewrite, emit, constant = source.rewrite, source.emit, source.rewrite.constant
    low, rows = span
    assert source.size is not None
    pairs = source.size * source.site.top_k
    within = constant(list(range(low, low + rows)), "row_in_chunk")
    places = emit("Add", [bounds[0], within], name=f"{slot.prefix}places")
    taken, flat = _taken(source, places, bounds[1], order, source.pairs())
    found = source.rows_of(flat, spare=True)

    def parameter(tensor: ExpertTensor) -> ir.Value:
        name = (tensor.values[0 if tensor.stacked else slot.first].name or "weight").replace("/", ".")
        if slot.batched:
            part = some_experts(tensor, slot.first, slot.count)
            return source.parameters.get(part, f"{name}_of_{slot.first}_to_{slot.first + slot.count}")
        return source.parameters.get(one_expert(tensor, slot.first), f"{name}_of_{slot.first}")

    result = _run_core(source, found, int(slot.batched), parameter, slot.prefix)
    spare = np.arange(pairs, pairs + slot.count * rows, dtype=np.int64)
    spares = constant(spare.reshape((slot.count, rows) if slot.batched else (rows,)), "spare_rows")
    target = emit("Where", [taken, flat, spares], name=f"{slot.prefix}target")
    target = unsqueeze(rewrite, target, [2 if slot.batched else 1], name=f"{slot.prefix}target_rows")
    return rewrite.emit("ScatterND", [held, target, result], name=f"{slot.prefix}rows", dtype=source.core_dtype)
