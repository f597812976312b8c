"""``verify`` at depth ``generate``: the cache goes from a prompt file to a decode file."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto as T

from tests.equivalence.builders import (
    FIXTURES,
    IDS,
    Graph,
    decoder,
    prune,
    save,
)
from tests.equivalence.generating import lengths


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


def test_the_cache_goes_from_the_prompt_file_to_the_decode_file(decoded, tmp_path):
    step = save(renamed_decoder(), tmp_path / "step.onnx")
    report = decoded(decoder(), prune(decoder(), "mask", **PRUNED), decode=step)
    assert report.status == "equal", report.reasons
    assert (report.decode, report.decode_reference) == (str(step), None)
    assert {out.rewritten for out in report.outputs} == {
        "logits",
        "past_key.0_RetainedState",
        "past_value.0_RetainedState",
    }


def test_both_sides_may_have_two_files(decoded, tmp_path):
    step = save(renamed_decoder(), tmp_path / "step.onnx")
    other = save(decoder(), tmp_path / "other.onnx")
    report = decoded(decoder(), prune(decoder(), "mask", **PRUNED), decode=step, decode_reference=other)
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


def test_a_cache_that_the_prompt_file_makes(decoded, tmp_path):
    step = save(decoder(), tmp_path / "step.onnx")
    report = decoded(prompt_alone(), prompt_alone(), decode=step, decode_reference=step)
    assert report.status == "equal", report.reasons
    assert [out.name for out in report.outputs] == ["logits", "present.0.key", "present.0.value"]
    # On one side the whole sequence is read anew for each token.
    report = decoded(prompt_alone(), prompt_alone(), decode=step)
    assert report.status == "equal", report.reasons
    assert report.prompts[-1].padding == "left"
    report = decoded(prompt_alone(), prompt_alone(), decode=save(decoder(scale=0.7), step))
    assert report.status == "different"
    assert {each.token > 0 for each in report.token_differences} <= {True}


def test_a_state_that_the_prompt_file_does_not_return(decoded, tmp_path):
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
    report = decoded(decoder(), decoder(), decode=step, prompts=IDS[:1])
    assert report.status == "unchecked"
    assert report.reasons == (
        f"{step} takes cache:0.recurrent as input past.0.recurrent_state, which {tmp_path / 'b.onnx'} does not return.",
    )
    assert decoded(with_state(decoder()), with_state(decoder()), decode=step, prompts=IDS[:1]).status == "equal"


@pytest.mark.parametrize("wrong", [{"invert_mask": True}, {"scale": 0.7}])
def test_an_error_in_the_decode_file_alone(decoded, tmp_path, wrong):
    step = save(renamed_decoder(**wrong), tmp_path / "step.onnx")
    report = decoded(decoder(), decoder(), decode=step, prompts=IDS[:1])
    assert report.status == "different"
    assert all(each.token > 0 for each in report.token_differences)


def test_a_decode_file_of_another_model(decoded, tmp_path):
    path = FIXTURES / "llama" / "model.onnx"
    report = decoded(decoder(), decoder(), decode=path, prompts=IDS[:1])
    assert (report.status, report.exit_code) == ("unchecked", 5)
    assert report.reasons == (
        f"{path} takes cache:1.key as input input.cache.layers.1.keys, which {tmp_path / 'b.onnx'} does not return.",
    )


def test_fixed_prompt_and_decode_files_of_one_export(decoded, made):
    source = FIXTURES / "optimum_llama" / "model.onnx"
    prompt = made(source, "prune-last-token{index=mask}", "bind-dims{batch=2,seq=8,past=0}", name="prompt")
    step = made(source, "bind-dims{batch=2,seq=1,past=15}", name="step")
    report = decoded(source, prompt, decode=step, prompts=None, steps=3)
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


def test_a_prompt_file_alone_gives_one_token(decoded, made):
    source = FIXTURES / "llama" / "model.onnx"
    prompt = made(source, "bind-dims{batch=1,seq=4,past=0}")
    report = decoded(source, prompt, prompts=[(1, 2, 3, 4), (1, 2, 3)])
    assert report.status == "equal", report.reasons
    assert [prompt.tokens for prompt in report.prompts] == [((report.prompts[0].tokens[0][0],),)]
    assert report.notes == (f"prompt prompt-0: 1 of 4 tokens, for {prompt} takes 4 tokens a call",)
    assert report.left_out[0].reason == (
        f"{source} does not tell padding from tokens, so it cannot be fed 3 tokens in 4 columns"
    )


def test_fixed_slots_in_chunks(decoded, made):
    source = FIXTURES / "llama_static" / "model.onnx"
    prompt = made(source, "prune-last-token", "bind-dims{batch=1,seq=4,context=16}", name="prompt")
    step = made(source, "bind-dims{batch=1,seq=1,context=16}", name="step")
    report = decoded(source, prompt, decode=step, prompts=[tuple(range(n)) for n in (9, 15, 17)])
    assert report.status == "equal", report.reasons
    assert [(prompt.calls, len(prompt.tokens[0])) for prompt in report.prompts] == [(3, 4), (4, 1)]
    assert report.notes == (f"prompt prompt-1: 1 of 4 tokens, for {step} holds 16 positions",)
    assert [(each.feed, each.reason) for each in report.left_out] == [("prompt-2", f"{prompt} holds 16 positions")]
