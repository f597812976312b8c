"""What strategies share: rows of tokens and choices, sorted by expert, and the sum over the choices of a token.

T tokens, K choices; ``flat`` numbers t * K + k count (token, choice) pairs. No size is inferred by a reshape, so that
zero tokens come out right.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.editing.versioned_ops import INT64_MAX, slice_axis, squeeze, unsqueeze
from graphsurgery.passes.experts.parameters import Parameters
from graphsurgery.passes.experts.steps import StepWriter
from graphsurgery.patterns.experts.index_numbers import keeps_no_axis
from graphsurgery.patterns.experts.sites import ROUTE_WEIGHT, TOKEN_ROW, RowInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.passes.experts.program import Program
    from graphsurgery.patterns.experts.sites import ExpertSite
    from graphsurgery.rewrite import Rewrite

__all__ = ["BlockSource", "Sorted", "reduce_sum"]

_INT64 = ir.DataType.INT64
_INT32 = ir.DataType.INT32
_BOOL = ir.DataType.BOOL
_ALLOW_ZERO_OPSET = 14


@dataclasses.dataclass(frozen=True)
class Sorted:
    """(token, choice) pairs in the order of their experts, those of one expert in their own order.

    Attributes:
        flat: the pair at each sorted place, int64 ``[T*K]``.
        place: the sorted place of each pair, int64 ``[T*K]``.
        counts: number of pairs of each expert, int64 ``[E]``.
    """

    flat: ir.Value
    place: ir.Value
    counts: ir.Value


class BlockSource:
    """One site on its way into another form: what it reads, as rows, and the sum at its end.

    Args:
        rewrite: where nodes are inserted.
        shapes: of the model before the edit.
        site: what is rewritten.
        program: its body.
    """

    def __init__(self, rewrite: Rewrite, shapes: ShapeView, site: ExpertSite, program: Program) -> None:
        self.rewrite = rewrite
        self.shapes = shapes
        self.site = site
        self.program = program
        self.parameters = Parameters(rewrite, site.home)
        self.dtype = shapes.dtype(site.tokens)
        self.rank = shapes.rank(site.tokens) or 2
        weight = shapes.dtype(site.weights) if site.weights is not None else None
        rows: dict[RowInput, ir.DataType | None] = {TOKEN_ROW: self.dtype, ROUTE_WEIGHT: weight}
        self.core_dtype = program.dtype(program.result, rows)
        self.result_dtype = program.dtype(len(program.steps) - 1, rows)
        self.size = site.tokens_dim if isinstance(site.tokens_dim, int) else None
        self._cache: dict[tuple[str, ir.Graph], ir.Value] = {}

    # ---- what the site reads --------------------------------------------------------------------------------------

    def tokens(self) -> ir.Value:
        """The token rows ``[T, H]``."""
        return self._made("tokens", lambda: self._two_axes(self.site.tokens, "tokens"))

    def indices(self) -> ir.Value:
        """The chosen experts, int64 ``[T, K]``."""
        return self._made("indices", self._indices)

    def weights(self) -> ir.Value | None:
        """The weights of the choices ``[T, K]``."""
        weights = self.site.weights
        return None if weights is None else self._made("weights", lambda: self._weights(weights))

    def experts(self) -> ir.Value:
        """The expert of each pair, int64 ``[T*K]``."""
        return self._made("experts", lambda: self.line(self.indices(), "experts"))

    def pairs(self) -> ir.Value:
        """T*K, int64 ``[1]``."""
        if self.size is not None:
            return self.rewrite.constant([self.size * self.site.top_k], "pairs")
        return self._made("pairs", lambda: self.emit("Shape", [self.experts()], name="pairs", shape=[1]))

    def flat_weights(self) -> ir.Value:
        """The weight of each pair ``[T*K, 1]``."""
        return self._made("flat_weights", self._flat_weights)

    def _flat_weights(self) -> ir.Value:
        weights = self.weights()
        assert weights is not None
        row = self.rewrite.emit("Flatten", [weights], {"axis": 0}, name="weights_in_line", dtype=weights.dtype)
        return self.rewrite.emit("Transpose", [row], {"perm": [1, 0]}, name="flat_weights", dtype=weights.dtype)

    def _weights(self, weights: ir.Value) -> ir.Value:
        rows = self._two_axes(weights, "weights")
        if not self.site.weights_by_expert:
            return rows
        dtype = self.shapes.dtype(weights)
        return self.rewrite.emit(
            "GatherElements", [rows, self.indices()], {"axis": 1}, name="weights_of_choices", dtype=dtype
        )

    def _indices(self) -> ir.Value:
        found = self.site.indices
        if keeps_no_axis(found):
            rank = self.shapes.rank(found) or 1
            found = unsqueeze(self.rewrite, found, [rank], name="indices_column")
            if rank > 1:
                found = self.emit("Flatten", [found], {"axis": rank}, name="indices", dtype=found.dtype or _INT64)
        else:
            found = self._two_axes(found, "indices")
        if self.shapes.dtype(self.site.indices) == _INT64:
            return found
        return self.emit("Cast", [found], {"to": int(_INT64)}, name="indices_int64")

    def _two_axes(self, value: ir.Value, name: str) -> ir.Value:
        rank = self.shapes.rank(value) or 2
        if rank == 1:
            return unsqueeze(self.rewrite, value, [1], name=name)
        if rank == 2:
            return value
        # Flatten, not Reshape: it is right for sizes of zero, and needs no size.
        dtype = self.shapes.dtype(value)
        return self.rewrite.emit("Flatten", [value], {"axis": rank - 1}, name=name, dtype=dtype)

    def line(self, value: ir.Value, name: str) -> ir.Value:
        """All elements of ``value`` on one axis, whatever their number."""
        row = self.rewrite.emit("Flatten", [value], {"axis": 0}, name=f"{name}_row", dtype=value.dtype)
        return squeeze(self.rewrite, row, [0], name=name)

    def _made(self, name: str, make: Callable[[], ir.Value]) -> ir.Value:
        key = (name, self.rewrite.place)
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    # ---- sorting --------------------------------------------------------------------------------------------------

    def sorted(self) -> Sorted:
        """Sort the pairs by expert. TopK breaks ties by position, so that the order is the same on every run."""
        emit = self.emit
        attributes = {"axis": 0, "largest": 0, "sorted": 1}
        found = self.rewrite.emit_parts(
            "TopK", [self.experts(), self.pairs()], attributes, ["sorted_experts", "flat_of_place"]
        )
        flat = found[1]
        flat.type = ir.TensorType(_INT64)
        places = self.counting(self.pairs(), "places")
        # Every place is written once: a permutation, so that no two writes can race.
        place = emit("ScatterElements", [flat, flat, places], {"axis": 0}, name="place_of_flat")
        return Sorted(flat, place, self._counts())

    def _counts(self) -> ir.Value:
        emit, constant = self.emit, self.rewrite.constant
        columns = unsqueeze(self.rewrite, self.experts(), [1], name="experts_column")
        numbers = constant(np.arange(self.site.experts, dtype=np.int64)[None], "expert_numbers")
        chosen = emit("Equal", [columns, numbers], name="is_chosen", dtype=_BOOL)
        number = emit("Cast", [chosen], {"to": int(_INT32)}, name="is_chosen_number", dtype=_INT32)
        count = reduce_sum(self.rewrite, number, [0], keep=False, name="counts_int32")
        return emit("Cast", [count], {"to": int(_INT64)}, name="counts", shape=[self.site.experts])

    def counting(self, count: ir.Value, name: str) -> ir.Value:
        """0, 1, ... up to before ``count``, an int64 ``[1]``."""
        number = count.const_value
        if number is not None:
            return self.rewrite.constant(np.arange(int(number.numpy()[0]), dtype=np.int64), name)
        end = squeeze(self.rewrite, count, [0], name=f"{name}_end")
        zero, one = (self.rewrite.constant(np.asarray(item, np.int64), "number") for item in (0, 1))
        return self.emit("Range", [zero, end, one], name=name)

    def token_of(self, flat: ir.Value, name: str = "token_of_row") -> ir.Value:
        """The tokens of pairs."""
        if self.site.top_k == 1:
            return flat
        choices = self.rewrite.constant(np.asarray(self.site.top_k, np.int64), "top_k")
        return self.emit("Div", [flat, choices], name=name)

    # ---- the end --------------------------------------------------------------------------------------------------

    def summed(self, results: ir.Value, places: ir.Value) -> ir.Value:
        """Put results in order, run the tail, add up the choices of each token.

        Args:
            results: of the core, ``[R, F]``.
            places: the row of each pair, int64 ``[T*K]``.

        Returns:
            The output of the site, in its own shape.
        """
        rewrite = self.rewrite
        # [T, K] may be [0, K]; 0 then copies a size that is 0 too.
        if self.size is not None:
            sizes = rewrite.constant([self.size, self.site.top_k], "choices")
        else:
            sizes = self.emit("Shape", [self.indices()], name="choices", shape=[2])
        grid = self.emit("Reshape", [places, sizes], name="row_of_choice")
        rows = rewrite.emit("Gather", [results, grid], {"axis": 0}, name="rows_of_choices", dtype=self.core_dtype)
        return self.shaped(self.tail_and_sum(rows))

    def tail_and_sum(self, rows: ir.Value) -> ir.Value:
        """``[T, K, F]`` results of the core: run the tail and add up the choices."""
        rewrite, program = self.rewrite, self.program
        known = {}
        weights = self.weights()
        if weights is not None and len(program.steps) > program.core:
            known[ROUTE_WEIGHT] = unsqueeze(rewrite, weights, [2], name="choice_weights")
        writer = StepWriter(rewrite, program, 1, _no_parameter)
        done = writer.run(range(program.core, len(program.steps)), known, {program.result: rows})
        return reduce_sum(rewrite, done[len(program.steps) - 1], [1], keep=False, name="sum_of_choices")

    def shaped(self, rows: ir.Value) -> ir.Value:
        """``[T, H]`` in the shape that the site's output has."""
        rewrite = self.rewrite
        if self.rank == 2:
            return rows
        known = self.shapes.shape(self.site.tokens) or ()
        numbers = [size for size in known if isinstance(size, int) and size > 0]
        if numbers and len(numbers) == len(known):
            # Nothing of the exporter's rows is kept for the sake of their shape.
            sizes = rewrite.constant(numbers, "output_shape")
            return rewrite.emit("Reshape", [rows, sizes], name="output", dtype=rows.dtype)
        sizes = self.emit("Shape", [self.site.tokens], name="output_shape", shape=[self.rank])
        if rewrite.opset >= _ALLOW_ZERO_OPSET:
            return rewrite.emit("Reshape", [rows, sizes], {"allowzero": 1}, name="output", dtype=rows.dtype)
        if self.rank > 3 or self.size:
            return rewrite.emit("Reshape", [rows, sizes], name="output", dtype=rows.dtype)
        return rewrite.emit("Gather", [rows, self._grid(sizes)], {"axis": 0}, name="output", dtype=rows.dtype)

    def _grid(self, sizes: ir.Value) -> ir.Value:
        """Row b * S + s at ``[b, s]``: a Reshape cannot make sizes of zero before opset 14."""
        batch, length = (self.part(sizes, axis, axis + 1, "size") for axis in (0, 1))
        rows = unsqueeze(self.rewrite, self.counting(batch, "batch_row"), [1], name="batch_column")
        first = self.emit("Mul", [rows, length], name="first_of_batch_row")
        return self.emit("Add", [first, self.counting(length, "position")], name="row_of_position")

    # ---- helpers --------------------------------------------------------------------------------------------------

    def emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, object] | None = None,
        *,
        name: str,
        dtype: ir.DataType = _INT64,
        shape: Sequence[int | str | None] | None = None,
    ) -> ir.Value:
        """Insert a node that gives numbers, int64 where nothing else is said."""
        return self.rewrite.emit(op_type, inputs, attributes, name=name, dtype=dtype, shape=shape)

    def part(self, value: ir.Value, first: int, last: int | None, name: str) -> ir.Value:
        """Elements ``first`` to before ``last`` of a vector."""
        return slice_axis(self.rewrite, value, (first, INT64_MAX if last is None else last), 0, name=name)

    def rows_of(self, flat: ir.Value, spare: bool) -> dict[RowInput, ir.Value]:
        """Token rows (and weights, where the core reads them) of the pairs ``flat``.

        Args:
            flat: pairs, of any shape.
            spare: whether the pair T*K may occur, which stands for no pair: its row is zero.
        """
        rewrite = self.rewrite
        tokens = self._with_spare("tokens") if spare else self.tokens()
        token = self.token_of(flat)
        rows: dict[RowInput, ir.Value] = {
            TOKEN_ROW: rewrite.emit("Gather", [tokens, token], {"axis": 0}, name="token_rows", dtype=self.dtype)
        }
        if self.program.core_needs_weight:
            weights = self._with_spare("weights") if spare else self.flat_weights()
            rows[ROUTE_WEIGHT] = rewrite.emit(
                "Gather", [weights, flat], {"axis": 0}, name="row_weights", dtype=weights.dtype
            )
        return rows

    def _with_spare(self, name: str) -> ir.Value:
        return self._cache[f"{name}_and_spare", self.rewrite.place]

    def add_spare(self, body: ir.Graph | None = None) -> None:
        """Make the token rows (and weights) with a row of zeros behind them; ``body`` may read them too."""
        pairs = [("tokens", self.tokens(), self.site.hidden)]
        if self.program.core_needs_weight:
            pairs.append(("weights", self.flat_weights(), 1))
        for name, rows, width in pairs:
            assert rows.dtype is not None or self.dtype is not None
            dtype = rows.dtype or self.dtype
            assert dtype is not None
            zero = self.rewrite.constant(np.zeros((1, width), dtype.numpy()), "spare_row")
            made = self.rewrite.emit("Concat", [rows, zero], {"axis": 0}, name=f"{name}_and_spare", dtype=dtype)
            self._cache[f"{name}_and_spare", self.rewrite.place] = made
            if body is not None:
                self._cache[f"{name}_and_spare", body] = made


def reduce_sum(rewrite: Rewrite, value: ir.Value, axes: list[int], *, keep: bool, name: str) -> ir.Value:
    """The sum over ``axes``, in the form of the model's opset."""
    if rewrite.opset < 13:
        attributes = {"axes": axes, "keepdims": int(keep)}
        return rewrite.emit("ReduceSum", [value], attributes, name=name, dtype=value.dtype)
    operand = rewrite.constant(axes, "axes")
    return rewrite.emit("ReduceSum", [value, operand], {"keepdims": int(keep)}, name=name, dtype=value.dtype)


def _no_parameter(tensor: object) -> ir.Value:
    raise AssertionError("the tail reads no parameter of an expert")
