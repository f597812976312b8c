"""`apply` killed at random moments, in every way of placing weights, with and without an output that is there already."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from graphsurgery.model_files.staging import is_temporary
from graphsurgery.model_io import load
from graphsurgery.workflow import ApplyRequest, apply_passes
from tests.model_io_helpers import REPOSITORY, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# One process pays for the imports; for every line that it is sent it forks a child that applies and waits to be killed.
SERVER = """
    import json, os, signal, sys
    from pathlib import Path
    from graphsurgery import Pipeline
    from graphsurgery.workflow import ApplyRequest, apply_passes
    Pipeline(["tidy"])
    for line in sys.stdin:
        source, output, weights = json.loads(line)
        child = os.fork()
        if not child:
            print(os.getpid(), flush=True)
            request = ApplyRequest(input=Path(source), output=output, specs=("tidy",), weights=weights, force=True)
            apply_passes(request)
            signal.pause()
        print("ended", os.waitpid(child, 0)[1], flush=True)
"""


class Server:
    """Starts runs of ``apply`` and kills them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout

    def kill_after(self, seconds: float, *request: str) -> None:
        """Start a run and kill it ``seconds`` later."""
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        child = int(self._answers.readline())
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        assert self._answers.readline() == f"ended {signal.SIGKILL:d}\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-c", textwrap.dedent(SERVER)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield Server(process)
        process.stdin.close()


def _hashes(directory: Path) -> dict[str, str]:
    return {
        item.name: hashlib.sha256(item.read_bytes()).hexdigest()
        for item in directory.iterdir()
        if item.is_file() and not is_temporary(item.name)
    }


def _kill(server: Server, tmp_path: Path, mode: str, kills: int, *, existing: bool, seed: int) -> int:
    """Kill ``apply`` ``kills`` times; how many of the runs had not put their output in place."""
    source = tmp_path / "in" / "model.onnx"
    shutil.copytree(REPOSITORY / "fixtures" / "llama_external", source.parent)
    directory = source.parent if mode in ("reference", "auto") else tmp_path / "out"
    directory.mkdir(exist_ok=True)
    output = directory / "out.onnx"
    before = _hashes(source.parent)
    weights = tensor_bytes(source)
    request = ApplyRequest(input=source, output=output, specs=("tidy",), weights=mode, force=True)  # type: ignore[arg-type]
    apply_passes(request)
    started = time.perf_counter()
    apply_passes(request)
    seconds = time.perf_counter() - started
    new = output.read_bytes()
    kept = before if directory == source.parent else {}
    chance = random.Random(seed)
    early = 0
    for _ in range(kills):
        for name in _hashes(directory):
            if name not in kept:
                (directory / name).unlink()
        if existing:
            output.write_bytes(b"an older output")
        server.kill_after(chance.uniform(0, 1.5 * seconds), str(source), str(output), mode)
        # The input is what it was; the output is the old one, none, or the whole new one with its data.
        assert {name: _hashes(source.parent)[name] for name in before} == before
        there = output.read_bytes() if output.exists() else None
        if there == (b"an older output" if existing else None):
            early += 1
            continue
        assert there is not None
        assert load(output).graph.num_nodes() == load(source).graph.num_nodes()
        assert tensor_bytes(output).items() <= weights.items()
    strays = [item.name for item in directory.iterdir() if item.name.startswith(".")]
    assert all(is_temporary(name) for name in strays), strays
    # What was left behind is no hindrance.
    apply_passes(request)
    assert tensor_bytes(output).items() <= weights.items()
    if mode in ("reference", "auto"):
        assert output.read_bytes() == new
    assert {name: _hashes(source.parent)[name] for name in before} == before
    return early


@pytest.mark.parametrize(
    ("mode", "existing"), [("reference", True), ("copy", True), ("hardlink", False), ("repack", True)]
)
def test_apply_is_killed(server: Server, tmp_path: Path, mode: str, existing: bool) -> None:
    _kill(server, tmp_path, mode, 2, existing=existing, seed=3)


@pytest.mark.full
@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("mode", ["auto", "reference", "copy", "hardlink", "repack"])
def test_apply_is_killed_often(server: Server, tmp_path: Path, mode: str, existing: bool) -> None:
    """100 kills in all; some of ten must come in time, or nothing was tried."""
    assert _kill(server, tmp_path, mode, 10, existing=existing, seed=5) >= 1
