"""`benchmarks/_measure.py`: what is deterministic in measuring."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _measure import Run, WorkerError, alternate, environment, table

from graphsurgery.benching.samples import Sample

SCRIPT = """
    import sys
    sys.path.insert(0, {benchmarks!r})
    import os
    from _measure import worker

    def double(number):
        print("chatter")
        return {{"result": 2 * number, "process": os.getpid()}}

    def fail():
        raise ValueError("no such luck")

    if worker({{"double": double, "fail": fail}}):
        sys.exit()
    print("main")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    path.write_text(textwrap.dedent(SCRIPT).format(benchmarks=benchmarks))
    return path


def test_each_run_is_a_process_of_its_own(script: Path) -> None:
    results = [Run("double", {"number": number}, script)() for number in (3, 4)]
    assert [result["result"] for result in results] == [6, 8]
    assert results[0]["process"] != results[1]["process"]


def test_a_failing_task_is_an_error_that_says_what_it_wrote(script: Path) -> None:
    with pytest.raises(WorkerError, match=r"(?s)Task fail of script.py ended with 1:.*ValueError: no such luck"):
        Run("fail", {}, script)()


def test_runs_alternate_and_turn_round() -> None:
    order: list[str] = []

    def task(name: str, value: float) -> Any:
        def run() -> dict[str, Any]:
            order.append(name)
            return {"seconds": value + len(order), "note": "dropped"}

        return run

    told: list[str] = []
    found = alternate({"a": task("a", 0), "b": task("b", 10)}, 3, progress=told.append)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert told[:3] == ["a, run 1 of 3", "b, run 1 of 3", "b, run 2 of 3"]
    assert found["a"] == {"seconds": Sample((1, 4, 5))}
    assert found["b"]["seconds"].values == (12, 13, 16)


def test_table() -> None:
    text = table(("what", "time"), [("load", "1.5 s"), ("pipeline", "12 s")])
    assert text.splitlines() == [
        "| what     |  time |",
        "| -------- | ----: |",
        "| load     | 1.5 s |",
        "| pipeline |  12 s |",
    ]


def test_environment_names_versions() -> None:
    about = environment("numpy")
    assert set(about["versions"]) == {"numpy"}
    assert about["cores"] >= 1
