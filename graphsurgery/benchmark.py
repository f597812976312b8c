"""Latency and memory of one model, of two, or of two directories of models.

Each model runs in a process of its own, at ONNX Runtime's default level of optimisation, anew for each row: memory that
one size has left behind is not counted for the next. Runs of both models alternate. Peaks are the kernel's.

Alphabet: B batch, S query length, P past.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from graphsurgery.benching.bench_report import BenchReport, Creation, Measurement, Row
from graphsurgery.benching.feeding import write_contender
from graphsurgery.benching.fitting import fit, own_points
from graphsurgery.benching.measuring import Plan, creation_seconds, measure_point
from graphsurgery.benching.pairs import Pair, find_pairs
from graphsurgery.benching.points import DECODE, PREFILL, make_points
from graphsurgery.benching.process import WorkerError, WorkerProcess
from graphsurgery.benching.samples import Sample
from graphsurgery.benching.subjects import Subject, read_subjects
from graphsurgery.errors import CannotCheckError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.benching.gates import Gate
    from graphsurgery.benching.points import Point

__all__ = ["BenchReport", "bench_models"]

# A session is made at least so often, if there are as many runs.
_CREATIONS = 3


class Progress(Protocol):
    """Told what is being measured and how far it is."""

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


def bench_models(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str] | None = None,
    *,
    prefill: Sequence[int] | None = None,
    decode: Sequence[int] | None = None,
    batch: int = 1,
    threads: int = 2,
    provider: str = "cpu",
    runs: int = 5,
    warmup: int = 1,
    seed: int = 0,
    row: int = -1,
    gates: Sequence[Gate] = (),
    progress: Progress | None = None,
) -> BenchReport:
    """Measure one model, or two against each other.

    Args:
        a: an .onnx file, or a directory with such files.
        b: the same kind; files of two directories belong together by their relative names.
        prefill: lengths S of prompts, without a past. With neither these nor ``decode``: 128 and 512, or what the model
            fixes.
        decode: pasts P of single tokens. With neither: 512 and 4096.
        batch: B.
        threads: of one operator.
        provider: ONNX Runtime's execution provider, such as ``cpu``.
        runs: that are measured.
        warmup: runs before them.
        seed: what inputs are drawn from; both models get the same where their inputs agree.
        row: what is fed where rows are chosen at run time; negative from the end.
        gates: limits of ratios; :attr:`BenchReport.failure` tells.
        progress: told after each session and run.

    Returns:
        What was measured. KeyboardInterrupt is caught: rows done by then are in the report, which tells.

    Raises:
        InputRefusedError: a file cannot be used.
        UsageError: a size, count or provider is none, or gates are given with one model.
        CannotCheckError: ONNX Runtime is missing.

    Example::

        report = graphsurgery.bench("model.onnx", "model.surgery.onnx", prefill=[128], decode=[])
        print(report.rows[0].ratio("latency"))
    """
    for name, count, least in (("runs", runs, 1), ("warmup", warmup, 0), ("threads", threads, 1)):
        if count < least:
            raise UsageError(f"{name} {count} is too few: give {least} or more.")
    if gates and b is None:
        raise UsageError("A gate compares two models: give B too.")
    plan = Plan(_provider(provider), threads, runs, warmup)
    pairs, notes = find_pairs(Path(a), None if b is None else Path(b))
    settings = {
        "provider": provider.lower(),
        "threads": threads,
        "runs": runs,
        "warmup": warmup,
        "batch": batch,
        "seed": seed,
        "row": row,
    }
    report = BenchReport(
        os.fspath(a), None if b is None else os.fspath(b), settings, _environment(), gates=tuple(gates), notes=notes
    )
    asked = None if prefill is None and decode is None else make_points(prefill or (), decode or (), batch)
    races = [_Race(pair, read_subjects(pair.a, pair.b), asked, batch) for pair in pairs]
    return _Bench(report, races, plan, progress, seed, row).measure()


def _provider(name: str) -> str:
    try:
        import onnxruntime
    except ImportError as error:
        raise CannotCheckError(
            'Measuring needs ONNX Runtime, which is not installed: pip install "graphsurgery[verify]".'
        ) from error
    there: dict[str, str] = {
        full.removesuffix("ExecutionProvider").lower(): full for full in onnxruntime.get_available_providers()
    }
    full = there.get(name.lower().removesuffix("executionprovider"))
    if full is None:
        raise UsageError(f"ONNX Runtime has no provider {name!r} here: there are {', '.join(there)}.")
    return full


def _environment() -> dict[str, Any]:
    import onnxruntime

    from graphsurgery.version import __version__

    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "graphsurgery": __version__,
    }


class _Race:
    """A model, or two, and the points at which they are measured."""

    def __init__(self, pair: Pair, subjects: tuple[Subject, ...], asked: tuple[Point, ...] | None, batch: int) -> None:
        self.pair, self.subjects = pair, subjects
        own = dict.fromkeys(point for subject in subjects for point in own_points(subject.signature, batch))
        self.points = asked or tuple(own) or make_points(PREFILL, DECODE, batch)
        self.sizes = {
            point: tuple(subject.obstacle or fit(point, subject.signature) for subject in subjects)
            for point in self.points
        }

    def steps(self, plan: Plan) -> int:
        """Sessions and runs."""
        lanes = sum(not isinstance(size, str) for sizes in self.sizes.values() for size in sizes)
        return lanes * (1 + plan.warmup + plan.runs)


class _Bench:
    """One benchmark, with what has been measured so far."""

    def __init__(
        self, report: BenchReport, races: Sequence[_Race], plan: Plan, progress: Progress | None, seed: int, row: int
    ) -> None:
        self.report, self.races, self.plan, self.progress = report, races, plan, progress
        self.seed, self.row = seed, row
        self.rows: list[Row] = []
        self.sessions: dict[tuple[str, int], list[float]] = {}
        self.done, self.total = 0, sum(race.steps(plan) for race in races)

    def measure(self) -> BenchReport:
        """All rows, or those before an interrupt."""
        interrupted = False
        try:
            for race in self.races:
                for point in race.points:
                    self._add(race, point)
                self._more_sessions(race)
        except KeyboardInterrupt:
            interrupted = True
        return dataclasses.replace(
            self.report,
            rows=tuple(self.rows),
            creations=tuple(self._creation(race) for race in self.races if (race.pair.name, 0) in self.sessions),
            notes=(*self.report.notes, *self._notes()),
            planned=sum(len(race.points) for race in self.races),
            interrupted=interrupted,
        )

    def _add(self, race: _Race, point: Point) -> None:
        with tempfile.TemporaryDirectory(prefix="graphsurgery-bench-") as scratch:
            contenders = [
                write_contender(subject, size, Path(scratch, str(number)), self.seed, self.row)
                for number, (subject, size) in enumerate(zip(race.subjects, race.sizes[point], strict=True))
            ]
            sides = measure_point(contenders, self.plan, WorkerProcess, self._step)
        for number, side in enumerate(sides):
            if isinstance(side, Measurement):
                self.sessions.setdefault((race.pair.name, number), []).append(side.creation_seconds)
        self.rows.append(Row(race.pair.name, point, sides[0], sides[1] if len(sides) > 1 else None))

    def _more_sessions(self, race: _Race) -> None:
        """Make sessions until there are enough to take a median of."""
        for number, subject in enumerate(race.subjects):
            made = self.sessions.get((race.pair.name, number), [])
            while made and len(made) < min(_CREATIONS, self.plan.runs):
                try:
                    made.append(creation_seconds(subject.path, self.plan, WorkerProcess))
                except WorkerError as error:
                    raise CannotCheckError(f"{subject.path} does not load any more: {error}.") from error

    def _creation(self, race: _Race) -> Creation:
        made = [self.sessions.get((race.pair.name, number)) for number in range(2)]
        a, b = (Sample(tuple(seconds)) if seconds else None for seconds in made)
        return Creation(race.pair.name, a, b)

    def _step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress("measuring", self.done, self.total)

    def _notes(self) -> list[str]:
        found = [side for row in self.rows for side in row.sides().values() if isinstance(side, Measurement)]
        notes = []
        if any(side.peak_bytes is None for side in found):
            notes.append("memory was not measured: this system does not tell")
        elif any(side.loaded_bytes is None for side in found):
            notes.append("this system has no /proc: peaks are those of whole processes, loading included")
        elif any(not side.peak_of_runs for side in found):
            notes.append("the kernel does not let peaks be reset: they are those of whole processes, loading included")
        if found and self.plan.provider != "CPUExecutionProvider":
            notes.append("memory is that of the process: what a device holds is not in it")
        return notes
