"""Let attention read only the first C slots of caches of a fixed size."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import onnx_ir as ir

from graphsurgery.analysis.bodies import bodies_of
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.contracts import ContextBound, read_context_bound, write_context_bound
from graphsurgery.errors import UsageError
from graphsurgery.names import Names
from graphsurgery.pass_base import Pass
from graphsurgery.passes.bounding.editors import Editors
from graphsurgery.passes.bounding.from_positions import PositionBound, find_position_bound
from graphsurgery.patterns.cache_reads import CacheRead, find_cache_reads
from graphsurgery.patterns.kv_cache import find_caches
from graphsurgery.patterns.matcher import index_of
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.patterns.written_caches import written_caches
from graphsurgery.rewrite import PASS_KEY, SITE_KEY, Rewrite
from graphsurgery.site_report import Detail, PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphsurgery.analysis.shapes import Shapes

__all__ = ["BoundContext"]

_INT64 = ir.DataType.INT64
_LOWEST_OPSET = 11
_BLOCKS = "block-attention"
_SCOPE = "bound_context"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundContext(Pass):
    """Let attention read only the first C of the N slots of its caches; every output stays equal within tolerance.

    Keys, values and masks are cut together, each as far up as it can be followed: caches right behind the write, masks
    at their one-dimensional sources. Caches go in and out in full size. A sliding layer, whose cache has W slots, reads
    min(C, W). The body of a function is rewritten once for all its calls, each of which hands over the bound and, where it
    makes them, masks that are cut. The feeds that are valid for the result:

    * C is at least 1 and more than every slot that is in use, those of padding included; C above N counts as N;
    * each row of queries attends a key, or the graph itself says what a row without one gives. A row without any is
      the mean of all slots in many exports, and is the mean of the first C after this pass.

    Beyond that nothing fails: keys in slots from C on are not attended, in this call, and stay in the cache.

    Attributes:
        source: ``input``: a new graph input, int64 ``[C]``, whose length is the bound and whose contents do not
            matter; ``positions``: C is the largest slot that the call writes, plus one, rounded up to ``multiple``.
        input_name: the name of that input, and of its size.
        multiple: see ``source``.

    Raises:
        UsageError: ``input_name`` is taken, or ``source=positions`` and nothing tells the slots.
    """

    name: ClassVar[str] = "bound-context"
    summary: ClassVar[str] = "read only the first C slots of fixed-size caches, C fed or from the positions"
    reads_bodies: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {"comp_ctx_lengths": "input_name", "round_up": "multiple"}

    source: Literal["input", "positions"] = "input"
    input_name: str = "comp_ctx_lengths"
    multiple: int = 256

    def check_options(self) -> None:
        """See :meth:`Pass.check_options`."""
        if not self.input_name:
            raise UsageError(f"Option input_name of pass {self.name} must not be empty.")
        if self.multiple < 1:
            raise UsageError(f"Option multiple={self.multiple} of pass {self.name} must be 1 or more.")
        if self.source == "positions" and self.input_name != "comp_ctx_lengths":
            raise UsageError(f"Option input_name of pass {self.name} names an input, which source=positions has not.")
        if self.source == "input" and self.multiple != 256:
            raise UsageError(f"Option multiple of pass {self.name} rounds what source=positions finds: give both.")

    # ---- find -----------------------------------------------------------------------------------------------------

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        shapes = shapes_of(model)
        candidates = find_cache_reads(model, shapes, index_of(model))
        done = _done(model, candidates) if read_context_bound(model) is not None else set()
        found = [self._usable(site, model, done) for site in candidates]
        reads = [site for site in found if isinstance(site, CacheRead)]
        if reads:
            self._check_source(model, reads)
        return [*found, *_blocked(model, {site.id for site in found})]

    def _usable(self, site: CacheRead | Refusal, model: ir.Model, done: set[str]) -> Site:
        reason = None
        opset = model.opset_imports.get("", 1)
        if site.id in done:
            reason = "already bounded: an earlier run cut its keys"
        elif isinstance(site, Refusal):
            return site
        elif opset < _LOWEST_OPSET:
            reason = f"the model imports opset {opset}; a bound needs {_LOWEST_OPSET}: convert it first"
        elif not done and (own := _own_bound(model)) is not None:
            reason = f"already bounded: the model has an input {own.name!r}"
        return site if reason is None else Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=reason)

    def _check_source(self, model: ir.Model, reads: Sequence[CacheRead]) -> None:
        earlier = read_context_bound(model)
        if earlier is not None:
            ours = self._contract()
            if earlier != ours:
                raise UsageError(
                    f"Pass {self.name}: an earlier run bounded this model in another way ({_told(earlier)}); give the "
                    "same options."
                )
            return
        if self.source == "input" and Names.of(model).has_value(self.input_name):
            raise UsageError(
                f"Option input_name={self.input_name!r} of pass {self.name}: the model already has a value of that "
                "name; choose another with input_name=NAME."
            )
        if self.source == "positions" and find_position_bound(model, shapes_of(model), reads) is None:
            raise UsageError(
                f"Option source=positions of pass {self.name}: neither an input nor a write into a cache tells the "
                "slots that are in use; use source=input."
            )

    def _contract(self) -> ContextBound:
        if self.source == "input":
            return ContextBound(self.input_name)
        return ContextBound(None, self.multiple)

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[CacheRead], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        shapes = shapes_of(model)
        rewrite = Rewrite(model, self.name, sites[0].id, scope=_SCOPE)
        told = find_position_bound(model, shapes, sites) if self.source == "positions" else None
        bound = self._bound(rewrite, told)
        stops = written_caches(model, shapes, find_caches(model, shapes))
        bodies = bodies_of(model, shapes)
        editors = Editors(rewrite, bound, self.name, stops, (sites[0].id, _SCOPE))
        writers = [editors.of(site.attention.body).writer for site in sites]
        for site, writer in zip(sites, writers, strict=True):
            writer.share(site)
        details: list[dict[str, Detail]] = []
        for site, writer in zip(sites, writers, strict=True):
            editors.at_site(site.id, _scope(site))
            details.append(writer.write(site))
        boundaries = {body: iter(found) for body, found in editors.commit(bodies).items()}
        write_context_bound(model, self._contract())
        report.warnings += self._warnings()
        for site, detail in zip(sites, details, strict=True):
            body = site.attention.body
            slots = _slots(site, shapes)
            detail = {"bound": _told(self._contract()), "slots": slots, **detail}
            where = "" if body.function is None else f"; {body.where}"
            reason = f"reads the first {_first(self, slots)} slots{where}"
            boundary = next(boundaries[body])
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail, (boundary,)))
        return frozenset(value.name or "" for value in model.graph.outputs)

    def _bound(self, rewrite: Rewrite, told: PositionBound | None) -> ir.Value:
        """C as int64 ``[1]``, at the start of the graph."""
        if told is not None:
            return told.write(rewrite, self.multiple)
        model = rewrite.model
        source = next((value for value in model.graph.inputs if value.name == self.input_name), None)
        if source is None:
            text = (
                "As long as the part of the caches that is to be read, C: more than every slot in use. Contents unused."
            )
            source = rewrite.add_input(self.input_name, _INT64, [self.input_name], text)
        with rewrite.prologue():
            return rewrite.emit("Shape", [source], name="bound", dtype=_INT64, shape=[1])

    def _warnings(self) -> list[str]:
        if self.source == "positions":
            return []
        text = (
            f"Input {self.input_name!r} must be fed on every call, int64 [C], with C more than every slot that is in "
            "use; its contents do not matter."
        )
        return [text]


def _done(model: ir.Model, found: Sequence[CacheRead | Refusal]) -> set[str]:
    """Ids of the sites that an earlier run has bounded.

    Where layers became functions since, ids have changed: a body that holds one attention is known by its own nodes.
    """
    done = _sites_of(model, BoundContext.name)
    reads: dict[ir.Function, list[CacheRead]] = {}
    for site in found:
        function = site.attention.body.function if isinstance(site, CacheRead) else None
        if isinstance(site, CacheRead) and function is not None:
            reads.setdefault(function, []).append(site)
    for function, sites in reads.items():
        if len(sites) == 1 and any(node.metadata_props.get(PASS_KEY) == BoundContext.name for node in function):
            done.add(sites[0].id)
    return done


def _blocked(model: ir.Model, known: set[str]) -> list[Refusal]:
    """Attention that an earlier run has divided into blocks, which read the cache each by itself."""
    ids = sorted(_sites_of(model, _BLOCKS) - known)
    reason = f"its keys are read block by block already: run {BoundContext.name} before {_BLOCKS}"
    return [Refusal(id=item, kinds=("attention", "blocked"), reason=reason) for item in ids]


def _sites_of(model: ir.Model, pass_name: str) -> set[str]:
    """Ids of the sites that a pass has rewritten in ``model``."""
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    props = (node.metadata_props for graph in graphs for node in graph)
    return {item.get(SITE_KEY, "") for item in props if item.get(PASS_KEY) == pass_name}


def _own_bound(model: ir.Model) -> ir.Value | None:
    """An input by which the export bounds its attention itself."""
    return next((item for item in model.graph.inputs if (item.name or "").startswith("comp_ctx_len")), None)


def _told(bound: ContextBound) -> str:
    if bound.input is not None:
        return f"length of input {bound.input!r}"
    return f"largest slot written, rounded up to a multiple of {bound.multiple}"


def _slots(site: CacheRead, shapes: Shapes) -> str:
    """N; where the calls of a function have several, each of them."""
    if site.attention.body.function is None:
        return str(site.slots)
    sizes = dict.fromkeys(str(shapes.dim(cache.output, cache.axis or 0)) for cache in site.caches)
    return " or ".join(sizes)


def _first(pass_: BoundContext, slots: str) -> str:
    what = "C" if pass_.source == "positions" else f"len({pass_.input_name})"
    return f"min({what}, {slots})"


def _scope(site: CacheRead) -> str:
    where = f"layers.{site.layer}.attention" if site.layer is not None else site.id.replace(":", ".")
    return f"{where}/bound_context"
