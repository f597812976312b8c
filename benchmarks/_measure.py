"""Measuring by the house rules what is no run of a model: every run in its own process, alternating, medians of several.

A script gives its tasks to :func:`worker` and the runs to :func:`alternate`::

    def load(path: str) -> dict[str, float]:
        started = time.perf_counter()
        ...
        return {"seconds": time.perf_counter() - started}

    if worker({"load": load}):
        sys.exit()
    samples = alternate({name: Run("load", path=name) for name in paths}, runs=5)
    print(samples["a.onnx"]["seconds"].median)
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphsurgery.benching.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "Run",
    "WorkerError",
    "alternate",
    "environment",
    "table",
    "worker",
]

_WORKER = "--worker"


# ---- one run -----------------------------------------------------------------------------------------------------------


class WorkerError(Exception):
    """A worker process failed; the message is what it wrote to standard error."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A call of a task in a process of its own.

    Attributes:
        task: name under which the script gave the function to :func:`worker`.
        arguments: JSON values, passed on by keyword.
        script: the script that has the task; the running one by default.
    """

    task: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    script: Path = dataclasses.field(default_factory=lambda: Path(sys.argv[0]).absolute())

    def __call__(self) -> dict[str, Any]:
        """What the task returned.

        Raises:
            WorkerError: the process failed.
        """
        command = [sys.executable, str(self.script), _WORKER, self.task, json.dumps(self.arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise WorkerError(f"Task {self.task} of {self.script.name} ended with {done.returncode}:\n{done.stderr}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result


def worker(tasks: Mapping[str, Callable[..., Mapping[str, Any]]]) -> bool:
    """Run the task that the command line asks for and print its result; False where it asks for none.

    To be called first thing in a script, before anything heavy is imported.
    """
    if sys.argv[1:2] != [_WORKER]:
        return False
    task, arguments = sys.argv[2:4]
    print(json.dumps(dict(tasks[task](**json.loads(arguments)))))
    return True


# ---- many runs ---------------------------------------------------------------------------------------------------------


def alternate(
    runs: Mapping[str, Callable[[], Mapping[str, Any]]], count: int, *, progress: Callable[[str], None] | None = None
) -> dict[str, dict[str, Sample]]:
    """Run all of ``runs`` in turn, ``count`` times over, so that a slow minute of the machine meets all of them.

    Every second round goes backwards: none always has the same neighbour.

    Args:
        runs: what to run under which name, usually :class:`Run` objects.
        count: number of rounds.
        progress: told about each run before it starts.

    Returns:
        For each name, a sample of each number that its runs returned (anything else is dropped).
    """
    results: dict[str, list[Mapping[str, Any]]] = {name: [] for name in runs}
    for turn in range(count):
        order = list(runs) if turn % 2 == 0 else list(runs)[::-1]
        for name in order:
            if progress is not None:
                progress(f"{name}, run {turn + 1} of {count}")
            results[name].append(runs[name]())
    return {name: _samples(found) for name, found in results.items()}


def _samples(results: Sequence[Mapping[str, Any]]) -> dict[str, Sample]:
    figures = [key for key, value in results[0].items() if isinstance(value, int | float)]
    return {key: Sample(tuple(result[key] for result in results)) for key in figures}


# ---- telling -------------------------------------------------------------------------------------------------------------


def environment(*packages: str) -> dict[str, Any]:
    """Date, machine, load and versions, for the JSON file."""
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "versions": {package: metadata.version(package) for package in packages},
    }


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns whose cells all start with a digit or a sign are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *cells, strict=True)]
    right = [all(cell[:1] in "0123456789-+." for cell in column) for column in zip(*cells, strict=True)]
    rule = [("-" * (width - 1) + ":") if number else "-" * width for width, number in zip(widths, right, strict=True)]

    def line(texts: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(texts, widths, right, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(header), line(rule), *(line(row) for row in cells)])
