"""Running passes in order, with a callback between them, and recording what was run.

Example::

    report = Pipeline(["prune-last-token{index=mask}", "tidy"])(graphsurgery.load("model.onnx"))
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.errors import InternalError, UsageError
from graphsurgery.invariants import violations
from graphsurgery.names import Names
from graphsurgery.pass_base import Pass, PassResult, count_nodes
from graphsurgery.patterns.matcher import is_sorted
from graphsurgery.registry import make_pass
from graphsurgery.site_report import PassReport, Report
from graphsurgery.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["EXACT_OUTPUTS_KEY", "PROVENANCE_KEY", "AnyPass", "PassCallback", "Pipeline", "provenance"]

PROVENANCE_KEY = "graphsurgery.pipeline"
"""Metadata of the result: a JSON list of runs, each with version, passes and hash of the graph that was read."""

EXACT_OUTPUTS_KEY = "graphsurgery.exact_outputs"
"""Metadata of the result: a JSON list of the outputs that are bitwise equal to the input model's."""

AnyPass = Pass | ir.passes.PassBase


class PassCallback(Protocol):
    """Called after each pass."""

    def __call__(self, position: int, model: ir.Model, report: PassReport) -> None:
        """Look at ``model`` after pass number ``position`` (from 0), which gave ``report``."""


class Pipeline:
    """Passes that run one after another on a model, in place.

    Args:
        passes: pass objects (other onnx-ir passes too), spec texts or recipe tables.
        callback: called after each pass: timing, printing, dumping, checking.
        check: check the invariants of the model after each pass (:mod:`graphsurgery.invariants`).

    Raises:
        UsageError: a pass or option does not exist, or the order breaks a declared constraint.
    """

    def __init__(
        self,
        passes: Iterable[AnyPass | str | Mapping[str, Any]],
        *,
        callback: PassCallback | None = None,
        check: bool = False,
    ) -> None:
        self.passes: tuple[AnyPass, ...] = tuple(
            item if isinstance(item, ir.passes.PassBase) else make_pass(item) for item in passes
        )
        self._callback = callback
        self._check = check
        _check_order(self.passes)

    @classmethod
    def from_recipe(cls, recipe: str | Path, **arguments: Any) -> Pipeline:
        """The pipeline of a recipe, by name or from a TOML file."""
        from graphsurgery.recipes import read_recipe

        return cls(read_recipe(recipe).passes, **arguments)

    def specs(self) -> list[str]:
        """Each pass as text."""
        return [_spec(item) for item in self.passes]

    def __call__(self, model: ir.Model) -> Report:
        """Run all passes on ``model``, in place.

        A model whose nodes are not in execution order is sorted first. When an exception leaves a pass, the model may
        be half rewritten and must not be used; files are untouched.

        Returns:
            The report; it is empty of changes when no pass found anything to do.

        Raises:
            UsageError: an option cannot be honoured by the model as a whole.
            InternalError: with ``check``, when a pass broke an invariant.
        """
        report = Report()
        if not all(is_sorted(graph) for graph in _top_graphs(model)):
            for graph in _top_graphs(model):
                graph.sort()
            report.warnings.append("The nodes of the input were not in execution order; they were sorted.")
        before = set(violations(model)) if self._check else set()
        inexact: set[str] = set()
        for position, item in enumerate(self.passes):
            nodes = count_nodes(model)
            result = item(model)
            if isinstance(result, PassResult):
                inexact |= result.inexact
                pass_report = result.report
            else:
                Names.forget(model)
                invalidate(model)
                pass_report = PassReport(_spec(item), _spec(item), nodes_before=nodes, nodes_after=count_nodes(model))
                if result.modified:
                    inexact |= {value.name or "" for value in model.graph.outputs}
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
        earlier = model.metadata_props.get(EXACT_OUTPUTS_KEY)
        exact = {value.name or "" for value in model.graph.outputs} - inexact
        if runs and earlier is not None:
            exact &= set(json.loads(earlier))
        source = source_of(model)
        run = {"version": __version__, "passes": self.specs(), "input": source.graph_hash() if source else None}
        model.metadata_props[PROVENANCE_KEY] = json.dumps([*runs, run], separators=(",", ":"))
        model.metadata_props[EXACT_OUTPUTS_KEY] = json.dumps(sorted(exact), separators=(",", ":"))


def provenance(model: ir.Model) -> list[dict[str, Any]]:
    """The runs that made ``model``, oldest first; empty for a model that no pipeline has changed."""
    text = model.metadata_props.get(PROVENANCE_KEY)
    return json.loads(text) if text else []


def _top_graphs(model: ir.Model) -> list[ir.Graph]:
    return [model.graph, *(function.graph for function in model.functions.values())]


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
