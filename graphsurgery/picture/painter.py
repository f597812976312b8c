"""Making a picture around a pipeline: what there was before it, behind each pass, and what its reports say."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.patterns.attention.finding import find_attentions
from graphsurgery.patterns.matcher import all_graphs, index_of
from graphsurgery.picture.divisions import BLOCKING, with_divisions
from graphsurgery.picture.expert_loads import expert_pictures
from graphsurgery.picture.mask_samples import mask_pictures
from graphsurgery.picture.parts import Layer, OperatorCounts, Picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.picture.parts import MaskPicture
    from graphsurgery.site_report import PassReport

__all__ = ["Painter", "paint"]

_GENERAL = frozenset({"attention", "decomposed", "fused"})


class Painter:
    """Looks at a model before its pipeline and behind each pass, as a callback of it."""

    def __init__(self, names: Sequence[str]) -> None:
        """Prepare for passes of these names."""
        self._names = list(names)
        self._operators: list[OperatorCounts] = []
        self._layers: tuple[Layer, ...] = ()
        self._masks: tuple[MaskPicture, ...] = ()

    def begin(self, model: ir.Model) -> None:
        """Look at the model as it was read."""
        self._operators.append(_count("input", model))
        self._layers = _layers(model)
        if BLOCKING not in self._names or self._names[0] == BLOCKING:
            self._masks = mask_pictures(model)

    def __call__(self, position: int, model: ir.Model, report: PassReport) -> None:
        """Look at it behind pass number ``position``."""
        self._operators.append(_count(report.spec, model))
        # Blocks are drawn on the masks of the graph that they are made of: its lengths may have been fixed by then.
        if BLOCKING in self._names and position + 1 == self._names.index(BLOCKING):
            self._masks = mask_pictures(model)

    def finish(self, reports: Sequence[PassReport]) -> Picture:
        """The picture, with what the reports tell of blocks of attention and of experts."""
        masks = with_divisions(self._masks, reports)
        return Picture(tuple(self._operators), self._layers, masks, expert_pictures(reports))


def paint(model: ir.Model, reports: Sequence[PassReport]) -> Picture:
    """The picture of a model to which nothing is done; its nodes are in execution order."""
    return Picture((_count("input", model),), _layers(model), mask_pictures(model), expert_pictures(reports))


def _count(after: str, model: ir.Model) -> OperatorCounts:
    found: Counter[tuple[str, str]] = Counter()
    for graph in all_graphs(model):
        found.update((node.domain, node.op_type) for node in graph)
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return OperatorCounts(after, {f"{domain}::{op}" if domain else op: n for (domain, op), n in ranked})


def _layers(model: ir.Model) -> tuple[Layer, ...]:
    kinds: dict[int, list[str]] = {}
    for site in find_attentions(model, shapes_of(model), index_of(model)):
        if site.layer is not None:
            kinds.setdefault(site.layer, []).extend(kind for kind in site.kinds if kind not in _GENERAL)
    return tuple(Layer(number, tuple(dict.fromkeys(kinds[number]))) for number in sorted(kinds))
