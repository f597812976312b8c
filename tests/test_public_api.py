"""The public names: what they are, whatever is imported first, and what importing them costs."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import time

import pytest

import graphsurgery

HEAVY = ["onnx", "onnx_ir", "onnxruntime", "numpy", "pydantic", "google.protobuf", "ml_dtypes"]


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_every_public_name_is_there():
    assert sorted(graphsurgery.__all__) == list(graphsurgery.__all__)
    assert dir(graphsurgery) == graphsurgery.__all__
    for name in graphsurgery.__all__:
        assert getattr(graphsurgery, name) is not None
    with pytest.raises(AttributeError, match="module 'graphsurgery' has no attribute 'veryfy'"):
        graphsurgery.veryfy  # noqa: B018


def test_no_module_is_called_like_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(graphsurgery.__path__)}
    assert not modules & set(graphsurgery.__all__)


def test_every_public_module_says_what_it_offers():
    for module in pkgutil.walk_packages(graphsurgery.__path__, "graphsurgery."):
        name = module.name.rpartition(".")[2]
        if name.startswith("_") or name == "__main__":
            continue
        found = importlib.import_module(module.name)
        for public in getattr(found, "__all__", ()):
            assert hasattr(found, public), f"{module.name}.{public}"
        assert module.ispkg or found.__doc__, f"{module.name} has no docstring"


@pytest.mark.parametrize(
    "first",
    [
        "import graphsurgery.equivalence.verify, graphsurgery.cli.verify_command",
        "from graphsurgery import *; import graphsurgery.passes.tidy, graphsurgery.inspection, graphsurgery.version",
    ],
)
def test_public_names_stay_what_they_are(first):
    code = f"""
{first}
import sys, types, graphsurgery
assert not any(isinstance(getattr(graphsurgery, name), types.ModuleType) for name in graphsurgery.__all__)
print(graphsurgery.verify.__name__, graphsurgery.inspect.__name__, graphsurgery.load.__name__, graphsurgery.save.__name__)
print(graphsurgery.Pipeline.__module__, callable(graphsurgery.verify), isinstance(graphsurgery.__version__, str))
print("onnxruntime" in sys.modules)
"""
    assert _run(code).splitlines() == [
        "verify_models inspect_model load save",
        "graphsurgery.pipeline True True",
        "False",
    ]


def test_importing_the_package_imports_nothing_heavy():
    code = f"import graphsurgery, graphsurgery.errors, sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert _run(code) == "[]"


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from graphsurgery.cli import main
try:
    main(["--help"])
except SystemExit as error:
    print(error.code, [m for m in {[*HEAVY, "rich"]} if m in sys.modules])
"""
    assert _run(code).splitlines()[-1] == "0 []"


def test_help_is_quick():
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "graphsurgery", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.5, times
