"""What differs between two matched models: nodes, edges, attributes, initializers, and what has no weight."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.comparison.cells import ABSENT, Given, Made, Stored
from graphsurgery.comparison.diff_report import InitializerChange, NodeChange, Redefinition
from graphsurgery.comparison.references import describe_attribute, describe_place, describe_shape

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import onnx_ir as ir

    from graphsurgery.comparison.cells import Cell, View
    from graphsurgery.comparison.matching import Matching
    from graphsurgery.comparison.references import Keys

__all__ = ["Differences", "find_differences", "initializer_changes"]

_SHOWN = 3  # re-wired inputs of one node that are spelled out


@dataclasses.dataclass
class Differences:
    """What differs; lists are in order of execution.

    Attributes:
        added: nodes of B without counterpart.
        removed: nodes of A without counterpart.
        rewired: nodes whose inputs come from elsewhere.
        attributes: nodes with other attributes.
        redefined: operators of another version.
        initializers: pairs of initializers that nodes read in one place, equal or not.
        metadata: number of pairs with other metadata.
        declared: number of values that both sides declare and declare differently.
    """

    added: list[NodeChange] = dataclasses.field(default_factory=list)
    removed: list[NodeChange] = dataclasses.field(default_factory=list)
    rewired: list[NodeChange] = dataclasses.field(default_factory=list)
    attributes: list[NodeChange] = dataclasses.field(default_factory=list)
    redefined: list[Redefinition] = dataclasses.field(default_factory=list)
    initializers: dict[tuple[ir.Value, ir.Value], None] = dataclasses.field(default_factory=dict)
    metadata: int = 0
    declared: int = 0


def find_differences(matching: Matching, keys: tuple[Keys, Keys], outputs: Mapping[str, str]) -> Differences:
    """Compare each pair of cells.

    Args:
        matching: the pairs.
        keys: of tensors and attributes of both sides.
        outputs: name in B of each graph output of A that has a counterpart.
    """
    a, b = matching.a, matching.b
    found = Differences()
    versions: collections.Counter[tuple[str, int, int]] = collections.Counter()
    for number in a.order:
        cell, other = a.cells[number], matching.of_a[number]
        a.visits += 1
        if other < 0:
            found.removed.append(NodeChange(cell.op, cell.name))
            continue
        twin = b.cells[other]
        _compare(found, matching, keys, cell, twin)
        if cell.version != twin.version:
            versions[cell.op, cell.version, twin.version] += 1
    found.added = [NodeChange(b.cells[n].op, b.cells[n].name) for n in b.order if matching.of_b[n] < 0]
    found.redefined = [Redefinition(*key, count) for key, count in sorted(versions.items())]
    given = dict(b.outputs)
    for name, value in a.outputs:
        other = given[outputs[name]] if name in outputs else ABSENT
        if other != ABSENT:
            _compare_output(found, matching, name, value, other)
    for name, value in a.inputs.items():
        if name in matching.inputs:
            _note_initializers(found, matching, value, b.inputs[matching.inputs[name]])
    return found


def _compare(found: Differences, matching: Matching, keys: tuple[Keys, Keys], cell: Cell, twin: Cell) -> None:
    renamed = twin.name if twin.name != cell.name else ""
    changed = [
        f"{name} {describe_attribute(cell.attributes.get(name))} -> {describe_attribute(twin.attributes.get(name))}"
        for name in dict.fromkeys((*cell.attributes, *twin.attributes))
        if not _same_attribute(cell, twin, name, keys)
    ]
    if changed:
        found.attributes.append(NodeChange(cell.op, cell.name, renamed, "; ".join(changed)))
    moved = list(_moved(found, matching, cell, twin))
    if moved:
        more = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
        found.rewired.append(NodeChange(cell.op, cell.name, renamed, "; ".join(moved[:_SHOWN]) + more))
    if cell.node is not twin.node and cell.node.metadata_props != twin.node.metadata_props:
        found.metadata += 1
    found.declared += sum(
        _declared_otherwise(one, other) for one, other in zip(cell.node.outputs, twin.node.outputs, strict=False)
    )


def _same_attribute(cell: Cell, twin: Cell, name: str, keys: tuple[Keys, Keys]) -> bool:
    ours, theirs = cell.attributes.get(name), twin.attributes.get(name)
    if ours is None or theirs is None:
        return False
    return keys[0].attribute(ours) == keys[1].attribute(theirs)


def _moved(found: Differences, matching: Matching, cell: Cell, twin: Cell) -> Iterator[str]:
    """The edges of a pair that lead elsewhere, but for those that added or removed nodes explain."""
    matching.a.visits += len(cell.inputs)
    for slot in range(max(len(cell.inputs), len(twin.inputs))):
        value = cell.inputs[slot] if slot < len(cell.inputs) else ABSENT
        other = twin.inputs[slot] if slot < len(twin.inputs) else ABSENT
        yield from _edge(found, matching, f"input {slot}", value, other)
    if len(cell.outputs) != len(twin.outputs):
        yield f"{len(cell.outputs)} -> {len(twin.outputs)} outputs"
    bodies = {body.label: body for body in twin.bodies}
    for body in cell.bodies:
        same = bodies.pop(body.label, None)
        if same is None:
            yield f"{body.label} is gone"
            continue
        if len(body.outputs) != len(same.outputs):
            yield f"{body.label} has {len(body.outputs)} -> {len(same.outputs)} outputs"
        if matching.a.scopes[body.scope].inputs != matching.b.scopes[same.scope].inputs:
            inputs = (matching.a.scopes[body.scope].inputs, matching.b.scopes[same.scope].inputs)
            yield f"{body.label} has {inputs[0]} -> {inputs[1]} inputs"
        for index, (value, other) in enumerate(zip(body.outputs, same.outputs, strict=False)):
            yield from _edge(found, matching, f"output {index} of {body.label}", value, other)
    for label in bodies:
        yield f"{label} is new"


def _edge(found: Differences, matching: Matching, what: str, value: int, other: int) -> Iterator[str]:
    if matching.same_value(value, other):
        _note_initializers(found, matching, value, other)
        return
    ours, theirs = matching.a.maker(value), matching.b.maker(other)
    if ours is not None and matching.of_a[ours] < 0:
        return
    if theirs is not None and matching.of_b[theirs] < 0:
        return
    yield f"{what}: {_source(matching.a, value)} -> {_source(matching.b, other)}"


def _compare_output(found: Differences, matching: Matching, name: str, value: int, other: int) -> None:
    for text in _edge(found, matching, f"output {name}", value, other):
        found.rewired.append(NodeChange("graph output", name, "", text))


def _note_initializers(found: Differences, matching: Matching, value: int, other: int) -> None:
    if value == ABSENT or other == ABSENT:
        return
    ours, theirs = matching.a.sources[value], matching.b.sources[other]
    if isinstance(ours, Stored | Given) and isinstance(theirs, Stored | Given):
        found.initializers.setdefault((ours.value, theirs.value))


def _source(view: View, value: int) -> str:
    if value == ABSENT:
        return "nothing"
    source = view.sources[value]
    if isinstance(source, Made):
        index = f" output {source.index}" if source.index else ""
        return f"{view.cells[source.cell].name}{index}"
    if isinstance(source, Given):
        return f"input {source.name}"
    if isinstance(source, Stored):
        return f"initializer {source.value.name}"
    return f"subgraph input {getattr(source, 'position', '?')}"


def _declared_otherwise(one: ir.Value, other: ir.Value) -> bool:
    if one.type is not None and other.type is not None and one.type != other.type:
        return True
    if one.shape is None or other.shape is None:
        return False
    if len(one.shape) != len(other.shape):
        return True
    return any(
        (isinstance(ours, int) or isinstance(theirs, int)) and ours != theirs
        for ours, theirs in zip(one.shape, other.shape, strict=True)
    )


def initializer_changes(
    tensors: tuple[Sequence[ir.Value], Sequence[ir.Value]],
    keys: tuple[Keys, Keys],
    pairs: Mapping[tuple[ir.Value, ir.Value], None],
) -> list[InitializerChange]:
    """What differs between the initializers: pairs that the nodes read in one place, then what is left over.

    Args:
        tensors: the initializers of A and of B.
        keys: of both sides.
        pairs: initializers that stand for each other.
    """
    left = tuple(
        collections.Counter(side.tensor(value.const_value) for value in values)
        for side, values in zip(keys, tensors, strict=True)
    )
    changes: list[InitializerChange] = []
    met: tuple[set[ir.Value], set[ir.Value]] = (set(), set())
    for ours, theirs in pairs:
        if ours.const_value is None or theirs.const_value is None:
            continue
        key, other = keys[0].tensor(ours.const_value), keys[1].tensor(theirs.const_value)
        if key == other:
            continue
        changes += _changed(ours, ours.const_value, theirs.const_value)
        for value, seen, count, which in ((ours, met[0], left[0], key), (theirs, met[1], left[1], other)):
            if value not in seen:
                seen.add(value)
                count[which] -= 1
    removed, added = left[0] - left[1], left[1] - left[0]
    changes += [
        InitializerChange("removed", value.name or "", before=_typed(value))
        for value in _left(tensors[0], keys[0], removed)
    ]
    changes += [
        InitializerChange("added", value.name or "", after=_typed(value)) for value in _left(tensors[1], keys[1], added)
    ]
    return changes


def _changed(value: ir.Value, one: ir.TensorProtocol, other: ir.TensorProtocol) -> Iterator[InitializerChange]:
    name = value.name or ""
    if one.dtype != other.dtype:
        yield InitializerChange("dtype", name, one.dtype.name, other.dtype.name)
    if describe_shape(one) != describe_shape(other):
        yield InitializerChange("shape", name, describe_shape(one), describe_shape(other))
    if one.dtype == other.dtype and describe_shape(one) == describe_shape(other):
        places = (describe_place(one), describe_place(other))
        if places == ("inline", "inline"):
            yield InitializerChange("data", name)
        else:
            yield InitializerChange("place", name, *places)


def _left(values: Sequence[ir.Value], keys: Keys, counts: collections.Counter[Hashable]) -> Iterator[ir.Value]:
    """Of several equal initializers the last ones are those too many."""
    found = []
    for value in reversed(values):
        key = keys.tensor(value.const_value)
        if counts[key] > 0:
            counts[key] -= 1
            found.append(value)
    return reversed(found)


def _typed(value: ir.Value) -> str:
    tensor = value.const_value
    return "" if tensor is None else f"{tensor.dtype.name} {describe_shape(tensor)}"
