"""Passes and recipes as the ``passes`` command lists them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import TYPE_CHECKING, Any

from graphsurgery.recipes import read_recipe, recipe_names
from graphsurgery.registry import make_pass, pass_names, pass_type

if TYPE_CHECKING:
    from rich.console import Console

    from graphsurgery.pass_base import Pass

__all__ = ["describe_passes", "describe_recipe", "render_passes", "render_recipe"]


def describe_passes() -> list[dict[str, Any]]:
    """Every pass: name, summary, and its options with type, default and aliases."""
    return [_describe(pass_type(name)) for name in pass_names()]


def _describe(kind: type[Pass]) -> dict[str, Any]:
    options = []
    for field in dataclasses.fields(kind):
        names = [alias for alias, target in kind.aliases.items() if target == field.name]
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        options.append({"name": field.name, "type": _type_text(str(field.type)), "default": default, "aliases": names})
    return {"name": kind.name, "summary": kind.summary, "options": options, "contract": inspect.getdoc(kind)}


def _type_text(annotation: str) -> str:
    return annotation.replace("typing.", "")


def describe_recipe(recipe: str) -> dict[str, Any]:
    """A recipe: its description, and its passes as they can be typed."""
    found = read_recipe(recipe)
    return {
        "name": found.name,
        "description": found.description,
        "passes": [str(make_pass(table)) for table in found.passes],
    }


def render_passes(passes: list[dict[str, Any]], console: Console) -> None:
    """Print passes as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("pass", "option", "default", "values"):
        table.add_column(column, overflow="fold")
    for item in passes:
        table.add_row(Text(item["name"], style="bold"), "", "", item["summary"])
        for option in item["options"]:
            default = option["default"]
            shown = "[]" if default == [] else str(default).lower() if isinstance(default, bool) else str(default)
            aliases = f" (also {', '.join(option['aliases'])})" if option["aliases"] else ""
            table.add_row("", option["name"], Text(shown), Text(option["type"] + aliases))
    console.print(table)
    console.print(f"recipes: {', '.join(recipe_names())}", markup=False)


def render_recipe(recipe: dict[str, Any], console: Console) -> None:
    """Print a recipe, one pass a line."""
    console.print(f"{recipe['name']}: {recipe['description']}", markup=False, soft_wrap=True)
    for text in typing.cast("list[str]", recipe["passes"]):
        console.print(f"  -p '{text}'", markup=False, soft_wrap=True)
