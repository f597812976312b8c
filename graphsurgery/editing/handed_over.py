"""Slices of what the callers of a function hand over, made inside its body from what the callers make it of.

A mask that all layers share is made once in the main graph and handed to every call of the layer's function. To cut a
block of it inside the body, the nodes that make it are replayed there, as long as all callers make it in the same way;
what these nodes start from (a padding mask, positions) becomes further parameters of the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.bodies import same_array
from graphsurgery.editing.slice_steps import (
    Cuts,
    SliceNeeds,
    Wideness,
    cut,
    shape_operand,
    short_name,
    slice_needs,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.rewrite import Rewrite

__all__ = ["HandedOver"]


class HandedOver:
    """Makes slices of the parameters of the function that is edited.

    Args:
        rewrite: where nodes are inserted.
        view: shapes of the body before the edit.
        finished: filled with the values that had to be sliced as a whole.
    """

    def __init__(self, rewrite: Rewrite, view: ShapeView, finished: dict[ir.Value, None]) -> None:
        self._rewrite = rewrite
        self._view = view
        self._finished = finished
        self._arguments: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self._callers: dict[ir.Value, list[_Caller]] = {}
        self._made: dict[tuple[tuple[ir.Value, ...], Cuts, ir.Graph], ir.Value] = {}

    def get(self, formal: ir.Value, cuts: Cuts) -> ir.Value | None:
        """``formal`` with only the positions of ``cuts``; None where it is no parameter, or not all calls are known."""
        if not self.knows(formal):
            return None
        return self._get(self._arguments[formal], cuts, self._callers[formal])

    def knows(self, formal: ir.Value) -> bool:
        """Whether ``formal`` is a parameter, and all that is handed over for it can be seen."""
        if formal not in self._arguments:
            body = self._rewrite.body_of
            found = body.arguments(formal) if body is not None and body.closed else ()
            shapes = [caller.view.shape(value) for value, caller in found]
            callers = [
                _Caller(caller, shape[-2], shape[-1])
                for (_, caller), shape in zip(found, shapes, strict=True)
                if shape is not None and len(shape) > 1
            ]
            # Asked for once, before parameters are added.
            self._arguments[formal] = tuple(value for value, _ in found) if len(callers) == len(found) else ()
            self._callers[formal] = callers
        return bool(self._arguments[formal])

    def _get(self, values: tuple[ir.Value, ...], cuts: Cuts, callers: list[_Caller]) -> ir.Value:
        for place in (self._rewrite.graph, self._rewrite.place):
            if (values, cuts, place) in self._made:
                return self._made[values, cuts, place]
        made = self._make(values, cuts, callers)
        self._made[values, cuts, self._rewrite.place] = made
        return made

    def _make(self, values: tuple[ir.Value, ...], cuts: Cuts, callers: list[_Caller]) -> ir.Value:
        first = values[0]
        name = f"{short_name(first)}_part"
        wide = cuts and all(caller.is_wide(value) for value, caller in zip(values, callers, strict=True))
        if wide:
            inputs = self._lifted(values, cuts, callers)
            node = first.producer()
            if inputs is not None and node is not None:
                return self._rewrite.clone(node, inputs, name=name)
            if first.producer() is not None or callers[0].body.function is not None:
                # An input of the model is there whatever is done.
                self._finished.setdefault(first)
        return cut(self._rewrite, self._whole(values, callers), cuts, name=name)

    def _whole(self, values: tuple[ir.Value, ...], callers: list[_Caller]) -> ir.Value:
        """The values of the callers in the body: a constant where it is the same for all, else a parameter."""
        arrays = [caller.body.constant(value) for value, caller in zip(values, callers, strict=True)]
        first = arrays[0]
        if first is not None and all(same_array(first, other) for other in arrays):
            return self._rewrite.constant(first, short_name(values[0]))
        return self._rewrite.parameter(values, short_name(values[0]))

    def _lifted(self, values: tuple[ir.Value, ...], cuts: Cuts, callers: list[_Caller]) -> list[ir.Value | None] | None:
        """The inputs of a copy of the node that makes each of ``values``; None where they are made differently."""
        nodes = [value.producer() for value in values]
        node = nodes[0]
        if node is None or not all(other is not None and _same_operator(node, other) for other in nodes):
            return None
        found: list[SliceNeeds | None] = [
            slice_needs(other, value.index() or 0, cuts, caller.body.view, self._rewrite.model)
            for other, value, caller in zip(nodes, values, callers, strict=True)
            if other is not None
        ]
        needs = found[0]
        if needs is None or any(other != needs for other in found):
            return None
        inputs: list[ir.Value | None] = []
        for position in range(len(node.inputs)):
            items = [other.inputs[position] for other in nodes if other is not None]
            given = tuple(item for item in items if item is not None)
            if len(given) < len(items):
                if given:
                    return None
                inputs.append(None)
            elif position in needs.lengths:
                contents = self._contents(given, callers)
                if contents is None:
                    return None
                inputs.append(
                    shape_operand(self._rewrite, contents, self._whole(given, callers), needs.lengths[position])
                )
            else:
                inputs.append(self._get(given, needs.cuts_of(position), callers))
        return inputs

    def _contents(self, values: tuple[ir.Value, ...], callers: list[_Caller]) -> list[Dim | None] | None:
        """The elements of a shape operand that all callers agree on; None where its length is not known."""
        rows = [caller.body.view.shape_value(value) for value, caller in zip(values, callers, strict=True)]
        known = [row.items for row in rows if row is not None]
        if len(known) < len(rows) or len({len(row) for row in known}) > 1:
            return None
        return [row[0] if all(item == row[0] for item in row) else None for row in zip(*known, strict=True)]


class _Caller:
    """A call, and its names for the rows and columns."""

    def __init__(self, body: Body, length: Dim, total: Dim) -> None:
        self.body = body
        self.is_wide = Wideness(body.view, length, total)


def _same_operator(node: ir.Node, other: ir.Node) -> bool:
    if node is other:
        return True
    if node.op_identifier() != other.op_identifier() or len(node.inputs) != len(other.inputs):
        return False
    if set(node.attributes) != set(other.attributes):
        return False
    pairs = ((value, other.attributes[name]) for name, value in node.attributes.items())
    return all(
        str(left.value) == str(right.value) and not left.is_ref() and not right.is_ref() for left, right in pairs
    )
