"""How each convention decodes: what it hands on, what its calls are fed, and that decoding is the whole sequence at once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from onnx import TensorProto as T

from graphsurgery.contracts import RowSelection
from graphsurgery.equivalence.calls import Call
from graphsurgery.equivalence.comparing import compare
from graphsurgery.equivalence.handover import Manner
from graphsurgery.equivalence.layouts import Prompt
from graphsurgery.equivalence.prompt_drawing import draw_prompts
from graphsurgery.equivalence.running import Session
from graphsurgery.equivalence.tape import Tape
from graphsurgery.errors import CannotCheckError
from tests.equivalence.builders import CASES, FIXTURES, Graph, case, decoder, save
from tests.equivalence.decoders import at_once, contestants, decode, decoder_of

if TYPE_CHECKING:
    from graphsurgery.equivalence.contestants import Contestants

A08 = "a08_static_cache_scatter_ctx16"


def fixture(name: str) -> Any:
    return FIXTURES / name / "model.onnx"


# What a file is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "manners", "packed", "sides"),
    [
        (fixture("llama"), {Manner.GROW}, False, ()),
        (fixture("gemma2"), {Manner.GROW, Manner.CONSTANT}, False, ()),
        (fixture("optimum_llama"), {Manner.GROW}, False, ("left", "right")),
        (fixture("optimum_gpt_oss"), {Manner.GROW}, False, ("left",)),
        (fixture("llama_static"), {Manner.SLOTS, Manner.COUNTER}, False, ("left", "right")),
        (fixture("genai_llama"), {Manner.GROW}, True, ("right",)),
        (fixture("genai_gptoss"), {Manner.GROW, Manner.RING}, True, ("right",)),
        (fixture("llama_opset_newest"), {Manner.GROW}, False, ()),
        (case(A08), {Manner.SLOTS}, True, ("right",)),
        (case("s11"), set(), False, ("right",)),
    ],
    ids=lambda value: getattr(getattr(value, "parent", None), "name", None),
)
def test_conventions(path, manners, packed, sides):
    found = decoder_of(path)
    assert {cache.manner for cache in found.caches} == manners
    assert (found.packed, found.sides) == (packed, sides)
    assert found.whole == (not manners)
    assert found.logits.name == "logits"


def test_limits_are_read_from_the_graph():
    static = decoder_of(case(A08))
    assert (static.slots, static.capacity, static.vocabulary) == (16, 16, 40)
    # The table of rotations of an operator, and the table that positions index.
    assert decoder_of(case("a10")).capacity == 32
    assert decoder_of(case("a01")).capacity == 64
    assert decoder_of(case("p11")).capacity == 64
    assert decoder_of(fixture("llama")).capacity is None


def bound(sizes: dict[str, int], make: Any = decoder) -> Any:
    """The model with declared sizes in place of symbols."""
    model = make()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return model


def test_fixed_sizes_of_a_growing_cache(tmp_path):
    step = decoder_of(save(bound({"batch": 2, "seq": 1, "past": 7, "total": 8}), tmp_path / "step.onnx"))
    assert (step.batch, step.length, step.filled, step.past, step.capacity) == (2, 1, 7, None, 8)
    assert [step.takes(0, 1), step.takes(7, 8)] == [None, None]
    assert step.takes(8, 9) == "holds 8 positions"
    assert step.takes(0, 2) == "takes 1 tokens a call"
    prompt = decoder_of(save(bound({"seq": 4, "past": 0, "total": 4}), tmp_path / "prompt.onnx"))
    assert (prompt.filled, prompt.past) == (None, 0)
    assert prompt.takes(4, 8) == "takes exactly 0 cached positions"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (FIXTURES / "qwen3_vl_moe" / "language_model.onnx", "has no logits, so nothing can be decoded"),
        (case("m01"), "has no logits, so nothing can be decoded"),
    ],
)
def test_what_does_not_decode(path, words):
    with pytest.raises(CannotCheckError) as error:
        contestants(path)
    assert str(error.value) == f"{path} {words}: check it with --depth outputs."


def with_input(name: str, *dims: Any, output: bool = False) -> Any:
    model = decoder()
    g = Graph()
    g.input(name, T.FLOAT, *dims)
    model.graph.input.extend(g.inputs)
    return model


def test_an_encoder_is_not_decoded_for(tmp_path):
    path = save(with_input("encoder_hidden_states", "batch", "encoded", 16), tmp_path / "m.onnx")
    with pytest.raises(CannotCheckError) as error:
        contestants(path)
    assert str(error.value) == (
        f"{path} attends another sequence (input encoder_hidden_states), which decoding does not make:"
        " check it with --depth outputs."
    )


def test_a_cache_that_no_output_hands_on(tmp_path):
    model = decoder()
    del model.graph.output[2]
    path = save(model, tmp_path / "m.onnx")
    with pytest.raises(CannotCheckError) as error:
        contestants(path)
    assert str(error.value) == (
        f"{path} takes a cache, input past.0.value, and no output hands it on: check it with --depth outputs."
    )


def renamed(names: dict[str, str]) -> Any:
    """The decoder with other names of inputs and outputs."""
    model = decoder()
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


def handed(path: Any) -> dict[str, tuple[str, str]]:
    return {cache.key: (cache.input.name, cache.output) for cache in decoder_of(path).fed if cache.input is not None}


def test_the_graph_tells_what_names_do_not(tmp_path):
    names = {"past.0.key": "a_cache", "past.0.value": "b_cache", "present.0.key": "c", "present.0.value": "d"}
    path = save(renamed(names), tmp_path / "m.onnx")
    assert handed(path) == {"cache:0.key": ("a_cache", "c"), "cache:0.value": ("b_cache", "d")}


def test_names_tell_what_is_handed_on_as_which(tmp_path):
    """Runtimes go by names: an output that holds the values is fed as the past of the keys where it is called so."""
    names = {"present.0.key": "present.0.value", "present.0.value": "present.0.key"}
    path = save(renamed(names), tmp_path / "m.onnx")
    assert handed(path) == {
        "cache:0.key": ("past.0.key", "present.0.key"),
        "cache:0.value": ("past.0.value", "present.0.value"),
    }


def test_names_alone_tell_of_a_counter(tmp_path):
    g = Graph()
    length = g.input("cache.0.cumulative_length", T.INT64)
    g.op("Mul", length, g.ints("two", 2), out="cache.0.cumulative_length_out")
    g.nodes[-1].output[0] = "updated_cache.0.cumulative_length"
    g.output("updated_cache.0.cumulative_length", T.INT64)
    model = decoder()
    model.graph.node.extend(g.nodes)
    model.graph.initializer.extend(g.tensors)
    model.graph.input.extend(g.inputs)
    model.graph.output.extend(g.outputs)
    found = {cache.key: cache for cache in decoder_of(save(model, tmp_path / "m.onnx")).caches}
    assert set(found) == {"cache:0.key", "cache:0.value", "cache:0.length"}
    assert found["cache:0.length"].manner is Manner.COUNTER
    assert found["cache:0.length"].output == "updated_cache.0.cumulative_length"


# Rows of logits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "contract", "rows"),
    [
        ((2, 3, 40), None, [[0, 1, 2]] * 2),
        ((2, 2, 40), None, [[1, 2]] * 2),
        ((2, 1, 40), None, [[-1]] * 2),
        ((6, 40), None, [[0, 1, 2]] * 2),
        ((2, 1, 40), {}, [[2]] * 2),
        ((2, 2, 40), {"keep": 2}, [[1, 2]] * 2),
        ((4, 40), {"keep": 2, "flat": True, "row_axis": 0, "batch_axis": None}, [[1, 2]] * 2),
        ((1, 2, 40), {"row_axis": 0, "batch_axis": 1}, [[2]] * 2),
        ((2, 1, 40), {"index": "mask", "source": "attention_mask"}, [[1], [2]]),
    ],
)
def test_which_rows_logits_hold(tmp_path, shape, contract, rows):
    file = decoder_of(save(decoder(), tmp_path / "m.onnx"))
    if contract is not None:
        common = {"output": "logits", "index": "last", "keep": 1, "source": None, "row_axis": 1, "batch_axis": 0}
        stated: Any = common | {"sequence": "input_ids", "sequence_axis": 1} | contract
        file = dataclasses.replace(file, contracts=(RowSelection(**stated),))
    feed = {"input_ids": np.zeros((2, 3), np.int64), "attention_mask": np.array([[1, 1, 0], [1, 1, 1]])}
    value = np.arange(np.prod(shape)).reshape(shape)
    logits, held = file.rows({"logits": value}, feed, 3)
    assert held.tolist() == rows
    expected = value.transpose(1, 0, 2) if shape == (1, 2, 40) else value.reshape(2, -1, 40)
    assert logits.tolist() == expected.tolist()


# What a call is fed ---------------------------------------------------------------------------------------------------


def fed(path: Any, tape: Tape, start: int, stop: int, *, slots: int = 0, pad: int | None = None) -> dict[str, Any]:
    """What a call is fed, without caches."""
    file = decoder_of(path)
    wanted = tape.last_real(stop)
    filled = file.filled is not None
    past = file.filled if file.filled is not None else start
    call = Call(file.signature, tape, start, stop, past, slots, wanted, file.packed, pad, None, 0, 0, filled)
    handed = {cache.input.name for cache in file.fed if cache.input is not None and cache.counts_columns}
    return {spec.name: call.array(spec, spec.name) for spec in file.signature.inputs if spec.name not in handed}


def lists(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in arrays.items()}


def test_left_padding_of_a_growing_cache(tmp_path):
    path = save(decoder(), tmp_path / "m.onnx")
    tape = Tape.of([(5, 6, 7), (8,)], 3, "left")
    assert lists(fed(path, tape, 0, 3)) == {
        "input_ids": [[5, 6, 7], [0, 0, 8]],
        "attention_mask": [[1, 1, 1], [0, 0, 1]],
        "position_ids": [[0, 1, 2], [0, 0, 0]],
    }
    step = tape.then(np.array([1, 2]))
    assert lists(fed(path, step, 3, 4)) == {
        "input_ids": [[1], [2]],
        "attention_mask": [[1, 1, 1, 1], [0, 0, 1, 1]],
        "position_ids": [[3], [1]],
    }


def test_right_padding_of_a_growing_cache(tmp_path):
    path = save(decoder(), tmp_path / "m.onnx")
    tape = Tape.of([(5, 6, 7), (8,)], 3, "right").then(np.array([1, 2]))
    assert lists(fed(path, tape, 0, 3))["position_ids"] == [[0, 1, 2], [0, 0, 0]]
    assert lists(fed(path, tape, 0, 3, pad=-1))["position_ids"] == [[0, 1, 2], [0, -1, -1]]
    assert lists(fed(path, tape, 3, 4)) == {
        "input_ids": [[1], [2]],
        "attention_mask": [[1, 1, 1, 1], [1, 0, 0, 1]],
        "position_ids": [[3], [1]],
    }


def test_a_cache_that_is_filled_up_is_masked_in_front(tmp_path):
    path = save(bound({"seq": 1, "past": 5, "total": 6}), tmp_path / "m.onnx")
    tape = Tape.of([(5, 6), (8,)], 2, "left").then(np.array([1, 2]))
    assert lists(fed(path, tape, 2, 3)) == {
        "input_ids": [[1], [2]],
        "attention_mask": [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]],
        "position_ids": [[2], [1]],
    }


def test_slots_by_position_go_on_behind_each_row():
    tape = Tape.of([(5, 6, 7), (8,)], 3, "right")
    assert lists(fed(case(A08), tape, 0, 3, slots=16))["position_ids"] == [[0, 1, 2], [0, 1, 2]]
    step = tape.then(np.array([1, 2]))
    # The row with padding writes over it.
    assert lists(fed(case(A08), step, 3, 4, slots=16))["position_ids"] == [[3], [1]]


def test_slots_by_column_are_told_by_the_mask():
    tape = Tape.of([(5, 6), (8,)], 2, "left").then(np.array([1, 2]))
    arrays = fed(fixture("llama_static"), tape, 1, 3, slots=5)
    assert arrays["attention_mask"].shape == (2, 1, 2, 5)
    assert arrays["attention_mask"].astype(int).tolist() == [
        [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]],
        [[[0, 1, 0, 0, 0], [0, 1, 1, 0, 0]]],
    ]
    assert arrays["position_ids"].tolist() == [[1, 2], [0, 1]]
    assert {arrays[name].item() for name in arrays if name.endswith("cumulative_length")} == {1}


def test_multimodal_positions_of_text_are_alike():
    arrays = fed(FIXTURES / "qwen3_vl_moe" / "decode.onnx", Tape.of([(5, 6, 7)], 3, "left"), 1, 3)
    assert arrays["position_ids"].tolist() == [[[1, 2]]] * 4


# Decoding is the whole sequence at once -------------------------------------------------------------------------------

# Kernels or graphs that take no more: a ring takes no ragged batch, linear attention no more than 64 tokens a call.
REFUSED = {("genai_gptoss", "b2-s7-right"), ("qwen3_5_moe", "b1-s200")}


def check_against_the_whole(path: Any, names: set[str] | None = None, tokens: int = 5) -> Contestants:
    both = contestants(path)
    file = both.parties[0].prompt
    assert file.vocabulary is not None
    prompts = draw_prompts(both.parties, 3, file.vocabulary, tokens)
    prompts = [prompt for prompt in prompts if names is None or prompt.name in names]
    assert len(prompts) >= len(names or ())
    traces = [decode(both, prompt, tokens) for prompt in prompts]
    with Session(both.models(0, traced=False)[0], both.settings) as session:
        for prompt, trace in zip(prompts, traces, strict=True):
            if (path.parent.name, prompt.name) in REFUSED:
                assert trace.failure is not None
                continue
            assert trace.failure is None, (prompt.name, trace.failure)
            own = np.stack(trace.own, axis=1)
            for row, ids in enumerate(prompt.rows):
                whole = at_once(file, session, [*ids, *own[row, :-1].tolist()])
                for number in range(tokens):
                    limit = 4e-3 if file.signature.half else 1e-5
                    found = compare(whole[len(ids) - 1 + number], trace.logits[number][row], limit)
                    assert found.problem is None, (prompt.name, row, number, found)
    return both


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("gemma2", {"b2-s7", "b1-s40-in-2"}),
        ("llama_static", {"b2-s7-left", "b3-s6-right", "b1-s40-in-2"}),
        ("genai_llama", {"b2-s7-right", "b1-s9-buffer"}),
        ("genai_gptoss", {"b2-s3", "b1-s40-in-2"}),
        ("optimum_gpt_oss", {"b2-s7-left"}),
        ("llama_fp16", {"b1-s1", "b1-s5"}),
    ],
)
def test_decoding_gives_what_the_whole_sequence_gives(name, prompts):
    check_against_the_whole(fixture(name), prompts, tokens=4)


def test_linear_attention_hands_its_states_on():
    both = check_against_the_whole(fixture("qwen3_5_moe"), {"b1-s40-in-2"}, tokens=2)
    assert {cache.manner for cache in both.parties[0].prompt.caches} == {Manner.GROW, Manner.STATE}


@pytest.mark.parametrize("name", [A08, "a10", "s07"])
def test_decoding_of_cases(name):
    check_against_the_whole(case(name), tokens=3)


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [path for path in sorted(FIXTURES.glob("*/*.onnx")) if path.stem in {"model", "decode"}],
    ids=lambda path: path.parent.name,
)
def test_every_fixture_decodes_what_the_whole_sequence_gives(path):
    check_against_the_whole(path)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(CASES.glob("[afp]*.onnx")) if path.stem[:3] not in {"a05", "p11"}]
)
def test_every_case_decodes_what_the_whole_sequence_gives(name):
    check_against_the_whole(CASES / f"{name}.onnx")


def test_what_caches_hold_is_alike_whatever_the_convention(tmp_path):
    """A ragged batch padded on either side, or with caches filled up, ends with the same entries."""
    free = save(decoder(), tmp_path / "free.onnx")
    fixed = save(bound({"batch": 2, "seq": 1, "past": 9, "total": 10}), tmp_path / "fixed.onnx")
    rows = ((3, 4, 5, 6), (7, 8))
    kept = []
    for path, side in ((free, "left"), (free, "right"), (fixed, "left")):
        trace = decode(contestants(path), Prompt("p", rows, side=side), 4)  # type: ignore[arg-type]
        assert trace.failure is None
        kept.append(trace.kept["cache:0.key"])
    for other in kept[1:]:
        assert other.array.shape == (12, 1, 16)
        assert other.rows.tolist() == [0] * 7 + [1] * 5
        np.testing.assert_allclose(other.array, kept[0].array, atol=1e-5)
    assert [each.columns.tolist() for each in kept[:2]] == [
        [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 0, 1, 4, 5, 6],
    ]
