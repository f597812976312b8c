"""Generated decoders, pruned."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphsurgery.passes.prune_last_token import PruneLastToken
from graphsurgery.pipeline import Pipeline
from tests.oracle import assert_pruned_equal, session
from tests.strategies.decoders import Decoder, build, feeds_of

if TYPE_CHECKING:
    import onnx

    from graphsurgery.site_report import Report

FULL = Decoder(mask="int64", positions=0, past=True)
INDICES = ("last", "mask", "position", "runtime")


def pruned(decoder: Decoder, **options: Any) -> tuple[onnx.ModelProto, ir.Model, Report]:
    proto = build(decoder)
    model = ir.from_proto(proto)
    return proto, model, Pipeline([PruneLastToken(**options)], check=True)(model)


def held(decoder: Decoder, **options: Any) -> tuple[ir.Model, Report]:
    """Prune and hold to the contract."""
    proto, model, report = pruned(decoder, **options)
    assert report.passes[0].count("rewritten") >= 1, [site.reason for site in report.passes[0].sites]
    assert_pruned_equal(session(proto), session(model), model, feeds_of(decoder), lenient=decoder.half)
    return model, report


def inserted(proto: onnx.ModelProto, model: ir.Model) -> dict[str, int]:
    difference = collections.Counter(node.op_type for node in model.graph.all_nodes())
    difference.subtract(node.op_type for node in ir.from_proto(proto).graph.all_nodes())
    return {op_type: count for op_type, count in difference.items() if count}
