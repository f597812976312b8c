"""Disaggregated serving of Qwen3-VL-MoE: a prompt with an image on one worker, the answer on another.

    python examples/disaggregated_qwen3_vl_moe.py

The exporter writes the model in parts: a language model that takes embeddings (text and image mixed) and gives hidden states, the
LM head, and a decoder for tokens. docs/disaggregated-serving.md tells what happens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
from _handover import Arrays, DecodeWorker, chunks_of, greedy, open_model

import graphsurgery

ROOT = Path(__file__).parents[1]
PARTS = ROOT / "fixtures" / "qwen3_vl_moe"
GRID = (4, 4)  # rows and columns of image tokens


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Text, an image, text.

    Attributes:
        tokens: token ids ``[1, S]``; what stands at the image's places does not matter.
        image: True on the image's places, ``[1, S]``.
        positions: ``[4, 1, S]``: place in the sequence; then time, row and column for the rotary embedding.
        shift: by how much positions run behind places after the image.
    """

    tokens: np.ndarray
    image: np.ndarray
    positions: np.ndarray
    shift: int


def make_prompt(before: int, after: int, grid: tuple[int, int], vocabulary: int, seed: int) -> Prompt:
    """A prompt of ``before`` text tokens, an image of ``grid`` tokens, and ``after`` text tokens."""
    rows, columns = grid
    length = before + rows * columns + after
    image = np.zeros((1, length), bool)
    image[:, before : before + rows * columns] = True
    behind = before + max(grid)
    row, column = np.divmod(np.arange(rows * columns), columns)
    text = np.arange(before)
    tail = np.arange(behind, behind + after)
    axes = [(text, np.full(rows * columns, before), tail), (text, before + row, tail), (text, before + column, tail)]
    positions = np.stack([np.arange(length), *(np.concatenate(axis) for axis in axes)])[:, None].astype(np.int64)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (1, length))
    return Prompt(tokens, image, positions, behind - before - rows * columns)


def positions_after(past: int, shift: int) -> np.ndarray:
    """``position_ids [4, 1, 1]`` of the text token behind ``past`` others."""
    return np.array([past, past + shift, past + shift, past + shift], np.int64).reshape(4, 1, 1)


def embedding_table(decoder: Path) -> np.ndarray:
    """The table ``[V, H]`` from which the decoder looks up its tokens: the prompt's text is embedded with it too."""
    model = ir.load(decoder)
    tokens = next(value for value in model.graph.inputs if value.name == "input_ids")
    lookup = next(use.node for use in tokens.uses() if use.node.op_type == "Gather" and use.idx == 1)
    table = lookup.inputs[0]
    assert table is not None
    assert table.const_value is not None
    return table.const_value.numpy()


def feed_prompt(prompt: Prompt, table: np.ndarray, seed: int) -> Arrays:
    """What the language model is fed: random numbers stand in for what a vision tower makes of an image."""
    generator = np.random.default_rng(seed)
    embeddings = table[prompt.tokens]
    count, width = int(prompt.image.sum()), table.shape[1]
    embeddings[prompt.image] = generator.standard_normal((count, width), np.float32) * table.std()
    deep = [generator.standard_normal((count, width), np.float32) * table.std() for _ in range(2)]
    return {
        "inputs_embeds": embeddings,
        "position_ids": prompt.positions,
        "visual_pos_masks": prompt.image,
        "deepstack_visual_embeds.0": deep[0],
        "deepstack_visual_embeds.1": deep[1],
    }


def first_token(language: Path, head: Path, feeds: Arrays) -> tuple[np.ndarray, Arrays]:
    """The first token of the answer ``[1]``, and the caches by name of the decoder's inputs."""
    session = open_model(language)
    names = [value.name for value in session.get_outputs()]
    results = dict(zip(names, session.run(None, feeds), strict=True))
    hidden = results.pop("last_hidden_state")
    print(f"{language.name}: hidden states {list(hidden.shape)}")
    logits = open_model(head).run(None, {"input": hidden[:, -1:]})[0]
    return np.argmax(logits[:, -1], axis=-1), {f"input.{name}": array for name, array in results.items()}


def main() -> None:
    """Serve one prompt both ways and compare the tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", type=Path, default=PARTS, help="folder with language_model, lm_head and decode .onnx"
    )
    parser.add_argument("--before", type=int, default=6, help="text tokens before the image")
    parser.add_argument("--after", type=int, default=10, help="text tokens behind it")
    parser.add_argument("--steps", type=int, default=39, help="tokens to generate behind the first")
    parser.add_argument("--chunk", type=int, default=8, help="positions of the cache in one message")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt and the image")
    given = parser.parse_args()
    export, head, decode = (given.parts / f"{name}.onnx" for name in ("language_model", "lm_head", "decode"))
    table = embedding_table(decode)
    prompt = make_prompt(given.before, given.after, GRID, table.shape[0], given.seed)
    feeds = feed_prompt(prompt, table, given.seed)
    place = functools.partial(positions_after, shift=prompt.shift)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source, recipe in ((export, "prefill"), (decode, "decode")):
            model = graphsurgery.load(source)
            graphsurgery.Pipeline.from_recipe(recipe)(model)
            graphsurgery.save(model, folder / f"{recipe}.onnx")
        worker = DecodeWorker(folder / "decode.onnx", place)
        token, caches = first_token(folder / "prefill.onnx", head, feeds)
        sent = [worker.send(piece) for piece in chunks_of(caches, given.chunk)]
        print(f"prompt of {prompt.tokens.shape[1]} tokens; {len(sent)} messages with {sum(sent)} bytes of cache")
        answer = worker.generate(token, given.steps)
        worker.close()

    token, caches = first_token(export, head, feeds)
    expected = greedy(open_model(decode), caches, token, given.steps, place)
    print("tokens:", *answer[0])
    if not np.array_equal(answer, expected):
        raise SystemExit(f"The exporter's own files give other tokens: {expected[0].tolist()}")
    print("the exporter's own files give the same tokens")


if __name__ == "__main__":
    main()
