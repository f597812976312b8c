"""The walk itself: one frame for the main graph and one for each context in which a function body is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphsurgery.analysis._facts import MAX_VALUE_ITEMS, NOTHING, Call, Fact, Shape, ShapeValue
from graphsurgery.analysis._order import producers_first
from graphsurgery.analysis._rules import RULES
from graphsurgery.analysis.constants import constant_of
from graphsurgery.analysis.dims import Expr, Symbol, parse_dim, substitute, symbol, unknown
from graphsurgery.analysis.input_names import is_image_name
from graphsurgery.errors import InputRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphsurgery.analysis._facts import Facts, Rule
    from graphsurgery.analysis.dims import Dim

__all__ = ["INTEGERS", "Frame", "Session"]

# Expressions with more atoms than this tell nobody anything and would grow from layer to layer.
_MAX_WEIGHT = 24
_MAX_CONTENT_WEIGHT = 96
# Function bodies are walked once per context; past this many body nodes further calls stay unknown, since chains of
# functions that call each other several times would otherwise be exponential.
_MAX_BODY_NODES = 500_000

INTEGERS = frozenset(
    {
        ir.DataType.INT64,
        ir.DataType.INT32,
        ir.DataType.INT16,
        ir.DataType.INT8,
        ir.DataType.UINT64,
        ir.DataType.UINT32,
        ir.DataType.UINT16,
        ir.DataType.UINT8,
        ir.DataType.BOOL,
    }
)

# Attributes that hold a body: what is inside is walked anew each time, as that of a function is.
_BODIES = frozenset({"body", "then_branch", "else_branch"})

_NOBODY = (None, None)

_FunctionId: TypeAlias = tuple[str, str, str]
_MemoKey: TypeAlias = tuple[_FunctionId, tuple[Fact, ...], tuple[tuple[str, str], ...]]


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _weight(size: Dim) -> int:
    return 0 if isinstance(size, int) else size.weight


# Plain loops: the two run for every output of every node.


def _is_tame(shape: Shape, weight: int) -> bool:
    for size in shape:
        if isinstance(size, int):
            if size < 0:
                return False
        elif size.weight > weight:
            return False
    return True


def _heaviest(items: Iterable[Dim]) -> int:
    heaviest = 0
    for item in items:
        if not isinstance(item, int) and item.weight > heaviest:
            heaviest = item.weight
    return heaviest


def _applied(rule: Rule, call: Call) -> Facts:
    try:
        return rule(call)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        node = call.node
        raise InputRefusedError(
            f"Node {(node.name or node.outputs[0].name)!r} ({node.domain or 'ai.onnx'}::{node.op_type}) has inputs or attributes "
            f"that its operator does not allow ({error}): check the model, for example by loading it in ONNX Runtime."
        ) from error


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """What an initializer holds that nobody can feed; None for any other value."""
    return value.const_value if value.is_initializer() and not value.is_graph_input() else None


class Session:
    """What all frames of one model share."""

    def __init__(self, model: ir.Model, unknowns: int = 0) -> None:
        self.model = model
        self.overridable = model.ir_version is None or model.ir_version >= 4
        self.body_nodes = 0
        self.open_functions: set[_FunctionId] = set()
        self.memo: dict[_MemoKey, Frame] = {}
        self._unknowns = unknowns
        self._sizes: dict[str, Dim | None] = {}
        self._positive = _never_empty(model.graph.inputs)

    @property
    def unknowns(self) -> int:
        """How many unknowns have been handed out."""
        return self._unknowns

    def fresh(self, *, signed: bool = False) -> Expr:
        """A new anonymous size or, ``signed``, tensor element."""
        self._unknowns += 1
        return unknown(self._unknowns, signed=signed)

    def size(self, text: str) -> Dim | None:
        """The size that the file declares as ``text``; None where that says nothing."""
        if text not in self._sizes:
            parsed = parse_dim(text)
            self._sizes[text] = None if parsed is None else substitute(parsed, self._positive)
        return self._sizes[text]


def _never_empty(inputs: Iterable[ir.Value]) -> dict[str, Dim]:
    """The names that are an axis of an integer or boolean input, or rows or columns of an image, as positive symbols.

    Such inputs are token ids, positions and masks, and no language model runs on none of them, while caches may be
    empty; there may be no image, but none without rows and columns. Without this ``x[:, -1:]`` would have ``min(seq, 1)``
    rows, and ``x[:, -seq:]`` as many as ``x`` for seq 0.
    """
    names: dict[str, Dim] = {}
    for value in inputs:
        sizes = tuple(value.shape or ())
        if value.dtype not in INTEGERS:
            sizes = sizes[-2:] if len(sizes) > 3 and is_image_name(value.name) else ()
        for size in sizes:
            parsed = None if isinstance(size, int) else parse_dim(size.value or "")
            atom = parsed.atom if isinstance(parsed, Expr) else None
            if isinstance(atom, Symbol):
                names[atom.name] = symbol(atom.name, positive=True)
    return names


class Frame:
    """Facts of the values of one graph with its subgraphs, or of one function body in one context.

    A frame may take over from an ``earlier`` one of the same graph: a node that reads what it read then, with the same
    facts, gives what it gave then. Attributes are taken to be as they were: an edit replaces a node, it does not change one.
    """

    def __init__(
        self,
        session: Session,
        opsets: Mapping[str, int],
        attributes: Mapping[str, ir.Attr] | None,
        unsure: frozenset[str] = frozenset(),
        earlier: Frame | None = None,
    ) -> None:
        """Make a frame without facts.

        Args:
            session: what all frames of the model share.
            opsets: imports that apply.
            attributes: of the call; None for the main graph.
            unsure: names of attributes that calls differ in: a node that refers to one is not looked at.
            earlier: the frame of the same graph before an edit.
        """
        self.session = session
        self.facts: dict[ir.Value, Fact] = {}
        self.calls: dict[ir.Node, Frame] = {}
        self.renewed = 0
        self._earlier = earlier
        # What each node read, for nodes whose facts rest on that alone.
        self.read: dict[ir.Node, Sequence[ir.Value | None]] = {}
        # What graph inputs and initializers said when they were first asked, and the tensor that said it.
        self.sources: dict[ir.Value, tuple[Fact, ir.TensorProtocol | None]] = {}
        # Values of which something else may be known than the earlier frame knew.
        self._moved: set[ir.Value] = set()
        if earlier is not None:
            self._take_over(earlier)
        self.fresh = session.fresh
        self._opsets = {_domain(domain): version for domain, version in opsets.items()}
        self._attributes = attributes
        self._unsure = unsure

    @property
    def attributes(self) -> Mapping[str, ir.Attr]:
        """The attributes of the call."""
        return self._attributes or {}

    def walk(self, nodes: Iterable[ir.Node]) -> None:
        """Find the facts of every output of ``nodes``."""
        facts = self.facts
        functions = self.session.model.functions
        earlier, moved = self._earlier, self._moved
        opsets, bound = self._opsets, self._attributes is not None
        for node in producers_first(nodes):
            read = node.inputs
            stands = earlier is not None and earlier.read.get(node) == read
            if stands and moved.isdisjoint(read):
                # It is as it was, and so is all that it reads: its facts are there already.
                self.renewed += 1
                continue
            inputs = [NOTHING if value is None else facts.get(value) or self.fact(value) for value in read]
            if earlier is not None and stands and self._renew(node, earlier):
                continue
            attributes = node.attributes.data
            called = bool(functions) and node.op_identifier() in functions
            found: Facts = None
            if self._unsure and any(item.ref_attr_name in self._unsure for item in attributes.values()):
                pass
            elif called:
                found = self._call_function(node, inputs)
            elif (rule := RULES.get((node.domain, node.op_type))) is not None:
                version = node.version or opsets.get(node.domain, 1)
                found = _applied(
                    rule, Call(node, inputs, self._resolved(attributes) if bound else attributes, version, self)
                )
            if self._record(node, found) and not called and _BODIES.isdisjoint(attributes):
                self.read[node] = read
            elif earlier is not None:
                self.read.pop(node, None)

    def forget_earlier(self) -> None:
        """Let go of the frame that this one took over from: the walk is done."""
        self._earlier = None
        self._moved.clear()

    def _take_over(self, earlier: Frame) -> None:
        """Begin with what ``earlier`` knows, but for graph inputs and initializers that may say something else now."""
        self.facts = dict(earlier.facts)
        self.read = dict(earlier.read)
        for value, (_, tensor) in earlier.sources.items():
            if tensor is not None and _constant(value) is tensor:
                self.sources[value] = earlier.sources[value]
            else:
                del self.facts[value]
                self._moved.add(value)

    def _renew(self, node: ir.Node, earlier: Frame) -> bool:
        """Whether ``node``, which reads what it read in ``earlier``, knows the same of it, now that it was looked at."""
        if not self._moved.isdisjoint(node.inputs):
            return False
        for value in node.outputs:
            self._learn(value, earlier.facts[value])
        self.renewed += 1
        return True

    def _learn(self, value: ir.Value, fact: Fact) -> None:
        """Take ``fact`` as what is known of ``value``, which has moved where that is another than the earlier one."""
        self.facts[value] = fact
        if self._earlier is not None:
            # What was learned of a value after it was read is known from the start this time, and tells nothing new.
            if self._earlier.facts.get(value) is fact:
                self._moved.discard(value)
            else:
                self._moved.add(value)

    def fact(self, value: ir.Value) -> Fact:
        """What is known of ``value``; graph inputs and initializers are looked at when first asked for."""
        known = self.facts.get(value)
        if known is None:
            known = self._renewed_source(value, self._earlier)
            self._learn(value, known)
        return known

    def _renewed_source(self, value: ir.Value, earlier: Frame | None) -> Fact:
        constant = _constant(value)
        if earlier is not None and constant is not None and earlier.sources.get(value, _NOBODY)[1] is constant:
            self.sources[value] = earlier.sources[value]
            return earlier.facts[value]
        source = self._source(value)
        if earlier is not None and earlier.sources.get(value, _NOBODY)[0] == source:
            source = earlier.sources[value][0]
            self.sources[value] = (source, constant)
            return earlier.facts[value]
        self.sources[value] = (source, constant)
        return source

    def contents(self, value: ir.Value) -> ShapeValue | None:
        """Contents of ``value``; a small integer scalar or list that nobody knows gets fresh unknowns, once."""
        fact = self.fact(value)
        if fact.value is not None or fact.shape is None or fact.dtype not in INTEGERS or len(fact.shape) > 1:
            return fact.value
        size = fact.shape[0] if fact.shape else 1
        if not isinstance(size, int) or size > MAX_VALUE_ITEMS:
            return None
        items = tuple(self.fresh(signed=True) for _ in range(size))
        contents = ShapeValue(items, (size,) if fact.shape else ())
        self._learn(value, fact._replace(value=contents))
        return contents

    def run_graph(self, graph: ir.Graph, inputs: Sequence[Fact]) -> list[Fact]:
        """Walk a body of this frame, with ``inputs`` as facts of its formal inputs; facts of its outputs."""
        for formal, given in zip(graph.inputs, inputs, strict=False):
            self._learn(formal, given)
        self.walk(graph)
        return [self.fact(value) for value in graph.outputs]

    def _source(self, value: ir.Value) -> Fact:
        shape = self._declared(value)
        if value.is_initializer() and value.const_value is not None:
            tensor = value.const_value
            if shape is None or not value.is_graph_input():
                shape = tuple(tensor.shape.numpy())
            array = constant_of(value, overridable=self.session.overridable)
            return Fact(shape, tensor.dtype, ShapeValue.of_constant(array))
        if isinstance(value.type, ir.SequenceType | ir.OptionalType):
            # The shape that the file declares is that of the elements.
            return Fact(element=Fact(shape, value.dtype))
        return Fact(shape, value.dtype)

    def _declared(self, value: ir.Value) -> Shape | None:
        if value.shape is None:
            return None
        return tuple(self._declared_dim(size) for size in value.shape)

    def _declared_dim(self, size: int | ir.SymbolicDimProtocol) -> Dim:
        if isinstance(size, int):
            return size if size >= 0 else self.fresh()
        parsed = self.session.size(size.value or "")
        return self.fresh() if parsed is None else parsed

    def _record(self, node: ir.Node, found: Facts) -> bool:
        """Record what was found of the outputs of ``node``; whether nothing that the file declares of them was used."""
        outputs = node.outputs
        if isinstance(found, Fact) and len(outputs) == 1:
            return self._conclude(outputs[0], found)
        listed: Sequence[Fact] = () if found is None else (found,) if isinstance(found, Fact) else found
        inferred = [
            self._conclude(value, listed[position] if position < len(listed) else NOTHING)
            for position, value in enumerate(outputs)
        ]
        return all(inferred)

    def _conclude(self, value: ir.Value, fact: Fact) -> bool:
        """Record what a rule found of ``value``; whether nothing that the file declares of it was used."""
        known = self._source(value) if fact is NOTHING else self._settled(fact, value)
        if self._earlier is None:
            self.facts[value] = known
        else:
            self._learn(value, self._unchanged(value, known))
        return fact.element is not None or (fact.shape is not None and fact.dtype is not None)

    def _unchanged(self, value: ir.Value, fact: Fact) -> Fact:
        """``fact``, as the very object that the earlier frame had of ``value`` where it is equal: what reads it stands."""
        before = self._earlier.facts.get(value) if self._earlier is not None else None
        return before if before is not None and before == fact else fact

    def _settled(self, fact: Fact, value: ir.Value) -> Fact:
        """``fact`` without what is unwieldy, and with what the file says of ``value`` where it knows nothing."""
        shape, dtype, contents, element, _ = fact
        if element is None:
            if shape is None:
                shape = self._declared(value)
            elif not _is_tame(shape, _MAX_WEIGHT):
                shape = self._tamed(shape)
        if contents is not None and _heaviest(contents.items) > _MAX_CONTENT_WEIGHT:
            contents = None
        if shape is fact.shape and dtype is not None and contents is fact.value:
            return fact
        return Fact(shape, dtype or value.dtype, contents, element)

    def _tamed(self, shape: Shape) -> Shape:
        """``shape`` without unwieldy expressions and without the negative sizes of a broken graph."""
        return tuple(
            size if (isinstance(size, int) and size >= 0) or 0 < _weight(size) <= _MAX_WEIGHT else self.fresh()
            for size in shape
        )

    def _resolved(self, attributes: Mapping[str, ir.Attr]) -> Mapping[str, ir.Attr]:
        """The attributes of a node, references to those of the call followed."""
        if self._attributes is None:
            return attributes
        resolved: dict[str, ir.Attr] = {}
        for name, attribute in attributes.items():
            bound = self._attributes.get(attribute.ref_attr_name or "") if attribute.is_ref() else attribute
            if bound is not None:
                resolved[name] = bound
        return resolved

    def _call_function(self, node: ir.Node, inputs: list[Fact]) -> list[Fact] | None:
        session = self.session
        identifier = node.op_identifier()
        function = session.model.functions[identifier]
        if identifier in session.open_functions or session.body_nodes > _MAX_BODY_NODES:
            return None
        attributes = {name: value for name, value in function.attributes.items() if value.value is not None}
        attributes.update(self._resolved(node.attributes.data))
        plain = tuple(sorted((name, str(attribute.value)) for name, attribute in attributes.items()))
        key = (identifier, tuple(inputs), plain)
        frame = session.memo.get(key)
        if frame is None:
            unknowns = session.unknowns
            frame = type(self)(session, function.opset_imports, attributes)
            session.open_functions.add(identifier)
            session.body_nodes += len(function)
            for position, formal in enumerate(function.inputs):
                frame.facts[formal] = inputs[position] if position < len(inputs) else NOTHING
            frame.walk(function)
            session.open_functions.discard(identifier)
            # A body that made unknowns stands for one call only: another call may have other sizes there.
            if session.unknowns == unknowns:
                session.memo[key] = frame
        self.calls[node] = frame
        return [frame.fact(value) for value in function.outputs]
