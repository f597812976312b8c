"""Tiny models as text, and passes that do what a test needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphsurgery.pass_base import Pass
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.rewrite import Rewrite
from graphsurgery.site_report import PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHAIN = """
<ir_version: 9, opset_import: ["" : 18]>
chain (float[B,4] x) => (float[B,4] y, float[B,4] z)
{
    a = Relu(x)
    b = Neg(a)
    y = Abs(b)
    z = Exp(a)
}
"""

NESTED = """
<ir_version: 9, opset_import: ["" : 18]>
nested (float[B,4] x, bool flag) => (float[B,4] y)
<float[1] one = {1.0}>
{
    a = Relu(x)
    y = If (flag) <
        then_branch = then_part () => (float[B,4] t) { inner = Neg(a)  t = Add(inner, one) },
        else_branch = else_part () => (float[B,4] e) { e = Exp(a) }
    >
}
"""


def parse(text: str) -> ir.Model:
    """A model from ONNX text."""
    return ir.from_onnx_text(text)


def node_of(model: ir.Model, output: str) -> ir.Node:
    """The node of the main graph or one of its subgraphs that makes ``output``."""
    return next(node for node in model.graph.all_nodes() if any(value.name == output for value in node.outputs))


def graph_of(model: ir.Model, output: str) -> ir.Graph:
    """The graph that holds the node that makes ``output``."""
    graph = node_of(model, output).graph
    assert isinstance(graph, ir.Graph)
    return graph


def maker(value: ir.Value) -> ir.Node:
    """The node that makes ``value``."""
    node = value.producer()
    assert node is not None
    return node


def value_of(model: ir.Model, name: str) -> ir.Value:
    """The value ``name`` of the main graph or one of its subgraphs."""
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [value for node in model.graph.all_nodes() for value in node.outputs]
    return next(value for value in values if value.name == name)


def op_types(model: ir.Model) -> list[str]:
    """Operators of the main graph, in order."""
    return [node.op_type for node in model.graph]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeSite(Site):
    node: ir.Node


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleNegate(Pass):
    """Puts ``times`` pairs of Neg behind each Relu; refuses each Exp."""

    name: ClassVar[str] = "double-negate"
    summary: ClassVar[str] = "put pairs of Neg behind each Relu"
    aliases: ClassVar[Mapping[str, str]] = {"count": "times"}

    times: int = 1
    style: Literal["plain", "fancy"] = "plain"
    label: str = "neg"
    scale: float = 1.5
    careful: bool = True

    def find(self, model: ir.Model) -> Sequence[Site]:
        found: list[Site] = []
        for node in model.graph:
            if node.op_type == "Relu" and "doubled" not in node.meta:
                found.append(NodeSite(id=f"relu:{node.outputs[0].name}", kinds=("relu",), layer=len(found), node=node))
            elif node.op_type == "Exp":
                found.append(Refusal(id=f"exp:{node.outputs[0].name}", kinds=("exp",), reason="Exp cannot be doubled"))
        return found

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        for site in sites:
            site.node.meta["doubled"] = True
            value = site.node.outputs[0]
            edit = Rewrite(model, self.name, site.id, scope=f"{value.name}/{self.label}")
            users = [(use.node, use.idx) for use in value.uses()]
            edit.after(value)
            result = value
            for _ in range(2 * self.times):
                result = edit.emit("Neg", [result], name="neg", dtype=value.dtype, shape=None)
            for node, index in users:
                edit.reroute(node, index, result)
            edit.record([value], [value.name or ""], [value], [result.name or ""])
            boundaries = edit.commit()
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", "doubled", {}, boundaries))
        return frozenset({"y"}) if sites else frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfterDouble(DoubleNegate):
    """The same under another name, to run behind it."""

    name: ClassVar[str] = "after-double"
    after: ClassVar[frozenset[str]] = frozenset({"double-negate"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saboteur(Pass):
    """Breaks the model: ``names`` gives two nodes one name, ``values`` changes what is computed."""

    name: ClassVar[str] = "saboteur"
    summary: ClassVar[str] = "break the model"

    how: Literal["names", "values", "crash", "interrupt"] = "names"

    def find(self, model: ir.Model) -> Sequence[Site]:
        return [Site(id=model.graph.name or "model")]

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        if self.how == "crash":
            raise RuntimeError("scalpel\nslipped")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "names":
            for node in list(model.graph)[:2]:
                node.name = "twin"
        else:
            output = model.graph.outputs[0]
            edit = Rewrite(model, self.name, sites[0].id, scope="sabotage")
            edit.after(output)
            one = edit.constant(np.asarray(1, output.dtype.numpy() if output.dtype else np.float32))
            wrong = edit.emit("Add", [output, one], name="wrong", dtype=output.dtype, shape=None)
            wrong.shape = output.shape
            edit.replace_output(output, wrong, "right")
            edit.commit()
        report.sites.append(SiteReport(sites[0].id, (), None, "rewritten", "broken"))
        return frozenset()


class ForeignRename(ir.passes.InPlacePass):
    """An onnx-ir pass of somebody else: renames every value in the middle of the graph."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        outputs = set(model.graph.outputs)
        renamed = [value for node in model.graph for value in node.outputs if value not in outputs]
        for number, value in enumerate(renamed):
            value.name = f"renamed_{number}"
        return ir.passes.PassResult(model, modified=bool(renamed))


class ForeignIdle(ir.passes.InPlacePass):
    """An onnx-ir pass that changes nothing."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, modified=False)
