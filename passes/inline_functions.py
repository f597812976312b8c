"""Write the bodies of local functions in the place of their calls."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, ClassVar

import onnx_ir as ir

from graphsurgery.editing.function_bodies import clone_node
from graphsurgery.function_keys import LAYER_KEY, OWN, SHARED_KEY, STORED_KEY
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.layers.flow import slots_of
from graphsurgery.patterns.matcher import all_graphs, is_op
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.rewrite import Rewrite
from graphsurgery.site_report import SiteReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphsurgery.site_report import PassReport

__all__ = ["InlineFunctions"]

_EVERY_LAYER = re.compile(rf"(?<=layers[./]|blocks[./]){re.escape(OWN)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Function(Site):
    function: ir.Function
    calls: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class InlineFunctions(Pass):
    """Replace every call of a local function by its body; functions that nothing calls any more go.

    It undoes ``extract-functions``: constants of a body that stood for initializers become initializers again. Attributes
    of a call are put in for the references in the body. Functions that the model was exported with are inlined too,
    unless ``domain`` says otherwise. Every output is bitwise equal.

    Attributes:
        domain: inline the functions of this domain alone; empty for all.
    """

    name: ClassVar[str] = "inline-functions"
    summary: ClassVar[str] = "put the bodies of local functions in the place of their calls"

    domain: str = ""

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        calls: dict[ir.OperatorIdentifier, int] = {}
        for graph in all_graphs(model):
            for node in graph:
                calls[node.op_identifier()] = calls.get(node.op_identifier(), 0) + 1
        recursive = _recursive(model)
        found: list[Site] = []
        for key, function in model.functions.items():
            if self.domain and function.domain != self.domain:
                continue
            label = f"{function.domain}::{function.name}"
            label += f":{function.overload}" if function.overload else ""
            reason = _reason(model, function, recursive)
            if reason:
                found.append(Refusal(id=f"function:{label}", kinds=("function",), reason=reason))
                continue
            found.append(
                _Function(id=f"function:{label}", kinds=("function",), function=function, calls=calls.get(key, 0))
            )
        return found

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        chosen = {site.function.identifier(): site for site in sites}
        edits = {key: Rewrite(model, self.name, site.id, scope=site.function.name) for key, site in chosen.items()}
        inliner = _Inliner(model, {key: (site.function, edits[key]) for key, site in chosen.items()})
        # Bodies of functions that stay are not emptied of calls of functions that go: they are graphs like any other.
        for graph in all_graphs(model):
            owner = next((key for key, item in model.functions.items() if item.graph is graph), None)
            if owner not in chosen:
                inliner.inline(graph)
        for key, site in chosen.items():
            del model.functions[key]
            boundaries = edits[key].commit()
            reason = f"{site.calls} calls of {key[0]}::{key[1]} were replaced by its {len(site.function)} nodes"
            detail = {"calls": site.calls, "nodes": len(site.function)}
            report.sites.append(SiteReport(site.id, site.kinds, None, "rewritten", reason, dict(detail), boundaries))
        used = {node.domain for graph in all_graphs(model) for node in graph}
        for domain in {key[0] for key in chosen} - used - {item.domain for item in model.functions.values()}:
            model.opset_imports.pop(domain, None)
        return frozenset()


def _recursive(model: ir.Model) -> set[ir.OperatorIdentifier]:
    """Functions that call themselves, by whatever way."""
    callees = {
        key: {node.op_identifier() for node in function.graph.all_nodes()} & model.functions.keys()
        for key, function in model.functions.items()
    }
    waiting = dict(callees)
    changed = True
    while changed:
        free = [key for key, called in waiting.items() if not called & waiting.keys()]
        for key in free:
            del waiting[key]
        changed = bool(free)
    return set(waiting)


def _reason(model: ir.Model, function: ir.Function, recursive: set[ir.OperatorIdentifier]) -> str:
    where = f"function {function.domain}::{function.name}"
    if function.identifier() in recursive:
        return f"{where} calls itself, or a function that does"
    domains = {node.domain for node in function.graph.all_nodes()}
    for domain in sorted(domains & function.opset_imports.keys()):
        own, ours = function.opset_imports[domain], model.opset_imports.get(domain)
        if ours is not None and own != ours:
            return f"{where} is written in version {own} of domain {domain or 'ai.onnx'!r}, the model in version {ours}"
    return ""


class _Inliner:
    def __init__(self, model: ir.Model, chosen: Mapping[ir.OperatorIdentifier, tuple[ir.Function, Rewrite]]) -> None:
        self._model = model
        self._chosen = chosen
        self._initializers: dict[str, ir.Value] = {}
        self._nodes: dict[str, ir.Value] = {}
        self._bodies = {item.graph for item in model.functions.values()}
        graphs = [graph for graph in all_graphs(model) if graph not in self._bodies]
        self._present = {value.name for graph in graphs for node in graph for value in node.outputs}
        self._present.update(value.name for graph in graphs for value in (*graph.inputs, *graph.initializers.values()))

    def inline(self, graph: ir.Graph) -> None:
        """Replace the calls of ``graph``, those in its subgraphs left to a call of their own."""
        pending = [node for node in graph if node.op_identifier() in self._chosen]
        while pending:
            call = pending.pop()
            pending += [node for node in self._replace(call) if node.op_identifier() in self._chosen]

    def _replace(self, call: ir.Node) -> list[ir.Node]:
        """Put the body in the place of ``call``; the nodes that were inserted, those of subgraphs included."""
        function, edit = self._chosen[call.op_identifier()]
        for domain, version in function.opset_imports.items():
            if any(node.domain == domain for node in function.graph.all_nodes()):
                self._model.opset_imports.setdefault(domain, version)
        prefix = (call.name or function.name).removesuffix(f"/{function.name}")
        given = {name: item for name, item in function.attributes.items() if item.value is not None}
        given.update(call.attributes)
        values: dict[ir.Value, ir.Value | None] = dict.fromkeys(function.inputs)
        values.update(zip(function.inputs, call.inputs, strict=False))
        edit.before(call)
        inserted: list[ir.Node] = []
        for node in function:
            stands_for = self._stands_for(node, call, edit, prefix)
            if stands_for is not None:
                values[node.outputs[0]] = stands_for
                continue
            slots = [None if value is None else values[value] for value in slots_of(node)]
            copy = clone_node(
                node,
                slots,
                len(node.outputs),
                lambda text: edit.fresh_name(f"{prefix}/{text}"),
                lambda text: edit.fresh_node_name(f"{prefix}/{text.removeprefix(function.name + '/')}"),
                given,
            )
            _restore(copy, node, call)
            for value, original in zip(copy.outputs, node.outputs, strict=True):
                value.type, value.shape = original.type, original.shape.copy() if original.shape is not None else None
                values[original] = value
            edit.adopt(copy)
            inserted += [copy, *(inner for inner in _inner_nodes(copy))]
        self._connect(call, function, values, edit)
        return inserted

    def _connect(
        self, call: ir.Node, function: ir.Function, values: Mapping[ir.Value, ir.Value | None], edit: Rewrite
    ) -> None:
        taken: set[ir.Value] = set()
        for old, formal in zip(call.outputs, function.outputs, strict=False):
            new = values[formal]
            if not old.uses() and not old.is_graph_output():
                continue
            # A value that comes from outside, or is given back twice, keeps its own name.
            kept = new is not None and (new in taken or formal.producer() is None)
            if new is None or (kept and old.is_graph_output()):
                new = edit.emit("Identity", [new], name="output", dtype=old.dtype)
            elif kept:
                edit.replace_all_uses(old, new)
                continue
            taken.add(new)
            edit.take_over(old, new)
        edit.discard([call])

    def _stands_for(self, node: ir.Node, call: ir.Node, edit: Rewrite, prefix: str) -> ir.Value | None:
        """The value of the main graph that a Constant node of a body stood for."""
        stored, shared = node.metadata_props.get(STORED_KEY), node.metadata_props.get(SHARED_KEY)
        if not is_op(node, "Constant") or (stored is None and shared is None) or call.graph in self._bodies:
            return None
        if shared is not None:
            return self._shared_node(node, shared, edit)
        attribute = node.attributes.get("value")
        if attribute is None or attribute.is_ref() or stored is None:
            return None
        tensor = attribute.as_tensor()
        if stored == OWN:
            return self._initializer(edit, f"{prefix}/{node.outputs[0].name}", tensor)
        if stored not in self._initializers:
            there = self._model.graph.initializers.get(stored)
            same = there is not None and _equal(there.const_value, tensor)
            kept = there if there is not None and same else self._initializer(edit, stored, tensor)
            self._initializers[stored] = kept
        return self._initializers[stored]

    def _initializer(self, edit: Rewrite, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        # The name was in use before the function was extracted, so it counts as taken, but may be free again.
        unique = edit.fresh_name(name) if name in self._present else name
        self._present.add(unique)
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=unique, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=shape)
        self._model.graph.register_initializer(value)
        return value

    def _shared_node(self, node: ir.Node, name: str, edit: Rewrite) -> ir.Value:
        if name not in self._nodes:
            there = next(
                (item.outputs[0] for item in self._model.graph if item.outputs and item.outputs[0].name == name), None
            )
            if there is not None and is_op(there.producer(), "Constant"):
                self._nodes[name] = there
            else:
                copy = clone_node(node, [], 1, lambda _: edit.fresh_name(name), lambda _: edit.fresh_node_name(name))
                copy.outputs[0].type, copy.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
                with edit.prologue():
                    edit.adopt(copy)
                self._nodes[name] = copy.outputs[0]
        return self._nodes[name]


def _equal(one: ir.TensorProtocol | None, other: ir.TensorProtocol) -> bool:
    if one is None or isinstance(one, ir.ExternalTensor) or one.dtype != other.dtype:
        return False
    return tuple(one.shape) == tuple(other.shape) and one.tobytes() == other.tobytes()


def _restore(copy: ir.Node, node: ir.Node, call: ir.Node) -> None:
    """The metadata of ``node``, with the number of the layer of ``call``."""
    number = call.metadata_props.get(LAYER_KEY)
    for key, text in node.metadata_props.items():
        copy.metadata_props[key] = text if number is None else _EVERY_LAYER.sub(number, text)


def _inner_nodes(node: ir.Node) -> list[ir.Node]:
    found: list[ir.Node] = []
    for attribute in node.attributes.values():
        graphs = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else []
        graphs += list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []
        for graph in graphs:
            for inner in graph:
                found += [inner, *_inner_nodes(inner)]
    return found
