"""Numbers of values: equal for equal expressions of equal inputs and weights, in both models and whatever the names."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphsurgery.equivalence.regions.sides import bodies, has_bodies, reads
from graphsurgery.rewrite import CHANGED_KEY, PASS_KEY
from graphsurgery.weights import WEIGHT_KEY, parse_record, record_of, simplify

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from graphsurgery.contracts import RowSelection
    from graphsurgery.equivalence.pairing import Pair
    from graphsurgery.equivalence.regions.sides import Side

__all__ = ["Matching", "Obligation", "content_key", "match", "node_form", "weight_record"]

_HASHED_BYTES = 64
_SCALARS = 8
"""Float constants of no more elements are settings, which layers have in common."""


@dataclasses.dataclass(frozen=True)
class Obligation:
    """Two values that have to be equal.

    Attributes:
        reference: in the reference.
        rewritten: in the rewritten model.
        reader: the node of the rewritten model that reads it, or the output that it is.
        contracts: which rows of the reference the rewritten value holds.
        supposed: whether the reader is taken for a node of the reference for the weights that it reads, not its name.
    """

    reference: ir.Value
    rewritten: ir.Value
    reader: str
    contracts: tuple[RowSelection, ...] = ()
    supposed: bool = False


@dataclasses.dataclass(frozen=True)
class Matching:
    """What two models have in common.

    Attributes:
        reference: number of each value of the reference.
        rewritten: number of each value of the rewritten model; what has to be equal has one number.
        values: number to the first value of the reference that has it.
        obligations: what has to be equal, in the order of the rewritten model.
    """

    reference: Mapping[ir.Value, int]
    rewritten: Mapping[ir.Value, int]
    values: Mapping[int, ir.Value]
    obligations: tuple[Obligation, ...]


def weight_record(tensor: ir.TensorProtocol | None) -> str | None:
    """The expression that is recorded for a weight, in its simplest form; None where there is none."""
    text = tensor.metadata_props.get(WEIGHT_KEY) if tensor is not None else None
    return record_of(simplify(parse_record(text))) if text else None


def content_key(tensor: ir.TensorProtocol) -> Hashable:
    """What a tensor in memory holds."""
    if tensor.dtype == ir.DataType.STRING:
        return ("text", tuple(tensor.shape.numpy()), tuple(tensor.numpy().reshape(-1).tolist()))
    data = tensor.tobytes()
    short = data if len(data) <= _HASHED_BYTES else hashlib.sha1(data, usedforsecurity=False).digest()
    return ("data", int(tensor.dtype), tuple(tensor.shape.numpy()), short)


def node_form(node: ir.Node) -> Hashable:
    """A node without what it reads: operator, attributes, which inputs are left out, and its subgraphs."""
    outer = {value: number for number, value in enumerate(reads(node))} if has_bodies(node) else {}
    return _form(node, lambda value: ("read", outer[value]))


def _form(node: ir.Node, name: Callable[[ir.Value], Hashable]) -> Hashable:
    attributes: list[Hashable] = []
    for key, attribute in sorted(node.attributes.items()):
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            continue
        attributes.append((key, _attribute(attribute)))
    held = tuple(_body(body, name) for body in bodies(node)) if has_bodies(node) else ()
    present = tuple(value is not None for value in node.inputs)
    domain = "" if node.domain == "ai.onnx" else node.domain
    return (domain, node.op_type, node.overload, present, len(node.outputs), tuple(attributes), held)


def _attribute(attribute: ir.Attr) -> Hashable:
    value: Any = attribute.value
    if attribute.type == ir.AttributeType.TENSOR:
        return _tensor_key(value)
    if attribute.type == ir.AttributeType.TENSORS:
        return tuple(_tensor_key(item) for item in value)
    if isinstance(value, list | tuple):
        return (
            int(attribute.type),
            *(str(item) if not isinstance(item, int | float | str | bytes) else item for item in value),
        )
    return (int(attribute.type), value if isinstance(value, int | float | str | bytes) else str(value))


def _tensor_key(tensor: ir.TensorProtocol) -> Hashable:
    if isinstance(tensor, ir.ExternalTensor):
        return ("file", str(tensor.location), tensor.offset, tensor.length, tuple(tensor.shape.numpy()))
    return content_key(tensor)


def _body(graph: ir.Graph, outer: Callable[[ir.Value], Hashable]) -> Hashable:
    known: dict[ir.Value, Hashable] = {value: ("formal", place) for place, value in enumerate(graph.inputs)}
    for value in graph.initializers.values():
        if value.const_value is not None:
            known[value] = _tensor_key(value.const_value)

    def name(value: ir.Value) -> Hashable:
        found = known.get(value)
        return outer(value) if found is None else found

    rows: list[Hashable] = []
    for place, node in enumerate(graph):
        rows.append((_form(node, name), tuple(name(value) for value in node.inputs if value is not None)))
        known.update({value: ("made", place, slot) for slot, value in enumerate(node.outputs)})
    return (len(graph.inputs), tuple(rows), tuple(name(value) for value in graph.outputs))


class _Numbers:
    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))


def match(
    reference: Side,
    rewritten: Side,
    pairs: tuple[Pair, ...],
    banned: frozenset[tuple[str, str]] = frozenset(),
    *,
    integers: bool = True,
) -> Matching:
    """Find what both have in common and where they part.

    Args:
        reference: the model as exported.
        rewritten: the other.
        pairs: which outputs stand for each other.
        banned: names of values that turned out not to be counterparts: of other shapes, or other shapes themselves.
        integers: whether integers and booleans that differ may be counterparts.
    """
    return _Matcher(reference, rewritten, banned, integers=integers).run(pairs)


class _Matcher:
    def __init__(self, reference: Side, rewritten: Side, banned: frozenset[tuple[str, str]], *, integers: bool) -> None:
        self._sides, self._banned, self._integers = (reference, rewritten), banned, integers
        self._numbers = _Numbers()
        self._forms: dict[ir.Node, Hashable] = {}
        self._ours: dict[ir.Value, int] = {}
        self._theirs: dict[ir.Value, int] = {}
        self._values: dict[int, ir.Value] = {}
        self._obligations: list[Obligation] = []
        self._owed: set[tuple[ir.Value, ir.Value]] = set()

    def run(self, pairs: tuple[Pair, ...]) -> Matching:
        reference, rewritten = self._sides
        self._number_leaves()
        for node in reference.nodes:
            self._assign(self._ours, node, self._outputs(node, self._ours))
        for value, number in self._ours.items():
            self._values.setdefault(number, value)
        twins = _Twins(reference, rewritten, self._form_of, self._ours)
        for node in rewritten.nodes:
            numbers = self._outputs(node, self._theirs)
            if not all(number in self._values for number in numbers):
                for twin, supposed in twins.of(node, self._theirs):
                    if self._adopt(node, twin, supposed=supposed):
                        numbers = [self._ours[value] for value in twin.outputs]
                        break
            self._assign(self._theirs, node, numbers)
        self._owe_outputs(pairs)
        return Matching(self._ours, self._theirs, self._values, tuple(self._obligations))

    def _number_leaves(self) -> None:
        reference, rewritten = self._sides
        stored = reference.model.graph.initializers
        for side, table in zip(self._sides, (self._ours, self._theirs), strict=True):
            for value in side.model.graph.inputs:
                name = value.name or ""
                if name in side.inputs:
                    table[value] = self._numbers.of(("input", side.inputs[name]))
            for value in side.model.graph.initializers.values():
                tensor = value.const_value
                assert tensor is not None
                twin = stored.get(value.name or "") if side is rewritten else None
                table[value] = self._numbers.of(_weight_key(value.name or "", tensor, twin))

    def _outputs(self, node: ir.Node, table: dict[ir.Value, int]) -> list[int]:
        read = [table.get(value, -1) for value in reads(node)]
        if node.op_type == "Identity" and node.domain in ("", "ai.onnx") and len(read) == 1:
            return read
        if node.op_type == "Constant" and "value" in node.attributes and not node.attributes["value"].is_ref():
            return [self._numbers.of(_weight_key("", node.attributes["value"].as_tensor(), None))]
        form = self._form_of(node)
        return [self._numbers.of((form, *read, "output", slot)) for slot in range(len(node.outputs))]

    def _form_of(self, node: ir.Node) -> int:
        # Hashing a form again and again would cost more than finding it: subgraphs are large.
        found = self._forms.get(node)
        if found is None:
            found = self._forms[node] = self._numbers.of(("form", node_form(node)))
        return found  # type: ignore[return-value]

    @staticmethod
    def _assign(table: dict[ir.Value, int], node: ir.Node, numbers: list[int]) -> None:
        table.update(zip(node.outputs, numbers, strict=True))

    def _adopt(self, node: ir.Node, twin: ir.Node, *, supposed: bool) -> bool:
        """Take ``node`` for ``twin``: what they read differently has to be equal. Whether that can be."""
        if self._form_of(node) != self._form_of(twin):
            return False
        read, before = reads(node), reads(twin)
        if len(read) != len(before):
            return False
        differing = [
            (theirs, ours)
            for theirs, ours in zip(read, before, strict=True)
            if self._theirs.get(theirs, -1) != self._ours.get(ours, -1)
        ]
        if not all(self._comparable(ours, theirs) for theirs, ours in differing):
            return False
        for theirs, ours in differing:
            self._owe(Obligation(ours, theirs, node.name or node.outputs[0].name or "", supposed=supposed))
        return True

    def _comparable(self, ours: ir.Value, theirs: ir.Value) -> bool:
        if (ours.name or "", theirs.name or "") in self._banned:
            return False
        kinds = self._sides[0].dtype(ours), self._sides[1].dtype(theirs)
        if None not in kinds and kinds[0] != kinds[1]:
            return False
        if not self._integers and not self._sides[0].is_float(ours):
            return False
        numbers = self._sides[0].numbers(ours), self._sides[1].numbers(theirs)
        if None not in numbers and numbers[0] != numbers[1]:
            return False
        sizes = self._sides[0].sizes(ours), self._sides[1].sizes(theirs)
        if None in sizes:
            ranks = self._sides[0].shapes.rank(ours), self._sides[1].shapes.rank(theirs)
            return None in ranks or ranks[0] == ranks[1]
        return sizes[0] == sizes[1]

    def _owe(self, obligation: Obligation) -> None:
        pair = (obligation.reference, obligation.rewritten)
        number = self._ours.get(obligation.reference, -1)
        if not obligation.contracts and self._theirs.get(obligation.rewritten, -1) not in self._values:
            # From here on it is what it stands for.
            self._theirs[obligation.rewritten] = number
        if pair not in self._owed:
            self._owed.add(pair)
            self._obligations.append(obligation)

    def _owe_outputs(self, pairs: tuple[Pair, ...]) -> None:
        ours = {value.name: value for value in self._sides[0].model.graph.outputs}
        theirs = {value.name: value for value in self._sides[1].model.graph.outputs}
        for pair in pairs:
            one, other = ours[pair.reference], theirs[pair.rewritten]
            if pair.contracts or self._ours.get(one, -1) != self._theirs.get(other, -2):
                self._owe(Obligation(one, other, f"output {pair.rewritten}", pair.contracts))


class _Twins:
    """Which node of the reference a node of the rewritten model may be: of its name, else on the same weights."""

    def __init__(
        self, reference: Side, rewritten: Side, form: Callable[[ir.Node], int], numbers: Mapping[ir.Value, int]
    ) -> None:
        self._rewritten, self._form = rewritten, form
        self._names = {node.name: node for node in reference.nodes if node.name and node in reference.named}
        unnamed = [node for node in reference.nodes if not node.name and node in reference.named]
        self._made = {value.name: node for node in unnamed for value in node.outputs if value.name}
        self._fixed = rewritten.fixed()
        self._anchored: dict[Hashable, ir.Node | None] = {}
        fixed = reference.fixed()
        for node in reference.nodes:
            key = self._anchor(node, numbers, fixed)
            if key is not None:
                # Two nodes on the same weights tell nothing of which is which.
                self._anchored[key] = None if key in self._anchored else node

    def _anchor(self, node: ir.Node, numbers: Mapping[ir.Value, int], fixed: frozenset[ir.Value]) -> Hashable:
        read = reads(node)
        held = [value for value in read if value in fixed]
        if len(held) == len(read) or not any(_is_weight(value) for value in held):
            return None
        return (self._form(node), tuple(numbers.get(value, -1) if value in fixed else None for value in read))

    def of(self, node: ir.Node, numbers: Mapping[ir.Value, int]) -> Iterator[tuple[ir.Node, bool]]:
        """Candidates, the likeliest first, and whether they are supposed for their weights only."""
        if CHANGED_KEY in node.metadata_props:
            return
        if node in self._rewritten.named:
            named = self._names.get(node.name) if node.name else self._made.get(node.outputs[0].name or "")
            if named is not None:
                yield named, False
        if PASS_KEY in node.metadata_props:
            # What a pass inserts is what no node of the reference is.
            return
        key = self._anchor(node, numbers, self._fixed)
        anchored = self._anchored.get(key) if key is not None else None
        if anchored is not None:
            yield anchored, True


def _is_weight(value: ir.Value) -> bool:
    """Whether a fixed value tells one layer from another: computed ones are made of weights mostly."""
    tensor = value.const_value
    if tensor is None or value.producer() is not None:
        return value.producer() is not None and value.producer().op_type != "Constant"  # type: ignore[union-attr]
    return tensor.dtype.is_floating_point() and tensor.size > _SCALARS


def _weight_key(name: str, tensor: ir.TensorProtocol, twin: ir.Value | None) -> Hashable:
    record = weight_record(tensor)
    if record is not None:
        return ("made", record)
    if isinstance(tensor, ir.ExternalTensor):
        before = twin.const_value if twin is not None else None
        if before is not None and not isinstance(before, ir.ExternalTensor) and _alike(before, tensor):
            # It was moved out of the .onnx: see whether its bytes came along where they are checked.
            return _weight_key(name, before, None)
        return ("weight", name, int(tensor.dtype), tuple(tensor.shape.numpy()))
    return content_key(tensor)


def _alike(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    return one.dtype == other.dtype and tuple(one.shape.numpy()) == tuple(other.shape.numpy())
