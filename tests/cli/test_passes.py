"""``graphsurgery passes``."""

from __future__ import annotations

import json

from graphsurgery.recipes import recipe_names
from graphsurgery.registry import make_pass, pass_names, pass_type


def test_every_pass_with_its_options(run):
    done = run("passes")
    assert (done.code, done.err) == (0, "")
    assert f"recipes: {', '.join(recipe_names())}" in done.out
    for name in pass_names():
        assert f"{name} " in done.out
        assert pass_type(name).summary in done.out
    assert "(also num_logits_to_keep, logits_to_keep)" in done.out


def test_json(run):
    done = run("passes", "--report", "json")
    assert (done.code, done.err) == (0, "")
    listed = json.loads(done.out)
    assert [item["name"] for item in listed] == pass_names()
    for item in listed:
        kind = pass_type(item["name"])
        made = kind.from_options({option["name"]: option["default"] for option in item["options"]})
        assert made == kind()
        assert item["summary"] == kind.summary
        assert item["contract"]
        assert [option["name"] for option in item["options"]][:2] == ["sites", "exclude"]
    prune = next(item for item in listed if item["name"] == "prune-last-token")
    assert next(option for option in prune["options"] if option["name"] == "keep") == {
        "name": "keep",
        "type": "int",
        "default": 1,
        "aliases": ["num_logits_to_keep", "logits_to_keep"],
    }


def test_a_recipe_as_it_can_be_typed(run):
    done = run("passes", "--recipe", "prefill")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("prefill: ")
    specs = [line.strip().removeprefix("-p '").removesuffix("'") for line in lines[1:]]
    assert [str(make_pass(spec)) for spec in specs] == specs
    done = run("passes", "--recipe", "prefill", "--report", "json")
    data = json.loads(done.out)
    assert (data["name"], data["passes"]) == ("prefill", specs)


def test_a_recipe_of_ones_own(run, tmp_path):
    (tmp_path / "mine.toml").write_text('[[pass]]\nname = "tidy"\nsites = ["main"]\n')
    done = run("passes", "--recipe", tmp_path / "mine.toml")
    assert (done.code, done.out) == (0, "mine: \n  -p 'tidy{sites=[main]}'\n")


def test_what_does_not_exist(run, tmp_path):
    done = run("passes", "--recipe", "prefil")
    assert (done.code, done.out) == (2, "")
    assert done.err == "graphsurgery: Unknown recipe: 'prefil'; did you mean prefill or npu-prefill?\n"
    (tmp_path / "bad.toml").write_text('[[pass]]\nname = "tidy"\nsize = 3\n')
    done = run("passes", "--recipe", tmp_path / "bad.toml")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("graphsurgery: Unknown option of pass tidy: 'size'; ")
