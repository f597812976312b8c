"""``graphsurgery passes``."""

from __future__ import annotations

import json

import click

from graphsurgery.cli.output import emit, report_console


@click.command("passes", short_help="List all passes and their options, or the passes of a recipe.")
@click.option("--recipe", metavar="NAME|FILE.toml", help="Only the passes of this recipe, as they can be typed.")
@click.option("--report", "report_form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(recipe: str | None, report_form: str) -> int:
    """List every pass with its options, their defaults and one line; or the passes of a recipe."""
    from graphsurgery.listing import describe_passes, describe_recipe, render_passes, render_recipe

    if recipe is not None:
        listed = describe_recipe(recipe)
        if report_form == "json":
            emit(json.dumps(listed, indent=2) + "\n")
        else:
            render_recipe(listed, report_console())
        return 0
    passes = describe_passes()
    if report_form == "json":
        emit(json.dumps(passes, indent=2) + "\n")
    else:
        render_passes(passes, report_console())
    return 0
