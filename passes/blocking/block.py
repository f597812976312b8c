"""One block of heads and queries: the exporter's softmax over all its columns, or a running one over key blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.editing.spans import Bound, Span, as_value, blocks_of, least
from graphsurgery.passes.blocking.plan import Heads, State
from graphsurgery.patterns.attention.key_value_sources import regroups_heads
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from graphsurgery.passes.blocking.site_writer import SiteWriter
    from graphsurgery.patterns.attention.sites import KeyValueSource, ValueProduct

__all__ = ["Block"]

_INT64 = ir.DataType.INT64
_FLOAT = ir.DataType.FLOAT
_FLOOR = float(np.finfo(np.float32).min)
"""The lowest finite float32: keeps a running maximum finite where all that was seen is -inf, and leaves rows whose
mask is the lowest finite number everywhere what they are, uniform."""


class Block:
    """One block of heads and queries."""

    def __init__(
        self, site_writer: SiteWriter, heads: Heads, rows: Span, whole: bool, columns: Span, query: ir.Value
    ) -> None:
        self._of = site_writer
        self._site = site_writer.site
        self._rewrite = site_writer.rewrite
        self._writer = site_writer.writer
        self._heads = heads
        self._rows = rows
        self._whole = whole
        self._columns = columns
        self._folded = site_writer.plan.fold and heads.groups is not None and heads.repeats > 1
        self._query = self._fold(query, "query_folded") if self._folded else query
        self.exposed: list[ir.Value] = []
        """The block's part of each of ``site.exposed``, ``[B, h, s, T]``, once :meth:`plain` has made them."""

    # ---- products -------------------------------------------------------------------------------------------------

    def _fold(self, value: ir.Value, name: str) -> ir.Value:
        """``[B, g*r, s, x] -> [B, g, r*s, x]``."""
        assert self._heads.groups is not None
        groups = self._heads.groups[1] - self._heads.groups[0]
        rows = self._times(self._row_count(), self._heads.repeats)
        return self._reshape(value, [0, groups, rows, 0], name)

    def _unfold(self, value: ir.Value, name: str) -> ir.Value:
        """``[B, g, r*s, x] -> [B, g*r, s, x]``."""
        return self._reshape(value, [0, self._heads.span.length, self._row_count(), 0], name)

    def _row_count(self) -> Bound:
        return self._rows.length

    def _times(self, bound: Bound, factor: int) -> Bound:
        if isinstance(bound, int):
            return bound * factor
        return self._rewrite.emit(
            "Mul", [bound, self._rewrite.constant([factor], "repeats")], name="folded_rows", dtype=_INT64, shape=[1]
        )

    def _reshape(self, value: ir.Value, entries: list[Bound], name: str) -> ir.Value:
        if all(isinstance(item, int) for item in entries):
            operand = self._rewrite.constant([item for item in entries if isinstance(item, int)], "shape")
        else:
            values = [as_value(self._rewrite, item) for item in entries]
            operand = self._rewrite.emit(
                "Concat", values, {"axis": 0}, name="shape", dtype=_INT64, shape=[len(entries)]
            )
        return self._rewrite.emit("Reshape", [value, operand], name=name, dtype=value.dtype)

    def _scores(self, columns: Span) -> ir.Value:
        keys = self._of.operand(self._site.key, 0, self._heads, columns)
        keys = self._spread(keys, self._site.key)
        scores = self._rewrite.emit("MatMul", [self._query, keys], name="scores", dtype=self._of.dtype)
        return self._unfold(scores, "scores_by_head") if self._folded else scores

    def _weighted(self, probabilities: ir.Value, columns: Span) -> ir.Value:
        """What the products attend, ``[B, h, s, Dv]``, side by side where there are several."""
        if self._folded:
            probabilities = self._fold(probabilities, "weights_folded")
        made = [
            self._product(probabilities, item, place, columns) for place, item in enumerate(self._site.value_products)
        ]
        out = made[0]
        if len(made) > 1:
            out = self._rewrite.emit("Concat", made, {"axis": 3}, name="side_by_side", dtype=out.dtype)
        return self._unfold(out, "weighted_by_head") if self._folded else out

    def _product(self, probabilities: ir.Value, item: ValueProduct, place: int, columns: Span) -> ir.Value:
        values = self._spread(self._of.operand(item.source, 1 + place, self._heads, columns), item.source)
        out = self._rewrite.emit("MatMul", [probabilities, values], name="weighted", dtype=values.dtype)
        for node in item.source.scales:
            out = self._of.scaled(node, out)
        return self._of.multiplied(out, item.scale, "scaled_values")

    def _spread(self, block: ir.Value, source: KeyValueSource) -> ir.Value:
        """Key heads repeated for the query heads of their group, where they are not folded."""
        heads = self._heads
        if self._folded or heads.groups is None or heads.repeats == 1 or source.head_axis is None:
            return block
        indices = [group for group in range(heads.groups[1] - heads.groups[0]) for _ in range(heads.repeats)]
        operand = self._rewrite.constant(indices, "group_of_head")
        return self._rewrite.emit("Gather", [block, operand], {"axis": 1}, name="repeated", dtype=block.dtype)

    # ---- the exporter's own softmax -------------------------------------------------------------------------------

    def plain(self) -> ir.Value:
        """All columns of the block at once: the exporter's chain, softmax and tail."""
        site = self._site
        made = {site.scores.outputs[0]: self._scores(self._columns)}
        for node in (*site.chain, site.softmax, *site.tail):
            self._replay(node, made, self._columns)
        self.exposed = [made[value] for value in site.exposed]
        last = (site.tail or (site.softmax,))[-1]
        return self._weighted(made[last.outputs[0]], self._columns)

    def _replay(self, node: ir.Node, made: dict[ir.Value, ir.Value], columns: Span) -> None:
        source = node.inputs[0]
        if source in made and regroups_heads(node, self._of.shapes):
            # Batch and heads on one axis are for the exporter's products only; blocks keep them apart.
            assert source is not None
            made[node.outputs[0]] = made[source]
            return
        inputs: list[ir.Value | None] = []
        for item in node.inputs:
            if item is None or item in made:
                inputs.append(None if item is None else made[item])
            else:
                inputs.append(self._of.chain_operand(item, self._heads, self._rows, self._whole, columns))
        made[node.outputs[0]] = self._rewrite.clone(node, inputs, name=node.op_type.lower())

    # ---- a running softmax ----------------------------------------------------------------------------------------

    def running(self, spans: list[Span]) -> ir.Value:
        """The columns block by block, each in lanes of their own statistics."""
        lanes: list[State | None] = [None] * self._of.plan.lanes
        for span in spans:
            lanes = list(self._lanes(lanes, span))
        return self._finish(self._with_sink([state for state in lanes if state is not None]))

    def running_loop(self, columns: Span, size: int) -> ir.Value:
        """The columns in a Loop over blocks of ``size``: the first block in front of it, the statistics carried."""
        rewrite, emit, constant = self._rewrite, self._rewrite.emit, self._rewrite.constant
        start, end = as_value(rewrite, columns.start), as_value(rewrite, columns.end)
        block = constant([size], "block_size")
        second = least(rewrite, emit("Add", [start, block], name="second", dtype=_INT64, shape=[1]), end)
        first = Span(columns.start, second, emit("Sub", [second, start], name="columns", dtype=_INT64, shape=[1]))
        lanes = self._lanes([None] * self._of.plan.lanes, first)
        rest = emit("Sub", [end, second], name="rest", dtype=_INT64, shape=[1])
        padded = emit("Add", [rest, constant([size - 1], "round_up")], name="padded", dtype=_INT64, shape=[1])
        count = emit("Div", [padded, block], name="blocks", dtype=_INT64, shape=[1])
        trips = emit("Squeeze", [count], name="trips", dtype=_INT64, shape=[])
        carried = [item for state in lanes for item in state.parts()]
        unknown = (None, None, None, None)
        formals = [(f"state_{place}", ir.TensorType(_FLOAT), unknown) for place in range(len(carried))]
        body = rewrite.body(
            "key_block",
            (("number", ir.TensorType(_INT64), ()), ("go_on", ir.TensorType(ir.DataType.BOOL), ()), *formals),
        )
        with rewrite.inside(body):
            number, go_on, *given = body.inputs
            place = emit(
                "Reshape", [number, constant([1], "one_element")], name="block_number", dtype=_INT64, shape=[1]
            )
            offset = emit("Mul", [place, block], name="offset", dtype=_INT64, shape=[1])
            from_here = emit("Add", [second, offset], name="start", dtype=_INT64, shape=[1])
            to_there = least(rewrite, emit("Add", [from_here, block], name="next", dtype=_INT64, shape=[1]), end)
            width = emit("Sub", [to_there, from_here], name="columns", dtype=_INT64, shape=[1])
            states = [State(*given[place : place + 3]) for place in range(0, len(given), 3)]
            after = self._lanes(list(states), Span(from_here, to_there, width))
            body.outputs.append(emit("Identity", [go_on], name="still", dtype=ir.DataType.BOOL, shape=[]))
            body.outputs.extend(item for state in after for item in state.parts())
        always = constant(np.asarray(True), "always")
        outputs = rewrite.emit_holder(
            "Loop", [trips, always, *carried], {"body": body}, name="key_blocks", outputs=len(carried)
        )
        for value in outputs:
            value.type = ir.TensorType(_FLOAT)
        states = [State(*outputs[place : place + 3]) for place in range(0, len(outputs), 3)]
        return self._finish(self._with_sink(states))

    def _lanes(self, lanes: list[State | None], columns: Span) -> list[State]:
        """One key block, each lane its share of the columns; passed over where the mask leaves none of it."""
        known = [lane for lane in lanes if lane is not None]
        needed = self._of.block_is_needed(self._rows, self._whole, columns) if len(known) == len(lanes) else None
        if needed is None:
            return self._all_lanes(lanes, columns)
        if self._of.plan.skip == "where":
            return self._chosen(needed, self._all_lanes(lanes, columns), known)
        computed, passed = self._rewrite.body("needed", ()), self._rewrite.body("not_needed", ())
        for body, states in ((computed, None), (passed, known)):
            with self._rewrite.inside(body):
                made = self._all_lanes(lanes, columns) if states is None else states
                body.outputs.extend(self._returned(item, body) for state in made for item in state.parts())
        bodies = {"then_branch": computed, "else_branch": passed}
        outputs = self._rewrite.emit_holder("If", [needed], bodies, name="if_needed", outputs=3 * len(known))
        for value in outputs:
            value.type = ir.TensorType(_FLOAT)
        return [State(*outputs[place : place + 3]) for place in range(0, len(outputs), 3)]

    def _returned(self, value: ir.Value, body: ir.Graph) -> ir.Value:
        """``value`` as an output of a branch, which may not be a value from outside it."""
        if value.graph is body:
            return value
        return self._rewrite.emit("Identity", [value], name="as_before", dtype=_FLOAT)

    def _chosen(self, needed: ir.Value, new: list[State], old: list[State]) -> list[State]:
        """The new statistics where the block was needed, else the old ones."""
        chosen = []
        for after, before in zip(new, old, strict=True):
            pairs = zip(after.parts(), before.parts(), strict=True)
            parts = [
                self._rewrite.emit("Where", [needed, yes, no], name="if_needed", dtype=_FLOAT) for yes, no in pairs
            ]
            chosen.append(State(*parts))
        return chosen

    def _all_lanes(self, lanes: list[State | None], columns: Span) -> list[State]:
        parts = blocks_of(self._rewrite, columns, len(lanes)) if len(lanes) > 1 else [columns]
        stepped = [self._step(lane, part) for lane, part in zip(lanes, parts, strict=False)]
        return [*stepped, *(lane for lane in lanes[len(parts) :] if lane is not None)]

    def _with_sink(self, states: list[State]) -> list[State]:
        return states if self._site.sink is None else [*states, self._sink_state()]

    def _step(self, state: State | None, columns: Span) -> State:
        emit, writer = self._rewrite.emit, self._writer
        scores = self._block_scores(columns)
        top = writer.reduce("ReduceMax", scores, 3, name="block_maximum", dtype=_FLOAT)
        maximum = emit("Max", [top, self._floor() if state is None else state.maximum], name="maximum", dtype=_FLOAT)
        weights = self._exp(scores, maximum, "weights")
        total = writer.reduce("ReduceSum", weights, 3, name="block_sum", dtype=_FLOAT)
        weighted = self._float(self._weighted(self._typed(weights), columns), self._value_type())
        if state is None:
            return State(maximum, total, weighted)
        factor = self._exp(state.maximum, maximum, "rescale")
        return State(maximum, self._axpy(state.total, factor, total), self._axpy(state.weighted, factor, weighted))

    def _axpy(self, old: ir.Value | None, factor: ir.Value, new: ir.Value) -> ir.Value:
        assert old is not None
        scaled = self._rewrite.emit("Mul", [old, factor], name="rescaled", dtype=_FLOAT)
        return self._rewrite.emit("Add", [scaled, new], name="running", dtype=_FLOAT)

    def _block_scores(self, columns: Span) -> ir.Value:
        site = self._site
        made = {site.scores.outputs[0]: self._scores(columns)}
        last = site.scores.outputs[0]
        for node in site.chain:
            if node in site.stabiliser or (site.sink is not None and node is site.sink.join):
                continue
            self._replay(node, made, columns)
            last = node.outputs[0]
        return self._float(made[last], self._of.shapes.dtype(last))

    def _sink_state(self) -> State:
        assert self._site.sink is not None
        sink = self._of.chain_operand(self._site.sink.value, self._heads, self._rows, self._whole, self._columns)
        maximum = self._float(sink, self._of.shapes.dtype(self._site.sink.value))
        total = self._exp(maximum, maximum, "sink_weight")
        return State(maximum, total, None)

    def _finish(self, states: list[State]) -> ir.Value:
        emit = self._rewrite.emit
        merged = states[0]
        for state in states[1:]:
            maximum = emit("Max", [merged.maximum, state.maximum], name="merged_maximum", dtype=_FLOAT)
            left, right = self._exp(merged.maximum, maximum, "left"), self._exp(state.maximum, maximum, "right")
            other = emit("Mul", [state.total, right], name="other_sum", dtype=_FLOAT)
            total = self._axpy(merged.total, left, other)
            assert merged.weighted is not None
            if state.weighted is None:
                weighted = emit("Mul", [merged.weighted, left], name="rescaled", dtype=_FLOAT)
            else:
                scaled = emit("Mul", [state.weighted, right], name="other_weighted", dtype=_FLOAT)
                weighted = self._axpy(merged.weighted, left, scaled)
            merged = State(maximum, total, weighted)
        total = merged.total
        if any(is_op(node, "IsNaN") for node in self._site.tail):
            # The exporter turns rows without a key into zeros; their sum of weights is zero.
            total = emit("Max", [total, self._number(1e-30, "no_key")], name="sum_or_tiny", dtype=_FLOAT)
        assert merged.weighted is not None
        return self._typed(emit("Div", [merged.weighted, total], name="attended", dtype=_FLOAT))

    def _exp(self, value: ir.Value, maximum: ir.Value, name: str) -> ir.Value:
        shifted = self._rewrite.emit("Sub", [value, maximum], name=f"{name}_shifted", dtype=_FLOAT)
        return self._rewrite.emit("Exp", [shifted], name=name, dtype=_FLOAT)

    def _floor(self) -> ir.Value:
        return self._number(_FLOOR, "floor")

    def _number(self, number: float, name: str) -> ir.Value:
        return self._rewrite.constant(np.asarray(number, dtype=np.float32), name)

    def _float(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """``value``, of type ``dtype``, as float32: running statistics are kept in it."""
        if dtype in (None, _FLOAT):
            return value
        return self._rewrite.emit("Cast", [value], {"to": int(_FLOAT)}, name="as_float", dtype=_FLOAT)

    def _typed(self, value: ir.Value) -> ir.Value:
        dtype = self._value_type()
        if dtype in (None, _FLOAT):
            return value
        return self._rewrite.emit("Cast", [value], {"to": int(dtype)}, name="as_model_type", dtype=dtype)

    def _value_type(self) -> ir.DataType | None:
        return self._of.shapes.dtype(self._site.product.outputs[0])
