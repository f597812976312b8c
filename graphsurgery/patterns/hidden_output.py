"""Final hidden states as an output: of a decoder whose head is another file."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.patterns.interface import FLOATS
from graphsurgery.patterns.norms import Norm, norm_above
from graphsurgery.patterns.rows import is_batch_major, locate_output
from graphsurgery.patterns.site import Refusal, Site

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.analysis.slices import RowAxis
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["HiddenOutput", "find_hidden_output"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenOutput(Site):
    """Final hidden states as an output, of a decoder whose head is another file.

    Attributes:
        name: its output's name, which stays when the value behind it changes.
        output: the graph output, ``[B, S, H]``.
        rows: where it carries the rows.
        batch_axis: where it carries the batch.
        norm: the final normalisation, where it was recognised.
    """

    name: str
    output: ir.Value
    rows: RowAxis
    batch_axis: int | None
    norm: Norm | None


def find_hidden_output(
    model: ir.Model, shapes: Shapes, index: GraphIndex, tokens: TokenInput, name: str | None
) -> HiddenOutput | Refusal | None:
    """The output of final hidden states: the one called ``name``, or the only one that a normalisation ends in.

    Returns:
        The site; a refusal where ``name`` cannot be pruned; None where ``name`` is None and there is no such output.
    """
    outputs = [value for value in model.graph.outputs if name is None or value.name == name]
    found: list[HiddenOutput] = []
    for value in outputs:
        located = locate_output(value, shapes, tokens)
        if located is None or value.producer() is None:
            continue
        shape, rows, batch_axis = located
        if name is None and (value.dtype not in FLOATS or len(shape) > 3):
            continue
        if rows.flat and not is_batch_major(value, rows, shapes, model, tokens):
            continue
        norm = norm_above(value, rows, shapes, index, model)
        found.append(
            HiddenOutput(
                id=f"hidden:{value.name}",
                kinds=("hidden",),
                name=value.name or "",
                output=value,
                rows=rows,
                batch_axis=batch_axis,
                norm=norm,
            )
        )
    if name is not None:
        reason = f"output {name!r} does not hold one row for each token of {tokens.value.name!r}"
        return found[0] if found else Refusal(id=f"hidden:{name}", kinds=("hidden",), reason=reason)
    return found[0] if len(found) == 1 and found[0].norm is not None else None
