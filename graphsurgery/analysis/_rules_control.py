"""Shape rules of If, Loop, Scan and of ops on sequences and optionals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis import dims
from graphsurgery.analysis._facts import NOTHING, Fact, ShapeValue, normal_axis, rule_table
from graphsurgery.analysis.constants import const_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.analysis._facts import Call, Shape
    from graphsurgery.analysis.dims import Dim

__all__ = ["TABLE"]

# How often a loop body is walked again because the shape of something it carries was found to change. Each round
# generalises every size that changed, so two rounds settle all but sizes that follow other changed sizes in a chain.
_LOOP_ROUNDS = 4


def merged(call: Call, left: Fact, right: Fact) -> Fact:
    """What holds of a value that is one of two; sizes that differ become one fresh unknown each."""
    if left == right or right.nothing:
        return left
    if left.nothing:
        return right
    element = None
    if left.element is not None or right.element is not None:
        element = merged(call, left.element or NOTHING, right.element or NOTHING)
    value = left.value if left.value == right.value else None
    return Fact(_merged_shape(call, left.shape, right.shape), left.dtype or right.dtype, value, element)


def _merged_shape(call: Call, left: Shape | None, right: Shape | None) -> Shape | None:
    if left is None or right is None or len(left) != len(right):
        return None
    return tuple(a if a == b else call.fresh() for a, b in zip(left, right, strict=True))


def _if(call: Call) -> list[Fact] | None:
    then, other = call.attribute("then_branch"), call.attribute("else_branch")
    if then is None or other is None:
        return None
    on_true = call.walk.run_graph(then, ())
    on_false = call.walk.run_graph(other, ())
    value = call.fact(0).value
    taken = None if value is None else value.single
    if taken in (0, 1):
        return on_true if taken else on_false
    return [merged(call, a, b) for a, b in zip(on_true, on_false, strict=False)]


def _loop(call: Call) -> list[Fact] | None:
    body = call.attribute("body")
    if body is None:
        return None
    mark = _mark(call)
    starts = call.inputs[2:]
    lead = (Fact((), ir.DataType.INT64), Fact((), ir.DataType.BOOL))
    carried, after = _settled(call, body, lead, starts, ())
    ends = after[1 : len(starts) + 1]
    finals = [_outside(call, _either(call, a, b), mark) for a, b in zip(carried, ends, strict=False)]
    trips = _trip_count(call, body)
    return finals + [_stacked(call, fact, trips, 0, mark) for fact in after[len(starts) + 1 :]]


def _mark(call: Call) -> int:
    """A number that unknowns made from now on exceed."""
    return _number(str(call.fresh()))


def _number(name: str) -> int:
    return int(name[1:]) if name.startswith("?") else -1


def _settled(
    call: Call, body: ir.Graph, lead: Sequence[Fact], starts: Sequence[Fact], tail: Sequence[Fact]
) -> tuple[list[Fact], list[Fact]]:
    """Facts of the carried values that hold in every iteration, and of the outputs of the body under them.

    Args:
        call: the loop or scan.
        body: its body, whose inputs are ``lead``, the carried values, ``tail``; its first outputs are the condition
            (if there is a ``lead``) and the carried values.
        lead: facts of the inputs before the carried ones.
        starts: facts of the carried values before the first iteration.
        tail: facts of the inputs after the carried ones.
    """
    skipped = 1 if lead else 0
    carried = [fact._replace(value=None) for fact in starts]
    widened: set[Dim] = set()
    for _ in range(_LOOP_ROUNDS):
        after = call.walk.run_graph(body, (*lead, *carried, *tail))
        ends = after[skipped : skipped + len(carried)]
        wider = [_widened(call, start, end, widened) for start, end in zip(carried, ends, strict=False)]
        wider += carried[len(wider) :]
        if wider == carried:
            return carried, after
        carried = wider
    carried = [Fact(None, fact.dtype) for fact in carried]
    return carried, call.walk.run_graph(body, (*lead, *carried, *tail))


def _widened(call: Call, start: Fact, end: Fact, widened: set[Dim]) -> Fact:
    """``start`` with each size that an iteration changes made an unknown; those in ``widened`` are so already."""
    if start.nothing:
        return end._replace(value=None)
    element = start.element
    if element is not None:
        element = _widened(call, element, end.element or NOTHING, widened)
    if start.shape is None or end.shape is None or len(start.shape) != len(end.shape):
        return Fact(None, start.dtype or end.dtype, None, element)
    sizes: list[Dim] = []
    for before, after in zip(start.shape, end.shape, strict=True):
        size = before
        if before != after and before not in widened:
            size = call.fresh()
            widened.add(size)
        sizes.append(size)
    return Fact(tuple(sizes), start.dtype or end.dtype, None, element)


def _either(call: Call, start: Fact, end: Fact) -> Fact:
    """What a loop leaves in a carried value: that of no iteration or of the last."""
    return merged(call, start, end._replace(value=None))


def _outside(call: Call, fact: Fact, mark: int) -> Fact:
    """A value of the body seen from outside: its unknowns made since ``mark`` vary, so they become others."""
    element = None if fact.element is None else _outside(call, fact.element, mark)
    shape = None if fact.shape is None else tuple(_renewed(call, size, mark) for size in fact.shape)
    return fact._replace(shape=shape, value=None, element=element)


def _renewed(call: Call, size: Dim, mark: int) -> Dim:
    if isinstance(size, int) or all(_number(name) < mark for name in dims.free_names(size)):
        return size
    return call.fresh()


def _trip_count(call: Call, body: ir.Graph) -> Dim:
    """The number of iterations, known where only the trip count ends the loop."""
    value = call.value(0) if call.has(0) else None
    limit = None if value is None else value.single
    started = not call.has(1) or _always(call.fact(1).value)
    stop = body.outputs[0]
    goes_on = const_int(stop) == 1 or (len(body.inputs) > 1 and _passes_through(stop, body.inputs[1]))
    if limit is None or not started or not goes_on:
        return call.fresh()
    return dims.maximum(limit, 0)


def _always(value: ShapeValue | None) -> bool:
    return value is not None and value.single == 1


def _passes_through(value: ir.Value, source: ir.Value) -> bool:
    node = value.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value is source


def _stacked(call: Call, fact: Fact, count: Dim, axis: int, mark: int) -> Fact:
    if fact.shape is None:
        return Fact(None, fact.dtype)
    shape = tuple(_renewed(call, size, mark) for size in fact.shape)
    place = normal_axis(axis, len(shape) + 1) or 0
    return Fact(shape[:place] + (count,) + shape[place:], fact.dtype)


def _scan(call: Call) -> list[Fact] | None:
    body = call.attribute("body")
    if body is None or call.version < 9:
        return None
    mark = _mark(call)
    scanned = call.number("num_scan_inputs", 1)
    states = len(call.inputs) - scanned
    length: Dim | None = None
    slices: list[Fact] = []
    for fact, axis in zip(call.inputs[states:], call.numbers("scan_input_axes") or (0,) * scanned, strict=False):
        place = None if fact.shape is None else normal_axis(axis, len(fact.shape))
        if fact.shape is None or place is None:
            slices.append(Fact(None, fact.dtype))
            continue
        length = fact.shape[place] if length is None else length
        slices.append(Fact(fact.shape[:place] + fact.shape[place + 1 :], fact.dtype))
    carried, after = _settled(call, body, (), call.inputs[:states], slices)
    finals = [_outside(call, _either(call, a, b), mark) for a, b in zip(carried, after[:states], strict=False)]
    count = call.fresh() if length is None else length
    axes = call.numbers("scan_output_axes") or (0,) * (len(after) - states)
    return finals + [_stacked(call, fact, count, axis, mark) for fact, axis in zip(after[states:], axes, strict=False)]


def _sequence_empty(call: Call) -> Fact:
    return Fact(element=Fact(None, ir.DataType(call.number("dtype", 1)), nothing=True))


def _sequence_construct(call: Call) -> Fact:
    element = call.fact(0)
    for fact in call.inputs[1:]:
        element = merged(call, element, fact)
    return Fact(element=element._replace(value=None))


def _sequence_insert(call: Call) -> Fact:
    sequence = call.fact(0).element
    inserted = call.fact(1)._replace(value=None)
    return Fact(element=merged(call, sequence or Fact(None, inserted.dtype), inserted))


def _sequence_at(call: Call) -> Fact:
    return _outside(call, call.fact(0).element or NOTHING, 0)


def _split_to_sequence(call: Call) -> Fact:
    shape = call.shape(0)
    axis = None if shape is None else normal_axis(call.number("axis", 0), len(shape))
    if shape is None or axis is None:
        return Fact(element=Fact(None, call.dtype(0)))
    if call.has(1):
        value = call.value(1)
        listed = None if value is None else value.ints()
        # One number: parts of that size, of which the last may be shorter.
        even = value is not None and listed and (value.rank == 1 or dims.exact_div(shape[axis], listed[0]) is not None)
        part: Dim = listed[0] if listed and even and len(set(listed)) == 1 else call.fresh()
    else:
        part = 1
    if part == 1 and not call.has(1) and call.number("keepdims", 1) == 0:
        return Fact(element=Fact(shape[:axis] + shape[axis + 1 :], call.dtype(0)))
    return Fact(element=Fact(shape[:axis] + (part,) + shape[axis + 1 :], call.dtype(0)))


def _concat_from_sequence(call: Call) -> Fact:
    element = call.fact(0).element or NOTHING
    if element.shape is None:
        return Fact(None, element.dtype)
    shape = [_renewed(call, size, 0) for size in element.shape]
    if call.number("new_axis", 0):
        axis = normal_axis(call.number("axis", 0), len(shape) + 1) or 0
        shape.insert(axis, call.fresh())
    else:
        axis = normal_axis(call.number("axis", 0), len(shape)) or 0
        shape[axis] = call.fresh()
    return Fact(tuple(shape), element.dtype)


def _length(_call: Call) -> Fact:
    return Fact((), ir.DataType.INT64)


def _optional(call: Call) -> Fact:
    return Fact(element=call.fact(0)) if call.has(0) else NOTHING


def _optional_get(call: Call) -> Fact:
    return call.fact(0).element or call.fact(0)


def _optional_has(_call: Call) -> Fact:
    return Fact((), ir.DataType.BOOL)


TABLE = rule_table(
    ("", "If", _if),
    ("", "Loop", _loop),
    ("", "Scan", _scan),
    ("", "SequenceEmpty", _sequence_empty),
    ("", "SequenceConstruct", _sequence_construct),
    ("", "SequenceInsert", _sequence_insert),
    ("", "SequenceErase", lambda call: call.fact(0)),
    ("", "SequenceAt", _sequence_at),
    ("", "SplitToSequence", _split_to_sequence),
    ("", "ConcatFromSequence", _concat_from_sequence),
    ("", "SequenceLength", _length),
    ("", "Optional", _optional),
    ("", "OptionalGetElement", _optional_get),
    ("", "OptionalHasElement", _optional_has),
)
