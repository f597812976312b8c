"""Parameters of a function that an edit hands over to it, or leaves without a reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.editing.dead_nodes import remove_dead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphsurgery.analysis.bodies import Body

__all__ = ["CallParameters"]


class CallParameters:
    """The parameters of the function that is edited, and what its calls hand over for them.

    Args:
        body: what is edited; the main graph has none.
    """

    def __init__(self, body: Body | None) -> None:
        self._body = body
        self._known: dict[tuple[ir.Value, ...], ir.Value] = {}
        function = body.function if body is not None else None
        self._dispensable = [formal for formal in function.inputs if formal.uses()] if function is not None else []

    def get(self, values: Sequence[ir.Value], fresh_name: Callable[[], str]) -> ir.Value:
        """What each call of the function that is edited hands over, as a formal parameter.

        Args:
            values: for each call of the function, in order, a value that is known there.
            fresh_name: names the parameter, where none of those that there are carries these values already.

        Raises:
            ValueError: no function is edited, or not all of its calls are known.
        """
        body = self._body
        if body is None or body.function is None or not body.closed or len(values) != len(body.calls):
            raise ValueError("A parameter needs a function, and one value for each of its calls.")
        key = tuple(values)
        if key in self._known:
            return self._known[key]
        for position, formal in enumerate(body.function.inputs):
            given = [call.node.inputs[position] for call in body.calls if position < len(call.node.inputs)]
            if len(given) == len(values) and all(old is new for old, new in zip(given, values, strict=True)):
                self._known[key] = formal
                return formal
        position = len(body.function.inputs)
        formal = ir.Value(name=fresh_name())
        types = {call.caller.view.dtype(value) for call, value in zip(body.calls, values, strict=True)}
        dtype = types.pop() if len(types) == 1 else None
        if dtype is not None:
            formal.type = ir.TensorType(dtype)
        body.function.inputs.append(formal)
        self._dispensable.append(formal)
        for call, value in zip(body.calls, values, strict=True):
            call.node.resize_inputs(position + 1)
            call.node.replace_input_with(position, value)
        self._known[key] = formal
        return formal

    def drop_unread(self) -> None:
        """Parameters that the edit left without users go, and what only they made the callers compute."""
        body = self._body
        if body is None or body.function is None or not body.closed:
            return
        unused = [formal for formal in self._dispensable if not formal.uses() and not formal.is_graph_output()]
        for formal in unused:
            position = next(place for place, item in enumerate(body.function.inputs) if item is formal)
            del body.function.inputs[position]
            for call in body.calls:
                node = call.node
                kept = list(node.inputs)
                if position >= len(kept):
                    continue
                lost = kept.pop(position)
                for place, item in enumerate(kept):
                    node.replace_input_with(place, item)
                node.resize_inputs(len(kept))
                if lost is not None:
                    remove_dead([lost])
