"""``verify`` of outputs: what must pass passes, planted errors are found, rows kept, choices of experts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

from graphsurgery.equivalence import verify_models
from tests.equivalence.builders import (
    FIXTURES,
    Graph,
    case,
    copy,
    decoder,
    mixture,
    prune,
    set_metadata,
    set_values,
    values,
)


def test_a_model_equals_itself(compared):
    report = compared(decoder(), decoder(), seed=5)
    assert (report.status, report.exit_code, report.reasons) == ("equal", 0, ())
    assert [(out.name, out.level, out.error) for out in report.outputs] == [
        (name, level, 0.0)
        for level in ("disabled", "default")
        for name in ("logits", "present.0.key", "present.0.value")
    ]
    assert {feed.padding for feed in report.feeds} == {"none", "left", "right"}
    assert {out.seed for out in report.outputs} == {5}
    assert (report.left_out, report.warnings, report.notes) == ((), (), ())
    assert report.threads == 2


@pytest.mark.parametrize("name", ["llama", "llama_static", "llama_external", "qwen3_moe_grouped", "genai_gptoss"])
def test_exports_equal_themselves(name):
    path = FIXTURES / name / "model.onnx"
    report = verify_models(path, path)
    assert report.status == "equal", report.reasons
    assert report.tie_flips == 0


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*.onnx")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_fixture_equals_itself(path):
    report = verify_models(path, path)
    assert report.status == "equal", report.reasons
    assert len(report.feeds) >= 5


# Planted errors ------------------------------------------------------------------------------------------------------


def one_row_off():
    """The head reads the hidden state of the row before."""
    model = copy(decoder())
    at = next(place for place, node in enumerate(model.graph.node) if node.output[0] == "logits")
    g = Graph()
    g.op("Slice", "hidden_1", g.ints("f0", [0]), g.ints("t1", [1]), g.ints("ax", [1]), out="first")
    g.op("Slice", "hidden_1", "f0", g.ints("t-1", [-1]), "ax", out="most")
    g.op("Concat", "first", "most", axis=1, out="shifted")
    model.graph.node[at].input[0] = "shifted"
    for offset, node in enumerate(g.nodes):
        model.graph.node.insert(at + offset, node)
    model.graph.initializer.extend(g.tensors)
    return model


def swapped_caches():
    model = copy(decoder())
    names = {"present.0.key": "present.0.value", "present.0.value": "present.0.key"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


def one_weight():
    model = copy(decoder())
    head = values(model, "head")
    head[3, 5] += 1e-3
    set_values(model, "head", head)
    return model


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: decoder(scale=0.5002), "output logits differs by"),
        (lambda: decoder(invert_mask=True), "output logits differs by"),
        (one_row_off, "output logits differs by"),
        (swapped_caches, "output present.0.key differs by"),
        (one_weight, "output logits differs by"),
        (
            lambda: decoder(drop_cache_row=True),
            r"output present.0.value has shape \[1, 1, 4, 16\], not \[1, 1, 5, 16\]",
        ),
        (lambda: decoder(T.FLOAT16), "input past.0.key is float16, not float"),
    ],
)
def test_a_planted_error_is_a_difference(compared, wrong, words):
    report = compared(decoder(), wrong())
    assert (report.status, report.exit_code) == ("different", 1)
    assert any(re.search(words, reason) for reason in report.reasons)
    worst = report.worst
    assert worst is None or (worst.problem is not None and worst.error > worst.tolerance)


def test_an_error_that_only_padding_shows_is_found(compared):
    # Without its mask the model is right wherever nothing is padded.
    model = copy(decoder())
    for node in model.graph.node:
        node.input[:] = ["everything" if name == "attention_mask" else name for name in node.input]
    g = Graph()
    shape = g.op("Shape", "attention_mask", out="mask_shape")
    one = helper.make_tensor("value", T.INT64, [1], [1])
    g.op("ConstantOfShape", shape, out="everything", value=one)
    for place, node in enumerate(g.nodes):
        model.graph.node.insert(place, node)
    report = compared(decoder(), model)
    assert report.status == "different"
    assert report.worst is not None
    assert report.worst.feed.endswith(("left", "right"))


def test_a_renamed_output_is_compared_and_told(compared):
    renamed = copy(decoder())
    for node in renamed.graph.node:
        node.output[:] = ["renamed" if name == "present.0.key" else name for name in node.output]
        node.input[:] = ["renamed" if name == "present.0.key" else name for name in node.input]
    renamed.graph.output[1].name = "renamed"
    report = compared(decoder(), renamed)
    assert report.status == "equal"
    assert report.notes == ("output present.0.key of the reference has no namesake: compared with renamed, by order",)
    set_values(renamed, "wk", values(renamed, "wk") * 1.01)
    report = compared(decoder(), renamed)
    assert report.status == "different"
    assert any("output renamed differs" in reason for reason in report.reasons)


def test_a_lost_output_is_a_difference(compared):
    fewer = copy(decoder())
    del fewer.graph.output[2]
    report = compared(decoder(), fewer)
    assert report.reasons == ("output present.0.value is missing in the rewritten model",)
    assert report.exit_code == 1


def test_a_rewrite_that_does_not_load_is_a_difference(compared):
    broken = copy(decoder())
    broken.graph.node[5].input[0] = "nowhere"
    report = compared(decoder(), broken)
    assert report.status == "different"
    assert "b.onnx cannot be loaded by ONNX Runtime" in report.reasons[0]


def test_a_rewrite_that_fails_on_a_feed_is_a_difference(compared):
    shorter = copy(decoder())
    table = values(shorter, "places")
    place = next(i for i, tensor in enumerate(shorter.graph.initializer) if tensor.name == "places")
    shorter.graph.initializer[place].CopyFrom(
        helper.make_tensor("places", T.FLOAT, [20, 16], table[:20].tobytes(), raw=True)
    )
    report = compared(decoder(), shorter)
    assert report.status == "different"
    assert report.reasons[0].startswith(
        "the rewritten model fails on feed b2-s23-p9-right: indices element out of data"
    )


@pytest.mark.parametrize("depth", ["outputs", "regions"])
def test_parts_of_models_are_run_on_many_rows(compared, depth):
    """Without ids or a name that tells: what takes rows ``[T, H]`` takes as many as one likes."""

    def taking_rows(node: Any) -> Any:
        ends = [helper.make_tensor_value_info(name, T.FLOAT, ["T", 4]) for name in ("x", "scale", "y")]
        nodes = [helper.make_node("Mul", ["x", "scale"], ["scaled"]), node]
        stored = [helper.make_tensor(name, T.INT64, [1], [n]) for name, n in (("a", -1), ("b", -(2**31)), ("c", 0))]
        graph = helper.make_graph(nodes, "rows", ends[:2], ends[2:], stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    straight = taking_rows(helper.make_node("Identity", ["scaled"], ["y"]))
    turned = taking_rows(helper.make_node("Slice", ["scaled", "a", "b", "c", "a"], ["y"]))
    report = compared(straight, straight, depth=depth)
    assert report.status == "equal"
    assert {feed.length for feed in report.feeds} == {1, 3, 4, 5, 23, 200}
    assert compared(straight, turned, depth=depth).status == "different"


# Rows that are kept --------------------------------------------------------------------------------------------------


SOURCES = {"last": None, "mask": "attention_mask", "position": "position_ids", "runtime": "last_token_indices"}


@pytest.mark.parametrize(("rows", "source"), SOURCES.items())
def test_pruned_logits_equal_by_their_contract(compared, rows, source):
    report = compared(decoder(), prune(decoder(), rows, source=source))
    assert report.status == "equal", report.reasons
    assert report.notes == ()
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("kept", "claimed"),
    [
        *[("first", claimed) for claimed in ("last", "mask", "position")],
        *[("last", "mask"), ("last", "position"), ("mask", "last"), ("position", "mask")],
    ],
)
def test_other_rows_than_claimed_are_a_difference(compared, kept, claimed):
    pruned = prune(decoder(), kept, index=claimed, source=SOURCES[claimed])
    report = compared(decoder(), pruned, opt_level_check=False)
    assert report.status == "different"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith("output logits differs by")


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ("last", "assumed index=last for logits, which has fewer rows"),
        ("mask", "assumed index=mask of attention_mask for logits, which has fewer rows"),
        ("runtime", "assumed index=runtime of last_token_indices for logits, which has fewer rows"),
    ],
)
def test_without_a_contract_the_rows_are_assumed_and_told(compared, rows, note):
    report = compared(decoder(), prune(decoder(), rows))
    assert report.status == "equal"
    assert report.notes == (note,)


def test_rows_that_no_mode_explains_are_a_difference(compared):
    report = compared(decoder(), prune(decoder(), "first"))
    assert report.status == "different"
    assert "output logits differs by" in report.reasons[0]


def test_outputs_that_must_be_exact(compared):
    pruned = prune(decoder(), "last", source=None)
    set_metadata(pruned, "graphsurgery.exact_outputs", ["present.0.key", "present.0.value"])
    report = compared(decoder(), pruned)
    assert report.status == "equal"
    assert [out.tolerance for out in report.outputs[:3]] == [1e-5, 0.0, 0.0]
    weight = values(pruned, "wk")
    weight[0, 0] = np.nextafter(weight[0, 0], np.float32(9))
    set_values(pruned, "wk", weight)
    report = compared(decoder(), pruned)
    assert report.status == "different"
    assert len(report.reasons) == 1
    assert "output present.0.key differs in" in report.reasons[0]
    assert "must be bitwise equal" in report.reasons[0]


def test_declared_dims_that_do_not_hold_are_a_warning(compared):
    pruned = prune(decoder(), "last", source=None)
    pruned.graph.output[0].type.tensor_type.shape.dim[1].Clear()
    pruned.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "seq"
    report = compared(decoder(), pruned)
    assert report.status == "equal"
    assert report.warnings == ("output logits declares [batch, seq, 40] but has shape [1, 1, 40] (feed b1-s5-p0)",)


def test_a_model_that_drops_rows_on_demand(compared):
    # Its rows are counted before the drop: the reference is asked for all of them.
    proto = case("p05")
    report = verify_models(proto, proto)
    assert report.status == "equal"


# Experts -------------------------------------------------------------------------------------------------------------


def tied_ids() -> Any:
    ids = np.tile(np.arange(40) % 5, (2, 1))
    ids[0, 20] = 7
    return {"input_ids": ids}


def test_a_flip_at_a_tie_is_left_out_with_what_follows(compared):
    report = compared(mixture(tied=7), mixture(tied=7, nudge=1e-6), feeds=tied_ids())
    assert report.status == "equal", report.reasons
    assert report.routers == ("node/top",)
    assert (report.tie_flips, report.routed_rows, report.excluded_rows) == (1, 80, 20)


def test_many_flips_are_a_difference(compared):
    ids = tied_ids()
    ids["input_ids"][:, ::7] = 7
    report = compared(mixture(tied=7), mixture(tied=7, nudge=1e-6), feeds=ids)
    assert report.status == "different"
    assert report.reasons[0] == "13 of 80 choices of experts flipped at a tie, more than 0.1 %"


def test_rows_before_a_flip_are_still_compared(compared):
    wrong = mixture(tied=7, nudge=1e-6)
    embed = values(wrong, "embed")
    embed[3, 10] += 0.1
    set_values(wrong, "embed", embed)
    report = compared(mixture(tied=7), wrong, feeds=tied_ids())
    assert report.status == "different"
    assert report.worst is not None
    assert report.worst.index is not None


def test_another_choice_without_a_tie_is_a_difference(compared):
    report = compared(mixture(), mixture(wrong=True))
    assert report.status == "different"
    assert report.reasons[0].startswith("router node/top chooses experts")
    assert "with a gap of 1.0e+00" in report.reasons[0]


def test_scatters_that_race_run_with_one_thread(compared):
    report = compared(mixture(), mixture(scatter=True))
    assert report.threads == 1
    assert report.notes == ("one thread: a scatter that reduces races in ONNX Runtime with more",)
