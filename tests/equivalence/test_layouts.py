"""How prompts are laid out for both sides: alike where they can be, each its own way where not."""

from __future__ import annotations

from typing import Any

import pytest

from graphsurgery.equivalence.layouts import Plan, Prompt, make_plan
from tests.equivalence.builders import FIXTURES, Graph, decoder, save
from tests.equivalence.decoders import contestants

SYMBOLS = {"B": "batch", "S": "seq", "P": "past", "T": "total"}


@pytest.fixture
def plan(tmp_path):
    """The plan for a reference whose sizes are free and a model with some that are fixed."""

    def make(
        lengths: tuple[int, ...], tokens: int = 3, *, pieces: int = 1, side: Any = None, **sizes: int
    ) -> Plan | str:
        model = decoder()
        fixed = {SYMBOLS[letter]: size for letter, size in sizes.items()}
        for value in (*model.graph.input, *model.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in fixed:
                    dim.dim_value = fixed[dim.dim_param]
        both = contestants(save(decoder(), tmp_path / "a.onnx"), save(model, tmp_path / "b.onnx"))
        prompt = Prompt("p", tuple((1,) * length for length in lengths), pieces, side=side)
        return make_plan(prompt, both.parties, tokens)

    return make


def seen(plan: Plan | str) -> list[tuple[Any, ...]]:
    assert isinstance(plan, Plan), plan
    return [(layout.side, layout.width, layout.cuts) for layout in plan.layouts]


def test_free_sizes(plan):
    assert seen(plan((5,))) == [("left", 5, ((0, 5),))] * 2
    assert seen(plan((5,), pieces=2)) == [("left", 5, ((0, 3), (3, 5)))] * 2
    assert seen(plan((5, 2))) == [("left", 5, ((0, 5),))] * 2
    assert seen(plan((5, 2), side="right")) == [("right", 5, ((0, 5),))] * 2


def test_the_reference_is_fed_in_the_calls_of_the_rewritten_model(plan):
    found = plan((5, 2), S=4)
    assert seen(found) == [("left", 8, ((0, 4), (4, 8)))] * 2
    assert found.alike
    assert (found.tokens, found.shortened is None) == (1, False)


def test_a_step_file_reads_a_prompt_token_by_token(plan):
    found = plan((3,), S=1, P=7, T=8)
    assert seen(found) == [("left", 3, ((0, 1), (1, 2), (2, 3)))] * 2
    assert (found.tokens, found.shortened) == (3, None)


def test_tokens_end_where_a_cache_is_full(plan, tmp_path):
    found = plan((6,), tokens=5, S=1, P=7, T=8)
    assert (found.tokens, found.shortened) == (3, f"{tmp_path / 'b.onnx'} holds 8 positions")
    assert plan((9,), S=1, P=7, T=8) == f"{tmp_path / 'b.onnx'} holds 8 positions"


def test_sides_that_are_not_the_same(tmp_path):
    """GroupQueryAttention packs rows to the left; a static last row asks for padding there."""
    both = contestants(save(decoder(), tmp_path / "a.onnx"), FIXTURES / "genai_llama" / "model.onnx")
    found = make_plan(Prompt("p", ((1, 2), (3,))), both.parties, 2)
    assert seen(found) == [("right", 2, ((0, 2),))] * 2
    llama = contestants(FIXTURES / "optimum_gpt_oss" / "model.onnx", FIXTURES / "genai_llama" / "model.onnx")
    found = make_plan(Prompt("p", ((1, 2), (3,))), llama.parties, 2)
    assert seen(found) == [("left", 2, ((0, 2),)), ("right", 2, ((0, 2),))]
    assert isinstance(found, Plan)
    assert not found.alike


def test_a_packed_stream_holds_one_row(tmp_path):
    g = Graph()
    from onnx import TensorProto as T

    ids = g.input("input_ids", T.INT64, "tokens")
    g.op("MatMul", g.op("Gather", g.weight("embed", 40, 16), ids), g.weight("head", 16, 40), out="logits")
    g.output("logits", T.FLOAT, "tokens", 40)
    both = contestants(save(g.model(), tmp_path / "m.onnx"))
    assert both.parties[0].prompt.batch == 1
    assert both.parties[0].anew
