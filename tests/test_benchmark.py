"""Measuring: turns, failures, interrupts, pairs, feeds; with workers that measure nothing, and once with real ones."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest

from graphsurgery import benchmark
from graphsurgery.benching import memory
from graphsurgery.benching.bench_report import Measurement, NotMeasured
from graphsurgery.benching.gates import parse_gates
from graphsurgery.benching.pairs import find_pairs
from graphsurgery.benching.process import WorkerError, WorkerProcess
from graphsurgery.benching.subjects import read_subjects
from graphsurgery.equivalence.feeds import Sizes
from graphsurgery.errors import CannotCheckError, InputRefusedError, UsageError
from graphsurgery.pipeline import Pipeline
from tests.bench_helpers import MIB, fake_worker

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def two(fixtures_dir, tmp_path):
    """An export and a copy of it."""
    source = fixtures_dir / "llama" / "model.onnx"
    return shutil.copy(source, tmp_path / "a.onnx"), shutil.copy(source, tmp_path / "b.onnx")


@pytest.fixture
def fake(monkeypatch):
    """Replaces workers by such as measure nothing."""

    def replace(**changes):
        worker = fake_worker(**changes)
        monkeypatch.setattr(benchmark, "WorkerProcess", worker)
        return worker

    return replace


# ---- with workers that measure nothing --------------------------------------------------------------------------------


def test_runs_alternate(fake, two):
    worker = fake(seconds={"a.onnx": 0.02, "b.onnx": 0.01})
    steps = []
    found = benchmark.bench_models(
        *two, prefill=[4], runs=3, warmup=1, progress=lambda what, done, total: steps.append((what, done, total))
    )
    turns = "".join(name[0] for name, what in worker.log if what == "run")
    assert turns == "abbaabba"
    (row,) = found.rows
    assert isinstance(row.a, Measurement)
    assert row.a.latency.values == (0.02, 0.02, 0.02)
    assert row.ratio("latency") == 0.5
    assert row.tokens_per_second(row.a) == 200
    assert (row.a.loaded_bytes, row.a.peak_bytes, row.a.over_bytes) == (100 * MIB, 150 * MIB, 50 * MIB)
    assert steps == [("measuring", done, 10) for done in range(1, 11)]
    # Every row has processes of its own; two more sessions of each model make three.
    assert [what for name, what in worker.log if name == "a.onnx"] == [
        *("open", "feed", "run", "run", "run", "run", "memory", "end"),
        *("open", "end", "open", "end"),
    ]
    assert found.creations[0].a is not None
    assert found.creations[0].a.values == (0.5, 0.5, 0.5)
    assert found.exit_code == 0
    assert found.notes == ()


@pytest.mark.parametrize("what", ["open", "feed", "run", "memory"])
def test_one_model_fails_and_the_other_is_measured(fake, two, what):
    fake(failing={("b.onnx", what): WorkerError("no kernel")})
    found = benchmark.bench_models(*two, prefill=[4], runs=1)
    assert isinstance(found.rows[0].a, Measurement)
    assert found.rows[0].b == NotMeasured("failed", "no kernel")
    assert found.exit_code == 5
    assert found.problem == "a.onnx (B), prefill S=4, could not be measured: no kernel."


def test_an_interrupt_leaves_the_rows_so_far(fake, two):
    worker = fake(failing={("b.onnx", "run"): KeyboardInterrupt()})
    found = benchmark.bench_models(*two, prefill=[4, 8, 16], runs=2, warmup=0)
    assert [row.point.length for row in found.rows] == [4]
    assert (found.interrupted, found.planned, found.exit_code) == (True, 3, 130)
    assert found.creations[0].b is not None
    # No process is left behind.
    assert [what for _, what in worker.log].count("end") == 4


def test_sizes_that_are_not_taken_are_told(fake, cases_dir):
    fake()
    found = benchmark.bench_models(cases_dir / "a08_static_cache_scatter_ctx16.onnx", prefill=[8, 17], decode=[15, 16])
    reason = NotMeasured("not applicable", "its caches have 16 slots")
    assert [row.a if row.a == reason else "measured" for row in found.rows] == ["measured", reason, "measured", reason]
    assert found.exit_code == 0


def test_nothing_is_taken(fake, cases_dir):
    fake()
    found = benchmark.bench_models(cases_dir / "a08_static_cache_scatter_ctx16.onnx", prefill=[17])
    assert found.exit_code == 5
    assert found.problem == (
        "Nothing was measured of a08_static_cache_scatter_ctx16.onnx (A): its caches have 16 slots; choose other sizes."
    )
    assert found.creations == ()


def test_default_sizes(fake, two):
    fake()
    found = benchmark.bench_models(two[0], runs=1)
    assert [row.point.name for row in found.rows] == ["prefill S=128", "prefill S=512", "decode P=512", "decode P=4096"]


def test_a_model_of_one_length_is_measured_at_that(fake, two, tmp_path):
    fake()
    proto = onnx.ModelProto.FromString((tmp_path / "a.onnx").read_bytes())
    for value in proto.graph.input:
        if value.name in ("input_ids", "position_ids"):
            value.type.tensor_type.shape.dim[1].dim_value = 6
    (tmp_path / "six.onnx").write_bytes(proto.SerializeToString())
    assert [row.point.name for row in benchmark.bench_models(tmp_path / "six.onnx").rows] == ["prefill S=6"]
    found = benchmark.bench_models(tmp_path / "a.onnx", tmp_path / "six.onnx", prefill=[6, 7])
    assert [isinstance(row.b, Measurement) for row in found.rows] == [True, False]
    assert found.rows[1].b == NotMeasured("not applicable", "its length S is fixed at 6")


@pytest.mark.parametrize(
    ("memory", "reset", "note"),
    [
        ({"peak": None, "anonymous": None}, False, "memory was not measured: this system does not tell"),
        (
            {"peak": 9, "anonymous": 1},
            False,
            "the kernel does not let peaks be reset: they are those of whole processes, loading included",
        ),
    ],
)
def test_what_the_system_does_not_tell(fake, two, memory, reset, note):
    fake(memory=memory, reset=reset)
    found = benchmark.bench_models(two[0], prefill=[4], runs=1)
    assert found.notes == (note,)
    assert found.rows[0].sides()["a"].over_bytes is None  # type: ignore[union-attr]


def test_two_directories_are_paired_by_name(fake, two, tmp_path):
    for place in ("one/x.onnx", "one/sub/y.onnx", "one/z.onnx", "two/x.onnx", "two/sub/y.onnx", "two/w.onnx"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(two[0], tmp_path / place)
    one, other = tmp_path / "one", tmp_path / "two"
    fake()
    found = benchmark.bench_models(one, other, prefill=[4], decode=[3], runs=1)
    assert [(row.model, row.point.name) for row in found.rows] == [
        ("sub/y.onnx", "prefill S=4"),
        ("sub/y.onnx", "decode P=3"),
        ("x.onnx", "prefill S=4"),
        ("x.onnx", "decode P=3"),
    ]
    assert found.notes == (f"z.onnx is only in {one}: not measured", f"w.onnx is only in {other}: not measured")
    assert [creation.model for creation in found.creations] == ["sub/y.onnx", "x.onnx"]
    assert [pair.name for pair in find_pairs(one, None)[0]] == ["sub/y.onnx", "x.onnx", "z.onnx"]


def test_paths_that_cannot_be_paired(two, tmp_path):
    for name in ("empty", "one", "two"):
        (tmp_path / name).mkdir()
    shutil.copy(two[0], tmp_path / "one" / "x.onnx")
    shutil.copy(two[0], tmp_path / "two" / "y.onnx")
    one, file = tmp_path / "one", tmp_path / "a.onnx"
    with pytest.raises(UsageError, match=r"one is a directory and .*a\.onnx is not: give two files or two directories"):
        find_pairs(file, one)
    with pytest.raises(
        InputRefusedError, match=r"No model in .*one has a namesake in .*two: give the files themselves"
    ):
        find_pairs(one, tmp_path / "two")
    with pytest.raises(InputRefusedError, match=r"empty holds no \.onnx file"):
        find_pairs(tmp_path / "empty", None)
    with pytest.raises(InputRefusedError, match=r"gone\.onnx does not exist"):
        find_pairs(tmp_path / "gone.onnx", None)


def test_requests_that_make_no_sense(two):
    with pytest.raises(UsageError, match="A gate compares two models: give B too"):
        benchmark.bench_models(two[0], gates=parse_gates("latency=1"))
    with pytest.raises(UsageError, match="runs 0 is too few: give 1 or more"):
        benchmark.bench_models(two[0], runs=0)
    with pytest.raises(UsageError, match=r"ONNX Runtime has no provider 'tpu' here: there are .*cpu"):
        benchmark.bench_models(two[0], provider="tpu")


def test_without_the_runtime(two, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(CannotCheckError, match=r'not installed: pip install "graphsurgery\[verify\]"\.'):
        benchmark.bench_models(two[0])


def test_missing_data_is_told(fake, fixtures_dir, tmp_path):
    fake()
    shutil.copy(fixtures_dir / "genai_llama" / "model.onnx", tmp_path / "model.onnx")
    found = benchmark.bench_models(tmp_path / "model.onnx", prefill=[4])
    assert found.exit_code == 5
    assert "model.onnx.data" in (found.problem or "")


# ---- feeds ------------------------------------------------------------------------------------------------------------


def _pruned(source: Path, target: Path, *specs: str) -> Path:
    from graphsurgery.model_io import load, save

    model = load(source)
    assert Pipeline(list(specs))(model).changed
    save(model, target)
    return target


def test_both_models_are_fed_the_same(two, tmp_path):
    pruned = _pruned(two[0], tmp_path / "pruned.onnx", "prune-last-token{index=runtime}")
    first, second = read_subjects(tmp_path / "a.onnx", pruned)
    ours, theirs = (subject.feed(Sizes(2, 5, 3), 7, -2) for subject in (first, second))
    (added,) = set(theirs) - set(ours)
    assert theirs[added].ravel().tolist() == [3, 3]
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert second.feed(Sizes(2, 5, 3), 7, -9)[added].ravel().tolist() == [0, 0]
    assert second.feed(Sizes(2, 5, 3), 7, 9)[added].ravel().tolist() == [4, 4]
    # Measured alone, it is the contract in the file that tells what the input is.
    assert read_subjects(pruned, None)[0].feed(Sizes(2, 5, 3), 7, 1)[added].ravel().tolist() == [1, 1]


def test_renamed_inputs_are_fed_the_same(two, tmp_path):
    renamed = _pruned(two[0], tmp_path / "renamed.onnx", "rename-io{names=[input_ids->ids]}")
    first, second = read_subjects(tmp_path / "a.onnx", renamed)
    ours, theirs = (subject.feed(Sizes(1, 5, 0), 0, -1) for subject in (first, second))
    assert set(theirs) == {"ids" if name == "input_ids" else name for name in ours}
    assert np.array_equal(ours["input_ids"], theirs["ids"])


def test_a_skeleton_is_not_measured(fake, fixtures_dir, tmp_path):
    fake()
    source = fixtures_dir / "genai_llama" / "model.onnx"
    found = benchmark.bench_models(_pruned(source, tmp_path / "skeleton.onnx", "weights-to-inputs"), prefill=[4])
    assert found.problem == (
        "skeleton.onnx (A), prefill S=4, could not be measured: its weights are inputs: measure the model that holds them."
    )


def test_bfloat16_inputs_are_told(fake, two, tmp_path):
    fake()
    proto = onnx.ModelProto.FromString((tmp_path / "a.onnx").read_bytes())
    cache = next(value for value in proto.graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT)
    cache.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    (tmp_path / "half.onnx").write_bytes(proto.SerializeToString())
    found = benchmark.bench_models(tmp_path / "half.onnx", prefill=[4])
    assert found.rows[0].a == NotMeasured(
        "failed",
        f"its input {cache.name} is bfloat16, which numpy cannot hold: export it with float16 or float32 inputs",
    )


# ---- real workers -----------------------------------------------------------------------------------------------------


def test_a_real_run(two, tmp_path):
    pruned = _pruned(two[0], tmp_path / "pruned.onnx", "prune-last-token{index=runtime}")
    found = benchmark.bench_models(tmp_path / "a.onnx", pruned, prefill=[8], decode=[4], runs=2, warmup=0)
    assert found.problem is None
    assert [row.point.name for row in found.rows] == ["prefill S=8", "decode P=4"]
    for row in found.rows:
        for side in row.sides().values():
            assert isinstance(side, Measurement)
            assert len(side.latency.values) == 2
            assert side.latency.low > 0
            assert side.peak_bytes is not None
            if sys.platform == "linux":
                assert 0 < (side.anonymous_bytes or 0) <= side.peak_bytes
                assert (side.loaded_bytes or 0) > 0
    assert found.creations[0].a is not None
    assert len(found.creations[0].a.values) == 2


def test_what_a_real_worker_refuses(tmp_path):
    (tmp_path / "no.onnx").write_bytes(b"no model")
    with WorkerProcess() as worker:
        with pytest.raises(WorkerError, match=r"[Pp]rotobuf parsing failed"):
            worker.ask("open", path=str(tmp_path / "no.onnx"), provider="CPUExecutionProvider", threads=1)
        if sys.platform == "linux":
            # An interrupt at the terminal is for the parent alone.
            assert os.getsid(worker._process.pid) == worker._process.pid
        # It is still there, and tells a death by its code.
        assert set(worker.ask("memory")) == {"resident", "peak", "anonymous"}
        worker._process.kill()
        with pytest.raises(WorkerError, match="its process was killed, as happens when memory runs out"):
            worker.ask("memory")


# ---- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_what_the_kernel_says(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t    300 kB\nVmRSS:\t    200 kB\nRssAnon:\t    100 kB\nThreads:\t1\n")
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    assert memory.read_memory() == memory.Reading(200 * 1024, 300 * 1024, 100 * 1024)
    assert memory.reset_peak()
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_without_proc_there_is_a_peak_at_most(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none" / "status")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "none" / "clear_refs")
    reading = memory.read_memory()
    assert (reading.resident, reading.anonymous) == (None, None)
    assert reading.peak is None or reading.peak > MIB
    assert not memory.reset_peak()
