"""Named pipelines: TOML files in this folder, or a user's own.

A recipe is a ``description`` and ``[[pass]]`` tables, each with ``name`` and the options of the pass.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import tomllib
from pathlib import Path
from typing import Any

from graphsurgery.errors import UsageError

__all__ = ["Recipe", "read_recipe", "recipe_names"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A pipeline as data.

    Attributes:
        name: of the recipe, or the stem of the file.
        description: one line.
        passes: the tables, each with ``name`` and options.
    """

    name: str
    description: str
    passes: tuple[dict[str, Any], ...]


def recipe_names() -> list[str]:
    """The recipes of this package."""
    folder = importlib.resources.files(__name__)
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_recipe(recipe: str | Path) -> Recipe:
    """Read a recipe by name (``prefill``) or from a file (``mine.toml``).

    Raises:
        UsageError: there is no such recipe, or the file is not a recipe.
    """
    from graphsurgery.pass_base import unknown_name

    text: str
    if isinstance(recipe, Path) or recipe.endswith(".toml"):
        path = Path(recipe)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"Cannot read recipe file {str(path)!r}: {reason}.") from None
        name = path.stem
    elif recipe in recipe_names():
        text = (importlib.resources.files(__name__) / f"{recipe}.toml").read_text(encoding="utf-8")
        name = recipe
    else:
        raise unknown_name("recipe", recipe, recipe_names())
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"Recipe {str(recipe)!r} is not valid TOML: {error}.") from None
    unknown = sorted(set(data) - {"description", "pass"})
    passes = data.get("pass", [])
    if unknown or not isinstance(passes, list) or not all(isinstance(item, dict) for item in passes):
        wrong = f"unknown key {unknown[0]!r}" if unknown else "'pass' is not a list of tables"
        raise UsageError(f"Recipe {str(recipe)!r}: {wrong}; a recipe holds description and [[pass]] tables.")
    if not passes:
        raise UsageError(f'Recipe {str(recipe)!r} has no [[pass]] table; add one with name = "...".')
    return Recipe(name, str(data.get("description", "")), tuple(passes))
