"""Attention in a spelling of its own, written out as products on ``[B, H, S, D]`` and a Softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.passes.blocking.operator_writer import OperatorWriter
from graphsurgery.patterns.attention.spelled import SpelledAttention, axes_behind
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.patterns.attention.spelled import SpelledProduct

__all__ = ["Respeller"]


class Respeller(OperatorWriter):
    """Writes the whole attention in front of its value product, and lets everything read that."""

    def write(self) -> ir.Node:
        """The plain spelling.

        Returns:
            The value product, by which the attention is found again.
        """
        site = self.site
        assert isinstance(site, SpelledAttention)
        self._groups = site.groups
        self._axes = axes_behind(site.chain, site.scores.node.outputs[0], tuple(site.scores.result_axes))
        query = self._merged(self._ordered(site.scores.left, site.scores.left_axes, self._order("sd"), "queries"))
        keys = self._operand(site.scores, "dt", "keys")
        kind = self._type(site.scores.node)
        scores = self._scaled(self.emit("MatMul", [query, keys], "scores", dtype=kind), site.scores.scale, kind)
        made: dict[ir.Value, ir.Value] = {site.scores.node.outputs[0]: scores}
        for node in site.chain:
            self._replay(node, made)
        source = made[site.softmax_input]
        made[site.softmax.outputs[0]] = self.emit(
            "Softmax", [source], "weights", {"axis": -1}, dtype=self._type(site.softmax)
        )
        for node in site.tail:
            self._replay(node, made)
        values = self._operand(site.values, "td", "values")
        kind = self._type(site.node)
        product = self.emit("MatMul", [made[site.values.left], values], "attended", dtype=kind)
        result, axes = self._scaled(product, site.values.scale, kind), "bhsd"
        if self._groups is not None:
            features = self.view.dim(site.values.right, site.values.right_axes.index("d"))
            assert isinstance(features, int)
            shape = self.rewrite.constant([0, *self._groups, -1, features], "heads_in_groups")
            result, axes = self.emit("Reshape", [result, shape], "heads_in_groups", dtype=kind), "bkgsd"
        result = self._ordered(result, axes, site.values.result_axes, "attended")
        self.rewrite.replace_all_uses(site.node.outputs[0], result)
        made_by = product.producer()
        assert made_by is not None
        return made_by

    def _scaled(self, value: ir.Value, factor: float, dtype: ir.DataType) -> ir.Value:
        if factor == 1:
            return value
        number = self.rewrite.constant(np.asarray(factor, dtype.numpy()), "factor")
        return self.emit("Mul", [value, number], "scaled", dtype=dtype)

    def _type(self, node: ir.Node) -> ir.DataType:
        return self.view.dtype(node.outputs[0]) or self.dtype

    def _order(self, last: str) -> str:
        return ("bkg" if self._groups is not None else "bh") + last

    def _ordered(self, value: ir.Value, axes: str, wanted: str, name: str) -> ir.Value:
        if axes == wanted:
            return value
        dtype = self.view.dtype(value) or value.dtype
        return self.emit(
            "Transpose", [value], f"{name}_in_order", {"perm": [axes.index(axis) for axis in wanted]}, dtype=dtype
        )

    def _merged(self, value: ir.Value) -> ir.Value:
        """``[B, G, R, S, D]`` as ``[B, G*R, S, D]``."""
        if self._groups is None:
            return value
        site = self.site
        assert isinstance(site, SpelledAttention)
        features = self.view.dim(site.scores.left, site.scores.left_axes.index("d"))
        assert isinstance(features, int)
        shape = self.rewrite.constant([0, self._groups[0] * self._groups[1], -1, features], "heads_together")
        return self.emit("Reshape", [value, shape], "heads_together", dtype=self.view.dtype(site.scores.left))

    def _operand(self, product: SpelledProduct, last: str, name: str) -> ir.Value:
        """Keys or values for every query head, their last axes as ``last`` says."""
        value, axes = product.right, product.right_axes
        dtype = self.view.dtype(value)
        if self._groups is None:
            return self._ordered(value, axes, "bh" + last, name)
        groups, repeats = self._groups
        features = self.view.dim(value, axes.index("d"))
        assert isinstance(features, int)
        if "g" in axes:
            apart = self._ordered(value, axes, "bkgtd", name)
        else:
            by_group = self._ordered(value, axes, "bktd", name)
            apart = self.unsqueeze(by_group, [2], f"{name}_of_groups", dtype)
        spread = self.rewrite.constant([1, groups, repeats, 1, 1], "every_head")
        every = self.emit("Expand", [apart, spread], f"{name}_of_every_head", dtype=dtype)
        shape = self.rewrite.constant([0, groups * repeats, -1, features], "heads_together")
        together = self.emit("Reshape", [every, shape], f"{name}_together", dtype=dtype)
        return self._ordered(together, "bhtd", "bh" + last, name)

    def _replay(self, node: ir.Node, made: dict[ir.Value, ir.Value]) -> None:
        through = next((item for item in node.inputs if item in made), None)
        if is_op(node, "Transpose") and through is not None:
            made[node.outputs[0]] = made[through]
            return
        axes = "".join(self._axes[through]) if through in self._axes else "bhst"
        inputs = [
            None if item is None else made[item] if item in made else self._beside(item, axes) for item in node.inputs
        ]
        made[node.outputs[0]] = self.rewrite.clone(node, inputs, name=node.op_type.lower())

    def _beside(self, value: ir.Value, axes: str) -> ir.Value:
        """An operand beside scores with ``axes``, its own in the order ``[B, H, S, T]``, two axes of heads made one."""
        shape = self.view.shape(value)
        if shape is None or all(size == 1 for size in shape):
            return value
        if self._groups is None and axes != "bhst":
            if len(shape) < len(axes):
                kind = self.view.dtype(value)
                value = self.unsqueeze(value, list(range(len(axes) - len(shape))), "every_axis", kind)
            return self._ordered(value, axes, "bhst", "beside")
        if self._groups is None or len(shape) < 4:
            return value
        dtype = self.view.dtype(value)
        if all(size == 1 for size in shape[-4:-2]):
            axis = len(shape) - 3
            if self.rewrite.opset < 13:
                return self.rewrite.emit("Squeeze", [value], {"axes": [axis]}, name="fewer_axes", dtype=dtype)
            operand = self.rewrite.constant([axis], "axis")
            return self.rewrite.emit("Squeeze", [value, operand], name="fewer_axes", dtype=dtype)
        sizes = [size for size in shape if isinstance(size, int)]
        merged = [*sizes[:-4], sizes[-4] * sizes[-3], *sizes[-2:]]
        return self.emit("Reshape", [value, self.rewrite.constant(merged, "merged")], "heads_together", dtype=dtype)
