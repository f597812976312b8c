"""From a model to its view: local functions are seen through, nothing is copied but references.

Calls are followed one by one, so that the cost is that of the unfolded graph; a model whose functions unfold to more
than MAX_CELLS nodes, or call themselves, is refused before the first step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from graphsurgery.analysis._order import subgraphs_of
from graphsurgery.comparison.cells import ABSENT, Body, Cell, Dangling, Formal, Given, Made, Scope, Stored, View
from graphsurgery.errors import InputRefusedError
from graphsurgery.function_keys import OWN, SHARED_KEY, STORED_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphsurgery.comparison.cells import Source

__all__ = ["MAX_CELLS", "unfold"]

MAX_CELLS = 2_000_000
"""Nodes, calls seen through, of the largest model that is compared."""

_MAX_NESTING = 100
_GRAPHS = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


def unfold(model: ir.Model, who: str) -> View:
    """The view of ``model``; no tensor is read.

    Args:
        model: the model.
        who: what errors call it.

    Raises:
        InputRefusedError: its functions call themselves, or unfold to too much; or a node depends on itself.
    """
    _check_size(model, who)
    unfolder = _Unfolder(model)
    view = unfolder.run()
    view.order = _ordered(view, who)
    return view


def _check_size(model: ir.Model, who: str) -> None:
    if not model.functions:
        return
    sizes: dict[ir.OperatorIdentifier, int] = {}
    open_calls: dict[ir.OperatorIdentifier, None] = {}

    def size(nodes: Iterable[ir.Node]) -> int:
        total = 0
        for node in nodes:
            name = node.op_identifier()
            total += size_of(name) if name in model.functions else 1
            total += sum(size(inner) for inner in subgraphs_of(node))
        return total

    def size_of(name: ir.OperatorIdentifier) -> int:
        if name in open_calls:
            raise InputRefusedError(f"{who}: function {name[0]}::{name[1]} calls itself; export the model again.")
        if len(open_calls) >= _MAX_NESTING:
            raise InputRefusedError(f"{who}: functions call each other over {_MAX_NESTING} levels; inline some first.")
        if name not in sizes:
            open_calls[name] = None
            sizes[name] = size(model.functions[name])
            del open_calls[name]
        return sizes[name]

    total = size(model.graph)
    if total > MAX_CELLS:
        raise InputRefusedError(
            f"{who}: its functions unfold to {total} nodes, more than the {MAX_CELLS} that are compared."
        )


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The values and attributes that are visible in one graph of one call.

    Attributes:
        values: numbers of the values of this graph.
        outer: the graph around it; None for the main graph and for a function body.
        attributes: those of the call, by name, each with the frame that its subgraphs see.
        imports: operator sets.
        path: the calls around it.
        scope: number of the scope that its cells belong to.
    """

    values: dict[ir.Value, int]
    outer: _Frame | None
    attributes: Mapping[str, tuple[ir.Attr, _Frame]]
    imports: Mapping[str, int]
    path: str
    scope: int

    def find(self, value: ir.Value) -> int | None:
        """The number of ``value`` here or in a graph around."""
        frame: _Frame | None = self
        while frame is not None:
            number = frame.values.get(value)
            if number is not None:
                return number
            frame = frame.outer
        return None


class _Unfolder:
    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._functions = model.functions
        self._cells: list[Cell] = []
        self._sources: list[Source] = []
        self._scopes = [Scope("", 0, len(model.graph.inputs))]
        # The output of a call stands for what the body gives.
        self._aliases: dict[int, int] = {}
        # Constants of bodies that stand for something that was shared by all calls, by the name that it had.
        self._shared: dict[str, int] = {}
        self._stored: list[ir.Value] = []
        self._constants: dict[str, int] | None = None

    def run(self) -> View:
        graph = self._model.graph
        frame = _Frame({}, None, {}, self._model.opset_imports, "", 0)
        inputs = {}
        for value in graph.inputs:
            inputs[value.name or ""] = frame.values[value] = self._new(Given(value))
        self._main = frame
        outputs = self._graph(graph, frame)
        named = [(value.name or "", self._real(number)) for value, number in zip(graph.outputs, outputs, strict=True)]
        for cell in self._cells:
            cell.inputs = _without_tail(self._real(number) for number in cell.inputs)
            if cell.bodies:
                cell.bodies = tuple(
                    Body(body.label, body.scope, tuple(self._real(number) for number in body.outputs))
                    for body in cell.bodies
                )
        _drop_unread(self._cells, named)
        return View(self._cells, self._sources, self._scopes, inputs, named, stored=self._stored)

    def _new(self, source: Source) -> int:
        self._sources.append(source)
        return len(self._sources) - 1

    def _real(self, number: int) -> int:
        passed = []
        while number in self._aliases:
            passed.append(number)
            # A call that gives back its own output is left as the damaged value that it is.
            number = self._aliases.pop(number)
        for alias in passed:
            if alias != number:
                self._aliases[alias] = number
        return number

    def _graph(self, graph: ir.Graph, frame: _Frame) -> list[int]:
        """Unfold ``graph``, whose inputs are numbered; the numbers of its outputs."""
        for value in graph.initializers.values():
            if value not in frame.values:
                frame.values[value] = self._new(Stored(value))
        return self._nodes(graph, graph.outputs, frame)

    def _nodes(self, nodes: Iterable[ir.Node], outputs: Sequence[ir.Value], frame: _Frame) -> list[int]:
        # First all values get numbers: files need not be sorted.
        made: list[tuple[ir.Node, Cell | None]] = []
        for node in nodes:
            if node.op_identifier() in self._functions:
                for value in node.outputs:
                    frame.values[value] = self._new(Dangling(value.name or ""))
                made.append((node, None))
                continue
            if frame is not self._main and (stands_for := self._constant(node, frame)) is not None:
                frame.values[node.outputs[0]] = stands_for
                continue
            number = len(self._cells)
            numbers = []
            for index, value in enumerate(_named_outputs(node)):
                frame.values[value] = self._new(Made(number, index))
                numbers.append(frame.values[value])
            op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            imported = node.version if node.version is not None else frame.imports.get(node.domain, 0)
            version = _defined_in(node.domain, node.op_type, imported)
            cell = Cell(node, op, version, {}, (), (), tuple(numbers), frame.scope, frame.path)
            self._cells.append(cell)
            made.append((node, cell))
        for node, own in made:
            inputs = [ABSENT if value is None else self._read(value, frame) for value in node.inputs]
            if own is None:
                self._call(node, inputs, frame)
            else:
                own.inputs = tuple(inputs)
                self._attributes(own, frame)
        return [self._read(value, frame) for value in outputs]

    def _constant(self, node: ir.Node, frame: _Frame) -> int | None:
        """The number of what a Constant node of a body stands for, where it stands for something outside of it."""
        name = node.metadata_props.get(STORED_KEY)
        shared = node.metadata_props.get(SHARED_KEY)
        if node.op_type != "Constant" or (name is None and shared is None) or not frame.path:
            return None
        tensor = _tensor_of(node)
        if shared is not None:
            return self._shared_node(node, shared, frame)
        if tensor is None or name is None:
            return None
        if name == OWN:
            return self._new(self._store(name, tensor))
        if name not in self._shared:
            there = self._model.graph.initializers.get(name)
            same = there is not None and _equal(there.const_value, tensor)
            known = self._main.values.get(there) if there is not None and same else None
            self._shared[name] = known if known is not None else self._new(self._store(name, tensor))
        return self._shared[name]

    def _store(self, name: str, tensor: ir.TensorProtocol) -> Stored:
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        self._stored.append(value)
        return Stored(value)

    def _shared_node(self, node: ir.Node, name: str, frame: _Frame) -> int:
        key = f"{name} of a node"
        if key not in self._shared:
            outer = self._named_in_main().get(name)
            if outer is not None:
                self._shared[key] = outer
            else:
                number = len(self._cells)
                self._shared[key] = self._new(Made(number, 0))
                version = _defined_in("", "Constant", frame.imports.get("", 0))
                attributes = {key: item for key, (item, _) in sorted(_resolved(node, frame).items())}
                self._cells.append(Cell(node, "Constant", version, attributes, (), (), (self._shared[key],), 0, ""))
        return self._shared[key]

    def _named_in_main(self) -> dict[str, int]:
        if self._constants is None:
            self._constants = {
                value.name: number
                for value, number in self._main.values.items()
                if value.name and (maker := value.producer()) is not None and maker.op_type == "Constant"
            }
        return self._constants

    def _read(self, value: ir.Value, frame: _Frame) -> int:
        number = frame.find(value)
        if number is None:
            number = frame.values[value] = self._new(Dangling(value.name or ""))
        return number

    def _attributes(self, cell: Cell, frame: _Frame) -> None:
        if not cell.node.attributes:
            return
        plain: dict[str, ir.Attr] = {}
        bodies: list[Body] = []
        for name, (attribute, owner) in sorted(_resolved(cell.node, frame).items()):
            if attribute.type not in _GRAPHS:
                plain[name] = attribute
                continue
            single = attribute.type == ir.AttributeType.GRAPH
            graphs = [attribute.as_graph()] if single else attribute.as_graphs()
            for index, graph in enumerate(graphs):
                bodies.append(self._body(name if single else f"{name}[{index}]", graph, owner, cell))
        cell.attributes = plain
        cell.bodies = tuple(bodies)

    def _body(self, label: str, graph: ir.Graph, owner: _Frame, cell: Cell) -> Body:
        scope = len(self._scopes)
        depth = self._scopes[cell.scope].depth + 1
        self._scopes.append(Scope(label, depth, len(graph.inputs)))
        frame = _Frame({}, owner, owner.attributes, owner.imports, owner.path, scope)
        for position, value in enumerate(graph.inputs):
            frame.values[value] = self._new(Formal(scope, position))
        return Body(label, scope, tuple(self._graph(graph, frame)))

    def _call(self, node: ir.Node, inputs: list[int], frame: _Frame) -> None:
        function = self._functions[node.op_identifier()]
        attributes = {
            name: (attribute, frame)
            for name, attribute in function.attributes.items()
            if attribute.value is not None and not attribute.is_ref()
        }
        attributes.update(_resolved(node, frame))
        label = node.name or next((value.name for value in node.outputs if value.name), None) or node.op_type
        path = f"{frame.path}{label}/"
        inner = _Frame({}, None, attributes, function.opset_imports, path, frame.scope)
        for position, value in enumerate(function.inputs):
            inner.values[value] = inputs[position] if position < len(inputs) else ABSENT
        given = self._nodes(function, function.outputs, inner)
        for value, number in zip(node.outputs, given, strict=False):  # trailing outputs may be left out
            self._aliases[frame.values[value]] = number


def _resolved(node: ir.Node, frame: _Frame) -> dict[str, tuple[ir.Attr, _Frame]]:
    """The attributes of ``node``; those that refer to an attribute that the call leaves out are left out too."""
    found: dict[str, tuple[ir.Attr, _Frame]] = {}
    for name, attribute in node.attributes.items():
        if not attribute.is_ref():
            found[name] = (attribute, frame)
        elif (given := frame.attributes.get(attribute.ref_attr_name or "")) is not None:
            found[name] = given
    return found


def _named_outputs(node: ir.Node) -> list[ir.Value]:
    outputs = list(node.outputs)
    while outputs and not outputs[-1].name and not outputs[-1].uses() and not outputs[-1].is_graph_output():
        outputs.pop()
    return outputs


def _drop_unread(cells: Iterable[Cell], outputs: Iterable[tuple[str, int]]) -> None:
    """Leave out outputs at the end of a cell that nothing reads: some calls of a function need what others do not."""
    read = {number for _, number in outputs}
    for cell in cells:
        read.update(cell.inputs)
        for body in cell.bodies:
            read.update(body.outputs)
    for cell in cells:
        kept = len(cell.outputs)
        while kept > 1 and cell.outputs[kept - 1] not in read:
            kept -= 1
        cell.outputs = cell.outputs[:kept]


def _tensor_of(node: ir.Node) -> ir.TensorProtocol | None:
    attribute = node.attributes.get("value")
    return None if attribute is None or attribute.is_ref() else attribute.as_tensor()


def _equal(one: ir.TensorProtocol | None, other: ir.TensorProtocol) -> bool:
    if one is None or one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        return False
    return not isinstance(one, ir.ExternalTensor) and one.tobytes() == other.tobytes()


def _without_tail(numbers: Iterable[int]) -> tuple[int, ...]:
    kept = list(numbers)
    while kept and kept[-1] == ABSENT:
        kept.pop()
    return tuple(kept)


@functools.lru_cache(maxsize=4096)
def _defined_in(domain: str, op_type: str, imported: int) -> int:
    """The version that defined the operator last, up to the one that is imported."""
    try:
        version: int = onnx.defs.get_schema(op_type, imported, domain).since_version
    except onnx.defs.SchemaError:
        return imported
    return version


def _ordered(view: View, who: str) -> list[int]:
    """The cells, each after what it reads: depth first from the outputs, then from cells that nothing reads."""
    order: list[int] = []
    state = bytearray(len(view.cells))  # 1 open, 2 done
    roots = [cell for _, value in view.outputs if (cell := view.maker(value)) is not None]
    for root in (*roots, *range(len(view.cells))):
        if state[root]:
            continue
        stack = [(root, iter(tuple(view.cells[root].reads())))]
        state[root] = 1
        while stack:
            current, values = stack[-1]
            for value in values:
                view.visits += 1
                before = view.maker(value)
                if before is None or state[before] == 2:
                    continue
                if state[before] == 1:
                    name = view.cells[before].name
                    raise InputRefusedError(f"{who}: node {name!r} depends on itself; export the model again.")
                state[before] = 1
                stack.append((before, iter(tuple(view.cells[before].reads()))))
                break
            else:
                stack.pop()
                state[current] = 2
                view.visits += 1
                order.append(current)
    return order
