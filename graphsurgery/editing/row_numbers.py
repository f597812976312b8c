"""Which rows are wanted, as nodes: the last wanted row of each batch row, the rows that end there, and their number.

Everything emitted is valid from opset 11 on.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.dims import Unknown
from graphsurgery.editing.versioned_ops import INT64_MAX, reduce_max, reshape, slice_axis, unsqueeze

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.contracts import IndexMode
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.rewrite import Rewrite

__all__ = ["RowNumbers", "RowPlan", "dim_name"]

_INT64 = ir.DataType.INT64


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Which rows are wanted.

    Attributes:
        index: how the last wanted row of each batch row is found.
        keep: number of rows, N, that end there.
        source: the input that ``index`` reads: mask ``[B, T]``, positions ``[B, S]`` / ``[3, B, S]`` /
            ``[4, B, S]``, or the runtime index int32 ``[B, 1, 1]`` / int64 ``[B]``; None for ``last``.
        planes: leading size of rank-3 positions (3 or 4), else 0.
        cut: the mask may have more columns than there are tokens: its last S are meant.
    """

    index: IndexMode
    keep: int
    source: ir.Value | None = None
    planes: int = 0
    cut: bool = True


def dim_name(size: Dim) -> int | str | None:
    """``size`` as an onnx-ir dim; None for a size without a name."""
    if isinstance(size, int):
        return size
    return None if isinstance(size.atom, Unknown) else str(size)


class RowNumbers:
    """Emits which rows one plan wants, and how many there are before and after.

    Everything is computed from graph inputs, once, at the start of the graph.

    Args:
        rewrite: where nodes are inserted.
        plan: which rows.
        tokens: where B and S come from.

    Attributes:
        plan: see above.
        tokens: see above.
        sources: the graph inputs that what was emitted reads.
    """

    def __init__(self, rewrite: Rewrite, plan: RowPlan, tokens: TokenInput) -> None:
        self._rewrite = rewrite
        self.plan = plan
        self.tokens = tokens
        self._made: dict[str, ir.Value] = {}
        self.sources: dict[ir.Value, None] = {}

    # ---- how many rows --------------------------------------------------------------------------------------------

    def count(self, *, flat: bool) -> int | str | None:
        """The number of rows that a selection leaves, as a dim: N; B*N where flat; a name for runtime streams."""
        keep, batch = self.plan.keep, self.tokens.batch
        if batch is None and self.plan.index == "runtime":
            return "selected_rows" if keep == 1 else f"{keep}*selected_rows"
        if not flat or batch is None:
            return keep
        return dim_name(batch * keep)

    def count_value(self, *, flat: bool) -> ir.Value:
        """The same as an int64 ``[1]``, for a count that is only known at run time."""

        def make() -> ir.Value:
            if self.tokens.batch is None:
                return self._shape_of(self.stream_indices(), "selected_rows")
            keep = self._rewrite.constant([self.plan.keep], "keep")
            return self._emit("Mul", [self._batch_size(), keep], "kept_rows", [1])

        count = self.count(flat=flat)
        return self._rewrite.constant([count], "rows") if isinstance(count, int) else self._once("kept_rows", make)

    def token_count(self, *, flat: bool) -> ir.Value:
        """The number of rows before the edit, S or B*S, as an int64 ``[1]``."""
        if not flat:
            return self._sequence_length()
        return self._once(
            "token_rows",
            lambda: self._emit("Mul", [self._batch_size(), self._sequence_length()], "token_rows", [1]),
        )

    # ---- which rows -----------------------------------------------------------------------------------------------

    def indices(self) -> ir.Value:
        """Row numbers within S, int64 ``[B, N]``."""
        return self._once("indices", lambda: self._window(self._last_rows()))

    def flat_indices(self) -> ir.Value:
        """Row numbers within B*S, int64 ``[B*N]``."""

        def make() -> ir.Value:
            rows = self.indices()
            starts = self._emit("Mul", [self._batch_numbers(), self._sequence_length()], "batch_starts", None)
            flat = self._emit("Add", [rows, starts], "flat_rows", None)
            return reshape(self._rewrite, flat, [-1], name="flat_row_indices")

        return self._once("flat_indices", make)

    def stream_indices(self) -> ir.Value:
        """Row numbers within a packed stream or a batch of 1, int64 ``[R*N]``."""
        return self._once(
            "stream_indices", lambda: reshape(self._rewrite, self.indices(), [-1], name="stream_row_indices")
        )

    def wide_indices(self) -> ir.Value:
        """Row numbers within S, each an index of its own: int64 ``[B, N, 1]``."""
        shape = [self._batch_name(), self.plan.keep, 1]
        return self._once(
            "wide_indices",
            lambda: unsqueeze(self._rewrite, self.indices(), [2], name="row_indices", shape=shape),
        )

    def batch_pairs(self) -> ir.Value:
        """(batch row, row within S) of each wanted row, int64 ``[B, N, 2]``."""

        def make() -> ir.Value:
            rewrite, rows = self._rewrite, self.indices()
            sizes = self._emit("Shape", [rows], "indices_shape", [2])
            numbers = self._emit("Expand", [self._batch_numbers(), sizes], "batch_indices", None)
            columns = [unsqueeze(rewrite, item, [2], name="index_column") for item in (numbers, rows)]
            return rewrite.emit("Concat", columns, {"axis": 2}, name="row_indices", dtype=_INT64)

        return self._once("batch_pairs", make)

    def _batch_numbers(self) -> ir.Value:
        """0 .. B-1, int64 ``[B, 1]``."""

        def make() -> ir.Value:
            zero, one = self._rewrite.constant(0, "zero"), self._rewrite.constant(1, "one")
            batch = reshape(self._rewrite, self._batch_size(), [], name="batch_scalar", shape=[])
            numbers = self._emit("Range", [zero, batch, one], "batch_numbers", None)
            return unsqueeze(self._rewrite, numbers, [1], name="batch_number_column")

        return self._once("batch_numbers", make)

    def _last_rows(self) -> ir.Value:
        """The last wanted row of each batch row, int64 ``[B, 1]``."""
        plan, rewrite = self.plan, self._rewrite
        if plan.index == "last":
            return self._last_of_all()
        source = plan.source
        assert source is not None
        self.sources.setdefault(source)
        if plan.index == "runtime":
            if source.dtype != _INT64:
                source = self._emit("Cast", [source], "index_int64", None, {"to": int(_INT64)})
            return reshape(rewrite, source, [-1, 1], name="last_row")
        if plan.index == "mask":
            if plan.cut:
                source = self._last_columns(source)
            attributes = {"to": int(ir.DataType.BOOL)}
            attended = rewrite.emit("Cast", [source], attributes, name="attended", dtype=ir.DataType.BOOL)
            attributes = {"to": int(ir.DataType.INT32)}
            source = rewrite.emit("Cast", [attended], attributes, name="attended_int", dtype=ir.DataType.INT32)
        elif plan.planes == 4:
            first = rewrite.constant(0, "first_plane")
            source = rewrite.emit("Gather", [source, first], {"axis": 0}, name="positions", dtype=source.dtype)
        elif plan.planes:
            source = reduce_max(rewrite, source, 0, name="positions")
        return self._arg_max(source)

    def _last_of_all(self) -> ir.Value:
        """S - 1 for every batch row."""
        one = self._rewrite.constant([1], "one_column")
        last = self._emit("Sub", [self._sequence_length(), one], "last_row", [1])
        column = reshape(self._rewrite, last, [1, 1], name="last_row_column")
        if self.tokens.batch is None or self.tokens.batch == 1:
            return column
        sizes = [self._batch_size(), one]
        target = self._rewrite.emit("Concat", sizes, {"axis": 0}, name="column_shape", dtype=_INT64, shape=[2])
        return self._emit("Expand", [column, target], "last_rows", [self._batch_name(), 1])

    def _last_columns(self, mask: ir.Value) -> ir.Value:
        """The last S columns of a mask ``[B, T]``, T = P + S."""
        start = self._emit("Neg", [self._sequence_length()], "mask_start", [1])
        end, axis = self._rewrite.constant([INT64_MAX], "to_end"), self._rewrite.constant([1], "columns")
        return self._rewrite.emit("Slice", [mask, start, end, axis], name="mask_of_tokens", dtype=mask.dtype)

    def _arg_max(self, value: ir.Value) -> ir.Value:
        """Column of the last maximum of each row, int64 ``[B, 1]``."""
        attributes: dict[str, int] = {"axis": 1, "keepdims": 1}
        shape = [self._batch_name(), 1]
        if self._rewrite.opset >= 12:
            return self._emit("ArgMax", [value], "last_row", shape, attributes | {"select_last_index": 1})
        # Before opset 12 only the first maximum can be had: look from behind.
        constants = [self._rewrite.constant([item], "reverse") for item in (-1, -INT64_MAX, 1, -1)]
        mirrored = self._rewrite.emit("Slice", [value, *constants], name="mirrored", dtype=value.dtype)
        first = self._emit("ArgMax", [mirrored], "rows_behind", shape, attributes)
        one = self._rewrite.constant([1], "one_column")
        last = self._emit("Sub", [self._sequence_length(), one], "end_row", [1])
        return self._emit("Sub", [last, first], "last_row", shape)

    def _window(self, last: ir.Value) -> ir.Value:
        """The N rows that end at ``last``, not below 0: int64 ``[B, N]``."""
        keep = self.plan.keep
        if keep == 1:
            return last
        steps = self._rewrite.constant(list(range(1 - keep, 1)), "steps")
        rows = self._emit("Add", [last, steps], "window", None)
        zero = self._rewrite.constant(0, "zero")
        if self._rewrite.opset >= 12:
            return self._emit("Max", [rows, zero], "wanted_rows", None)
        # Before opset 12 Max takes floats only.
        positive = self._rewrite.emit("Greater", [rows, zero], name="not_clamped", dtype=ir.DataType.BOOL)
        factor = self._emit("Cast", [positive], "not_clamped_int", None, {"to": int(_INT64)})
        return self._emit("Mul", [rows, factor], "wanted_rows", None)

    # ---- sizes ----------------------------------------------------------------------------------------------------

    def _sequence_length(self) -> ir.Value:
        """S as an int64 ``[1]``."""
        tokens = self.tokens
        if isinstance(tokens.length, int):
            return self._rewrite.constant([tokens.length], "tokens")
        return self._once("tokens", lambda: self._token_size(tokens.sequence_axis, "tokens"))

    def _batch_size(self) -> ir.Value:
        """B as an int64 ``[1]``."""
        axis = self.tokens.batch_axis
        assert axis is not None
        if isinstance(self.tokens.batch, int):
            return self._rewrite.constant([self.tokens.batch], "batch")
        return self._once("batch", lambda: self._token_size(axis, "batch"))

    def _token_size(self, axis: int, name: str) -> ir.Value:
        value = self.tokens.value
        self.sources.setdefault(value)
        sizes = self._once("token_shape", lambda: self._shape_of(value, "token_shape"))
        return slice_axis(self._rewrite, sizes, (axis, axis + 1), 0, name=name, shape=[1])

    def _shape_of(self, value: ir.Value, name: str) -> ir.Value:
        return self._emit("Shape", [value], name, None)

    def _batch_name(self) -> int | str | None:
        return None if self.tokens.batch is None else dim_name(self.tokens.batch)

    # ---- emitting -------------------------------------------------------------------------------------------------

    def _once(self, key: str, make: Callable[[], ir.Value]) -> ir.Value:
        """What ``make`` emits at the start of the graph, once."""
        if key not in self._made:
            with self._rewrite.prologue():
                self._made[key] = make()
        return self._made[key]

    def _emit(
        self,
        op_type: str,
        inputs: list[ir.Value],
        name: str,
        shape: list[int | str | None] | list[int] | None,
        attributes: dict[str, int] | None = None,
    ) -> ir.Value:
        """A node that makes int64."""
        return self._rewrite.emit(op_type, inputs, attributes, name=name, dtype=_INT64, shape=shape)
