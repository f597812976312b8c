"""What becomes constant when sizes are known: a plan of constants, taken branches and dead nodes, made without edits.

Only shape arithmetic is folded: integers and booleans that are operands of shapes, or short lists. Index vectors made
by ``Range`` and the masks made of them stay in the graph, so that they are still recognised for what they are; so do
all floats. No tensor outside the file is read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.analysis._bound_frame import bound_frame
from graphsurgery.analysis._fold_body import BodyPlan, BodyPlanner
from graphsurgery.analysis.shapes import ShapeView

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import onnx_ir as ir

    from graphsurgery.analysis._frame import Frame
    from graphsurgery.analysis.shapes import Shapes

__all__ = ["BodyPlan", "Folding", "FunctionVariant", "plan_folding"]

_FunctionId: TypeAlias = tuple[str, str, str]


@dataclasses.dataclass(eq=False)
class FunctionVariant:
    """A function body as some of its calls need it.

    Attributes:
        function: the function.
        plan: what to do to the body; None where nothing is known of a call, so that it stays as it is.
        views: the shapes in the body, for each context in which it is called.
    """

    function: ir.Function
    plan: BodyPlan | None
    views: list[ShapeView]


@dataclasses.dataclass(frozen=True)
class Folding:
    """What to do to a model.

    Attributes:
        numbers: the sizes that were given.
        view: shapes of the main graph under them.
        main: what to do to the main graph.
        functions: the variants of each function that is still called, in the order of the calls.
    """

    numbers: Mapping[str, int]
    view: ShapeView
    main: BodyPlan
    functions: Mapping[_FunctionId, list[FunctionVariant]]

    @property
    def reveals(self) -> bool:
        """Whether more may be known once it is carried out: what a loop that never runs was thought to change."""
        bodies = [self.main, *(variant.plan for variants in self.functions.values() for variant in variants)]
        return any(body is not None and body.bypassed for body in bodies)


def plan_folding(model: ir.Model, shapes: Shapes, numbers: Mapping[str, int]) -> Folding:
    """Plan what becomes constant when the sizes called ``numbers`` have these numbers; ``model`` is not changed.

    Args:
        model: the model.
        shapes: its shapes as it is.
        numbers: number of each symbolic size; one without a name is called as ``shapes`` calls it (``?7``).

    Raises:
        InputRefusedError: a node cannot work on these sizes.
    """
    frame = bound_frame(model, shapes, numbers)
    planner = _ModelPlanner(model)
    main = planner.plan(model.graph, model.graph.outputs, frame, in_function=False)
    return Folding(numbers, ShapeView(frame), main, planner.variants)


# ---- planning -----------------------------------------------------------------------------------------------------


class _ModelPlanner:
    """Plans bodies, and which variants of each function their calls need."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self.variants: dict[_FunctionId, list[FunctionVariant]] = {}
        self._by_frame: dict[int, FunctionVariant] = {}
        self._by_key: dict[object, FunctionVariant] = {}

    def plan(
        self, nodes: ir.Graph | ir.Function, outputs: Iterable[ir.Value], frame: Frame, *, in_function: bool
    ) -> BodyPlan:
        """The plan of one body in one context."""
        body = BodyPlanner(frame, in_function=in_function)
        body.run(nodes, outputs)
        for node in reversed(body.calls):
            body.plan.calls[node] = self._variant(node, frame.calls.get(node))
        return body.plan

    def _variant(self, node: ir.Node, frame: Frame | None) -> FunctionVariant:
        identifier = node.op_identifier()
        function = self._model.functions[identifier]
        if frame is None:
            return self._known((identifier, None), function, None)
        variant = self._by_frame.get(id(frame))
        if variant is None:
            plan = self.plan(function, function.outputs, frame, in_function=True)
            variant = self._known((identifier, _key(plan)), function, plan)
            variant.views.append(ShapeView(frame))
            self._by_frame[id(frame)] = variant
        return variant

    def _known(self, key: tuple[_FunctionId, object], function: ir.Function, plan: BodyPlan | None) -> FunctionVariant:
        """The variant of this key; calls whose plans are equal share one."""
        variant = self._by_key.get(key)
        if variant is None:
            variant = FunctionVariant(function, plan, [])
            self._by_key[key] = variant
            self.variants.setdefault(key[0], []).append(variant)
        return variant


def _key(plan: BodyPlan) -> object:
    constants = frozenset(
        (value, array.dtype.str, array.shape, array.tobytes()) for value, array in plan.constants.items()
    )
    return (
        constants,
        frozenset(plan.taken.items()),
        frozenset(plan.bypassed.items()),
        frozenset((node, id(variant)) for node, variant in plan.calls.items()),
    )
