"""Selecting rows: the nodes that compute which rows are wanted, and those that take them.

The last row that is wanted of each batch row is found once a model, from graph inputs alone, so it sits at the start of
the graph; the selections sit right behind the values that they select from. Everything emitted is valid from opset
11 on (``last`` with ``keep=1`` from opset 1 on).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.analysis.slices import RowAxis
    from graphsurgery.contracts import IndexMode
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.rewrite import Rewrite

__all__ = ["RowPlan", "RowSelector", "lowest_opset"]

_INT64 = ir.DataType.INT64
_INT64_MAX = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Which rows are wanted.

    Attributes:
        index: how the last wanted row of each batch row is found.
        keep: number of rows, N, that end there.
        source: the input that ``index`` reads: mask ``[B, T]``, positions ``[B, S]`` / ``[3, B, S]`` /
            ``[4, B, S]``, or the runtime index int32 ``[B, 1, 1]`` / int64 ``[B]``; None for ``last``.
        source_rank: rank of ``source``.
        planes: leading size of rank-3 positions (3 or 4).
        total: T, the width of the mask.
    """

    index: IndexMode
    keep: int
    source: ir.Value | None = None
    source_rank: int = 0
    planes: int = 0
    total: Dim | None = None


def lowest_opset(index: IndexMode, keep: int, *, flat: bool) -> int:
    """The lowest opset of the default domain in which a selection can be written."""
    return 1 if index == "last" and keep == 1 and not flat else 11


def dim_name(size: Dim) -> int | str:
    """``size`` as an onnx-ir dim."""
    return size if isinstance(size, int) else str(size)


class RowSelector:
    """Emits the selections of one plan into one model.

    Args:
        rewrite: where nodes are inserted.
        plan: which rows.
        tokens: where B and S come from.
        view: shapes and element types before the edit.
    """

    def __init__(self, rewrite: Rewrite, plan: RowPlan, tokens: TokenInput, view: ShapeView) -> None:
        self._rewrite = rewrite
        self._view = view
        self._plan = plan
        self._tokens = tokens
        self._rows: ir.Value | None = None
        self._flat_rows: ir.Value | None = None
        self._length: ir.Value | None = None
        self._selected: dict[tuple[ir.Value, RowAxis, int | None], ir.Value] = {}

    @property
    def packed(self) -> bool:
        """Whether the tokens are one stream without a batch axis."""
        return self._tokens.batch is None

    def row_count(self, *, flat: bool) -> int | str:
        """The number of rows that a selection leaves, as a dim: N; B*N where flat; unknown name for runtime streams."""
        keep = self._plan.keep
        if self.packed and self._plan.index == "runtime":
            return "selected_rows" if keep == 1 else f"{keep}*selected_rows"
        if not flat:
            return keep
        assert self._tokens.batch is not None
        return dim_name(self._tokens.batch * keep)

    def select(self, value: ir.Value, rows: RowAxis, batch_axis: int | None) -> ir.Value:
        """The wanted rows of ``value``, emitted behind it; the same value is selected from once.

        Args:
            value: carries the rows on ``rows``.
            rows: see above.
            batch_axis: where it carries the batch; None where flat or packed.
        """
        key = (value, rows, batch_axis)
        if key not in self._selected:
            self._selected[key] = self._emit(value, rows, batch_axis)
        return self._selected[key]

    # ---- taking rows ----------------------------------------------------------------------------------------------

    def _emit(self, value: ir.Value, rows: RowAxis, batch_axis: int | None) -> ir.Value:
        plan, dtype, shape = self._plan, self._view.dtype(value), self._view.shape(value)
        kept: list[int | str] | None = None
        if shape is not None:
            kept = [dim_name(size) for size in shape]
            kept[rows.axis] = self.row_count(flat=rows.flat)
        if plan.index == "last" and plan.keep == 1 and not rows.flat:
            self._rewrite.after(value)
            return self._slice(value, -1, _INT64_MAX, rows.axis, "rows", dtype, kept)
        if rows.flat or self.packed:
            indices = self._flat_indices() if rows.flat else self._stream_indices()
            self._rewrite.after(value)
            return self._rewrite.emit(
                "Gather", [value, indices], {"axis": rows.axis}, name="rows", dtype=dtype, shape=kept
            )
        indices = self.indices()
        self._rewrite.after(value)
        assert batch_axis is not None
        if (batch_axis, rows.axis) == (0, 1):
            return self._gather_batched(value, indices, shape, dtype, kept)
        assert shape is not None
        rest = [axis for axis in range(len(shape)) if axis not in (batch_axis, rows.axis)]
        order = [batch_axis, rows.axis, *rest]
        front = self._rewrite.emit("Transpose", [value], {"perm": order}, name="batch_first", dtype=dtype)
        picked = self._gather_batched(front, indices, tuple(shape[axis] for axis in order), dtype, None)
        back = [order.index(axis) for axis in range(len(order))]
        return self._rewrite.emit("Transpose", [picked], {"perm": back}, name="rows_in_place", dtype=dtype, shape=kept)

    def _gather_batched(
        self,
        value: ir.Value,
        indices: ir.Value,
        shape: tuple[Dim, ...] | None,
        dtype: ir.DataType | None,
        kept: list[int | str] | None,
    ) -> ir.Value:
        """``value[b, indices[b]]`` for a batch-first value ``[B, S, ...]``."""
        emit = self._rewrite.emit
        if self._rewrite.opset >= 12:
            batch = dim_name(self._tokens.batch) if self._tokens.batch is not None else None
            wide = self._unsqueeze(indices, 2, "row_indices", [batch, self._plan.keep, 1])
            return emit("GatherND", [value, wide], {"batch_dims": 1}, name="rows", dtype=dtype, shape=kept)
        # Before opset 12 GatherND has no batch axes: GatherElements with one index for every feature.
        assert shape is not None
        sizes = emit("Shape", [value], name="sizes", dtype=_INT64, shape=[len(shape)])
        features = self._slice(sizes, 2, len(shape), 0, "feature_sizes", _INT64, [len(shape) - 2])
        ones = self._rewrite.constant([1, 1], "ones")
        target = emit("Concat", [ones, features], {"axis": 0}, name="index_shape", dtype=_INT64, shape=[len(shape)])
        wide = indices
        for axis in range(2, len(shape)):
            wide = self._unsqueeze(wide, axis, "row_indices", None)
        spread = emit("Expand", [wide, target], name="element_indices", dtype=_INT64)
        return emit("GatherElements", [value, spread], {"axis": 1}, name="rows", dtype=dtype, shape=kept)

    # ---- which rows -----------------------------------------------------------------------------------------------

    def indices(self) -> ir.Value:
        """Row numbers within S, int64 ``[B, N]``."""
        if self._rows is None:
            self._rewrite.at_start()
            self._rows = self._window(self._last_rows())
        return self._rows

    def _flat_indices(self) -> ir.Value:
        """Row numbers within B*S, int64 ``[B*N]``."""
        if self._flat_rows is None:
            rows = self.indices()
            emit = self._rewrite.emit
            self._rewrite.at_start()
            length = self._sequence_length()
            batch = self._batch_size()
            zero, one = self._rewrite.constant(0, "zero"), self._rewrite.constant(1, "one")
            numbers = emit("Range", [zero, batch, one], name="batch_rows", dtype=_INT64)
            starts = emit("Mul", [numbers, length], name="batch_starts", dtype=_INT64)
            column = self._unsqueeze(starts, 1, "batch_start_column", None)
            flat = emit("Add", [rows, column], name="flat_rows", dtype=_INT64)
            self._flat_rows = self._reshape(flat, [-1], "flat_row_indices")
        return self._flat_rows

    def _stream_indices(self) -> ir.Value:
        """Row numbers within a packed stream, int64 ``[R*N]``."""
        if self._flat_rows is None:
            rows = self.indices()
            self._rewrite.at_start()
            self._flat_rows = self._reshape(rows, [-1], "stream_row_indices")
        return self._flat_rows

    def _last_rows(self) -> ir.Value:
        """The last wanted row of each batch row, int64 ``[B, 1]``."""
        plan, emit = self._plan, self._rewrite.emit
        batch = dim_name(self._tokens.batch) if self._tokens.batch is not None else None
        if plan.index == "last":
            return self._last_of_all(batch)
        source = plan.source
        assert source is not None
        if plan.index == "runtime":
            if source.dtype != _INT64:
                source = emit("Cast", [source], {"to": int(_INT64)}, name="index_int64", dtype=_INT64)
            return self._reshape(source, [-1, 1], "last_row")
        if plan.index == "mask":
            if plan.total != self._tokens.length:
                source = self._last_columns(source)
            attended = emit("Cast", [source], {"to": int(ir.DataType.BOOL)}, name="attended", dtype=ir.DataType.BOOL)
            source = emit(
                "Cast", [attended], {"to": int(ir.DataType.INT32)}, name="attended_int", dtype=ir.DataType.INT32
            )
        elif plan.source_rank == 3 and plan.planes == 4:
            source = emit(
                "Gather",
                [source, self._rewrite.constant(0, "first_plane")],
                {"axis": 0},
                name="positions",
                dtype=source.dtype,
            )
        elif plan.source_rank == 3:
            source = self._reduce_max(source)
        return self._arg_max(source, batch)

    def _last_of_all(self, batch: int | str | None) -> ir.Value:
        """S - 1 for every batch row."""
        length = self._sequence_length()
        one = self._rewrite.constant(1, "one")
        last = self._rewrite.emit("Sub", [length, one], name="last_row", dtype=_INT64, shape=[])
        column = self._reshape(last, [1, 1], "last_row_column")
        if self.packed:
            return column
        sizes = self._rewrite.emit("Shape", [self._tokens.value], name="token_shape", dtype=_INT64)
        rows = self._slice(sizes, 0, 1, 0, "batch_size", _INT64, [1])
        target = self._rewrite.emit(
            "Concat", [rows, self._rewrite.constant([1], "one_column")], {"axis": 0}, name="column_shape", dtype=_INT64
        )
        return self._rewrite.emit("Expand", [column, target], name="last_rows", dtype=_INT64, shape=[batch, 1])

    def _last_columns(self, mask: ir.Value) -> ir.Value:
        """The last S columns of a mask ``[B, T]``."""
        length = self._sequence_length(as_list=True)
        start = self._rewrite.emit("Neg", [length], name="mask_start", dtype=_INT64, shape=[1])
        end, axis = self._rewrite.constant([_INT64_MAX], "to_end"), self._rewrite.constant([1], "columns")
        return self._rewrite.emit("Slice", [mask, start, end, axis], name="mask_of_tokens", dtype=mask.dtype)

    def _arg_max(self, value: ir.Value, batch: int | str | None) -> ir.Value:
        """Column of the last maximum of each row, int64 ``[B, 1]``."""
        emit = self._rewrite.emit
        attributes: dict[str, int] = {"axis": 1, "keepdims": 1}
        if self._rewrite.opset >= 12:
            attributes["select_last_index"] = 1
            return emit("ArgMax", [value], attributes, name="last_row", dtype=_INT64, shape=[batch, 1])
        # Before opset 12 only the first maximum can be had: look from behind.
        constants = [self._rewrite.constant([item], "reverse") for item in (-1, -_INT64_MAX, 1, -1)]
        mirrored = emit("Slice", [value, *constants], name="mirrored", dtype=value.dtype)
        first = emit("ArgMax", [mirrored], attributes, name="rows_behind", dtype=_INT64, shape=[batch, 1])
        last = emit("Sub", [self._sequence_length(), self._rewrite.constant(1, "one")], name="end_row", dtype=_INT64)
        return emit("Sub", [last, first], name="last_row", dtype=_INT64, shape=[batch, 1])

    def _window(self, last: ir.Value) -> ir.Value:
        """The N rows that end at ``last``, not below 0: int64 ``[B, N]``."""
        keep = self._plan.keep
        if keep == 1:
            return last
        emit = self._rewrite.emit
        steps = self._rewrite.constant(list(range(1 - keep, 1)), "steps")
        rows = emit("Add", [last, steps], name="window", dtype=_INT64)
        zero = self._rewrite.constant(0, "zero")
        if self._rewrite.opset >= 12:
            return emit("Max", [rows, zero], name="wanted_rows", dtype=_INT64)
        # Before opset 12 Max takes floats only.
        positive = emit("Greater", [rows, zero], name="not_clamped", dtype=ir.DataType.BOOL)
        factor = emit("Cast", [positive], {"to": int(_INT64)}, name="not_clamped_int", dtype=_INT64)
        return emit("Mul", [rows, factor], name="wanted_rows", dtype=_INT64)

    # ---- sizes ----------------------------------------------------------------------------------------------------

    def _sequence_length(self, *, as_list: bool = False) -> ir.Value:
        """S as an int64 scalar, or ``[1]`` where ``as_list``."""
        tokens = self._tokens
        if isinstance(tokens.length, int):
            return self._rewrite.constant([tokens.length] if as_list else tokens.length, "tokens")
        if as_list:
            sizes = self._rewrite.emit("Shape", [tokens.value], name="token_shape", dtype=_INT64)
            axis = tokens.sequence_axis
            return self._slice(sizes, axis, axis + 1, 0, "tokens_list", _INT64, [1])
        if self._length is None:
            self._length = self._size(tokens.sequence_axis, "tokens")
        return self._length

    def _batch_size(self) -> ir.Value:
        tokens = self._tokens
        assert tokens.batch_axis is not None
        if isinstance(tokens.batch, int):
            return self._rewrite.constant(tokens.batch, "batch")
        return self._size(tokens.batch_axis, "batch")

    def _size(self, axis: int, name: str) -> ir.Value:
        emit = self._rewrite.emit
        sizes = emit("Shape", [self._tokens.value], name="token_shape", dtype=_INT64)
        return emit(
            "Gather", [sizes, self._rewrite.constant(axis, "axis")], {"axis": 0}, name=name, dtype=_INT64, shape=[]
        )

    # ---- operators whose form depends on the opset ----------------------------------------------------------------

    def _slice(
        self,
        value: ir.Value,
        start: int,
        end: int,
        axis: int,
        name: str,
        dtype: ir.DataType | None,
        shape: list[int | str] | list[int] | None,
    ) -> ir.Value:
        if self._rewrite.opset < 10:
            attributes = {"starts": [start], "ends": [end], "axes": [axis]}
            return self._rewrite.emit("Slice", [value], attributes, name=name, dtype=dtype, shape=shape)
        operands = [self._rewrite.constant([item], f"{name}_bounds") for item in (start, end, axis)]
        return self._rewrite.emit("Slice", [value, *operands], name=name, dtype=dtype, shape=shape)

    def _unsqueeze(self, value: ir.Value, axis: int, name: str, shape: list[int | str | None] | None) -> ir.Value:
        if self._rewrite.opset < 13:
            return self._rewrite.emit("Unsqueeze", [value], {"axes": [axis]}, name=name, dtype=_INT64, shape=shape)
        axes = self._rewrite.constant([axis], "axes")
        return self._rewrite.emit("Unsqueeze", [value, axes], name=name, dtype=_INT64, shape=shape)

    def _reduce_max(self, value: ir.Value) -> ir.Value:
        if self._rewrite.opset < 18:
            attributes = {"axes": [0], "keepdims": 0}
            return self._rewrite.emit("ReduceMax", [value], attributes, name="positions", dtype=value.dtype)
        axes = self._rewrite.constant([0], "planes")
        return self._rewrite.emit("ReduceMax", [value, axes], {"keepdims": 0}, name="positions", dtype=value.dtype)

    def _reshape(self, value: ir.Value, sizes: list[int], name: str) -> ir.Value:
        return self._rewrite.emit("Reshape", [value, self._rewrite.constant(sizes, "sizes")], name=name, dtype=_INT64)
