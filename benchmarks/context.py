"""What a decode step costs that attends all slots of a fixed-size cache, and one that attends only those in use.

    python benchmarks/context.py
    python benchmarks/context.py --slots 4096 --position 100 --bounds 512 1024 4096 --runs 5 --json out.json

A Llama-like decoder (4 layers, hidden 512, 8 heads, 2 KV heads of 64, vocabulary 32 k, fp32, random weights) with caches of
N slots, in ONNX Runtime on the CPU at its default optimisation level with two threads: one token at a position, as the
model is, and after `bound-context` with C slots fed, and with `block-attention` behind it, which expands no keys.
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

from _measure import Run, alternate, environment, table, worker

from graphsurgery.benching.memory import read_memory, reset_peak

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphsurgery.benching.samples import Sample

_EXPORT = "export"
_PASSES = {
    "bound-context": ["bound-context", "tidy"],
    "and block-attention": ["bound-context", "block-attention", "tidy"],
}


# ---- tasks, each in its own process ------------------------------------------------------------------------------------


def step(model: str, slots: int, position: int, bound: int, threads: int, repeats: int) -> dict[str, float]:
    """Latency of one token at ``position``, and the memory that its first run takes."""
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = _feeds(session.get_inputs(), slots, position, bound)
    loaded = read_memory()
    fresh_peak = reset_peak()
    result = session.run(None, feeds)[0]
    first = read_memory()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        session.run(None, feeds)
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(seconds),
        "over": (first.peak or 0) - ((loaded.resident if fresh_peak else loaded.peak) or 0),
        "checksum": float(np.abs(result[0, -1]).mean()),
    }


def _feeds(inputs: Any, slots: int, position: int, bound: int) -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        "input_ids": random.integers(0, 64, (1, 1)),
        "position_ids": np.full((1, 1), position),
    }
    for given in inputs:
        if given.name == "comp_ctx_lengths":
            feeds[given.name] = np.zeros(bound, np.int64)
        elif given.name not in feeds:
            feeds[given.name] = np.zeros((1, given.shape[1], slots, given.shape[3]), np.float32)
            used = feeds[given.name][:, :, :position]
            used[...] = random.standard_normal(used.shape)
    return feeds


TASKS: dict[str, Callable[..., Mapping[str, Any]]] = {step.__name__: step}


# ---- running -------------------------------------------------------------------------------------------------------------


def _models(directory: Path) -> dict[str, Path]:
    from _decoder import DecoderSize, write_decoder

    from graphsurgery import Pipeline, load, save

    models = {_EXPORT: directory / "decoder.onnx"}
    write_decoder(models[_EXPORT], DecoderSize(static=True))
    for name, passes in _PASSES.items():
        model = load(models[_EXPORT])
        report = Pipeline(passes)(model)
        if report.passes[0].count("rewritten") == 0:
            raise AssertionError("bound-context did nothing to the decoder: there is nothing to measure.")
        models[name] = save(model, directory / f"{len(models)}.onnx").path
    return models


def _rows(found: Mapping[str, Mapping[str, Sample]]) -> list[tuple[str, ...]]:
    base = found[_EXPORT]
    rows: list[tuple[str, ...]] = []
    for name, figures in found.items():
        seconds, over = figures["seconds"], figures["over"]
        noise = f" (noisy, spread {seconds.spread:.0%})" if seconds.noisy else ""
        rows.append(
            (
                name,
                f"{seconds.median * 1e3:.1f} ms{noise}",
                f"{base['seconds'].ratio(seconds):.2f}x",
                f"{over.median / 1e6:.0f} MB",
                f"{figures['checksum'].median:.6f}",
            )
        )
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--slots", type=int, default=4096, help="slots of the caches, N")
    parser.add_argument("--position", type=int, default=100, help="position of the token")
    parser.add_argument("--bounds", type=int, nargs="+", default=[512, 4096], help="slots that are read, C")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each model (default: 5)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls in each run, of which the median counts")
    parser.add_argument("--threads", type=int, default=2, help="threads of ONNX Runtime")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    given = parser.parse_args()
    about = environment("graphsurgery", "onnx", "onnx-ir", "onnxruntime", "numpy")
    with tempfile.TemporaryDirectory() as directory:
        runs: dict[str, Run] = {}
        shared = {key: getattr(given, key) for key in ("slots", "position", "threads", "repeats")}
        for name, path in _models(Path(directory)).items():
            for bound in given.bounds if name != _EXPORT else [given.slots]:
                label = name if name == _EXPORT else f"{name}, C={bound}"
                runs[label] = Run("step", {"model": str(path), "bound": bound, **shared})
        found = alternate(runs, given.runs, progress=lambda text: print(text, file=sys.stderr))
    rows = _rows(found)
    header = ("model", "latency", "faster", "memory over the loaded model", "mean of the logits")
    print(table(header, rows))
    if given.json is not None:
        values = {name: {key: sample.to_data() for key, sample in figures.items()} for name, figures in found.items()}
        listed = [dict(zip(header, row, strict=True)) for row in rows]
        given.json.write_text(json.dumps({"environment": about, "rows": listed, "values": values}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if worker(TASKS):
        sys.exit(0)
    sys.exit(main())
