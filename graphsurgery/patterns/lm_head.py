"""The LM head: the product with the vocabulary matrix, and what comes after it up to the logits.

Found by climbing from each output that looks like logits, through the tail (bias, scale, softcap, masks, casts,
reshapes, branches), to the first matrix products: MatMul, Gemm, their fused, integer and packed forms, whatever the
weight is hidden behind. The rows that reach those products are what pruning selects from.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from graphsurgery.analysis.cones import Cone, Edge, climb, join, outside_readers
from graphsurgery.analysis.dims import product
from graphsurgery.analysis.slices import Blocked, RowAxis
from graphsurgery.patterns.dynamic_products import lift_head
from graphsurgery.patterns.interface import FLOATS
from graphsurgery.patterns.norms import Norm, norm_above
from graphsurgery.patterns.rows import batch_axis_of, holds_rows, is_batch_major, locate_output, selector_above
from graphsurgery.patterns.site import Refusal, Site

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.cones import Into
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.analysis.slices import Lift
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["LMHead", "find_lm_heads", "is_named_logits", "share_rows"]

_LOGITS = re.compile(r"logits|lm_head|(^|[./_])scores?$", re.IGNORECASE)
# Scores of something else than the vocabulary, one for each token too.
_NOT_LOGITS = re.compile(r"(?<![a-z])(router|gate|gating|experts?|moe|aux|attention|attn)(?![a-z])", re.IGNORECASE)

# A low-rank path beside the head is this short, and there are few of them.
_MAX_SOURCES = 4
_MAX_PATH = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMHead(Site):
    """One LM head.

    Attributes:
        name: its output's name, which stays when the value behind it changes.
        output: the graph output that holds the logits, ``[B, S, V]`` (``[B*S, V]`` where flat, ``[T, V]`` where packed).
        rows: where it carries the rows.
        batch_axis: where it carries the batch; None where flat or packed.
        cone: from the output up to the rows that the products multiply; its frontier is what is selected from.
        products: the matrix products whose results are the logits, usually one.
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


def is_named_logits(output: ir.Value) -> bool:
    """Whether the name of an output says that it holds logits over the vocabulary."""
    name = output.name or ""
    return _LOGITS.search(name) is not None and not _NOT_LOGITS.search(name)


# ---- heads --------------------------------------------------------------------------------------------------------


def find_lm_heads(
    model: ir.Model, shapes: Shapes, index: GraphIndex, tokens: TokenInput, outputs: Sequence[str] | None = None
) -> list[LMHead | Refusal]:
    """Every LM head of the model, in the order of its outputs; an output named like logits that is none is refused.

    Where no output is named so, the heads among the others; nothing is then refused.

    Args:
        model: the model.
        shapes: its shapes.
        index: the order of its nodes.
        tokens: where B and S come from.
        outputs: names of the outputs to look at, whatever they are called; None to choose as above.
    """
    floats = [value for value in model.graph.outputs if value.dtype in FLOATS or value.dtype is None]
    scout = _Scout(model, shapes, index, tokens)
    if outputs is not None:
        return scout.search([value for value in floats if value.name in outputs])
    named = [value for value in floats if is_named_logits(value)]
    if named:
        return scout.search(named)
    found = scout.search(_unnamed_candidates(floats, shapes, tokens))
    return [site for site in found if isinstance(site, LMHead)]


def share_rows(heads: Sequence[LMHead]) -> bool:
    """Whether nothing but ``heads`` needs the rows that they leave out."""
    whole = join([head.cone for head in heads])
    return not isinstance(whole, Blocked) and not outside_readers(whole)


def _unnamed_candidates(outputs: list[ir.Value], shapes: Shapes, tokens: TokenInput) -> list[ir.Value]:
    """Outputs that may be logits under another name: rows of another number of features than the hidden state has."""
    hidden = shapes.dim(tokens.value, -1) if tokens.value.dtype in FLOATS else None
    found = []
    for value in outputs:
        located = locate_output(value, shapes, tokens)
        if located is None or located[0][-1] in (hidden, 1):
            continue
        if len(located[0]) <= 3 and isinstance(located[0][-1], int) and value.producer() is not None:
            found.append(value)
    return found


class _Scout:
    """Looks for a head above one output after the other."""

    def __init__(self, model: ir.Model, shapes: Shapes, index: GraphIndex, tokens: TokenInput) -> None:
        self._model = model
        self._shapes = shapes
        self._index = index
        self._tokens = tokens
        # Values that something else needs all rows of, and who; outputs of which that is so.
        self._cuts: dict[ir.Value, str] = {}
        self._needed: dict[ir.Value, str] = {}

    def search(self, outputs: Sequence[ir.Value]) -> list[LMHead | Refusal]:
        """The head above each output, or why there is none.

        Rows may be left out where only these outputs need them. Where something else needs all rows of a value, the
        climb stops in front of it.
        """
        while True:
            found = [self._examine(output) for output in outputs]
            heads = [site for site in found if isinstance(site, LMHead)]
            whole = join([head.cone for head in heads])
            if isinstance(whole, Blocked):
                return [
                    self._refusal(site.output, whole.reason) if isinstance(site, LMHead) else site for site in found
                ]
            readers = outside_readers(whole)
            if not readers:
                return found
            roots = {root: who for root, who in readers.items() if root in whole.roots}
            for root, who in roots.items():
                self._needed[root] = f"every row of output {root.name!r} is needed by {who}"
            self._cuts |= {value: who for value, who in readers.items() if value not in roots}

    def _examine(self, output: ir.Value) -> LMHead | Refusal:
        found = self._needed.get(output) or self._head(output, certain=is_named_logits(output))
        return self._refusal(output, found) if isinstance(found, str) else found

    def _refusal(self, output: ir.Value, reason: str) -> Refusal:
        return Refusal(id=f"lm_head:{output.name}", kinds=("lm_head",), reason=reason)

    def _head(self, output: ir.Value, *, certain: bool) -> LMHead | str:
        shapes, tokens = self._shapes, self._tokens
        if output.producer() is None:
            return f"output {output.name!r} is an input or a constant, not the result of a head"
        shape = shapes.shape(output)
        if shape is None:
            cone = climb(output, RowAxis(0), shapes, self._model, lambda _edge, _lift: False)
            reason = f": {cone.reason}" if isinstance(cone, Blocked) else ""
            return f"the shape of output {output.name!r} cannot be inferred{reason}"
        if tokens.length == 1:
            return f"the model computes one row a step ({tokens.value.name!r} has one token): nothing to prune"
        located = locate_output(output, shapes, tokens)
        if located is None:
            return self._no_rows(output, shape)
        shape, rows, batch_axis = located
        if len(shape) > 3 and not isinstance(_features(shape, rows, batch_axis), int):
            sizes = ", ".join(str(size) for size in shape)
            return f"output {output.name!r} [{sizes}] does not hold a number of scores that is known, as logits do"
        if rows.flat and not is_batch_major(output, rows, shapes, self._model, tokens):
            what = "is flattened with the batches inside: the rows of one do not lie behind one another"
            return f"output {output.name!r} {what}"
        cone = climb(output, rows, shapes, self._model, self._tail(), lift_head)
        if isinstance(cone, Blocked):
            return f"no head was found above output {output.name!r}: {cone.reason}"
        if not cone.contractions:
            return f"no head was found above output {output.name!r}: {self._no_product(cone)}"
        multiplied = {node.inputs[index] for node, index in cone.edges if node in cone.contractions}
        covered = [value for value in cone.values if value in multiplied]
        if covered:
            # The tail reads what the products read: the head ends there.
            self._cuts |= dict.fromkeys(covered, "the head")
            return self._head(output, certain=certain)
        misplaced = self._misplaced(cone)
        if misplaced is not None:
            return misplaced
        products = cone.contractions
        if not certain and _normalises(cone):
            return f"output {output.name!r} is not made by a head: it is normalised behind its product"
        if not certain and any(edge.node not in set(products) for edge in cone.frontier):
            return f"output {output.name!r} is not made by a head: rows are added behind its product"
        cone = self._narrowed(cone)
        return LMHead(
            id=f"lm_head:{output.name}",
            kinds=("lm_head",),
            name=output.name or "",
            output=output,
            rows=rows,
            batch_axis=batch_axis,
            cone=cone,
            products=products,
            vocabulary=_features(shape, rows, batch_axis),
            norm=self._norm_of(cone),
        )

    def _no_product(self, cone: Cone) -> str:
        """Why the climb ended before it came to a product."""
        cut = next((edge.value for edge in cone.frontier if edge.value in self._cuts), None)
        if cut is not None:
            return f"every row of {cut.name!r} is needed by {self._cuts[cut]}"
        return next(iter(cone.stops.values()), "it is not computed by a matrix product")

    def _tail(self) -> Into:
        """Climb through the tail: not into products, nor to where the rows are the same for all batches."""

        def into(edge: Edge, lifted: Lift) -> bool:
            cut = lifted.contracts or edge.value in self._cuts
            return not cut and self._is_placed(edge.value, edge.rows)

        return into

    def _is_placed(self, value: ir.Value, rows: RowAxis) -> bool:
        shape, batch = self._shapes.shape(value), self._tokens.batch
        if rows.flat or batch is None or batch == 1 or shape is None:
            return True
        return batch_axis_of(shape, rows, self._tokens) is not None

    def _misplaced(self, cone: Cone) -> str | None:
        """Why rows cannot be selected on an edge of the frontier, or a value does not hold one row a token."""
        carried = [*cone.values.items(), *((edge.value, edge.rows) for edge in cone.frontier)]
        for value, rows in carried:
            shape = self._shapes.shape(value)
            if shape is not None and not holds_rows(shape, rows, self._tokens):
                return f"axis {rows.axis} of {value.name!r}, of size {shape[rows.axis]}, does not hold one row a token"
        return None

    def _narrowed(self, cone: Cone) -> Cone:
        """The cone with a low-rank path beside the head taken in: both then select from the one hidden state."""
        sources = {edge.value: edge.rows for edge in cone.frontier}
        if not 1 < len(sources) <= _MAX_SOURCES:
            return cone
        for value, rows in sources.items():
            others = set(sources) - {value}

            def beside(edge: Edge, _lifted: Lift, others: set[ir.Value] = others) -> bool:
                return edge.value not in others and edge.value not in self._cuts

            deeper = climb(value, rows, self._shapes, self._model, beside)
            if isinstance(deeper, Blocked) or not deeper.contractions or len(deeper.nodes) > _MAX_PATH:
                continue
            if any(edge.value not in others for edge in deeper.frontier) or self._misplaced(deeper):
                continue
            whole = join([cone, deeper])
            if not isinstance(whole, Blocked) and not outside_readers(whole, deeper.values):
                return self._narrowed(dataclasses.replace(whole, roots=cone.roots))
        return cone

    def _no_rows(self, output: ir.Value, shape: tuple[Dim, ...]) -> str:
        tokens, declared = self._tokens, output.shape
        sizes = ", ".join(str(size) for size in shape)
        if declared is not None and len(declared) == len(shape) and not any(size is None for size in declared):
            sizes = ", ".join(str(size) for size in declared)
        selector = selector_above(output, self._shapes, tokens)
        what = f"output {output.name!r} [{sizes}] does not hold one row for each of the {tokens.length} tokens of"
        if selector is not None:
            return f"already pruned: {what} {tokens.value.name!r}, {selector} selects them"
        if len(shape) > 1 and shape[-2] == 1:
            return f"already pruned: output {output.name!r} [{sizes}] holds one row of the {tokens.length} tokens"
        return f"already pruned or not logits: {what} {tokens.value.name!r}"

    def _norm_of(self, cone: Cone) -> Norm | None:
        """The normalisation in front of all products; one in each branch where the decoder is in branches."""
        products = set(cone.contractions)
        sources = {edge.value: edge.rows for edge in cone.frontier if edge.node in products}
        found = [norm_above(value, rows, self._shapes, self._index, self._model) for value, rows in sources.items()]
        norms = [norm for norm in found if norm is not None]
        if not norms or len(norms) < len(sources):
            return None
        entries = dict.fromkeys(value for norm in norms for value in norm.entries)
        return Norm(frozenset().union(*(norm.nodes for norm in norms)), tuple(entries))


def _features(shape: tuple[Dim, ...], rows: RowAxis, batch_axis: int | None) -> Dim:
    """How many numbers a row holds."""
    return product(size for axis, size in enumerate(shape) if axis not in (rows.axis, batch_axis))


def _normalises(cone: Cone) -> bool:
    return any(node.op_type.startswith("Reduce") or "Normalization" in node.op_type for node in cone.nodes)
