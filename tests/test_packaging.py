"""The package is the same whether it is installed, installed editable, or run from its root.

``passes/`` at the top level is the package ``graphsurgery.passes``: built into it by setuptools, and reached through a
committed link where nothing is built. Nothing here uses the network: builds are not isolated, and dependencies are
those of the environment that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from graphsurgery.recipes import recipe_names
from graphsurgery.version import __version__

ROOT = Path(__file__).parents[1]
IDENTITY = """
import sys
import graphsurgery.passes, graphsurgery.passes.tidy as tidy
from graphsurgery.pipeline import Pipeline
from graphsurgery.recipes import read_recipe, recipe_names
from graphsurgery.registry import make_pass, pass_type
assert tidy.__name__ == tidy.Tidy.__module__ == "graphsurgery.passes.tidy"
assert pass_type("tidy") is tidy.Tidy is type(make_pass("tidy"))
assert not [name for name in sys.modules if name == "passes" or name.startswith("passes.")]
assert [Pipeline.from_recipe(name) for name in recipe_names()]
print(graphsurgery.passes.__file__)
print(graphsurgery.__file__)
"""


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _packages_on_disk() -> set[str]:
    """Dotted names of the folders that are packages, through the link to ``passes``."""
    found = set()
    for directory, folders, files in os.walk(ROOT / "graphsurgery", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        if "__init__.py" in files:
            found.add(".".join(Path(directory).relative_to(ROOT).parts))
    return found


# ---- what the configuration says --------------------------------------------------------------------------------------


def test_every_package_is_listed():
    setuptools = _project()["tool"]["setuptools"]
    listed = setuptools["packages"]
    assert set(listed) == _packages_on_disk()
    assert len(set(listed)) == len(listed)
    assert setuptools["package-dir"] == {"graphsurgery": "graphsurgery", "graphsurgery.passes": "passes"}


def test_passes_is_a_link_within_the_repository():
    link = ROOT / "graphsurgery" / "passes"
    assert link.is_symlink()
    assert os.readlink(link) == "../passes"


def test_one_version():
    assert _project()["project"]["version"] == __version__


def test_every_dependency_has_a_lower_bound_and_the_runtime_is_optional():
    project = _project()["project"]
    for requirement in project["dependencies"]:
        assert ">=" in requirement, requirement
        assert not requirement.startswith("onnxruntime")
    assert any(item.startswith("onnxruntime>=") for item in project["optional-dependencies"]["verify"])


def test_nothing_in_the_repository_imports_passes_by_its_folder():
    for folder in ("graphsurgery", "passes", "tests", "benchmarks", "fixtures"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = path.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if line.startswith(("import passes", "from passes"))], path


# ---- what is built ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what a build reads: building leaves files behind."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 (the extra `test` has it)")
    copy = Path(tmp_path_factory.mktemp("checkout")) / "graphsurgery"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("graphsurgery", "passes"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def _build(kind: str, directory: Path, output: Path) -> Path:
    code = (
        f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(output)], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return output / done.stderr.splitlines()[-1]


def _sources(directory: Path) -> set[str]:
    """Every module, recipe, style and marker under the name that it has once installed."""
    found = set()
    for top, folders, files in os.walk(directory / "graphsurgery", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            if name.endswith((".py", ".toml", ".css", ".typed")):
                found.add((Path(top) / name).relative_to(directory).as_posix())
    return found


def test_the_wheel_holds_everything_and_nothing_else(checkout, tmp_path):
    with zipfile.ZipFile(_build("wheel", checkout, tmp_path)) as wheel:
        names = set(wheel.namelist())
        tidy = wheel.read("graphsurgery/passes/tidy.py")
        entry_points = wheel.read(f"graphsurgery-{__version__}.dist-info/entry_points.txt").decode()
    assert {name for name in names if ".dist-info/" not in name} == _sources(checkout)
    assert {
        "graphsurgery/py.typed",
        "graphsurgery/passes/__init__.py",
        "graphsurgery/passes/prune_last_token.py",
    } <= names
    assert {f"graphsurgery/recipes/{name}.toml" for name in recipe_names()} <= names
    assert f"graphsurgery-{__version__}.dist-info/licenses/LICENSE" in names
    assert tidy == (ROOT / "passes" / "tidy.py").read_bytes()
    assert entry_points == "[console_scripts]\ngraphsurgery = graphsurgery.cli:main\n"


@pytest.mark.full
def test_a_wheel_from_the_source_archive_is_the_same(checkout, tmp_path):
    for name in ("direct", "archive", "unpacked", "indirect"):
        (tmp_path / name).mkdir()
    with tarfile.open(_build("sdist", checkout, tmp_path / "archive")) as archive:
        # The filter came with a patch release of Python 3.11.
        safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "unpacked", **safe)
    direct = zipfile.ZipFile(_build("wheel", checkout, tmp_path / "direct"))
    indirect = zipfile.ZipFile(
        _build("wheel", tmp_path / "unpacked" / f"graphsurgery-{__version__}", tmp_path / "indirect")
    )
    with direct, indirect:
        assert sorted(direct.namelist()) == sorted(indirect.namelist())
        for name in direct.namelist():
            if name.endswith((".py", ".toml")):
                assert direct.read(name) == indirect.read(name)


# ---- where it is imported from ----------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path) -> Path:
    """A virtual environment with the dependencies of this one, and without graphsurgery."""
    home = Path(tmp_path) / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = next(home.rglob("site-packages"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "graphsurgery" not in entry.name and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return home


def _python(environment: Path) -> Path:
    return environment / ("Scripts" if os.name == "nt" else "bin") / "python"


def _identity(environment: Path, directory: Path) -> list[str]:
    done = subprocess.run(
        [_python(environment), "-c", IDENTITY], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _install(environment: Path, *arguments: object) -> None:
    pip = [sys.executable, "-m", "pip", "--python", _python(environment), "install", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*map(str, [*pip, *options, *arguments])], check=True, capture_output=True, text=True)


def test_uninstalled_from_the_root(checkout, environment):
    passes, package = _identity(environment, checkout)
    assert passes == str(checkout / "graphsurgery" / "passes" / "__init__.py")
    assert package == str(checkout / "graphsurgery" / "__init__.py")
    done = subprocess.run(
        [_python(environment), "-m", "graphsurgery", "--version"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"graphsurgery, version {__version__}\n"


@pytest.mark.full
def test_installed(checkout, environment, tmp_path):
    _install(environment, checkout)
    site = next(environment.rglob("site-packages"))
    passes, package = _identity(environment, tmp_path)
    assert passes == str(site / "graphsurgery" / "passes" / "__init__.py")
    assert package == str(site / "graphsurgery" / "__init__.py")
    script = _python(environment).with_name("graphsurgery")
    done = subprocess.run([script, "passes"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "prune-last-token" in done.stdout


@pytest.mark.full
def test_installed_editable(checkout, environment, tmp_path):
    copy = shutil.copytree(checkout, tmp_path / "editable", symlinks=True)
    _install(environment, "--editable", copy)
    passes, package = _identity(environment, tmp_path)
    # Either way in is the same file: the folder itself, or the link to it.
    assert Path(passes).resolve() == (copy / "passes" / "__init__.py").resolve()
    assert package == str(copy / "graphsurgery" / "__init__.py")
    # A change shows at once, without installing again.
    with open(copy / "passes" / "tidy.py", "a", encoding="utf-8") as file:
        file.write("\nMARK = 'changed'\n")
    code = "import graphsurgery.passes.tidy as tidy; print(tidy.MARK)"
    done = subprocess.run([_python(environment), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "changed\n"
