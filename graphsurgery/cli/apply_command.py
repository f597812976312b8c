"""``graphsurgery apply``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from graphsurgery.cli.output import (
    emit,
    html_option,
    progress,
    report_console,
    report_options,
    verbosity_options,
    warn,
    write_file,
)


@click.command("apply", short_help="Run passes on a model and write the result.")
@click.argument("input_path", metavar="IN", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", metavar="OUT", type=str, help="Output file or directory [default: IN with .surgery.onnx]."
)
@click.option("--recipe", metavar="NAME|FILE.toml", help="Passes of a recipe.")
@click.option("-p", "--pass", "specs", metavar="SPEC", multiple=True, help="A pass: name or name{option=value,...}.")
@click.option("--file", metavar="NAME", help="The model file, where IN is a directory with several.")
@click.option(
    "--verify",
    metavar="[=DEPTH]",
    help="Hold the result against IN before it is kept: outputs, generate, regions [default: by size].",
)
@click.option("--seed", type=int, default=0, show_default=True, help="What the verifier's feeds are drawn from.")
@click.option("--dry-run", is_flag=True, help="Report what would be done; write nothing.")
@click.option("--check", is_flag=True, help="Check the invariants of the model after each pass.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option(
    "--weights",
    type=click.Choice(["auto", "reference", "copy", "hardlink", "repack"]),
    default="auto",
    show_default=True,
    help="How data files are placed.",
)
@click.option("--require-change", is_flag=True, help="Exit with 4 when no pass changes anything.")
@click.option("--keep-unverified", is_flag=True, help="Keep an output that differs or could not be checked.")
@click.option(
    "--dump-after", metavar="DIR", type=click.Path(path_type=Path), help="Save the model after each pass here."
)
@click.option(
    "--specializations",
    metavar="F.json",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the sizes of --specialize as a specialisations file.",
)
@click.option(
    "--specialize",
    metavar="[NAME:]ROLE=SIZE,...",
    multiple=True,
    help="Sizes by role (batch, seq, past, total, ctx) or symbol; without NAME a prefill and a decode.",
)
@report_options
@html_option
@verbosity_options
def command(
    input_path: Path,
    output: str | None,
    report_form: str,
    report_file: Path | None,
    html_file: Path | None,
    verbose: int,
    quiet: bool,
    **options: Any,
) -> int:
    """Run passes on IN, an .onnx file or a model directory, and write the result.

    The default output is beside IN and shares its data file. Nothing that existed is touched unless --force is given,
    and then only by one rename at the very end.
    """
    from graphsurgery.workflow import ApplyRequest, apply_passes

    request = ApplyRequest(input=input_path, output=output, picture=html_file is not None, **options)
    with progress(quiet=quiet) as watcher:
        result = apply_passes(request, watcher)
    warn(result.report.all_warnings(), quiet=quiet)
    if report_file is not None:
        write_file(report_file, result.report.to_json())
    if html_file is not None:
        write_file(html_file, result.report.to_html())
    if report_form == "json":
        emit(result.report.to_json())
    else:
        console = report_console()
        result.report.render(console, verbose=bool(verbose))
        if result.verification is not None:
            result.verification.render(console, verbose=bool(verbose))
        if result.output is not None:
            for path in (result.output, *result.side_files):
                console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if result.failure is not None:
        raise result.failure
    return 0
