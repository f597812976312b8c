"""What writing out an attention operator takes, whichever it is: nodes in front of it, heads, masks, the product."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.patterns.attention.sites import FusedAttention
    from graphsurgery.rewrite import Rewrite

__all__ = ["FLOATS", "OperatorWriter", "has_input", "has_output"]

_INT64 = ir.DataType.INT64
_BOOL = ir.DataType.BOOL
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)


def has_input(node: ir.Node, index: int) -> bool:
    """Whether an optional input is given."""
    return index < len(node.inputs) and node.inputs[index] is not None


def has_output(node: ir.Node, index: int) -> bool:
    """Whether an output is used."""
    if index >= len(node.outputs):
        return False
    output = node.outputs[index]
    return bool(output.uses()) or output.is_graph_output()


@dataclasses.dataclass
class OperatorWriter:
    """Inserts the nodes that stand for one operator, in front of it."""

    rewrite: Rewrite
    site: FusedAttention

    def __post_init__(self) -> None:
        """Start in front of the operator."""
        self.node = self.site.node
        self.view = self.site.body.view
        dtype = self.view.dtype(self.site.query)
        assert dtype is not None
        self.dtype = dtype
        self.rewrite.before(self.node)

    def emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: dict[str, object] | None = None,
        *,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """A node whose output has the type of the queries unless told otherwise."""
        return self.rewrite.emit(op_type, inputs, attributes, name=name, dtype=dtype or self.dtype)

    def number(self, number: float) -> ir.Value:
        """A scalar of the type of the queries."""
        return self.rewrite.constant(np.asarray(number, dtype=self.dtype.numpy()), "number")

    def attribute_int(self, name: str, default: int = 0) -> int:
        """An integer attribute of the operator."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_int()

    def attribute_float(self, name: str, default: float) -> float:
        """A float attribute of the operator."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_float()

    def unsqueeze(self, value: ir.Value, axes: list[int], name: str, dtype: ir.DataType | None = None) -> ir.Value:
        """Axes of size 1, in the form of the model's opset."""
        kind = dtype or value.dtype
        if self.rewrite.opset < 13:
            return self.rewrite.emit("Unsqueeze", [value], {"axes": axes}, name=name, dtype=kind)
        return self.rewrite.emit("Unsqueeze", [value, self.rewrite.constant(axes, "axes")], name=name, dtype=kind)

    def part(self, value: ir.Value, axis: int, start: int, end: int, name: str) -> ir.Value:
        """Positions ``start`` to ``end`` of an axis."""
        constant = self.rewrite.constant
        operands = [constant([start], "start"), constant([end], "end"), constant([axis], "axis")]
        return self.emit("Slice", [value, *operands], name)

    def by_heads(self, value: ir.Value, heads: int, features: int, name: str) -> ir.Value:
        """``[B, S, H*D]`` as ``[B, H, S, D]``."""
        shape = self.rewrite.constant([0, 0, heads, features], "heads_apart")
        apart = self.emit("Reshape", [value, shape], f"{name}_apart")
        return self.heads_first(apart, name)

    def heads_first(self, value: ir.Value, name: str) -> ir.Value:
        """``[B, S, H, D]`` as ``[B, H, S, D]``."""
        return self.emit("Transpose", [value], f"{name}_by_head", {"perm": [0, 2, 1, 3]})

    def together(self, product: ir.Value, width: int) -> ir.Value:
        """``[B, H, S, D]`` as ``[B, S, H*D]``."""
        turned = self.emit("Transpose", [product], "heads_last", {"perm": [0, 2, 1, 3]})
        return self.emit("Reshape", [turned, self.rewrite.constant([0, 0, width], "joined")], "joined")

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of an axis, a scalar."""
        sizes = self.emit("Shape", [value], "sizes", dtype=_INT64)
        index = self.rewrite.constant(axis, "axis")
        return self.emit("Gather", [sizes, index], "size", {"axis": 0}, dtype=_INT64)

    def numbers(self, value: ir.Value, axis: int) -> ir.Value:
        """0, 1, .. size-1 of an axis."""
        constant = self.rewrite.constant
        size = self.size(value, axis)
        return self.emit("Range", [constant(0, "zero"), size, constant(1, "one")], "numbers", dtype=_INT64)

    def causal(self, query: ir.Value, axis: int, key: ir.Value, past: ir.Value | None) -> ir.Value:
        """Which of the keys ``[.., T, D]`` each query may attend: bool ``[S, T]``; the frontier starts behind the past."""
        rows, columns = self.numbers(query, axis), self.numbers(key, 2)
        if past is not None:
            rows = self.emit("Add", [rows, self.size(past, 2)], "row_numbers", dtype=_INT64)
        rows = self.unsqueeze(rows, [1], "row_column", _INT64)
        return self.at_most(columns, rows, "causal")

    def at_most(self, left: ir.Value, right: ir.Value, name: str) -> ir.Value:
        """``left <= right``, in the form of the model's opset."""
        if self.rewrite.opset >= 12:
            return self.emit("LessOrEqual", [left, right], name, dtype=_BOOL)
        return self.emit("Not", [self.emit("Greater", [left, right], "more", dtype=_BOOL)], name, dtype=_BOOL)
