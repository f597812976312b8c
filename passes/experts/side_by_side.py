"""``gather`` and ``dense``: experts as a batch of matrix products, without sorting.

``gather`` looks up the weights of the experts that each token chose; ``dense`` runs every expert on every token and
looks up the results that were chosen. Both have the same shapes whatever the router says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.editing.versioned_ops import unsqueeze
from graphsurgery.passes.experts.parameters import stacked, why_not
from graphsurgery.passes.experts.program import tensors_of
from graphsurgery.passes.experts.routing import reduce_sum
from graphsurgery.passes.experts.steps import StepWriter, why_not_batched
from graphsurgery.patterns.experts.sites import ROUTE_WEIGHT, TOKEN_ROW

if TYPE_CHECKING:
    from graphsurgery.passes.experts.program import Program
    from graphsurgery.passes.experts.routing import BlockSource
    from graphsurgery.patterns.experts.sites import ExpertSite, ExpertTensor, RowInput

__all__ = ["stack_of", "why_not_side_by_side", "write_dense", "write_gather"]

_INT64 = ir.DataType.INT64


def why_not_side_by_side(site: ExpertSite, program: Program) -> str | None:
    """Why experts cannot be a batch, in words."""
    reason = why_not_batched(program)
    return reason if reason is not None else why_not_stacked(site)


def why_not_stacked(site: ExpertSite) -> str | None:
    """Why the weights of all experts cannot be one tensor, in words."""
    for tensor in tensors_of(site):
        reason = why_not(stacked(tensor), site.home)
        if reason is not None:
            return f"the weights of the experts cannot be stacked: {reason}"
    return None


def stack_of(source: BlockSource, tensor: ExpertTensor) -> ir.Value:
    """All experts' parts ``[E, *shape]``."""
    name = (tensor.values[0].name or "weight").replace("/", ".")
    return source.parameters.get(stacked(tensor), f"{name}_stack")


def write_gather(source: BlockSource) -> ir.Value:
    """Each token's K experts by Gather on the stack, ``[T, K, ...]``; returns the output of the site."""
    rewrite, program = source.rewrite, source.program
    indices = source.indices()
    looked_up: dict[ExpertTensor, ir.Value] = {}

    def parameter(tensor: ExpertTensor) -> ir.Value:
        if tensor not in looked_up:
            stack = stack_of(source, tensor)
            looked_up[tensor] = rewrite.emit(
                "Gather", [stack, indices], {"axis": 0}, name=f"chosen_{len(looked_up)}", dtype=stack.dtype
            )
        return looked_up[tensor]

    rows: dict[RowInput, ir.Value] = {TOKEN_ROW: _row_in_front(source, source.tokens(), [1, 2], "token_rows")}
    weights = source.weights()
    if weights is not None:
        rows[ROUTE_WEIGHT] = _row_in_front(source, weights, [2, 3], "choice_weights")
    count = len(program.steps)
    done = StepWriter(rewrite, program, 2, parameter).run(range(count), rows, {})
    out = reduce_sum(rewrite, done[count - 1], [1, 2], keep=False, name="sum_of_choices")
    return source.shaped(out)


def write_dense(source: BlockSource) -> ir.Value:
    """Every expert on every token, ``[E, T, ...]``, then the chosen results; returns the output of the site."""
    rewrite, program, emit = source.rewrite, source.program, source.emit
    # Where the weight enters before an expert's parameters, the rows of a token differ from choice to choice.
    per_choice = program.core_needs_weight and source.site.top_k > 1
    every = source.counting(source.pairs(), "every_pair")
    numbers = every
    if per_choice:
        rows = source.rows_of(every, spare=False)
        batch = {kind: _row_in_front(source, value, [0], "rows_for_all") for kind, value in rows.items()}
        count = source.pairs()
    else:
        batch = {TOKEN_ROW: _row_in_front(source, source.tokens(), [0], "rows_for_all")}
        if program.core_needs_weight:
            batch[ROUTE_WEIGHT] = _row_in_front(source, source.flat_weights(), [0], "weights_for_all")
        numbers = source.token_of(every, "token_of_pair")
        count = _tokens_count(source)
    writer = StepWriter(rewrite, program, 1, lambda tensor: stack_of(source, tensor))
    done = writer.run(range(program.core), batch, {})
    # [E, R, F] as [E * R, F]: row e * R + r is what expert e made of row r.
    results = rewrite.emit("Flatten", [done[program.result]], {"axis": 2}, name="all_results", dtype=source.core_dtype)
    first = emit("Mul", [source.experts(), count], name="first_row_of_expert")
    return source.summed(results, emit("Add", [first, numbers], name="row_of_pair"))


def _tokens_count(source: BlockSource) -> ir.Value:
    """T, int64 ``[1]``."""
    if source.size is not None:
        return source.rewrite.constant([source.size], "tokens_count")
    sizes = source.emit("Shape", [source.indices()], name="choices_shape", shape=[2])
    return source.part(sizes, 0, 1, "tokens_count")


def _row_in_front(source: BlockSource, value: ir.Value, axes: list[int], name: str) -> ir.Value:
    if value.dtype is None and source.dtype is not None:
        value.type = ir.TensorType(source.dtype)
    return unsqueeze(source.rewrite, value, axes, name=name)
