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
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import Run, WorkerError, environment, table, worker
from _race import RaceSettings, first_and_steady, race, side_data

from graphsurgery.benching.bench_report import Measurement, NotMeasured
from graphsurgery.benching.points import make_points

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.benching.bench_report import Side

DEPTHS = ("head", "norm")
_EXPORT = "export"


# ---- a task in its own process ----------------------------------------------------------------------------------------


def _feeds(inputs: Any, length: int) -> dict[str, Any]:
    import numpy as np

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


def _rows(length: int, found: Mapping[str, Side]) -> list[tuple[str, ...]]:
    base = found[_EXPORT]
    rows: list[tuple[str, ...]] = []
    for name, side in found.items():
        if not isinstance(side, Measurement) or not isinstance(base, Measurement):
            raise WorkerError(side.reason if isinstance(side, NotMeasured) else "the export was not measured")
        seconds, (over, _), (base_over, _) = side.latency, first_and_steady(side), first_and_steady(base)
        noise = f" (noisy, spread {seconds.spread:.0%})" if seconds.noisy else ""
        rows.append(
            (
                str(length),
                name,
                f"{seconds.median * 1e3:.0f} ms{noise}",
                f"{base.latency.ratio(seconds):.2f}x",
                f"{over / 1e6:.0f} MB",
                f"{base_over / over:.2f}x",
                f"{(side.first_peak_bytes or 0) / 1e6:.0f} MB",
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
        settings = RaceSettings(rounds=given.runs, repeats=given.repeats, threads=given.threads)
        raced = race(models, make_points(given.lengths, (), 1), settings, lambda text: print(text, file=sys.stderr))
        for point, found in raced.items():
            rows += _rows(point.length, found)
            values |= {f"S={point.length}, {name}": side_data(side) for name, side in found.items()}
    header = ("S", "model", "latency", "faster", "memory over the loaded model", "less", "peak")
    print(table(header, rows))
    if given.json is not None:
        listed = [dict(zip(header, row, strict=True)) for row in rows]
        given.json.write_text(json.dumps({"environment": about, "rows": listed, "values": values}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if worker({"distance": distance}):
        sys.exit(0)
    sys.exit(main())
