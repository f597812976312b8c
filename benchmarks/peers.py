"""This project against other tools that change exported graphs, in one go: surgery, and what comes out of it.

    pip install -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py --make dense              # the export of the bars, which takes a minute
    python benchmarks/peers.py dense/model.onnx          # the same again
    python benchmarks/peers.py                           # without torch: a decoder spelled like an export
    python benchmarks/peers.py --only onnxslim --runs 3

Every tool and every run is a process of its own, in alternation, medians count. Surgery includes load and save. Latency and memory are
those of ``graphsurgery bench``: ONNX Runtime on the CPU at its default optimisation level, two threads. A tool that is
not there, fails or takes too long is a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import Run, WorkerError, environment, table, worker
from _peers import OURS, PACKAGES, PEERS, TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from _race import Found

    from graphsurgery.benching.bench_report import Measurement, Side

EXPORT = "export"
_FLOOR = "onnx-ir load + save"
# Rows that other tools are held against in the bars: their best counts.
_HELD = ("transformers fuse_for_onnxruntime", "onnxslim", "ORT transformers optimizer")

# Phase, size, recipe, figure, limit of ours over theirs: against the export, and against the best tool.
BARS: tuple[tuple[str, int, str, str, float, float], ...] = (
    ("prefill", 2048, "prefill", "latency", 1 / 3, 1 / 3),
    ("prefill", 2048, "prefill", "memory", 1 / 6, 1 / 6),
    ("prefill", 8192, "prefill", "latency", 1 / 4, 1 / 4),
    ("prefill", 8192, "prefill", "memory", 1 / 10, 1 / 10),
    ("decode", 512, "decode", "latency", 1 / 0.97, 1.0),
    ("decode", 512, "unified", "latency", 1 / 0.97, 1.0),
    ("decode", 4096, "decode", "latency", 1 / 1.8, 1.0),
    ("decode", 4096, "unified", "latency", 1 / 1.8, 1.0),
)


# ---- surgery --------------------------------------------------------------------------------------------------------------


def distance(model: str, other: str) -> dict[str, float]:
    """Largest difference of the last row of logits of a short prompt, relative to max(1, largest)."""
    import numpy as np
    import onnxruntime as ort

    from graphsurgery.benching.subjects import read_subjects
    from graphsurgery.equivalence.feeds import Sizes

    rows = []
    for subject in read_subjects(Path(model), Path(other)):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        session = ort.InferenceSession(str(subject.path), options, providers=["CPUExecutionProvider"])
        fed = subject.feed(Sizes(1, 24, 0, "none", 0), 0, -1)
        wanted = {value.name for value in session.get_inputs()}
        result = session.run(["logits"], {name: array for name, array in fed.items() if name in wanted})[0]
        rows.append(result[0, -1].astype(np.float64))
    return {"distance": float(np.abs(rows[0] - rows[1]).max() / max(1.0, np.abs(rows[0]).max()))}


def _tools(model: Path, checkpoint: Path | None, directory: Path) -> tuple[dict[str, Run], dict[str, str]]:
    """What to run under which name, and what cannot be run, with the reason."""
    runs = {_FLOOR: Run("floor", {"model": str(model), "output": str(directory / "floor.onnx")})}
    reasons = {}
    for recipe in OURS:
        arguments = {"model": str(model), "output": str(directory / f"{recipe}.onnx"), "recipe": recipe}
        runs[f"graphsurgery, {recipe}"] = Run("ours", arguments)
    for name, task in PEERS.items():
        package = PACKAGES[name]
        # The builder names its file itself.
        output = str(directory / "built" / "model.onnx" if task == "genai_builder" else directory / f"{task}.onnx")
        if _version(package) is None:
            reasons[name] = f"{package} is not installed: pip install -r benchmarks/peers-requirements.txt"
        elif task != "genai_builder":
            runs[name] = Run(task, {"model": str(model), "output": output})
        elif checkpoint is None:
            reasons[name] = "it builds from a checkpoint, not from a graph: give --checkpoint DIR or --make DIR"
        else:
            runs[name] = Run(task, {"checkpoint": str(checkpoint), "output": output})
    return runs, reasons


def _operate(runs: Mapping[str, Run], count: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run every tool ``count`` times in alternation; one that fails once is left out."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    reasons: dict[str, str] = {}
    for turn in range(count):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            if name in reasons:
                continue
            say(f"surgery: {name}, run {turn + 1} of {count}")
            try:
                results[name].append(runs[name]())
            except WorkerError as error:
                reasons[name] = str(error).strip().splitlines()[-1][:200]
    return results, reasons


def _surgery_rows(
    runs: Mapping[str, Run], results: Mapping[str, list[dict[str, Any]]], reasons: dict[str, str], model: Path
) -> list[tuple[str, ...]]:
    from graphsurgery.benching.samples import Sample

    rows: list[tuple[str, ...]] = []
    for name in [_FLOOR, *(f"graphsurgery, {recipe}" for recipe in OURS), *PEERS]:
        if name not in results and name not in reasons:
            continue
        package = "onnx-ir" if name == _FLOOR else PACKAGES.get(name, "graphsurgery")
        version = _version(package) or "-"
        if name in reasons:
            rows.append((name, version, "-", "-", "-", "-", reasons[name]))
            continue
        seconds, peak = (Sample(tuple(result[key] for result in results[name])) for key in ("seconds", "peak"))
        say(f"distance: {name}")
        output = runs[name].arguments["output"]
        try:
            apart = f"{Run('distance', {'model': str(model), 'other': output})()['distance']:.0e}"
        except WorkerError as error:
            reasons[name] = f"its result does not run: {str(error).strip().splitlines()[-1][:200]}"
            apart = "-"
        noise = f" (noisy, spread {seconds.spread:.0%})" if seconds.noisy else ""
        cells = (f"{seconds.median:.2f}{noise}", f"{peak.median / 1e6:.0f}", str(results[name][-1]["nodes"]), apart)
        rows.append((name, version, *cells, reasons.get(name, "")))
    return rows


# ---- latency and memory ---------------------------------------------------------------------------------------------------


def _point_rows(found: Found) -> list[tuple[str, ...]]:
    from _race import first_and_steady

    from graphsurgery.benching.bench_report import Measurement

    rows: list[tuple[str, ...]] = []
    for point, sides in found.items():
        base = sides[EXPORT]
        for name, side in sides.items():
            if not isinstance(side, Measurement):
                rows.append((point.name, name, "-", "-", "-", "-", side.reason))
                continue
            over = first_and_steady(side)[1]
            faster = share = "-"
            if isinstance(base, Measurement):
                faster = f"{base.latency.ratio(side.latency):.2f}x"
                share = f"{over / first_and_steady(base)[1]:.3f}"
            noise = f"noisy, spread {side.latency.spread:.0%}" if side.latency.noisy else ""
            cells = (f"{side.latency.median * 1e3:.1f}", faster, f"{over / 1e6:.0f}", share, noise)
            rows.append((point.name, name, *cells))
    return rows


def bar_rows(found: Found) -> list[tuple[str, ...]]:
    """One row for each bar whose point was measured: our figure over the export's, and over that of the best tool."""
    rows: list[tuple[str, ...]] = []
    for phase, size, recipe, figure, limit, peer_limit in BARS:
        sides = next((sides for point, sides in found.items() if (point.phase, point.size) == (phase, size)), None)
        if sides is None:
            continue
        mine = _figure(sides.get(f"graphsurgery, {recipe}"), figure)
        best = min(((value, name) for name in _HELD if (value := _figure(sides.get(name), figure))), default=None)
        held: list[tuple[str, float | None, float]] = [(EXPORT, _figure(sides[EXPORT], figure), limit)]
        held.append(("no tool ran", None, peer_limit) if best is None else (best[1], best[0], peer_limit))
        for name, theirs, bound in held:
            what = f"{phase} {size}, {recipe}: {figure}"
            if mine is None or not theirs:
                rows.append((what, name, "-", _limit(figure, bound), "not measured"))
                continue
            verdict = "met" if mine / theirs <= bound else "MISSED"
            rows.append((what, name, _limit(figure, mine / theirs), _limit(figure, bound), verdict))
    return rows


def _figure(side: Side | None, figure: str) -> float | None:
    from graphsurgery.benching.bench_report import Measurement

    if not isinstance(side, Measurement):
        return None
    return side.latency.median if figure == "latency" else _positive(side)


def _positive(side: Measurement) -> float | None:
    return float(side.over_bytes) if side.over_bytes else None


def _limit(figure: str, ratio: float) -> str:
    return f"{1 / ratio:.2f}x faster" if figure == "latency" else f"{ratio:.3f} of it"


# ---- running --------------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def _version(package: str) -> str | None:
    if package == "graphsurgery":
        from graphsurgery.version import __version__

        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _copy(model: Path, directory: Path) -> Path:
    """The model and its data in ``directory``: there results may share the data file, and nothing is left behind."""
    for file in model.parent.glob(f"{model.name}*"):
        shutil.copy(file, directory / file.name)
    return directory / model.name


def _model(given: argparse.Namespace, directory: Path) -> tuple[Path, Path | None]:
    """The export and the checkpoint that belongs to it, if there is one."""
    from _stock import CHECKPOINT, make_export

    if given.make is not None:
        return _copy(make_export(given.make, checkpoint=True), directory), given.make / CHECKPOINT
    if given.model is not None:
        beside = given.model.parent / CHECKPOINT
        return _copy(given.model, directory), given.checkpoint or (beside if beside.is_dir() else None)
    from _decoder import DecoderSize, write_decoder

    path = directory / "decoder.onnx"
    write_decoder(path, DecoderSize())
    return path, given.checkpoint


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="an export; without one a decoder spelled like an export")
    parser.add_argument("--make", type=Path, metavar="DIR", help="write the dense export of the bars here and use it")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="the model before the export, for builders")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), metavar="TOOL", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192], help="prompt lengths S")
    parser.add_argument("--pasts", type=int, nargs="*", default=[512, 4096], help="pasts P of single tokens")
    parser.add_argument("--runs", type=int, default=5, help="rounds of surgery and of measuring (default: 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all values to this file")
    given = parser.parse_args()
    if given.model is not None and given.make is not None:
        parser.error("give a model or --make DIR, not both")
    return given


def main() -> int:
    """Make the tables."""
    from _race import RaceSettings, race, side_data

    from graphsurgery.benching.points import make_points

    given = _arguments()
    about = environment("onnx", "onnx-ir", "onnxruntime", "numpy")
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        directory = Path(scratch)
        model, checkpoint = _model(given, directory)
        runs, reasons = _tools(model, checkpoint, directory)
        if given.only is not None:
            runs = {name: run for name, run in runs.items() if name not in PEERS or name in given.only}
            reasons = {name: reason for name, reason in reasons.items() if name in given.only}
        results, failed = _operate(runs, given.runs)
        reasons |= failed
        surgery = _surgery_rows(runs, {n: found for n, found in results.items() if found}, reasons, model)
        outputs = {name: Path(run.arguments["output"]) for name, run in runs.items() if name not in reasons}
        models = {EXPORT: model, **{name: path for name, path in outputs.items() if name != _FLOOR}}
        settings = RaceSettings(rounds=given.runs, repeats=2, threads=given.threads)
        found: Found = {}
        for lengths, pasts in ((given.lengths, ()), ((), given.pasts)):
            if lengths or pasts:
                idle = "graphsurgery, decode" if lengths else "graphsurgery, prefill"
                entrants = {name: path for name, path in models.items() if name != idle}
                found |= race(entrants, make_points(lengths, pasts, 1), settings, say)
    said = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"{about['date']}, Python {about['python']}, {said}; {about['cores']} cores, {given.runs} rounds.\n")
    print(table(("tool", "version", "seconds", "peak MB", "nodes", "logits differ by", "remark"), surgery), "\n")
    measured = _point_rows(found)
    if measured:
        print(table(("point", "model", "ms", "faster", "MB over loaded", "of the export's", "remark"), measured), "\n")
    bars = bar_rows(found)
    if bars:
        print(table(("bar", "against", "measured", "wanted", ""), bars))
    if given.json is not None:
        points = {point.name: {name: side_data(side) for name, side in sides.items()} for point, sides in found.items()}
        data = {"environment": about, "surgery": results, "reasons": reasons, "points": points, "bars": bars}
        given.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if worker({**TASKS, "distance": distance}):
        sys.exit(0)
    sys.exit(main())
