"""``graphsurgery diff``."""

from __future__ import annotations

from pathlib import Path

import click

from graphsurgery.cli.output import _report_path, emit, report_console, verbose_option, write_file


@click.command("diff", short_help="Show what changed between two models, or two directories of models.")
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--fail-on",
    "limits",
    metavar="LEVEL",
    type=click.Choice(["none", "minor", "moderate", "major", "blocking"]),
    multiple=True,
    help="minor, moderate, major: exit with 1 at this severity or a higher one. blocking: exit with 1 when a size grew "
    "by 10 % or more. May be given more than once. [default: none, never]",
)
@click.option(
    "--report",
    "report_form",
    type=click.Choice(["table", "markdown", "json"]),
    default="table",
    show_default=True,
    help="Form of the report on stdout.",
)
@click.option(
    "--report-file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_report_path,
    help="Write the report as JSON to this file too.",
)
@verbose_option
def command(a: Path, b: Path, limits: tuple[str, ...], report_form: str, report_file: Path | None, verbose: int) -> int:
    """Show what changed from A to B: two .onnx files, or two directories, whose files are paired by name.

    Names and order of nodes do not count, calls of local functions are seen through, and data files are not read.

    Severity: none; minor: attributes, initializers, operator versions; moderate: nodes and edges; major: the interface,
    or a model that is gone. Sizes: 5 % growth is a warning, 10 % is blocking.
    """
    from graphsurgery.compare import diff_models
    from graphsurgery.errors import DifferenceError

    report = diff_models(a, b)
    if report_file is not None:
        write_file(report_file, report.to_json())
    if report_form == "json":
        emit(report.to_json())
    elif report_form == "markdown":
        emit(report.to_markdown())
    else:
        report.render(report_console(), verbose=bool(verbose))
    failure = report.failure(limits)
    if failure is not None:
        raise DifferenceError(failure)
    return 0
