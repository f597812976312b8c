"""The base of every pass: a frozen dataclass with a name, typed options and a report.

A pass is an :class:`onnx_ir.passes.InPlacePass`, so it runs alone, in a :class:`graphsurgery.Pipeline`, or next to
other onnx-ir passes in their ``Sequential``. Its fields are its options: the same names on the command line
(``name{option=value}``), in a TOML recipe and as keyword arguments in Python, validated the same way in all three.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import sys
import time
import types
import typing
from typing import TYPE_CHECKING, Any, ClassVar, Self

import onnx_ir as ir
from pydantic import TypeAdapter, ValidationError

from graphsurgery.analysis.given_attributes import as_given, differing
from graphsurgery.analysis.shapes import forget
from graphsurgery.errors import UsageError
from graphsurgery.names import Names
from graphsurgery.patterns.matcher import all_graphs, index_of
from graphsurgery.patterns.site import Done, Refusal, Site, select
from graphsurgery.site_report import PassReport, SiteReport
from graphsurgery.specs import PassSpec, format_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["REPORTS_KEY", "Pass", "PassResult", "count_nodes", "drop_analyses", "holding_analyses", "unknown_name"]

REPORTS_KEY = "graphsurgery.reports"
"""Key of ``model.meta`` under which each pass appends its report: other runners drop subclassed results."""

_HELD_KEY = "graphsurgery.analyses_held"
_NODES_KEY = "graphsurgery.nodes"


@dataclasses.dataclass
class PassResult(ir.passes.PassResult):
    """onnx-ir's result with the report of the pass.

    Attributes:
        report: what was done to each site and why.
        inexact: names of graph outputs that are equal within tolerance only; all others are bitwise equal.
    """

    report: PassReport
    inexact: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass(ir.passes.InPlacePass, abc.ABC):
    """Base class of all passes.

    Subclasses are frozen, keyword-only dataclasses that set ``name`` and ``summary`` and define :meth:`find` and
    :meth:`rewrite`.

    Attributes:
        sites: rewrite only these: ids, kinds, layer numbers and ranges. Empty: all.
        exclude: leave these out.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of options, from the old or foreign name to the field."""
    reads_bodies: ClassVar[bool] = False
    """Whether the pass looks for sites in function bodies, so that its report tells of those that cannot be read."""
    after: ClassVar[frozenset[str]] = frozenset()
    """Passes that must run before this one when both are in a pipeline."""

    sites: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    if TYPE_CHECKING:

        def __call__(self, model_or_result: ir.Model | ir.passes.PassResult, /) -> PassResult:
            """Run the pass; see :meth:`call`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _validate(type(self), field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        self.check_options()

    def check_options(self) -> None:
        """Refuse options that contradict each other, with a :class:`UsageError`."""

    @abc.abstractmethod
    def find(self, model: ir.Model) -> Sequence[Site]:
        """All sites, refusals and what is done already, in graph order, before anything is changed.

        Raises:
            UsageError: an option cannot be honoured by the model as a whole.
        """

    @abc.abstractmethod
    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """Rewrite ``sites`` (never refusals, nor what is done already) and append what happened to each to ``report.sites``.

        Returns:
            Names of the graph outputs whose values are equal within tolerance only.
        """

    def call(self, model: ir.Model) -> PassResult:
        """Find, select, rewrite, report."""
        started = time.perf_counter()
        if _HELD_KEY not in model.meta:
            # Whoever runs passes one by one may have edited the model since the last one looked at it.
            drop_analyses(model)
        # The pass before this one has counted, unless something else has edited the model since.
        nodes = model.meta[_NODES_KEY] if _NODES_KEY in model.meta else _indexed_nodes(model)
        report = PassReport(self.name, str(self), nodes_before=nodes)
        with as_given(model):
            found, inexact = self._find_and_rewrite(model, report)
        order = {site.id: position for position, site in enumerate(found)}
        report.sites.sort(key=lambda site: order.get(site.id, len(order)))
        report.nodes_after = model.meta[_NODES_KEY] = _indexed_nodes(model) if report.changed else nodes
        report.seconds = time.perf_counter() - started
        model.meta.setdefault(REPORTS_KEY, []).append(report)
        return PassResult(model, report.changed, report, inexact)

    def _find_and_rewrite(self, model: ir.Model, report: PassReport) -> tuple[Sequence[Site], frozenset[str]]:
        found = self.find(model)
        unread = differing(model) if self.reads_bodies and model.functions else None
        report.warnings += [] if unread is None else [unread]
        chosen, others = select(found, self.sites, self.exclude)
        refusals = [site for site in chosen if isinstance(site, Refusal)]
        done = [site for site in chosen if isinstance(site, Done)]
        targets = [site for site in chosen if not isinstance(site, Refusal | Done)]
        inexact: frozenset[str] = self.rewrite(model, targets, report) if targets else frozenset()
        report.sites += [_report(site, "refused", site.reason) for site in refusals]
        report.sites += [_report(site, "skipped", site.reason) for site in done]
        report.sites += [_report(site, "skipped", "not selected") for site in others]
        return found, inexact

    def spec(self) -> PassSpec:
        """The pass with the options that differ from their defaults."""
        options = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                options.append((field.name, _text(value)))
        return PassSpec(self.name, tuple(options))

    def __str__(self) -> str:
        return format_spec(self.spec())

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make the pass from option names and values as text or typed.

        Raises:
            UsageError: an option is unknown, given under two names, or has a value of the wrong kind.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        arguments: dict[str, Any] = {}
        for key, value in options.items():
            key = key.replace("-", "_")
            field = cls.aliases.get(key, key)
            if field not in fields:
                raise unknown_name(f"option of pass {cls.name}", key, sorted(fields | set(cls.aliases)))
            if field in arguments:
                raise UsageError(f"Option {field!r} of pass {cls.name} is given twice; keep one.")
            arguments[field] = value
        return cls(**arguments)


def drop_analyses(model: ir.Model) -> None:
    """Forget what passes collected of ``model``: it was edited by something other than a pass of this kind."""
    Names.forget(model)
    forget(model)
    model.meta.pop(_NODES_KEY, None)


@contextlib.contextmanager
def holding_analyses(model: ir.Model) -> Iterator[None]:
    """Within, a pass trusts what the passes before it collected of ``model``: nothing else has edited it since."""
    model.meta[_HELD_KEY] = True
    try:
        yield
    finally:
        del model.meta[_HELD_KEY]


def unknown_name(what: str, name: str, known: Sequence[str]) -> UsageError:
    """The error for a name that does not exist, with the closest names that do."""
    import difflib

    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}" if close else f"there are {', '.join(known)}"
    return UsageError(f"Unknown {what}: {name!r}; {hint}?" if close else f"Unknown {what}: {name!r}; {hint}.")


def count_nodes(model: ir.Model) -> int:
    """Number of nodes in the main graph, its subgraphs and all functions."""
    return sum(len(graph) for graph in all_graphs(model))


def _indexed_nodes(model: ir.Model) -> int:
    """The same, from the index that recognisers need anyway."""
    return count_nodes(model) if model.functions else len(index_of(model).order)


def _report(site: Site, status: Any, reason: str) -> SiteReport:
    return SiteReport(site.id, site.kinds, site.layer, status, reason)


def _text(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, tuple):
        return tuple(str(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


@functools.lru_cache(maxsize=256)
def _adapter(pass_type: type[Pass], field: str) -> tuple[TypeAdapter[Any], bool]:
    # Only the field's own annotation is resolved: those of class variables may name types that exist for checkers only.
    owner = next(item for item in pass_type.__mro__ if field in vars(item).get("__annotations__", {}))
    holder = types.SimpleNamespace(__annotations__={field: vars(owner)["__annotations__"][field]})
    annotation = typing.get_type_hints(holder, vars(sys.modules[owner.__module__]), include_extras=True)[field]
    is_list = typing.get_origin(annotation) is tuple
    return TypeAdapter(annotation), is_list


def _validate(pass_type: type[Pass], field: str, value: Any) -> Any:
    adapter, is_list = _adapter(pass_type, field)
    # The command line has only text: a number or truth value of a recipe or of Python is read as its text, so that
    # nothing is valid in one place and refused in another.
    if isinstance(value, (bool, int, float)):
        value = _text(value)
    text = value
    if is_list and isinstance(value, str):
        text = tuple(item.strip() for item in value.split(",") if item.strip())
    elif is_list and isinstance(value, (list, tuple)):
        text = tuple(_text(item) for item in value)
    try:
        return adapter.validate_python(text)
    except ValidationError as error:
        reasons = "; ".join(dict.fromkeys(item["msg"] for item in error.errors()))
        raise UsageError(f"Option {field}={value!r} of pass {pass_type.name} is not valid: {reasons}.") from None
