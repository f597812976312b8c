"""What the comparison of two models, or of two directories of models, found: as data and as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from graphsurgery.comparison.interface import InterfaceChange

__all__ = [
    "BLOCKING_PERCENT",
    "GATED",
    "LISTED",
    "SCHEMA",
    "SEVERITIES",
    "WARNING_PERCENT",
    "DiffReport",
    "Growth",
    "InitializerChange",
    "Listing",
    "ModelDiff",
    "NodeChange",
    "Redefinition",
    "Severity",
    "Size",
]

SCHEMA = 1

Severity: TypeAlias = Literal["none", "minor", "moderate", "major"]
SEVERITIES: tuple[Severity, ...] = ("none", "minor", "moderate", "major")

Growth: TypeAlias = Literal["improvement", "neutral", "warning", "blocking"]
_GROWTHS: tuple[Growth, ...] = ("improvement", "neutral", "warning", "blocking")

WARNING_PERCENT = 5.0
BLOCKING_PERCENT = 10.0
_IMPROVED_PERCENT = -2.0

LISTED = 50
"""How many differences of a kind are listed; the count is always that of all."""

GATED = ("nodes", "graph_bytes", "weight_bytes")
"""Sizes whose growth counts."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Listing(Generic[_T]):
    """The first LISTED of ``count`` differences."""

    count: int = 0
    items: tuple[_T, ...] = ()

    @classmethod
    def of(cls, found: Iterable[_T]) -> Listing[_T]:
        """Keep the first of ``found`` and count all."""
        items = tuple(found)
        return cls(len(items), items[:LISTED])

    def __bool__(self) -> bool:
        return self.count > 0


@dataclasses.dataclass(frozen=True)
class NodeChange:
    """One node that was added, removed, changed or re-wired.

    Attributes:
        op: operator, with its domain where that is not the default.
        name: of the node in A, in B where it was added; the calls around it come first, ``layer_0/norm/Pow_3``.
        renamed: its name in B where that is another, else empty.
        detail: what changed; empty for nodes that were added or removed.
    """

    op: str
    name: str
    renamed: str = ""
    detail: str = ""

    def __str__(self) -> str:
        also = f" ({self.renamed})" if self.renamed else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.op} {self.name}{also}{detail}"


@dataclasses.dataclass(frozen=True)
class InitializerChange:
    """One difference of the initializers.

    Attributes:
        what: ``added``, ``removed``, ``dtype``, ``shape``, ``data`` (inline bytes) or ``place`` (where the bytes are).
        name: in A; in B for what was added.
        before: the value in A, or empty.
        after: the value in B, or empty.
    """

    what: Literal["added", "removed", "dtype", "shape", "data", "place"]
    name: str
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        if self.what in ("added", "removed"):
            return f"{self.name} {self.what}: {self.before or self.after}"
        if self.what == "data":
            return f"{self.name} data: other values"
        return f"{self.name} {self.what}: {self.before} -> {self.after}"


@dataclasses.dataclass(frozen=True)
class Redefinition:
    """``count`` nodes of ``op`` whose operator another version of its operator set defines: ``before`` -> ``after``."""

    op: str
    before: int
    after: int
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.op}: operator version {self.before} -> {self.after}"


@dataclasses.dataclass(frozen=True)
class Size:
    """A size or count in A and in B; None where it is not known."""

    before: int | None
    after: int | None

    @property
    def percent(self) -> float | None:
        """Growth in percent of A; None where that is no number."""
        if self.before is None or self.after is None or (not self.before and self.after):
            return None
        return 0.0 if not self.before else 100.0 * (self.after - self.before) / self.before

    @property
    def growth(self) -> Growth:
        """``warning`` from 5 % more on, ``blocking`` from 10 % more on, ``improvement`` from 2 % less on."""
        if self.before is None or self.after is None:
            return "neutral"
        percent = self.percent
        if percent is None or percent >= BLOCKING_PERCENT:
            return "blocking"
        if percent >= WARNING_PERCENT:
            return "warning"
        return "improvement" if percent <= _IMPROVED_PERCENT else "neutral"


def _worst(growths: Iterable[Growth]) -> Growth:
    """The growth that matters most: any other than neutral, the worst first."""
    return max(set(growths) - {"neutral"}, key=_GROWTHS.index, default="neutral")


@dataclasses.dataclass(frozen=True)
class ModelDiff:
    """How one model differs.

    Attributes:
        model: what the model is called: its directory, or its file.
        submodel: its file in the directory, without the suffix; empty where two files were compared.
        status: ``compared``; ``added`` and ``removed`` for a model that only one directory holds.
        a: path of the one, if it came from a file.
        b: path of the other.
        interface: differences of inputs and outputs.
        nodes_added: nodes of B without counterpart in A, calls of local functions seen through.
        nodes_removed: nodes of A without counterpart in B.
        rewired: nodes with another input, where both the old and the new source are in both models.
        attributes: nodes with other attributes.
        redefined: operators that another operator set version defines.
        initializers: differences of initializers.
        affected_outputs: outputs that are not the same expression of the same inputs and initializers; in A's words.
        operators: how often each occurs in A and in B, calls seen through.
        functions: nodes of each local function in A and B; None where it is not there.
        sizes: ``nodes`` (calls seen through), ``graph_bytes`` (of the .onnx) and ``weight_bytes`` (of the
            initializers, data files included), which are gated; ``stored_nodes`` (functions once), ``initializers``.
        notes: differences that have no weight, one sentence each.
    """

    model: str
    submodel: str
    status: Literal["compared", "added", "removed"]
    a: str | None = None
    b: str | None = None
    interface: Listing[InterfaceChange] = Listing()
    nodes_added: Listing[NodeChange] = Listing()
    nodes_removed: Listing[NodeChange] = Listing()
    rewired: Listing[NodeChange] = Listing()
    attributes: Listing[NodeChange] = Listing()
    redefined: Listing[Redefinition] = Listing()
    initializers: Listing[InitializerChange] = Listing()
    affected_outputs: tuple[str, ...] = ()
    operators: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    functions: dict[str, tuple[int | None, int | None]] = dataclasses.field(default_factory=dict)
    sizes: dict[str, Size] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What it is called in one word."""
        return f"{self.model}/{self.submodel}" if self.submodel else self.model

    @property
    def severity(self) -> Severity:
        """``major`` interface, or a model that is gone; ``moderate`` nodes and edges; ``minor`` what they hold."""
        if self.interface or self.status == "removed":
            return "major"
        if self.nodes_added or self.nodes_removed or self.rewired:
            return "moderate"
        if self.attributes or self.redefined or self.initializers:
            return "minor"
        return "none"

    @property
    def growth(self) -> Growth:
        """The worst of the gated sizes."""
        return _worst(self.sizes[name].growth for name in GATED if name in self.sizes)

    def lists(self) -> Iterator[tuple[str, Listing[Any]]]:
        """The lists that are not empty, with their headings."""
        for heading, listing in (
            ("interface", self.interface),
            ("nodes removed", self.nodes_removed),
            ("nodes added", self.nodes_added),
            ("re-wired", self.rewired),
            ("attributes", self.attributes),
            ("operator versions", self.redefined),
            ("initializers", self.initializers),
        ):
            if listing:
                yield heading, listing

    def changes(self) -> str:
        """What changed, as one phrase with counts."""
        if self.status != "compared":
            return f"model {self.status}"
        parts = []
        if self.interface:
            parts.append(f"{self.interface.count} in the interface")
        if self.nodes_added or self.nodes_removed:
            parts.append(f"+{self.nodes_added.count} -{self.nodes_removed.count} nodes")
        for listing, what in (
            (self.rewired, "re-wired"),
            (self.attributes, "with other attributes"),
            (self.initializers, "of the initializers"),
        ):
            if listing:
                parts.append(f"{listing.count} {what}")
        if self.redefined:
            parts.append(f"{sum(item.count for item in self.redefined.items)} of another operator version")
        return ", ".join(parts) or "no change"

    def to_data(self) -> dict[str, Any]:
        """Plain data (see docs/reports.md)."""
        data = dataclasses.asdict(self)
        for name, size in self.sizes.items():
            percent = size.percent
            data["sizes"][name] |= {"percent": None if percent is None else round(percent, 3), "growth": size.growth}
        return data | {"severity": self.severity, "growth": self.growth}


@dataclasses.dataclass(frozen=True)
class DiffReport:
    """How B differs from A.

    Attributes:
        a: the file or directory that was given first.
        b: the other.
        models: one entry a model, in order of their names.
    """

    a: str
    b: str
    models: tuple[ModelDiff, ...]

    @property
    def severity(self) -> Severity:
        """The highest of all models."""
        return max((model.severity for model in self.models), key=SEVERITIES.index, default="none")

    @property
    def growth(self) -> Growth:
        """The worst of all models."""
        return _worst(model.growth for model in self.models)

    def failure(self, limits: Iterable[str]) -> str | None:
        """Why B is not acceptable under ``limits``, as one sentence; None where it is.

        Args:
            limits: ``minor``, ``moderate`` or ``major``: that severity or a higher one fails; ``blocking``: a size
                that grew by 10 % or more fails; ``none``: nothing does.
        """
        for limit in limits:
            if limit == "blocking" and self.growth == "blocking":
                names = [model.title for model in self.models if model.growth == "blocking"]
                return f"{self.b} is {BLOCKING_PERCENT:.0f} % or more larger than {self.a} ({', '.join(names)})."
            if limit in SEVERITIES[1:] and SEVERITIES.index(self.severity) >= SEVERITIES.index(limit):
                names = [model.title for model in self.models if model.severity == self.severity]
                return f"{self.b} differs from {self.a}: severity {self.severity} ({', '.join(names)})."
        return None

    def to_data(self) -> dict[str, Any]:
        """Plain data (see docs/reports.md)."""
        return {
            "schema": SCHEMA,
            "kind": "diff",
            "a": self.a,
            "b": self.b,
            "severity": self.severity,
            "growth": self.growth,
            "models": [model.to_data() for model in self.models],
        }

    def to_json(self) -> str:
        """The report as JSON text; the same for every run on the same files."""
        return json.dumps(self.to_data(), indent=2) + "\n"

    def to_markdown(self) -> str:
        """The report as Markdown for a pull request: one row a model, then the lists."""
        from graphsurgery.comparison.markdown import markdown

        return markdown(self)

    def render(self, console: Console, *, verbose: bool = False) -> None:
        """Print tables for a person; ``verbose`` lists all that the report holds."""
        from graphsurgery.comparison.tables import render

        render(self, console, verbose=verbose)
