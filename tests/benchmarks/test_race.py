"""`benchmarks/_race.py` and `benchmarks/peers.py`: rounds, failures and bars; and once for real on a tiny decoder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _race
import peers
from _decoder import DecoderSize, write_decoder
from _race import RaceSettings, first_and_steady, pair_report, race, side_data

from graphsurgery.benching.bench_report import Measurement, NotMeasured
from graphsurgery.benching.points import make_points
from graphsurgery.benching.process import WorkerError
from graphsurgery.benching.subjects import read_subjects
from graphsurgery.equivalence.feeds import Sizes
from tests.bench_helpers import MIB, fake_worker, measured

SIZE = DecoderSize(layers=1, hidden=32, heads=4, kv_heads=2, head=8, inner=48, vocabulary=128)
SETTINGS = RaceSettings(rounds=3, repeats=2, decode_repeats=3)


def silent(text: str) -> None:
    """No progress."""


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.onnx" for name in ("export", "other")}
    for path in paths.values():
        write_decoder(path, SIZE)
    return paths


def test_every_round_has_a_process_of_its_own(models, monkeypatch):
    worker = fake_worker(seconds={"export.onnx": 0.02, "other.onnx": 0.01})
    monkeypatch.setattr(_race, "WorkerProcess", worker)
    told: list[str] = []
    found = race(models, make_points([8], [4], 1), SETTINGS, told.append)
    starts = [name[0] for name, what in worker.log if what == "open"]
    assert "".join(starts) == "eooeeo" * 2
    # One call before those that are timed.
    assert worker.log.count(("export.onnx", "run")) == 3 * (1 + 2) + 3 * (1 + 3)
    assert told[0] == "prefill S=8: export, round 1 of 3"
    (prompt, _) = found.values()
    assert isinstance(prompt["other"], Measurement)
    assert prompt["other"].latency.values == (0.01, 0.01, 0.01)
    assert first_and_steady(prompt["other"]) == (40 * MIB, 50 * MIB)
    report = pair_report(found, "export", "other", SETTINGS)
    assert [row.ratio("latency") for row in report.rows] == [0.5, 0.5]
    assert "Peak memory, decode" in report.to_svg()


def test_a_model_that_fails_is_not_tried_again(models, monkeypatch):
    worker = fake_worker(failing={("other.onnx", "open"): WorkerError("no kernel")})
    monkeypatch.setattr(_race, "WorkerProcess", worker)
    ((sides),) = race(models, make_points([8], (), 1), SETTINGS, silent).values()
    assert sides["other"] == NotMeasured("failed", "no kernel")
    assert side_data(sides["other"]) == {"status": "failed", "reason": "no kernel"}
    assert worker.log.count(("other.onnx", "open")) == 1
    assert isinstance(sides["export"], Measurement)


def test_a_file_that_is_no_model_is_a_side_with_the_reason(models, monkeypatch):
    monkeypatch.setattr(_race, "WorkerProcess", fake_worker())
    models["other"].write_bytes(b"")
    ((sides),) = race(models, make_points([8], (), 1), SETTINGS, silent).values()
    assert isinstance(sides["other"], NotMeasured)
    assert "other.onnx is an empty file" in sides["other"].reason


def test_few_tokens_are_fed(models):
    """More would map pages of the embedding, which are no memory of the run."""
    base = read_subjects(models["export"], None)[0]
    few = _race._FewTokens(base.path, base.signature, base.names, base.obstacle)
    sizes = Sizes(1, 200, 0, "none", 0)
    assert base.feed(sizes, 0, -1)["input_ids"].max() > 64
    assert few.feed(sizes, 0, -1)["input_ids"].max() < 64


def test_measured_for_real(models):
    settings = RaceSettings(rounds=1, repeats=1, decode_repeats=1, threads=1)
    ((sides),) = race(models, make_points([4], (), 1), settings, silent).values()
    assert isinstance(sides["export"], Measurement)
    assert sides["export"].first_peak_bytes is not None
    assert sides["export"].peak_bytes is not None
    assert 0 < sides["export"].first_peak_bytes <= sides["export"].peak_bytes


def test_bars_are_held_against_the_export_and_the_best_tool():
    (prompt, step) = make_points([2048], [512], 1)
    found: _race.Found = {
        prompt: {
            "export": measured(900, peak=700),
            "graphsurgery, prefill": measured(200, peak=200),
            "graphsurgery, unified": measured(200, peak=200),
            "onnxslim": measured(500, peak=350),
            "onnxsim": measured(1, peak=101),  # not among those that the bars name
            "ORT transformers optimizer": NotMeasured("failed", "no kernel"),
        },
        step: {"export": measured(10), "graphsurgery, decode": NotMeasured("failed", "no kernel")},
    }
    assert peers.bar_rows(found) == [
        ("prefill 2048, prefill: latency", "export", "4.50x faster", "3.00x faster", "met"),
        ("prefill 2048, prefill: latency", "onnxslim", "2.50x faster", "3.00x faster", "MISSED"),
        ("prefill 2048, prefill: memory", "export", "0.167 of it", "0.167 of it", "met"),
        ("prefill 2048, prefill: memory", "onnxslim", "0.400 of it", "0.167 of it", "MISSED"),
        ("decode 512, decode: latency", "export", "-", "0.97x faster", "not measured"),
        ("decode 512, decode: latency", "no tool ran", "-", "1.00x faster", "not measured"),
        ("decode 512, unified: latency", "export", "-", "0.97x faster", "not measured"),
        ("decode 512, unified: latency", "no tool ran", "-", "1.00x faster", "not measured"),
    ]


def test_a_tool_that_is_not_there_is_a_row_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_version", lambda package: None if package == "onnxslim" else "1.0")
    runs, reasons = peers._tools(tmp_path / "m.onnx", None, tmp_path)
    assert reasons == {
        "onnxslim": "onnxslim is not installed: pip install -r benchmarks/peers-requirements.txt",
        "ORT GenAI builder": "it builds from a checkpoint, not from a graph: give --checkpoint DIR or --make DIR",
    }
    assert list(runs)[:2] == ["onnx-ir load + save", "graphsurgery, prefill"]
    rows = peers._surgery_rows(runs, {}, reasons, tmp_path / "m.onnx")
    assert rows == [
        ("onnxslim", "-", "-", "-", "-", "-", reasons["onnxslim"]),
        ("ORT GenAI builder", "1.0", "-", "-", "-", "-", reasons["ORT GenAI builder"]),
    ]
