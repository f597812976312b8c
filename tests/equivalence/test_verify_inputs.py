"""``verify`` of outputs: what cannot be checked, types, feeds, encoders, and what feeds cover."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from graphsurgery.equivalence import verify_models
from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.running import Model, Session, Settings, run_all
from graphsurgery.errors import CannotCheckError, InputRefusedError, UsageError
from tests.equivalence.builders import (
    CASES,
    FIXTURES,
    Graph,
    case,
    copy,
    cross_decoder,
    decoder,
    mixture,
    prune,
    save,
    set_values,
    values,
)

# What cannot be checked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("s13", "ONNX Runtime has no operator vendor.ops::Scale"),
        ("s03", "the data of tensor model.embed_tokens.weight is short"),
    ],
)
def test_what_does_not_run_is_unchecked(name, words):
    report = verify_models(case(name), case(name))
    assert (report.status, report.exit_code) == ("unchecked", 5)
    assert len(report.reasons) == 1
    assert words in report.reasons[0]
    assert "\n" not in report.reasons[0]


def test_a_missing_data_file_is_named(tmp_path):
    shutil.copy(CASES / "s01_everything_external_even_shapes.onnx", tmp_path / "m.onnx")
    report = verify_models(tmp_path / "m.onnx", tmp_path / "m.onnx")
    assert report.exit_code == 5
    assert "there is no file s01_everything_external_even_shapes.onnx.data" in report.reasons[0]


def test_a_reference_that_runs_on_no_feed_is_unchecked():
    path = case("p06")
    report = verify_models(path, path, feeds={"input_ids": np.full((1, 3), 999)})
    assert report.status == "unchecked"
    assert "ran on no feed; the last, f0: the reference fails: indices element out of data bounds" in report.reasons[0]


def test_too_little_memory_is_unchecked(compared):
    report = compared(decoder(), decoder(), memory=1000)
    assert report.exit_code == 5
    assert "GB of memory" in report.reasons[0]


def test_what_is_no_model_is_refused():
    with pytest.raises(InputRefusedError, match="Git LFS pointer"):
        verify_models(CASES / "s04_lfs_pointer_and_truncated.onnx", case("p06"))


def test_an_unknown_depth_is_refused():
    with pytest.raises(UsageError, match="'deep' is not known: choose auto or outputs"):
        verify_models(case("p06"), case("p06"), depth="deep")


def test_without_a_runtime_nothing_is_read(monkeypatch, tmp_path):
    def missing():
        raise CannotCheckError("not installed")

    monkeypatch.setattr("graphsurgery.equivalence.verify.require_runtime", missing)
    with pytest.raises(CannotCheckError, match="not installed"):
        verify_models(tmp_path / "none", tmp_path / "none")


# Types ---------------------------------------------------------------------------------------------------------------


def test_half_precision(compared):
    report = compared(decoder(T.FLOAT16), decoder(T.FLOAT16))
    assert report.status == "equal"
    assert {out.tolerance for out in report.outputs} == {2e-3}
    assert compared(decoder(T.FLOAT16), decoder(T.FLOAT16, scale=0.6)).status == "different"


@pytest.mark.parametrize("external", [False, True])
def test_bfloat16_models_are_verified_as_float32(tmp_path, external):
    a = save(decoder(T.BFLOAT16), tmp_path / "a.onnx", external=external)
    b = save(decoder(T.BFLOAT16), tmp_path / "b.onnx", external=external)
    report = verify_models(a, b)
    assert report.status == "equal", report.reasons
    assert {out.dtype for out in report.outputs} == {"float32"}
    assert report.notes == (
        "bfloat16 models are verified as float32 twins: ONNX Runtime's CPU provider lacks the kernels",
    )
    wrong = save(decoder(T.BFLOAT16, scale=0.52), tmp_path / "c.onnx", external=external)
    assert verify_models(a, wrong).status == "different"


def test_bfloat16_that_is_only_stored_runs_as_it_is():
    assert verify_models(case("s12"), case("s12")).notes == ()


def test_integers_must_be_equal_bit_for_bit(compared):
    def model(shift) -> Any:
        g = Graph()
        ids = g.input("input_ids", T.INT64, "b", "s")
        g.op("Add", ids, g.ints("shift", shift), out="y")
        g.output("y", T.INT64, "b", "s")
        return g.model()

    assert compared(model(0), model(0)).status == "equal"
    report = compared(model(0), model(1))
    assert "elements that must be bitwise equal" in report.reasons[0]


def test_nan_and_infinities_of_the_reference_are_asked_of_the_rewrite(compared):
    def model(top) -> Any:
        g = Graph()
        ids = g.input("input_ids", T.INT64, "b", "s")
        g.op("Div", g.op("Gather", g.floats("t", [0.0, top, -1.0, 2.0]), ids), g.floats("zero", 0.0), out="y")
        g.output("y", T.FLOAT, "b", "s")
        return g.model()

    assert compared(model(1.0), model(3.0)).status == "equal"
    report = compared(model(1.0), model(0.0))
    assert report.status == "different"
    assert "is nan, not inf" in report.reasons[0]


def test_sequences_and_empty_outputs(compared):
    def model(cut) -> Any:
        g = Graph()
        ids = g.input("input_ids", T.INT64, "b", "s")
        rows = g.op("Gather", g.weight("embed", 40, 4), ids)
        g.op("SplitToSequence", rows, g.ints("one", 1), axis=1, out="parts")
        g.outputs.append(helper.make_tensor_sequence_value_info("parts", T.FLOAT, None))
        g.op("Slice", rows, g.ints("from", [cut]), g.ints("to", [0]), g.ints("axis", [1]), out="none")
        g.output("none", T.FLOAT, "b", None, 4)
        return g.model()

    report = compared(model(0), model(0))
    assert report.status == "equal"
    assert [out.dtype for out in report.outputs[:2]] == ["float32", "float32"] or report.outputs[0].dtype == "sequence"


# Feeds and progress --------------------------------------------------------------------------------------------------


def test_given_feeds_replace_drawn_ones():
    path = case("p08")
    report = verify_models(path, path, feeds=CASES / f"{path.stem}.feeds.npz")
    assert [(feed.name, feed.batch, feed.length, feed.past) for feed in report.feeds] == [
        ("f0", 3, 5, 0),
        ("f1", 3, 1, 5),
    ]


def test_feeds_that_the_reference_refuses_are_left_out(compared):
    g = Graph()
    ids = g.input("input_ids", T.INT64, "b", "s")
    # Positions are counted in the graph, so that nothing tells how many the table has.
    counted = g.op("CumSum", g.op("Add", g.op("Sub", ids, ids), g.ints("one", 1)), g.ints("axis", 1))
    g.op("Add", g.op("Gather", g.weight("embed", 40, 16), ids), g.op("Gather", g.weight("places", 64, 16), counted))
    g.nodes[-1].output[0] = "y"
    g.output("y", T.FLOAT, "b", "s", 16)
    report = compared(g.model(), g.model())
    assert report.status == "equal"
    assert [each.feed for each in report.left_out] == ["b1-s200-p0"]
    assert "the reference fails: indices element out of data bounds" in report.left_out[0].reason


def test_an_input_of_unknown_meaning_is_told():
    report = verify_models(case("f04"), case("f04"))
    assert report.notes == ("input double_it: what it stands for is not known, fed small random values",)


def test_renamed_and_lost_inputs_are_told(compared):
    renamed = copy(decoder())
    renamed.graph.input[1].name = "mask"
    for node in renamed.graph.node:
        node.input[:] = ["mask" if name == "attention_mask" else name for name in node.input]
    report = compared(decoder(), renamed)
    assert report.status == "equal"
    assert report.notes == ("input mask has no namesake in the reference: fed as attention_mask, by order",)
    proto = copy(mixture())
    proto.graph.input.append(helper.make_tensor_value_info("unused", T.INT64, []))
    report = compared(proto, mixture())
    assert "input unused of the reference is gone in the rewritten model" in report.warnings


def test_progress_counts_every_run(compared):
    steps: list[tuple[str, int, int]] = []
    compared(decoder(), decoder(), progress=lambda *step: steps.append(step))
    assert len(steps) == 40
    assert steps[0] == ("reference b1-s5-p0", 1, 40)
    assert steps[-1] == ("rewritten b1-s200-p0", 40, 40)
    steps.clear()
    compared(decoder(), decoder(), progress=lambda *step: steps.append(step), opt_level_check=False)
    assert len(steps) == 20


def test_fusions_that_move_the_reference_itself_are_a_warning(tmp_path):
    # Quantised weights meet 8-bit activations at the default level; plain weights of the same values do not.
    proto = read_proto(FIXTURES / "llama_qdq" / "model.onnx")
    plain = copy(proto)
    stored = {tensor.name: tensor for tensor in plain.graph.initializer}
    for node in list(plain.graph.node):
        if node.op_type == "DequantizeLinear" and node.input[0] in stored:
            tensors = [stored[name] for name in node.input if name]
            value = helper.make_tensor_value_info(node.output[0], T.FLOAT, None)
            graph = helper.make_graph([node], "one", [], [value], tensors)
            single = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=10)
            with Session(Model(save(single, tmp_path / "one.onnx")), Settings()) as session:
                weight = session.run({})[node.output[0]]
            plain.graph.initializer.append(numpy_helper.from_array(weight, node.output[0]))
            plain.graph.node.remove(node)
    report = verify_models(FIXTURES / "llama_qdq" / "model.onnx", save(plain, tmp_path / "plain.onnx"))
    assert report.status == "equal"
    assert len(report.warnings) == 1
    assert report.warnings[0].startswith("at ONNX Runtime's default level outputs differ (logits, ")
    assert "its fusions alone move the reference by" in report.warnings[0]
    wrong = copy(plain)
    scale = next(name for name in ("model.norm.weight",) if name in {t.name for t in wrong.graph.initializer})
    set_values(wrong, scale, values(wrong, scale) * 2)
    assert verify_models(tmp_path / "plain.onnx", save(wrong, tmp_path / "wrong.onnx")).status == "different"


def test_an_error_at_the_default_level_alone_is_a_difference(compared, monkeypatch):
    real = run_all

    def spoiled(model, settings, feeds, store, step, numbers=None):
        failures = real(model, settings, feeds, store, step, numbers)
        if settings.optimized and numbers is not None:
            store.value(numbers[0], "logits")[0, 0, 0] += 1
        return failures

    monkeypatch.setattr("graphsurgery.equivalence.verify_outputs.run_all", spoiled)
    report = compared(decoder(), decoder())
    assert report.status == "different"
    assert report.reasons[0].endswith("at [0, 0, 0] (feed b1-s5-p0, seed 0) at ONNX Runtime's default level")


# Encoders ------------------------------------------------------------------------------------------------------------


def test_a_decoder_equals_itself_whatever_its_encoder_has_read(compared):
    report = compared(cross_decoder(), cross_decoder())
    assert (report.status, report.left_out, report.notes) == ("equal", (), ())
    last = compared(cross_decoder(), prune(cross_decoder(), "last", batch_axis=0))
    assert last.status == "equal", last.reasons


@pytest.mark.parametrize("told", [True, False])
def test_rows_told_by_the_mask_of_an_encoder_are_wrong(compared, told):
    model = prune(cross_decoder(), "mask", **({"source": "encoder_attention_mask"} if told else {}))
    for node in model.graph.node:
        node.input[:] = ["encoder_attention_mask" if name == "attention_mask" else name for name in node.input]
    report = compared(cross_decoder(), model)
    assert report.status == "different"
    words = "which is a mask of the encoder" if told else "output logits"
    assert words in report.reasons[0]


def test_a_mask_with_fewer_columns_than_tokens_tells_no_rows(compared):
    """Whatever it is called."""
    models = []
    for model in (cross_decoder(), prune(cross_decoder(), "mask", source="heard_mask")):
        model.graph.input[0].name = "heard_mask"
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
        model.graph.input[2].type.tensor_type.shape.dim[1].dim_value = 3
        for node in model.graph.node:
            node.input[:] = ["heard_mask" if name.endswith("attention_mask") else name for name in node.input]
        models.append(model)
    feeds = {
        "input_ids": np.arange(5)[None],
        "heard_mask": np.ones((1, 3), np.int64),
        "encoder_hidden_states": np.ones((1, 3, 16), np.float32),
    }
    report = compared(*models, feeds=feeds)
    assert report.status == "different"
    assert any("heard_mask has 3 columns for 5 tokens" in reason for reason in report.reasons)


# Coverage ------------------------------------------------------------------------------------------------------------


def test_kinds_of_feeds_that_a_model_does_not_take_are_told(compared):
    model = copy(decoder())
    # One element in the shape of P + 1: there is to be no past.
    g = Graph()
    past = g.op("Shape", "past.0.key", start=2, end=3, out="t/past")
    more = g.op("Add", past, g.ints("t/one", [1]), out="t/more")
    g.op("Reshape", g.floats("t/zero", [0.0]), more, out="t/nothing")
    g.op("Add", "whole_logits", "t/nothing", out="logits")
    g.nodes[-1].name = "node/sum"
    for node in model.graph.node:
        node.output[:] = ["whole_logits" if name == "logits" else name for name in node.output]
    model.graph.node.extend(g.nodes)
    model.graph.initializer.extend(g.tensors)
    report = compared(model, model)
    assert (report.status, report.uncovered) == ("equal", ("past",))
    assert "(seed 0; 5 left out: no past)" in report.summary()
    assert "every feed of these kinds was left out, so nothing was compared there: past" in report.warnings


def stale() -> Any:
    """A value that is declared to be as long as the tokens, like one that is done with, and is as long as the keys."""
    model = copy(decoder())
    g = Graph()
    total = g.op("ReduceSum", g.op("Neg", "q", out="s/done"), keepdims=0, out="s/total")
    wide = g.op("Expand", total, g.op("Shape", "present.0.key", out="s/shape"), out="s/wide")
    g.op("ReduceMean", wide, keepdims=0, out="s/mean")
    g.op("Add", "whole_logits", "s/mean", out="logits")
    g.nodes[-1].name = "node/sum"
    for node in model.graph.node:
        node.output[:] = ["whole_logits" if name == "logits" else name for name in node.output]
    model.graph.node.extend(g.nodes)
    for name in ("s/done", "s/wide"):
        model.graph.value_info.append(helper.make_tensor_value_info(name, T.FLOAT, ["batch", 1, "seq", 16]))
    return model


def test_wrong_dims_of_the_reference_cost_no_feeds(compared):
    report = compared(stale(), stale())
    assert (report.status, report.left_out, report.uncovered) == ("equal", (), ())
    assert [text for text in report.warnings if "without sharing memory" in text]


def test_wrong_dims_of_the_rewritten_model_are_a_difference(compared):
    sound = stale()
    del sound.graph.value_info[:]
    assert compared(sound, sound).status == "equal"
    report = compared(sound, stale())
    assert report.status == "different"
    assert "attempting to re-use buffer" in report.reasons[0]
