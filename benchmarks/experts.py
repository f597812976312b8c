"""What experts cost in each form: one wide dense block under every strategy, and a decoder written in three forms.

    python benchmarks/experts.py
    python benchmarks/experts.py --parts wide --tokens 1 1024 --runs 5
    python benchmarks/experts.py --make exports             # stock exports for `grouped` and `batched`; needs torch
    python benchmarks/experts.py --exports exports          # the same again

The models are those of the bars, with random weights: one block of 128 experts, 8 chosen, hidden 1024, inner 512,
written densely; and Qwen3-MoE, 4 layers, hidden 512, 32 experts, 4 chosen, inner 384, vocabulary 32 k: grouped (with its
weights beside it and inside) and batched as transformers exports them, or spelled so where no export is given, and as a
loop, spelled as Optimum does. Every figure is the median of alternating runs in processes of their own, in ONNX Runtime
on the CPU at its default optimisation level with two threads. Memory is what a process holds over one that has only ONNX
Runtime loaded, read from the kernel: when the session is there, and at most until the first run is over.
"""

from __future__ import annotations

import argparse
import json
import shutil
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
MOST_BATCHED = 256
"""Tokens of the batched export at most: 2048 would take over 20 GB."""
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
    loaded = _resident()
    feeds = _feeds(session.get_inputs(), length, past)
    reset_peak()
    session.run(None, feeds)
    peak = read_memory().peak or 0
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = session.run(None, feeds)[0]
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(seconds),
        "loaded": loaded - empty,
        "peak": peak - empty,
        "checksum": float(abs(result[..., -1, :]).mean()),
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
        elif item.name == "attention_mask":
            feeds[item.name] = np.ones((1, past + length), np.int64)
        else:
            # The exporter writes fixed sizes of caches as names.
            heads, features = int(item.shape[1]), int(item.shape[3])
            feeds[item.name] = generator.standard_normal((1, heads, past, features)).astype(np.float32)
    return feeds


# ---- models -------------------------------------------------------------------------------------------------------------


def _rewritten(export: Path, name: str, *specs: str, recipe: str | None = None) -> Path:
    """The export after passes or a recipe, sharing its data file where it has one."""
    from graphsurgery.workflow import ApplyRequest, apply_passes

    output = export.with_name(f"{export.stem}.{name.replace(', ', '_').replace(' ', '_')}.onnx")
    result = apply_passes(ApplyRequest(input=export, output=output, specs=specs, recipe=recipe, force=True))
    assert result.output is not None
    return result.output


def _export_of(part: str, folder: Path, exports: Path | None) -> Path:
    """The model of a part as it comes from the exporter; a copy, so that nothing is left beside it."""
    from _experts import MixtureSize, write_mixture

    export = folder / f"{part}.onnx"
    stock = exports / part / "model.onnx" if exports is not None else None
    if stock is None or not stock.exists():
        write_mixture(export, MixtureSize(form=part))  # type: ignore[arg-type]
        return export
    for file in (stock, stock.with_name("model.onnx.data")):
        shutil.copyfile(file, folder / file.name)
    return folder / stock.name


def _models(part: str, folder: Path, exports: Path | None) -> dict[str, Path]:
    from _experts import WideSize, write_wide

    if part == "wide":
        export = folder / "wide.onnx"
        write_wide(export, WideSize())
        return {
            "export": export,
            **{name: _rewritten(export, name, spec, "tidy") for name, spec in STRATEGIES.items()},
        }
    export = _export_of(part, folder, exports)
    models = {"export": export, "gather-experts alone": _rewritten(export, "grouped", "gather-experts", "tidy")}
    models |= {f"{name} recipe": _rewritten(export, name, recipe=name) for name in ("prefill", "decode")}
    if part == "grouped":
        import onnx

        inside = folder / "inside.onnx"
        onnx.save_model(onnx.load(export), inside)  # noqa: TID251  all weights are to be inside
        models["export, weights inside"] = inside
    return models


def _is_run(model: str, part: str, length: int) -> bool:
    """Whether a model is run with ``length`` tokens: some would take more memory than there is, others are for others."""
    if model == "gather" or (part, model) == ("batched", "export"):
        return length <= {"wide": MOST_GATHERED, "batched": MOST_BATCHED}[part]
    return model != ("prefill recipe" if length == 1 else "decode recipe") or part == "wide"


def _points(part: str, tokens: list[int]) -> list[tuple[str, int, int, int]]:
    """Name, length, past and repeats of each point."""
    if part == "wide":
        return [(f"wide T={count}", count, 0, 20 if count < 100 else 3 if count < 1000 else 1) for count in tokens]
    lengths = {"grouped": (512, 1), "batched": (256, 2048), "loop": (512, 1)}[part]
    return [
        (f"{part} {'prefill' if length > 1 else 'decode past'} {length if length > 1 else 512}", length, past, repeats)
        for length, past, repeats in ((length, 0, 3) if length > 1 else (1, 512, 20) for length in lengths)
    ]


# ---- the table ----------------------------------------------------------------------------------------------------------


def _rows(point: str, found: Mapping[str, Mapping[str, Sample]]) -> list[tuple[str, ...]]:
    base = found.get("export")
    rows: list[tuple[str, ...]] = []
    for name, samples in found.items():
        seconds = samples["seconds"]
        faster = f"{base['seconds'].median / seconds.median:.2f}x" if base is not None else "-"
        noisy = " (noisy)" if seconds.noisy else ""
        row = [point, name, f"{seconds.median * 1e3:.1f}{noisy}", faster]
        for key in ("loaded", "peak"):
            share = f"{samples[key].ratio(base[key]):.2f}" if base is not None else "-"
            row += [f"{samples[key].median / 2**20:.0f}", share]
        rows.append(tuple(row))
    return rows


def main() -> int:
    """Make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 128, 1024], help="of the wide block")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--make", type=Path, metavar="DIR", help="write stock exports here and use them")
    parser.add_argument("--exports", type=Path, metavar="DIR", help="stock exports that --make wrote")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    exports = arguments.exports
    if arguments.make is not None:
        from _stock import make_mixture

        exports = arguments.make
        for form in ("grouped", "batched"):
            make_mixture(exports / form, form)
    rows: list[tuple[str, ...]] = []
    data: dict[str, Any] = {}
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="experts-") as name:
            models = _models(part, Path(name), exports)
            for label, length, past, repeats in _points(part, arguments.tokens):
                sizes = {"length": length, "past": past, "threads": arguments.threads, "repeats": repeats}
                runs = {
                    model: Run("step", {"model": str(path), **sizes})
                    for model, path in models.items()
                    if _is_run(model, part, length)
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
