"""``graphsurgery bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphsurgery.cli.output import (
    _report_path,
    emit,
    html_option,
    progress,
    report_console,
    verbosity_options,
    write_file,
)

if TYPE_CHECKING:
    from graphsurgery.benching.bench_report import BenchReport


def _sizes(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text == "none":
        return ()
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} are no sizes: write numbers with commas, as 128,512, or none.") from None


def _form(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in _FORMS:
        raise click.BadParameter(f"{path} has no ending that tells the form: use {', '.join(_FORMS)}.")
    return _report_path(_context, _option, path)


def _plot(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix != ".svg":
        raise click.BadParameter(f"{path} does not end with .svg: plots are written as SVG.")
    return _report_path(_context, _option, path)


_FORMS = (".json", ".csv", ".md")


@click.command("bench", short_help="Measure latency and memory of a model, or of two side by side.")
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="[B]", type=click.Path(path_type=Path), required=False)
@click.option("--prefill", callback=_sizes, metavar="S,...", help="Lengths of prompts, or none. [default: 128,512]")
@click.option("--decode", callback=_sizes, metavar="P,...", help="Pasts of single tokens, or none. [default: 512,4096]")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences in each run.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Threads of one operator.")
@click.option("--provider", default="cpu", show_default=True, help="ONNX Runtime's execution provider.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Measured runs of each row.")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Runs before them.")
@click.option("--seed", type=int, default=0, show_default=True, help="What inputs are drawn from.")
@click.option(
    "--index",
    type=int,
    default=-1,
    show_default=True,
    help="Row that is fed where rows are chosen at run time; negative from the end.",
)
@click.option(
    "--gate",
    metavar="METRIC=RATIO,...",
    help="Exit with 1 where B takes more than RATIO times what A takes: latency, memory (peak) or over (memory over the "
    "loaded model), as latency=1.05,memory=1.10.",
)
@click.option(
    "--report",
    "report_form",
    type=click.Choice(["table", "csv", "json", "markdown"]),
    default="table",
    show_default=True,
    help="Form of the report on stdout.",
)
@click.option(
    "--report-file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_form,
    help="Write the report to this file too, as its ending says: .json, .csv or .md.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_plot,
    help="Write latency and peak memory over S, and over P, to this .svg file.",
)
@html_option
@verbosity_options
def command(
    a: Path,
    b: Path | None,
    prefill: tuple[int, ...] | None,
    decode: tuple[int, ...] | None,
    batch: int,
    threads: int,
    provider: str,
    runs: int,
    warmup: int,
    seed: int,
    index: int,
    gate: str | None,
    report_form: str,
    report_file: Path | None,
    plot: Path | None,
    html_file: Path | None,
    verbose: int,
    quiet: bool,
) -> int:
    """Measure A, or B against A: two .onnx files, or two directories, whose files are paired by name.

    Each model runs in a process of its own at ONNX Runtime's default level, and runs of both alternate. Where --prefill
    or --decode is given alone, the other is none; models of one fixed length are measured at that, unless sizes are given.

    Exit codes: 0 measured, 1 a gate failed, 5 something could not be measured, 130 interrupted: rows measured by then are
    reported.
    """
    from graphsurgery.benching.gates import parse_gates
    from graphsurgery.benchmark import bench_models
    from graphsurgery.errors import CannotCheckError, DifferenceError

    gates = () if gate is None else parse_gates(gate)
    with progress(quiet=quiet) as watcher:
        report = bench_models(
            a,
            b,
            prefill=prefill,
            decode=decode,
            batch=batch,
            threads=threads,
            provider=provider,
            runs=runs,
            warmup=warmup,
            seed=seed,
            row=index,
            gates=gates,
            progress=watcher,
        )
    if report_file is not None:
        write_file(report_file, _text(report, report_file.suffix))
    if plot is not None:
        write_file(plot, report.to_svg())
    if html_file is not None:
        write_file(html_file, report.to_html())
    if report_form == "table":
        report.render(report_console())
    else:
        emit(_text(report, {"csv": ".csv", "json": ".json", "markdown": ".md"}[report_form]))
    if report.interrupted:
        rows = f"{len(report.rows)} of {report.planned} rows"
        click.echo(f"graphsurgery: interrupted; {rows} were measured and are reported.", err=True)
    elif report.failure is not None:
        raise DifferenceError(report.failure)
    elif report.problem is not None:
        raise CannotCheckError(report.problem)
    return report.exit_code


def _text(report: BenchReport, suffix: str) -> str:
    return {".json": report.to_json, ".csv": report.to_csv, ".md": report.to_markdown}[suffix]()
