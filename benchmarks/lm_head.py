"""What the LM head costs a prompt, and what is left of it when only the last row of logits is computed.

    python benchmarks/lm_head.py
    python benchmarks/lm_head.py --lengths 512 2048 --runs 5 --json out.json

A Llama-like decoder (4 layers, hidden 512, 8 heads, 2 KV heads of 64, vocabulary 32 k, fp32, random weights) in ONNX
Runtime on the CPU at its default optimisation level with two threads: as it is, and after `prune-last-token{index=last}` at
depth head and norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import Run, Sample, alternate, environment, memory, reset_peak, table, worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEPTHS = ("head", "norm")
_EXPORT = "export"


# ---- tasks, each in its own process ------------------------------------------------------------------------------------


def prefill(model: str, length: int, threads: int, repeats: int) -> dict[str, float]:
    """Latency of a prompt of ``length`` tokens with an empty cache, and the memory that its first run takes."""
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = _feeds(session.get_inputs(), length)
    loaded = memory()
    fresh_peak = reset_peak()
    # All outputs, as a generation loop takes them; logits come first.
    result = session.run(None, feeds)[0]
    first = memory()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        session.run(None, feeds)
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(seconds),
        "loaded": loaded.resident,
        "over": first.peak - (loaded.resident if fresh_peak else loaded.peak),
        "peak": first.peak,
        "rows": result.shape[1],
        "checksum": float(np.abs(result[0, -1]).mean()),
    }


def _feeds(inputs: Any, length: int) -> dict[str, Any]:
    import numpy as np

    # A few tokens only: pages of the embedding that a prompt happens to map would pass for memory of the run.
    tokens = np.random.default_rng(0).integers(0, 64, (1, length))
    feeds: dict[str, Any] = {"input_ids": tokens, "position_ids": np.arange(length)[None]}
    for given in inputs:
        if given.name not in feeds:
            feeds[given.name] = np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32)
    return feeds


def distance(model: str, other: str, length: int) -> dict[str, float]:
    """Largest difference of the last row of logits, relative to max(1, largest)."""
    import numpy as np
    import onnxruntime as ort

    rows = []
    for path in (model, other):
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        rows.append(session.run(["logits"], _feeds(session.get_inputs(), length))[0][0, -1])
    return {"distance": float(np.abs(rows[0] - rows[1]).max() / max(1.0, np.abs(rows[0]).max()))}


TASKS: dict[str, Callable[..., Mapping[str, Any]]] = {task.__name__: task for task in (prefill, distance)}


# ---- running -------------------------------------------------------------------------------------------------------------


def _models(directory: Path) -> dict[str, Path]:
    from _decoder import DecoderSize, write_decoder

    from graphsurgery import Pipeline, load, save

    models = {_EXPORT: directory / "decoder.onnx"}
    write_decoder(models[_EXPORT], DecoderSize())
    for depth in DEPTHS:
        model = load(models[_EXPORT])
        report = Pipeline([f"prune-last-token{{index=last,depth={depth}}}", "tidy"])(model)
        if not report.changed:
            raise AssertionError("prune-last-token did nothing to the decoder: there is nothing to measure.")
        models[f"pruned, depth {depth}"] = save(model, directory / f"pruned-{depth}.onnx").path
    return models


def _rows(length: int, found: Mapping[str, Mapping[str, Sample]]) -> list[tuple[str, ...]]:
    base = found[_EXPORT]
    rows: list[tuple[str, ...]] = []
    for name, figures in found.items():
        seconds, over = figures["seconds"], figures["over"]
        noise = f" (noisy, spread {seconds.spread:.0%})" if seconds.noisy else ""
        rows.append(
            (
                str(length),
                name,
                f"{seconds.median * 1e3:.0f} ms{noise}",
                f"{base['seconds'].ratio(seconds):.2f}x",
                f"{over.median / 1e6:.0f} MB",
                f"{base['over'].ratio(over):.2f}x",
                f"{figures['peak'].median / 1e6:.0f} MB",
            )
        )
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="prompt lengths S")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each model (default: 5)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls in each run, of which the median counts")
    parser.add_argument("--threads", type=int, default=2, help="threads of ONNX Runtime")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    given = parser.parse_args()
    about = environment("graphsurgery", "onnx", "onnx-ir", "onnxruntime", "numpy")
    rows: list[tuple[str, ...]] = []
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        models = _models(Path(directory))
        for name, path in models.items():
            if name != _EXPORT:
                pair = {"model": str(models[_EXPORT]), "other": str(path), "length": min(given.lengths)}
                values[f"distance, {name}"] = Run("distance", pair)()["distance"]
        for length in given.lengths:
            runs = {}
            for name, path in models.items():
                arguments = {"model": str(path), "length": length, "threads": given.threads, "repeats": given.repeats}
                runs[name] = Run("prefill", arguments)
            found = alternate(runs, given.runs, progress=lambda text: print(text, file=sys.stderr))
            rows += _rows(length, found)
            for name, figures in found.items():
                values[f"S={length}, {name}"] = {key: sample.to_json() for key, sample in figures.items()}
    header = ("S", "model", "latency", "faster", "memory over the loaded model", "less", "peak")
    print(table(header, rows))
    if given.json is not None:
        listed = [dict(zip(header, row, strict=True)) for row in rows]
        given.json.write_text(json.dumps({"environment": about, "rows": listed, "values": values}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if worker(TASKS):
        sys.exit(0)
    sys.exit(main())
