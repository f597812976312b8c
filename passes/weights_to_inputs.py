"""Make a skeleton: weights become inputs, and a spec says which bytes each stands for."""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnx_ir as ir

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.errors import UsageError
from graphsurgery.model_files.graph_extras import infos
from graphsurgery.model_files.survey import LARGE_TENSOR_BYTES, survey
from graphsurgery.model_io import source_of
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.site import Refusal, Site
from graphsurgery.site_report import SiteReport
from graphsurgery.weight_spec import WeightEntry, read_weights, safetensors_keys, write_weights
from graphsurgery.weights import WeightTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.site_report import Detail, PassReport

__all__ = ["WeightsToInputs"]

_INDEX_TYPES = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.STRING})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Weights(Site):
    """Initializers whose bytes lie in one data file, each with its place among the initializers."""

    file: str
    values: tuple[tuple[int, ir.Value], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsToInputs(Pass):
    """Turn external weights into graph inputs, behind all other inputs, and record where their bytes are.

    The result holds no weight and refers to no data file: it can be passed on, compiled or compared alone. The metadata
    ``graphsurgery.weights`` (and, from the command line, ``<output>.weights.json``) says for each input the file, key,
    offset, length, element type and shape. ``weights-from-inputs`` gives back the very same model. Every output is
    bitwise equal when the weights are fed.

    Weights inside the .onnx itself have no file to refer to: they stay, and are reported. So do external tensors of
    subgraphs and of node attributes, and small tensors.

    Attributes:
        min_bytes: tensors of fewer bytes stay: scales, shapes and indices.
        names: only initializers of these names, with ``*`` for any text (adapters: ``names=['*lora*']``).
        sha256: record the sha256 of each weight: the one option that reads the data files.

    Raises:
        UsageError: with ``sha256``, bytes are missing; or ``names`` matches no external weight.
    """

    name: ClassVar[str] = "weights-to-inputs"
    summary: ClassVar[str] = "make a skeleton whose weights are inputs, with a spec of where they lie"
    after: ClassVar[frozenset[str]] = frozenset(
        {"prune-last-token", "block-attention", "gather-experts", "extract-functions", "bind-dims", "bound-context"}
    )

    min_bytes: int = LARGE_TENSOR_BYTES
    names: tuple[str, ...] = ()
    sha256: bool = False

    def check_options(self) -> None:
        """See :meth:`Pass.check_options`."""
        if self.min_bytes < 0:
            raise UsageError(f"Option min_bytes={self.min_bytes} of pass {self.name} must be 0 or more.")

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        by_file: dict[str, list[tuple[int, ir.Value]]] = {}
        inline: list[ir.Value] = []
        made: list[ir.Value] = []
        for position, value in enumerate(model.graph.initializers.values()):
            tensor = value.const_value
            if tensor is None or tensor.dtype == ir.DataType.STRING or tensor.nbytes < self.min_bytes:
                continue
            if not self._wants(value):
                continue
            if isinstance(tensor, ir.ExternalTensor):
                by_file.setdefault(str(tensor.location), []).append((position, value))
            elif isinstance(tensor, WeightTensor):
                made.append(value)
            elif tensor.dtype not in _INDEX_TYPES and tensor.nbytes >= LARGE_TENSOR_BYTES:
                inline.append(value)
        if self.names and not by_file and not inline and not made:
            raise UsageError(f"Option names of pass {self.name}: no weight is called {' or '.join(self.names)}.")
        found: list[Site] = [
            _Weights(id=f"weights:{file}", kinds=("weights",), file=file, values=tuple(values))
            for file, values in by_file.items()
        ]
        return [*found, *_made_refusal(made), *_inline_refusal(inline), *self._nested_refusal(model)]

    def _wants(self, value: ir.Value) -> bool:
        return not self.names or any(fnmatch.fnmatchcase(value.name or "", pattern) for pattern in self.names)

    def _nested_refusal(self, model: ir.Model) -> list[Refusal]:
        if self.names:
            return []
        own = {id(value.const_value) for value in model.graph.initializers.values()}
        nested = [slot.tensor for slot in survey(model).external if id(slot.tensor) not in own]
        large = [tensor for tensor in nested if tensor.nbytes >= self.min_bytes]
        if not large:
            return []
        reason = (
            f"{len(large)} external tensors, the first {large[0].name!r}, are in subgraphs or node attributes, which "
            "cannot be inputs: make them initializers of the main graph"
        )
        return [Refusal(id="weights:nested", kinds=("weights",), reason=reason)]

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(self, model: ir.Model, sites: Sequence[Any], report: PassReport) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        entries: list[WeightEntry] = []
        for site in sites:
            made = self._entries(model, site)
            entries += made
            size = sum(entry.nbytes for entry in made)
            reason = f"{len(made)} weights of {size} bytes in {site.file} became inputs"
            detail: dict[str, Detail] = {"file": site.file, "weights": len(made), "bytes": size}
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail))
        write_weights(model, _placed(model, entries))
        graph = model.graph
        fed = []
        for value in sorted((item for site in sites for item in site.values), key=lambda item: item[0]):
            weight = value[1]
            del graph.initializers[weight.name or ""]
            tensor = weight.const_value
            assert tensor is not None
            weight.const_value = None
            weight.type = weight.type or ir.TensorType(tensor.dtype)
            if weight.shape is None:
                weight.shape = ir.Shape(tensor.shape.numpy())
            if not weight.is_graph_input():
                fed.append(weight)
        graph.inputs.extend(fed)
        invalidate(model)
        return frozenset()

    def _entries(self, model: ir.Model, site: _Weights) -> list[WeightEntry]:
        directory = _directory(model, site)
        keys = safetensors_keys(directory / site.file)
        with_info = infos(model)
        entries = []
        for position, value in site.values:
            entry = WeightEntry.of(value, position, value.name or "", info=value.name in with_info)
            entry = dataclasses.replace(entry, key=keys.get((entry.start, entry.nbytes), entry.key))
            if self.sha256:
                entry = dataclasses.replace(entry, sha256=entry.digest(directory))
            entries.append(entry)
        return entries


def _made_refusal(values: list[ir.Value]) -> list[Refusal]:
    if not values:
        return []
    what = (
        f"{len(values)} weights, the first {values[0].name!r}, are"
        if len(values) > 1
        else f"weight {values[0].name!r} is"
    )
    reason = (
        f"{what} laid out when the model is saved, so that no file can be named yet: save the model and run this pass on "
        "the result"
    )
    return [Refusal(id="weights:made", kinds=("weights",), reason=reason)]


def _inline_refusal(values: list[ir.Value]) -> list[Refusal]:
    if not values:
        return []
    size = sum(value.const_value.nbytes for value in values if value.const_value is not None)
    reason = (
        f"{len(values)} weights of {size} bytes, the first {values[0].name!r}, are inside the .onnx, so that no file can "
        "be named for them: save the model with external data first (onnx.save_model(..., save_as_external_data=True))"
    )
    return [Refusal(id="weights:inline", kinds=("weights",), reason=reason)]


def _directory(model: ir.Model, site: _Weights) -> Path:
    tensor = site.values[0][1].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    source = source_of(model)
    base = str(tensor.base_dir)
    return Path(base) if base else source.directory if source is not None else Path()


def _placed(model: ir.Model, made: list[WeightEntry]) -> list[WeightEntry]:
    """Earlier and new entries together, each with its place among all the initializers that there ever were."""
    earlier = read_weights(model)
    if not earlier:
        return made
    taken = {entry.position for entry in earlier}
    # Places that the initializers of today have in the whole.
    free = (place for place in range(len(taken) + len(model.graph.initializers) + 1) if place not in taken)
    places = [next(free) for _ in model.graph.initializers]
    return [*earlier, *(dataclasses.replace(entry, position=places[entry.position]) for entry in made)]
