"""Reports made by hand, and a worker that measures nothing: figures come from a script."""

from __future__ import annotations

from typing import Any, Self

from graphsurgery.benching.bench_report import BenchReport, Creation, Measurement, NotMeasured, Row
from graphsurgery.benching.points import Point
from graphsurgery.benching.process import WorkerError
from graphsurgery.benching.samples import Sample

MIB = 2**20


def measured(*milliseconds: float, loaded: int | None = 100, peak: int | None = 150, reset: bool = True) -> Measurement:
    """A measurement with sizes in MiB."""
    return Measurement(
        latency=Sample(tuple(value / 1000 for value in milliseconds)),
        creation_seconds=0.5,
        loaded_bytes=None if loaded is None else loaded * MIB,
        load_peak_bytes=None if loaded is None else (loaded + 10) * MIB,
        peak_bytes=None if peak is None else peak * MIB,
        anonymous_bytes=None if loaded is None else 40 * MIB,
        peak_of_runs=reset,
    )


def report(*rows: Row, b: str | None = "b.onnx", **changes: Any) -> BenchReport:
    """A report of ``rows``."""
    creation = Creation("m.onnx", Sample((0.5, 0.4, 0.6)), Sample((0.25, 0.25, 0.25)) if b else None)
    settings = {"provider": "cpu", "threads": 2, "runs": 3, "warmup": 1, "batch": 1, "seed": 0, "row": -1}
    fields: dict[str, Any] = {"rows": rows, "creations": (creation,), "planned": len(rows)} | changes
    environment = {
        "date": "2026-01-02",
        "platform": "Linux x86_64",
        "cores": 2,
        "python": "3.11.0",
        "onnxruntime": "1.0",
        "graphsurgery": "0.1.0",
    }
    return BenchReport("a.onnx", b, settings, environment, **fields)


def pair_report(**changes: Any) -> BenchReport:
    """A prompt of which B takes half the time, one that is noisy, and a step that A does not take."""
    return report(
        Row("m.onnx", Point("prefill", 1, 128, 0), measured(10, 11, 10), measured(5, 5, 5, peak=125)),
        Row("m.onnx", Point("prefill", 1, 512, 0), measured(40, 80, 50), measured(60, 60, 60, peak=175)),
        Row("m.onnx", Point("decode", 1, 1, 64), NotMeasured("not applicable", "it takes no cache"), measured(2, 2, 2)),
        **changes,
    )


class FakeWorker:
    """Answers like a real worker; a shared log tells who was asked what."""

    log: list[tuple[str, str]]
    seconds: dict[str, float]
    failing: dict[tuple[str, str], BaseException]
    memory: dict[str, Any]
    reset = True

    def __init__(self) -> None:
        self.name = "?"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append((self.name, "end"))

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        if what == "open":
            self.name = arguments["path"].rpartition("/")[2]
        self.log.append((self.name, what))
        error = self.failing.get((self.name, what))
        if isinstance(error, WorkerError):
            raise error
        # The user's interrupt, which comes at the third run.
        if error is not None and self.log.count((self.name, what)) == 3:
            raise error
        match what:
            case "open":
                return {"seconds": 0.5, "resident": 100 * MIB, "peak": 110 * MIB, "anonymous": 30 * MIB}
            case "feed":
                return {"reset": self.reset}
            case "run":
                return {"seconds": self.seconds.get(self.name, 0.01), "peak": 140 * MIB}
            case _:
                return self.memory


def fake_worker(**changes: Any) -> type[FakeWorker]:
    """A class of workers with a log of their own."""
    memory = {"resident": 120 * MIB, "peak": 150 * MIB, "anonymous": 40 * MIB}
    fields: dict[str, Any] = {"log": [], "seconds": {}, "failing": {}, "memory": memory}
    return type("Worker", (FakeWorker,), fields | changes)
