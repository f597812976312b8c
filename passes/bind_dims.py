"""Fix symbolic sizes, fold the shape arithmetic that depends on them, and drop the branches that are never taken."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from graphsurgery.analysis.agreement import find_contradiction
from graphsurgery.analysis.dim_equations import DimSolver, Equation
from graphsurgery.analysis.dims import evaluate, free_names, symbol
from graphsurgery.analysis.folding import plan_folding
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.editing.declared_shapes import redeclare
from graphsurgery.editing.shape_folding import apply_folding
from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.pass_base import Pass, count_nodes, unknown_name
from graphsurgery.patterns.roles import ROLES, SizeRole, SizeRoles, find_size_roles
from graphsurgery.patterns.site import Site
from graphsurgery.rewrite import Rewrite
from graphsurgery.site_report import PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.folding import Folding
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.site_report import Status

__all__ = ["BOUND_KEY", "BindDims", "DimSite"]

BOUND_KEY = "graphsurgery.bound_dims"
"""Metadata of the result: a JSON object of the names that were bound and their numbers."""

_Place: TypeAlias = "tuple[ir.Value, int]"

_NAMED = re.compile(r"\s*(?P<name>.*\S)\s*[=:]\s*(?P<number>\d+)\s*", re.DOTALL)
_LOWEST: Mapping[SizeRole, int] = {"batch": 1, "seq": 1, "past": 0, "total": 1, "context": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DimSite(Site):
    """One symbolic size of the inputs, or a role whose size is fixed already.

    Attributes:
        name: how the shape analysis calls it; None for a size that is fixed already.
        label: how users call it.
        role: its role, where it has one.
        value: its number; None where it stays symbolic.
        plan: what the binding of all sites together does; None where nothing is bound.
    """

    name: str | None
    label: str
    role: SizeRole | None
    value: int | None
    plan: Folding | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Absent(Site):
    """A role that says nothing of the model, and why."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BindDims(Pass):
    """Fix symbolic sizes, by role and by name: separate static prefill and decode graphs from one export.

    Contract: for feeds of the bound sizes every output is bitwise equal. Declared shapes become numbers; integers and
    booleans that depend on sizes alone become inline constants; an If whose condition is known is replaced by the branch
    that it takes; what nothing needs any more is removed. No Shape node is left that depends on bound sizes only. Index
    vectors (Range) and masks stay computed. No tensor outside the file is read.

    Sizes that follow from others are bound too: ``total`` is ``past + seq``. (A model all of whose sizes are given with
    ``dims`` is not held to that: some runtimes feed a cache with room to spare.)

    Attributes:
        batch: B, rows.
        seq: S, tokens of each row in one call.
        past: P, cached positions, of all caches that grow.
        total: T = P + S, columns of the attention mask.
        context: N, slots of caches of a fixed size.
        dims: other symbolic sizes by name: ``NAME=NUMBER`` or ``NAME:NUMBER`` (which needs no quotes in a spec).
        missing: what becomes of a role that no size of the model has, or whose sizes are other numbers already:
            ``error``, or ``skip`` for recipes that are to serve caches that grow and caches of a fixed size.

    Raises:
        UsageError: the model has no such name or role, or a number contradicts the graph or another one.

    Example::

        bind-dims{batch=1,seq=128,past=0}    bind-dims{batch=1,seq=1,dims=[s39:1024,s8:512]}
    """

    name: ClassVar[str] = "bind-dims"
    summary: ClassVar[str] = "fix symbolic sizes and fold the shape arithmetic that depends on them"
    aliases: ClassVar[Mapping[str, str]] = {"batch_size": "batch", "sequence": "seq", "context_length": "context"}

    batch: int | None = None
    seq: int | None = None
    past: int | None = None
    total: int | None = None
    context: int | None = None
    dims: tuple[str, ...] = ()
    missing: Literal["error", "skip"] = "error"

    def check_options(self) -> None:
        """See :meth:`Pass.check_options`."""
        for role, number in self._roles().items():
            if number < _LOWEST[role]:
                raise UsageError(f"Option {role}={number} of pass {self.name} must be {_LOWEST[role]} or more.")
        self._names()

    def _roles(self) -> dict[SizeRole, int]:
        """The roles that are given."""
        given = {role: getattr(self, role) for role in ROLES}
        return {role: number for role, number in given.items() if number is not None}

    def _names(self) -> dict[str, int]:
        """The names that are given."""
        named: dict[str, int] = {}
        for text in self.dims:
            found = _NAMED.fullmatch(text)
            if found is None:
                raise UsageError(f"Option dims of pass {self.name} takes NAME=NUMBER or NAME:NUMBER, not {text!r}.")
            name = found["name"].strip()
            if name in named:
                raise UsageError(f"Option dims of pass {self.name} gives {name!r} twice; keep one.")
            named[name] = int(found["number"])
        return named

    # ---- find -----------------------------------------------------------------------------------------------------

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        shapes = shapes_of(model)
        roles = find_size_roles(model, shapes)
        places = _places(model, shapes)
        fixed = _bound_before(model)
        left = self._left_out(roles)
        solver = DimSolver([*self._by_role(roles, left), *self._by_name(places, fixed)])
        self._add_sums(solver, roles)
        self._check_pending(solver)
        numbers = {name: number for name, number in solver.numbers.items() if name in places}
        _check_signs(model, shapes, numbers, solver)
        asked = bool(self._roles() or self._names())
        plan = self._plan(model, shapes, numbers, solver) if asked else None
        found: list[Site] = []
        for name, (value, axis) in places.items():
            label = f"{value.name}.{axis}" if name.startswith("?") else name
            found.append(_site(name, label, roles.role_of(name), numbers.get(name), plan))
        # Sizes that are what they shall be already.
        for role, number in self._roles().items():
            if role in left:
                found.append(Absent(id=f"dim:{role}", kinds=("dim", role), reason=left[role]))
            elif all(isinstance(size, int) for size in roles.sizes(role)):
                found.append(_site(None, role, role, number, plan))
        found += [_site(None, name, None, number, plan) for name, number in self._names().items() if name not in places]
        return found

    def _left_out(self, roles: SizeRoles) -> dict[SizeRole, str]:
        """The roles that say nothing of this model, and why; none where that is an error."""
        if self.missing == "error":
            return {}
        known = roles.named()
        left: dict[SizeRole, str] = {}
        for role, number in self._roles().items():
            sizes = roles.sizes(role)
            if role not in known and not (role == "past" and number == 0):
                left[role] = "no input of the model has a size of that role"
            elif sizes and all(isinstance(size, int) for size in sizes) and set(sizes) != {number}:
                left[role] = f"it is {', '.join(str(size) for size in dict.fromkeys(sizes))} already"
        return left

    def _by_role(self, roles: SizeRoles, left: Mapping[SizeRole, str]) -> Iterator[Equation]:
        known = roles.named()
        for role, number in self._roles().items():
            if role in left:
                continue
            # A model of the prompt alone has a past of 0.
            if role not in known and not (role == "past" and number == 0):
                has = ", ".join(f"{name} ({', '.join(sizes)})" for name, sizes in known.items())
                raise UsageError(
                    f"Option {role}={number} of pass {self.name}: no input of the model has a size of that role; "
                    f"{f'its roles are {has}' if has else 'none of its sizes has a role: bind them by name with dims='}."
                )
            for axis in {axis.size: axis for axis in reversed(roles.of(role))}.values():
                place = f"axis {axis.axis} of input {axis.input.name!r}"
                yield Equation(axis.size, number, f"{role}={number}", place)

    def _by_name(self, places: Mapping[str, _Place], fixed: Mapping[str, int]) -> Iterator[Equation]:
        known = [name for name in places if not name.startswith("?")]
        for name, number in self._names().items():
            if name in known:
                yield Equation(symbol(name), number, f"{name}={number}")
            elif name in fixed:
                yield Equation(fixed[name], number, f"{name}={number}", f"dim {name!r}")
            elif name.isdecimal():
                # Exporters write fixed sizes as names too.
                yield Equation(int(name), number, f"{name}={number}", f"dim {name!r}")
            elif not known:
                raise UsageError(f"Unknown symbolic size: {name!r}; all sizes of the inputs are fixed.")
            else:
                raise unknown_name("symbolic size", name, known)

    def _add_sums(self, solver: DimSolver, roles: SizeRoles) -> None:
        """Tell ``solver`` that T = P + S, where there is one P."""
        if not {"seq", "past", "total"} & set(self._roles()):
            return
        lengths, pasts = roles.sizes("seq"), roles.sizes("past")
        bound = {evaluate(size, solver.numbers) for size in pasts}
        if not lengths or not pasts or (len(pasts) > 1 and (len(bound) > 1 or None in bound)):
            return
        total = pasts[0] + lengths[0]
        solver.add(Equation(size, total, "past + seq", "the mask's width") for size in roles.sizes("total"))

    def _check_pending(self, solver: DimSolver) -> None:
        for equation in solver.pending:
            if isinstance(equation.value, int):
                raise UsageError(
                    f"Option {equation.said} of pass {self.name} does not tell the sizes in {str(equation.size)!r} apart; "
                    "bind all of them but one too."
                )

    def _plan(self, model: ir.Model, shapes: Shapes, numbers: Mapping[str, int], solver: DimSolver) -> Folding:
        """The plan for these numbers.

        Raises:
            UsageError: a node cannot work on them.
        """
        said = {name: solver.said(name) for name in sorted(numbers)}
        try:
            plan = plan_folding(model, shapes, numbers)
        except InputRefusedError as error:
            raise UsageError(f"The graph cannot run with {_all_said(said, said)}: {error}") from error
        found = find_contradiction(plan, shapes)
        if found is not None:
            raise UsageError(f"The graph cannot run with {_all_said(said, found.names)}: {found}.")
        return plan

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[DimSite | Absent], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        for site in sites:
            if isinstance(site, Absent):
                report.sites.append(SiteReport(site.id, site.kinds, None, "skipped", site.reason))
        return self._bind(model, [site for site in sites if isinstance(site, DimSite)], report)

    def _bind(self, model: ir.Model, sites: Sequence[DimSite], report: PassReport) -> frozenset[str]:
        numbers = {site.name: site.value for site in sites if site.name is not None and site.value is not None}
        folded = 0
        if any(site.value is not None for site in sites):
            plan = sites[0].plan
            if plan is None or set(plan.numbers) != set(numbers):
                plan = plan_folding(model, shapes_of(model), numbers)
            folded = self._fold(model, plan)
            named = {name: number for name, number in numbers.items() if not name.startswith("?")}
            if named:
                model.metadata_props[BOUND_KEY] = json.dumps(_bound_before(model) | named, separators=(",", ":"))
        for site in sites:
            report.sites.append(self._report(site, folded))
        left = [site for site in sites if site.value is None]
        if left and numbers:
            listed = ", ".join(f"{site.label} ({site.role})" if site.role else site.label for site in left)
            report.warnings.append(f"Still symbolic: {listed}; bind them too, by role or with dims=[NAME:NUMBER].")
        return frozenset()

    def _fold(self, model: ir.Model, plan: Folding) -> int:
        """Carry out ``plan`` and whatever follows from it; the number of nodes that went."""
        before = count_nodes(model)
        numbers = plan.numbers
        while True:
            rewrite = Rewrite(model, self.name, "dims", scope="bind_dims")
            functions = apply_folding(rewrite, plan)
            outputs = set(model.graph.outputs)
            values = [*model.graph.inputs, *_made(model.graph)]
            for value in values:
                redeclare(value, [plan.view.shape(value)], numbers, create=value in outputs)
            for done in functions:
                for value in (*done.function.inputs, *_made(done.function.graph)):
                    known = done.origin.get(value, value)
                    redeclare(value, [view.shape(known) for view in done.shapes], {})
            rewrite.commit()
            if not plan.reveals:
                return before - count_nodes(model)
            # What loops that never run were thought to change is known only now.
            plan = plan_folding(model, shapes_of(model), {})

    def _report(self, site: DimSite, folded: int) -> SiteReport:
        detail: dict[str, Any] = {"role": site.role, "value": site.value, "nodes_removed": folded}
        what = f"{site.role}={{}}" if site.role is not None else f"dims=[{site.label}:{{}}]"
        if site.value is None:
            reason = f"stays symbolic; bind it with {what.format('NUMBER')}"
            return SiteReport(site.id, site.kinds, site.layer, "skipped", reason, {"role": site.role})
        if site.name is None:
            status: Status = "rewritten" if folded else "skipped"
            reason = f"{site.label} is {site.value} already" + ("; shape arithmetic was folded" if folded else "")
            return SiteReport(site.id, site.kinds, site.layer, status, reason, detail)
        reason = f"bound to {site.value}" + (f" as {site.role}" if site.role else "")
        return SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail)


def _site(name: str | None, label: str, role: SizeRole | None, value: int | None, plan: Folding | None) -> DimSite:
    kinds = ("dim",) if role is None else ("dim", role)
    return DimSite(id=f"dim:{label}", kinds=kinds, name=name, label=label, role=role, value=value, plan=plan)


def _check_signs(model: ir.Model, shapes: Shapes, numbers: Mapping[str, int], solver: DimSolver) -> None:
    """Refuse numbers that make the size of an input, such as ``total - seq``, negative."""
    for value in model.graph.inputs:
        for axis, size in enumerate(shapes.shape(value) or ()):
            number = evaluate(size, numbers)
            if number is not None and number < 0:
                said = _all_said({name: solver.said(name) for name in sorted(numbers)}, free_names(size))
                raise UsageError(f"Axis {axis} of input {value.name!r} is {size}, which would be {number} with {said}.")


def _bound_before(model: ir.Model) -> dict[str, int]:
    """The names that earlier runs bound, and their numbers."""
    text = model.metadata_props.get(BOUND_KEY)
    return {} if not text else {str(name): int(number) for name, number in json.loads(text).items()}


def _places(model: ir.Model, shapes: Shapes) -> dict[str, _Place]:
    """Every symbolic size of the inputs, named or not, and the first axis where it stands."""
    places: dict[str, _Place] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(shapes.shape(value) or ()):
            for name in sorted(free_names(size)):
                places.setdefault(name, (value, axis))
    return places


def _all_said(said: Mapping[str, str], names: Iterable[str]) -> str:
    """Who bound ``names``, or everything that was bound where that is not known."""
    wanted = set(names) & set(said) or set(said)
    return " and ".join(dict.fromkeys(text for name, text in said.items() if name in wanted))


def _made(graph: ir.Graph) -> list[ir.Value]:
    """The values that the nodes of ``graph`` and its subgraphs make, and the inputs of those subgraphs."""
    values = [value for inner in graph.subgraphs() for value in inner.inputs]
    return values + [value for node in graph.all_nodes() for value in node.outputs]
