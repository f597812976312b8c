"""How one site is to be written, from the options and from what is known of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, TypeAlias

from graphsurgery.analysis.constants import const_int
from graphsurgery.passes.experts.grouped import why_not_grouped
from graphsurgery.passes.experts.packed import why_not_loop, why_not_unroll
from graphsurgery.passes.experts.side_by_side import why_not_side_by_side
from graphsurgery.passes.experts.steps import why_not_replayed
from graphsurgery.patterns.matcher import through

if TYPE_CHECKING:
    from graphsurgery.passes.experts.program import Program
    from graphsurgery.patterns.experts.sites import ExpertSite

__all__ = ["Form", "Plan", "plan_of", "why_not"]

Form: TypeAlias = Literal["gather", "packed", "grouped", "dense"]
Strategy: TypeAlias = Literal["auto", "gather", "packed", "grouped", "dense"]

_REGROUPING = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_CUMSUM_OPSET = 11
"""The first with sorted TopK of integers, CumSum and ScatterElements."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a site is written.

    Attributes:
        form: the form; the one for many tokens where there are two.
        below: number of tokens below which ``gather`` is taken at run time instead; None for one form only.
        unroll: whether ``packed`` is written out.
        most_rows: how many rows one expert can get, where the number of tokens is fixed.
        note: what the user should know, in words.
    """

    form: Form
    below: int | None = None
    unroll: bool = False
    most_rows: int | None = None
    note: str = ""

    @property
    def forms(self) -> tuple[Form, ...]:
        """All forms that are written."""
        return (self.form,) if self.below is None else ("gather", self.form)


def plan_of(
    site: ExpertSite, strategy: Strategy, target: Literal["cpu", "npu"], threshold: int | None, lowering: str
) -> Plan:
    """The plan for ``site``; ``threshold`` None is ceil(E / K) tokens, where gather reads as much as all experts."""
    tokens = site.tokens_dim if isinstance(site.tokens_dim, int) else None
    limit = -(-site.experts // site.top_k) if threshold is None else threshold
    form: Form
    below = None
    if strategy != "auto":
        form = strategy
    elif target == "cpu":
        form = "grouped"
    elif tokens is not None:
        form = "gather" if tokens < limit else "packed"
    else:
        form = "packed"
        below = limit or None
    unroll = form == "packed" and (
        lowering == "unroll" or (lowering == "auto" and target == "npu" and tokens is not None)
    )
    most = None
    if tokens is not None:
        most = tokens if _chosen_once(site) else tokens * site.top_k
    note = ""
    if form == "gather" and tokens is not None and tokens * site.top_k > site.experts:
        note = (
            f"{tokens} tokens x {site.top_k} choices are more than {site.experts} experts: gather reads more weights "
            "than dense"
        )
    return Plan(form, below, unroll, most, note)


def why_not(site: ExpertSite, program: Program, plan: Plan, lanes: int, opset: int) -> str | None:
    """Why the plan cannot be carried out for the site, in words; None where it can."""
    if opset < _CUMSUM_OPSET:
        return f"the model imports opset {opset}; experts need {_CUMSUM_OPSET}: convert it first"
    reason = why_not_replayed(program)
    if reason is not None:
        return reason
    if plan.unroll and plan.most_rows is None:
        return f"lowering=unroll needs a fixed number of tokens, and it is {site.tokens_dim}: fix it with bind-dims"
    for form in plan.forms:
        reason = _why_not_form(form, site, program, plan, lanes)
        if reason is not None:
            return f"strategy={form}: {reason}"
    return None


def _why_not_form(form: Form, site: ExpertSite, program: Program, plan: Plan, lanes: int) -> str | None:
    if form == "grouped":
        return why_not_grouped(site, program)
    if form == "packed":
        return (why_not_unroll if plan.unroll else why_not_loop)(site, program, lanes)
    return why_not_side_by_side(site, program)


def _chosen_once(site: ExpertSite) -> bool:
    """Whether no token can choose an expert twice: the indices are those of a TopK, or counted from another end."""
    if site.router is not None:
        return True
    made = through(site.indices, _REGROUPING)
    node = made.producer()
    if node is not None and node.op_type == "Sub" and not node.domain and const_int(node.inputs[0]) is not None:
        assert node.inputs[1] is not None
        made = through(node.inputs[1], _REGROUPING)
        node = made.producer()
    if node is None or node.domain:
        return False
    return node.op_type == "ArgMax" or (node.op_type == "TopK" and made is node.outputs[1])
