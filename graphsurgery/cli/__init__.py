"""The command line: one module a command, imported only when the command runs, and no logic in any of them."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import click

from graphsurgery.errors import GraphSurgeryError
from graphsurgery.version import __version__

__all__ = ["main"]

_COMMANDS = {
    "apply": "Run passes on a model and write the result.",
    "inspect": "Show what a model is and what each pass would do with it.",
    "verify": "Check with ONNX Runtime that two models compute the same.",
    "diff": "Show what changed between two models, or two directories of models.",
    "bench": "Measure latency and memory of a model, or of two side by side.",
    "passes": "List all passes and their options, or the passes of a recipe.",
}


class _LazyGroup(click.Group):
    """A group whose commands are listed here and imported when they run: --help stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"graphsurgery.cli.{cmd_name}_command")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" There are {', '.join(_COMMANDS)}."
            raise click.UsageError(f"{error.message}{hint}", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="graphsurgery")
def _group() -> None:
    """Surgery on exported ONNX language models: recognise, rewrite, prove.

    Exit codes: 0 done; 1 a difference was found; 2 usage; 3 the input was refused or the output could not be
    written; 4 --require-change and nothing changed; 5 could not be checked; 70 internal error.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code; ``arguments`` default to those of the process."""
    given = sys.argv[1:] if arguments is None else arguments
    # A bare --verify takes no value: without this, the word behind it would be taken for one.
    given = ["--verify=auto" if item == "--verify" else item for item in given]
    sys.exit(_run(given))


def _run(arguments: list[str]) -> int:
    traceback_wanted = sum(item.count("v") for item in arguments if re.fullmatch("-[qv]+", item)) > 1
    try:
        result: Any = _group.main(arguments, prog_name="graphsurgery", standalone_mode=False)
    except GraphSurgeryError as error:
        return _fail(str(error), error.exit_code, traceback_wanted)
    except click.ClickException as error:
        where = _where(error)
        return _fail(f"{error.format_message()}{where}", 2, traceback_wanted)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted; nothing was changed.", 130, traceback_wanted)
    except SystemExit:
        # Click leaves so when the reader of a help text has gone away.
        return 0
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}. Run again with -vv and report the traceback."
        return _fail(text, 70, traceback_wanted)
    return result if isinstance(result, int) else 0


def _where(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return ""
    command = "graphsurgery" if context.parent is None else f"graphsurgery {context.info_name}"
    return f" (see {command} --help)"


def _fail(text: str, code: int, traceback_wanted: bool) -> int:
    if traceback_wanted and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    line = " ".join(text.split())
    print(f"graphsurgery: {line}", file=sys.stderr)
    return code
