"""What an operator asks of the sizes of its inputs: which of them must be equal.

A shape walk does not stop at an operator whose inputs do not fit; these rules say what such a node would fail on. Only
what the operator specification demands is listed, so that a node that runs is never blamed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import free_names, product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.folding import BodyPlan, Folding
    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["Contradiction", "Demand", "demands", "find_contradiction"]


@dataclasses.dataclass(frozen=True)
class Demand:
    """Two sizes that must be equal, or one of which must be 1 where they are broadcast.

    Attributes:
        left: one size.
        right: the other.
        what: what they are sizes of.
        broadcast: whether a size of 1 fits every other.
    """

    left: Dim
    right: Dim
    what: str
    broadcast: bool = False

    @property
    def broken(self) -> bool:
        """Whether both sizes are known and do not fit."""
        if not isinstance(self.left, int) or not isinstance(self.right, int) or self.left == self.right:
            return False
        return not (self.broadcast and 1 in (self.left, self.right))


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """A node that cannot run on the sizes that were given; its text is the end of a sentence.

    Attributes:
        node: the node.
        broken: what it asks, under these sizes.
        symbolic: the same as the file declares it.
    """

    node: ir.Node
    broken: Demand
    symbolic: Demand

    @property
    def names(self) -> frozenset[str]:
        """The symbolic sizes that it is about."""
        return free_names(self.symbolic.left) | free_names(self.symbolic.right)

    def __str__(self) -> str:
        name = self.node.name or self.node.outputs[0].name
        left = _sized(self.broken.left, self.symbolic.left)
        right = _sized(self.broken.right, self.symbolic.right)
        return (
            f"node {name!r} ({self.node.op_type}) needs equal sizes for {self.broken.what} and gets {left} and {right}"
        )


def _sized(number: Dim, size: Dim) -> str:
    named = not isinstance(size, int) and not any(name.startswith("?") for name in free_names(size))
    return f"{size} = {number}" if named else f"{number}"


def find_contradiction(folding: Folding, shapes: ShapeView) -> Contradiction | None:
    """The first node that runs in every call and is certain to fail under the sizes of ``folding``.

    Args:
        folding: the plan; what it drops cannot fail.
        shapes: the shapes of the same model as it is: what fails in any case is not counted.
    """
    visited: set[int] = set()
    pending: list[tuple[BodyPlan, ShapeView, ShapeView | None]] = [(folding.main, folding.view, shapes)]
    while pending:
        plan, view, before = pending.pop()
        for node in reversed(plan.certain):
            found = _broken(node, view, before)
            if found is not None:
                return found
            variant = plan.calls.get(node)
            if variant is not None and variant.plan is not None and id(variant) not in visited:
                visited.add(id(variant))
                pending.append((variant.plan, view.in_call(node), _inside(before, node)))
    return None


def _inside(view: ShapeView | None, node: ir.Node) -> ShapeView | None:
    try:
        return None if view is None else view.in_call(node)
    except ValueError:
        # Without sizes the call was not looked into.
        return None


def _broken(node: ir.Node, view: ShapeView, before: ShapeView | None) -> Contradiction | None:
    for number, demand in enumerate(demands(node, view)):
        if demand.broken:
            symbolic = list(demands(node, before)) if before is not None else []
            ours = symbolic[number] if number < len(symbolic) else demand
            return None if ours.broken and before is not None else Contradiction(node, demand, ours)
    return None


def demands(node: ir.Node, view: ShapeView) -> Iterator[Demand]:
    """What ``node`` asks of the sizes of its inputs; as many for one node whatever the sizes, where ranks are known."""
    rule = None if node.domain else _RULES.get(node.op_type)
    if rule is None:
        return
    shapes = [None if value is None else view.shape(value) for value in node.inputs]
    yield from rule(node, shapes, view)


def _broadcast(node: ir.Node, shapes: Sequence[tuple[Dim, ...] | None], _view: ShapeView) -> Iterator[Demand]:
    known = [shape for shape in shapes if shape is not None]
    # Opset 1 to 6 fitted the second operand to the first at an axis that an attribute names.
    if not known or "broadcast" in node.attributes:
        return
    for shape in known[1:]:
        yield from _aligned(known[0], shape)
    if len(known) == 3:
        yield from _aligned(known[1], known[2])


def _aligned(left: tuple[Dim, ...], right: tuple[Dim, ...]) -> Iterator[Demand]:
    for axis in range(1, min(len(left), len(right)) + 1):
        yield Demand(left[-axis], right[-axis], f"axis {-axis} of its inputs", broadcast=True)


def _reshape(node: ir.Node, shapes: Sequence[tuple[Dim, ...] | None], view: ShapeView) -> Iterator[Demand]:
    source, target = shapes[0], view.shape(node.outputs[0])
    if source is not None and target is not None:
        yield Demand(product(source), product(target), "the number of elements before and after")


def _concat(node: ir.Node, shapes: Sequence[tuple[Dim, ...] | None], _view: ShapeView) -> Iterator[Demand]:
    known = [shape for shape in shapes if shape is not None]
    attribute = node.attributes.get("axis")
    if not known or attribute is None or attribute.is_ref() or len({len(shape) for shape in known}) != 1:
        return
    axis = attribute.as_int() % max(len(known[0]), 1)
    for shape in known[1:]:
        for place, (left, right) in enumerate(zip(known[0], shape, strict=True)):
            if place != axis:
                yield Demand(left, right, f"axis {place} of its inputs")


def _matmul(_node: ir.Node, shapes: Sequence[tuple[Dim, ...] | None], _view: ShapeView) -> Iterator[Demand]:
    left, right = shapes[0], shapes[1]
    if not left or not right:
        return
    yield Demand(left[-1], right[-2] if len(right) > 1 else right[0], "columns of the left and rows of the right input")
    yield from _aligned(left[:-2], right[:-2])


def _expand(node: ir.Node, shapes: Sequence[tuple[Dim, ...] | None], view: ShapeView) -> Iterator[Demand]:
    contents = None if node.inputs[1] is None else view.shape_value(node.inputs[1])
    if shapes[0] is not None and contents is not None:
        yield from _aligned(shapes[0], contents.items)


def _split(node: ir.Node, shapes: Sequence[tuple[Dim, ...] | None], view: ShapeView) -> Iterator[Demand]:
    source, attribute = shapes[0], node.attributes.get("axis")
    if not source or (attribute is not None and attribute.is_ref()):
        return
    axis = 0 if attribute is None else attribute.as_int()
    parts = [view.dim(value, axis) for value in node.outputs]
    known = [part for part in parts if part is not None]
    if len(known) == len(parts):
        yield Demand(source[axis], sum(known), f"axis {axis} of its input and all parts together")


def _scatter_nd(_node: ir.Node, shapes: Sequence[tuple[Dim, ...] | None], _view: ShapeView) -> Iterator[Demand]:
    data, indices, updates = shapes[:3]
    if data is None or not indices or updates is None or not isinstance(indices[-1], int):
        return
    expected = indices[:-1] + data[indices[-1] :]
    for axis, (left, right) in enumerate(zip(updates, expected, strict=False)):
        yield Demand(left, right, f"axis {axis} of its updates and of what they replace")


_BROADCASTING = (
    "Add Sub Mul Div Pow Mod Min Max Sum Mean And Or Xor Equal Less Greater LessOrEqual GreaterOrEqual Where "
    "BitwiseAnd BitwiseOr BitwiseXor"
)

_RULES: dict[str, Callable[..., Iterator[Demand]]] = {
    **dict.fromkeys(_BROADCASTING.split(), _broadcast),
    "Reshape": _reshape,
    "Concat": _concat,
    "MatMul": _matmul,
    "Expand": _expand,
    "Split": _split,
    "ScatterND": _scatter_nd,
}
