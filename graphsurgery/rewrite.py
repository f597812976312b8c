"""The one way an edit enters a graph.

A :class:`Rewrite` stands for the edit of one site. It edits the main graph, a subgraph of it, or the body of a function,
once for all callers: there constants are nodes, since a function holds no initializers, and a value of the callers
comes in as a further parameter. It inserts nodes with telling, unique names and provenance
metadata, reroutes edges, changes the interface, removes what became dead, and records the boundary before and after,
so that the region can be lifted out and checked later. What surgery inserts is valid at the model's own opset, and
its constants are inline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.editing.call_parameters import CallParameters
from graphsurgery.editing.dead_nodes import captured, remove_dead
from graphsurgery.editing.insertion import InsertionPoint
from graphsurgery.errors import UsageError
from graphsurgery.names import Names
from graphsurgery.site_report import Boundary
from graphsurgery.weights.obstacles import checked
from graphsurgery.weights.records import WEIGHT_KEY, record_of
from graphsurgery.weights.tensors import realise

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.weights import Part

__all__ = ["CHANGED_KEY", "PASS_KEY", "SITE_KEY", "Rewrite"]

PASS_KEY = "graphsurgery.pass"
SITE_KEY = "graphsurgery.site"
CHANGED_KEY = "graphsurgery.changed"
"""Metadata of a node that was kept and no longer gives what it gave: the pass that changed what it computes on."""

_WEIGHTS_KEY = "graphsurgery.made_weights"


class Rewrite:
    """The edit of one site in one graph.

    Args:
        model: the model that is edited.
        pass_name: recorded in the metadata of what is inserted.
        site_id: recorded too.
        scope: prefix of the names of what is inserted (``lm_head/prune_last_token``).
        body: the main graph or function body that is edited; the main graph where none is given.
        graph: the graph in which nodes are inserted: ``body``'s own, or one of its subgraphs.
    """

    def __init__(
        self,
        model: ir.Model,
        pass_name: str,
        site_id: str,
        *,
        scope: str,
        body: Body | None = None,
        graph: ir.Graph | None = None,
    ) -> None:
        self.model = model
        self.body_of = body
        self._function = body.function if body is not None else None
        root = body.graph if body is not None else model.graph
        self._point = InsertionPoint(graph if graph is not None else root)
        self._root = root
        self._pass_name = pass_name
        self._site_id = site_id
        self._scope = scope
        self._names = Names.of(model)
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._integers: dict[int | tuple[int, ...], ir.Value] = {}
        self._lost_users: list[ir.Value] = []
        self._discarded: list[ir.Node] = []
        self._boundaries: list[Boundary] = []
        self._parameters = CallParameters(body)
        if self._function is not None:
            # Before the walk below: a body may use nothing but a vendor's operators so far.
            self._function.opset_imports.setdefault("", model.opset_imports.get("", 1))
        self.inserted = 0
        """Number of nodes inserted so far, those of bodies included."""

    def at_site(self, site_id: str, scope: str) -> None:
        """What follows belongs to another site: of a pass whose sites share nodes."""
        self._site_id, self._scope = site_id, scope

    @property
    def opset(self) -> int:
        """Version of the default domain that the model, or the function that is edited, imports."""
        return self._imports.get("", 1)

    @property
    def _imports(self) -> dict[str, int]:
        return self.model.opset_imports if self._function is None else self._function.opset_imports

    @property
    def inputs(self) -> Sequence[ir.Value]:
        """What is known at the start of :attr:`graph`: the inputs of the model, or the parameters of the function."""
        return self._root.inputs

    def is_parameter(self, value: ir.Value) -> bool:
        """Whether ``value`` is a parameter of the function that is edited."""
        return self._function is not None and any(item is value for item in self._function.inputs)

    # ---- where nodes go -------------------------------------------------------------------------------------------

    @property
    def graph(self) -> ir.Graph:
        """Where nodes are inserted while no body is open."""
        return self._point.graph

    @property
    def place(self) -> ir.Graph:
        """The graph in which nodes are being inserted: what is made in one body cannot be read in another."""
        return self._point.place

    def at_start(self) -> None:
        """Insert what follows before all nodes of :attr:`graph`, behind what this rewrite has put there already."""
        self._point.at_start()

    def after(self, value: ir.Value) -> None:
        """Insert what follows right behind the node that makes ``value`` (at the start where none does)."""
        self._point.after(value)

    def before(self, node: ir.Node) -> None:
        """Insert what follows in front of ``node``, each behind the one before."""
        self._point.before(node)

    def prologue(self) -> contextlib.AbstractContextManager[None]:
        """Insert at the start of :attr:`graph` within the block, then go on where it was before."""
        return self._point.prologue()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Insert wherever the block says, then go on where it was before."""
        return self._point.aside()

    def inside(self, body: ir.Graph) -> contextlib.AbstractContextManager[None]:
        """Append to ``body``, a subgraph in the making, within the block."""
        return self._point.inside(body)

    def outside(self) -> contextlib.AbstractContextManager[None]:
        """Insert in :attr:`graph`, where it was, within the block: what several bodies are to read."""
        return self._point.outside()

    def _insert(self, node: ir.Node) -> None:
        self.inserted += 1
        self._point.insert(node)

    # ---- what is inserted -----------------------------------------------------------------------------------------

    def emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Any] | None = None,
        *,
        name: str,
        dtype: ir.DataType | None,
        shape: Sequence[int | str | None] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Insert a node with one output at the current place.

        Args:
            op_type: operator.
            inputs: its inputs; None for an optional input that is left out.
            attributes: plain Python values.
            name: last part of the name of node and value.
            dtype: element type of the output; None where it is not known.
            shape: its shape: sizes, names of symbolic sizes, None for unknown; None where the rank is not known.
            domain: operator domain; imported into the model where it is not yet.

        Returns:
            The output.
        """
        hint = f"{self._scope}/{name}"
        if domain and domain not in self._imports:
            self._imports[domain] = self.model.opset_imports.setdefault(domain, 1)
        listed = [_attribute(key, value) for key, value in attributes.items()] if attributes else ()
        output = ir.Value(
            name=self._names.value(hint),
            type=None if dtype is None else ir.TensorType(dtype),
            shape=None if shape is None else ir.Shape(shape),
        )
        self._add(domain, op_type, inputs, listed, hint, [output])
        return output

    def _add(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr],
        hint: str,
        outputs: Sequence[ir.Value],
        metadata: Mapping[str, str] | None = None,
    ) -> ir.Node:
        """Insert a tagged node that makes ``outputs``, which are new."""
        tags = {PASS_KEY: self._pass_name, SITE_KEY: self._site_id}
        node = ir.Node(
            domain,
            op_type,
            inputs,
            attributes,
            outputs=outputs,
            name=self._names.node(hint),
            metadata_props={**metadata, **tags} if metadata else tags,
        )
        self._insert(node)
        return node

    def body(self, name: str, inputs: Sequence[tuple[str, ir.TypeProtocol, Sequence[int | str | None]]]) -> ir.Graph:
        """An empty subgraph for :meth:`inside`, with formal inputs of the given names, types and shapes."""
        formals = [
            ir.Value(name=self._names.value(f"{self._scope}/{hint}"), type=kind, shape=ir.Shape(shape))
            for hint, kind, shape in inputs
        ]
        return ir.Graph(formals, [], nodes=[], name=self._names.value(f"{self._scope}/{name}"))

    def emit_holder(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        bodies: dict[str, ir.Graph],
        *,
        name: str,
        outputs: int = 1,
    ) -> list[ir.Value]:
        """Insert an If or Loop with finished bodies; its outputs have no declared types."""
        hint = f"{self._scope}/{name}"
        attributes = [ir.AttrGraph(key, graph) for key, graph in bodies.items()]
        made = [ir.Value(name=self._names.value(hint)) for _ in range(outputs)]
        self._add("", op_type, inputs, attributes, hint, made)
        return made

    def add_function(self, function: ir.Function, *, first: bool = False) -> None:
        """Add a local function; its body imports what the model imports, and every function its domain.

        Args:
            function: new; it calls functions that are there already.
            first: other functions will call it, so that it comes before them.
        """
        imports = self.model.opset_imports
        imports.setdefault(function.domain, 1)
        functions = self.model.functions
        others = list(functions.values()) if first else []
        for other in others:
            del functions[other.identifier()]
        for item in (function, *others):
            functions[item.identifier()] = item
            # ONNX Runtime reads a body with the imports of the model.
            for domain, version in imports.items():
                item.opset_imports.setdefault(domain, version)

    def emit_call(self, function: ir.Function, inputs: Sequence[ir.Value], *, name: str) -> ir.Node:
        """Insert a call of ``function``; its outputs have no names yet.

        Args:
            function: a local function.
            inputs: one for each of its inputs.
            name: last part of the name of the node; the scope is not put before it.
        """
        outputs = len(function.outputs)
        node = ir.Node(function.domain, function.name, inputs, num_outputs=outputs, name=self._names.node(name))
        self._tag(node)
        self._insert(node)
        return node

    def adopt(self, node: ir.Node) -> None:
        """Insert a finished node at the current place; what was tagged by another pass keeps its tag."""
        if PASS_KEY not in node.metadata_props:
            self._tag(node)
        self._insert(node)

    def fresh_node_name(self, hint: str) -> str:
        """A name for a node that no node has: ``hint``, or ``hint_1`` and so on."""
        return self._names.node(hint)

    def fresh_name(self, hint: str) -> str:
        """A name for a value that no value has: ``hint``, or ``hint_1`` and so on."""
        return self._names.value(hint)

    def discard(self, nodes: Iterable[ir.Node]) -> None:
        """Remove ``nodes`` at the next sweep; nothing but they themselves reads what they make."""
        self._discarded += nodes

    def take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Let ``new`` stand for ``old`` everywhere: users, name, type, shape and place among the outputs.

        The node that makes ``old`` is to be discarded.
        """
        new.type, new.shape, new.doc_string = old.type, old.shape, old.doc_string
        if old.is_graph_output():
            self.replace_all_uses(old, new)
        else:
            name, old.name = old.name, None
            new.name = name
            new.metadata_props.update(old.metadata_props)
            for use in list(old.uses()):
                use.node.replace_input_with(use.idx, new)

    def clone(self, node: ir.Node, inputs: Sequence[ir.Value | None], *, name: str) -> ir.Value:
        """Insert a node like ``node``, which has one output, on other inputs; its shape is not declared.

        Args:
            node: what is replayed.
            inputs: what the copy reads.
            name: last part of the name of the copy and its output.
        """
        hint = f"{self._scope}/{name}"
        output = ir.Value(name=self._names.value(hint), type=node.outputs[0].type)
        self._add(node.domain, node.op_type, inputs, _listed(node), hint, [output], node.metadata_props)
        return output

    def replay(
        self,
        node: ir.Node,
        inputs: Sequence[ir.Value | None],
        *,
        name: str,
        overrides: Mapping[str, Any] | None = None,
        dtypes: Sequence[ir.DataType | None] | None = None,
    ) -> list[ir.Value]:
        """Insert a node like ``node`` on other inputs, all of its outputs included; shapes are not declared.

        Args:
            node: what is replayed.
            inputs: what the copy reads.
            name: last part of the name of the copy and its outputs.
            overrides: attributes that differ, as plain Python values; None for one that is left out.
            dtypes: element types of the outputs, where they are not those that ``node`` declares.
        """
        hint = f"{self._scope}/{name}"
        attributes = _listed(node)
        if overrides:
            attributes = [item for item in attributes if item.name not in overrides]
            attributes += [_attribute(key, value) for key, value in overrides.items() if value is not None]
        count = len(node.outputs)
        made = []
        for place, old in enumerate(node.outputs):
            dtype = dtypes[place] if dtypes is not None else None
            kind = old.type if dtype is None else ir.TensorType(dtype)
            made.append(ir.Value(name=self._names.value(hint if count == 1 else f"{hint}.{place}"), type=kind))
        self._add(node.domain, node.op_type, inputs, attributes, hint, made, node.metadata_props)
        return made

    def emit_parts(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any], names: Sequence[str]
    ) -> list[ir.Value]:
        """Insert a node with one output for each of ``names``, all of the element type of its first input."""
        listed = [_attribute(key, value) for key, value in attributes.items()]
        hint = f"{self._scope}/{names[0]}"
        kind = inputs[0].type if inputs[0] is not None else None
        made = [ir.Value(name=self._names.value(f"{self._scope}/{name}"), type=kind) for name in names]
        self._add("", op_type, inputs, listed, hint, made)
        return made

    def constant(self, array: np.ndarray | Sequence[int] | int, name: str = "const") -> ir.Value:
        """An inline constant; integers become int64. Equal constants of one rewrite are one value.

        An initializer of the main graph, or a node at the start of a function body.
        """
        if isinstance(array, np.ndarray):
            return self._constant(array, name)
        # Most are small lists of numbers that were asked for before.
        numbers = array if isinstance(array, int) else tuple(array)
        known = self._integers.get(numbers)
        if known is None:
            known = self._integers[numbers] = self._constant(np.asarray(numbers, dtype=np.int64), name)
        return known

    def _constant(self, array: np.ndarray, name: str) -> ir.Value:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants and (self._function is not None or self.model.ir_version < 4):
            # A function has no initializers; before IR version 4 one had to be an input of the graph too, which is not
            # ours to change.
            dtype, tensor = ir.DataType.from_numpy(array.dtype), ir.tensor(array)
            with self.prologue():
                made = self.emit("Constant", [], {"value": tensor}, name=name, dtype=dtype, shape=array.shape)
            self._constants[key] = made
        if key not in self._constants:
            unique = self._names.value(f"{self._scope}/{name}")
            value = ir.Value(name=unique, const_value=ir.tensor(array, name=unique))
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            value.shape = ir.Shape(array.shape)
            self.model.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def weight(self, expression: Part, name: str) -> ir.Value:
        """The initializer of the main graph that holds what ``expression`` gives; one for equal expressions of a model.

        Views of a data file, and stacks of parts that lie one behind the other in it, are references to it; anything
        else is laid out when the model is saved. What the expression is made of may then go: see :meth:`sweep`.

        Args:
            expression: over initializers of the model, see :mod:`graphsurgery.weights`.
            name: last part of the name of the initializer, where it is a new one.

        Returns:
            The initializer; a source itself where the expression is all of it as it is.

        Raises:
            UsageError: :func:`graphsurgery.weights.obstacle` has something to say against it.
        """
        reason, simple = checked(expression)
        if reason is not None:
            raise UsageError(f"The weight {self._scope}/{name} cannot be made: {reason}")
        if isinstance(simple, ir.Value) and simple.graph is self.model.graph:
            return simple
        known: dict[Part, ir.Value] = self.model.meta.setdefault(_WEIGHTS_KEY, {})
        made = known.get(simple)
        if made is None or made.graph is not self.model.graph:
            unique = self._names.value(f"{self._scope}/{name}")
            tensor = realise(simple, unique, {WEIGHT_KEY: record_of(expression)})
            made = ir.Value(name=unique, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
            self.model.graph.register_initializer(made)
            known[simple] = made
        return made

    def parameter(self, values: Sequence[ir.Value], name: str) -> ir.Value:
        """What each call of the function that is edited hands over, as a formal parameter.

        Args:
            values: for each call of the function, in order, a value that is known there.
            name: of the parameter, where none of those that there are carries these values already.

        Raises:
            ValueError: no function is edited, or not all of its calls are known.
        """
        return self._parameters.get(values, lambda: self._names.value(f"{self._scope}/{name}"))

    def _tag(self, node: ir.Node) -> None:
        node.metadata_props[PASS_KEY] = self._pass_name
        node.metadata_props[SITE_KEY] = self._site_id

    def mark_changed(self, node: ir.Node) -> None:
        """``node`` stays, and will no longer give what it gave before, beyond what shapes tell."""
        node.metadata_props[CHANGED_KEY] = self._pass_name

    # ---- edges ----------------------------------------------------------------------------------------------------

    def reroute(self, node: ir.Node, index: int, value: ir.Value | None) -> None:
        """Let input ``index`` of ``node`` read ``value`` from now on."""
        old = node.inputs[index]
        if old is value:
            return
        node.replace_input_with(index, value)
        if old is not None:
            self._lost_users.append(old)

    def release(self, value: ir.Value) -> None:
        """Let ``value``, which was made in case it is needed, go where nothing reads it."""
        self._lost_users.append(value)

    # ---- the model's interface ------------------------------------------------------------------------------------

    def add_input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str], doc: str) -> ir.Value:
        """A new graph input, behind all others. The caller has made sure that the name is free."""
        value = ir.Value(name=self._names.value(name), type=ir.TensorType(dtype), shape=ir.Shape(shape), doc_string=doc)
        self.model.graph.inputs.append(value)
        return value

    def replace_all_uses(self, old: ir.Value, new: ir.Value, *, but: Collection[ir.Node] = ()) -> None:
        """Let everything that reads ``old`` read ``new``; where it is a graph output, ``new`` takes over the name.

        Args:
            old: a value.
            new: what replaces it.
            but: nodes that go on reading ``old``.
        """
        if old.is_graph_output():
            self.replace_output(old, new, f"{old.name}/before")
        for use in list(old.uses()):
            if use.node not in but:
                use.node.replace_input_with(use.idx, new)
        self._lost_users.append(old)

    def replace_output(self, output: ir.Value, replacement: ir.Value, inner_hint: str) -> None:
        """Let the output ``output`` of its graph be ``replacement``: it takes over the name; the old value gets another.

        Users of ``output`` inside the graph keep reading the old value.
        """
        name = output.name
        assert name is not None
        owner = output.graph
        assert owner is not None
        # Of the main graph, a subgraph, or the body of a function.
        outputs = owner.outputs
        position = next(index for index, value in enumerate(outputs) if value is output)
        output.name = self._names.value(inner_hint)
        outputs[position] = replacement
        replacement.name = name
        if output.metadata_props:
            replacement.metadata_props.update(output.metadata_props)
        replacement.doc_string = output.doc_string

    # ---- closing --------------------------------------------------------------------------------------------------

    def record(
        self,
        inputs_before: Iterable[ir.Value | str],
        outputs_before: Iterable[str],
        inputs_after: Iterable[ir.Value | str],
        outputs_after: Iterable[str],
        scope: str = "main",
    ) -> None:
        """Store the boundary of the region, before and after; a value that was renamed is given by the name it had."""
        self._boundaries.append(
            Boundary(
                scope,
                tuple(item if isinstance(item, str) else item.name or "" for item in inputs_before),
                tuple(outputs_before),
                tuple(item if isinstance(item, str) else item.name or "" for item in inputs_after),
                tuple(outputs_after),
            )
        )

    def sweep(self) -> None:
        """Remove what the edit has left without users so far."""
        # A constant may have thousands of readers among them: it is asked once whether any is left.
        read: dict[ir.Value, None] = {}
        by_graph: dict[ir.Graph, list[ir.Node]] = {}
        for node in self._discarded:
            read.update(dict.fromkeys(value for value in node.inputs if value is not None))
            read.update(dict.fromkeys(captured(node)))
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
            assert node.graph is not None
            by_graph.setdefault(node.graph, []).append(node)
        for graph, nodes in by_graph.items():
            graph.remove(nodes)
        self._discarded.clear()
        gone = {value for value in read if (maker := value.producer()) is not None and maker.graph is None}
        remove_dead([*self._lost_users, *(value for value in read if value not in gone)])
        self._lost_users.clear()

    def commit(self) -> tuple[Boundary, ...]:
        """Remove what the edit left without users, drop cached analyses, return the recorded boundaries."""
        self.sweep()
        self._parameters.drop_unread()
        invalidate(self.model)
        return tuple(self._boundaries)


def _listed(node: ir.Node) -> list[ir.Attr]:
    return list(node.attributes.data.values())


def _attribute(name: str, value: Any) -> ir.Attr:
    # onnx-ir finds the type of a value by trying protocols, which takes longer than making the node: integers go first.
    if type(value) is int:
        return ir.AttrInt64(name, value)
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        return ir.AttrInt64s(name, value)
    return ir.convenience.convert_attribute(name, value)
