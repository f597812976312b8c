"""Disaggregated serving of gpt-oss: one file for prompts, one for single tokens, the cache handed over while the prompt runs.

    python examples/disaggregated_gpt_oss.py                      # on the committed export
    python examples/disaggregated_gpt_oss.py --model model.onnx   # on yours

docs/disaggregated-serving.md tells what happens.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from _handover import Arrays, DecodeWorker, chunks_of, greedy, open_model

import graphsurgery

ROOT = Path(__file__).parents[1]
EXPORT = ROOT / "fixtures" / "gpt_oss_grouped" / "model.onnx"


def positions(past: int) -> np.ndarray:
    """``position_ids [1, 1]`` of the token behind ``past`` others."""
    return np.array([[past]], np.int64)


def make_files(export: Path, folder: Path) -> tuple[Path, Path]:
    """The prefill file and the decode file of one export."""
    made = []
    for recipe in ("prefill", "decode"):
        model = graphsurgery.load(export)
        graphsurgery.Pipeline.from_recipe(recipe)(model)
        graphsurgery.save(model, folder / f"{recipe}.onnx")
        made.append(folder / f"{recipe}.onnx")
    return made[0], made[1]


def empty_caches(model: Path, window: int) -> Arrays:
    """What the first call is fed: caches of no position, and the width of the window where it is asked for."""
    caches: Arrays = {}
    for value in open_model(model).get_inputs():
        if value.name.endswith((".keys", ".values")):
            caches[value.name] = np.zeros((1, int(value.shape[1]), 0, int(value.shape[3])), np.float32)
        elif value.name.endswith("_sliding_window_tensor"):
            caches[value.name] = np.array(window, np.int64)
    return caches


def serve(
    export: Path, prompt: np.ndarray, steps: int, *, window: int, call: int, chunk: int, folder: Path
) -> np.ndarray:
    """Answer ``prompt`` with a prefill worker and a decode worker.

    Args:
        export: the exporter's file.
        prompt: token ids ``[1, S]``.
        steps: tokens to generate behind the first.
        window: width of the sliding window of the family.
        call: prompt tokens in one call of the prefill file.
        chunk: positions of the cache in one message.
        folder: where the two files are written.

    Returns:
        The answer, ``[1, 1 + steps]``.
    """
    prefill_file, decode_file = make_files(export, folder)
    worker = DecodeWorker(decode_file, positions)
    prefill = open_model(prefill_file)
    outputs = [value.name for value in prefill.get_outputs()]
    caches = empty_caches(prefill_file, window)
    sent = messages = 0
    for start in range(0, prompt.shape[1], call):
        tokens = prompt[:, start : start + call]
        place = np.arange(start, start + tokens.shape[1], dtype=np.int64)[None]
        results = dict(
            zip(outputs, prefill.run(None, {**caches, "input_ids": tokens, "position_ids": place}), strict=True)
        )
        caches = {name: results[name.replace("input.", "output.", 1)] for name in caches}
        # What this call has added goes out while the next call runs.
        for piece in chunks_of(caches, chunk, start):
            sent += worker.send(piece)
            messages += 1
    # The prefill file computes one row of logits: that of the last token.
    first = np.argmax(results["logits"][:, -1], axis=-1)
    answer = worker.generate(first, steps)
    worker.close()
    print(f"prompt of {prompt.shape[1]} tokens; {messages} messages with {sent} bytes of cache; {1 + steps} tokens")
    return answer


def reference(export: Path, prompt: np.ndarray, steps: int, window: int) -> np.ndarray:
    """The same by the exporter's own file, in one process."""
    session = open_model(export)
    outputs = [value.name for value in session.get_outputs()]
    caches = empty_caches(export, window)
    place = np.arange(prompt.shape[1], dtype=np.int64)[None]
    results = dict(zip(outputs, session.run(None, {**caches, "input_ids": prompt, "position_ids": place}), strict=True))
    caches = {name: results[name.replace("input.", "output.", 1)] for name in caches}
    return greedy(session, caches, np.argmax(results["logits"][:, -1], axis=-1), steps, positions)


def main() -> None:
    """Serve one prompt both ways and compare the tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXPORT, help="an export with input.cache.layers.N inputs")
    parser.add_argument("--prompt", type=int, default=40, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=39, help="tokens to generate behind the first")
    parser.add_argument("--window", type=int, default=8, help="sliding window of the family")
    parser.add_argument("--call", type=int, default=16, help="prompt tokens in one prefill call")
    parser.add_argument("--chunk", type=int, default=8, help="positions of the cache in one message")
    given = parser.parse_args()
    prompt = np.random.default_rng(0).integers(0, 64, (1, given.prompt))
    with tempfile.TemporaryDirectory() as folder:
        answer = serve(
            given.model,
            prompt,
            given.steps,
            window=given.window,
            call=given.call,
            chunk=given.chunk,
            folder=Path(folder),
        )
    expected = reference(given.model, prompt, given.steps, given.window)
    print("tokens:", *answer[0])
    if not np.array_equal(answer, expected):
        raise SystemExit(f"The exporter's own file gives other tokens: {expected[0].tolist()}")
    print("the exporter's own file gives the same tokens")


if __name__ == "__main__":
    main()
