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
    from graphsurgery.patterns.attention.sites import AttentionSite

__all__ = ["LOW", "Mask", "MaskValues", "find_mask"]

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
    """The mask of an attention, or the masks where the exporter applies one after the other.

    Attributes:
        values: what is added to the scores, or the conditions that select between them and something low.
        boolean: there is one, a condition.
        attended: for that condition, which of its values means that the key is attended.
        steps: where there are several, the nodes of the chain from the first that masks to the last.
        key: equal for masks that do the same in two layers.
    """

    values: tuple[ir.Value, ...]
    boolean: bool
    attended: bool = True
    steps: tuple[ir.Node, ...] = dataclasses.field(default=(), compare=False)
    key: tuple[object, ...] = ()

    @property
    def value(self) -> ir.Value:
        """The first of the values."""
        return self.values[0]


def find_mask(site: AttentionSite, wide: Sequence[ir.Value]) -> Mask | str:
    """The masks of ``site``, by which columns can be dropped, or why they cannot.

    Args:
        site: the attention.
        wide: operands of its chain that have rows and columns, or columns alone.
    """
    if not wide:
        return "no operand of the chain has columns"
    masking = [node for node in site.chain if any(value in node.inputs for value in wide)]
    first, last = site.chain.index(masking[0]), site.chain.index(masking[-1])
    plain = {site.sink.join if site.sink else None, *site.stabiliser, *masking}
    late = [node for node in site.chain[first:] if node not in plain and not is_op(node, "Cast", "Identity")]
    if late:
        return f"node {late[0].name!r} ({late[0].op_type}) changes the scores behind the mask"
    inside = {output for item in (site.scores, *site.chain) for output in item.outputs}
    values = MaskValues(site.body)
    for node in masking:
        reason = _why_no_mask(node, [value for value in wide if value in node.inputs], inside, values)
        if reason is not None:
            return reason
    steps = site.chain[first : last + 1]
    if len(steps) > 1:
        key = tuple((node.op_type, *(_named(item, inside) for item in node.inputs)) for node in steps)
        return Mask(tuple(wide), boolean=False, steps=steps, key=key)
    if is_op(masking[0], "Where"):
        return Mask(tuple(wide), boolean=True, attended=masking[0].inputs[1] in inside)
    return Mask(tuple(wide), boolean=False)


def _named(value: ir.Value | None, inside: set[ir.Value]) -> object:
    """What an operand is for comparing layers: a value of the chain, a constant by its contents, any other by itself."""
    if value is None or value in inside:
        return None
    array = constant_of(value)
    return value if array is None else (array.dtype.str, array.shape, array.tobytes())


def _why_no_mask(node: ir.Node, wide: list[ir.Value], inside: set[ir.Value], values: MaskValues) -> str | None:
    """Why ``node``, which takes ``wide`` from outside, may do more than mask; None where it only masks."""
    if is_op(node, "Where") and node.inputs[0] not in inside:
        yes, no = node.inputs[1], node.inputs[2]
        if (yes in inside and values.low(no)) or (no in inside and values.low(yes)):
            return None
        return f"node {node.name!r} replaces scores by something that is not low"
    if is_op(node, "Add") and all(values.zero_or_low(value) for value in wide):
        return None
    return f"{wide[0].name!r} is not known to be zero or low only"


def _filled(node: ir.Node) -> float:
    attribute = node.attributes.get("value")
    return 0.0 if attribute is None else float(attribute.as_tensor().numpy().reshape(-1)[0])


class MaskValues:
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
