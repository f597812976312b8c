"""Selecting rows: the nodes that compute which rows are wanted, and those that take them.

The last row that is wanted of each batch row is found once a model, from graph inputs alone, so it sits at the start of
the graph; the selections sit right behind the values that they select from. Everything emitted is valid from opset
11 on (``last`` with ``keep=1`` from opset 1 on).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.dims import Unknown
from graphsurgery.patterns.rows import batch_axis_of
from graphsurgery.versioned_ops import INT64_MAX, reduce_max, reshape, slice_axis, squeeze, unsqueeze

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.analysis.slices import RowAxis
    from graphsurgery.contracts import IndexMode
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.rewrite import Rewrite

__all__ = ["Placement", "RowPlan", "RowSelector", "dim_name", "lowest_opset", "place"]

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


def lowest_opset(index: IndexMode, keep: int, *, flat: bool) -> int:
    """The lowest opset of the default domain in which a selection can be written."""
    return 1 if index == "last" and keep == 1 and not flat else 11


def dim_name(size: Dim) -> int | str | None:
    """``size`` as an onnx-ir dim; None for a size without a name."""
    if isinstance(size, int):
        return size
    return None if isinstance(size.atom, Unknown) else str(size)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a value has its rows and its batch.

    Attributes:
        rows: the row axis.
        batch_axis: None where there is none (flat, packed, a batch of 1), or its rows are the same for all batches.
        shared: its rows are the same for all batches, and all axes in front of them have size 1.
        gap: where ``shared``, the number of axes that its reader has between batch and rows.
    """

    rows: RowAxis
    batch_axis: int | None
    shared: bool = False
    gap: int = 0


def place(
    value: ir.Value, rows: RowAxis, view: ShapeView, tokens: TokenInput, reader: Placement | None = None
) -> Placement | None:
    """Where ``value`` has its rows and its batch; None where rows cannot be selected for each batch row.

    Args:
        value: carries the rows on ``rows``.
        rows: see above.
        view: shapes.
        tokens: where B and S come from.
        reader: of the result of the node that reads ``value``, for values that are broadcast over the batch.
    """
    if rows.flat or tokens.batch is None or tokens.batch == 1:
        return Placement(rows, None)
    shape = view.shape(value)
    if shape is None:
        return Placement(rows, rows.axis - 1) if rows.axis else None
    batch_axis = batch_axis_of(shape, rows, tokens)
    if batch_axis is not None:
        return Placement(rows, batch_axis)
    if reader is None or reader.batch_axis is None or reader.batch_axis > reader.rows.axis:
        return None
    if any(size != 1 for size in shape[: rows.axis]):
        return None
    return Placement(rows, None, shared=True, gap=reader.rows.axis - reader.batch_axis - 1)


class RowSelector:
    """Emits the selections of one plan into one model.

    Args:
        rewrite: where nodes are inserted.
        plan: which rows.
        tokens: where B and S come from.
        view: shapes and element types before the edit.

    Attributes:
        sources: the graph inputs that what was emitted reads.
    """

    def __init__(self, rewrite: Rewrite, plan: RowPlan, tokens: TokenInput, view: ShapeView) -> None:
        self._rewrite = rewrite
        self._view = view
        self._plan = plan
        self._tokens = tokens
        self._made: dict[str, ir.Value] = {}
        self._selected: dict[tuple[ir.Value, Placement], ir.Value] = {}
        self.sources: dict[ir.Value, None] = {}

    # ---- taking rows ----------------------------------------------------------------------------------------------

    def select(self, value: ir.Value, at: Placement) -> ir.Value:
        """The wanted rows of ``value``, emitted behind it; the same value is selected from once."""
        key = (value, at)
        if key not in self._selected:
            self._selected[key] = self._select(value, at)
        return self._selected[key]

    def _select(self, value: ir.Value, at: Placement) -> ir.Value:
        plan, dtype, shape = self._plan, self._view.dtype(value), self._view.shape(value)
        rows, rewrite = at.rows, self._rewrite
        kept: list[int | str | None] | None = None
        if shape is not None:
            kept = [dim_name(size) for size in shape]
            kept[rows.axis] = self.row_count(flat=rows.flat)
        if plan.index == "last" and plan.keep == 1 and not rows.flat:
            rewrite.after(value)
            return slice_axis(rewrite, value, (-1, INT64_MAX), rows.axis, name="rows", dtype=dtype, shape=kept)
        if at.batch_axis is None and not at.shared:
            indices = self._flat_indices() if rows.flat and self._tokens.batch != 1 else self._stream_indices()
            rewrite.after(value)
            return rewrite.emit("Gather", [value, indices], {"axis": rows.axis}, name="rows", dtype=dtype, shape=kept)
        if at.shared:
            return self._select_shared(value, at, dtype)
        if (at.batch_axis, rows.axis) == (0, 1):
            return self._gather_batched(value, dtype, kept)
        assert shape is not None
        assert at.batch_axis is not None
        rest = [axis for axis in range(len(shape)) if axis not in (at.batch_axis, rows.axis)]
        order = [at.batch_axis, rows.axis, *rest]
        rewrite.after(value)
        front = rewrite.emit("Transpose", [value], {"perm": order}, name="batch_first", dtype=dtype)
        picked = self._gather_batched(front, dtype, None)
        back = [order.index(axis) for axis in range(len(order))]
        return rewrite.emit("Transpose", [picked], {"perm": back}, name="rows_in_place", dtype=dtype, shape=kept)

    def _select_shared(self, value: ir.Value, at: Placement, dtype: ir.DataType | None) -> ir.Value:
        """Rows that are the same for all batches, picked for each: ``[1, .., S, ...]`` becomes ``[B, .., N, ...]``."""
        rewrite, indices = self._rewrite, self.indices()
        rewrite.after(value)
        if at.rows.axis:
            value = squeeze(rewrite, value, range(at.rows.axis), name="rows_of_all")
        picked = rewrite.emit("Gather", [value, indices], {"axis": 0}, name="rows", dtype=dtype)
        return unsqueeze(rewrite, picked, range(1, at.gap + 1), name="rows_in_place") if at.gap else picked

    def _gather_batched(
        self,
        value: ir.Value,
        dtype: ir.DataType | None,
        kept: list[int | str | None] | None,
    ) -> ir.Value:
        """``value[b, indices[b]]`` for a batch-first value ``[B, S, ...]``."""
        rewrite = self._rewrite
        if rewrite.opset >= 12:
            wide = self._wide_indices()
            rewrite.after(value)
            return rewrite.emit("GatherND", [value, wide], {"batch_dims": 1}, name="rows", dtype=dtype, shape=kept)
        # Before opset 12 GatherND has no batch axes: the batch number goes into the indices.
        pairs = self._batch_pairs()
        rewrite.after(value)
        return rewrite.emit("GatherND", [value, pairs], name="rows", dtype=dtype, shape=kept)

    # ---- how many rows --------------------------------------------------------------------------------------------

    def row_count(self, *, flat: bool) -> int | str | None:
        """The number of rows that a selection leaves, as a dim: N; B*N where flat; a name for runtime streams."""
        keep, batch = self._plan.keep, self._tokens.batch
        if batch is None and self._plan.index == "runtime":
            return "selected_rows" if keep == 1 else f"{keep}*selected_rows"
        if not flat or batch is None:
            return keep
        return dim_name(batch * keep)

    def row_count_value(self, *, flat: bool) -> ir.Value:
        """The same as an int64 ``[1]``, for a count that is only known at run time."""

        def make() -> ir.Value:
            if self._tokens.batch is None:
                return self._shape_of(self._stream_indices(), "selected_rows")
            keep = self._rewrite.constant([self._plan.keep], "keep")
            return self._emit("Mul", [self._batch_size(), keep], "kept_rows", [1])

        count = self.row_count(flat=flat)
        return self._rewrite.constant([count], "rows") if isinstance(count, int) else self._once("kept_rows", make)

    def token_count_value(self, *, flat: bool) -> ir.Value:
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

    def _flat_indices(self) -> ir.Value:
        """Row numbers within B*S, int64 ``[B*N]``."""

        def make() -> ir.Value:
            rows = self.indices()
            starts = self._emit("Mul", [self._batch_numbers(), self._sequence_length()], "batch_starts", None)
            flat = self._emit("Add", [rows, starts], "flat_rows", None)
            return reshape(self._rewrite, flat, [-1], name="flat_row_indices")

        return self._once("flat_indices", make)

    def _stream_indices(self) -> ir.Value:
        """Row numbers within a packed stream or a batch of 1, int64 ``[R*N]``."""
        return self._once(
            "stream_indices", lambda: reshape(self._rewrite, self.indices(), [-1], name="stream_row_indices")
        )

    def _wide_indices(self) -> ir.Value:
        """Row numbers within S, each an index of its own: int64 ``[B, N, 1]``."""
        shape = [self._batch_name(), self._plan.keep, 1]
        return self._once(
            "wide_indices",
            lambda: unsqueeze(self._rewrite, self.indices(), [2], name="row_indices", shape=shape),
        )

    def _batch_pairs(self) -> ir.Value:
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
        plan, rewrite = self._plan, self._rewrite
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
        if self._tokens.batch is None or self._tokens.batch == 1:
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
        keep = self._plan.keep
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
        tokens = self._tokens
        if isinstance(tokens.length, int):
            return self._rewrite.constant([tokens.length], "tokens")
        return self._once("tokens", lambda: self._token_size(tokens.sequence_axis, "tokens"))

    def _batch_size(self) -> ir.Value:
        """B as an int64 ``[1]``."""
        axis = self._tokens.batch_axis
        assert axis is not None
        if isinstance(self._tokens.batch, int):
            return self._rewrite.constant([self._tokens.batch], "batch")
        return self._once("batch", lambda: self._token_size(axis, "batch"))

    def _token_size(self, axis: int, name: str) -> ir.Value:
        value = self._tokens.value
        self.sources.setdefault(value)
        sizes = self._once("token_shape", lambda: self._shape_of(value, "token_shape"))
        return slice_axis(self._rewrite, sizes, (axis, axis + 1), 0, name=name, shape=[1])

    def _shape_of(self, value: ir.Value, name: str) -> ir.Value:
        return self._emit("Shape", [value], name, None)

    def _batch_name(self) -> int | str | None:
        return None if self._tokens.batch is None else dim_name(self._tokens.batch)

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
