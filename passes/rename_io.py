"""Call inputs and outputs what their reader expects."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import onnx_ir as ir

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.errors import UsageError
from graphsurgery.model_io import reserved_names
from graphsurgery.pass_base import Pass, unknown_name
from graphsurgery.patterns.interface import find_attention_mask, find_position_ids, find_token_input
from graphsurgery.patterns.io_names import CONVENTIONS, ConventionName, fill, template_fields
from graphsurgery.patterns.kv_cache import find_caches
from graphsurgery.patterns.lm_head import LMHead, find_lm_heads
from graphsurgery.patterns.matcher import GraphIndex
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.renames import rename_interface
from graphsurgery.site_report import Detail, PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.kv_cache import CacheSite

__all__ = ["RenameIO"]


@dataclasses.dataclass(frozen=True)
class _Port:
    """An input or an output (``side``) by name."""

    side: str
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rename(Site):
    """What one site renames: each port and its new name, unchanged ones included."""

    ports: tuple[tuple[_Port, str], ...]
    cache: CacheSite | None = None
    explicit: bool = False

    def changes(self) -> list[tuple[_Port, str]]:
        return [(port, new) for port, new in self.ports if port.name != new]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenameIO(Pass):
    """Rename inputs and outputs; nothing else changes, and every output is bitwise equal.

    Caches are found by what the graph does with them, and named for their layer and kind:

    * ``retained-state`` (efficient-transformers): ``past_key.i`` in, ``past_key.i_RetainedState`` out; likewise
      ``past_value``, ``conv_state``, ``recurrent_state`` and the scalars of a layer;
    * ``genai`` (ONNX Runtime GenAI): ``past_key_values.i.key`` in, ``present.i.key`` out, ``conv_state`` and
      ``recurrent_state`` likewise;
    * ``optimum``: the same for keys and values, with ``decoder`` and ``encoder`` where there are both;
    * ``transformers``: ``input.cache.layers.i.keys`` in, ``output.cache.layers.i.keys`` out.

    With a convention, token ids, attention mask, positions and logits get their usual names too, where they have none
    of their own. A name that another value has is refused. What names an input or output elsewhere follows: contracts
    of earlier passes, metadata, functions, and the genai_config.json of a directory output. The metadata
    ``graphsurgery.renamed`` tells the verifier what is what.

    Attributes:
        to: the convention; ``auto`` is ``retained-state`` if nothing else is asked for; ``none`` leaves caches alone.
        names: explicit renames, ``old=new`` or ``old->new`` (which needs no quotes on a command line's spec);
            ``input:old=new`` or ``output:old=new`` where both sides have the name and one is meant.
        inputs: a template for the inputs of caches in place of the convention's: it may hold ``{layer}`` and ``{kind}``.
        outputs: a template for the outputs; it may hold ``{input}`` too.
        prefix: of retained states of one of several sub-models: ``past_key.i_<prefix>_RetainedState``.

    Raises:
        UsageError: ``names`` speaks of what is not there, or asks for a name that is taken.
    """

    name: ClassVar[str] = "rename-io"
    summary: ClassVar[str] = "give inputs and outputs the names that a runtime or compiler expects"

    to: Literal["auto", "none", "retained-state", "genai", "optimum", "transformers"] = "auto"
    names: tuple[str, ...] = ()
    inputs: str = ""
    outputs: str = ""
    prefix: str = ""

    def check_options(self) -> None:
        """See :meth:`Pass.check_options`."""
        renamed: set[tuple[str, str]] = set()
        for item in self.names:
            side, old, _ = self._parse(item)
            ports = {(which, old) for which in ("input", "output") if side in ("", which)}
            if renamed & ports:
                raise UsageError(f"Option names of pass {self.name} renames {old!r} twice; keep one.")
            renamed |= ports
        for option, template, allowed in (
            ("inputs", self.inputs, {"layer", "kind"}),
            ("outputs", self.outputs, {"layer", "kind", "input"}),
        ):
            fields = template_fields(template)
            if not fields <= allowed:
                listed = ", ".join(f"{{{name}}}" for name in sorted(allowed))
                raise UsageError(f"Option {option}={template!r} of pass {self.name} may hold {listed} in braces only.")
        if self.prefix and self._convention() != "retained-state":
            raise UsageError(f"Option prefix={self.prefix!r} of pass {self.name} belongs to to=retained-state.")

    def _convention(self) -> ConventionName | None:
        if self.to == "none":
            return None
        if self.to == "auto":
            return None if self.names or self.inputs or self.outputs else "retained-state"
        return self.to

    def _parse(self, item: str) -> tuple[str, str, str]:
        """Side (or empty), old name and new name of an explicit rename."""
        found = re.fullmatch(r"(?:(input|output):)?(.+?)(?:=|->)(.+)", item, re.DOTALL)
        if found is None:
            text = "write old=new or old->new, with input: or output: in front where only one side is meant"
            raise UsageError(f"Option names={item!r} of pass {self.name}: {text}.")
        return found[1] or "", found[2], found[3]

    # ---- find -----------------------------------------------------------------------------------------------------

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        shapes = shapes_of(model)
        explicit = [self._explicit(model, item) for item in self.names]
        taken = {port for site in explicit for port, _ in site.ports}
        found: list[Site] = []
        if self._convention() is not None or self.inputs or self.outputs:
            caches = find_caches(model, shapes)
            if self._convention() is not None:
                found += _usual(model, shapes, taken)
            beside = any(site.cross for site in caches)
            found += [self._cache_site(site, taken, beside_cross=beside) for site in caches]
        found += explicit
        clashes = _clashes(model, [site for site in found if isinstance(site, _Rename)])
        return [self._refused(site, clashes[site.id]) if site.id in clashes else site for site in found]

    def _explicit(self, model: ir.Model, item: str) -> _Rename:
        side, old, new = self._parse(item)
        ports = []
        for which, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
            if side in ("", which) and any(value.name == old for value in values):
                ports.append((_Port(which, old), new))
        if not ports:
            known = [value.name or "" for value in (*model.graph.inputs, *model.graph.outputs)]
            raise unknown_name(f"{side or 'input or output'} in option names of pass {self.name}", old, known)
        return _Rename(id=f"name:{side}{':' if side else ''}{old}", kinds=("named",), ports=tuple(ports), explicit=True)

    def _cache_site(self, site: CacheSite, taken: set[_Port], *, beside_cross: bool) -> Site:
        convention = self._convention()
        given: str | None = None
        made: str | None = None
        if convention is not None:
            given, made = CONVENTIONS[convention].names(site, beside_cross=beside_cross)
        if made is not None and self.prefix:
            made = f"{made.removesuffix('_RetainedState')}_{self.prefix}_RetainedState"
        if self.inputs:
            given = fill(self.inputs, site.layer, site.kind, "")
        if self.outputs:
            kept = site.input.name if site.input is not None else None
            made = fill(self.outputs, site.layer, site.kind, given or kept or "")
        if given is None and made is None:
            what = f"{'cross-attention ' if site.cross else ''}{site.kind}"
            reason = f"{convention} has no name for a {what} cache; name it with names=[old=new]"
            return Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=reason)
        ports = []
        for side, value, new in (("input", site.input, given), ("output", site.output, made)):
            if value is not None and new is not None:
                port = _Port(side, value.name or "")
                if port not in taken:
                    ports.append((port, new))
        return _Rename(id=site.id, kinds=site.kinds, layer=site.layer, ports=tuple(ports), cache=site)

    def _refused(self, site: Site, reason: str) -> Site:
        if isinstance(site, _Rename) and site.explicit:
            raise UsageError(f"Option names of pass {self.name}: {reason}.")
        return Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=reason)

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        # Of what was found some is not wanted: names that would have become free stay taken.
        chosen: list[_Rename] = list(sites)
        clashes = _clashes(model, chosen)
        names: dict[str, dict[str, str]] = {"input": {}, "output": {}}
        grows = 0
        for site in chosen:
            if site.id in clashes:
                refusal = self._refused(site, clashes[site.id])
                assert isinstance(refusal, Refusal)
                report.sites.append(SiteReport(site.id, site.kinds, site.layer, "refused", refusal.reason))
                continue
            changes = site.changes()
            for port, new in changes:
                names[port.side][port.name] = new
            grows += site.cache is not None and site.cache.grows
            report.sites.append(_site_report(site, changes))
        if self._convention() == "retained-state" and grows:
            report.warnings.append(
                f"{grows} retained states grow with every call, since the export joins new positions to them: a runtime "
                "that keeps states in place needs caches of a fixed size (export with a static cache)."
            )
        if names["input"] or names["output"]:
            rename_interface(model, names["input"], names["output"])
        return frozenset()


def _site_report(site: _Rename, changes: list[tuple[_Port, str]]) -> SiteReport:
    if not changes:
        return SiteReport(site.id, site.kinds, site.layer, "skipped", "already called so")
    text = ", ".join(dict.fromkeys(f"{port.name} -> {new}" for port, new in changes))
    detail: dict[str, Detail] = {
        side + "s": {port.name: new for port, new in changes if port.side == side} for side in ("input", "output")
    }
    if site.cache is not None:
        detail |= {"form": site.cache.form, "grows": site.cache.grows}
        text += "; it grows by S a call" if site.cache.grows else ""
    return SiteReport(site.id, site.kinds, site.layer, "rewritten", text, detail)


# ---- the usual names ----------------------------------------------------------------------------------------------


def _usual(model: ir.Model, shapes: Shapes, taken: set[_Port]) -> Iterator[_Rename]:
    """Token ids, mask, positions and logits under names that nobody knows."""
    tokens = find_token_input(model, shapes)
    if tokens is None:
        return
    if tokens.value.dtype in (ir.DataType.INT64, ir.DataType.INT32):
        yield from _usual_port("input", tokens.value, "input_ids", taken)
    for value, usual in (
        (find_attention_mask(model, shapes, tokens), "attention_mask"),
        (find_position_ids(model, shapes, tokens), "position_ids"),
    ):
        if value is not None:
            yield from _usual_port("input", value, usual, taken)
    heads = [head for head in find_lm_heads(model, shapes, GraphIndex(model), tokens) if isinstance(head, LMHead)]
    if len(heads) == 1:
        yield from _usual_port("output", heads[0].output, "logits", taken)


def _usual_port(side: str, value: ir.Value, usual: str, taken: set[_Port]) -> Iterator[_Rename]:
    name = value.name or ""
    port = _Port(side, name)
    # "decoder_input_ids" says what it is.
    if not name.endswith(usual) and port not in taken:
        yield _Rename(id=f"{side}:{name}", kinds=(side,), ports=((port, usual),))


# ---- collisions ---------------------------------------------------------------------------------------------------


def _clashes(model: ir.Model, sites: Iterable[_Rename]) -> dict[str, str]:
    """Sites whose new names cannot be given, and why: a refused site keeps its old names, which others may want."""
    ports = _ports(model)
    inner = _inner_names(model)
    remaining = list(sites)
    refused: dict[str, str] = {}
    while True:
        clash = _first_clash(ports, inner, remaining)
        if clash is None:
            return refused
        refused |= clash
        remaining = [site for site in remaining if site.id not in clash]


def _first_clash(ports: Mapping[_Port, int], inner: Mapping[str, str], sites: list[_Rename]) -> dict[str, str] | None:
    """One round: all sites that want what they cannot get as things stand."""
    new_names = {port: (new, site) for site in sites for port, new in site.ports}
    # Of each name, the values that would have it: a value that is an input and an output is one.
    holders: dict[str, dict[object, _Port]] = {}
    for port, identity in ports.items():
        name = new_names[port][0] if port in new_names else port.name
        # Where both sides of one value part, each becomes a value.
        holders.setdefault(name, {}).setdefault(identity, port)
    found: dict[str, str] = {}
    for site in sites:
        for port, new in site.changes():
            others = [other for identity, other in holders[new].items() if identity != ports[port]]
            if new in inner:
                found[site.id] = f"{port.side} {port.name!r} cannot be called {new!r}, which is {inner[new]}"
            elif others:
                other = others[0]
                what = f"{other.side} {other.name!r} is called so"
                if other in new_names and new_names[other][0] == new and other.name != new:
                    what = f"{other.side} {other.name!r} is to be called so too"
                found[site.id] = f"{port.side} {port.name!r} cannot be called {new!r}: {what}"
    return found or None


def _ports(model: ir.Model) -> dict[_Port, int]:
    """Every input and output, and the value that it is."""
    graph = model.graph
    return {
        _Port(side, value.name or ""): id(value)
        for side, values in (("input", graph.inputs), ("output", graph.outputs))
        for value in values
    }


def _inner_names(model: ir.Model) -> dict[str, str]:
    """Names of values that are neither input nor output, subgraphs included, and what has them."""
    found = dict.fromkeys(reserved_names(model), "a name that the file gives to a value that does not exist")
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            if not value.name or (graph is model.graph and (value.is_graph_input() or value.is_graph_output())):
                continue
            found[value.name] = "the name of an initializer" if value.is_initializer() else "the name of a value inside"
    return found
