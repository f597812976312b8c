"""Keep only the rows of the hidden state that the LM head is asked for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import onnx_ir as ir

from graphsurgery.analysis.cones import Cone, join
from graphsurgery.analysis.shapes import Shapes, shapes_of
from graphsurgery.analysis.slices import Blocked
from graphsurgery.contracts import IndexMode, RowSelection, read_contracts, write_contracts
from graphsurgery.editing.row_depths import Target, depths_of
from graphsurgery.editing.row_edit import prune_cone, unplaced
from graphsurgery.editing.row_numbers import RowNumbers, RowPlan, dim_name
from graphsurgery.editing.row_selection import Placement, RowSelector, lowest_opset
from graphsurgery.errors import UsageError
from graphsurgery.names import Names
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.attention.finding import find_attentions
from graphsurgery.patterns.hidden_output import HiddenOutput, find_hidden_output
from graphsurgery.patterns.interface import (
    TokenInput,
    find_attention_mask,
    find_position_ids,
    find_token_input,
    has_past,
)
from graphsurgery.patterns.lm_head import LMHead, find_lm_heads, is_named_logits, share_rows
from graphsurgery.patterns.matcher import GraphIndex, index_of
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.rewrite import Rewrite
from graphsurgery.site_report import Detail, PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PruneLastToken"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneLastToken(Pass):
    """Keep only the chosen rows of the hidden state before the LM head.

    ``logits [B, S, V]`` becomes ``[B, N, V]`` and is declared so; every other output stays bitwise equal. Which row is
    the last one that is kept of each batch row, i in 0 .. S-1:

    * ``last``: the last row, S-1. Wrong for right-padded batches.
    * ``mask``: the last attended column of the rank-2 attention mask within its last S columns.
    * ``position``: the last column with the largest position id (-1 is padding).
    * ``runtime``: a new graph input, fed with a row number relative to this call's tokens: the caller must set it on
      every call.
    * ``auto``: mask where the model has one, else position, else last; the report says which, and what that assumes.

    Attributes:
        index: see above.
        keep: N, the number of rows that end at i: i-N+1 .. i, clamped at 0.
        depth: where rows are selected: in front of the head (``head``), of the final normalisation (``norm``), or as
            deep as the last layer and what is read by it alone allows (``layer``): its attention then computes the
            selected queries and its MLP the selected tokens, while its keys and values keep every row.
        input_name: the name of the runtime input.
        input_type: ``int32_b11`` (int32 ``[B, 1, 1]``) or ``int64_b`` (int64 ``[B]``); ``[R]`` and ``[R, 1, 1]`` for R
            rows of a packed stream.
        output: for a decoder whose head is another file, the output of hidden states ``[B, S, H]`` to prune instead;
            ``auto`` takes the output that the final normalisation ends in where the model has no logits.

    Raises:
        UsageError: ``index`` asks for an input that the model does not have, or ``input_name`` is taken.
    """

    name: ClassVar[str] = "prune-last-token"
    summary: ClassVar[str] = "keep only the wanted rows of the hidden state before the LM head"
    aliases: ClassVar[Mapping[str, str]] = {"num_logits_to_keep": "keep", "logits_to_keep": "keep"}

    index: Literal["auto", "last", "mask", "position", "runtime"] = "auto"
    keep: int = 1
    depth: Literal["head", "norm", "layer"] = "head"
    input_name: str = "last_token_indices"
    input_type: Literal["int32_b11", "int64_b"] = "int32_b11"
    output: str = "auto"

    def check_options(self) -> None:
        """See :meth:`Pass.check_options`."""
        if self.keep < 1:
            raise UsageError(f"Option keep={self.keep} of pass {self.name} must be 1 or more.")
        if not self.input_name:
            raise UsageError(f"Option input_name of pass {self.name} must not be empty.")

    # ---- find -----------------------------------------------------------------------------------------------------

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        shapes, index = shapes_of(model), index_of(model)
        if self.output != "auto":
            self._require_output(model)
        tokens = find_token_input(model, shapes)
        if tokens is None:
            reason = "no input carries tokens (input_ids [B, S], inputs_embeds [B, S, H] or a packed stream)"
            return [Refusal(id="lm_head", kinds=("lm_head",), reason=reason)]
        plan = self._plan(model, shapes, tokens)
        found = self._candidates(model, shapes, index, tokens)
        return [self._usable(site, plan, model, shapes, tokens) for site in found]

    def _candidates(
        self, model: ir.Model, shapes: Shapes, index: GraphIndex, tokens: TokenInput
    ) -> Sequence[LMHead | HiddenOutput | Refusal]:
        if self.output != "auto":
            output = next(value for value in model.graph.outputs if value.name == self.output)
            heads = find_lm_heads(model, shapes, index, tokens, [self.output])
            if is_named_logits(output) or any(isinstance(head, LMHead) for head in heads):
                return heads
            hidden = find_hidden_output(model, shapes, index, tokens, self.output)
            return [hidden] if hidden is not None else []
        heads = find_lm_heads(model, shapes, index, tokens)
        if heads:
            return heads
        hidden = find_hidden_output(model, shapes, index, tokens, None)
        if hidden is not None:
            return [hidden]
        reason = (
            "no output looks like logits, and none is the result of a final normalisation; name it with output=NAME"
        )
        return [Refusal(id="lm_head", kinds=("lm_head",), reason=reason)]

    def _require_output(self, model: ir.Model) -> None:
        names = [value.name for value in model.graph.outputs]
        if self.output not in names:
            listed = ", ".join(str(name) for name in names[:8])
            raise UsageError(f"Option output={self.output!r} of pass {self.name}: the model's outputs are {listed}.")

    def _usable(
        self,
        site: LMHead | HiddenOutput | Refusal,
        plan: RowPlan,
        model: ir.Model,
        shapes: Shapes,
        tokens: TokenInput,
    ) -> Site:
        """The site, or a refusal where an option cannot be honoured for it."""
        if isinstance(site, Refusal):
            return site
        edges = site.cone.frontier if isinstance(site, LMHead) else ()
        flat = site.rows.flat or any(edge.rows.flat for edge in edges)
        opset, lowest = model.opset_imports.get("", 1), lowest_opset(plan.index, plan.keep, flat=flat)
        reason = None
        if any(contract.output == site.name for contract in read_contracts(model)):
            reason = f"already pruned: output {site.name!r} carries a contract of an earlier run"
        elif opset < lowest:
            reason = f"the model imports opset {opset}; selecting rows by {plan.index} needs {lowest}: convert it first"
        elif isinstance(tokens.length, int) and self.keep >= tokens.length:
            reason = f"keep={self.keep} keeps all {tokens.length} tokens: nothing to prune"
        elif isinstance(site, LMHead):
            reason = unplaced(site.cone, shapes, tokens)
        return site if reason is None else Refusal(id=site.id, kinds=site.kinds, reason=reason)

    def _plan(self, model: ir.Model, shapes: Shapes, tokens: TokenInput) -> RowPlan:
        """Which rows, with ``auto`` resolved."""
        if self.index in ("auto", "mask"):
            mask = find_attention_mask(model, shapes, tokens)
            if mask is not None:
                total = shapes.dim(mask, 1)
                return RowPlan("mask", self.keep, mask, cut=has_past(model) or total != tokens.length)
            if self.index == "mask":
                raise UsageError(
                    self._missing("mask", "no rank-2 attention mask [B, T] of its tokens among its inputs")
                )
        if self.index in ("auto", "position"):
            positions = find_position_ids(model, shapes, tokens)
            if positions is not None:
                planes = shapes.dim(positions, 0) if shapes.rank(positions) == 3 else 0
                assert isinstance(planes, int)
                return RowPlan("position", self.keep, positions, planes)
            if self.index == "position":
                raise UsageError(self._missing("position", "no position ids [B, S], [3, B, S] or [4, B, S]"))
        return RowPlan("runtime" if self.index == "runtime" else "last", self.keep)

    def _missing(self, index: str, what: str) -> str:
        return f"Option index={index} of pass {self.name}: the model has {what}; use index=runtime or index=last."

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[LMHead | HiddenOutput], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        shapes = shapes_of(model)
        tokens = find_token_input(model, shapes)
        assert tokens is not None
        sites = self._together(sites, model, shapes, tokens, report)
        if not sites:
            return frozenset()
        plan = self._plan(model, shapes, tokens)
        rewrite = Rewrite(model, self.name, sites[0].id, scope=f"{sites[0].kinds[0]}/prune_last_token")
        if plan.index == "runtime":
            plan = dataclasses.replace(plan, source=self._add_runtime_input(model, rewrite, tokens))
        report.warnings += self._warnings(plan, tokens)
        if self.output == "auto" and any(isinstance(site, HiddenOutput) for site in sites):
            report.warnings += _if_encoder(model, shapes, ", ".join(repr(site.name) for site in sites))
        selector = RowSelector(rewrite, RowNumbers(rewrite, plan, tokens), shapes)
        depths = depths_of(sites, self.depth, model, shapes, tokens)
        _edit(rewrite, sites, [depth.cone for depth in depths], selector, shapes, tokens)
        boundaries = rewrite.commit()
        contracts = [_contract(site, plan, tokens) for site in sites]
        write_contracts(model, [*read_contracts(model), *contracts])
        for site, depth, boundary in zip(sites, depths, boundaries, strict=True):
            detail = self._detail(site, depth.cone, plan)
            reason = f"{_what(plan, tokens)}{depth.note}"
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail, (boundary,)))
        return frozenset(site.name for site in sites)

    def _together(
        self,
        sites: Sequence[LMHead | HiddenOutput],
        model: ir.Model,
        shapes: Shapes,
        tokens: TokenInput,
        report: PassReport,
    ) -> Sequence[LMHead | HiddenOutput]:
        """The sites, looked at once more where a head that shares rows with them was left out."""
        heads = [site for site in sites if isinstance(site, LMHead)]
        if not heads or share_rows(heads):
            return sites
        found = find_lm_heads(model, shapes, index_of(model), tokens, [head.name for head in heads])
        for site in found:
            if isinstance(site, Refusal):
                report.sites.append(SiteReport(site.id, site.kinds, site.layer, "refused", site.reason))
        return [site for site in found if isinstance(site, LMHead)]

    def _add_runtime_input(self, model: ir.Model, rewrite: Rewrite, tokens: TokenInput) -> ir.Value:
        if Names.of(model).has_value(self.input_name):
            raise UsageError(
                f"Option input_name={self.input_name!r} of pass {self.name}: the model already has a value of that "
                "name; choose another with input_name=NAME."
            )
        batch = dim_name(tokens.batch) or "batch" if tokens.batch is not None else "selected_rows"
        text = "Row of the last token that is wanted of each batch row, relative to this call's tokens, 0 .. S-1."
        if self.input_type == "int32_b11":
            return rewrite.add_input(self.input_name, ir.DataType.INT32, [batch, 1, 1], text)
        return rewrite.add_input(self.input_name, ir.DataType.INT64, [batch], text)

    def _warnings(self, plan: RowPlan, tokens: TokenInput) -> list[str]:
        if plan.index == "runtime":
            assert plan.source is not None
            text = (
                f"Input {plan.source.name!r} must be set on every call, prefill and each decode step alike (0 .. S-1, "
                "relative to the tokens of that call); a generation runtime that does not know it, such as ONNX "
                "Runtime GenAI, must be told to."
            )
        elif plan.index != "last" or tokens.batch == 1:
            return []
        elif tokens.batch is None:
            text = (
                "index=last keeps the last row of the whole stream only: right for one sequence; where several are "
                "packed, use index=runtime and feed the last row of each."
            )
        else:
            why = "" if self.index == "last" else " (the model has neither a rank-2 attention mask nor position ids)"
            text = (
                f"index=last{why} takes row S-1 of every batch row: right for single prompts and left padding, wrong "
                "for right-padded batches."
            )
        return [text]

    def _detail(self, site: Target, cone: Cone | None, plan: RowPlan) -> dict[str, Detail]:
        at = list(dict.fromkeys(edge.value.name for edge in cone.frontier)) if cone else [f"{site.name}/all_rows"]
        detail: dict[str, Detail] = {"index": plan.index, "keep": plan.keep, "selected_from": at}
        if plan.source is not None:
            detail["index_source"] = plan.source.name
        if self.depth == "layer" and cone is not None:
            ends = dict.fromkeys(edge.value for edge in cone.frontier)
            detail["stopped"] = [f"{value.name}: {cone.stops[value]}" for value in ends if value in cone.stops]
        detail["assumes"] = _ASSUMED[plan.index]
        if isinstance(site, LMHead):
            detail["products"] = [f"{node.op_type} {node.name}".strip() for node in site.products]
            detail["vocabulary"] = str(site.vocabulary)
        return detail


_ASSUMED: Mapping[IndexMode, str] = {
    "last": "row S-1 of every batch row is a token: no right padding",
    "mask": "the mask is not zero where a token is, whichever side is padded; a row without any gives row S-1",
    "position": "no padding, left padding, or positions of padding below those of tokens (-1)",
    "runtime": "the caller feeds a row from 0 to S-1 for each batch row",
}
"""What each way to choose rows relies on, for the report."""


def _if_encoder(model: ir.Model, shapes: Shapes, outputs: str) -> list[str]:
    """A warning where nothing tells that a row attends only those in front of it: the last may be no more than others."""
    found = find_attentions(model, shapes, index_of(model))
    if not found or has_past(model) or any("causal" in site.kinds for site in found):
        return []
    text = (
        f"No attention of this model is known to be causal, and it has no cache: of an encoder the last row of {outputs} is "
        "one among others; leave this pass out where all of them are wanted."
    )
    return [text]


# ---- the edit -----------------------------------------------------------------------------------------------------


def _edit(
    rewrite: Rewrite,
    sites: Sequence[Target],
    cones: Sequence[Cone | None],
    selector: RowSelector,
    shapes: Shapes,
    tokens: TokenInput,
) -> None:
    """Make the cones of all sites compute fewer rows, and record a boundary for each."""
    whole = join([cone for cone in cones if cone is not None])
    assert not isinstance(whole, Blocked)
    selected = prune_cone(rewrite, whole, selector, shapes, tokens)
    for site, cone in zip(sites, cones, strict=True):
        name = site.name
        if cone is None:
            _prune_output(site, selector, rewrite)
            continue
        read = [edge.value for edge in cone.frontier if edge.value in selected]
        before = list(dict.fromkeys(read or selected))
        rewrite.record(before, [name], [*before, *selector.numbers.sources], [name])


def _prune_output(site: Target, selector: RowSelector, rewrite: Rewrite) -> None:
    """Select from the output itself: nothing above it computes fewer rows."""
    output, name = site.output, site.name
    taken = selector.select(output, Placement(site.rows, site.batch_axis))
    rewrite.replace_output(output, taken, f"{name}/all_rows")
    rewrite.record([name], [name], [output, *selector.numbers.sources], [name])


def _contract(site: Target, plan: RowPlan, tokens: TokenInput) -> RowSelection:
    return RowSelection(
        output=site.name,
        index=plan.index,
        keep=plan.keep,
        source=plan.source.name if plan.source is not None else None,
        sequence=tokens.value.name or "",
        sequence_axis=tokens.sequence_axis,
        row_axis=site.rows.axis,
        batch_axis=site.batch_axis,
        flat=site.rows.flat,
    )


def _what(plan: RowPlan, tokens: TokenInput) -> str:
    places: dict[IndexMode, str] = {
        "last": "of every batch row" if tokens.batch is not None else "of the stream",
        "mask": "that the mask attends",
        "position": "by position",
        "runtime": "up to the index that is fed",
    }
    rows = "the last row" if plan.keep == 1 else f"the last {plan.keep} rows"
    return f"only {rows} {places[plan.index]} {'is' if plan.keep == 1 else 'are'} computed"
