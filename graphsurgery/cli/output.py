"""What commands share: consoles, progress and where reports go."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from graphsurgery.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = [
    "emit",
    "html_option",
    "progress",
    "report_console",
    "report_options",
    "verbose_option",
    "verbosity_options",
    "warn",
    "write_file",
]

_PLAIN_WIDTH = 160


class _ReportConsole(Console):  # type: ignore[misc] # rich is not followed by the checker
    """A console whose reader may go away (``| head``): the rest is dropped, and the exit code is still the result's."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _drop_output()


def report_console() -> Console:
    """Where reports are printed: stdout, without colour and at a fixed width where it is no terminal."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return _ReportConsole(width=width, highlight=False, markup=False, emoji=False)


def emit(text: str) -> None:
    """Print the text of a report on stdout as it is; a reader that has gone away is no error."""
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        _drop_output()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(texts: list[str], *, quiet: bool) -> None:
    """Print warnings on stderr, one a line."""
    if quiet:
        return
    for text in texts:
        print(f"warning: {text}", file=sys.stderr)


def write_file(path: Path, text: str) -> None:
    """Write a report file, whole or not at all: what was there stays until all is written.

    Raises:
        SaveError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            # A pipe or a terminal has no name to take.
            path.write_text(text, encoding="utf-8")
            return
        place = path.resolve()
        temporary = place.with_name(f".{place.name}.graphsurgery-{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SaveError(f"Cannot write {path}: {error.strerror}; choose another place.") from error


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress display on stderr for long work; None off a terminal or when quiet."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as display:
        tasks: dict[str, TaskID] = {}

        def watch(what: str, done: int, total: int, /) -> None:
            if what not in tasks:
                tasks[what] = display.add_task(what, total=total)
            display.update(tasks[what], completed=done, total=total)

        yield watch


def verbosity_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``-v`` and ``-q``."""
    return verbose_option(click.option("-q", "--quiet", is_flag=True, help="No warnings and no progress.")(command))


def verbose_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``-v``, for commands that have neither warnings nor progress to be quiet about."""
    return click.option("-v", "--verbose", count=True, help="More detail; -vv: tracebacks of errors.")(command)


def _report_path(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse before the work is done what would fail after it, or take the place of a model."""
    if path is None:
        return None
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"the directory {path.absolute().parent} does not exist: make it first.")
    if path.suffix == ".onnx":
        raise click.BadParameter(f"{path} is the name of a model: give the report another.")
    return path


def _html_path(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".html", ".htm"):
        raise click.BadParameter(f"{path} does not end with .html: give the page such a name.")
    return _report_path(context, option, path)


def html_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--html``."""
    from pathlib import Path

    return click.option(
        "--html",
        "html_file",
        metavar="F.html",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_html_path,
        help="Write the report as one HTML page too, with drawings.",
    )(command)


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--report`` and ``--report-file``."""
    from pathlib import Path

    command = click.option(
        "--report-file",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_report_path,
        help="Write the report as JSON to this file too.",
    )(command)
    return click.option(
        "--report",
        "report_form",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="Form of the report on stdout.",
    )(command)
