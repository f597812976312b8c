"""Processes that are killed or limited while they save, and directories that cannot be written."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from graphsurgery.errors import GraphSurgeryError, SaveError
from graphsurgery.model_io import load, save
from tests.model_io_helpers import REPOSITORY, read_proto, tensor_bytes, write_model

if TYPE_CHECKING:
    from pathlib import Path

TEMPORARY = re.compile(r"\..*\.graphsurgery-[0-9a-f]{8}\.tmp(\.onnx)?")


def _start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# One process pays for the imports; for every line that it is sent it forks a child that saves until it is killed.
SAVE_LOOP = """
    import os, sys
    from graphsurgery.model_io import load, save
    model = load(sys.argv[1])
    model.graph.name = "new"
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            print(os.getpid(), flush=True)
            while True:
                save(model, sys.argv[2], force=True, weights=sys.argv[3])
        os.waitpid(child, 0)
        print("dead", flush=True)
"""


def _kill_while_saving(tmp_path: Path, mode: str, kills: int, seed: int) -> int:
    """Kill a process that saves over an output again and again; how often it left a temporary."""
    path = write_model(tmp_path / "in", weights=8, rows=20_000)
    expected = tensor_bytes(path)
    directory = tmp_path / "in" if mode == "reference" else tmp_path / "out"
    directory.mkdir(exist_ok=True)
    output = directory / "o.onnx"
    chance = random.Random(seed)
    process = _start(SAVE_LOOP, str(path), str(output), mode)
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(kills):
        save(load(path), output, force=True, weights=mode)  # type: ignore[arg-type]
        process.stdin.write("go\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert process.stdout.readline() == "dead\n"
        # The old model or the new one, whole; the data that it refers to is there.
        assert read_proto(output).graph.name in ("adds", "new")
        assert tensor_bytes(output) == expected
    assert tensor_bytes(path) == expected
    process.communicate(timeout=60)
    hidden = [item.name for item in directory.iterdir() if item.name.startswith(".")]
    assert all(TEMPORARY.fullmatch(name) for name in hidden), hidden
    # What was left behind is no hindrance.
    save(load(path), output, force=True, weights=mode)  # type: ignore[arg-type]
    return len(hidden)


@pytest.mark.parametrize(("mode", "kills"), [("reference", 3), ("copy", 4), ("repack", 3)])
def test_kills_leave_the_old_or_the_new_output(tmp_path: Path, mode: str, kills: int):
    _kill_while_saving(tmp_path, mode, kills, seed=7)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["reference", "copy", "hardlink", "repack"])
def test_many_kills_leave_the_old_or_the_new_output(tmp_path: Path, mode: str):
    _kill_while_saving(tmp_path, mode, 40, seed=11)


def test_a_file_size_limit(tmp_path: Path):
    path = write_model(tmp_path / "in", weights=4, rows=50_000)
    output = tmp_path / "out"
    output.mkdir()
    (output / "o.onnx").write_bytes(b"old")
    process = _start(
        """
        import resource, sys
        from graphsurgery.errors import SaveError
        from graphsurgery.model_io import load, save
        model = load(sys.argv[1])
        for limit, weights in ((100_000, "copy"), (100_000, "repack"), (100, "reference")):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                save(model, sys.argv[2] if weights != "reference" else None, force=True, weights=weights)
            except SaveError as error:
                print(error)
        """,
        str(path),
        str(output / "o.onnx"),
    )
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    lines = stdout.splitlines()
    assert len(lines) == 3
    assert all("could not be written: File too large" in line for line in lines)
    assert [item.name for item in output.iterdir()] == ["o.onnx"]
    assert (output / "o.onnx").read_bytes() == b"old"
    assert sorted(item.name for item in path.parent.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_directories_that_cannot_be_written(tmp_path: Path):
    model = load(write_model(tmp_path / "in"))
    # Nobody, not even root, makes files in /proc.
    for weights in ("copy", "repack"):
        with pytest.raises(SaveError, match=r"^/proc/o\.onnx could not be written: "):
            save(model, "/proc/o.onnx", weights=weights)
    (tmp_path / "file").write_text("x")
    with pytest.raises(GraphSurgeryError, match="does not exist"):
        save(model, tmp_path / "file" / "o.onnx")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(SaveError, match="Permission denied"):
            save(model, tmp_path / "closed" / "o.onnx")


def test_memory_and_time_do_not_grow_with_the_data(tmp_path: Path):
    path = write_model(tmp_path / "in")
    proto = read_proto(path)
    # A sparse file of 8 GiB: it costs nothing unless it is read.
    size = 8 * 2**30
    os.truncate(tmp_path / "in" / "model.onnx.data", size)
    tensor = proto.graph.initializer[0]
    tensor.dims[0] = size // 4 - 16
    next(entry for entry in tensor.external_data if entry.key == "length").value = str(size - 64)
    path.write_bytes(proto.SerializeToString())
    process = _start(
        """
        import resource, sys
        from graphsurgery.model_io import load, save
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = save(load(sys.argv[1]))
        print(result.bytes_copied, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000)
        """,
        str(path),
    )
    stdout, stderr = process.communicate(timeout=60)
    assert (stdout, stderr) == ("0 True\n", "")
