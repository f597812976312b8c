"""What experts cost in each form: one wide dense block under every strategy, and a decoder written in three forms.

    python benchmarks/experts.py
    python benchmarks/experts.py --parts wide --tokens 1 1024 --runs 5

The models are those of the bars, made here with random weights: one block of 128 experts, 8 chosen, hidden 1024, inner
512, written densely; and a decoder like Qwen3-MoE, 4 layers, hidden 512, 32 experts, 4 chosen, inner 384, vocabulary
32 k, written grouped (with its weights beside it and inside), batched and as a loop. Every figure is the median of
alternating runs in processes of their own, in ONNX Runtime on the CPU at its default optimisation level with two threads.
Memory is what a process holds over one that has only ONNX Runtime loaded, read from the kernel.
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
    from collections.abc import Mapping

    from graphsurgery.benching.samples import Sample

PARTS = ("wide", "grouped", "batched", "loop")
STRATEGIES = {
    "grouped": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "packed": "gather-experts{strategy=packed,lowering=loop}",
    "packed, 4 lanes": "gather-experts{strategy=packed,lowering=loop,lanes=4}",
    "dense": "gather-experts{strategy=dense}",
}
MOST_GATHERED = 8
"""Tokens whose experts' weights are copied at most: 128 tokens would take 6 GB."""
HEADER = ("point", "model", "ms", "faster", "MB loaded", "of the export's", "MB peak", "of the export's")


# ---- tasks, each in its own process -----------------------------------------------------------------------------------


def step(model: str, length: int, past: int, threads: int, repeats: int) -> dict[str, float]:
    """Latency of a call with ``length`` tokens after ``past``, and memory over a process without a model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    empty = _resident()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = _feeds(session.get_inputs(), length, past)
    session.run(None, feeds)
    loaded = _resident()
    reset_peak()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = session.run(None, feeds)[0]
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(seconds),
        "loaded": loaded - empty,
        "peak": (read_memory().peak or 0) - empty,
        "checksum": float(abs(result).mean()),
    }


def _resident() -> int:
    found = read_memory().resident
    assert found is not None, "memory is read from /proc, which this system does not have"
    return found


def _feeds(inputs: Any, length: int, past: int) -> dict[str, Any]:
    import numpy as np

    generator = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for item in inputs:
        if item.name == "x":
            feeds[item.name] = generator.standard_normal((length, item.shape[1])).astype(np.float32)
        elif item.name == "input_ids":
            feeds[item.name] = generator.integers(0, 32_000, (1, length), dtype=np.int64)
        elif item.name == "position_ids":
            feeds[item.name] = np.arange(past, past + length, dtype=np.int64)[None]
        else:
            heads, features = item.shape[1], item.shape[3]
            feeds[item.name] = generator.standard_normal((1, heads, past, features)).astype(np.float32)
    return feeds


# ---- models -------------------------------------------------------------------------------------------------------------


def _rewritten(export: Path, name: str, spec: str) -> Path:
    """The export after one pass, sharing its data file where it has one."""
    from graphsurgery.workflow import ApplyRequest, apply_passes

    output = export.with_name(f"{export.stem}.{name.replace(', ', '_').replace(' ', '_')}.onnx")
    result = apply_passes(ApplyRequest(input=export, output=output, specs=(spec, "tidy"), force=True))
    assert result.output is not None
    return result.output


def _models(part: str, folder: Path) -> dict[str, Path]:
    from _experts import MixtureSize, WideSize, write_mixture, write_wide

    export = folder / f"{part}.onnx"
    if part == "wide":
        write_wide(export, WideSize())
        return {"export": export, **{name: _rewritten(export, name, spec) for name, spec in STRATEGIES.items()}}
    write_mixture(export, MixtureSize(form=part))  # type: ignore[arg-type]
    models = {"export": export, "grouped": _rewritten(export, "rewritten", STRATEGIES["grouped"])}
    if part == "grouped":
        inside = folder / "grouped_inside.onnx"
        write_mixture(inside, MixtureSize(form="grouped"), external=False)
        models["export, weights inside"] = inside
    return models


def _points(part: str, tokens: list[int]) -> list[tuple[str, int, int, int]]:
    """Name, length, past and repeats of each point."""
    if part == "wide":
        return [(f"wide T={count}", count, 0, 20 if count < 100 else 3) for count in tokens]
    lengths = {"grouped": (512, 1), "batched": (256,), "loop": (512, 1)}[part]
    return [
        (f"{part} {'prefill' if length > 1 else 'decode past'} {length if length > 1 else 512}", length, past, repeats)
        for length, past, repeats in ((length, 0, 3) if length > 1 else (1, 512, 20) for length in lengths)
    ]


# ---- the table ----------------------------------------------------------------------------------------------------------


def _rows(point: str, found: Mapping[str, Mapping[str, Sample]]) -> list[tuple[str, ...]]:
    base = found["export"]
    rows: list[tuple[str, ...]] = []
    for name, samples in found.items():
        seconds = samples["seconds"]
        rows.append(
            (
                point,
                name,
                f"{seconds.median * 1e3:.1f}{' (noisy)' if seconds.noisy else ''}",
                f"{base['seconds'].median / seconds.median:.2f}x",
                *(
                    text
                    for key in ("loaded", "peak")
                    for text in (f"{samples[key].median / 2**20:.0f}", f"{samples[key].ratio(base[key]):.2f}")
                ),
            )
        )
    return rows


def main() -> int:
    """Make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 128, 1024], help="of the wide block")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    data: dict[str, Any] = {}
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="experts-") as name:
            models = _models(part, Path(name))
            for label, length, past, repeats in _points(part, arguments.tokens):
                sizes = {"length": length, "past": past, "threads": arguments.threads, "repeats": repeats}
                runs = {
                    model: Run("step", {"model": str(path), **sizes})
                    for model, path in models.items()
                    if model != "gather" or length <= MOST_GATHERED
                }
                print(label, file=sys.stderr)
                found = alternate(runs, arguments.runs, progress=lambda text: print(" ", text, file=sys.stderr))
                rows += _rows(label, found)
                data[label] = {
                    model: {key: item.to_data() for key, item in samples.items()} for model, samples in found.items()
                }
                if arguments.json is not None:
                    # After each point: a run that is stopped has lost nothing.
                    found_so_far = {"environment": environment("onnxruntime", "onnx"), "points": data}
                    arguments.json.write_text(json.dumps(found_so_far, indent=2) + "\n", encoding="utf-8")
                sums = [samples["checksum"].median for samples in found.values()]
                assert max(sums) - min(sums) <= 1e-4 * max(sums), f"{label}: the models disagree: {sums}"
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    if worker({"step": step}):
        sys.exit(0)
    sys.exit(main())
