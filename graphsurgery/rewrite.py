"""The one way an edit enters a graph.

A :class:`Rewrite` stands for the edit of one site. It inserts nodes with telling, unique names and provenance
metadata, reroutes edges, changes the interface, removes what became dead, and records the boundary before and after,
so that the region can be lifted out and checked later. What surgery inserts is valid at the model's own opset, and
its constants are inline.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.errors import UsageError
from graphsurgery.names import Names
from graphsurgery.site_report import Boundary
from graphsurgery.weights.obstacles import checked
from graphsurgery.weights.records import WEIGHT_KEY, record_of
from graphsurgery.weights.tensors import realise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from graphsurgery.weights import Part

__all__ = ["PASS_KEY", "SITE_KEY", "Rewrite"]

PASS_KEY = "graphsurgery.pass"
SITE_KEY = "graphsurgery.site"

_WEIGHTS_KEY = "graphsurgery.made_weights"


class Rewrite:
    """The edit of one site in one graph.

    Args:
        model: the model that is edited.
        pass_name: recorded in the metadata of what is inserted.
        site_id: recorded too.
        scope: prefix of the names of what is inserted (``lm_head/prune_last_token``).
    """

    def __init__(self, model: ir.Model, pass_name: str, site_id: str, *, scope: str) -> None:
        self.model = model
        self.graph = model.graph
        self._pass_name = pass_name
        self._site_id = site_id
        self._scope = scope
        self._names = Names.of(model)
        self._last: ir.Node | None = None
        self._next: ir.Node | None = None
        self._body: ir.Graph | None = None
        self._prologue_end: ir.Node | None = None
        self._in_prologue = True
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._lost_users: list[ir.Value] = []
        self._boundaries: list[Boundary] = []
        self.inserted = 0
        """Number of nodes inserted so far, those of bodies included."""

    def at_site(self, site_id: str, scope: str) -> None:
        """What follows belongs to another site: of a pass whose sites share nodes."""
        self._site_id, self._scope = site_id, scope

    @property
    def opset(self) -> int:
        """Version of the default domain that the model imports."""
        return self.model.opset_imports.get("", 1)

    # ---- where nodes go -------------------------------------------------------------------------------------------

    def at_start(self) -> None:
        """Insert what follows before all nodes of the graph, behind what this rewrite has put there already."""
        self._last, self._next = self._prologue_end, None
        self._in_prologue = True

    def after(self, value: ir.Value) -> None:
        """Insert what follows right behind the node that makes ``value`` (at the start where none does)."""
        node = value.producer()
        if node is None:
            self.at_start()
            return
        self._last, self._next = node, None
        self._in_prologue = node is self._prologue_end

    def before(self, node: ir.Node) -> None:
        """Insert what follows in front of ``node``, each behind the one before."""
        self._last, self._next, self._in_prologue = None, node, False

    @property
    def place(self) -> ir.Graph:
        """The graph in which nodes are being inserted: what is made in one body cannot be read in another."""
        return self._body if self._body is not None else self.graph

    @contextlib.contextmanager
    def prologue(self) -> Iterator[None]:
        """Insert at the start of the main graph within the block, then go on where it was before."""
        saved = (self._last, self._next, self._in_prologue, self._body)
        self._body = None
        self.at_start()
        yield
        self._last, self._next, self._in_prologue, self._body = saved
        if self._in_prologue:
            # It was at the start: what follows comes behind what was just inserted, and may read it.
            self._last = self._prologue_end

    @contextlib.contextmanager
    def inside(self, body: ir.Graph) -> Iterator[None]:
        """Append to ``body``, a subgraph in the making, within the block."""
        saved = self._body
        self._body = body
        yield
        self._body = saved

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Insert in the main graph, where it was, within the block: what several bodies are to read."""
        saved = self._body
        self._body = None
        yield
        self._body = saved

    def _insert(self, node: ir.Node) -> None:
        self.inserted += 1
        if self._body is not None:
            self._body.append(node)
            return
        if self._next is not None:
            graph = self._next.graph
            assert graph is not None
            graph.insert_before(self._next, node)
            return
        if self._last is not None:
            graph = self._last.graph
            assert graph is not None
            graph.insert_after(self._last, node)
        else:
            first = next(iter(self.graph), None)
            if first is None:
                self.graph.append(node)
            else:
                self.graph.insert_before(first, node)
        self._last = node
        if self._in_prologue:
            self._prologue_end = node

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
        if domain and domain not in self.model.opset_imports:
            self.model.opset_imports[domain] = 1
        listed = [_attribute(key, value) for key, value in attributes.items()] if attributes else ()
        node = ir.Node(domain, op_type, inputs, listed, name=self._names.node(hint))
        output = node.outputs[0]
        output.name = self._names.value(hint)
        if dtype is not None:
            output.type = ir.TensorType(dtype)
        if shape is not None:
            output.shape = ir.Shape(shape)
        self._tag(node)
        self._insert(node)
        return output

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
        node = ir.Node("", op_type, inputs, attributes, num_outputs=outputs, name=self._names.node(hint))
        for value in node.outputs:
            value.name = self._names.value(hint)
        self._tag(node)
        self._insert(node)
        return list(node.outputs)

    def clone(self, node: ir.Node, inputs: Sequence[ir.Value | None], *, name: str) -> ir.Value:
        """Insert a node like ``node``, which has one output, on other inputs; its shape is not declared.

        Args:
            node: what is replayed.
            inputs: what the copy reads.
            name: last part of the name of the copy and its output.
        """
        hint = f"{self._scope}/{name}"
        attributes = list(node.attributes.values())
        copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=1, name=self._names.node(hint))
        output = copy.outputs[0]
        output.name = self._names.value(hint)
        output.type = node.outputs[0].type
        for key, text in node.metadata_props.items():
            copy.metadata_props[key] = text
        self._tag(copy)
        self._insert(copy)
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
        changed = overrides or {}
        attributes = [item for key, item in node.attributes.items() if key not in changed]
        attributes += [_attribute(key, value) for key, value in changed.items() if value is not None]
        count = len(node.outputs)
        copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=count, name=self._names.node(hint))
        for place, (made, old) in enumerate(zip(copy.outputs, node.outputs, strict=True)):
            made.name = self._names.value(hint if count == 1 else f"{hint}.{place}")
            made.type = old.type
            dtype = dtypes[place] if dtypes is not None else None
            if dtype is not None:
                made.type = ir.TensorType(dtype)
        copy.metadata_props.update(node.metadata_props)
        self._tag(copy)
        self._insert(copy)
        return list(copy.outputs)

    def emit_parts(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any], names: Sequence[str]
    ) -> list[ir.Value]:
        """Insert a node with one output for each of ``names``, all of the element type of its first input."""
        listed = [_attribute(key, value) for key, value in attributes.items()]
        hint = f"{self._scope}/{names[0]}"
        node = ir.Node("", op_type, inputs, listed, num_outputs=len(names), name=self._names.node(hint))
        for value, name in zip(node.outputs, names, strict=True):
            value.name = self._names.value(f"{self._scope}/{name}")
            if inputs[0] is not None:
                value.type = inputs[0].type
        self._tag(node)
        self._insert(node)
        return list(node.outputs)

    def constant(self, array: np.ndarray | Sequence[int] | int, name: str = "const") -> ir.Value:
        """An inline constant; integers become int64. Equal constants of one rewrite are one value."""
        array = np.asarray(array, dtype=None if isinstance(array, np.ndarray) else np.int64)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants and self.model.ir_version < 4:
            # An initializer had to be an input of the graph too, which is not ours to change.
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

    def _tag(self, node: ir.Node) -> None:
        node.metadata_props[PASS_KEY] = self._pass_name
        node.metadata_props[SITE_KEY] = self._site_id

    # ---- edges ----------------------------------------------------------------------------------------------------

    def reroute(self, node: ir.Node, index: int, value: ir.Value | None) -> None:
        """Let input ``index`` of ``node`` read ``value`` from now on."""
        old = node.inputs[index]
        if old is value:
            return
        node.replace_input_with(index, value)
        if old is not None:
            self._lost_users.append(old)

    # ---- the model's interface ------------------------------------------------------------------------------------

    def add_input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str], doc: str) -> ir.Value:
        """A new graph input, behind all others. The caller has made sure that the name is free."""
        value = ir.Value(name=self._names.value(name), type=ir.TensorType(dtype), shape=ir.Shape(shape), doc_string=doc)
        self.model.graph.inputs.append(value)
        return value

    def replace_all_uses(self, old: ir.Value, new: ir.Value) -> None:
        """Let everything that reads ``old`` read ``new``; where it is a graph output, ``new`` takes over the name."""
        if old.is_graph_output():
            self.replace_output(old, new, f"{old.name}/before")
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, new)
        self._lost_users.append(old)

    def replace_output(self, output: ir.Value, replacement: ir.Value, inner_hint: str) -> None:
        """Let the graph output ``output`` be ``replacement``: it takes over the name; the old value gets another.

        Users of ``output`` inside the graph keep reading the old value.
        """
        name = output.name
        assert name is not None
        outputs = self.model.graph.outputs
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
        remove_dead(self._lost_users)
        self._lost_users.clear()

    def commit(self) -> tuple[Boundary, ...]:
        """Remove what the edit left without users, drop cached analyses, return the recorded boundaries."""
        self.sweep()
        invalidate(self.model)
        return tuple(self._boundaries)


def _attribute(name: str, value: Any) -> ir.Attr:
    # onnx-ir finds the type of a value by trying protocols, which takes longer than making the node: integers go first.
    if type(value) is int:
        return ir.AttrInt64(name, value)
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        return ir.AttrInt64s(name, value)
    return ir.convenience.convert_attribute(name, value)


def remove_dead(values: Iterable[ir.Value]) -> int:
    """Remove the producers of ``values`` that nothing reads any more, and theirs in turn; initializers likewise.

    Graph inputs and outputs, and initializers that are graph inputs too, stay.

    Returns:
        Number of nodes removed.
    """
    pending = list(values)
    doomed: dict[ir.Node, None] = {}
    while pending:
        value = pending.pop()
        if value.uses() or value.is_graph_output():
            continue
        node = value.producer()
        if node is None:
            graph = value.graph
            if graph is not None and value.is_initializer() and not value.is_graph_input():
                graph.initializers.pop(value.name or "", None)
            continue
        if node in doomed or node.graph is None:
            continue
        if any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue
        pending += [item for item in node.inputs if item is not None]
        pending += _captured(node)
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
        doomed[node] = None
    # All at once: each call of remove() collects the outputs of the graph, of which there are two a layer.
    by_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in doomed:
        assert node.graph is not None
        by_graph.setdefault(node.graph, []).append(node)
    for graph, nodes in by_graph.items():
        graph.remove(nodes)
    return len(doomed)


def _captured(node: ir.Node) -> list[ir.Value]:
    """Outer values that the subgraphs of ``node`` read; their uses end with the subgraph."""
    captured: list[ir.Value] = []
    for attribute in node.attributes.values():
        if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            continue
        graphs = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else list(attribute.as_graphs())
        for graph in graphs:
            for inner in list(graph.all_nodes()):
                for index, item in enumerate(inner.inputs):
                    if item is not None and item.graph is not inner.graph:
                        captured.append(item)
                        inner.replace_input_with(index, None)
    return captured
