"""``verify`` at depth ``generate``: what must pass passes, planted errors are found, ties are told from errors."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from rich.console import Console

from graphsurgery import Pipeline, load
from graphsurgery import save as save_model
from graphsurgery.equivalence import VerifyReport, verify_models
from graphsurgery.errors import UsageError
from tests.equivalence.builders import (
    FIXTURES,
    Graph,
    case,
    copy,
    decoder,
    mixture,
    prune,
    save,
    set_values,
    values,
)

IDS = ((3, 1, 4, 1, 5), (9, 2, 6), (5,))


@pytest.fixture
def check(tmp_path):
    def run(a, b, **given: Any) -> VerifyReport:
        paths = []
        for name, model in (("a", a), ("b", b)):
            paths.append(save(model, tmp_path / f"{name}.onnx") if isinstance(model, onnx.ModelProto) else model)
        options: Any = {"steps": 4, "opt_level_check": False, "prompts": IDS} | given
        return verify_models(*paths, depth="generate", **options)

    return run


@pytest.fixture
def made(tmp_path):
    """A model to which passes were applied."""

    def make(source, *specs: str, name: str = "made"):
        model = load(source)
        Pipeline(list(specs))(model)
        save_model(model, tmp_path / f"{name}.onnx")
        return tmp_path / f"{name}.onnx"

    return make


def lengths(report: VerifyReport) -> dict[str, tuple[int, ...]]:
    return {prompt.name: prompt.lengths for prompt in report.prompts}


# What must pass -------------------------------------------------------------------------------------------------------


def test_a_model_equals_itself(check):
    report = check(decoder(), decoder(), prompts=None, opt_level_check=True, seed=4)
    assert (report.status, report.exit_code, report.reasons) == ("equal", 0, ())
    assert (report.depth, report.steps, report.seed) == ("generate", 4, 4)
    assert lengths(report) == {
        "b1-s5": (5,),
        "b1-s1": (1,),
        "b2-s7-left": (7, 4),
        "b3-s6-right": (6, 3, 2),
        "b2-s3": (3, 3),
        "b1-s40-in-2": (40,),
        "b1-s200": (200,),
    }
    assert [(prompt.padding, prompt.calls) for prompt in report.prompts] == [
        ("none", 1),
        ("none", 1),
        ("left", 1),
        ("right", 1),
        ("none", 1),
        ("none", 2),
        ("none", 1),
    ]
    assert all(len(row) == 4 for prompt in report.prompts for row in prompt.tokens)
    assert [(out.name, out.level, out.error) for out in report.outputs] == [
        (name, level, 0.0)
        for level in ("disabled", "default")
        for name in ("logits", "present.0.key", "present.0.value")
    ]
    assert (report.left_out, report.warnings, report.notes, report.token_differences) == ((), (), (), ())
    assert report.summary() == "equal: 44 tokens behind 7 prompts (seed 4)"


def test_tokens_follow_from_the_seed(check):
    tokens = [check(decoder(), decoder(), prompts=None, seed=seed).prompts[0].tokens for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("rows", ["last", "mask", "position", "runtime"])
def test_pruned_rows(check, rows):
    source = {"mask": "attention_mask", "position": "position_ids", "runtime": "last_token_indices"}.get(rows)
    report = check(decoder(), prune(decoder(), rows, index=rows, source=source), prompts=None)
    assert report.status == "equal", report.reasons
    # A static last row is padding in a batch that is padded on the right.
    assert ("b3-s6-right" in lengths(report)) == (rows != "last")
    assert "b2-s7-left" in lengths(report)


@pytest.mark.parametrize(
    ("name", "index", "keep"),
    [
        ("optimum_llama", "mask", 1),
        ("optimum_llama", "runtime", 3),
        ("llama_static", "position", 3),
        ("genai_llama", "mask", 1),
    ],
)
def test_pruned_exports(check, made, name, index, keep):
    source = FIXTURES / name / "model.onnx"
    report = check(source, made(source, f"prune-last-token{{index={index},keep={keep}}}"))
    assert report.status == "equal", report.reasons
    assert lengths(report)["all-prompts"] == (5, 3, 1)


def test_a_pruned_cache_with_slots_by_position(check, made):
    source = case("a08")
    report = check(source, made(source, "prune-last-token{index=position}"))
    assert report.status == "equal", report.reasons
    assert report.prompts[-1].padding == "right"


def test_a_static_last_row_is_not_fed_padding_behind_it(check, made):
    source = FIXTURES / "genai_llama" / "model.onnx"
    made_path = made(source, "prune-last-token{index=last}")
    report = check(source, made_path)
    assert report.status == "equal", report.reasons
    assert [(each.feed, each.reason) for each in report.left_out] == [
        (
            "all-prompts",
            f"{made_path} does not tell padding from tokens, so it cannot be fed rows of unequal length",
        )
    ]


def test_blocked_attention(check, made):
    source = FIXTURES / "optimum_llama" / "model.onnx"
    report = check(source, made(source, "block-attention{q_block_size=4}"), prompts=None, steps=3)
    assert report.status == "equal", report.reasons


def test_renamed_caches(check, made):
    source = FIXTURES / "llama_static" / "model.onnx"
    report = check(source, made(source, "rename-io{to=retained-state}"))
    assert report.status == "equal", report.reasons
    assert {out.rewritten for out in report.outputs} >= {"past_key.0_RetainedState"}


def test_quantised_weights_at_the_default_level(check, made):
    source = FIXTURES / "llama_qdq" / "model.onnx"
    report = check(source, made(source, "prune-last-token"), opt_level_check=True)
    assert report.status == "equal", report.reasons
    assert {out.level for out in report.outputs} == {"disabled", "default"}


def test_hidden_states_are_drawn_for_each_token(check):
    report = check(case("p11"), case("p11"))
    assert report.status == "equal", report.reasons
    assert report.notes == ("input inputs_embeds takes hidden states: every token is given a drawn vector",)


def test_a_model_without_a_cache_is_fed_the_whole_sequence(check):
    report = check(mixture(), mixture())
    assert report.status == "equal", report.reasons
    assert lengths(report)["all-prompts"] == (5, 3, 1)
    assert [out.name for out in report.outputs] == ["logits"]


# Planted errors -------------------------------------------------------------------------------------------------------


def behind(model: onnx.ModelProto, output: str, write) -> onnx.ModelProto:
    """A copy in which ``write(graph, value)`` makes the output anew from what it was; what else reads it stays."""
    model = copy(model)
    for node in model.graph.node:
        node.input[:] = ["was" if name == output else name for name in node.input]
        node.output[:] = ["was" if name == output else name for name in node.output]
    g = Graph()
    write(g, "was")
    g.nodes[-1].output[0] = output
    model.graph.node.extend(g.nodes)
    model.graph.initializer.extend(g.tensors)
    return model


def cache_off_by_one():
    """The cache comes back turned by one position: right shapes, right values, wrong places."""

    def write(g, value):
        end = g.op("Slice", value, g.ints("w/-1", [-1]), g.ints("w/max", [2**62]), g.ints("w/2", [2]), out="w/end")
        rest = g.op("Slice", value, g.ints("w/0", [0]), "w/-1", "w/2", out="w/rest")
        g.op("Concat", end, rest, axis=2, out="w/turned")

    return behind(decoder(), "present.0.key", write)


def stale_cache():
    """What comes back of the newest position is zero."""

    def write(g, value):
        kept = g.op("Slice", value, g.ints("w/0", [0]), g.ints("w/-1", [-1]), g.ints("w/2", [2]), out="w/kept")
        last = g.op("Slice", value, "w/-1", g.ints("w/max", [2**62]), "w/2", out="w/last")
        g.op("Concat", kept, g.op("Sub", last, last, out="w/none"), axis=2, out="w/stale")

    return behind(decoder(), "present.0.value", write)


def wrong_position():
    """Positions are one too many, but only behind a past."""
    model = copy(decoder())
    g = Graph()
    past = g.op("Shape", "past.0.key", start=2, end=3, out="w/past")
    g.op("Add", "position_ids", g.op("Min", past, g.ints("w/1", [1]), out="w/more"), out="w/positions")
    for node in model.graph.node:
        node.input[:] = ["w/positions" if name == "position_ids" else name for name in node.input]
    for node in reversed(g.nodes):
        model.graph.node.insert(0, node)
    model.graph.initializer.extend(g.tensors)
    return model


@pytest.mark.parametrize(
    ("wrong", "where", "alone"),
    [
        (cache_off_by_one, "token 1", "different"),
        (stale_cache, "token 1", "different"),
        (wrong_position, "token 1", "equal"),
        (lambda: decoder(invert_mask=True), "token 0", "different"),
        (lambda: decoder(scale=0.6), "token 0", "different"),
    ],
)
def test_a_planted_error_is_a_difference(check, wrong, where, alone):
    report = check(decoder(), wrong(), prompts=IDS[:1])
    assert (report.status, report.exit_code) == ("different", 1)
    logits = next(out for out in report.outputs if out.name == "logits")
    assert logits.problem is not None
    assert logits.problem.startswith("differs by ")
    assert f"output logits {logits.problem} (prompt prompt-0)" in report.reasons
    for found in report.token_differences:
        assert not found.tie
        assert found.gap > 100 * found.limit
        assert found.token >= int(where.split()[1])
    if where == "token 1":
        # Behind the prompt only what is handed on may tell.
        assert check(decoder(), wrong(), prompts=IDS[:1], steps=1).status == alone


def exchanged(path, one: str, other: str) -> onnx.ModelProto:
    """The model with two outputs that have one another's name."""
    model = onnx.ModelProto.FromString(path.read_bytes())
    names = {one: other, other: one}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


def test_caches_of_two_layers_exchanged(check):
    path = FIXTURES / "llama" / "model.onnx"
    wrong = exchanged(path, "output.cache.layers.0.keys", "output.cache.layers.1.keys")
    report = check(path, wrong, prompts=IDS[:1])
    assert report.status == "different"
    problems = {out.name for out in report.outputs if out.problem is not None}
    assert {"logits", "output.cache.layers.0.keys", "output.cache.layers.1.keys"} <= problems


def test_a_counter_that_counts_wrong(check):
    """One layer of a fixed-size cache is told one slot too many: nothing shows before the second call."""
    path = FIXTURES / "llama_static" / "model.onnx"
    model = onnx.ModelProto.FromString(path.read_bytes())
    name = "output.cache.layers.1.cumulative_length"
    wrong = behind(model, name, lambda g, value: g.op("Add", value, g.ints("w/one", 1), out="w/more"))
    report = check(path, wrong, prompts=IDS[:1])
    assert report.status == "different"
    found = {out.name: out for out in report.outputs}
    assert found[name].problem == "differs in 1 of 1 elements that must be bitwise equal, at the end"
    assert found["logits"].problem is not None
    assert found["output.cache.layers.0.keys"].problem is None


@pytest.mark.full
def test_states_of_linear_attention_exchanged(check):
    path = FIXTURES / "qwen3_5_moe" / "model.onnx"
    kept = "output.cache.layers.{}.recurrent_states.0"
    report = check(path, exchanged(path, kept.format(0), kept.format(1)), prompts=IDS[:1], steps=2)
    assert report.status == "different"
    problems = {out.name for out in report.outputs if out.problem is not None}
    assert {"logits", kept.format(0), kept.format(1)} <= problems


def test_a_row_that_is_padding(check):
    """A model that says nothing of its rows and keeps a static last one, padded on the right."""
    source = FIXTURES / "genai_llama" / "model.onnx"
    proto = onnx.ModelProto.FromString(source.read_bytes())
    onnx.load_external_data_for_model(proto, str(source.parent))
    report = check(proto, prune(proto, "last"))
    assert report.status == "different"
    differences = [each for each in report.token_differences if not each.tie]
    assert {each.prompt for each in differences} == {"all-prompts"}
    assert {(each.row, each.token) for each in differences} == {(1, 0), (2, 0)}


def test_a_model_that_cannot_run(check):
    def write(g, value):
        shape = g.op("Reshape", value, g.ints("w/shape", [1, 1, 5, 16]), out="w/shaped")
        g.op("Identity", shape, out="w/out")

    report = check(decoder(), behind(decoder(), "present.0.key", write))
    assert report.status == "different"
    assert report.reasons[0].startswith("the rewritten model fails on prompt prompt-0: ")
    assert report.reasons[0].endswith(" (and on 3 more prompts)")


def test_a_cache_that_is_gone(check):
    model = decoder()
    wrong = copy(model)
    for node in wrong.graph.node:
        node.input[:] = [name if not name.startswith("past.0") else f"{name}/none" for name in node.input]
    g = Graph()
    for part in ("key", "value"):
        g.tensors.append(onnx.numpy_helper.from_array(np.zeros((1, 1, 0, 16), np.float32), f"past.0.{part}/none"))
    wrong.graph.initializer.extend(g.tensors)
    for _ in range(2):
        del wrong.graph.input[3], wrong.graph.output[1]
    report = check(model, wrong, prompts=IDS[:1])
    # Without its caches it is fed everything anew, and its mask is as long as that.
    assert report.status == "equal", report.reasons
    assert [out.name for out in report.outputs] == ["logits"]


# Ties -----------------------------------------------------------------------------------------------------------------


def tied(nudge: float):
    """Two tokens that are always best, one of them ``nudge`` better than the other."""
    model = decoder()
    head = values(model, "head")
    head[:, 7] = head[:, 3] = 0
    head[0] = 0
    head[0, [3, 7]] = 1.0
    head[0, 7] += nudge
    set_values(model, "head", head)
    table = values(model, "embed")
    table[:, 0] = 50.0
    set_values(model, "embed", table)
    return model


def test_a_tie_flip_is_no_failure(check):
    report = check(tied(0.0), tied(2e-7), prompts=IDS[:1])
    assert report.status == "equal", report.reasons
    assert [tuple(set(row)) for row in report.prompts[0].tokens] == [(3,)]
    (found,) = report.token_differences
    assert (found.prompt, found.row, found.token, found.level, found.tie) == ("prompt-0", 0, 0, "disabled", True)
    assert (found.reference.best, found.reference.second) == (3, 7)
    assert (found.rewritten.best, found.rewritten.second) == (7, 3)
    assert found.gap == found.reference.gap == 0.0
    assert 0 < found.rewritten.gap < found.limit


def test_a_gap_above_the_tolerance_is_no_tie(check):
    report = check(tied(0.0), tied(1e-3), prompts=IDS[:1])
    assert report.status == "different"
    assert report.token_differences[0].tie  # the reference has no gap at all
    assert "output logits differs by" in report.reasons[0]
    report = check(tied(1e-3), tied(-1e-3), prompts=IDS[:1])
    (found,) = report.token_differences
    assert not found.tie
    assert report.reasons[0].startswith("tokens first differ at token 0 of row 0: 3, not 7, which is 5.")
    assert report.reasons[0].endswith("ahead in the reference (prompt prompt-0)")


def test_both_models_are_printed_side_by_side(check):
    report = check(tied(1e-3), tied(-1e-3), prompts=IDS[:1])
    first = report.token_differences[0]
    shown = dataclasses.replace(
        first,
        reference=dataclasses.replace(first.reference, best_logit=2.5, second_logit=2.25, gap=0.25),
        rewritten=dataclasses.replace(first.rewritten, best_logit=2.75, second_logit=2.5, gap=0.25),
        gap=0.25,
        limit=2.5e-5,
    )
    tie = dataclasses.replace(shown, tie=True, gap=1e-6, level="default", token=3)
    stream = io.StringIO()
    dataclasses.replace(report, outputs=(), reasons=(), token_differences=(shown, tie)).render(
        Console(file=stream, width=120)
    )
    assert stream.getvalue().splitlines() == [
        "prompts (seed 0, 2 threads): prompt-0",
        "prompt prompt-0, row 0, token 0:",
        "┏━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━┓",
        "┃        ┃ reference ┃ rewritten ┃",
        "┡━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━┩",
        "│ best   │ 7: 2.5    │ 3: 2.75   │",
        "│ second │ 3: 2.25   │ 7: 2.5    │",
        "│ gap    │ 2.50e-01  │ 2.50e-01  │",
        "└────────┴───────────┴───────────┘",
        "no tie: in the reference 3 lies 2.50e-01 behind 7, tolerance 2.50e-05",
        "prompt prompt-0, row 0, token 3, at ONNX Runtime's default level:",
        "┏━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━┓",
        "┃        ┃ reference ┃ rewritten ┃",
        "┡━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━┩",
        "│ best   │ 7: 2.5    │ 3: 2.75   │",
        "│ second │ 3: 2.25   │ 7: 2.5    │",
        "│ gap    │ 2.50e-01  │ 2.50e-01  │",
        "└────────┴───────────┴───────────┘",
        "tie flip: in the reference 3 lies 1.00e-06 behind 7, below the tolerance 2.50e-05",
    ]


def test_a_choice_of_experts_that_flips_at_a_tie(check):
    report = check(mixture(tied=6), mixture(tied=6, nudge=1e-6), prompts=[(1, 2, 6, 3, 4), (1, 2, 3)])
    assert report.status == "equal", report.reasons
    assert report.routers == ("node/top",)
    # In both prompts that hold it, and in each call, since the whole sequence is fed anew; but it is one tie.
    assert report.tie_flips == 1
    assert report.excluded_rows == 2 * (3 + 4 + 5 + 6)


def test_another_choice_of_experts_is_a_difference(check):
    report = check(mixture(), mixture(wrong=True), prompts=IDS[:1])
    assert report.status == "different"
    assert report.reasons[0].startswith("router node/top chooses experts ")


# From one file to another ---------------------------------------------------------------------------------------------


def renamed_decoder(**options: Any) -> onnx.ModelProto:
    """Caches of other names, with nothing that tells of it but the order of layers."""
    model = decoder(**options)
    names = {f"past.0.{part}": f"past_{part}.0" for part in ("key", "value")}
    names |= {f"present.0.{part}": f"past_{part}.0_RetainedState" for part in ("key", "value")}
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


PRUNED = {"index": "mask", "source": "attention_mask"}


def test_the_cache_goes_from_the_prompt_file_to_the_decode_file(check, tmp_path):
    step = save(renamed_decoder(), tmp_path / "step.onnx")
    report = check(decoder(), prune(decoder(), "mask", **PRUNED), decode=step)
    assert report.status == "equal", report.reasons
    assert (report.decode, report.decode_reference) == (str(step), None)
    assert {out.rewritten for out in report.outputs} == {
        "logits",
        "past_key.0_RetainedState",
        "past_value.0_RetainedState",
    }


def test_both_sides_may_have_two_files(check, tmp_path):
    step = save(renamed_decoder(), tmp_path / "step.onnx")
    other = save(decoder(), tmp_path / "other.onnx")
    report = check(decoder(), prune(decoder(), "mask", **PRUNED), decode=step, decode_reference=other)
    assert report.status == "equal", report.reasons
    assert report.decode_reference == str(other)


def prompt_alone() -> onnx.ModelProto:
    """The model without a past: it reads the prompt and only returns its cache."""
    model = decoder()
    for node in model.graph.node:
        if node.op_type == "Concat":
            node.op_type = "Identity"
            del node.input[0], node.attribute[:]
    del model.graph.input[3:]
    return model


def test_a_cache_that_the_prompt_file_makes(check, tmp_path):
    step = save(decoder(), tmp_path / "step.onnx")
    report = check(prompt_alone(), prompt_alone(), decode=step, decode_reference=step)
    assert report.status == "equal", report.reasons
    assert [out.name for out in report.outputs] == ["logits", "present.0.key", "present.0.value"]
    # On one side the whole sequence is read anew for each token.
    report = check(prompt_alone(), prompt_alone(), decode=step)
    assert report.status == "equal", report.reasons
    assert report.prompts[-1].padding == "left"
    report = check(prompt_alone(), prompt_alone(), decode=save(decoder(scale=0.7), step))
    assert report.status == "different"
    assert {each.token > 0 for each in report.token_differences} <= {True}


def test_a_state_that_the_prompt_file_does_not_return(check, tmp_path):
    def with_state(model: onnx.ModelProto) -> onnx.ModelProto:
        g = Graph()
        state = g.input("past.0.recurrent_state", T.FLOAT, "batch", 2, 3)
        g.op("Add", state, state, out="present.0.recurrent_state")
        g.output("present.0.recurrent_state", T.FLOAT, "batch", 2, 3)
        model.graph.node.extend(g.nodes)
        model.graph.input.extend(g.inputs)
        model.graph.output.extend(g.outputs)
        return model

    step = save(with_state(decoder()), tmp_path / "step.onnx")
    report = check(decoder(), decoder(), decode=step, prompts=IDS[:1])
    assert report.status == "unchecked"
    assert report.reasons == (
        f"{step} takes cache:0.recurrent as input past.0.recurrent_state, which {tmp_path / 'b.onnx'} does not return.",
    )
    assert check(with_state(decoder()), with_state(decoder()), decode=step, prompts=IDS[:1]).status == "equal"


@pytest.mark.parametrize("wrong", [{"invert_mask": True}, {"scale": 0.7}])
def test_an_error_in_the_decode_file_alone(check, tmp_path, wrong):
    step = save(renamed_decoder(**wrong), tmp_path / "step.onnx")
    report = check(decoder(), decoder(), decode=step, prompts=IDS[:1])
    assert report.status == "different"
    assert all(each.token > 0 for each in report.token_differences)


def test_a_decode_file_of_another_model(check, tmp_path):
    path = FIXTURES / "llama" / "model.onnx"
    report = check(decoder(), decoder(), decode=path, prompts=IDS[:1])
    assert (report.status, report.exit_code) == ("unchecked", 5)
    assert report.reasons == (
        f"{path} takes cache:1.key as input input.cache.layers.1.keys, which {tmp_path / 'b.onnx'} does not return.",
    )


def test_fixed_prompt_and_decode_files_of_one_export(check, made):
    source = FIXTURES / "optimum_llama" / "model.onnx"
    prompt = made(source, "prune-last-token{index=mask}", "bind-dims{batch=2,seq=8,past=0}", name="prompt")
    step = made(source, "bind-dims{batch=2,seq=1,past=15}", name="step")
    report = check(source, prompt, decode=step, prompts=None, steps=3)
    assert report.status == "equal", report.reasons
    assert lengths(report) == {
        "b2-s5": (5, 5),
        "b2-s1": (1, 1),
        "b2-s7-left": (7, 4),
        "b2-s6-right": (6, 3),
        "b2-s3": (3, 3),
        "b2-s8": (8, 8),
    }
    assert [prompt.padding for prompt in report.prompts] == ["left", "left", "left", "right", "left", "none"]


def test_a_prompt_file_alone_gives_one_token(check, made):
    source = FIXTURES / "llama" / "model.onnx"
    prompt = made(source, "bind-dims{batch=1,seq=4,past=0}")
    report = check(source, prompt, prompts=[(1, 2, 3, 4), (1, 2, 3)])
    assert report.status == "equal", report.reasons
    assert [prompt.tokens for prompt in report.prompts] == [((report.prompts[0].tokens[0][0],),)]
    assert report.notes == (f"prompt prompt-0: 1 of 4 tokens, for {prompt} takes 4 tokens a call",)
    assert report.left_out[0].reason == (
        f"{source} does not tell padding from tokens, so it cannot be fed 3 tokens in 4 columns"
    )


def test_fixed_slots_in_chunks(check, made):
    source = FIXTURES / "llama_static" / "model.onnx"
    prompt = made(source, "prune-last-token", "bind-dims{batch=1,seq=4,context=16}", name="prompt")
    step = made(source, "bind-dims{batch=1,seq=1,context=16}", name="step")
    report = check(source, prompt, decode=step, prompts=[tuple(range(n)) for n in (9, 15, 17)])
    assert report.status == "equal", report.reasons
    assert [(prompt.calls, len(prompt.tokens[0])) for prompt in report.prompts] == [(3, 4), (4, 1)]
    assert report.notes == (f"prompt prompt-1: 1 of 4 tokens, for {step} holds 16 positions",)
    assert [(each.feed, each.reason) for each in report.left_out] == [("prompt-2", f"{prompt} holds 16 positions")]


# Options --------------------------------------------------------------------------------------------------------------


def test_nothing_to_decode_is_unchecked(check):
    path = case("m01")
    report = check(path, path, prompts=None)
    assert (report.status, report.exit_code) == ("unchecked", 5)
    assert report.reasons == (f"{path} has no logits, so nothing can be decoded: check it with --depth outputs.",)


def test_prompts_that_do_not_fit_are_unchecked(check):
    path = case("a08")
    report = check(path, path, prompts=[tuple(range(20))])
    assert report.status == "unchecked"
    assert report.reasons == (f"No prompt could be decoded; the last, prompt-0: {path} holds 16 positions.",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"depth": "generate", "steps": 0},
            "0 steps are too few: the prompt itself gives the first token, so 1 or more.",
        ),
        (
            {"depth": "generate", "feeds": {}},
            "Feeds are inputs of single calls, for depth outputs: give prompts to depth generate.",
        ),
        (
            {"steps": 3},
            "Steps, prompts and files to decode with belong to depth generate: ask for it, or leave them out.",
        ),
        ({"depth": "all"}, "Depth 'all' is not known: choose outputs or generate."),
    ],
)
def test_usage(options, words):
    path = FIXTURES / "llama" / "model.onnx"
    with pytest.raises(UsageError) as error:
        verify_models(path, path, **options)
    assert str(error.value) == words


def test_progress_is_told_for_every_prompt(check):
    told: list[tuple[str, int, int]] = []
    check(decoder(), decoder(), progress=lambda *step: told.append(step), opt_level_check=True)
    assert [done for _, done, _ in told] == list(range(1, 17))
    assert {total for _, _, total in told} == {16}
    assert told[0][0] == "reference prompt-0"
    assert told[4][0] == "rewritten prompt-0"


def test_other_types_of_logits(check):
    report = check(decoder(T.FLOAT16), decoder(T.FLOAT16))
    assert report.status == "equal", report.reasons
    assert report.outputs[0].tolerance == 2e-3


# Everything -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*.onnx")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_fixture_equals_itself(path):
    report = verify_models(path, path, depth="generate", steps=6)
    if path.stem in {"language_model", "lm_head"}:
        assert report.reasons == (f"{path} has no logits, so nothing can be decoded: check it with --depth outputs.",)
        return
    assert report.status == "equal", report.reasons
    assert len(report.prompts) >= 4
    assert report.tie_flips == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [path for path in sorted(FIXTURES.glob("*/*.onnx")) if path.stem in {"model", "decode"}],
    ids=lambda path: path.parent.name,
)
def test_every_fixture_decodes_alike_with_pruned_rows(check, made, path):
    report = check(path, made(path, "prune-last-token"), prompts=None, steps=5, opt_level_check=True)
    assert report.status == "equal", report.reasons
