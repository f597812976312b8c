"""`benchmarks/_decoder.py`: the decoder that is measured is a causal language model with a cache."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _decoder import DecoderSize, write_decoder

SIZE = DecoderSize(layers=2, hidden=32, heads=4, kv_heads=2, head=8, inner=48, vocabulary=64)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> ort.InferenceSession:
    path = tmp_path_factory.mktemp("decoder") / "decoder.onnx"
    assert write_decoder(path, SIZE) == 166
    assert path.stat().st_size < 40_000
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def call(session: ort.InferenceSession, tokens: np.ndarray, cache: list[np.ndarray]) -> list[np.ndarray]:
    past = cache[0].shape[2]
    positions = np.arange(past, past + tokens.shape[1])[None].repeat(len(tokens), 0)
    names = [given.name for given in session.get_inputs()]
    results: list[np.ndarray] = session.run(None, dict(zip(names, [tokens, positions, *cache], strict=True)))
    return results


def test_a_prompt_in_two_parts_gives_the_logits_of_the_whole(session: ort.InferenceSession) -> None:
    tokens = np.random.default_rng(0).integers(0, 64, (2, 9))
    empty = [np.zeros((2, 2, 0, 8), np.float32)] * 4
    whole, *_ = call(session, tokens, empty)
    first, *cache = call(session, tokens[:, :5], empty)
    second, *_ = call(session, tokens[:, 5:], cache)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-5)


def test_logits_do_not_depend_on_later_tokens(session: ort.InferenceSession) -> None:
    tokens = np.random.default_rng(0).integers(0, 64, (1, 6))
    changed = tokens.copy()
    changed[0, 3] ^= 1
    empty = [np.zeros((1, 2, 0, 8), np.float32)] * 4
    before, after = (call(session, given, empty)[0] for given in (tokens, changed))
    np.testing.assert_allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert np.abs(before[:, 3:] - after[:, 3:]).max(-1).min() > 1e-3


def test_caches_of_a_fixed_size_give_the_same_logits(session: ort.InferenceSession, tmp_path: Path) -> None:
    write_decoder(tmp_path / "static.onnx", dataclasses.replace(SIZE, static=True))
    static = ort.InferenceSession(str(tmp_path / "static.onnx"), providers=["CPUExecutionProvider"])
    tokens = np.random.default_rng(0).integers(0, 64, (2, 6))
    whole, *_ = call(session, tokens, [np.zeros((2, 2, 0, 8), np.float32)] * 4)
    names = [given.name for given in static.get_inputs()]
    cache = [np.full((2, 2, 9, 8), 7, np.float32)] * 4
    found = []
    for start, stop in ((0, 4), (4, 6)):
        positions = np.arange(start, stop)[None].repeat(2, 0)
        logits, *cache = static.run(None, dict(zip(names, [tokens[:, start:stop], positions, *cache], strict=True)))
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, 1), whole, atol=1e-5)
