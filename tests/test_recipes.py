"""Recipes: those of the package, a user's own, and what is wrong with a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphsurgery import recipes
from graphsurgery.errors import UsageError
from graphsurgery.model_io import load
from graphsurgery.pipeline import Pipeline
from graphsurgery.recipes import Recipe, read_recipe, recipe_names
from graphsurgery.registry import make_pass

EXPORTS = sorted(path.parent.name for path in (Path(__file__).parents[1] / "fixtures").glob("*/model.onnx"))


def test_the_recipes_of_the_package():
    names = recipe_names()
    assert names == sorted(names)
    assert {"decode", "prefill", "unified"} <= set(names)


@pytest.mark.parametrize("name", recipe_names())
def test_each_recipe_says_what_it_is_for_and_names_real_passes(name):
    recipe = read_recipe(name)
    assert recipe.name == name
    assert recipe.description.endswith(".")
    made = [make_pass(table) for table in recipe.passes]
    # What compilers are given comes as functions, which are made of a tidy graph.
    assert made[-2 if name.startswith("npu") else -1].name == "tidy"
    # Round trip: what `passes --recipe` prints can be typed.
    assert [make_pass(str(item)) for item in made] == made


def test_prefill_prunes():
    specs = Pipeline.from_recipe("prefill").specs()
    assert any(spec.startswith("prune-last-token") for spec in specs)
    assert not any(spec.startswith("prune-last-token") for spec in Pipeline.from_recipe("decode").specs())


def test_a_recipe_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'description = "Mine."\n'
        '[[pass]]\nname = "prune-last-token"\nindex = "last"\nkeep = 2\nsites = ["lm_head"]\n'
        '[[pass]]\nname = "tidy"\n'
    )
    expected = Recipe(
        "mine",
        "Mine.",
        ({"name": "prune-last-token", "index": "last", "keep": 2, "sites": ["lm_head"]}, {"name": "tidy"}),
    )
    assert read_recipe(path) == expected
    assert read_recipe(str(path)) == expected
    assert Pipeline.from_recipe(path).specs() == ["prune-last-token{sites=[lm_head],index=last,keep=2}", "tidy"]


def test_an_unknown_recipe_gets_the_closest():
    with pytest.raises(UsageError) as caught:
        read_recipe("prefil")
    assert str(caught.value) == "Unknown recipe: 'prefil'; did you mean prefill or npu-prefill?"
    with pytest.raises(UsageError, match=r"^Unknown recipe: '../prefill'"):
        read_recipe("../prefill")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[pass]\n", "Recipe '{path}' is not valid TOML: "),
        ('description = "x"\n', "Recipe '{path}' has no [[pass]] table; add one with name = \"...\"."),
        ("", "Recipe '{path}' has no [[pass]] table; add one with name = \"...\"."),
        (
            '[[passes]]\nname = "tidy"\n',
            "Recipe '{path}': unknown key 'passes'; a recipe holds description and [[pass]] tables.",
        ),
        (
            '[pass]\nname = "tidy"\n',
            "Recipe '{path}': 'pass' is not a list of tables; a recipe holds description and [[pass]] tables.",
        ),
        (
            'pass = ["tidy"]\n',
            "Recipe '{path}': 'pass' is not a list of tables; a recipe holds description and [[pass]] tables.",
        ),
    ],
)
def test_a_bad_recipe_is_named_with_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(message.format(path=path))
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(UsageError, match=r"^Cannot read recipe file '.*gone\.toml': No such file or directory\.$"):
        read_recipe(tmp_path / "gone.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"^Cannot read recipe file '.*binary\.toml': it is not UTF-8 text\.$"):
        read_recipe(tmp_path / "binary.toml")


def test_recipes_are_files_of_the_package():
    folder = Path(recipes.__file__).parent
    assert sorted(path.stem for path in folder.glob("*.toml")) == recipe_names()


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize(
    "name", ["gemma4_moe_grouped", *(pytest.param(name, marks=pytest.mark.full) for name in EXPORTS)]
)
def test_a_recipe_that_is_applied_twice_changes_nothing_more(name, recipe, fixtures_dir):
    model = load(fixtures_dir / name / "model.onnx")
    passes = Pipeline.from_recipe(recipe)
    passes(model)
    again = passes(model)
    assert [item.name for item in again.passes if item.changed] == []
