"""What the experts' recogniser returns: one form for every spelling of an expert block.

An expert block takes token rows ``[T, H]``, the experts that a router chose for each, ``[T, K]``, and their weights,
``[T, K]``; it puts each row through its K experts and adds the K results. What one expert does with one row is kept
as a small program, the *body*: the exporter's own nodes, each with what it reads:

* a :class:`StepOutput`: what an earlier step gave;
* :data:`TOKEN_ROW`: the token's row, ``[N, H]``, one row for each (token, choice) that is computed;
* :data:`ROUTE_WEIGHT`: the weight that the router gave this expert for this token, ``[N, 1]``;
* an :class:`ExpertTensor`: a parameter of which each expert has its own;
* an ``ir.Value``: a constant or computed value that depends neither on the token nor on the expert.

How a step is to be replayed where its node works on rows in another arrangement:

* ``MatMul`` reads a row and a parameter. Where the parameter comes first it multiplies the row as a column
  (``y = W x``, a part of shape ``[O, I]``); where it comes second the row is a row (``y = x W``, ``[I, O]``).
* Biases and other values broadcast against rows ``[N, F]`` by their last axis; they may have leading axes of one
  (``[1, F]``, ``[1, 1, F]``), whose number is that of the exporter's arrangement.
* Where ``axes`` is given, the node's own attribute or operand for its axes is that of the exporter's arrangement.

So a scale of the input (Llama 4), of the output (most others) or of something in between is a step like any other,
and so are biases, norms inside an expert, clamps and the dequantisation of a weight. The result of the last step is
added up over the K choices of each token.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, TypeAlias

from graphsurgery.patterns.site import Site

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.dims import Dim

__all__ = [
    "ROUTE_WEIGHT",
    "TOKEN_ROW",
    "ExpertSite",
    "ExpertStep",
    "ExpertTensor",
    "Operand",
    "OperatorRouter",
    "RowInput",
    "StepOutput",
]


class RowInput(enum.Enum):
    """What a row of an expert's computation starts from."""

    TOKEN = "token"
    WEIGHT = "weight"


TOKEN_ROW = RowInput.TOKEN
ROUTE_WEIGHT = RowInput.WEIGHT


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What step number ``step`` of the body gave."""

    step: int


@dataclasses.dataclass(frozen=True)
class ExpertTensor:
    """A parameter of which each expert has its own.

    Attributes:
        values: one value for each expert, in the order of their numbers; or a single one whose axis 0 is the experts.
        stacked: whether it is a single one.
        shape: shape of one expert's part, as it is stored (``[H, 2I]``, ``[2I, H]``, ``[2I]``, ``[]``).
    """

    values: tuple[ir.Value, ...]
    stacked: bool
    shape: tuple[int, ...]


Operand: TypeAlias = "RowInput | StepOutput | ExpertTensor | ir.Value | None"


@dataclasses.dataclass(frozen=True)
class ExpertStep:
    """One node of what an expert does.

    Steps that read rows give rows ``[N, F]``: they work on the last axis or element by element, so that any number of
    leading axes will do. Steps that read parameters only (dequantisation, a transpose, a cast of a weight) give one
    value for each expert; their result has the shape of one expert's part, and axes in ``node`` that count an experts'
    axis are already shifted in ``axes``.

    Attributes:
        node: the exporter's node, for its operator and attributes (the first expert's, where each has its own).
            Where one operator of the exporter is several steps (an Einsum, a product that weighs and sums), a node that
            is in no graph stands for each; it reads nothing, or constants that are in no graph either.
        operands: what it reads, in the order of its inputs.
        output: which of its outputs is used.
        per_row: whether it gives rows; otherwise one value for each expert.
        axes: the axes that the node works on, where it names any (attribute or operand), counted from the end:
            ``(-1,)`` for a Slice, Split, Concat, Softmax or reduction of the last axis; for Transpose the permutation
            of one expert's part, from the front.
    """

    node: ir.Node
    operands: tuple[Operand, ...]
    output: int = 0
    per_row: bool = True
    axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class OperatorRouter:
    """How an operator that routes inside chooses: a softmax over all experts in float32, then the K highest.

    Of experts with the same share the one with the higher number comes first.

    Attributes:
        scores: what the router gave each expert, ``[T, E]``.
        normalised: whether the K weights are divided by their sum.
    """

    scores: ir.Value
    normalised: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSite(Site):
    """One expert block.

    Attributes:
        form: how the exporter wrote it: ``dense``, ``loop``, ``grouped``, ``batched`` or ``op``.
        tokens: the token rows, ``[T, H]`` (or ``[B, S, H]``, T = B*S), before any repetition or sorting.
        indices: the chosen experts, integer ``[T, K]`` (or ``[B, S, K]``), as they really reach the experts; ``[T]``
            (or ``[B, S]``) where an ArgMax chose one and keeps no axis for it.
        weights: their weights, ``[T, K]``, as they really reach the experts; None where the block does not weight.
        weights_by_expert: whether ``weights`` is ``[T, E]`` instead (``[B, S, E]``), with a weight for every expert, of
            which those of the chosen ones count.
        output: the sum over the chosen experts, same rank as ``tokens``, of the dtype of the last step (the sum of an
            operator may be narrower than its last step, which is then cast); a value of the graph that the rewrite
            replaces.
        body: what one expert does with one row, in execution order; the last step's result ``[N, H]`` is added up.
        experts: E.
        top_k: K.
        tokens_dim: T.
        hidden: H.
        interior: all nodes that belong to the block and to nothing else, for the count of what goes away.
        router: of form ``op``, how it chooses. ``indices`` and ``weights`` then are values of no graph, and so are the
            constants that the body reads: who rewrites the block writes them out first.
        base: what the experts' sum is added onto, of the shape of ``output``, which is then base + sum; None where it
            begins at zero.
        home: the main graph (None stands for it too) or the function in which the block is, in one of its branches or
            loops perhaps; in a function it is one block for all calls.
    """

    form: str
    tokens: ir.Value
    indices: ir.Value
    weights: ir.Value | None
    output: ir.Value
    body: tuple[ExpertStep, ...]
    experts: int
    top_k: int
    tokens_dim: Dim
    hidden: int
    interior: tuple[ir.Node, ...]
    weights_by_expert: bool = False
    router: OperatorRouter | None = None
    base: ir.Value | None = None
    home: Body | None = None
