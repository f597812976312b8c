"""Run only the experts that the router chose, in the form that suits the target."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.errors import UsageError
from graphsurgery.pass_base import Pass
from graphsurgery.passes.experts.chosen_rows import choose_rows, rows_chosen_by
from graphsurgery.passes.experts.grouped import write_grouped
from graphsurgery.passes.experts.operator import write_router
from graphsurgery.passes.experts.packed import write_loop, write_unroll
from graphsurgery.passes.experts.plan import Plan, plan_of, why_not
from graphsurgery.passes.experts.program import Program
from graphsurgery.passes.experts.routing import BlockSource
from graphsurgery.passes.experts.side_by_side import write_dense, write_gather
from graphsurgery.patterns.experts.finding import find_experts
from graphsurgery.patterns.experts.sites import ExpertSite
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.patterns.written import EXPERTS_PASS
from graphsurgery.rewrite import Rewrite
from graphsurgery.site_report import Detail, PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.passes.experts.plan import Form

__all__ = ["GatherExperts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherExperts(Pass):
    """Re-emit expert blocks so that only chosen experts run; every output stays equal within tolerance.

    The router is left as it is: which experts a token gets is read from its indices, also where a weight is zero or
    negative. What an expert does with a row is replayed as the exporter wrote it. Results are put back in order and
    added up token by token, never by a scatter that adds.

    Attributes:
        strategy: ``gather``: for each token the weights of its experts, then batched products; ``packed``: rows
            sorted by expert, in chunks of a fixed size; ``grouped``: for each expert its own rows and a weight of its
            own; ``dense``: every expert on every token; ``auto``: ``grouped`` for a CPU; for an NPU ``gather`` below
            ``threshold`` tokens and ``packed`` from there on, by an If where the number of tokens is not fixed.
        target: what the file is for, ``cpu`` or ``npu``.
        threshold: number of tokens from which ``auto`` takes ``packed``; ``auto`` is ceil(E / K), where ``gather``
            reads as many weights as there are.
        chunk_size: rows that an expert takes at a time in ``packed``.
        lanes: experts side by side in ``packed``.
        lowering: of ``packed``: ``loop`` walks over the chunks that hold rows; ``unroll`` writes all chunks of a fixed
            number of tokens out, without If and Loop; ``auto`` unrolls for an NPU where the number is fixed.
    """

    name: ClassVar[str] = EXPERTS_PASS
    summary: ClassVar[str] = "run only the experts that the router chose, in the form that suits the target"
    reads_bodies: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {"expert_parallel_chunk_size": "chunk_size"}
    after: ClassVar[frozenset[str]] = frozenset({"prune-last-token", "bind-dims"})

    strategy: Literal["auto", "gather", "packed", "grouped", "dense"] = "auto"
    target: Literal["cpu", "npu"] = "cpu"
    threshold: int | Literal["auto"] = "auto"
    chunk_size: int = 256
    lanes: int = 1
    lowering: Literal["auto", "loop", "unroll"] = "auto"

    def check_options(self) -> None:
        """See :meth:`Pass.check_options`."""
        for field in ("chunk_size", "lanes"):
            if getattr(self, field) < 1:
                raise UsageError(f"Option {field}={getattr(self, field)} of pass {self.name} must be 1 or more.")
        if self.threshold != "auto" and self.threshold < 0:
            raise UsageError(f"Option threshold={self.threshold} of pass {self.name} must be 0 or more.")
        packs = self.strategy == "packed" or (self.strategy == "auto" and self.target == "npu")
        if packs:
            return
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for field in ("lanes", "chunk_size", "lowering", "threshold"):
            value = getattr(self, field)
            if value != defaults[field]:
                chosen = f"strategy={self.strategy}" + (f",target={self.target}" if self.strategy == "auto" else "")
                raise UsageError(
                    f"Option {field}={value} of pass {self.name} says nothing for {chosen}: it is for strategy=packed, "
                    "or strategy=auto,target=npu."
                )

    # ---- find -----------------------------------------------------------------------------------------------------

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        found = find_experts(model)
        return [self.usable(site, model) if isinstance(site, ExpertSite) else site for site in found]

    def usable(self, site: ExpertSite, model: ir.Model) -> Site:
        """The site, or a refusal where it cannot be written in the form that is asked for."""
        program = Program.of(site, _shapes(site, model))
        opset = model.opset_imports.get("", 1) if site.home is None else site.home.opset
        reason = why_not(site, program, self.plan(site), self.lanes, opset)
        return site if reason is None else Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=reason)

    def plan(self, site: ExpertSite) -> Plan:
        """How ``site`` is to be written."""
        threshold = None if self.threshold == "auto" else self.threshold
        return plan_of(site, self.strategy, self.target, threshold, self.lowering)

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[ExpertSite], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        homes: dict[Body | None, list[ExpertSite]] = {}
        for site in sites:
            homes.setdefault(site.home, []).append(site)
        for home, group in homes.items():
            self._rewrite_home(model, home, group, report)
        return frozenset(value.name or "" for value in model.graph.outputs)

    def _rewrite_home(self, model: ir.Model, home: Body | None, rest: Sequence[ExpertSite], report: PassReport) -> None:
        """Rewrite the sites of the main graph, or of one function."""
        rewrite = Rewrite(model, self.name, rest[0].id, scope="gather_experts", body=home)
        shapes: ShapeView = home.view if home is not None else shapes_of(model)
        read = {site.id: _read_by(site, shapes) for site in rest}
        routers: dict[str, int] = {}
        if any(site.router is not None for site in rest):
            rest = self._with_routers(rewrite, rest, routers)
        if home is None:
            rest = choose_rows(model, rewrite, rest, [_scope(site) for site in rest])
            shapes = shapes_of(model)
        written: list[tuple[ExpertSite, Plan, dict[str, Detail]]] = []
        for site in rest:
            rewrite.at_site(site.id, _scope(site))
            plan = self.plan(site)
            before = rewrite.inserted
            source = BlockSource(rewrite, shapes, site, Program.of(site, shapes))
            self._replace(source, plan, read[site.id])
            detail = self._detail(source, plan, rewrite.inserted - before + routers.get(site.id, 0))
            written.append((site, plan, detail))
        boundaries = rewrite.commit()
        for (site, plan, detail), boundary in zip(written, boundaries, strict=True):
            if plan.note:
                report.warnings.append(f"{site.id}: {plan.note}.")
            where = f"; {home.where}" if home is not None else ""
            reason = _what(plan, detail) + where + (f"; {plan.note}" if plan.note else "")
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail, (boundary,)))

    @staticmethod
    def _with_routers(rewrite: Rewrite, sites: Sequence[ExpertSite], nodes: dict[str, int]) -> list[ExpertSite]:
        """The sites, the choice of each a value of the graph; ``nodes`` gets the number of nodes that took."""
        result = []
        for site in sites:
            rewrite.at_site(site.id, _scope(site))
            before = rewrite.inserted
            result.append(write_router(rewrite, site))
            nodes[site.id] = rewrite.inserted - before
        rewrite.commit()
        return result

    def _replace(self, source: BlockSource, plan: Plan, read: list[ir.Value]) -> None:
        site, rewrite = source.site, source.rewrite
        old = site.output
        end = old.producer()
        assert end is not None
        rewrite.before(end)
        new = self._write(source, plan)
        wanted = source.shapes.dtype(old)
        if wanted is not None and wanted != source.result_dtype:
            new = rewrite.emit("Cast", [new], {"to": int(wanted)}, name="output_cast", dtype=wanted)
        if site.base is not None:
            new = rewrite.emit("Add", [site.base, new], name="output_sum", dtype=wanted)
        before, after = old.name or "", new.name or ""
        if old.shape is not None:
            new.shape = old.shape
        if old.type is not None:
            new.type = old.type
        rewrite.replace_all_uses(old, new)
        function = site.home.function if site.home is not None else None
        rewrite.record(read, [before], read, [after], "main" if function is None else function.name)

    def _write(self, source: BlockSource, plan: Plan) -> ir.Value:
        if plan.below is None:
            return self._write_form(source, plan.form, plan)
        rewrite = source.rewrite
        pairs = source.pairs()
        limit = rewrite.constant([plan.below * source.site.top_k], "pairs_below")
        few = rewrite.emit("Less", [pairs, limit], name="few", dtype=ir.DataType.BOOL, shape=[1])
        axis = rewrite.constant(np.asarray(0, np.int64), "place")
        few = rewrite.emit("Gather", [few, axis], {"axis": 0}, name="few_tokens", dtype=ir.DataType.BOOL, shape=[])
        bodies = {}
        branches: tuple[tuple[str, Form], ...] = (("then_branch", "gather"), ("else_branch", plan.form))
        for branch, form in branches:
            body = rewrite.body(form, ())
            with rewrite.inside(body):
                body.outputs.append(self._write_form(source, form, plan))
            bodies[branch] = body
        return rewrite.emit_holder("If", [few], bodies, name="by_tokens")[0]

    def _write_form(self, source: BlockSource, form: Form, plan: Plan) -> ir.Value:
        if form == "gather":
            return write_gather(source)
        if form == "grouped":
            return write_grouped(source)
        if form == "dense":
            return write_dense(source)
        if plan.unroll:
            assert plan.most_rows is not None
            return write_unroll(source, self.chunk_size, self.lanes, plan.most_rows)
        return write_loop(source, self.chunk_size, self.lanes)

    def _detail(self, source: BlockSource, plan: Plan, nodes: int) -> dict[str, Detail]:
        site = source.site
        detail: dict[str, Detail] = {
            "strategy": plan.form if plan.below is None else f"gather below {plan.below} tokens, else {plan.form}",
            "form": site.form,
            "experts": site.experts,
            "top_k": site.top_k,
            "tokens": str(site.tokens_dim),
            "nodes_before": len(site.interior),
            "nodes_after": nodes,
            "weight_bytes_moved": source.parameters.moved,
        }
        if plan.form == "packed":
            detail["lowering"] = "unroll" if plan.unroll else "loop"
            detail["chunk_size"] = self.chunk_size
            detail["lanes"] = min(self.lanes, site.experts)
        return detail


def _shapes(site: ExpertSite, model: ir.Model) -> ShapeView:
    """What is known of the values around ``site``."""
    return shapes_of(model) if site.home is None else site.home.view


def _read_by(site: ExpertSite, shapes: ShapeView) -> list[ir.Value]:
    """What the site reads in the model as it is, the numbers of the rows that are read of it included."""
    chosen = rows_chosen_by(site, shapes)
    choice = (site.indices, site.weights) if site.router is None else (site.router.scores,)
    values = (site.tokens, *choice, site.base, chosen.inputs[1] if chosen is not None else None)
    return [value for value in values if value is not None]


def _scope(site: ExpertSite) -> str:
    where = f"layers.{site.layer}.experts" if site.layer is not None else site.id.replace(":", ".")
    return f"{where}/gather_experts"


def _what(plan: Plan, detail: Mapping[str, Detail]) -> str:
    form = f"{detail['form']} form of {detail['experts']} experts, {detail['top_k']} chosen, is now "
    form += str(detail["strategy"]) + (
        f" in a {'row of slots' if plan.unroll else 'loop'}" if plan.form == "packed" else ""
    )
    moved = detail["weight_bytes_moved"]
    return form + (f"; {moved} bytes of weights are laid out anew" if moved else "; no weight is moved")
