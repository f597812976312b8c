"""The bodies of a model: the main graph, and each local function that is called, with what is known of it for all calls.

A pass rewrites a function body once for all its callers, so it may rely only on what all of them agree on. Of a formal
parameter that is its rank, its element type, each size and each known element that is the same at every call; a size
that differs becomes one unknown, the same one wherever the calls have the same row of sizes. The body is then walked
with these facts like any graph.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis._facts import NOTHING, Fact, ShapeValue
from graphsurgery.analysis._frame import Frame
from graphsurgery.analysis._order import subgraphs_of
from graphsurgery.analysis.constants import constant_of
from graphsurgery.analysis.dims import Expr, is_nonnegative
from graphsurgery.analysis.shapes import ShapeView

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    import onnx_ir as ir

    from graphsurgery.analysis._frame import Session
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes

__all__ = ["Body", "FunctionCall", "bodies_of", "same_array"]

_CACHE_KEY = "graphsurgery.analysis.bodies"


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionCall:
    """One node that calls a function.

    Attributes:
        node: the node.
        caller: the body in which it is, in one of its subgraphs perhaps.
    """

    node: ir.Node
    caller: Body


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """The main graph or the body of a function, subgraphs included.

    Attributes:
        graph: the graph.
        function: the function; None for the main graph.
        view: shapes that hold in every call.
        calls: the calls of the function, in the order of bodies; none for the main graph.
        closed: whether these are all its calls: a body that is never called itself calls it too where they are not,
            and the function cannot get other parameters.
    """

    graph: ir.Graph
    function: ir.Function | None
    view: ShapeView
    calls: tuple[FunctionCall, ...] = ()
    closed: bool = True

    def arguments(self, formal: ir.Value) -> tuple[tuple[ir.Value, Body], ...]:
        """What each call hands over for ``formal``, and the body in which that is; none where some call hands nothing."""
        position = next((place for place, item in enumerate(self.graph.inputs) if item is formal), None)
        if self.function is None or position is None:
            return ()
        found = []
        for call in self.calls:
            item = call.node.inputs[position] if position < len(call.node.inputs) else None
            if item is None:
                return ()
            found.append((item, call.caller))
        return tuple(found)

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The contents of ``value`` where they are known: of a parameter, where all calls hand over the same.

        See :func:`graphsurgery.analysis.constants.constant_of`.
        """
        found = constant_of(value)
        if found is not None or value is None or value.producer() is not None:
            return found
        handed = [caller.constant(item) for item, caller in self.arguments(value)]
        first = handed[0] if handed else None
        return first if first is not None and all(same_array(first, other) for other in handed) else None

    @property
    def opset(self) -> int:
        """Version of the default domain."""
        imports = self.graph.opset_imports if self.function is None else self.function.opset_imports
        return imports.get("", 1)

    @property
    def where(self) -> str:
        """The body in words, for reports: the end of a sentence."""
        if self.function is None:
            return "in the main graph"
        count = len(self.calls)
        return f"in function {self.function.name!r}, for {f'its {count} calls' if count > 1 else 'its one call'}"


def same_array(left: np.ndarray, right: np.ndarray | None) -> bool:
    """Whether two arrays are the same: type, shape and bytes."""
    if right is None or left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.tobytes() == right.tobytes()


def bodies_of(model: ir.Model, shapes: Shapes) -> tuple[Body, ...]:
    """The main graph, then every function that it calls, directly or through others, callers first.

    Args:
        model: the model.
        shapes: its shapes as it is now.
    """
    held: tuple[Shapes, tuple[Body, ...]] | None = model.meta.get(_CACHE_KEY)
    if held is None or held[0] is not shapes:
        held = (shapes, tuple(_find(model, shapes)))
        model.meta[_CACHE_KEY] = held
    return held[1]


def _find(model: ir.Model, shapes: Shapes) -> list[Body]:
    main = Body(model.graph, None, shapes)
    found = [main]
    if not model.functions:
        return found
    counts = dict.fromkeys(model.functions, 0)
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in _nodes(graph):
            if node.op_identifier() in counts:
                counts[node.op_identifier()] += 1
    calls: dict[tuple[str, str, str], list[FunctionCall]] = {}
    _add_calls(main, model, calls)
    for function in _callers_first(model):
        given = calls.get(function.identifier(), [])
        frame = _joined(function, given)
        if frame is None:
            continue
        closed = counts[function.identifier()] == len(given)
        body = Body(function.graph, function, ShapeView(frame), tuple(given), closed)
        found.append(body)
        _add_calls(body, model, calls)
    return found


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of ``graph`` and its subgraphs at any depth."""
    for node in graph:
        yield node
        for inner in subgraphs_of(node):
            yield from _nodes(inner)


def _add_calls(body: Body, model: ir.Model, calls: dict[tuple[str, str, str], list[FunctionCall]]) -> None:
    for node in _nodes(body.graph):
        if node.op_identifier() in model.functions:
            calls.setdefault(node.op_identifier(), []).append(FunctionCall(node, body))


def _callers_first(model: ir.Model) -> list[ir.Function]:
    """The functions, each behind all that call it."""
    order: list[ir.Function] = []
    done: set[tuple[str, str, str]] = set()
    callees = {
        identifier: [node.op_identifier() for node in _nodes(function.graph)]
        for identifier, function in model.functions.items()
    }
    for root in model.functions:
        stack = [(root, iter(callees[root]))] if root not in done else []
        done.add(root)
        while stack:
            identifier, rest = stack[-1]
            following = next((item for item in rest if item in callees and item not in done), None)
            if following is None:
                order.append(model.functions[identifier])
                stack.pop()
            else:
                done.add(following)
                stack.append((following, iter(callees[following])))
    return order[::-1]


def _joined(function: ir.Function, calls: Sequence[FunctionCall]) -> Frame | None:
    """The facts of a body that hold in all ``calls``; None where there are none, or one was not looked into."""
    frames = [call.caller.view.frame.calls.get(call.node) for call in calls]
    first = frames[0] if frames else None
    if first is None or None in frames:
        return None
    if all(frame is first for frame in frames):
        return first
    session = first.session
    joint = _Joint(session)
    attributes, unsure = _joined_attributes([frame.attributes for frame in frames if frame is not None])
    frame = Frame(session, function.opset_imports, attributes, unsure)
    for formal in function.inputs:
        frame.facts[formal] = joint.fact([each.fact(formal) for each in frames if each is not None])
    session.open_functions.add(function.identifier())
    frame.walk(function)
    session.open_functions.discard(function.identifier())
    return frame


def _joined_attributes(given: Sequence[Mapping[str, ir.Attr]]) -> tuple[dict[str, ir.Attr], frozenset[str]]:
    """The attributes that all calls agree on, and the names of the others."""
    agreed: dict[str, ir.Attr] = {}
    unsure: set[str] = set()
    for name in {name: None for attributes in given for name in attributes}:
        values = [attributes.get(name) for attributes in given]
        first = values[0]
        if first is not None and all(item is not None and str(item.value) == str(first.value) for item in values):
            agreed[name] = first
        else:
            unsure.add(name)
    return agreed, frozenset(unsure)


class _Joint:
    """What several calls agree on; sizes that differ become one unknown for each row of sizes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._unknowns: dict[tuple[tuple[Dim, ...], bool], Dim] = {}

    def fact(self, facts: Sequence[Fact]) -> Fact:
        first = facts[0]
        if all(fact == first for fact in facts):
            return first
        if any(fact is NOTHING or fact.nothing or fact.element is not None for fact in facts):
            return NOTHING
        dtype = first.dtype if all(fact.dtype == first.dtype for fact in facts) else None
        shapes = [fact.shape for fact in facts if fact.shape is not None]
        shape = None
        if len(shapes) == len(facts) and len({len(item) for item in shapes}) == 1:
            shape = tuple(self._size(sizes, signed=False) for sizes in zip(*shapes, strict=True))
        values = [fact.value for fact in facts if fact.value is not None]
        value = None
        if len(values) == len(facts) and len({item.shape for item in values}) == 1:
            items = tuple(self._size(row, signed=True) for row in zip(*(item.items for item in values), strict=True))
            value = ShapeValue(items, values[0].shape)
        return Fact(shape, dtype, value)

    def _size(self, sizes: tuple[Dim, ...], *, signed: bool) -> Dim:
        if all(size == sizes[0] for size in sizes):
            return sizes[0]
        common = _common_part(sizes)
        rests = tuple(size - common for size in sizes)
        if all(is_nonnegative(rest) for rest in rests):
            # An element of a shape is the same unknown as the size that it is.
            signed = False
        else:
            common, rests = 0, sizes
        key = (rests, signed)
        if key not in self._unknowns:
            self._unknowns[key] = self._session.fresh(signed=signed)
        return self._unknowns[key] + common


def _common_part(sizes: tuple[Dim, ...]) -> Dim:
    """The terms that all sizes have: S of P_0 + S and P_1 + S."""
    first = sizes[0]
    if isinstance(first, int) or any(isinstance(size, int) for size in sizes):
        return 0
    shared = [term for term in first.terms if all(isinstance(size, Expr) and term in size.terms for size in sizes)]
    return Expr(tuple(shared)) if shared else 0
