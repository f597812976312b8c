"""What the function of a stack of equal layers looks like: parameters, constants inside, outputs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.function_keys import OWN, SHARED_KEY, STORED_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx_ir as ir

    from graphsurgery.patterns.layers.flow import Constant, Flow

__all__ = ["Body", "ConstantColumn", "Inner", "Ref", "describe_body"]


@dataclasses.dataclass(frozen=True)
class Inner:
    """Output ``index`` of the node at ``position`` of the body."""

    position: int
    index: int


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Input ``number`` of the function."""

    number: int


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Constant ``number`` of the body."""

    number: int


Ref: TypeAlias = "Inner | Parameter | Fixed | None"


@dataclasses.dataclass(frozen=True)
class ConstantColumn:
    """A small constant that is equal in all instances: what each reads, and the contents."""

    values: tuple[ir.Value, ...]
    key: Constant


@dataclasses.dataclass(frozen=True)
class Body:
    """The function of several instances.

    Attributes:
        instances: the nodes of each instance; those at one position stand for each other, in execution order.
        slots: for each position what its slots read.
        parameters: for each input of the function the value that each instance reads.
        constants: small constants that all instances have in common.
        outputs: the values that something outside reads.
    """

    instances: tuple[tuple[ir.Node, ...], ...]
    slots: tuple[tuple[Ref, ...], ...]
    parameters: tuple[tuple[ir.Value, ...], ...]
    constants: tuple[ConstantColumn, ...]
    outputs: tuple[Inner, ...]

    @property
    def weights(self) -> int:
        """How many parameters are weights: initializers, or inputs with a default, of each instance."""
        return sum(all(value.const_value is not None for value in column) for column in self.parameters)


def describe_body(
    flow: Flow, instances: Sequence[Sequence[ir.Node]], first: Sequence[ir.Value] = (), *, nested: bool = False
) -> Body:
    """The function that ``instances`` have in common.

    Args:
        flow: the graph.
        instances: equal lists of nodes, in execution order.
        first: values that become the first parameters and results: the hidden states between the layers.
        nested: the nodes are in the body of a function already.
    """
    ends = set(first)
    columns = _Columns(flow, instances, nested=nested)
    slots = columns.slots()
    order = sorted(range(len(columns.parameters)), key=lambda at: (_rank(columns.parameters[at], ends), at))
    number = {old: new for new, old in enumerate(order)}
    renumbered = tuple(
        tuple(Parameter(number[ref.number]) if isinstance(ref, Parameter) else ref for ref in row) for row in slots
    )
    outputs = sorted(
        _outputs(flow, instances),
        key=lambda ref: (
            instances[0][ref.position].outputs[ref.index] not in ends
            if ref.index < len(instances[0][ref.position].outputs)
            else True
        ),
    )
    return Body(
        tuple(tuple(nodes) for nodes in instances),
        renumbered,
        tuple(columns.parameters[at] for at in order),
        tuple(columns.constants),
        tuple(outputs),
    )


def _rank(column: tuple[ir.Value, ...], ends: set[ir.Value]) -> int:
    if any(value in ends for value in column):
        return 0
    return 2 if all(value.const_value is not None for value in column) else 1


class _Columns:
    def __init__(self, flow: Flow, instances: Sequence[Sequence[ir.Node]], *, nested: bool) -> None:
        self._flow = flow
        self._nested = nested
        self._instances = instances
        self._positions = [{node: at for at, node in enumerate(nodes)} for nodes in instances]
        self.parameters: list[tuple[ir.Value, ...]] = []
        self.constants: list[ConstantColumn] = []
        self._known: dict[tuple[ir.Value, ...], Parameter | Fixed] = {}

    def slots(self) -> list[tuple[Ref, ...]]:
        found: list[tuple[Ref, ...]] = []
        for nodes in zip(*self._instances, strict=True):
            rows = zip(*(self._flow.slots[node] for node in nodes), strict=True)
            found.append(tuple(self._ref(values) for values in rows))
        return found

    def _ref(self, values: tuple[ir.Value | None, ...]) -> Ref:
        column = tuple(value for value in values if value is not None)
        if not column:
            return None
        producer = column[0].producer()
        if producer in self._positions[0]:
            assert producer is not None
            return Inner(self._positions[0][producer], column[0].index() or 0)
        if column not in self._known:
            self._known[column] = self._outside(column)
        return self._known[column]

    def _outside(self, column: tuple[ir.Value, ...]) -> Parameter | Fixed:
        key = self._flow.constant(column[0])
        equal = key is not None and all(self._flow.constant(value) == key for value in column)
        if equal and key is not None and self._comes_back(column):
            self.constants.append(ConstantColumn(column, key))
            return Fixed(len(self.constants) - 1)
        self.parameters.append(column)
        return Parameter(len(self.parameters) - 1)

    def _comes_back(self, column: tuple[ir.Value, ...]) -> bool:
        """Whether inlining could tell what a constant of the body stood for: one value, or one for each instance."""
        makers = [value.producer() for value in column]
        kinds = len(set(column))
        if len({maker is None for maker in makers}) > 1 or kinds not in (1, len(column)):
            return False
        if not self._nested:
            return True
        notes = {
            maker.metadata_props.get(STORED_KEY, maker.metadata_props.get(SHARED_KEY)) for maker in makers if maker
        }
        return notes == {None} if kinds > 1 else notes.isdisjoint({None, OWN})


def _outputs(flow: Flow, instances: Sequence[Sequence[ir.Node]]) -> Iterator[Inner]:
    members = [set(nodes) for nodes in instances]
    for position, nodes in enumerate(zip(*instances, strict=True)):
        for index in range(max(len(node.outputs) for node in nodes)):
            if any(
                index < len(node.outputs) and _leaves(flow, node.outputs[index], members[number])
                for number, node in enumerate(nodes)
            ):
                yield Inner(position, index)


def _leaves(flow: Flow, value: ir.Value, members: set[ir.Node]) -> bool:
    return value.is_graph_output() or any(user not in members for user, _ in flow.users.get(value, ()))
