"""Running passes in order, with a callback between them, and recording what was run.

Example::

    report = Pipeline(["prune-last-token{index=mask}", "tidy"])(graphsurgery.load("model.onnx"))
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from graphsurgery.contracts import EXACT_OUTPUTS_KEY
from graphsurgery.errors import InputRefusedError, InternalError, UsageError
from graphsurgery.garbage import paused_gc
from graphsurgery.invariants import violations
from graphsurgery.pass_base import Pass, PassResult, count_nodes, drop_analyses, holding_analyses
from graphsurgery.patterns.matcher import is_sorted
from graphsurgery.registry import make_pass
from graphsurgery.renames import read_renames
from graphsurgery.site_report import PassReport, Report, SiteReport
from graphsurgery.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["PROVENANCE_KEY", "SORTED", "AnyPass", "PassCallback", "Pipeline", "provenance", "sort_nodes"]

PROVENANCE_KEY = "graphsurgery.pipeline"
"""Metadata of the result: a JSON list of runs, each with version, passes and hash of the graph that was read."""

SORTED = "The nodes of the input were not in execution order; they were sorted."
"""The warning of a report."""

AnyPass = Pass | ir.passes.PassBase


class PassCallback(Protocol):
    """Called after each pass."""

    def __call__(self, position: int, model: ir.Model, report: PassReport) -> None:
        """Look at ``model`` after pass number ``position`` (from 0), which gave ``report``."""


class Pipeline:
    """Passes that run one after another on a model, in place.

    Args:
        passes: pass objects (other onnx-ir passes that work in place too), spec texts or recipe tables.
        callback: called after each pass: timing, printing, dumping, checking.
        check: check the invariants of the model after each pass (:mod:`graphsurgery.invariants`).

    Raises:
        UsageError: a pass or option does not exist, a pass does not work in place, or the order breaks a declared
            constraint.
    """

    def __init__(
        self,
        passes: Iterable[AnyPass | str | Mapping[str, Any]],
        *,
        callback: PassCallback | None = None,
        check: bool = False,
    ) -> None:
        if isinstance(passes, str):
            raise UsageError(f"Pipeline takes a list of passes, not the text {passes!r}; put it in a list.")
        self.passes: tuple[AnyPass, ...] = tuple(
            item if isinstance(item, ir.passes.PassBase) else make_pass(item) for item in passes
        )
        self._callback = callback
        self._check = check
        for item in self.passes:
            if not item.in_place:
                raise UsageError(f"Pass {_spec(item)} returns a new model; a pipeline runs passes that work in place.")
        _check_order(self.passes)

    @classmethod
    def from_recipe(cls, recipe: str | Path, **arguments: Any) -> Pipeline:
        """The pipeline of a recipe, by name or from a TOML file."""
        from graphsurgery.recipes import read_recipe

        return cls(read_recipe(recipe).passes, **arguments)

    def specs(self) -> list[str]:
        """Each pass as text."""
        return [_spec(item) for item in self.passes]

    # Collections in between would walk the whole model each time: a third of the time of 10 k nodes, half of that of 50 k.
    @paused_gc()
    def __call__(self, model: ir.Model) -> Report:
        """Run all passes on ``model``, in place.

        A model whose nodes are not in execution order is sorted first. When an exception leaves a pass, the model may
        be half rewritten and must not be used; files are untouched.

        Returns:
            The report; it is empty of changes when no pass found anything to do.

        Raises:
            InputRefusedError: the nodes of the model form a cycle.
            UsageError: an option cannot be honoured by the model as a whole.
            InternalError: with ``check``, when a pass broke an invariant.
        """
        report = Report()
        if sort_nodes(model):
            report.warnings.append(SORTED)
        before = set(violations(model)) if self._check else set()
        inexact: set[str] = set()
        drop_analyses(model)
        for position, item in enumerate(self.passes):
            pass_report, moved = _run(item, model)
            # By the name in the export: a later pass may give an output another one.
            inexact |= {read_renames(model).output(name) for name in moved}
            report.passes.append(pass_report)
            if self._check:
                _raise_new(before, model, _spec(item))
            if self._callback is not None:
                self._callback(position, model, pass_report)
        if report.changed:
            self._record(model, inexact)
        return report

    def _record(self, model: ir.Model, inexact: set[str]) -> None:
        from graphsurgery.model_io import source_of

        runs = provenance(model)
        renames = read_renames(model)
        names = {value.name or "" for value in model.graph.outputs}
        exact = {name for name in names if renames.output(name) not in inexact}
        if runs:
            exact &= {name for name in _json_list(model, EXACT_OUTPUTS_KEY) if isinstance(name, str)}
        source = source_of(model)
        run = {"version": __version__, "passes": self.specs(), "input": source.graph_hash() if source else None}
        model.metadata_props[PROVENANCE_KEY] = json.dumps([*runs, run], separators=(",", ":"))
        model.metadata_props[EXACT_OUTPUTS_KEY] = json.dumps(sorted(exact), separators=(",", ":"))


def _run(item: AnyPass, model: ir.Model) -> tuple[PassReport, frozenset[str]]:
    """Run one pass; its report, and the outputs that are no longer bitwise what they were."""
    if isinstance(item, Pass):
        with holding_analyses(model):
            own = item(model)
        assert isinstance(own, PassResult)
        return own.report, own.inexact
    # Another package's pass: what it does is not known, so nothing is assumed of the outputs.
    nodes = count_nodes(model)
    result = item(model)
    drop_analyses(model)
    report = PassReport(_spec(item), _spec(item), nodes_before=nodes, nodes_after=count_nodes(model))
    if not result.modified:
        return report, frozenset()
    report.sites.append(SiteReport("model", ("model",), None, "rewritten", "changed by a pass of another package"))
    return report, frozenset(value.name or "" for value in model.graph.outputs)


def provenance(model: ir.Model) -> list[dict[str, Any]]:
    """The runs that made ``model``, oldest first; empty for a model that no pipeline has changed.

    Raises:
        InputRefusedError: the metadata is not what a pipeline writes.
    """
    runs = _json_list(model, PROVENANCE_KEY)
    if not all(_is_run(run) for run in runs):
        raise InputRefusedError(f"The model's metadata {PROVENANCE_KEY!r} is not what graphsurgery writes: remove it.")
    return runs


def _json_list(model: ir.Model, key: str) -> list[Any]:
    text = model.metadata_props.get(key)
    if not text:
        return []
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise InputRefusedError(f"The model's metadata {key!r} is not what graphsurgery writes: remove it.")
    return found


def _is_run(run: object) -> bool:
    return isinstance(run, dict) and isinstance(run.get("version"), str) and isinstance(run.get("passes"), list)


def _top_graphs(model: ir.Model) -> list[ir.Graph]:
    return [model.graph, *(function.graph for function in model.functions.values())]


def sort_nodes(model: ir.Model) -> bool:
    """Put the nodes of ``model`` in execution order; whether they were not.

    Raises:
        InputRefusedError: they form a cycle.
    """
    if all(is_sorted(graph) for graph in _top_graphs(model)):
        return False
    for graph in _top_graphs(model):
        try:
            graph.sort()
        except ValueError as error:
            where = f"graph {graph.name!r}" if graph.name else "the model"
            raise InputRefusedError(f"The nodes of {where} form a cycle, so that it cannot run: {error}.") from error
    return True


def _spec(item: AnyPass) -> str:
    return str(item) if isinstance(item, Pass) else type(item).__name__


def _check_order(passes: tuple[AnyPass, ...]) -> None:
    names = [item.name if isinstance(item, Pass) else "" for item in passes]
    for position, item in enumerate(passes):
        if not isinstance(item, Pass):
            continue
        late = next((name for name in names[position + 1 :] if name in item.after), None)
        if late is not None:
            raise UsageError(f"Pass {item.name} must run after {late}; put {late} before it.")


def _raise_new(known: set[str], model: ir.Model, spec: str) -> None:
    found = [text for text in violations(model) if text not in known]
    if found:
        raise InternalError(f"Pass {spec} broke the model: {found[0]} ({len(found)} in all). Please report this.")
