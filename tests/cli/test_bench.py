"""``graphsurgery bench``."""

from __future__ import annotations

import json
import shutil
import sys
from xml.etree import ElementTree as ET

import pytest

from graphsurgery import benchmark
from tests.bench_helpers import fake_worker


@pytest.fixture
def fake(monkeypatch):
    """Replaces workers by such as measure nothing."""

    def replace(**changes):
        worker = fake_worker(**changes)
        monkeypatch.setattr(benchmark, "WorkerProcess", worker)
        return worker

    return replace


@pytest.fixture
def two(llama, tmp_path):
    return llama, shutil.copy(llama, tmp_path / "b.onnx")


def test_a_real_run(run, llama):
    done = run("bench", llama, "--prefill", "4", "--runs", "2", "--warmup", "0", "--report", "json")
    data = json.loads(done.out)
    assert (done.code, done.err, data["kind"]) == (0, "", "bench")
    assert [(row["phase"], row["length"], row["a"]["status"]) for row in data["rows"]] == [("prefill", 4, "measured")]
    assert data["settings"]["runs"] == 2


def test_forms_and_files(run, fake, two, tmp_path):
    fake()
    arguments = ("bench", *two, "--prefill", "4,8", "--decode", "3", "--runs", "2")
    done = run(*arguments, "--report-file", tmp_path / "r.json", "--plot", tmp_path / "p.svg")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:3] == [f"A {two[0]}", f"B {two[1]}", "cpu, 2 threads, batch 1, median of 2 runs after 1"]
    assert lines[4].split()[:9] == ["llama.onnx", "prefill", "4", "0", "10.00", "0%", "10.00", "0%", "1.000"]
    assert len(lines) == 8
    assert "\x1b" not in done.out
    assert json.loads((tmp_path / "r.json").read_text())["planned"] == 3
    assert ET.parse(tmp_path / "p.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    done = run(*arguments, "--report", "csv", "--report-file", tmp_path / "r.csv")
    assert (tmp_path / "r.csv").read_text() == done.out
    assert len(done.out.splitlines()) == 7
    done = run(*arguments, "--report", "markdown", "--report-file", tmp_path / "r.md")
    assert (tmp_path / "r.md").read_text() == done.out
    assert done.out.startswith("## Benchmark\n")


def test_a_gate(run, fake, two, tmp_path):
    fake(seconds={"b.onnx": 0.02})
    arguments = ("bench", *two, "--prefill", "4,8", "--report-file", tmp_path / "r.csv", "--gate")
    done = run(*arguments, "latency=1.05,memory=1.10")
    assert done.code == 1
    assert done.err == (
        "graphsurgery: llama.onnx, prefill S=4: median latency of B is 2.000 times that of A (gate 1.05).\n"
    )
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 5
    assert len(done.out.splitlines()) == 7
    done = run(*arguments, "latency=2,memory=1.10")
    assert (done.code, done.err) == (0, "")


def test_an_interrupt_leaves_the_rows_so_far(run, fake, two, tmp_path):
    fake(failing={("b.onnx", "run"): KeyboardInterrupt()})
    done = run(
        *("bench", *two, "--prefill", "4,8", "--runs", "1", "--gate", "latency=0.1"),
        *("--report-file", tmp_path / "r.json", "--plot", tmp_path / "p.svg"),
    )
    assert done.code == 130
    assert done.err == "graphsurgery: interrupted; 1 of 2 rows were measured and are reported.\n"
    assert done.out.splitlines()[-1] == "interrupted: 1 of 2 rows were measured"
    data = json.loads((tmp_path / "r.json").read_text())
    assert ([row["length"] for row in data["rows"]], data["interrupted"]) == ([4], True)
    assert (tmp_path / "p.svg").exists()


def test_what_could_not_be_measured(run, fake, cases_dir):
    fake()
    model = cases_dir / "a08_static_cache_scatter_ctx16.onnx"
    done = run("bench", model, "--prefill", "17")
    assert done.code == 5
    assert done.err == (
        f"graphsurgery: Nothing was measured of {model.name} (A): its caches have 16 slots; choose other sizes.\n"
    )
    assert done.out.splitlines()[-1] == f"not applicable: {model.name} at prefill S=17: its caches have 16 slots"


def test_without_the_runtime(run, llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = run("bench", llama)
    assert (done.code, done.out) == (5, "")
    assert done.err == (
        'graphsurgery: Measuring needs ONNX Runtime, which is not installed: pip install "graphsurgery[verify]".\n'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefill", "a"], "'a' are no sizes: write numbers with commas, as 128,512, or none."),
        (["--prefill", "0"], "A prompt of 0 tokens cannot be run: give lengths of 1 or more."),
        (["--prefill", "none"], "There is nothing to measure: give prefill lengths or decode pasts."),
        (["--gate", "latency=1"], "A gate compares two models: give B too."),
        (["--report-file", "r.txt"], "r.txt has no ending that tells the form: use .json, .csv, .md."),
        (["--plot", "p.png"], "p.png does not end with .svg: plots are written as SVG."),
        (["--provider", "tpu"], "ONNX Runtime has no provider 'tpu' here"),
    ],
)
def test_usage(run, llama, options, message):
    done = run("bench", llama, *options)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_the_public_name():
    import graphsurgery

    assert graphsurgery.bench is benchmark.bench_models
