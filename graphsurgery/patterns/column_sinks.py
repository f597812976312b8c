"""The column that a sink adds to the scores, and the Slice that drops it: whether it still does when others go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.constants import const_int

if TYPE_CHECKING:
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.attention.sites import AttentionSite

__all__ = ["sink_end"]


def sink_end(site: AttentionSite, shapes: ShapeView) -> int | str | None:
    """Whether the cut behind the softmax drops the sink whatever the number of columns.

    Returns:
        None where it does; the end to count from the last column where it is a number of columns now; or a sentence.
    """
    assert site.sink is not None
    cut = site.sink.cut
    width = shapes.dim(site.sink.value, -1)
    if len(cut.inputs) < 4 or cut.inputs[3] is None or not isinstance(width, int):
        return f"node {cut.name!r}, which drops the sink, has bounds that are not known"
    axes = shapes.shape_value(cut.inputs[3])
    end = const_int(cut.inputs[2])
    rank = shapes.rank(cut.outputs[0])
    if axes is None or len(axes.items) != 1 or rank is None or axes.items[0] not in (-1, rank - 1):
        return f"node {cut.name!r}, which drops the sink, cuts other axes too"
    if end is not None and end < 0:
        return None
    if len(cut.inputs) > 4 and const_int(cut.inputs[4]) != 1:
        return f"node {cut.name!r}, which drops the sink, has steps"
    return -width
