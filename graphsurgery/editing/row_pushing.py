"""Selecting rows of a mask by selecting from what it is made of.

A finished mask ``[B, 1, S, T]`` is shared by all layers. Selecting rows from it would keep all of it alive for the one
layer that needs a row; replaying its last steps on selected rows of its sources does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.slices import Blocked, Lift, lift
from graphsurgery.editing.row_selection import Placement, place
from graphsurgery.patterns.rows import may_be

if TYPE_CHECKING:
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.analysis.slices import RowAxis
    from graphsurgery.editing.row_selection import RowSelector
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.rewrite import Rewrite

__all__ = ["RowPusher"]

_STEPS = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Where", "Cast", "Identity", "Not", "And", "Or", "Xor", "Neg"),
        *("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Min", "Max", "Expand", "Slice"),
        *("ReduceSum", "ReduceMax", "ReduceMin"),
    }
)
_INT64 = ir.DataType.INT64
_MAX_DEPTH = 32


class RowPusher:
    """Selects rows, of values that are made of something smaller by selecting there.

    Args:
        rewrite: where nodes are inserted.
        selector: selects rows of one value.
        view: shapes before the edit.
        tokens: where B and S come from.
    """

    def __init__(self, rewrite: Rewrite, selector: RowSelector, view: ShapeView, tokens: TokenInput) -> None:
        self._rewrite = rewrite
        self._selector = selector
        self._view = view
        self._tokens = tokens
        self._made: dict[tuple[ir.Value, Placement], ir.Value] = {}
        self._wide: dict[ir.Value, bool] = {}
        self._features: set[ir.Value] = set()

    def select(self, value: ir.Value, at: Placement) -> ir.Value:
        """The wanted rows of ``value``."""
        key = (value, at)
        if key not in self._made:
            pushed = self._pushed(value, at, at, 0) if self._is_wide(value, at.rows) else None
            self._made[key] = pushed if pushed is not None else self._selector.select(value, at)
        return self._made[key]

    def _is_wide(self, value: ir.Value, rows: RowAxis) -> bool:
        """Whether ``value`` has columns as long as the sequence beside its rows, or is made from something that has.

        Where the length of the sequence is a number, features may be as many. They are what the chain begins with, and
        the columns of a mask are not: it is made wide by its own steps, or was fed.
        """
        if value not in self._wide:
            # Without recursion: the residual stream leads through every layer.
            seen = {value: rows}
            waiting = [value]
            found = features = False
            numbers = isinstance(self._tokens.length, int)
            while waiting and not features and (numbers or not found):
                item = waiting.pop()
                if item in self._wide:
                    found |= self._wide[item]
                    features = item in self._features
                    continue
                columns = self._has_columns(item, seen[item])
                found |= columns
                sources = self._row_sources(item, seen[item])
                features = numbers and columns and not sources and self._is_computed(item)
                for source, there in sources:
                    if source not in seen:
                        seen[source] = there
                        waiting.append(source)
            found &= not features
            if features:
                self._features.add(value)
            elif not found:
                self._wide.update(dict.fromkeys(seen, False))
            self._wide[value] = found
        return self._wide[value]

    def _is_computed(self, value: ir.Value) -> bool:
        """Whether ``value`` holds computed real numbers, and was not fed."""
        dtype = self._view.dtype(value)
        return value.producer() is not None and (dtype is None or dtype.is_floating_point())

    def _has_columns(self, value: ir.Value, rows: RowAxis) -> bool:
        if rows.flat:
            return False
        shape, length = self._view.shape(value), self._tokens.length
        for axis, size in enumerate(shape or ()):
            if axis == rows.axis or (self._tokens.batch is not None and may_be(size, self._tokens.batch)):
                continue
            if not isinstance(size, int) or (isinstance(length, int) and size >= length > 1):
                return True
        return False

    def _row_sources(self, value: ir.Value, rows: RowAxis) -> list[tuple[ir.Value, RowAxis]]:
        """The operands of the step that makes ``value`` which carry its rows."""
        node = value.producer()
        if rows.flat or node is None or node.domain or node.op_type not in _STEPS:
            return []
        lifted = lift(node, value.index() or 0, rows, self._view, self._rewrite.model)
        if isinstance(lifted, Blocked):
            return []
        pairs = ((node.inputs[index], there) for index, there in sorted(lifted.rows.items()))
        return [(item, there) for item, there in pairs if item is not None]

    def _pushed(self, value: ir.Value, at: Placement, reader: Placement, depth: int) -> ir.Value | None:
        """A copy of what makes ``value``, on selected rows; None where its last step cannot be replayed.

        ``reader`` is the nearest placement further down that has a batch axis.
        """
        node = value.producer()
        if node is None or node.domain or node.op_type not in _STEPS or depth > _MAX_DEPTH:
            return None
        if len(node.outputs) != 1 or node.graph is not self._rewrite.model.graph:
            return None
        lifted = lift(node, 0, at.rows, self._view, self._rewrite.model)
        if isinstance(lifted, Blocked) or lifted.contracts:
            return None
        reader = at if at.batch_axis is not None else reader
        sources = self._sources(node, lifted, value, reader)
        if sources is None:
            return None
        inputs: list[ir.Value | None] = list(node.inputs)
        for index, (item, there) in sources.items():
            inner = self._pushed(item, there, reader, depth + 1) if self._is_wide(item, there.rows) else None
            inputs[index] = inner if inner is not None else self._selector.select(item, there)
        self._rewrite.after(value)
        for patch in lifted.patches:
            operand = node.inputs[patch.input]
            assert operand is not None
            entry = 1 if node.op_type == "Expand" and lifted.rows else None
            inputs[patch.input] = self._operand(operand, patch.position, entry)
        return self._rewrite.clone(node, inputs, name=f"{(value.name or 'mask').rsplit('/', 1)[-1]}_rows")

    def _sources(
        self, node: ir.Node, lifted: Lift, value: ir.Value, reader: Placement
    ) -> dict[int, tuple[ir.Value, Placement]] | None:
        """The operands that carry rows, and where; None where their axes are not those of the result."""
        rank = self._view.rank(value)
        found: dict[int, tuple[ir.Value, Placement]] = {}
        for index, rows in lifted.rows.items():
            item = node.inputs[index]
            assert item is not None
            there = place(item, rows, self._view, self._tokens, reader)
            if there is None or rows.flat:
                return None
            # Rows that differ between batch rows give the operand a batch axis, which must be there already.
            if self._tokens.batch not in (None, 1) and self._view.rank(item) != rank:
                return None
            found[index] = (item, there)
        return found if found or lifted.patches else None

    def _operand(self, operand: ir.Value, position: int, entry: int | None) -> ir.Value:
        """A shape operand with the number of wanted rows (or ``entry``) at ``position``."""
        rewrite = self._rewrite
        count = (
            rewrite.constant([entry], "rows") if entry is not None else self._selector.numbers.count_value(flat=False)
        )
        contents = self._view.shape_value(operand)
        known = contents.ints() if contents is not None else None
        if known is not None and entry is not None:
            return rewrite.constant([entry if place == position else size for place, size in enumerate(known)], "shape")
        length = len(contents.items) if contents is not None else None
        pieces = [] if position == 0 else [self._piece(operand, 0, position)]
        pieces.append(count)
        if length is None or position + 1 < length:
            pieces.append(self._piece(operand, position + 1, 2**63 - 1))
        return rewrite.emit("Concat", pieces, {"axis": 0}, name="shape", dtype=_INT64)

    def _piece(self, operand: ir.Value, start: int, end: int) -> ir.Value:
        bounds = [self._rewrite.constant([item], "bound") for item in (start, end, 0)]
        return self._rewrite.emit("Slice", [operand, *bounds], name="shape_part", dtype=_INT64)
