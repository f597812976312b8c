from __future__ import annotations

import re
import shutil
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from graphsurgery.equivalence import VerifyReport, verify_models
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
    set_metadata,
    set_values,
    values,
)


@pytest.fixture
def check(tmp_path):
    def run(a, b, **options) -> VerifyReport:
        return verify_models(save(a, tmp_path / "a.onnx"), save(b, tmp_path / "b.onnx"), **options)

    return run


def test_a_model_equals_itself(check):
    report = check(decoder(), decoder(), seed=5)
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
def test_a_planted_error_is_a_difference(check, wrong, words):
    report = check(decoder(), wrong())
    assert (report.status, report.exit_code) == ("different", 1)
    assert any(re.search(words, reason) for reason in report.reasons)
    worst = report.worst
    assert worst is None or (worst.problem is not None and worst.error > worst.tolerance)


def test_an_error_that_only_padding_shows_is_found(check):
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
    report = check(decoder(), model)
    assert report.status == "different"
    assert report.worst is not None
    assert report.worst.feed.endswith(("left", "right"))


def test_a_renamed_output_is_compared_and_told(check):
    renamed = copy(decoder())
    for node in renamed.graph.node:
        node.output[:] = ["renamed" if name == "present.0.key" else name for name in node.output]
        node.input[:] = ["renamed" if name == "present.0.key" else name for name in node.input]
    renamed.graph.output[1].name = "renamed"
    report = check(decoder(), renamed)
    assert report.status == "equal"
    assert report.notes == ("output present.0.key of the reference has no namesake: compared with renamed, by order",)
    set_values(renamed, "wk", values(renamed, "wk") * 1.01)
    report = check(decoder(), renamed)
    assert report.status == "different"
    assert any("output renamed differs" in reason for reason in report.reasons)


def test_a_lost_output_is_a_difference(check):
    fewer = copy(decoder())
    del fewer.graph.output[2]
    report = check(decoder(), fewer)
    assert report.reasons == ("output present.0.value is missing in the rewritten model",)
    assert report.exit_code == 1


def test_a_rewrite_that_does_not_load_is_a_difference(check):
    broken = copy(decoder())
    broken.graph.node[5].input[0] = "nowhere"
    report = check(decoder(), broken)
    assert report.status == "different"
    assert "b.onnx cannot be loaded by ONNX Runtime" in report.reasons[0]


def test_a_rewrite_that_fails_on_a_feed_is_a_difference(check):
    shorter = copy(decoder())
    table = values(shorter, "places")
    place = next(i for i, tensor in enumerate(shorter.graph.initializer) if tensor.name == "places")
    shorter.graph.initializer[place].CopyFrom(
        helper.make_tensor("places", T.FLOAT, [20, 16], table[:20].tobytes(), raw=True)
    )
    report = check(decoder(), shorter)
    assert report.status == "different"
    assert report.reasons[0].startswith(
        "the rewritten model fails on feed b2-s23-p9-right: indices element out of data"
    )


# Rows that are kept --------------------------------------------------------------------------------------------------

SOURCES = {"last": None, "mask": "attention_mask", "position": "position_ids", "runtime": "last_token_indices"}


@pytest.mark.parametrize(("rows", "source"), SOURCES.items())
def test_pruned_logits_equal_by_their_contract(check, rows, source):
    report = check(decoder(), prune(decoder(), rows, source=source))
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
def test_other_rows_than_claimed_are_a_difference(check, kept, claimed):
    pruned = prune(decoder(), kept, index=claimed, source=SOURCES[claimed])
    report = check(decoder(), pruned, opt_level_check=False)
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
def test_without_a_contract_the_rows_are_assumed_and_told(check, rows, note):
    report = check(decoder(), prune(decoder(), rows))
    assert report.status == "equal"
    assert report.notes == (note,)


def test_rows_that_no_mode_explains_are_a_difference(check):
    report = check(decoder(), prune(decoder(), "first"))
    assert report.status == "different"
    assert "output logits differs by" in report.reasons[0]


def test_outputs_that_must_be_exact(check):
    pruned = prune(decoder(), "last", source=None)
    set_metadata(pruned, "graphsurgery.exact_outputs", ["present.0.key", "present.0.value"])
    report = check(decoder(), pruned)
    assert report.status == "equal"
    assert [out.tolerance for out in report.outputs[:3]] == [1e-5, 0.0, 0.0]
    weight = values(pruned, "wk")
    weight[0, 0] = np.nextafter(weight[0, 0], np.float32(9))
    set_values(pruned, "wk", weight)
    report = check(decoder(), pruned)
    assert report.status == "different"
    assert len(report.reasons) == 1
    assert "output present.0.key differs in" in report.reasons[0]
    assert "must be bitwise equal" in report.reasons[0]


def test_declared_dims_that_do_not_hold_are_a_warning(check):
    pruned = prune(decoder(), "last", source=None)
    pruned.graph.output[0].type.tensor_type.shape.dim[1].Clear()
    pruned.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "seq"
    report = check(decoder(), pruned)
    assert report.status == "equal"
    assert report.warnings == ("output logits declares [batch, seq, 40] but has shape [1, 1, 40] (feed b1-s5-p0)",)


def test_a_model_that_drops_rows_on_demand(check):
    # Its rows are counted before the drop: the reference is asked for all of them.
    proto = case("p05")
    report = verify_models(proto, proto)
    assert report.status == "equal"


# Experts -------------------------------------------------------------------------------------------------------------


def tied_ids() -> Any:
    ids = np.tile(np.arange(40) % 5, (2, 1))
    ids[0, 20] = 7
    return {"input_ids": ids}


def test_a_flip_at_a_tie_is_left_out_with_what_follows(check):
    report = check(mixture(tied=7), mixture(tied=7, nudge=1e-6), feeds=tied_ids())
    assert report.status == "equal", report.reasons
    assert report.routers == ("node/top",)
    assert (report.tie_flips, report.routed_rows, report.excluded_rows) == (1, 80, 20)


def test_many_flips_are_a_difference(check):
    ids = tied_ids()
    ids["input_ids"][:, ::7] = 7
    report = check(mixture(tied=7), mixture(tied=7, nudge=1e-6), feeds=ids)
    assert report.status == "different"
    assert report.reasons[0] == "13 of 80 choices of experts flipped at a tie, more than 0.1 %"


def test_rows_before_a_flip_are_still_compared(check):
    wrong = mixture(tied=7, nudge=1e-6)
    embed = values(wrong, "embed")
    embed[3, 10] += 0.1
    set_values(wrong, "embed", embed)
    report = check(mixture(tied=7), wrong, feeds=tied_ids())
    assert report.status == "different"
    assert report.worst is not None
    assert report.worst.index is not None


def test_another_choice_without_a_tie_is_a_difference(check):
    report = check(mixture(), mixture(wrong=True))
    assert report.status == "different"
    assert report.reasons[0].startswith("router node/top chooses experts")
    assert "with a gap of 1.0e+00" in report.reasons[0]


def test_scatters_that_race_run_with_one_thread(check):
    report = check(mixture(), mixture(scatter=True))
    assert report.threads == 1
    assert report.notes == ("one thread: a scatter that reduces races in ONNX Runtime with more",)


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


def test_too_little_memory_is_unchecked(check):
    report = check(decoder(), decoder(), memory=1000)
    assert report.exit_code == 5
    assert "GB of memory" in report.reasons[0]


def test_what_is_no_model_is_refused():
    with pytest.raises(InputRefusedError, match="Git LFS pointer"):
        verify_models(CASES / "s04_lfs_pointer_and_truncated.onnx", case("p06"))


def test_an_unknown_depth_is_refused():
    with pytest.raises(UsageError, match="'deep' is not known: choose outputs"):
        verify_models(case("p06"), case("p06"), depth="deep")


def test_without_a_runtime_nothing_is_read(monkeypatch, tmp_path):
    def missing():
        raise CannotCheckError("not installed")

    monkeypatch.setattr("graphsurgery.equivalence.verify.require_runtime", missing)
    with pytest.raises(CannotCheckError, match="not installed"):
        verify_models(tmp_path / "none", tmp_path / "none")


# Types ---------------------------------------------------------------------------------------------------------------


def test_half_precision(check):
    report = check(decoder(T.FLOAT16), decoder(T.FLOAT16))
    assert report.status == "equal"
    assert {out.tolerance for out in report.outputs} == {2e-3}
    assert check(decoder(T.FLOAT16), decoder(T.FLOAT16, scale=0.6)).status == "different"


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


def test_integers_must_be_equal_bit_for_bit(check):
    def model(shift) -> Any:
        g = Graph()
        ids = g.input("input_ids", T.INT64, "b", "s")
        g.op("Add", ids, g.ints("shift", shift), out="y")
        g.output("y", T.INT64, "b", "s")
        return g.model()

    assert check(model(0), model(0)).status == "equal"
    report = check(model(0), model(1))
    assert "elements that must be bitwise equal" in report.reasons[0]


def test_nan_and_infinities_of_the_reference_are_asked_of_the_rewrite(check):
    def model(top) -> Any:
        g = Graph()
        ids = g.input("input_ids", T.INT64, "b", "s")
        g.op("Div", g.op("Gather", g.floats("t", [0.0, top, -1.0, 2.0]), ids), g.floats("zero", 0.0), out="y")
        g.output("y", T.FLOAT, "b", "s")
        return g.model()

    assert check(model(1.0), model(3.0)).status == "equal"
    report = check(model(1.0), model(0.0))
    assert report.status == "different"
    assert "is nan, not inf" in report.reasons[0]


def test_sequences_and_empty_outputs(check):
    def model(cut) -> Any:
        g = Graph()
        ids = g.input("input_ids", T.INT64, "b", "s")
        rows = g.op("Gather", g.weight("embed", 40, 4), ids)
        g.op("SplitToSequence", rows, g.ints("one", 1), axis=1, out="parts")
        g.outputs.append(helper.make_tensor_sequence_value_info("parts", T.FLOAT, None))
        g.op("Slice", rows, g.ints("from", [cut]), g.ints("to", [0]), g.ints("axis", [1]), out="none")
        g.output("none", T.FLOAT, "b", None, 4)
        return g.model()

    report = check(model(0), model(0))
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


def test_feeds_that_the_reference_refuses_are_left_out(check):
    g = Graph()
    ids = g.input("input_ids", T.INT64, "b", "s")
    # Positions are counted in the graph, so that nothing tells how many the table has.
    counted = g.op("CumSum", g.op("Add", g.op("Sub", ids, ids), g.ints("one", 1)), g.ints("axis", 1))
    g.op("Add", g.op("Gather", g.weight("embed", 40, 16), ids), g.op("Gather", g.weight("places", 64, 16), counted))
    g.nodes[-1].output[0] = "y"
    g.output("y", T.FLOAT, "b", "s", 16)
    report = check(g.model(), g.model())
    assert report.status == "equal"
    assert [each.feed for each in report.left_out] == ["b1-s200-p0"]
    assert "the reference fails: indices element out of data bounds" in report.left_out[0].reason


def test_an_input_of_unknown_meaning_is_told():
    report = verify_models(case("f04"), case("f04"))
    assert report.notes == ("input double_it: what it stands for is not known, fed small random values",)


def test_renamed_and_lost_inputs_are_told(check):
    renamed = copy(decoder())
    renamed.graph.input[1].name = "mask"
    for node in renamed.graph.node:
        node.input[:] = ["mask" if name == "attention_mask" else name for name in node.input]
    report = check(decoder(), renamed)
    assert report.status == "equal"
    assert report.notes == ("input mask has no namesake in the reference: fed as attention_mask, by order",)
    proto = copy(mixture())
    proto.graph.input.append(helper.make_tensor_value_info("unused", T.INT64, []))
    report = check(proto, mixture())
    assert "input unused of the reference is gone in the rewritten model" in report.warnings


def test_progress_counts_every_run(check):
    steps: list[tuple[str, int, int]] = []
    check(decoder(), decoder(), progress=lambda *step: steps.append(step))
    assert len(steps) == 40
    assert steps[0] == ("reference b1-s5-p0", 1, 40)
    assert steps[-1] == ("rewritten b1-s200-p0", 40, 40)
    steps.clear()
    check(decoder(), decoder(), progress=lambda *step: steps.append(step), opt_level_check=False)
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


def test_an_error_at_the_default_level_alone_is_a_difference(check, monkeypatch):
    real = run_all

    def spoiled(model, settings, feeds, store, step, numbers=None):
        failures = real(model, settings, feeds, store, step, numbers)
        if settings.optimized and numbers is not None:
            store.value(numbers[0], "logits")[0, 0, 0] += 1
        return failures

    monkeypatch.setattr("graphsurgery.equivalence.verify_outputs.run_all", spoiled)
    report = check(decoder(), decoder())
    assert report.status == "different"
    assert report.reasons[0].endswith("at [0, 0, 0] (feed b1-s5-p0, seed 0) at ONNX Runtime's default level")


# Encoders ------------------------------------------------------------------------------------------------------------


def test_a_decoder_equals_itself_whatever_its_encoder_has_read(check):
    report = check(cross_decoder(), cross_decoder())
    assert (report.status, report.left_out, report.notes) == ("equal", (), ())
    last = check(cross_decoder(), prune(cross_decoder(), "last", batch_axis=0))
    assert last.status == "equal", last.reasons


@pytest.mark.parametrize("told", [True, False])
def test_rows_told_by_the_mask_of_an_encoder_are_wrong(check, told):
    model = prune(cross_decoder(), "mask", **({"source": "encoder_attention_mask"} if told else {}))
    for node in model.graph.node:
        node.input[:] = ["encoder_attention_mask" if name == "attention_mask" else name for name in node.input]
    report = check(cross_decoder(), model)
    assert report.status == "different"
    words = "which is a mask of the encoder" if told else "output logits"
    assert words in report.reasons[0]


def test_a_mask_with_fewer_columns_than_tokens_tells_no_rows(check):
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
    report = check(*models, feeds=feeds)
    assert report.status == "different"
    assert any("heard_mask has 3 columns for 5 tokens" in reason for reason in report.reasons)


# Coverage ------------------------------------------------------------------------------------------------------------


def test_kinds_of_feeds_that_a_model_does_not_take_are_told(check):
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
    report = check(model, model)
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


def test_wrong_dims_of_the_reference_cost_no_feeds(check):
    report = check(stale(), stale())
    assert (report.status, report.left_out, report.uncovered) == ("equal", (), ())
    assert [text for text in report.warnings if "without sharing memory" in text]


def test_wrong_dims_of_the_rewritten_model_are_a_difference(check):
    sound = stale()
    del sound.graph.value_info[:]
    assert check(sound, sound).status == "equal"
    report = check(sound, stale())
    assert report.status == "different"
    assert "attempting to re-use buffer" in report.reasons[0]
