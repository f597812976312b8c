"""Sizes of caches that a file declares by a mere symbol.

Alphabet: B batch, S query length, P past, T = P + S keys, G KV heads, D head size.
"""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper

import graphsurgery
from graphsurgery.equivalence import verify_models
from graphsurgery.equivalence.feeds import make_feeds
from graphsurgery.equivalence.handover import Manner, find_handover
from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.roles import Role
from graphsurgery.equivalence.signature import merge, read_signature
from tests.equivalence.builders import FIXTURES, Graph, H, copy, grouped, save


def sizes(model) -> dict[str, tuple[tuple[int, int], ...]]:
    return {spec.name: spec.size for spec in read_signature(model).having(Role.CACHE)}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"packed": True, "rotary": 16},
        # A part of each head is rotated: the table is narrower than half a head.
        {"packed": True, "rotary": 8},
        {"packed": True},
        {"packed": False, "rotary": 16},
        {"packed": False},
    ],
)
def test_the_head_size_that_fused_attention_asks_for(options, inside):
    assert sizes(grouped(**options, inside=inside)) == {"past.key": ((3, 32),), "past.value": ((3, 32),)}


@pytest.mark.parametrize("options", [{"packed": True, "rotary": 8}, {"packed": False, "rotary": 16}])
def test_such_models_run_with_a_past(options, tmp_path):
    path = save(grouped(**options), tmp_path / "a.onnx")
    report = verify_models(path, path)
    assert (report.status, report.uncovered, report.warnings) == ("equal", (), ())
    assert any(feed.past and feed.batch > 1 for feed in report.feeds)
    assert any(feed.past and feed.length > 1 for feed in report.feeds)


def joined(*, reorder: bool = False, turned: bool = False):
    """A cache ``[B, 'heads', P, 'size']`` that a Concat grows by rows of 2 heads of 8."""
    g = Graph()
    ids = g.input("input_ids", T.INT64, "batch", "seq")
    past = g.input("past", T.FLOAT, "batch", "heads", "past", "size")
    rows = g.op("Gather", g.weight("embed", 40, H), ids)
    rows = g.op("Transpose", g.op("Reshape", rows, g.ints("split", [0, 0, 2, -1])), perm=[0, 2, 1, 3])
    if reorder:
        past = g.op("Gather", past, g.input("beam_idx", T.INT64, "batch"), axis=0)
    if turned:
        past = g.op("Transpose", past, perm=[0, 1, 3, 2])
        rows = g.op("Transpose", rows, perm=[0, 1, 3, 2])
    g.op("Concat", past, rows, axis=3 if turned else 2, out="present")
    g.output("present", T.FLOAT, "batch", "heads", "total", "size")
    return g.model()


@pytest.mark.parametrize("reorder", [False, True])
def test_a_cache_is_as_wide_as_what_is_joined_to_it(reorder):
    assert sizes(joined(reorder=reorder)) == {"past": ((1, 2), (3, 8))}
    feeds = {feed.name: feed.build() for feed in make_feeds(read_signature(joined(reorder=reorder)), 0)[0]}
    assert feeds["b1-s3-p4"]["past"].shape == (1, 2, 4, 8)


def test_axes_that_were_moved_tell_nothing():
    assert sizes(joined(turned=True)) == {"past": ()}


@pytest.mark.parametrize(("part", "size"), [("key", 16), ("value", 24)])
def test_keys_and_values_of_other_widths(part, size):
    g = Graph()
    ids = g.input("input_ids", T.INT64, "batch", "seq")
    hidden = g.op("Gather", g.weight("embed", 40, H), ids)
    rows = [g.op("MatMul", hidden, g.weight(name, H, width)) for name, width in (("q", 32), ("k", 32), ("v", 48))]
    past = [g.input(f"past.{each}", T.FLOAT, "batch", 2, "past", "size") for each in ("key", "value")]
    g.op("MultiHeadAttention", *rows, "", "", "", *past, outs=3, out="a", domain="com.microsoft", num_heads=2)
    model = g.model()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert sizes(model)[f"past.{part}"] == ((3, size),)


def test_a_declared_size_goes_before_the_window():
    model = read_proto(FIXTURES / "genai_gptoss" / "model.onnx")
    bound = copy(model)
    for value in bound.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "past_sliding_length":
                dim.dim_value = 32
    both = merge(read_signature(model), read_signature(bound))
    shapes = [feed.build()["past_key_values.0.key"].shape for feed in make_feeds(both, 0)[0]]
    assert {shape[2:] for shape in shapes} == {(32, 16)}
    free = [feed.build()["past_key_values.0.key"].shape for feed in make_feeds(read_signature(model), 0)[0]]
    assert {shape[2:] for shape in free} == {(8, 16)}


def test_an_unsound_model_is_for_the_runtime_to_refuse(tmp_path):
    broken = grouped()
    broken.graph.node.append(broken.graph.node[0])
    assert sizes(broken) == {"past.key": (), "past.value": ()}
    report = verify_models(save(grouped(), tmp_path / "a.onnx"), save(broken, tmp_path / "b.onnx"))
    assert report.status == "different"
    assert "cannot be loaded by ONNX Runtime" in report.reasons[0]


@pytest.mark.parametrize(
    ("name", "manner"),
    # Optimum's Llama is told its positions; its gpt-oss counts them from the length of the cache.
    [("optimum_llama", Manner.FILL), ("optimum_gpt_oss", Manner.GROW)],
)
def test_a_cache_of_fixed_length_is_filled_up_where_positions_do_not_follow_from_it(name: str, manner: Manner):
    model = graphsurgery.load(FIXTURES / name / "model.onnx")
    graphsurgery.Pipeline(["bind-dims{batch=1,seq=1,past=24}"])(model)
    proto = ir.to_proto(model)
    caches = find_handover(proto, read_signature(proto))
    assert {cache.manner for cache in caches} == {manner}
