"""What the surgeon costs: the `prefill` recipe on grown exports, against what onnx-ir takes to load and save them.

    python benchmarks/surgeon.py                    # everything, some minutes
    python benchmarks/surgeon.py --only dense help  # some parts
    python benchmarks/surgeon.py --json out.json    # all values

Parts: `dense` and `experts` (recipe against load + save), `scaling` (layers and experts x4, every recipe), `memory` (peak with and without gigabytes of weights),
`absent` (the command line with the data file removed), `regions` (region verification of more layers), `help` (import and --help).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import Run, alternate, environment, table, worker

from graphsurgery.benching.memory import read_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphsurgery.benching.samples import Sample

ROOT = Path(__file__).parents[1]
PARTS = ("dense", "experts", "scaling", "memory", "absent", "regions", "help")
_RECIPE = "prefill"
_RECIPES = ("prefill", "decode", "unified", "npu-prefill", "npu-decode")


# ---- tasks, each in its own process ------------------------------------------------------------------------------------


def load_and_save(model: str, result: str, output: str) -> dict[str, float]:
    """onnx-ir alone, loading ``model`` and saving ``result``: what any tool that uses it pays."""
    import onnx_ir as ir

    changed = ir.load(result)
    gc.collect()
    started, cpu = time.perf_counter(), time.process_time()
    ir.load(model)
    ir.save(changed, output)
    return {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}


def recipe(model: str, output: str, name: str = _RECIPE) -> dict[str, float]:
    """A recipe in process, from file to file; modules are imported before the clock starts."""
    from graphsurgery import Pipeline
    from graphsurgery.workflow import ApplyRequest, apply_passes

    Pipeline.from_recipe(name)
    gc.collect()
    started, cpu = time.perf_counter(), time.process_time()
    report = apply_passes(ApplyRequest(input=Path(model), output=output, recipe=name, force=True)).report
    done, used = time.perf_counter(), time.process_time() - cpu
    if not report.changed:
        raise AssertionError(f"Recipe {name} did nothing to {model}: there is nothing to measure.")
    passes = {item.name: item.seconds for item in report.passes}
    return {"seconds": done - started, "cpu": used, "peak": read_memory().peak or 0, **passes}


def verify_regions(model: str, result: str) -> dict[str, float]:
    """Region verification of a recipe's result, and what reading both graphs takes of it; no data file is there."""
    from graphsurgery import load
    from graphsurgery.analysis.shapes import shapes_of
    from graphsurgery.equivalence.verify import verify_models

    started, cpu = time.perf_counter(), time.process_time()
    report = verify_models(Path(model), Path(result), depth="regions")
    done, used = time.perf_counter(), time.process_time() - cpu
    if report.status != "equal":
        raise AssertionError(f"{result} is {report.status}: {'; '.join(report.reasons)}")
    for path in (model, result):
        shapes_of(load(path))
    reading = time.perf_counter() - done
    return {"seconds": done - started, "cpu": used, "reading": reading, "regions": len(report.regions)}


def help_text() -> dict[str, float]:
    """A new interpreter that imports the package and prints its help."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "graphsurgery", "--help"], check=True, capture_output=True)
    return {"seconds": time.perf_counter() - started}


def bare_python() -> dict[str, float]:
    """A new interpreter that does nothing, for comparison."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return {"seconds": time.perf_counter() - started}


TASKS: dict[str, Callable[..., Mapping[str, Any]]] = {
    task.__name__: task for task in (load_and_save, recipe, verify_regions, help_text, bare_python)
}


# ---- the parts -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bench:
    """The models and the rows found so far.

    Attributes:
        directory: where models are grown.
        runs: rounds of each comparison.
        rows: of the final table: what, measured, bar, verdict, remark.
        values: all samples, for the JSON file.
    """

    directory: Path
    runs: int
    rows: list[tuple[str, str, str, str, str]] = dataclasses.field(default_factory=list)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self, name: str, fixture: str, **options: Any) -> tuple[Path, int]:
        """A grown model and its number of nodes, made once."""
        path = self.directory / f"{name}.onnx"
        key = f"nodes of {name}"
        if not path.exists():
            say(f"growing {name}")
            self.values[key] = _grow(ROOT / "fixtures" / fixture / "model.onnx", path, options)
        return path, self.values[key]

    def llama(self, layers: int, external_bytes: int | None) -> tuple[Path, int]:
        """Llama of ``layers`` with weights of that size in a sparse file, or without a data file."""
        if external_bytes is None:
            return self.model(f"llama-{layers}-absent", "llama", layers=layers, data=False)
        name = f"llama-{layers}-{external_bytes // 10**9}gb"
        return self.model(name, "llama", layers=layers, external_bytes=external_bytes)

    def compare(self, runs: Mapping[str, Run]) -> dict[str, dict[str, Sample]]:
        """Alternating runs; their samples are kept for the JSON file."""
        samples = alternate(runs, self.runs, progress=say)
        for name, figures in samples.items():
            self.values[name] = {key: sample.to_data() for key, sample in figures.items()}
        return samples

    def row(self, what: str, measured: str, bar: str, passed: bool, remark: str, *samples: Sample) -> None:
        """Add a row; noisy samples are said to be so."""
        noise = max((sample.spread for sample in samples), default=0.0)
        note = f"; noisy machine, spread {noise:.0%}" if any(sample.noisy for sample in samples) else ""
        self.rows.append((what, measured, bar, "met" if passed else "MISSED", f"{remark}{note}"))


def measure_dense(bench: Bench) -> None:
    """The recipe against load + save, on a dense model."""
    _measure_time(bench, "Llama, 32 layers", *bench.llama(32, 3 * 10**9))


def measure_experts(bench: Bench) -> None:
    """The recipe against load + save, on a large mixture of experts."""
    grown = bench.model("moe-48-128", "qwen3_moe_grouped", layers=48, experts=128, data=False)
    _measure_time(bench, "Qwen3-MoE grouped, 48 layers, 128 experts", *grown)


def _measure_time(bench: Bench, name: str, path: Path, nodes: int) -> None:
    base, ours = (f"{path.stem}: {task}" for task in ("load + save", "recipe"))
    result, copy = str(path.with_suffix(".pruned.onnx")), str(path.with_suffix(".base.onnx"))
    mine = Run("recipe", {"model": str(path), "output": result})
    say(f"{path.stem}: the result that is saved in comparison")
    mine()
    found = bench.compare(
        {base: Run("load_and_save", {"model": str(path), "result": result, "output": copy}), ours: mine}
    )
    seconds, theirs = found[ours]["seconds"], found[base]["seconds"]
    ratio, cpu = (found[ours][figure].ratio(found[base][figure]) for figure in ("seconds", "cpu"))
    passes = {name: sample.median for name, sample in found[ours].items() if name not in ("seconds", "cpu", "peak")}
    parts = ", ".join(f"{name} {median:.2f}" for name, median in passes.items())
    remark = f"{seconds.median:.2f} s ({parts}) against {theirs.median:.2f} s; CPU time {cpu:.2f}x; {nodes} nodes"
    bench.row(f"time, {name}", f"{ratio:.2f}x", "<= 2.0x", ratio <= 2.0, remark, seconds, theirs)


def measure_scaling(bench: Bench) -> None:
    """Four times the layers, and four times the experts, under every recipe."""
    dense = bench.llama(32, None), bench.model("llama-128-absent", "llama", layers=128, data=False)
    wide = [
        bench.model(f"moe-4-{experts}", "qwen3_moe_grouped", layers=4, experts=experts, data=False)
        for experts in (32, 128)
    ]
    for what, ((small, small_nodes), (large, large_nodes)) in {"layers": dense, "experts": wide}.items():
        for name in _RECIPES:
            runs = {
                f"{path.stem}: {name}, for scaling": Run(
                    "recipe", {"model": str(path), "output": str(path.with_suffix(".scaled.onnx")), "name": name}
                )
                for path in (small, large)
            }
            few, many = bench.compare(runs).values()
            # What is there once, as the last nodes outside the layers, makes it a little less than four times.
            exactly = 4 * small_nodes / large_nodes
            ratio, cpu = (many[figure].ratio(few[figure]) * exactly for figure in ("seconds", "cpu"))
            times = (
                f"{few['seconds'].median:.2f} s at {small_nodes} nodes, {many['seconds'].median:.2f} s at {large_nodes}"
            )
            remark = f"{times}, taken to exactly x4; CPU time {cpu:.2f}x"
            samples = (few["seconds"], many["seconds"])
            bench.row(f"{what} x4, {name}", f"{ratio:.2f}x", "<= 4.4x", ratio <= 4.4, remark, *samples)


def measure_memory(bench: Bench) -> None:
    """Peak memory with no, 3 GB and 60 GB of external data."""
    sizes: dict[str, int | None] = {"no data": None, "3 GB": 3 * 10**9, "60 GB": 60 * 10**9}
    runs = {}
    for size, external_bytes in sizes.items():
        path, _ = bench.llama(32, external_bytes)
        output = str(path.with_suffix(".pruned.onnx"))
        runs[f"peak, {size}"] = Run("recipe", {"model": str(path), "output": output})
    none, *others = (figures["peak"] for figures in bench.compare(runs).values())
    for size, sample in zip(list(sizes)[1:], others, strict=True):
        more = (sample.median - none.median) / 1e6
        remark = f"peak {sample.median / 1e6:.0f} MB against {none.median / 1e6:.0f} MB without a data file"
        bench.row(f"peak memory, {size} of weights", f"{more:+.1f} MB", "<= 50 MB", more <= 50, remark)
    apart = abs(others[0].median - others[1].median) / 1e6
    bench.row("3 GB against 60 GB", f"{apart:.1f} MB", "equal", apart <= 5, "equal within 5 MB, the allocator's grain")


def measure_absent(bench: Bench) -> None:
    """All commands but --verify with the data file removed: no external byte can be read."""
    path, _ = bench.model("removed", "llama", layers=4, external_bytes=10**8)
    path.with_name(path.name + ".data").unlink(missing_ok=True)
    output = path.with_suffix(".out.onnx")
    commands = {
        "apply": ["apply", str(path), "-o", str(output), "--recipe", _RECIPE, "--force", "--check"],
        "apply --dry-run": ["apply", str(path), "--recipe", _RECIPE, "--dry-run"],
        "inspect": ["inspect", str(path)],
    }
    failed = []
    for name, arguments in commands.items():
        say(name)
        done = subprocess.run(
            [sys.executable, "-m", "graphsurgery", *arguments], capture_output=True, text=True, check=False
        )
        bench.values[f"data removed: {name}"] = done.returncode
        if done.returncode != 0:
            failed.append(f"{name}: exit {done.returncode}, {done.stderr.strip().splitlines()[-1:]}")
    remark = "; ".join(failed) or f"{', '.join(commands)} all end with 0 after the data file was removed"
    bench.row("external bytes read", "0" if not failed else "?", "0", not failed, remark)


def measure_regions(bench: Bench) -> None:
    """Region verification of 12 and of 48 layers: each distinct region is run once."""
    runs = {}
    for layers in (12, 48):
        path, _ = bench.model(f"llama-{layers}-absent", "llama", layers=layers, data=False)
        result = str(path.with_suffix(".pruned.onnx"))
        Run("recipe", {"model": str(path), "output": result})()
        runs[f"regions, {layers} layers"] = Run("verify_regions", {"model": str(path), "result": result})
    few, many = bench.compare(runs).values()
    counts = [int(figures["regions"].median) for figures in (few, many)]
    remark = ", ".join(
        f"{figures['seconds'].median:.2f} s for {layers} layers, {figures['reading'].median:.2f} s of them reading both graphs"
        for layers, figures in ((12, few), (48, many))
    )
    measured = f"{counts[1]} for {counts[0]}"
    bench.row(
        "regions run, layers x4", measured, "as many", counts[0] == counts[1], remark, few["seconds"], many["seconds"]
    )


def measure_help(bench: Bench) -> None:
    """Import and --help, interpreter included."""
    found = bench.compare({"help": Run("help_text"), "bare python": Run("bare_python")})
    ours, bare = found["help"]["seconds"], found["bare python"]["seconds"]
    remark = f"a bare interpreter takes {bare.median:.2f} s of it"
    bench.row("import + --help", f"{ours.median:.2f} s", "<= 0.5 s", ours.median <= 0.5, remark, ours)


# ---- running -------------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr)


def _grow(source: Path, output: Path, options: dict[str, Any]) -> int:
    sys.path.insert(0, str(ROOT / "fixtures"))
    import grow

    return grow.grow(source, output, **options).nodes


def main() -> int:
    """Command line; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each comparison (default: 5)")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    given = parser.parse_args()
    parts = {
        "dense": measure_dense,
        "experts": measure_experts,
        "scaling": measure_scaling,
        "memory": measure_memory,
        "absent": measure_absent,
        "regions": measure_regions,
        "help": measure_help,
    }
    about = environment("graphsurgery", "onnx", "onnx-ir", "numpy")
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), given.runs)
        for part in given.only:
            parts[part](bench)
    print(table(("what", "measured", "bar", "", "remark"), bench.rows))
    if given.json is not None:
        rows = [dict(zip(("what", "measured", "bar", "verdict", "remark"), row, strict=True)) for row in bench.rows]
        given.json.write_text(json.dumps({"environment": about, "rows": rows, "values": bench.values}, indent=1) + "\n")
    return 0 if all(row[3] == "met" for row in bench.rows) else 1


if __name__ == "__main__":
    if worker(TASKS):
        sys.exit(0)
    sys.exit(main())
