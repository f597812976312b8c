"""Carrying out a plan of :mod:`graphsurgery.analysis.folding`: constants go in, branches are inlined, dead nodes go."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.editing.dead_nodes import remove_dead
from graphsurgery.names import Names
from graphsurgery.patterns.matcher import all_graphs, subgraphs

if TYPE_CHECKING:
    import numpy as np

    from graphsurgery.analysis.folding import BodyPlan, Folding, FunctionVariant
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.rewrite import Rewrite

__all__ = ["FoldedFunction", "apply_folding"]


@dataclasses.dataclass(frozen=True)
class FoldedFunction:
    """A function after the edit.

    Attributes:
        function: the function: the one that was there, or a copy of it for some of its calls.
        shapes: for each context in which it is called, the shapes in its body.
        origin: the value that ``shapes`` knows for each value of a copy; empty where it is the same.
    """

    function: ir.Function
    shapes: tuple[ShapeView, ...]
    origin: dict[ir.Value, ir.Value]


def apply_folding(rewrite: Rewrite, folding: Folding) -> list[FoldedFunction]:
    """Edit the model as ``folding`` says; the caller commits ``rewrite``.

    A function whose calls need different constants gets a copy for each kind of call; one that is not called any more
    is removed.

    Returns:
        The functions that are called.
    """
    model = rewrite.model
    called_before = _called(model)
    bodies = _function_bodies(model, folding)
    editor = _Editor(rewrite)
    main = _Body(folding.main, None, {}, {}, {})
    for body in (main, *bodies.values()):
        for node, variant in body.plan.calls.items() if body.plan is not None else ():
            target = bodies[id(variant)].function
            assert target is not None
            call = body.node(node)
            call.op_type, call.overload = target.name, target.overload
    for body in (main, *bodies.values()):
        if body.plan is not None:
            editor.edit(body, body.plan)
    for identifier in called_before - _called(model):
        del model.functions[identifier]
    done = []
    for variants in folding.functions.values():
        for variant in variants:
            body = bodies[id(variant)]
            assert body.function is not None
            origin = {copy: value for value, copy in body.values.items()}
            done.append(FoldedFunction(body.function, tuple(variant.views), origin))
    return done


def _called(model: ir.Model) -> set[tuple[str, str, str]]:
    """Identifiers of the functions that are reached from the main graph."""
    found: set[tuple[str, str, str]] = set()
    pending = [model.graph] if model.functions else []
    while pending:
        for node in pending.pop().all_nodes():
            identifier = node.op_identifier()
            if identifier in model.functions and identifier not in found:
                found.add(identifier)
                pending.append(model.functions[identifier].graph)
    return found


# ---- functions ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Body:
    """A graph to be edited, and where in it is what its plan speaks of."""

    plan: BodyPlan | None
    function: ir.Function | None
    nodes: dict[ir.Node, ir.Node]
    values: dict[ir.Value, ir.Value]
    graphs: dict[ir.Graph, ir.Graph]

    def node(self, node: ir.Node) -> ir.Node:
        return self.nodes.get(node, node)

    def value(self, value: ir.Value) -> ir.Value:
        return self.values.get(value, value)

    def graph(self, graph: ir.Graph) -> ir.Graph:
        return self.graphs.get(graph, graph)


def _function_bodies(model: ir.Model, folding: Folding) -> dict[int, _Body]:
    """A body for each variant of each function: the function itself for one of them, copies for the others."""
    bodies: dict[int, _Body] = {}
    copies: dict[tuple[str, str, str], list[ir.Function]] = {}
    for identifier, variants in folding.functions.items():
        own = next((variant for variant in variants if variant.plan is None), variants[0])
        for variant in variants:
            if variant is own:
                bodies[id(variant)] = _Body(variant.plan, variant.function, {}, {}, {})
                continue
            copy = _copy(model, variant, copies.setdefault(identifier, []))
            bodies[id(variant)] = copy
    if copies:
        # A function stands before those that call it, so a copy stands where its original does.
        functions = list(model.functions.items())
        model.functions.clear()
        for identifier, function in functions:
            model.functions[identifier] = function
            for made in copies.get(identifier, ()):
                model.functions[made.identifier()] = made
    return bodies


def _copy(model: ir.Model, variant: FunctionVariant, made: list[ir.Function]) -> _Body:
    original = variant.function
    copy = original.clone()
    number = len(made) + 1
    while (original.domain, f"{original.name}_{number}", original.overload) in model.functions:
        number += 1
    copy.name = f"{original.name}_{number}"
    made.append(copy)
    model.functions[copy.identifier()] = copy
    body = _Body(variant.plan, copy, {}, {}, {})
    body.values.update(zip(original.inputs, copy.inputs, strict=True))
    for old, new in zip(original.graph.all_nodes(), copy.graph.all_nodes(), strict=True):
        body.nodes[old] = new
        body.values.update(zip(old.outputs, new.outputs, strict=True))
        for old_graph, new_graph in zip(subgraphs(old), subgraphs(new), strict=True):
            body.graphs[old_graph] = new_graph
            body.values.update(zip(old_graph.inputs, new_graph.inputs, strict=True))
            body.values.update(zip(old_graph.initializers.values(), new_graph.initializers.values(), strict=True))
    return body


# ---- the edit -----------------------------------------------------------------------------------------------------


class _Editor:
    """Edits bodies; what it inserts is named and tagged by the rewrite."""

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self._names = Names.of(rewrite.model)
        self._repeated: tuple[set[str], set[str]] | None = None
        self._in_functions: dict[object, ir.Value] = {}

    def edit(self, body: _Body, plan: BodyPlan) -> None:
        """Carry out one plan."""
        lost: list[ir.Value] = []
        for value, array in plan.constants.items():
            self._put(body.value(value), array, body.function)
        for node, branch in plan.taken.items():
            holder = body.node(node)
            self._inline(holder, body.graph(branch))
            lost += holder.outputs
        for value, source in plan.bypassed.items():
            bypassed = body.value(value)
            loop = bypassed.producer()
            assert loop is not None
            self._stand_in(bypassed, body.value(source), loop)
            lost.append(bypassed)
        for dead in plan.dead:
            lost += body.node(dead).outputs
        remove_dead(lost)

    def _put(self, value: ir.Value, array: np.ndarray, function: ir.Function | None) -> None:
        """Let whatever reads ``value`` read a constant."""
        uses = list(value.uses())
        if uses:
            constant = self._constant(array, function)
            for use in uses:
                use.node.replace_input_with(use.idx, constant)
        node = value.producer()
        if node is not None and value.is_graph_output():
            # Outputs must be made in the graph itself.
            self._rewrite.before(node)
            self._supersede(value, self._constant_node(array))

    def _constant(self, array: np.ndarray, function: ir.Function | None) -> ir.Value:
        if function is None:
            return self._rewrite.constant(array, _constant_name(array))
        # Functions have no initializers.
        key = (id(function), array.dtype.str, array.shape, array.tobytes())
        if key not in self._in_functions:
            function.opset_imports.setdefault("", self._rewrite.opset)
            self._rewrite.before(next(iter(function)))
            self._in_functions[key] = self._constant_node(array)
        return self._in_functions[key]

    def _constant_node(self, array: np.ndarray) -> ir.Value:
        return self._rewrite.emit(
            "Constant",
            [],
            {"value": ir.tensor(array)},
            name=_constant_name(array),
            dtype=ir.DataType.from_numpy(array.dtype),
            shape=array.shape,
        )

    def _inline(self, holder: ir.Node, branch: ir.Graph) -> None:
        """Move the nodes of ``branch`` in front of the If that holds it, whose outputs they make from then on."""
        parent = holder.graph
        assert parent is not None
        made = list(branch.outputs)
        branch.outputs.clear()
        for value in list(branch.initializers.values()):
            branch.initializers.pop(value.name or "")
            self._make_unique(value)
            parent.register_initializer(value)
        for node in list(branch):
            branch.remove(node)
            if node.name and node.name in self._repeats()[1]:
                node.name = self._names.node(node.name)
            for value in node.outputs:
                self._make_unique(value)
            parent.insert_before(holder, node)
        for value, inner in zip(holder.outputs, made, strict=True):
            self._stand_in(value, inner, holder)

    def _make_unique(self, value: ir.Value) -> None:
        """Branches may use the same names; one graph may not."""
        if value.name and value.name in self._repeats()[0]:
            value.name = self._names.value(value.name)

    def _repeats(self) -> tuple[set[str], set[str]]:
        """Names that several values, and that several nodes, of the model have."""
        if self._repeated is None:
            values: collections.Counter[str] = collections.Counter()
            nodes: collections.Counter[str] = collections.Counter()
            for graph in all_graphs(self._rewrite.model):
                values.update({value.name or "" for value in (*graph.inputs, *graph.initializers.values())})
                for node in graph:
                    nodes[node.name or ""] += 1
                    values.update(value.name or "" for value in node.outputs)
            self._repeated = (
                {name for name, count in values.items() if count > 1},
                {name for name, count in nodes.items() if count > 1},
            )
        return self._repeated

    def _stand_in(self, value: ir.Value, source: ir.Value, holder: ir.Node) -> None:
        """Let ``source`` take the place of ``value``, an output of ``holder``."""
        if value.is_graph_output():
            maker = source.producer()
            if maker is None or maker.graph is not holder.graph or source.is_graph_output():
                self._rewrite.before(holder)
                source = self._rewrite.emit("Identity", [source], name="identity", dtype=None)
                source.type = value.type
            self._supersede(value, source)
            return
        for use in list(value.uses()):
            use.node.replace_input_with(use.idx, source)

    def _supersede(self, old: ir.Value, new: ir.Value) -> None:
        """Let the graph output ``old`` be ``new``, under the same name."""
        graph = old.graph
        assert graph is not None
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, new)
        for position, output in enumerate(graph.outputs):
            if output is old:
                graph.outputs[position] = new
        name = old.name
        old.name = self._names.value(f"{name}/before")
        new.name = name
        new.shape = old.shape if new.shape is None else new.shape
        new.type = old.type if new.type is None else new.type
        new.metadata_props.update(old.metadata_props)
        new.doc_string = old.doc_string


def _constant_name(array: np.ndarray) -> str:
    """A name that tells what the constant holds: ``size_16``, ``sizes_1x16x-1``."""
    return f"{'sizes' if array.ndim else 'size'}_{'x'.join(str(int(item)) for item in array.reshape(-1)[:8])}"
