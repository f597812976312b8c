"""The router of an operator that routes inside, written out in front of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.constants import constant_of
from graphsurgery.passes.experts.routing import reduce_sum

if TYPE_CHECKING:
    from graphsurgery.patterns.experts.sites import ExpertSite, ExpertStep, Operand
    from graphsurgery.rewrite import Rewrite

__all__ = ["write_router"]

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64


def write_router(rewrite: Rewrite, site: ExpertSite) -> ExpertSite:
    """``site``, its choice of experts and its constants made values of the graph.

    Args:
        rewrite: inserts in front of the operator.
        site: of form ``op``; any other is returned as it is.
    """
    router, emit = site.router, rewrite.emit
    if router is None:
        return site
    rewrite.before(site.interior[-1])
    experts = site.experts
    scores = emit("Cast", [router.scores], {"to": int(_FLOAT)}, name="scores", dtype=_FLOAT)
    shares = emit("Softmax", [scores], {"axis": -1}, name="shares", dtype=_FLOAT)
    # TopK takes the lower of two places that hold the same; the operator takes the higher.
    backwards = rewrite.constant(np.arange(experts - 1, -1, -1, dtype=np.int64), "experts_backwards")
    turned = emit("Gather", [shares, backwards], {"axis": 1}, name="shares_backwards", dtype=_FLOAT)
    count = rewrite.constant([site.top_k], "choices")
    weights, places = rewrite.emit_parts("TopK", [turned, count], {"axis": 1}, ["weights", "places"])
    places.type = ir.TensorType(_INT64)
    last = rewrite.constant(np.asarray(experts - 1, np.int64), "last_expert")
    indices = emit("Sub", [last, places], name="chosen_experts", dtype=_INT64)
    if router.normalised:
        total = reduce_sum(rewrite, weights, [1], keep=True, name="weights_total")
        weights = emit("Div", [weights, total], name="weights_of_one", dtype=_FLOAT)
    body = tuple(_of_graph(rewrite, step) for step in site.body)
    return dataclasses.replace(site, indices=indices, weights=weights, body=body, router=None)


def _of_graph(rewrite: Rewrite, step: ExpertStep) -> ExpertStep:
    def made(operand: Operand) -> Operand:
        if not isinstance(operand, ir.Value):
            return operand
        array = constant_of(operand)
        node = operand.producer()
        if array is None or node is None or node.graph is not None:
            return operand
        return rewrite.constant(array, "number")

    return dataclasses.replace(step, operands=tuple(made(item) for item in step.operands))
