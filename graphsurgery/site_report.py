"""What a pipeline did and why: the report that the command line prints and that scripts read.

Every candidate of every pass ends in the report as ``rewritten``, ``skipped`` (nothing to do, by choice or by
contract) or ``refused`` (cannot be done, with the reason). The JSON form is versioned: ``schema`` rises when a field
changes its meaning; new fields may appear at any time.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

    from graphsurgery.picture.parts import Picture

__all__ = ["SCHEMA", "Boundary", "Detail", "PassReport", "Report", "SiteReport", "Status"]

SCHEMA = 1

Status: TypeAlias = Literal["rewritten", "skipped", "refused"]
Detail: TypeAlias = "str | int | float | bool | list[Any] | dict[str, Any] | None"


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The value names between which a region was rewritten, so that it can be lifted out and checked later.

    Attributes:
        scope: where the values live: ``main`` or the identifier of a function.
        inputs_before: values that the region read before the rewrite.
        outputs_before: values that it gave before the rewrite.
        inputs_after: the same, after.
        outputs_after: the same, after, in the order of ``outputs_before``.
    """

    scope: str
    inputs_before: tuple[str, ...]
    outputs_before: tuple[str, ...]
    inputs_after: tuple[str, ...]
    outputs_after: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """What happened to one site."""

    id: str
    kinds: tuple[str, ...]
    layer: int | None
    status: Status
    reason: str
    detail: dict[str, Detail] = dataclasses.field(default_factory=dict)
    boundaries: tuple[Boundary, ...] = ()


@dataclasses.dataclass
class PassReport:
    """What one pass did.

    Attributes:
        name: the pass.
        spec: the pass with its options, as it can be typed again.
        sites: one entry for each candidate, in graph order.
        warnings: what the user must know to use the result rightly.
        nodes_before: number of nodes, functions and subgraphs included, before the pass.
        nodes_after: the same after the pass.
        seconds: time taken; not part of the JSON form unless asked for, so that reruns are identical.
    """

    name: str
    spec: str
    sites: list[SiteReport] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0

    def count(self, status: Status) -> int:
        """Number of sites with ``status``."""
        return sum(site.status == status for site in self.sites)

    @property
    def changed(self) -> bool:
        """Whether the pass rewrote anything."""
        return any(site.status == "rewritten" for site in self.sites)


@dataclasses.dataclass
class Report:
    """What a pipeline did to a model.

    Attributes:
        passes: one report for each pass, in the order in which they ran.
        warnings: about the input file and the result as a whole.
        input: the file that was read, where there was one.
        output: the file that was written, where there was one.
        verification: the verifier's own report as data, where it ran.
        picture: operators, masks and experts for a person to look at, where it was asked for.
    """

    passes: list[PassReport] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    input: str | None = None
    output: str | None = None
    verification: dict[str, Any] | None = None
    picture: Picture | None = None

    @property
    def changed(self) -> bool:
        """Whether any pass rewrote anything."""
        return any(item.changed for item in self.passes)

    def all_warnings(self) -> list[str]:
        """The warnings of the whole and of each pass, without repetition."""
        texts = [*self.warnings, *(text for item in self.passes for text in item.warnings)]
        return list(dict.fromkeys(texts))

    def to_data(self, *, timings: bool = False) -> dict[str, Any]:
        """The report as plain data (see docs/reports.md for the schema)."""
        from graphsurgery.version import __version__

        passes = [dataclasses.asdict(item) | {"changed": item.changed} for item in self.passes]
        for item in passes:
            if not timings:
                del item["seconds"]
        return {
            "schema": SCHEMA,
            "tool": f"graphsurgery {__version__}",
            "input": self.input,
            "output": self.output,
            "changed": self.changed,
            "passes": passes,
            "warnings": self.warnings,
            "verification": self.verification,
            "picture": None if self.picture is None else dataclasses.asdict(self.picture),
        }

    def to_json(self, *, timings: bool = False) -> str:
        """The report as JSON text, byte-identical over reruns unless ``timings``."""
        return json.dumps(self.to_data(timings=timings), indent=2) + "\n"

    def to_html(self) -> str:
        """The report as one page for a person (:mod:`graphsurgery.html_report`), byte-identical over reruns."""
        from graphsurgery.html_report import report_page

        return report_page(self)

    def render(self, console: Console, *, verbose: bool = False) -> None:
        """Print the report as a table: a line for each site, then what each pass did to the number of nodes.

        Args:
            console: where to print.
            verbose: print the details of each site too.
        """
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        # What is typed again as a selector must be whole: a long id is folded, never cut.
        for column in ("pass", "site", "layer", "status", "what and why"):
            folds = column in ("site", "what and why")
            table.add_column(column, no_wrap=not folds, overflow="fold")
        styles = {"rewritten": "green", "skipped": "yellow", "refused": "red"}
        for item in self.passes:
            if not item.sites:
                table.add_row(Text(item.name), "-", "-", "skipped", "no site of this kind was found")
            for site in item.sites:
                reason = Text(site.reason)
                if verbose and site.detail:
                    reason.append("\n" + ", ".join(f"{key}={value}" for key, value in site.detail.items()))
                layer = "-" if site.layer is None else str(site.layer)
                table.add_row(
                    Text(item.name), Text(site.id), layer, Text(site.status, style=styles[site.status]), reason
                )
        console.print(table)
        for item in self.passes:
            console.print(
                f"{item.spec}: {item.count('rewritten')} rewritten, {item.count('skipped')} skipped, "
                f"{item.count('refused')} refused; {item.nodes_before} -> {item.nodes_after} nodes",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
