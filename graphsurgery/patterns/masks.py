"""Masks of attention: which operand of the chain is one, and whether it can only say yes or no.

A mask that is zero where a key is attended and at least 10,000 lower elsewhere tells which keys a block of queries
needs. A position bias tells no such thing, however low it may fall, so columns are dropped by a mask only where its
values are known to be zero or low from how they are made.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.constants import constant_of
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.patterns.attention_sites import AttentionSite

__all__ = ["LOW", "Mask", "find_mask"]

LOW = -1e4
"""What is this far below the row's maximum takes no part in a softmax."""

_PASSING = frozenset(
    {
        *("Identity", "Cast", "CastLike", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice", "Tile"),
        *("Trilu", "Gather", "GatherND", "Dropout"),
    }
)
_BOOLEAN = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Xor", "IsNaN"})
_MAX_DEPTH = 64


@dataclasses.dataclass(frozen=True)
class Mask:
    """The mask of an attention.

    Attributes:
        value: added to the scores, or the condition that selects between them and a low constant.
        boolean: ``value`` is a condition.
        attended: for a condition, which of its values means that the key is attended.
    """

    value: ir.Value
    boolean: bool
    attended: bool = True


def find_mask(site: AttentionSite, wide: Sequence[ir.Value]) -> Mask | str:
    """The one mask of ``site`` that can drop columns, or why there is none.

    Args:
        site: the attention.
        wide: operands of its chain that have rows and columns, or columns alone.
    """
    if not wide:
        return "no operand of the chain has columns"
    if len(wide) > 1:
        names = ", ".join(repr(value.name) for value in wide)
        return f"several operands have columns ({names})"
    value = wide[0]
    node = next(item for item in site.chain if value in item.inputs)
    behind = site.chain[site.chain.index(node) + 1 :]
    plain = {site.sink.join if site.sink else None, *site.stabiliser}
    late = [item for item in behind if item not in plain and not is_op(item, "Cast", "Identity")]
    if late:
        return f"node {late[0].name!r} ({late[0].op_type}) changes the scores behind the mask"
    if is_op(node, "Where") and node.inputs[0] is value:
        return _condition(node, value, site)
    if is_op(node, "Add") and _Values(site.body).zero_or_low(value):
        return Mask(value, boolean=False)
    return f"{value.name!r} is not known to be zero or low only"


def _condition(node: ir.Node, value: ir.Value, site: AttentionSite) -> Mask | str:
    yes, no = node.inputs[1], node.inputs[2]
    inside = {output for item in (site.scores, *site.chain) for output in item.outputs}
    values = _Values(site.body)
    if yes in inside and values.low(no):
        return Mask(value, boolean=True, attended=True)
    if no in inside and values.low(yes):
        return Mask(value, boolean=True, attended=False)
    return f"node {node.name!r} replaces scores by something that is not low"


def _filled(node: ir.Node) -> float:
    attribute = node.attributes.get("value")
    return 0.0 if attribute is None else float(attribute.as_tensor().numpy().reshape(-1)[0])


class _Values:
    """What the elements of a value can be, by how it is made; a parameter is what every caller hands over."""

    def __init__(self, body: Body) -> None:
        self._bodies: dict[ir.Graph, Body] = {}
        self._known: dict[ir.Value, bool] = {}
        pending = [body]
        while pending:
            item = pending.pop()
            if item.graph not in self._bodies:
                self._bodies[item.graph] = item
                pending += [call.caller for call in item.calls]

    def _handed(self, value: ir.Value | None) -> list[ir.Value]:
        """What callers hand over for a parameter; nothing for every other value."""
        graph = value.graph if value is not None and value.producer() is None else None
        body = self._bodies.get(graph) if graph is not None else None
        if body is None or value is None:
            return []
        return [item for item, _ in body.arguments(value)]

    def numbers(self, value: ir.Value | None) -> list[float] | None:
        """The elements, where they are known."""
        array = constant_of(value) if value is not None else None
        if array is None or array.dtype.kind not in "fiub":
            return None
        return [float(item) for item in array.reshape(-1)]

    def low(self, value: ir.Value | None) -> bool:
        """Whether every element is at most :data:`LOW`."""
        numbers = self.numbers(value)
        if numbers is not None:
            return bool(numbers) and all(item <= LOW for item in numbers)
        handed = self._handed(value)
        if handed:
            return all(self.low(item) for item in handed)
        node = value.producer() if value is not None else None
        if node is not None and not node.domain and node.op_type in (*_PASSING, "ConstantOfShape"):
            if node.op_type == "ConstantOfShape":
                return _filled(node) <= LOW
            return self.low(node.inputs[0])
        return False

    def zero_or_low(self, value: ir.Value | None, depth: int = 0) -> bool:
        """Whether every element is 0 or at most :data:`LOW`."""
        if value is None or depth > _MAX_DEPTH:
            return False
        numbers = self.numbers(value)
        if numbers is not None:
            return all(item == 0 or item <= LOW for item in numbers)
        if value not in self._known:
            self._known[value] = False
            handed = self._handed(value)
            if handed:
                self._known[value] = all(self.zero_or_low(item, depth + 1) for item in handed)
            else:
                self._known[value] = self._made_zero_or_low(value.producer(), depth)
        return self._known[value]

    def _made_zero_or_low(self, node: ir.Node | None, depth: int) -> bool:
        if node is None or node.domain:
            return False

        def inner(position: int) -> bool:
            return self.zero_or_low(node.inputs[position], depth + 1)

        if node.op_type in _PASSING:
            return inner(0)
        if node.op_type == "ConstantOfShape":
            return _filled(node) == 0 or _filled(node) <= LOW
        if node.op_type == "Where":
            return inner(1) and inner(2)
        if node.op_type in ("Add", "Min", "Sum"):
            return all(inner(position) for position in range(len(node.inputs)))
        if node.op_type == "Mul":
            # 0/1 times low, in either order; zero-or-low times 0/1.
            return any(
                self._zero_or_one(node.inputs[left], depth) and (self.low(node.inputs[right]) or inner(right))
                for left, right in ((0, 1), (1, 0))
            )
        return False

    def _zero_or_one(self, value: ir.Value | None, depth: int) -> bool:
        """Whether every element is 0 or 1: a boolean that was cast, or one minus that."""
        if value is None or depth > _MAX_DEPTH:
            return False
        if value.dtype == ir.DataType.BOOL:
            return True
        numbers = self.numbers(value)
        if numbers is not None:
            return all(item in (0, 1) for item in numbers)
        handed = self._handed(value)
        if handed:
            return all(self._zero_or_one(item, depth + 1) for item in handed)
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type in _BOOLEAN:
            return True
        if node.op_type in _PASSING:
            return self._zero_or_one(node.inputs[0], depth + 1)
        if node.op_type == "Sub":
            ones = self.numbers(node.inputs[0])
            return ones is not None and all(item == 1 for item in ones) and self._zero_or_one(node.inputs[1], depth + 1)
        if node.op_type in ("Mul", "Min", "Max"):
            return all(self._zero_or_one(item, depth + 1) for item in node.inputs)
        return False
