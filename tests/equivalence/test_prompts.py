from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphsurgery.equivalence.prompt_drawing import draw_prompts
from graphsurgery.equivalence.prompts import given_prompts
from graphsurgery.errors import UsageError
from tests.equivalence.builders import FIXTURES
from tests.equivalence.decoders import contestants

MODEL = Path("models/model.onnx")


def rows(*given: Any, batch: int | None = None) -> list[tuple[tuple[int, ...], ...]]:
    return [prompt.rows for prompt in given_prompts(given, MODEL, 64, batch)]


def refused(*given: Any, model: Path = MODEL, vocabulary: int | None = 64) -> str:
    with pytest.raises(UsageError) as error:
        given_prompts(given, model, vocabulary, None)
    return str(error.value)


# ---- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["1,2,3", " 1, 2 ,3,", [1, 2, 3], np.array([1, 2, 3])])
def test_ids(given):
    assert rows(given) == [((1, 2, 3),)]


def test_several_prompts_alone_and_together():
    prompts = given_prompts(["1,2", "3"], MODEL, 64, None)
    assert [(prompt.name, prompt.rows, prompt.seed) for prompt in prompts] == [
        ("prompt-0", ((1, 2),), None),
        ("prompt-1", ((3,),), None),
        ("all-prompts", ((1, 2), (3,)), None),
    ]


def test_a_fixed_batch_is_filled_up_from_the_first():
    assert rows("1", "2", "3", batch=2) == [((1,), (2,)), ((3,), (1,))]
    assert rows("1", batch=3) == [((1,), (1,), (1,))]
    assert rows("1", "2", batch=1) == [((1,),), ((2,),)]


def test_ids_must_be_tokens():
    assert refused("1,64") == "Prompt id 64 is no token of models/model.onnx, which takes 0 to 63."
    assert refused("-1") == "Prompt id -1 is no token of models/model.onnx, which takes 0 to 63."
    assert refused("-1", vocabulary=None) == "Prompt id -1 is no token of models/model.onnx, which takes 0 and up."
    assert refused([]) == "A prompt is empty: give at least one token."
    assert refused() == "No prompt was given."


# ---- files ------------------------------------------------------------------------------------------------------------


def test_files_of_ids(tmp_path):
    np.savez(tmp_path / "ids.npz", one=np.array([1, 2]), two=np.array([[3, 4], [5, 6]], np.int32))
    assert rows(tmp_path / "ids.npz")[:3] == [((1, 2),), ((3, 4),), ((5, 6),)]
    (tmp_path / "one.json").write_text("[1, 2]")
    assert rows(str(tmp_path / "one.json")) == [((1, 2),)]
    (tmp_path / "two.json").write_text("[[1, 2], [3]]")
    assert rows(tmp_path / "two.json")[-1] == ((1, 2), (3,))
    (tmp_path / "ids.txt").write_text("7,8\n")
    assert rows(tmp_path / "ids.txt") == [((7, 8),)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"[1, 2", "The prompt file {} cannot be read as JSON: "),
        ("a.json", b"[1, 2.5]", "The prompt file {} must hold a list of token ids, or a list of such lists."),
        ("a.json", b"[1, true]", "The prompt file {} must hold a list of token ids, or a list of such lists."),
        ("a.json", b"[[1], 2]", "The prompt file {} must hold a list of token ids, or a list of such lists."),
        ("a.json", b'{"ids": [1]}', "The prompt file {} must hold a list of token ids, or a list of such lists."),
        ("a.npz", b"no archive", "The prompt file {} cannot be read as .npz: "),
        ("a.txt", b"\xff\xfe\xff", "The prompt file {} cannot be read as text: "),
    ],
)
def test_files_that_hold_no_prompt(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    assert refused(path).startswith(words.format(path))


def test_arrays_that_are_no_ids(tmp_path):
    path = tmp_path / "ids.npz"
    np.savez(path, floats=np.array([1.0]))
    assert refused(path) == f"Array floats of the prompt file {path} must hold integers, [S] or [B, S]."


def test_files_that_are_not_there(tmp_path):
    assert refused(tmp_path / "gone.txt") == f"The prompt file {tmp_path / 'gone.txt'} does not exist."
    assert refused("gone.json") == "The prompt file gone.json does not exist."


# ---- text -------------------------------------------------------------------------------------------------------------


class _Tokenizer:
    """As the package has it: a token for each character."""

    @staticmethod
    def from_file(path: str) -> _Tokenizer:
        if json.loads(Path(path).read_text()) != {"kind": "letters"}:
            raise Exception("no such model")  # as the real binding does
        return _Tokenizer()

    def encode(self, text: str) -> Any:
        return types.SimpleNamespace(ids=[ord(letter) - ord("a") for letter in text])


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=_Tokenizer))
    (tmp_path / "tokenizer.json").write_text('{"kind": "letters"}')
    return tmp_path / "model.onnx"


def test_text_is_read_by_the_tokenizer_beside_the_model(model, tmp_path):
    (tmp_path / "prompt.txt").write_text("bad")
    prompts = given_prompts(["cab", tmp_path / "prompt.txt"], model, 64, None)
    assert prompts[-1].rows == ((2, 0, 1), (1, 0, 3))


def test_text_without_a_tokenizer(model):
    model.with_name("tokenizer.json").unlink()
    assert refused("Once upon a time", model=model) == (
        f"The prompt is text and there is no {model.with_name('tokenizer.json')}: put the model's tokenizer there,"
        " or give token ids, such as 1,2,3."
    )


def test_text_without_the_package(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refused("Once upon a time", model=model) == (
        "The prompt is text, which needs the package tokenizers: pip install tokenizers,"
        " or give token ids, such as 1,2,3."
    )


def test_a_tokenizer_that_cannot_be_read(model):
    path = model.with_name("tokenizer.json")
    path.write_text("{}")
    assert refused("abc", model=model) == (f"{path} is no tokenizer that the package tokenizers reads: no such model.")


# ---- drawn ------------------------------------------------------------------------------------------------------------


def drawn(name: str, *, tokens: int = 6) -> dict[str, tuple[int, ...]]:
    both = contestants(FIXTURES / name / "model.onnx")
    return {prompt.name: prompt.lengths for prompt in draw_prompts(both.parties, 0, 64, tokens)}


def test_each_length_and_each_kind_of_batch_is_drawn_once():
    alone = {"b1-s5": (5,), "b1-s1": (1,), "b1-s40-in-2": (40,), "b1-s200": (200,)}
    # No mask: rows are of one length.
    assert drawn("llama") == alone | {"b2-s7": (7, 7)}
    assert drawn("optimum_llama") == alone | {"b2-s7-left": (7, 4), "b3-s6-right": (6, 3, 2), "b2-s3": (3, 3)}
    # One buffer for past and present.
    assert drawn("genai_llama") == alone | {"b2-s7-right": (7, 4), "b2-s3": (3, 3), "b1-s9-buffer": (9,)}


def test_ids_are_within_the_vocabulary_and_follow_from_the_seed():
    both = contestants(FIXTURES / "llama" / "model.onnx")
    first, again, other = (draw_prompts(both.parties, seed, 7, 4) for seed in (1, 1, 2))
    assert first == again != other
    assert {token for prompt in first for row in prompt.rows for token in row} == set(range(7))
