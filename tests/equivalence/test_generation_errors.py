"""``verify`` at depth ``generate``: planted errors are found, ties are told from errors."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import onnx
import pytest
from rich.console import Console

from tests.equivalence.builders import (
    FIXTURES,
    IDS,
    Graph,
    copy,
    decoder,
    mixture,
    prune,
    set_values,
    values,
)
from tests.equivalence.generating import behind

# Planted errors -------------------------------------------------------------------------------------------------------


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
def test_a_planted_error_is_a_difference(decoded, wrong, where, alone):
    report = decoded(decoder(), wrong(), prompts=IDS[:1])
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
        assert decoded(decoder(), wrong(), prompts=IDS[:1], steps=1).status == alone


def exchanged(path, one: str, other: str) -> onnx.ModelProto:
    """The model with two outputs that have one another's name."""
    model = onnx.ModelProto.FromString(path.read_bytes())
    names = {one: other, other: one}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


def test_caches_of_two_layers_exchanged(decoded):
    path = FIXTURES / "llama" / "model.onnx"
    wrong = exchanged(path, "output.cache.layers.0.keys", "output.cache.layers.1.keys")
    report = decoded(path, wrong, prompts=IDS[:1])
    assert report.status == "different"
    problems = {out.name for out in report.outputs if out.problem is not None}
    assert {"logits", "output.cache.layers.0.keys", "output.cache.layers.1.keys"} <= problems


def test_a_counter_that_counts_wrong(decoded):
    """One layer of a fixed-size cache is told one slot too many: nothing shows before the second call."""
    path = FIXTURES / "llama_static" / "model.onnx"
    model = onnx.ModelProto.FromString(path.read_bytes())
    name = "output.cache.layers.1.cumulative_length"
    wrong = behind(model, name, lambda g, value: g.op("Add", value, g.ints("w/one", 1), out="w/more"))
    report = decoded(path, wrong, prompts=IDS[:1])
    assert report.status == "different"
    found = {out.name: out for out in report.outputs}
    assert found[name].problem == "differs in 1 of 1 elements that must be bitwise equal, at the end"
    assert found["logits"].problem is not None
    assert found["output.cache.layers.0.keys"].problem is None


@pytest.mark.full
def test_states_of_linear_attention_exchanged(decoded):
    path = FIXTURES / "qwen3_5_moe" / "model.onnx"
    kept = "output.cache.layers.{}.recurrent_states.0"
    report = decoded(path, exchanged(path, kept.format(0), kept.format(1)), prompts=IDS[:1], steps=2)
    assert report.status == "different"
    problems = {out.name for out in report.outputs if out.problem is not None}
    assert {"logits", kept.format(0), kept.format(1)} <= problems


def test_a_row_that_is_padding(decoded):
    """A model that says nothing of its rows and keeps a static last one, padded on the right."""
    source = FIXTURES / "genai_llama" / "model.onnx"
    proto = onnx.ModelProto.FromString(source.read_bytes())
    onnx.load_external_data_for_model(proto, str(source.parent))
    report = decoded(proto, prune(proto, "last"))
    assert report.status == "different"
    differences = [each for each in report.token_differences if not each.tie]
    assert {each.prompt for each in differences} == {"all-prompts"}
    assert {(each.row, each.token) for each in differences} == {(1, 0), (2, 0)}


def test_a_model_that_cannot_run(decoded):
    def write(g, value):
        shape = g.op("Reshape", value, g.ints("w/shape", [1, 1, 5, 16]), out="w/shaped")
        g.op("Identity", shape, out="w/out")

    report = decoded(decoder(), behind(decoder(), "present.0.key", write))
    assert report.status == "different"
    assert report.reasons[0].startswith("the rewritten model fails on prompt prompt-0: ")
    assert report.reasons[0].endswith(" (and on 3 more prompts)")


def test_a_cache_that_is_gone(decoded):
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
    report = decoded(model, wrong, prompts=IDS[:1])
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


def test_a_tie_flip_is_no_failure(decoded):
    report = decoded(tied(0.0), tied(2e-7), prompts=IDS[:1])
    assert report.status == "equal", report.reasons
    assert [tuple(set(row)) for row in report.prompts[0].tokens] == [(3,)]
    (found,) = report.token_differences
    assert (found.prompt, found.row, found.token, found.level, found.tie) == ("prompt-0", 0, 0, "disabled", True)
    assert (found.reference.best, found.reference.second) == (3, 7)
    assert (found.rewritten.best, found.rewritten.second) == (7, 3)
    assert found.gap == found.reference.gap == 0.0
    assert 0 < found.rewritten.gap < found.limit


def test_a_gap_above_the_tolerance_is_no_tie(decoded):
    report = decoded(tied(0.0), tied(1e-3), prompts=IDS[:1])
    assert report.status == "different"
    assert report.token_differences[0].tie  # the reference has no gap at all
    assert "output logits differs by" in report.reasons[0]
    report = decoded(tied(1e-3), tied(-1e-3), prompts=IDS[:1])
    (found,) = report.token_differences
    assert not found.tie
    assert report.reasons[0].startswith("tokens first differ at token 0 of row 0: 3, not 7, which is 5.")
    assert report.reasons[0].endswith("ahead in the reference (prompt prompt-0)")


def test_both_models_are_printed_side_by_side(decoded):
    report = decoded(tied(1e-3), tied(-1e-3), prompts=IDS[:1])
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


def test_a_choice_of_experts_that_flips_at_a_tie(decoded):
    report = decoded(mixture(tied=6), mixture(tied=6, nudge=1e-6), prompts=[(1, 2, 6, 3, 4), (1, 2, 3)])
    assert report.status == "equal", report.reasons
    assert report.routers == ("node/top",)
    # In both prompts that hold it, and in each call, since the whole sequence is fed anew; but it is one tie.
    assert report.tie_flips == 1
    assert report.excluded_rows == 2 * (3 + 4 + 5 + 6)


def test_another_choice_of_experts_is_a_difference(decoded):
    report = decoded(mixture(), mixture(wrong=True), prompts=IDS[:1])
    assert report.status == "different"
    assert report.reasons[0].startswith("router node/top chooses experts ")
