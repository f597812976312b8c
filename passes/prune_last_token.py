"""Keep only the rows of the hidden state that the LM head is asked for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import onnx_ir as ir

from graphsurgery.analysis.cones import Cone, Edge, climb, outside_reader
from graphsurgery.analysis.shapes import Shapes, shapes_of
from graphsurgery.analysis.slices import Blocked, Lift, RowAxis
from graphsurgery.contracts import RowSelection, read_contracts, write_contracts
from graphsurgery.errors import UsageError
from graphsurgery.names import Names
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.interface import TokenInput, find_attention_mask, find_position_ids, find_token_input
from graphsurgery.patterns.lm_head import HiddenOutput, LMHead, find_hidden_output, find_lm_heads
from graphsurgery.patterns.matcher import GraphIndex
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.rewrite import Rewrite
from graphsurgery.row_selection import RowPlan, RowSelector, dim_name, lowest_opset
from graphsurgery.shape_patches import patch_operand
from graphsurgery.site_report import Detail, PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PruneLastToken"]

_Target = LMHead | HiddenOutput


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
        depth: where rows are selected: in front of the head (``head``) or of the final normalisation (``norm``).
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
    depth: Literal["head", "norm"] = "head"
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
        shapes, index = shapes_of(model), GraphIndex(model)
        tokens = find_token_input(model, shapes)
        if tokens is None:
            reason = "no input carries tokens (input_ids [B, S], inputs_embeds [B, S, H] or a packed stream)"
            return [Refusal(id="lm_head", kinds=("lm_head",), reason=reason)]
        if self.output != "auto":
            self._require_output(model)
            chosen = find_hidden_output(model, shapes, index, tokens, self.output)
            return [self._usable(chosen, model, shapes, tokens)] if chosen is not None else []
        heads = find_lm_heads(model, shapes, index, tokens)
        if not any(isinstance(head, LMHead) for head in heads):
            hidden = find_hidden_output(model, shapes, index, tokens, None)
            if hidden is not None:
                return [self._usable(hidden, model, shapes, tokens)]
        if not heads:
            reason = (
                "no output looks like logits, and none is the result of a final normalisation; name it with output=NAME"
            )
            return [Refusal(id="lm_head", kinds=("lm_head",), reason=reason)]
        return [self._usable(head, model, shapes, tokens) for head in heads]

    def _require_output(self, model: ir.Model) -> None:
        names = [value.name for value in model.graph.outputs]
        if self.output not in names:
            listed = ", ".join(str(name) for name in names[:8])
            raise UsageError(f"Option output={self.output!r} of pass {self.name}: the model's outputs are {listed}.")

    def _usable(
        self, site: LMHead | HiddenOutput | Refusal, model: ir.Model, shapes: Shapes, tokens: TokenInput
    ) -> Site:
        """The site, or a refusal where an option cannot be honoured for it."""
        if isinstance(site, Refusal):
            return site
        plan = self._plan(model, shapes, tokens)
        reason = None
        opset = model.opset_imports.get("", 1)
        lowest = lowest_opset(plan.index, plan.keep, flat=site.rows.flat)
        if opset < lowest:
            reason = f"the model imports opset {opset}; selecting rows by {plan.index} needs {lowest}: convert it first"
        elif isinstance(tokens.length, int) and self.keep >= tokens.length:
            reason = f"keep={self.keep} keeps all {tokens.length} tokens: nothing to prune"
        elif any(contract.output == site.name for contract in read_contracts(model)):
            reason = f"already pruned: output {site.name!r} carries a contract of an earlier run"
        if reason is not None:
            return Refusal(id=site.id, kinds=site.kinds, reason=reason)
        return site

    def _plan(self, model: ir.Model, shapes: Shapes, tokens: TokenInput) -> RowPlan:
        """Which rows, with ``auto`` resolved."""
        mask = find_attention_mask(model, shapes) if tokens.batch is not None else None
        positions = find_position_ids(model, shapes) if tokens.batch is not None else None
        if self.index == "mask" or (self.index == "auto" and mask is not None):
            if mask is None:
                raise UsageError(self._missing("mask", "no rank-2 attention mask [B, T] among its inputs"))
            return RowPlan("mask", self.keep, mask, 2, total=shapes.dim(mask, 1))
        if self.index == "position" or (self.index == "auto" and _planes(positions, shapes) is not None):
            planes = _planes(positions, shapes)
            if positions is None or planes is None:
                raise UsageError(self._missing("position", "no position ids [B, S], [3, B, S] or [4, B, S]"))
            return RowPlan("position", self.keep, positions, 3 if planes else 2, planes)
        if self.index == "runtime":
            return RowPlan("runtime", self.keep)
        return RowPlan("last", self.keep)

    def _missing(self, index: str, what: str) -> str:
        return f"Option index={index} of pass {self.name}: the model has {what}; use index=runtime or index=last."

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[LMHead | HiddenOutput], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        shapes = shapes_of(model)
        tokens = find_token_input(model, shapes)
        assert tokens is not None
        plan = self._plan(model, shapes, tokens)
        rewrite = Rewrite(model, self.name, sites[0].id, scope="lm_head/prune_last_token")
        if plan.index == "runtime":
            plan = dataclasses.replace(plan, source=self._add_runtime_input(model, rewrite, tokens))
        selector = RowSelector(rewrite, plan, tokens, shapes)
        report.warnings += self._warnings(plan, tokens)
        done = []
        for site in sites:
            rewrite.at_site(site.id, f"{_scope(site)}/prune_last_token")
            cone, note = self._cone(site, model, shapes)
            _prune(site, cone, selector, rewrite, shapes, plan)
            done.append((site, cone, note))
        boundaries = rewrite.commit()
        contracts = [_contract(site, plan, tokens) for site, _, _ in done]
        write_contracts(model, [*read_contracts(model), *contracts])
        for (site, cone, note), boundary in zip(done, boundaries, strict=True):
            detail = self._detail(site, cone, plan)
            reason = f"{_what(plan)}{note}"
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail, (boundary,)))
        return frozenset(site.name for site in sites)

    def _add_runtime_input(self, model: ir.Model, rewrite: Rewrite, tokens: TokenInput) -> ir.Value:
        if Names.of(model).has_value(self.input_name):
            raise UsageError(
                f"Option input_name={self.input_name!r} of pass {self.name}: the model already has a value of that "
                "name; choose another with input_name=NAME."
            )
        batch = dim_name(tokens.batch) if tokens.batch is not None else "selected_rows"
        text = "Row of the last token that is wanted of each batch row, relative to this call's tokens, 0 .. S-1."
        if self.input_type == "int32_b11":
            return rewrite.add_input(self.input_name, ir.DataType.INT32, [batch, 1, 1], text)
        return rewrite.add_input(self.input_name, ir.DataType.INT64, [batch], text)

    def _cone(self, site: _Target, model: ir.Model, shapes: Shapes) -> tuple[Cone | None, str]:
        """What will compute fewer rows, at the depth asked for or as deep as it goes, and a note on where it stops."""
        base = site.cone if isinstance(site, LMHead) else None
        if self.depth == "head":
            return base, ""
        if site.norm is None:
            return base, "; stopped at the head: no final normalisation was recognised above it"
        inside = site.norm.nodes

        def into(edge: Edge, lifted: Lift) -> bool:
            producer = edge.value.producer()
            return producer in inside or (not lifted.contracts and edge.value in (base.values if base else ()))

        deeper = climb(site.output, site.rows, shapes, model, into)
        if isinstance(deeper, Blocked):
            return base, f"; stopped at the head: {deeper.reason}"
        added = {value: rows for value, rows in deeper.values.items() if base is None or value not in base.values}
        reader = outside_reader(deeper, added)
        if reader is not None:
            return base, f"; stopped at the head: every row of {reader[0].name!r} is needed by {reader[1]}"
        return deeper, ""

    def _warnings(self, plan: RowPlan, tokens: TokenInput) -> list[str]:
        if plan.index == "runtime":
            assert plan.source is not None
            text = (
                f"Input {plan.source.name!r} must be set on every call, prefill and each decode step alike (0 .. S-1, "
                "relative to the tokens of that call); a generation runtime that does not know it, such as ONNX "
                "Runtime GenAI, must be told to."
            )
            return [text]
        if plan.index == "last" and tokens.batch != 1:
            why = "" if self.index == "last" else " (the model has neither a rank-2 attention mask nor position ids)"
            text = (
                f"index=last{why} takes row S-1 of every batch row: right for single prompts and left padding, wrong "
                "for right-padded batches."
            )
            return [text]
        return []

    def _detail(self, site: _Target, cone: Cone | None, plan: RowPlan) -> dict[str, Detail]:
        at = list(dict.fromkeys(edge.value.name for edge in cone.frontier)) if cone else [site.name]
        detail: dict[str, Detail] = {"index": plan.index, "keep": plan.keep, "selected_from": at}
        if plan.source is not None:
            detail["index_source"] = plan.source.name
        if isinstance(site, LMHead):
            detail["products"] = [f"{node.op_type} {node.name}".strip() for node in site.products]
            detail["vocabulary"] = str(site.vocabulary)
        return detail


# ---- the edit -----------------------------------------------------------------------------------------------------


def _prune(
    site: _Target, cone: Cone | None, selector: RowSelector, rewrite: Rewrite, shapes: Shapes, plan: RowPlan
) -> None:
    """Select rows on every edge of the frontier, mend shape operands, declare the new shapes."""
    if cone is None:
        _prune_output(site, selector, rewrite)
        return
    selected: dict[ir.Value, ir.Value] = {}
    for edge in cone.frontier:
        batch_axis = _batch_axis(edge.rows, site)
        taken = selector.select(edge.value, edge.rows, batch_axis)
        rewrite.reroute(edge.node, edge.index, taken)
        selected[edge.value] = taken
    for node, patch in cone.patches:
        count = selector.row_count(flat=patch.flat)
        patch_operand(rewrite, node, patch, count if isinstance(count, int) else None, shapes)
    for value, rows in cone.values.items():
        _declare(value, rows, selector)
    output = [site.name]
    extra = [plan.source] if plan.source is not None else []
    rewrite.record([*selected], output, [*selected, *extra], output)


def _prune_output(site: _Target, selector: RowSelector, rewrite: Rewrite) -> None:
    """Select from the output itself: nothing above it computes fewer rows."""
    output = site.output
    name = site.name
    taken = selector.select(output, site.rows, site.batch_axis)
    rewrite.replace_output(output, taken, f"{name}/all_rows")
    rewrite.record([output], [name], [output], [name])


def _batch_axis(rows: RowAxis, site: _Target) -> int | None:
    """Inside the cone the batch is the axis in front of the rows, or behind them where the output has it there."""
    if rows.flat or site.batch_axis is None:
        return None
    return rows.axis - 1 if site.batch_axis < site.rows.axis else rows.axis + 1


def _declare(value: ir.Value, rows: RowAxis, selector: RowSelector) -> None:
    """Correct the declared shape of a value that now holds fewer rows."""
    if value.shape is None:
        return
    sizes: list[int | str | ir.SymbolicDim] = list(value.shape)
    sizes[rows.axis] = selector.row_count(flat=rows.flat)
    value.shape = ir.Shape(sizes)


def _contract(site: _Target, plan: RowPlan, tokens: TokenInput) -> RowSelection:
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


def _planes(positions: ir.Value | None, shapes: Shapes) -> int | None:
    """0 for ``[B, S]``, 3 or 4 for ``[3, B, S]`` and ``[4, B, S]``; None for anything else."""
    if positions is None:
        return None
    shape = shapes.shape(positions)
    if shape is None or len(shape) == 2:
        return None if shape is None else 0
    leading = shape[0]
    return leading if isinstance(leading, int) and leading in (3, 4) else None


def _scope(site: _Target) -> str:
    return "lm_head" if isinstance(site, LMHead) else "hidden"


def _what(plan: RowPlan) -> str:
    places: dict[str, str] = {
        "last": "of every batch row",
        "mask": "that the mask attends",
        "position": "by position",
        "runtime": "up to the index that is fed",
    }
    rows = "the last row" if plan.keep == 1 else f"the last {plan.keep} rows"
    return f"only {rows} {places[plan.index]} {'is' if plan.keep == 1 else 'are'} computed"
