"""``graphsurgery inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from graphsurgery.cli.output import emit, html_option, report_console, report_options, verbose_option, write_file


@click.command("inspect", short_help="Show what a model is and what each pass would do with it.")
@click.argument("input_path", metavar="IN", type=click.Path(path_type=Path))
@click.option("--file", metavar="NAME", help="The model file, where IN is a directory with several.")
@report_options
@html_option
@verbose_option
def command(
    input_path: Path, file: str | None, report_form: str, report_file: Path | None, html_file: Path | None, verbose: int
) -> int:
    """Show what IN is: its interface, operators, data files and history, and each site that a pass finds in it.

    Nothing but the reports that are asked for is written, and no external data is read.
    """
    from graphsurgery.inspection import inspect_model

    found = inspect_model(input_path, file=file, picture=html_file is not None)
    if report_file is not None:
        write_file(report_file, found.to_json())
    if html_file is not None:
        write_file(html_file, found.to_html())
    if report_form == "json":
        emit(found.to_json())
    else:
        found.render(report_console(), verbose=bool(verbose))
    return 0
