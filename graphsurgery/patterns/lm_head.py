"""The LM head: the product with the vocabulary matrix, and what comes after it up to the logits.

Found by climbing from each output that looks like logits, through the tail (bias, scale, softcap, masks, casts,
reshapes, branches), to the first matrix products: MatMul, Gemm, their fused, integer and packed forms, whatever the
weight is hidden behind. The rows that reach those products are what pruning selects from.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.cones import Cone, Edge, climb, outside_reader
from graphsurgery.analysis.dims import product
from graphsurgery.analysis.slices import Blocked, RowAxis, same_size
from graphsurgery.patterns.norms import Norm, norm_above
from graphsurgery.patterns.site import Refusal, Site

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.analysis.slices import Lift
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["HiddenOutput", "LMHead", "find_hidden_output", "find_lm_heads"]

_LOGITS = re.compile(r"logits|lm_head|(^|[./_])scores?$", re.IGNORECASE)
_FLOAT = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMHead(Site):
    """One LM head.

    Attributes:
        name: its output's name, which stays when the value behind it changes.
        output: the graph output that holds the logits, ``[B, S, V]`` (``[B*S, V]`` where flat, ``[T, V]`` where packed).
        rows: where it carries the rows.
        batch_axis: where it carries the batch; None where flat or packed.
        cone: from the output up to the rows that the products multiply; its frontier is what is selected from.
        products: the matrix products, usually one.
        vocabulary: V.
        norm: the normalisation in front, where there is one in front of all products.
    """

    name: str
    output: ir.Value
    rows: RowAxis
    batch_axis: int | None
    cone: Cone
    products: tuple[ir.Node, ...]
    vocabulary: Dim
    norm: Norm | None


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


def find_lm_heads(model: ir.Model, shapes: Shapes, index: GraphIndex, tokens: TokenInput) -> list[LMHead | Refusal]:
    """Every LM head of the model, in the order of its outputs; an output named like logits that is none is refused."""
    outputs = [value for value in model.graph.outputs if value.dtype in _FLOAT or value.dtype is None]
    named = [value for value in outputs if _LOGITS.search(value.name or "")]
    candidates = named or _unnamed_candidates(outputs, shapes, tokens)
    return [_examine(value, model, shapes, index, tokens, certain=bool(named)) for value in candidates]


def _unnamed_candidates(outputs: list[ir.Value], shapes: Shapes, tokens: TokenInput) -> list[ir.Value]:
    """Outputs that may be logits under another name: rows of more features than anything else has."""
    hidden = shapes.dim(tokens.value, -1) if shapes.rank(tokens.value) == 3 else None
    found = []
    for value in outputs:
        shape = shapes.shape(value)
        located = None if shape is None else locate_rows(shape, tokens)
        if located is None or shape is None or shape[-1] == hidden:
            continue
        if len(shape) <= 3 and isinstance(shape[-1], int) and value.producer() is not None:
            found.append(value)
    return found


def locate_rows(shape: tuple[Dim, ...], tokens: TokenInput) -> tuple[RowAxis, int | None] | None:
    """Where a tensor of features carries the rows, and where the batch.

    Returns:
        The row axis and the batch axis (None where flat or packed); None where it does not hold one row a token.
    """
    rank = len(shape)
    if rank < 2:
        return None
    if tokens.batch is not None and rank == 2 and same_size(shape[0], product((tokens.batch, tokens.length))):
        return RowAxis(0, flat=True), None
    for axis in (rank - 2, *range(rank - 2)):
        if not same_size(shape[axis], tokens.length):
            continue
        if tokens.batch is None:
            return RowAxis(axis), None
        others = [item for item in range(rank - 1) if item != axis and same_size(shape[item], tokens.batch)]
        if others:
            return RowAxis(axis), others[-1] if others[-1] < axis else others[0]
        if tokens.batch == 1 and rank == 2:
            return RowAxis(axis, flat=True), None
    return None


def _examine(
    output: ir.Value, model: ir.Model, shapes: Shapes, index: GraphIndex, tokens: TokenInput, *, certain: bool
) -> LMHead | Refusal:
    site = f"lm_head:{output.name}"

    def refuse(reason: str) -> Refusal:
        return Refusal(id=site, kinds=("lm_head",), reason=reason)

    if output.producer() is None:
        return refuse(f"output {output.name!r} is an input or a constant, not the result of a head")
    shape = shapes.shape(output)
    if shape is None:
        return refuse(f"the shape of output {output.name!r} cannot be inferred")
    if tokens.length == 1:
        return refuse(f"the model computes one row a step ({tokens.value.name!r} has one token): nothing to prune")
    located = locate_rows(shape, tokens)
    if located is None:
        return refuse(_no_rows(output, shape, tokens))
    rows, batch_axis = located
    cone = climb(output, rows, shapes, model, _below_products)
    if isinstance(cone, Blocked):
        return refuse(f"no head was found above output {output.name!r}: {cone.reason}")
    if not cone.contractions:
        reason = next(iter(cone.stops.values()), "it is not computed by a matrix product")
        return refuse(f"no head was found above output {output.name!r}: {reason}")
    if not certain and _normalises(cone):
        return refuse(f"output {output.name!r} is not made by a head: it is normalised behind its product")
    products = set(cone.contractions)
    if not certain and any(edge.node not in products for edge in cone.frontier):
        return refuse(f"output {output.name!r} is not made by a head: rows are added behind its product")
    reader = outside_reader(cone)
    if reader is not None:
        value, who = reader
        return refuse(f"every row of {value.name!r}, behind the head, is needed by {who}")
    return LMHead(
        id=site,
        kinds=("lm_head",),
        name=output.name or "",
        output=output,
        rows=rows,
        batch_axis=batch_axis,
        cone=cone,
        products=cone.contractions,
        vocabulary=shape[-1],
        norm=_norm_of(cone, model, shapes, index),
    )


def _below_products(edge: Edge, lifted: Lift) -> bool:
    return not lifted.contracts


def _normalises(cone: Cone) -> bool:
    return any(node.op_type.startswith("Reduce") or "Normalization" in node.op_type for node in cone.nodes)


def _no_rows(output: ir.Value, shape: tuple[Dim, ...], tokens: TokenInput) -> str:
    sizes = ", ".join(str(size) for size in shape)
    rows = shape[-2] if len(shape) > 1 else None
    if rows == 1:
        return f"already pruned: output {output.name!r} [{sizes}] holds one row of the {tokens.length} tokens"
    return (
        f"already pruned or not logits: output {output.name!r} [{sizes}] does not hold one row for each of the "
        f"{tokens.length} tokens of {tokens.value.name!r}"
    )


def _norm_of(cone: Cone, model: ir.Model, shapes: Shapes, index: GraphIndex) -> Norm | None:
    """The normalisation in front of all products, where they all read the same one."""
    sources = {edge.value: edge.rows for edge in cone.frontier if edge.node in set(cone.contractions)}
    if len(sources) != 1:
        return None
    ((value, rows),) = sources.items()
    return norm_above(value, rows, shapes, index, model)


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
        shape = shapes.shape(value)
        located = None if shape is None else locate_rows(shape, tokens)
        if located is None or shape is None or value.producer() is None:
            continue
        if value.dtype not in _FLOAT and name is None:
            continue
        rows, batch_axis = located
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
