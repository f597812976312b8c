"""Bodies whose nodes take attributes from the calls: read as given where all calls agree, told of where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.passes.test_block_attention_bodies import OUTSIDE
from tests.passes.test_block_attention_bodies import feeds as attention_feeds
from tests.passes.test_gather_experts_bodies import in_functions
from tests.strategies.attentions import PLAIN
from tests.strategies.attentions import build as build_attention
from tests.strategies.experts import Spec, build, feeds_of
from tests.strategies.in_bodies import in_functions as attention_in_functions

if TYPE_CHECKING:
    import onnx


def by_reference(proto: onnx.ModelProto, *, differing: str = "") -> int:
    """Let the attributes of a function's nodes come from its calls; how many.

    The axes of ``differing`` nodes are counted from the end by one call and from the front by the other.
    """
    (function,) = proto.functions
    calls = [node for node in proto.graph.node if node.domain == function.domain]
    count = 0
    for node in function.node:
        if node.op_type == "Constant":
            continue
        for attribute in node.attribute:
            name = f"given_{count}"
            count += 1
            for number, call in enumerate(calls):
                copy = call.attribute.add()
                copy.CopyFrom(attribute)
                copy.name = name
                if node.op_type == differing and attribute.name == "axis":
                    copy.i = -1 if number else differing_axis(node)
            kind = attribute.type
            function.attribute.append(name)
            attribute_name = attribute.name
            attribute.Clear()
            attribute.name, attribute.type, attribute.ref_attr_name = attribute_name, kind, name
    return count


def differing_axis(node: onnx.NodeProto) -> int:
    return {"TopK": 1, "Softmax": 3}[node.op_type]


def experts(form: str) -> tuple[onnx.ModelProto, Spec]:
    spec = Spec(form=form)
    return in_functions(build(spec)), spec


def check(before: onnx.ModelProto, model: ir.Model, feeds: dict[str, np.ndarray]) -> None:
    assert not violations(model)
    wanted, ours = run(session(before), feeds), run(session(model), feeds)
    for name, array in wanted.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-5 * max(1.0, float(np.max(np.abs(array)))))


@pytest.mark.parametrize("strategy", ["gather-experts", "gather-experts{strategy=gather}"])
@pytest.mark.parametrize("form", ["batched", "grouped", "selected", "einsum"])
def test_experts_are_read_as_all_calls_give(form: str, strategy: str) -> None:
    proto, spec = experts(form)
    assert by_reference(proto) > 3
    model = ir.from_proto(proto)
    (site,) = Pipeline([strategy])(model).passes[0].sites
    assert site.status == "rewritten", site.reason
    assert site.reason.endswith("in function 'Block', for its 2 calls")
    feeds = feeds_of(spec, 2, 3, 1)
    check(proto, model, feeds | {f"{name}_2": array for name, array in feeds_of(spec, 2, 3, 2).items()})


def test_what_no_pass_touches_refers_to_its_calls_again() -> None:
    proto, _ = experts("batched")
    by_reference(proto)
    model = ir.from_proto(proto)
    before = ir.to_proto(model).SerializeToString()
    report = Pipeline(["gather-experts{exclude=[experts]}", "block-attention", "extract-functions"])(model)
    assert not report.changed
    assert [site.reason for site in report.passes[0].sites] == ["not selected"]
    assert ir.to_proto(model).SerializeToString() == before


def test_experts_whose_calls_differ_are_told() -> None:
    proto, _ = experts("batched")
    by_reference(proto, differing="TopK")
    model = ir.from_proto(proto)
    (site,) = Pipeline(["gather-experts"])(model).passes[0].sites
    assert site.status == "refused"
    assert site.kinds == ("experts",)
    assert site.reason.startswith("what may be experts is not read: TopK '")
    assert "takes attribute 'axis' from the calls, which do not all give the same; in function 'Block'" in site.reason


@pytest.mark.parametrize("differing", ["", "Softmax"])
def test_attention(differing: str) -> None:
    proto = attention_in_functions(build_attention(PLAIN), OUTSIDE)
    by_reference(proto, differing=differing)
    model = ir.from_proto(proto)
    report = Pipeline(["block-attention{q_block_size=4}"])(model).passes[0]
    (site,) = report.sites
    if differing:
        (warning,) = report.warnings
        assert warning.startswith("What Softmax '")
        assert warning.endswith("nor what follows from it: its calls give attribute 'axis' different values.")
        assert site.status == "refused"
        assert site.reason.endswith("is chosen by each call of its function")
        return
    assert site.status == "rewritten", site.reason
    assert report.warnings == []
    check(proto, model, attention_feeds(PLAIN, 2, 6, 3, seed=5))
