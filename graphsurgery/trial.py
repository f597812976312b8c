"""Trying passes on a model that stays as it is: what each of them would do, each on the same graph."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.errors import UsageError
from graphsurgery.garbage import paused_gc
from graphsurgery.pipeline import Pipeline, sort_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import onnx_ir as ir

    from graphsurgery.site_report import PassReport

__all__ = ["Trial", "try_passes"]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What passes would do.

    Attributes:
        passes: what each pass reported, in order.
        unusable: passes that cannot run on this model, and why.
    """

    passes: tuple[PassReport, ...]
    unusable: dict[str, str]


# Copies are millions of objects, none of them garbage: collections in between would double the time.
@paused_gc()
def try_passes(model: ir.Model, names: Sequence[str], reload: Callable[[], ir.Model]) -> Trial:
    """Run each pass alone, with its default options.

    A copy shares the tensors of ``model``, and is made only where the pass before has changed the last one.

    Args:
        model: the graph; its nodes are put in execution order, and nothing else of it is changed.
        names: passes by name.
        reload: gives the model anew, for the rare graph that cannot be copied (an output that nothing makes).

    Raises:
        InputRefusedError: the nodes of the model form a cycle.
    """
    passes: list[PassReport] = []
    unusable: dict[str, str] = {}
    sort_nodes(model)
    fresh: ir.Model | None = None
    for name in names:
        fresh = fresh or _copy(model, reload)
        try:
            report = Pipeline([name])(fresh)
        except UsageError as error:
            unusable[name] = str(error)
            fresh = None
            continue
        passes += report.passes
        fresh = None if report.changed else fresh
    return Trial(tuple(passes), unusable)


def _copy(model: ir.Model, reload: Callable[[], ir.Model]) -> ir.Model:
    try:
        return model.clone()
    except RuntimeError:
        # What onnx-ir raises for whatever it cannot copy.
        return reload()
