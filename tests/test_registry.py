"""The registry: lazy, open to other packages, and not to be taken over."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from graphsurgery.errors import UsageError
from graphsurgery.passes.tidy import Tidy
from graphsurgery.registry import ENTRY_POINT_GROUP, make_pass, pass_names, pass_type
from graphsurgery.specs import PassSpec
from tests.small_models import DoubleNegate

PLUGIN = '''
import dataclasses
from typing import ClassVar
from graphsurgery.pass_base import Pass

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirror(Pass):
    """A pass of another package."""

    name: ClassVar[str] = "mirror"
    summary: ClassVar[str] = "change nothing"
    depth: int = 1

    def find(self, model):
        return []

    def rewrite(self, model, sites, report):
        return frozenset()


class Unfinished(Pass):
    name = "unfinished"
    summary = "defines nothing"


class NotAPass:
    name = "not-a-pass"
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Installs a distribution that registers entry points; the function takes {name: value}."""

    def install(**points: str) -> None:
        name = f"mirror_dist_{tmp_path.name.replace('-', '_')}"
        (tmp_path / "mirror_plugin.py").write_text(PLUGIN)
        (tmp_path / "angry_plugin.py").write_text("raise RuntimeError('no licence\\nfound')")
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key.replace('_', '-')} = {value}" for key, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines]))
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        for module in ("mirror_plugin", "angry_plugin"):
            monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def test_own_passes_come_first_in_a_fixed_order():
    assert pass_names()[0] == "prune-last-token"
    assert "tidy" in pass_names()
    assert pass_type("tidy") is Tidy


def test_every_pass_has_what_the_listing_shows():
    for name in pass_names():
        kind = pass_type(name)
        assert kind.name == name
        assert kind.summary
        assert kind.summary[0].islower()
        assert not kind.summary.endswith(".")
        assert kind.__doc__
        assert kind.__doc__ != DoubleNegate.__doc__
        assert make_pass(name) == kind()


def test_listing_names_imports_no_pass():
    code = (
        "import sys, graphsurgery.registry as r; r.pass_names(); "
        "print([m for m in sys.modules if m.startswith('graphsurgery.passes') or m in ('onnx_ir', 'numpy', 'pydantic')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"


def test_another_package_adds_a_pass(plugin):
    plugin(mirror="mirror_plugin:Mirror")
    assert pass_names()[-1] == "mirror"
    made = make_pass("mirror{depth=3}")
    assert str(made) == "mirror{depth=3}"
    assert type(made).__module__ == "mirror_plugin"


def test_a_listed_name_cannot_be_taken_over(plugin):
    plugin(tidy="mirror_plugin:Mirror", mirror="mirror_plugin:Mirror")
    assert pass_type("tidy") is Tidy
    assert pass_names().count("tidy") == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gone", "no_such_plugin:Mirror", "which cannot be imported: No module named 'no_such_plugin'."),
        (
            "lost",
            "mirror_plugin:Nothing",
            "which cannot be imported: module 'mirror_plugin' has no attribute 'Nothing'.",
        ),
        ("angry", "angry_plugin:Mirror", "which cannot be imported: no licence found."),
        ("other", "mirror_plugin:NotAPass", "which is not a graphsurgery.Pass that defines find and rewrite."),
        ("unfinished", "mirror_plugin:Unfinished", "which is not a graphsurgery.Pass that defines find and rewrite."),
        ("module", "mirror_plugin", "which is not a graphsurgery.Pass that defines find and rewrite."),
        ("looking-glass", "mirror_plugin:Mirror", "which calls itself 'mirror': the two names must be equal."),
    ],
)
def test_a_broken_registration_is_named(plugin, name, value, message):
    plugin(**{name.replace("-", "_"): value})
    with pytest.raises(UsageError) as caught:
        pass_type(name)
    assert str(caught.value) == f"Pass {name!r} is registered as {value!r}, {message}"
    assert pass_type("tidy") is Tidy


def test_specs_come_as_text_parsed_or_as_tables():
    expected = Tidy(sites=("main",))
    assert make_pass("tidy{sites=[main]}") == expected
    assert make_pass(PassSpec("tidy", (("sites", ("main",)),))) == expected
    assert make_pass({"name": "tidy", "sites": ["main"]}) == expected


def test_unknown_passes_get_the_closest():
    with pytest.raises(UsageError) as caught:
        make_pass("prune-last-tokens")
    assert str(caught.value) == "Unknown pass: 'prune-last-tokens'; did you mean prune-last-token?"
    with pytest.raises(UsageError, match=r"^Unknown pass: 'zzz'; there are prune-last-token, .*\.$"):
        make_pass("zzz")


@pytest.mark.parametrize("table", [{}, {"sites": []}, {"name": 3}])
def test_a_table_names_its_pass(table):
    with pytest.raises(UsageError) as caught:
        make_pass(table)
    assert str(caught.value) == f'A [[pass]] table of a recipe needs name = "..."; got {table!r}.'
