"""What blocked attention costs and saves: prefill and decode of a dense export, against the export and against peers.

    python benchmarks/attention.py --export dense/model.onnx
    python benchmarks/attention.py --export dense/model.onnx --peer onnxslim=slim.onnx --lengths 2048 8192

The export is the dense model of the bars: Llama, 4 layers, hidden 512, 8 heads and 2 KV heads of 64, vocabulary 32 k, fp32,
written by a stock exporter (``--make DIR`` writes it with the extra ``[fixtures]``). Each recipe is applied to it; every
figure is the median of alternating runs in processes of their own, in ONNX Runtime on the CPU at its default
optimisation level with two threads. Memory is what the first run takes over the loaded model, read from the kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import Run, Sample, alternate, environment, memory, reset_peak, table, worker

if TYPE_CHECKING:
    from collections.abc import Mapping

RECIPES = ("prefill", "decode", "unified")
DENSE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 16384,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


# ---- tasks, each in its own process -----------------------------------------------------------------------------------


def step(model: str, length: int, past: int, threads: int, repeats: int) -> dict[str, float]:
    """Latency of a call with ``length`` tokens after ``past``, and the memory that its first run takes."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = _feeds(session.get_inputs(), length, past)
    loaded = memory()
    fresh_peak = reset_peak()
    result = session.run(None, feeds)[0]
    first = memory()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        session.run(None, feeds)
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(seconds),
        "over": first.peak - (loaded.resident if fresh_peak else loaded.peak),
        "steady": memory().peak - (loaded.resident if fresh_peak else loaded.peak),
        "checksum": float(abs(result[0, -1]).mean()),
    }


def _feeds(inputs: Any, length: int, past: int) -> dict[str, Any]:
    import numpy as np

    generator = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for item in inputs:
        if item.name == "input_ids":
            feeds[item.name] = generator.integers(0, 1000, (1, length), dtype=np.int64)
        elif item.name == "position_ids":
            feeds[item.name] = np.arange(past, past + length, dtype=np.int64)[None]
        elif item.name == "attention_mask":
            feeds[item.name] = np.ones((1, past + length), np.int64)
        else:
            heads, features = (size if isinstance(size, int) else int(size) for size in (item.shape[1], item.shape[3]))
            feeds[item.name] = generator.standard_normal((1, heads, past, features)).astype(np.float32)
    return feeds


# ---- models -------------------------------------------------------------------------------------------------------------


def make_export(directory: Path) -> Path:
    """Export the dense model with transformers' own exporter; needs the extra ``[fixtures]``."""
    import onnx_ir as ir
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
    from _build import build_model, export_parts
    from _families import Spec

    scales = ((r"embed", 0.7), (r"weight", 0.04))
    spec = Spec("dense", "llama", dict(DENSE), external=True, scales=scales)
    prompt = torch.randint(0, 100, (2, 5), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    program = export_parts(build_model(spec), spec, inputs)["decode"]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.onnx"
    ir.save(program, path, external_data="model.onnx.data")
    return path


def _rewritten(export: Path, directory: Path) -> dict[str, Path]:
    """The export under each recipe, sharing its data file where that lies in the same directory."""
    from graphsurgery.workflow import ApplyRequest, apply_passes

    made = {}
    for recipe in RECIPES:
        output = directory / f"{export.stem}.{recipe}.onnx"
        result = apply_passes(ApplyRequest(input=export, output=output, recipe=recipe, force=True))
        assert result.output is not None
        made[recipe] = result.output
    return made


# ---- the table ----------------------------------------------------------------------------------------------------------


def _rows(point: str, found: Mapping[str, Mapping[str, Sample]]) -> list[tuple[str, ...]]:
    base = found["export"]
    rows: list[tuple[str, ...]] = []
    for name, samples in found.items():
        seconds, over, steady = samples["seconds"], samples["over"], samples["steady"]
        rows.append(
            (
                point,
                name,
                f"{seconds.median * 1e3:.1f}{' (noisy)' if seconds.noisy else ''}",
                f"{base['seconds'].median / seconds.median:.2f}x",
                f"{over.median / 2**20:.0f}",
                f"{over.median / base['over'].median:.3f}",
                f"{steady.median / base['steady'].median:.3f}",
            )
        )
    return rows


def main() -> int:
    """Make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, help="the dense export; its data file is shared")
    parser.add_argument("--make", type=Path, metavar="DIR", help="write the dense export here and use it")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FILE", help="another tool's result")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--pasts", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (arguments.export is None) == (arguments.make is None):
        parser.error("give --export FILE or --make DIR")
    export = make_export(arguments.make) if arguments.make is not None else arguments.export
    models = {"export": export, **_rewritten(export, export.parent)}
    models |= {name: Path(path) for name, path in (item.split("=", 1) for item in arguments.peer)}
    points = [("prefill", length, 0, 2) for length in arguments.lengths]
    points += [("decode", 1, past, 30) for past in arguments.pasts]
    rows: list[tuple[str, ...]] = []
    data: dict[str, Any] = {}
    for phase, length, past, repeats in points:
        label = f"{phase} {length if phase == 'prefill' else past}"
        runs = {
            name: Run(
                "step",
                {
                    "model": str(path),
                    "length": length,
                    "past": past,
                    "threads": arguments.threads,
                    "repeats": repeats,
                },
            )
            for name, path in models.items()
        }
        print(label, file=sys.stderr)
        found = alternate(runs, arguments.runs, progress=lambda text: print(" ", text, file=sys.stderr))
        rows += _rows(label, found)
        data[label] = {name: {key: item.to_json() for key, item in samples.items()} for name, samples in found.items()}
    header = ("point", "model", "ms", "faster", "MB over loaded", "of the export's", "of the export's, steady")
    print(table(header, rows))
    if arguments.json is not None:
        text = json.dumps({"environment": environment("onnxruntime", "onnx"), "points": data}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if worker({"step": step}):
        sys.exit(0)
    sys.exit(main())
