"""Several models against each other, by the measuring of ``graphsurgery bench``.

    found = race({"export": a, "prefill": b}, make_points([2048], [512], 1), RaceSettings(rounds=5))
    print(found[point]["prefill"].latency.median)

In each round every model has a process of its own, one after the other and every second round backwards: memory that one
call has left behind is not counted for the next, and models that take gigabytes are never in memory together.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import environment

from graphsurgery.benching.bench_report import BenchReport, Measurement, NotMeasured, Row, Side
from graphsurgery.benching.feeding import write_contender
from graphsurgery.benching.fitting import fit
from graphsurgery.benching.measuring import Plan, measure_point
from graphsurgery.benching.process import WorkerProcess
from graphsurgery.benching.samples import Sample
from graphsurgery.benching.subjects import Subject, read_subjects
from graphsurgery.equivalence.roles import Role
from graphsurgery.errors import InputRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphsurgery.benching.points import Point
    from graphsurgery.equivalence.feeds import Array, Sizes

__all__ = ["RaceSettings", "first_and_steady", "pair_report", "race", "side_data"]

Found = dict["Point", dict[str, Side]]

_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class RaceSettings:
    """How to measure.

    Attributes:
        rounds: processes of each model at each point.
        repeats: calls in each process after a first one that is not timed; their median is the value of the round.
        decode_repeats: the same for single tokens, which take milliseconds.
        threads: of one operator.
    """

    rounds: int = 5
    repeats: int = 3
    decode_repeats: int = 30
    threads: int = 2


def race(
    models: Mapping[str, Path],
    points: Sequence[Point],
    settings: RaceSettings,
    progress: Callable[[str], None],
) -> Found:
    """Measure ``models`` at ``points``.

    Args:
        models: names and files; the others are fed what the first is fed, where their inputs agree.
        points: sizes.
        settings: how.
        progress: told about each process before it starts.

    Returns:
        For each point and name the medians of the rounds, or why there are none.
    """
    base = next(iter(models.values()))
    found: Found = {}
    for point in points:
        rounds: dict[str, list[Side]] = {name: [] for name in models}
        for turn in range(settings.rounds):
            for name in list(models) if turn % 2 == 0 else list(models)[::-1]:
                if rounds[name] and isinstance(rounds[name][-1], NotMeasured):
                    continue
                progress(f"{point.name}: {name}, round {turn + 1} of {settings.rounds}")
                rounds[name].append(_once(base, models[name], point, settings))
        found[point] = {name: _merged(sides) for name, sides in rounds.items()}
    return found


class _FewTokens(Subject):
    """Fed a few different tokens only: pages of the embedding that a prompt happens to map would pass for memory of the run."""

    def feed(self, sizes: Sizes, seed: int, row: int) -> dict[str, Array]:
        arrays = super().feed(sizes, seed, row)
        for spec in self.signature.having(Role.TOKENS):
            name = self.names.get(spec.name, spec.name)
            arrays[name] = arrays[name] % _TOKENS
        return arrays


def _once(base: Path, path: Path, point: Point, settings: RaceSettings) -> Side:
    try:
        read = read_subjects(base, None if path == base else path)[-1]
    except InputRefusedError as error:
        return NotMeasured("failed", str(error))
    subject = _FewTokens(**{field.name: getattr(read, field.name) for field in dataclasses.fields(read)})
    repeats = settings.repeats if point.phase == "prefill" else settings.decode_repeats
    plan = Plan("CPUExecutionProvider", settings.threads, repeats, 1)
    with tempfile.TemporaryDirectory(prefix="race-") as scratch:
        sizes = subject.obstacle or fit(point, subject.signature)
        contender = write_contender(subject, sizes, Path(scratch, "feed"), 0, -1)
        (side,) = measure_point([contender], plan, WorkerProcess, lambda: None)
    return side


def _merged(sides: Sequence[Side]) -> Side:
    """One measurement of several: each run of it is the median of a round, sizes are medians."""
    done = [side for side in sides if isinstance(side, Measurement)]
    if len(done) < len(sides):
        return next(side for side in sides if isinstance(side, NotMeasured))

    def middle(name: str) -> Any:
        values = [getattr(side, name) for side in done]
        return None if None in values else statistics.median_low(values)

    sizes = ("loaded_bytes", "load_peak_bytes", "peak_bytes", "anonymous_bytes", "first_peak_bytes")
    return Measurement(
        latency=Sample(tuple(side.latency.median for side in done)),
        creation_seconds=statistics.median(side.creation_seconds for side in done),
        peak_of_runs=all(side.peak_of_runs for side in done),
        **{name: middle(name) for name in sizes},
    )


def first_and_steady(side: Measurement) -> tuple[float, float]:
    """Bytes over the loaded model of the first call, and of all; NaN where the system does not tell."""
    first, steady = side.first_over_bytes, side.over_bytes
    nan = float("nan")
    return nan if first is None else float(first), nan if steady is None else float(steady)


def side_data(side: Side) -> dict[str, Any]:
    """For the JSON file."""
    if isinstance(side, NotMeasured):
        return {"status": side.status, "reason": side.reason}
    first, steady = first_and_steady(side)
    return {"seconds": side.latency.to_data(), "first_over": first, "over": steady, "loaded": side.loaded_bytes}


def pair_report(found: Found, a: str, b: str, settings: RaceSettings) -> BenchReport:
    """Two of the models as a report of ``graphsurgery bench``, which has tables and plots."""
    rows = tuple(Row("", point, sides[a], sides[b]) for point, sides in found.items())
    shown = {"provider": "cpu", "threads": settings.threads, "runs": settings.rounds, "batch": rows[0].point.batch}
    return BenchReport(a, b, shown, environment("onnxruntime"), rows=rows, planned=len(rows))
