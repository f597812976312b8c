from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from onnx import helper

from graphsurgery.contracts import RowSelection
from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.routers import (
    Flips,
    Router,
    compare_choices,
    find_routers,
    match_routers,
    with_bodies_inlined,
)
from tests.equivalence.builders import FIXTURES, Graph, case, decoder, mixture

ROUTER = Router("router", "scores", "chosen")
SIZES = {"B": 2, "S": 3}


def test_a_router_is_found_behind_its_projection():
    routers, hidden = find_routers(mixture())
    assert routers == [Router("node/top", "biased", "top.1")]
    assert hidden == 0
    assert find_routers(decoder()) == ([], 0)
    assert len(find_routers(read_proto(case("m01")))[0]) == 1
    assert len(find_routers(read_proto(case("m03")))[0]) == 1


def test_every_expert_layer_of_every_export_has_one():
    for entry in json.loads((FIXTURES / "manifest.json").read_text()):
        routers, _ = find_routers(read_proto(FIXTURES / entry["path"]))
        if entry["moe"] in (None, "op") or entry["path"].endswith("lm_head.onnx"):
            assert len(routers) == 0, entry["path"]
        elif entry["family"] == "deepseek_v3":
            # The first layer is dense; the others choose the best of each group, groups, and experts.
            assert len(routers) == 3 * (entry["layers"] - 1), entry["path"]
        else:
            assert len(routers) == entry["layers"], entry["path"]


def test_routers_come_in_execution_order_whatever_the_order_of_the_file():
    proto = read_proto(FIXTURES / "mixtral_grouped" / "model.onnx")
    ordered, _ = find_routers(proto)
    nodes = list(reversed(proto.graph.node))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    assert find_routers(proto)[0] == ordered
    assert len(ordered) == 3


@pytest.mark.parametrize("kept", [0, 1])
def test_the_best_of_each_row_is_a_choice_too(kept: int):
    g = Graph()
    logits = g.op("MatMul", g.input("x", 1, "t", 16), g.weight("w", 16, 4))
    best = g.op("ArgMax", g.op("Softmax", logits), axis=-1, keepdims=kept)
    g.op("Cast", best, to=1)
    (router,), _ = find_routers(g.model())
    assert (router.indices, router.lone, router.axis) == (best, not kept, -1)
    scores = np.array([[0.1, 0.9, 0.2, 0.3], [0.5, 0.1, 0.5, 0.2]], np.float32)
    chosen = scores.argmax(axis=1).reshape((2, 1) if kept else (2,))
    other = chosen.copy()
    other.reshape(-1)[1] = 2
    flips = Flips()
    compare_choices(flips, router, scores, chosen, other, {"B": 1, "S": 2}, 1e-5)
    assert (flips.problem, flips.flipped, flips.rows, flips.first) == (None, 1, 2, {0: 1})
    other.reshape(-1)[0] = 3
    flips = Flips()
    compare_choices(flips, router, scores, chosen, other, {"B": 1, "S": 2}, 1e-5)
    assert "chooses experts [3], not [1], for row 0" in (flips.problem or "")


def test_the_token_that_a_model_gives_is_no_router():
    g = Graph()
    logits = g.op("MatMul", g.input("x", 1, "t", 16), g.weight("w", 16, 4))
    g.output(g.op("ArgMax", logits, axis=-1), 7, "t", 1)
    assert find_routers(g.model()) == ([], 0)


def test_sorting_is_no_routing():
    g = Graph()
    ids = g.op("TopK", g.op("MatMul", g.input("x", 1, "t", 16), g.weight("w", 16, 4)), g.ints("k", [2]), outs=2)
    flat = g.op("Cast", g.op("Reshape", ids.replace(".0", ".1"), g.ints("flat", [-1])), to=1)
    g.op("TopK", flat, g.ints("all", [6]), largest=0, outs=2)
    g.op("TopK", flat, g.ints("all2", [6]), outs=2)
    routers, _ = find_routers(g.model())
    assert [router.indices for router in routers] == [ids.replace(".0", ".1")]


def test_routers_match_by_name_then_by_order():
    a, b = Router("n1", "s1", "i1"), Router("n2", "s2", "i2")
    assert match_routers([a, b], [b, a]) == [(a, a), (b, b)]
    c, d = Router("m1", "t1", "j1"), Router("m2", "t2", "j2")
    assert match_routers([a, b], [c, d]) == [(a, c), (b, d)]
    assert match_routers([a, b], [c]) is None


def test_routers_in_functions_are_inlined():
    model = mixture()
    at = next(place for place, node in enumerate(model.graph.node) if node.op_type == "TopK")
    body = [helper.make_node("TopK", ["x", "k"], ["v", "i"], axis=-1)]
    model.functions.append(
        helper.make_function("local", "Choose", ["x", "k"], ["v", "i"], body, [helper.make_opsetid("", 18)])
    )
    node = model.graph.node[at]
    call = helper.make_node("Choose", list(node.input), list(node.output), domain="local")
    del model.graph.node[at]
    model.graph.node.insert(at, call)
    model.opset_import.append(helper.make_opsetid("local", 1))
    assert find_routers(model)[0] == []
    assert [router.indices for router in find_routers(with_bodies_inlined(model))[0]] == ["top.1"]
    assert with_bodies_inlined(mixture()).functions == []


def choices(scores) -> Any:
    return np.argsort(-scores, axis=-1)[:, :2]


def scores() -> Any:
    return np.tile(np.array([[3.0, 2.0, 1.0, 0.0]], np.float32), (6, 1))


def check(a, b, score, **options) -> Any:
    flips = options.pop("flips", Flips())
    compare_choices(flips, ROUTER, score, a, b, SIZES, 1e-5, **options)
    return flips


def test_equal_sets_in_any_order_are_equal():
    chosen = choices(scores())
    flips = check(chosen, chosen[:, ::-1], scores())
    assert (flips.first, flips.flipped, flips.rows, flips.problem) == ({}, 0, 6, None)


def test_another_choice_without_a_tie_is_an_error():
    chosen = choices(scores())
    other = chosen.copy()
    other[4] = [0, 2]
    problem = check(chosen, other, scores()).problem
    assert problem == (
        "router router chooses experts [0, 2], not [0, 1], for row 1 of batch row 1, with a gap of 1.0e+00"
    )


def test_a_tie_is_a_flip_and_hides_what_follows():
    score = scores()
    score[4, 2] = np.nextafter(np.float32(2), np.float32(0))
    chosen = choices(score)
    other = chosen.copy()
    other[4] = [0, 2]
    flips = check(chosen, other, score)
    assert (flips.first, flips.flipped, flips.problem) == ({1: 1}, 1, None)
    # A later layer: row 2 of batch row 1 depends on the flip, row 0 does not.
    later = choices(scores())
    dependent, independent = later.copy(), later.copy()
    dependent[5] = [2, 3]
    assert check(later, dependent, scores(), flips=flips).problem is None
    independent[3] = [2, 3]
    assert check(later, independent, scores(), flips=flips).problem is not None


@pytest.mark.parametrize(("gap", "ties"), [(1.9e-5, True), (4e-5, False)])
def test_ties_are_relative_to_large_scores(gap, ties):
    score = scores().astype(np.float64)
    score[0] = [3, 2, 2 - gap, 0]
    chosen = choices(score)
    other = chosen.copy()
    other[0] = [0, 2]
    assert (check(chosen, other, score).problem is None) is ties


def test_groups_of_one_token_flip_together():
    score = np.tile(np.array([[3.0, 2.0, 2.0, 0.0]], np.float32), (12, 1)).reshape(6, 2, 4)
    chosen = np.tile(np.array([0, 1]), (6, 2, 1))
    other = chosen.copy()
    other[2, 1] = [0, 2]
    assert check(chosen, other, score).first == {0: 2}


def test_a_pruned_layer_routes_the_kept_rows():
    score = scores()
    score[5] = [0.0, 1.0, 2.0, 3.0]
    chosen = choices(score)
    feeds = {"input_ids": np.zeros((2, 3), np.int64)}
    last = RowSelection("logits", "last", 1, None, "input_ids", 1, 1, 0)
    kept = chosen[[2, 5]]
    flips = check(chosen, kept, score, kept=(last, feeds))
    assert (flips.problem, flips.rows) == (None, 2)
    problem = check(chosen, kept, score).problem
    assert problem == "router router chooses for other rows: [2, 2], not [6, 2]"
    assert check(chosen, chosen[[1, 4]], score, kept=(last, feeds)).problem is not None
