"""Call inputs and outputs what their reader expects."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import onnx_ir as ir

from graphsurgery.analysis.dims import Expr, free_names
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.errors import UsageError
from graphsurgery.pass_base import REPORTS_KEY, Pass, unknown_name
from graphsurgery.patterns.interface import find_attention_mask, find_position_ids, find_token_input
from graphsurgery.patterns.io_names import CONVENTIONS, ConventionName, fill, template_fields
from graphsurgery.patterns.kv_cache import find_caches
from graphsurgery.patterns.lm_head import LMHead, find_lm_heads
from graphsurgery.patterns.matcher import index_of
from graphsurgery.patterns.roles import find_size_roles
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.rename_clashes import Port, find_clashes
from graphsurgery.renames import rename_interface
from graphsurgery.site_report import Detail, PassReport, SiteReport
from graphsurgery.symbol_names import declared_symbols, rename_symbols

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.kv_cache import CacheSite
    from graphsurgery.patterns.roles import SizeRole, SizeRoles

__all__ = ["RenameIO"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rename(Site):
    """What one site renames: each port and its new name, unchanged ones included."""

    ports: tuple[tuple[Port, str], ...]
    cache: CacheSite | None = None
    explicit: bool = False

    def changes(self) -> list[tuple[Port, str]]:
        return [(port, new) for port, new in self.ports if port.name != new]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Symbols(Site):
    """Symbolic sizes and their new names."""

    names: Mapping[str, str]


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
        symbols: rename symbolic sizes as well, in every declared shape: ``batch_size``, ``seq_len``, ``ctx_len`` (slots of
            a fixed-size cache), ``past_len``, ``total_len`` with ``retained-state``. A second size of one role, such as
            the past of sliding layers, gets a number behind it.

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
    symbols: bool = False

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

        if self.symbols and not self._sizes():
            raise UsageError(f"Option symbols of pass {self.name} needs to=retained-state, genai or optimum.")

    def _sizes(self) -> Mapping[SizeRole, str]:
        convention = self._convention()
        return CONVENTIONS[convention].sizes if convention is not None else {}

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
        if self.symbols:
            found += _symbol_sites(model, find_size_roles(model, shapes), self._sizes())
        clashes = find_clashes(model, {site.id: site.ports for site in found if isinstance(site, _Rename)})
        return [self._refused(site, clashes[site.id]) if site.id in clashes else site for site in found]

    def _explicit(self, model: ir.Model, item: str) -> _Rename:
        side, old, new = self._parse(item)
        ports = []
        for which, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
            if side in ("", which) and any(value.name == old for value in values):
                ports.append((Port(which, old), new))
        if not ports:
            known = [value.name or "" for value in (*model.graph.inputs, *model.graph.outputs)]
            raise unknown_name(f"{side or 'input or output'} in option names of pass {self.name}", old, known)
        return _Rename(id=f"name:{side}{':' if side else ''}{old}", kinds=("named",), ports=tuple(ports), explicit=True)

    def _cache_site(self, site: CacheSite, taken: set[Port], *, beside_cross: bool) -> Site:
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
                port = Port(side, value.name or "")
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
        chosen = [site for site in sites if isinstance(site, _Rename)]
        for site in sites:
            if isinstance(site, _Symbols):
                sizes = rename_symbols(model, site.names)
                text = ", ".join(f"{old} -> {new}" for old, new in site.names.items())
                detail: dict[str, Detail] = {"symbols": dict(site.names), "sizes": sizes}
                report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", text, detail))
        clashes = find_clashes(model, {site.id: site.ports for site in chosen})
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
            _follow_boundaries(model, {**names["input"], **names["output"]})
        return frozenset()


def _site_report(site: _Rename, changes: list[tuple[Port, str]]) -> SiteReport:
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


def _follow_boundaries(model: ir.Model, names: Mapping[str, str]) -> None:
    """Let the reports of earlier passes say where their regions end by the names of now."""

    def now(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(value, value) for value in values)

    for report in model.meta.get(REPORTS_KEY, ()):
        for position, site in enumerate(report.sites):
            boundaries = tuple(
                dataclasses.replace(item, inputs_after=now(item.inputs_after), outputs_after=now(item.outputs_after))
                if item.scope == "main"
                else item
                for item in site.boundaries
            )
            if boundaries != site.boundaries:
                report.sites[position] = dataclasses.replace(site, boundaries=boundaries)


# ---- the usual names ----------------------------------------------------------------------------------------------


def _usual(model: ir.Model, shapes: Shapes, taken: set[Port]) -> Iterator[_Rename]:
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
    heads = [head for head in find_lm_heads(model, shapes, index_of(model), tokens) if isinstance(head, LMHead)]
    if len(heads) == 1:
        yield from _usual_port("output", heads[0].output, "logits", taken)


def _usual_port(side: str, value: ir.Value, usual: str, taken: set[Port]) -> Iterator[_Rename]:
    name = value.name or ""
    port = Port(side, name)
    # "decoder_input_ids" says what it is.
    if not name.endswith(usual) and port not in taken:
        yield _Rename(id=f"{side}:{name}", kinds=(side,), ports=((port, usual),))


def _symbol_sites(model: ir.Model, roles: SizeRoles, wanted: Mapping[SizeRole, str]) -> list[Site]:
    """The sizes that have a role and another name than the convention's."""
    names: dict[str, str] = {}
    for role, plain in wanted.items():
        symbols = [
            name for size in roles.sizes(role) if isinstance(size, Expr) and size.atom for name in free_names(size)
        ]
        # One that is called so already keeps the plain name.
        symbols.sort(key=lambda name: name != plain)
        for number, symbol in enumerate(symbols):
            if not symbol.startswith("?") and symbol not in names:
                names[symbol] = f"{plain}_{number}" if number else plain
    names = {old: new for old, new in names.items() if old != new}
    taken = declared_symbols(model) - set(names)
    refused = {old: new for old, new in names.items() if new in taken}
    sites: list[Site] = [
        Refusal(
            id=f"symbol:{old}",
            kinds=("symbols",),
            reason=f"size {old!r} cannot be called {new!r}: another size is called so",
        )
        for old, new in refused.items()
    ]
    kept = {old: new for old, new in names.items() if old not in refused and new not in refused}
    if kept:
        sites.insert(0, _Symbols(id="symbols", kinds=("symbols",), names=kept))
    return sites
