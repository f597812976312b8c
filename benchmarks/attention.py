"""What blocked attention costs and saves: prefill and decode of a dense export, against the export and against peers.

    python benchmarks/attention.py --export dense/model.onnx
    python benchmarks/attention.py --export dense/model.onnx --peer onnxslim=slim.onnx --lengths 2048 8192
    python benchmarks/attention.py --export dense/model.onnx --lengths 256 512 1024 2048 4096 8192 --plot out.svg

The export is the dense model of the bars: Llama, 4 layers, hidden 512, 8 heads and 2 KV heads of 64, vocabulary 32 k, fp32,
written by a stock exporter (``--make DIR`` writes it with the extra ``[fixtures]``). Each recipe is applied to it; every
figure is the median of alternating runs in processes of their own, in ONNX Runtime on the CPU at its default
optimisation level with two threads. Memory is what the first run takes over the loaded model, read from the kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from _measure import environment, table
from _race import RaceSettings, first_and_steady, pair_report, race, side_data
from _stock import make_export

from graphsurgery.benching.bench_report import Measurement, NotMeasured
from graphsurgery.benching.points import make_points

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.benching.bench_report import Side

RECIPES = ("prefill", "decode", "unified")


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


def _rows(point: str, found: Mapping[str, Side]) -> list[tuple[str, ...]]:
    base = found["export"]
    rows: list[tuple[str, ...]] = []
    for name, side in found.items():
        if not isinstance(side, Measurement) or not isinstance(base, Measurement):
            rows.append((point, name, side.reason if isinstance(side, NotMeasured) else "-", "-", "-", "-", "-"))
            continue
        (first, steady), (base_first, base_steady) = first_and_steady(side), first_and_steady(base)
        rows.append(
            (
                point,
                name,
                f"{side.latency.median * 1e3:.1f}{' (noisy)' if side.latency.noisy else ''}",
                f"{base.latency.ratio(side.latency):.2f}x",
                f"{first / 2**20:.0f}",
                f"{first / base_first:.3f}",
                f"{steady / base_steady:.3f}",
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
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw latency and peak memory over S and P")
    parser.add_argument("--plot-model", default="prefill", metavar="NAME", help="what is drawn beside the export")
    arguments = parser.parse_args()
    if (arguments.export is None) == (arguments.make is None):
        parser.error("give --export FILE or --make DIR")
    export = make_export(arguments.make) if arguments.make is not None else arguments.export
    models = {"export": export, **_rewritten(export, export.parent)}
    models |= {name: Path(path) for name, path in (item.split("=", 1) for item in arguments.peer)}
    if arguments.plot_model not in models:
        parser.error(f"--plot-model {arguments.plot_model} is not measured: there are {', '.join(models)}")
    points = make_points(arguments.lengths, arguments.pasts, 1)
    settings = RaceSettings(rounds=arguments.runs, repeats=2, threads=arguments.threads)
    found = race(models, points, settings, lambda text: print(text, file=sys.stderr))
    rows = [row for point, sides in found.items() for row in _rows(f"{point.phase} {point.size}", sides)]
    header = ("point", "model", "ms", "faster", "MB over loaded", "of the export's", "of the export's, steady")
    print(table(header, rows))
    if arguments.json is not None:
        data = {point.name: {name: side_data(side) for name, side in sides.items()} for point, sides in found.items()}
        text = json.dumps({"environment": environment("onnxruntime", "onnx"), "points": data}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if arguments.plot is not None:
        report = pair_report(found, "export", arguments.plot_model, settings)
        arguments.plot.write_text(report.to_svg(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
