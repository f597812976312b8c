"""What the verifier found, as data, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any, Literal

from graphsurgery.equivalence.feeds import LeftOut
from graphsurgery.equivalence.generation_report import PromptReport, TokenDifference, print_differences
from graphsurgery.equivalence.regions.region_report import RegionReport

if TYPE_CHECKING:
    from rich.console import Console

    from graphsurgery.equivalence.bisecting import BisectedPass

__all__ = [
    "SCHEMA",
    "FeedReport",
    "LeftOut",
    "OutputReport",
    "PromptReport",
    "RegionReport",
    "TokenDifference",
    "VerifyReport",
]

SCHEMA = 1
Status = Literal["equal", "different", "unchecked"]
# Lines of one kind that are printed when nobody asks for more.
_FEW = 3
_TABLE_ROWS = 12
_EXIT_CODES: dict[Status, int] = {"equal": 0, "different": 1, "unchecked": 5}


@dataclasses.dataclass(frozen=True)
class OutputReport:
    """The feed on which one output fared worst.

    Attributes:
        name: in the reference.
        rewritten: name in the rewritten model.
        level: ``disabled`` or ``default``, the graph optimisation level of both runs.
        error: max|a - b| / max(1, max|a|); inf where there is no distance.
        tolerance: largest error that passes; 0 where every bit must be equal.
        dtype: of the reference.
        feed: the feed.
        seed: what the feed was drawn from; None for given feeds.
        index: the element; None where the output as a whole differs.
        problem: one clause; None where the output is equal.
    """

    name: str
    rewritten: str
    level: Literal["disabled", "default"]
    error: float
    tolerance: float
    dtype: str
    feed: str
    seed: int | None
    index: tuple[int, ...] | None
    problem: str | None


@dataclasses.dataclass(frozen=True)
class FeedReport:
    """A feed that both models ran on: B ``batch``, S ``length``, P ``past``."""

    name: str
    batch: int
    length: int
    past: int
    padding: str


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """Whether two models compute the same.

    Attributes:
        reference: path of the reference.
        rewritten: path of the model held against it.
        status: ``equal``, ``different`` or ``unchecked``.
        reasons: why it is not ``equal``, one sentence each.
        depth: how deep was looked; ``outputs`` for whole models, ``generate`` for decoding, ``regions`` for what differs.
        seed: what feeds were drawn from.
        threads: intra-op threads at each level.
        outputs: the worst of each output.
        feeds: feeds that were compared.
        left_out: feeds that were not, and why.
        uncovered: kinds of feeds, such as ``past``, of which every one was left out.
        routers: names of the routers whose choices were compared.
        tie_flips: rows whose choice of experts flipped at a near-tie.
        routed_rows: rows whose choice was compared, over all routers and feeds.
        excluded_rows: token rows left out because they depend on a tie flip.
        warnings: what deserves a look and does not fail.
        notes: what was assumed.
        decode_reference: the file that decodes behind the reference's prompts, where it is another.
        decode: the file that decodes behind the rewritten model's prompts, where it is another.
        steps: tokens that were to be decoded behind each prompt; 0 at other depths.
        prompts: prompts that were decoded.
        token_differences: where the tokens of a row first differ, ties included.
        regions: regions that were compared, one of each kind.
        bisected: the passes that made the rewritten model, run again one by one, up to the first that differs.
    """

    reference: str
    rewritten: str
    status: Status
    reasons: tuple[str, ...] = ()
    depth: str = "outputs"
    seed: int = 0
    threads: int = 0
    outputs: tuple[OutputReport, ...] = ()
    feeds: tuple[FeedReport, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    uncovered: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    tie_flips: int = 0
    routed_rows: int = 0
    excluded_rows: int = 0
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    decode_reference: str | None = None
    decode: str | None = None
    steps: int = 0
    prompts: tuple[PromptReport, ...] = ()
    token_differences: tuple[TokenDifference, ...] = ()
    regions: tuple[RegionReport, ...] = ()
    bisected: tuple[BisectedPass, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 equal, 1 different, 5 could not be checked."""
        return _EXIT_CODES[self.status]

    @property
    def worst(self) -> OutputReport | None:
        """The output that fared worst, relative to its tolerance."""
        return max(self.outputs, key=_severity, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are none are text such as ``"inf"``, for JSON has no infinity."""
        data: dict[str, Any] = {"schema": SCHEMA, "kind": "verify", **dataclasses.asdict(self)}
        data["exit_code"] = self.exit_code
        data["left_out"] = [{"feed": each.feed, "reason": each.reason} for each in self.left_out]
        finite: dict[str, Any] = _finite(data)
        return finite

    def dumps(self) -> str:
        """:meth:`to_json` as text."""
        return json.dumps(self.to_json(), indent=2)

    def summary(self) -> str:
        """One line."""
        if self.status == "unchecked":
            return f"unchecked: {self.reasons[0]}"
        if self.status == "different":
            more = f" (and {len(self.reasons) - 1} more)" if len(self.reasons) > 1 else ""
            return f"different: {self.reasons[0]}{more}"
        if self.depth == "generate":
            decoded = sum(len(row) for prompt in self.prompts for row in prompt.tokens)
            return f"equal: {decoded} tokens behind {len(self.prompts)} prompts (seed {self.seed}{self._left_out()})"
        if self.depth == "regions":
            alike = sum(region.alike for region in self.regions)
            if not alike:
                return "equal: every output is the same expression of the same inputs and weights"
            return f"equal: {alike} regions of {len(self.regions)} kinds on {len(self.feeds)} feeds (seed {self.seed})"
        count = len({output.name for output in self.outputs})
        return f"equal: {count} outputs on {len(self.feeds)} feeds (seed {self.seed}{self._left_out()})"

    def bisect_summary(self) -> str:
        """One line on which pass is the first that differs."""
        last = self.bisected[-1]
        if last.status == "different":
            return f"first difference: {last.spec}: {last.reason}"
        if any(each.status == "unchecked" for each in self.bisected):
            return "first difference: not found; not every pass could be checked"
        if self.status == "different":
            return (
                "first difference: no pass differs when it is run again: the file was changed behind them, or by another "
                "version of them"
            )
        return "first difference: none, every pass gives an equal result"

    def _left_out(self) -> str:
        if not self.left_out:
            return ""
        kinds = ", ".join(f"no {kind}" for kind in self.uncovered)
        return f"; {len(self.left_out)} left out{': ' + kinds if kinds else ''}"

    def _render_regions(self, console: Console, *, verbose: bool) -> None:
        from rich.table import Table
        from rich.text import Text

        if not self.regions:
            return
        table = Table("region", "stands for", "alike", "nodes", "error", "limit", "feed", "", title=None)
        for region in self.regions if verbose else self.regions[:_TABLE_ROWS]:
            styles = {"equal": "green", "different": "red", "unchecked": "yellow"}
            verdict = Text({"different": "differs"}.get(region.status, region.status), style=styles[region.status])
            limit = f"{region.tolerance:.0e}" if region.tolerance else "bitwise"
            error = f"{region.error:.1e}" if region.error else "0"
            nodes = f"{region.nodes[0]} / {region.nodes[1]}"
            table.add_row(
                Text(region.rewritten),
                Text(region.reference),
                str(region.alike),
                nodes,
                error,
                limit,
                region.feed,
                verdict,
            )
        console.print(table)
        if not verbose and len(self.regions) > _TABLE_ROWS:
            console.print(f"{len(self.regions) - _TABLE_ROWS} more kinds of regions, listed with -v", highlight=False)

    def render(self, console: Console, *, verbose: bool = False) -> None:
        """Print tables of outputs and feeds, then what was assumed, left out and found wrong.

        Args:
            console: where to.
            verbose: every feed with its sizes, every feed that was left out, and every note; else the first few.
        """
        from rich.table import Table
        from rich.text import Text

        if self.outputs:
            table = Table("output", "level", "dtype", "error", "limit", "feed", "at", "", title=None)
            for output in self.outputs:
                name = output.name if output.name == output.rewritten else f"{output.name} / {output.rewritten}"
                limit = f"{output.tolerance:.0e}" if output.tolerance else "bitwise"
                where = "" if output.index is None else str(list(output.index))
                verdict = Text("differs", style="red") if output.problem else Text("equal", style="green")
                error = f"{output.error:.1e}" if output.error else "0"
                table.add_row(Text(name), output.level, output.dtype, error, limit, output.feed, Text(where), verdict)
            console.print(table)
        self._render_regions(console, verbose=verbose)
        if self.feeds and verbose:
            table = Table("feed", "B", "S", "P", "padding", title=None)
            for feed in self.feeds:
                table.add_row(Text(feed.name), str(feed.batch), str(feed.length), str(feed.past), feed.padding)
            console.print(table)
        if self.feeds:
            listed = ", ".join(feed.name for feed in self.feeds)
            console.print(f"feeds (seed {self.seed}, {self.threads} threads): {listed}", markup=False, highlight=False)
        if self.prompts:
            listed = ", ".join(prompt.name for prompt in self.prompts)
            console.print(
                f"prompts (seed {self.seed}, {self.threads} threads): {listed}", markup=False, highlight=False
            )
        print_differences(self.token_differences, console)
        lines = _shortened([f"left out: {each.feed}: {each.reason}" for each in self.left_out], verbose)
        if self.routers:
            lines.append(
                f"routers: {len(self.routers)}, {self.routed_rows} choices compared, {self.tie_flips} flipped at a tie,"
                f" {self.excluded_rows} token rows left out for it"
            )
        lines += _shortened([f"note: {note}" for note in self.notes], verbose)
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"{self.status}: {reason}" for reason in self.reasons]
        lines += [f"after {each.spec}: {each.status}" for each in self.bisected]
        if self.bisected:
            lines.append(self.bisect_summary())
        if self.status == "equal":
            lines.append(self.summary())
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _shortened(lines: list[str], verbose: bool) -> list[str]:
    """The first few lines, and how many more there are."""
    if verbose or len(lines) <= _FEW + 1:
        return lines
    kind = lines[0].partition(":")[0]
    return [*lines[:_FEW], f"{kind}: {len(lines) - _FEW} more, listed with -v"]


def _finite(value: Any) -> Any:
    """``value`` with text in place of infinities and NaN, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _severity(output: OutputReport) -> float:
    if output.problem is not None:
        return math.inf if not output.tolerance else max(output.error / output.tolerance, 1.0) + 1e30
    return output.error / output.tolerance if output.tolerance else 0.0
