"""Turn a skeleton back: inputs that stand for weights become initializers that refer to their bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.errors import UsageError
from graphsurgery.model_files.graph_extras import add_infos
from graphsurgery.model_io import source_of
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.site_report import SiteReport
from graphsurgery.weight_spec import WeightEntry, read_weights, write_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.site_report import Detail, PassReport

__all__ = ["WeightsFromInputs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fed(Site):
    """Weights of one data file that are inputs."""

    file: str
    weights: tuple[tuple[WeightEntry, ir.Value], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsFromInputs(Pass):
    """Undo ``weights-to-inputs``: the inputs that the metadata ``graphsurgery.weights`` lists become initializers again.

    What ``weights-to-inputs`` changed comes back as it was, the order of initializers included. No data file is read,
    nor need it be there. Every output is bitwise equal.

    Attributes:
        directory: where the data files are; empty: beside the skeleton. Saved elsewhere, the data is copied there.
        sha256: compare the bytes with the recorded sha256: the one option that reads the data files.

    Raises:
        UsageError: with ``sha256``, bytes are missing or differ, or no digest was recorded.
    """

    name: ClassVar[str] = "weights-from-inputs"
    summary: ClassVar[str] = "make weights of a skeleton's inputs again"

    directory: str = ""
    sha256: bool = False

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        inputs = {value.name: value for value in model.graph.inputs if not value.is_initializer()}
        by_file: dict[str, list[tuple[WeightEntry, ir.Value]]] = {}
        refusals = []
        for entry in read_weights(model):
            value = inputs.get(entry.name)
            reason = _unfit(entry, value)
            if reason is not None or value is None:
                reason = f"{reason}: restore the skeleton as it was made"
                refusals.append(Refusal(id=f"weight:{entry.name}", kinds=("weights",), reason=reason))
            else:
                by_file.setdefault(entry.file, []).append((entry, value))
        found = [
            _Fed(id=f"weights:{file}", kinds=("weights",), file=file, weights=tuple(weights))
            for file, weights in by_file.items()
        ]
        return [*found, *refusals]

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        source = source_of(model)
        beside = source.directory if source is not None else Path()
        directory = Path(self.directory).absolute() if self.directory else beside
        restored: list[tuple[WeightEntry, ir.Value]] = []
        for site in sites:
            if self.sha256:
                _check(site, directory)
            restored += site.weights
            reason = f"{len(site.weights)} inputs became weights in {site.file}"
            detail: dict[str, Detail] = {"file": site.file, "weights": len(site.weights)}
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail))
        done = {entry.name for entry, _ in restored}
        write_weights(model, [entry for entry in read_weights(model) if entry.name not in done])
        for entry, value in restored:
            value.const_value = entry.tensor(directory)
        gone = {value for entry, value in restored if not entry.default}
        kept = [value for value in model.graph.inputs if value not in gone]
        model.graph.inputs.clear()
        model.graph.inputs.extend(kept)
        _put_back(model, restored)
        add_infos(model, (entry.name for entry, _ in restored if entry.info))
        invalidate(model)
        return frozenset()


def _unfit(entry: WeightEntry, value: ir.Value | None) -> str | None:
    if value is None:
        return f"the model has no input {entry.name!r} that could become a weight"
    if value.dtype is not None and value.dtype != entry.data_type:
        return f"input {entry.name!r} is {value.dtype.name.lower()} and the weight is {entry.dtype}"
    shape = value.shape
    fixed = [size if isinstance(size, int) else None for size in shape] if shape is not None else None
    if fixed is not None and tuple(fixed) != entry.shape:
        return f"input {entry.name!r} has the shape {shape} and the weight {list(entry.shape)}"
    return None


def _check(site: _Fed, directory: Path) -> None:
    for entry, _ in site.weights:
        if entry.sha256 is None:
            text = "no sha256 was recorded for it; leave sha256 out"
            raise UsageError(
                f"Option sha256 of pass weights-from-inputs: weight {entry.name!r} cannot be checked: {text}."
            )
        if entry.digest(directory) != entry.sha256:
            path = directory / entry.file
            raise UsageError(
                f"The bytes of weight {entry.name!r} in {path} are not those that the skeleton was made of: bring the "
                "data file that belongs to it."
            )


def _put_back(model: ir.Model, restored: list[tuple[WeightEntry, ir.Value]]) -> None:
    """Put weights in their places among the initializers; entries that stay inputs leave no gap."""
    initializers = model.graph.initializers
    still = sorted(entry.position for entry in read_weights(model))
    # A place counts all weights that were taken out: those that are still out are passed over.
    placed = sorted(restored, key=lambda item: item[0].position)
    present = list(initializers.values())
    ordered: list[ir.Value] = []
    waiting, skipped, taken, place = iter(placed), iter(still), iter(present), 0
    following, hole = next(waiting, None), next(skipped, None)
    total = len(placed) + len(still) + len(present)
    while place < total:
        if following is not None and following[0].position == place:
            ordered.append(following[1])
            following = next(waiting, None)
        elif hole == place:
            hole = next(skipped, None)
        else:
            value = next(taken, None)
            if value is not None:
                ordered.append(value)
        place += 1
    # Initializers that came or went in between move the last places.
    ordered += list(taken)
    if following is not None:
        ordered += [following[1], *(value for _, value in waiting)]
    initializers.clear()
    for value in ordered:
        initializers.add(value)
