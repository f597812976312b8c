"""Write repeated layers once: local functions with weights, caches and shared values as parameters."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import TYPE_CHECKING, Any, ClassVar

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.editing.function_bodies import build_function
from graphsurgery.errors import UsageError
from graphsurgery.function_keys import LAYER_KEY
from graphsurgery.names import Names, claim
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.layers.finding import LayerKind, find_layers
from graphsurgery.patterns.layers.inner_repeats import find_inner_repeats
from graphsurgery.patterns.matcher import is_sorted
from graphsurgery.patterns.site import Refusal, Site, selects
from graphsurgery.patterns.written import is_written
from graphsurgery.rewrite import Rewrite
from graphsurgery.site_report import SiteReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.patterns.layers.bodies import Body
    from graphsurgery.site_report import Detail, PassReport

__all__ = ["ExtractFunctions"]

_IR_WITH_FUNCTIONS = 8
_MUCH_SMALLER = 4
"""So many times smaller than a layer that is a function already: what repeats in those that are like no other."""
_DOMAIN = re.compile(r"[A-Za-z_][\w.-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LeftOut(Site):
    """Layers of a kind that are not selected."""

    numbers: tuple[int, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """See :attr:`Site.layers`."""
        return self.numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractFunctions(Pass):
    """Turn repeated decoder, encoder and vision layers into calls of local ONNX functions, one for each kind of layer.

    Layers are found by structure and proved equal node by node; names that exporters leave only name the functions.

    * What differs between layers or comes from outside is a parameter: hidden state, caches, masks, rotary tables, weights
      (one for each use), scalars that differ.
    * Small constants that all layers share (numbers, axes, shapes) become Constant nodes of the body; weights never do.
    * What anything outside a layer reads, or the model returns, is an output of the function; never an input itself.
    * Functions that the model has stay; a layer that calls them does so inside the new function.

    A model below IR version 8, which has no functions, is raised to it, with a warning. Every output is bitwise equal;
    ``inline-functions`` gives the graph back.

    Attributes:
        min_repeats: how many equal layers make a function.
        domain: of the functions.
        inner: extract what repeats inside the layers too (experts, for instance), as functions that the layers call.
    """

    name: ClassVar[str] = "extract-functions"
    summary: ClassVar[str] = "write repeated layers once, as local functions"

    min_repeats: int = 2
    domain: str = "graphsurgery"
    inner: bool = False

    def check_options(self) -> None:
        """See :meth:`Pass.check_options`."""
        if self.min_repeats < 2:
            raise UsageError(f"Option min_repeats={self.min_repeats} of pass {self.name} must be 2 or more.")
        if not _DOMAIN.fullmatch(self.domain):
            raise UsageError(f"Option domain={self.domain!r} of pass {self.name} is no name of an operator domain.")

    # ---- find -----------------------------------------------------------------------------------------------------

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        if not is_sorted(model.graph):
            model.graph.sort()
        taken = {function.name for function in model.functions.values() if function.domain == self.domain}
        found: list[Site] = []
        extracted = _largest_extracted(model)
        for site in find_layers(model, shapes_of(model), self.min_repeats):
            size = len(site.body.instances[0]) if isinstance(site, LayerKind) else 0
            if isinstance(site, LayerKind) and size * _MUCH_SMALLER < extracted:
                reason = f"{size} nodes that repeat are parts of layers: the largest that is a function has {extracted}"
                found.append(Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=reason))
            elif isinstance(site, LayerKind):
                found += self._selected(dataclasses.replace(site, name=claim(taken, site.name, number=1)))
            else:
                found.append(site)
        return found

    def _selected(self, kind: LayerKind) -> list[Site]:
        """The layers of ``kind`` that the selectors choose, and those that they leave out, as two sites."""
        chosen = {
            number
            for number in kind.numbers
            if selects(dataclasses.replace(kind, numbers=(number,)), self.sites, self.exclude)
        }
        others = tuple(number for number in kind.numbers if number not in chosen)
        if not chosen or not others:
            return [kind]
        name = f"{kind.id}:{_ranges(others).replace(', ', '+')}"
        left = _LeftOut(id=name, kinds=kind.kinds, layer=others[0], numbers=others)
        if len(chosen) >= self.min_repeats:
            return [kind.only(chosen), left]
        reason = f"only layer {_ranges(sorted(chosen))} of this kind is selected (min_repeats={self.min_repeats})"
        return [Refusal(id=kind.id, kinds=kind.kinds, layer=min(chosen), reason=reason), left]

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        if model.ir_version is not None and model.ir_version < _IR_WITH_FUNCTIONS:
            report.warnings.append(
                f"The IR version was raised from {model.ir_version} to {_IR_WITH_FUNCTIONS}, the first that has functions."
            )
            model.ir_version = _IR_WITH_FUNCTIONS
        # What a call reads may be what another call has come to make.
        moved: dict[ir.Value, ir.Value] = {}
        edits = [(site, *self._extract(model, site, moved)) for site in sites]
        for site, edit, function in edits:
            boundaries = edit.commit()
            report.sites.append(_site_report(site, function, boundaries))
        if not is_sorted(model.graph):
            model.graph.sort()
        if self.inner:
            for _, _, function in edits:
                self._extract_inner(model, function, report)
            self._extract_inner(model, None, report)
        return frozenset()

    def _extract(
        self, model: ir.Model, site: LayerKind, moved: dict[ir.Value, ir.Value]
    ) -> tuple[Rewrite, ir.Function]:
        edit = Rewrite(model, self.name, site.id, scope=site.name)
        function = build_function(site.body, self.domain, site.name, Names.of(model))
        edit.add_function(function)
        for at, number in enumerate(site.numbers):
            call = _call(edit, site.body, function, at, f"layers.{number}", moved)
            call.metadata_props[LAYER_KEY] = str(number)
        return edit, function

    def _extract_inner(self, model: ir.Model, outer: ir.Function | None, report: PassReport) -> None:
        """Extract what repeats in the body of ``outer`` (None: in the main graph), and report it."""
        graph, where = (model.graph, "main") if outer is None else (outer.graph, outer.name)
        taken = {function.name for function in model.functions.values() if function.domain == self.domain}
        moved: dict[ir.Value, ir.Value] = {}
        bodies = find_inner_repeats(graph, model.functions, self.min_repeats, nested=outer is not None)
        for body in bodies:
            name = claim(taken, f"{outer.name}_inner" if outer is not None else "Inner", number=1)
            edit = Rewrite(model, self.name, f"inner:{name}", scope=name)
            function = build_function(body, self.domain, name, Names.of(model))
            edit.add_function(function, first=True)
            for at in range(len(body.instances)):
                _call(edit, body, function, at, f"{where}/{at}", moved)
            boundaries = edit.commit()
            reason = (
                f"{len(body.instances)} equal groups of {len(body.instances[0])} nodes in {where} are calls of {name}"
            )
            detail = _detail(body, function)
            report.sites.append(SiteReport(f"inner:{name}", ("inner",), None, "rewritten", reason, detail, boundaries))
        if bodies and not is_sorted(graph):
            graph.sort()


def _call(
    edit: Rewrite, body: Body, function: ir.Function, at: int, scope: str, moved: dict[ir.Value, ir.Value]
) -> ir.Node:
    """Put a call in the place of instance ``at``; ``moved`` tells what stands for values that calls make now."""
    nodes = body.instances[at]
    inputs = [moved.get(column[at], column[at]) for column in body.parameters]
    edit.before(nodes[-1])
    names_before = [
        nodes[ref.position].outputs[ref.index].name or "" if ref.index < len(nodes[ref.position].outputs) else ""
        for ref in body.outputs
    ]
    call = edit.emit_call(function, inputs, name=f"{scope}/{function.name}")
    namespace = _common_scope(nodes)
    if namespace:
        call.metadata_props["namespace"] = namespace
    inputs_before = [value.name or "" for value in inputs]
    for ref, output, formal in zip(body.outputs, call.outputs, function.outputs, strict=True):
        made = nodes[ref.position].outputs
        if ref.index < len(made) and made[ref.index].name:
            edit.take_over(made[ref.index], output)
            moved[made[ref.index]] = output
        else:
            output.name = edit.fresh_name(f"{scope}/{formal.name}")
    edit.discard(nodes)
    edit.record(inputs_before, names_before, inputs, [value.name or "" for value in call.outputs])
    return call


def _common_scope(nodes: Sequence[ir.Node]) -> str:
    """The scope that most of ``nodes`` share up to the layer: ``model: ...LlamaModel/model.layers.3: ...LlamaDecoderLayer``."""
    votes: collections.Counter[str] = collections.Counter()
    for node in nodes:
        entries = node.metadata_props.get("namespace", "").split("/")
        at = next((at for at, entry in enumerate(entries) if re.search(r"\.\d+$", entry.partition(":")[0])), None)
        if at is not None:
            votes["/".join(entries[: at + 1])] += 1
    return votes.most_common(1)[0][0] if votes else ""


def _site_report(site: LayerKind, function: ir.Function, boundaries: Any) -> SiteReport:
    body = site.body
    listed = _ranges(site.numbers)
    reason = (
        f"layers {listed} are {len(site.numbers)} calls of {function.domain}::{function.name}: {len(body.instances[0])} nodes, "
        f"{len(body.parameters)} parameters ({body.weights} weights), {len(body.outputs)} outputs"
    )
    detail = _detail(body, function) | {"layers": list(site.numbers)}
    return SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail, boundaries)


def _detail(body: Body, function: ir.Function) -> dict[str, Detail]:
    return {
        "function": f"{function.domain}::{function.name}",
        "instances": len(body.instances),
        "nodes": len(body.instances[0]),
        "constants": len(body.constants),
        "parameters": len(body.parameters),
        "weights": body.weights,
        "outputs": len(body.outputs),
    }


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2, 5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _largest_extracted(model: ir.Model) -> int:
    """The number of nodes of the largest function that an earlier run has made of a layer; 0 where there is none."""
    called = [node for node in model.graph if is_written(node, ExtractFunctions.name)]
    made = [model.functions.get(node.op_identifier()) for node in called]
    return max((len(function) for function in made if function is not None), default=0)
