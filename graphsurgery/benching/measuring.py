"""One row of the report: every model in a process of its own, runs in turn, memory from the kernel."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from graphsurgery.benching.bench_report import Measurement, NotMeasured
from graphsurgery.benching.process import WorkerError
from graphsurgery.benching.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from graphsurgery.benching.process import Worker

__all__ = ["Contender", "Plan", "creation_seconds", "measure_point"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How everything is measured: ONNX Runtime's provider and threads, measured runs, runs before them."""

    provider: str
    threads: int
    runs: int
    warmup: int


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model and the folder with its arrays, or why it is not measured here."""

    path: Path
    folder: Path | None
    absent: NotMeasured | None = None


@dataclasses.dataclass
class _Lane:
    """A contender at work."""

    worker: Worker
    contender: Contender
    opened: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reset: bool = False
    seconds: list[float] = dataclasses.field(default_factory=list)
    first_peak: int | None = None
    failure: NotMeasured | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            action()
        except WorkerError as error:
            self.failure = NotMeasured("failed", str(error))


def measure_point(
    contenders: Sequence[Contender], plan: Plan, start: Callable[[], Worker], step: Callable[[], None]
) -> tuple[Measurement | NotMeasured, ...]:
    """Measure the contenders in turn, so that a slow minute of the machine meets all of them.

    Every second round goes backwards: none always has the same neighbour.

    Args:
        contenders: the models.
        plan: how.
        start: starts a process.
        step: told after each session and each run.

    Returns:
        One result for each contender.
    """
    with contextlib.ExitStack() as stack:
        lanes = {
            number: _Lane(stack.enter_context(start()), contender)
            for number, contender in enumerate(contenders)
            if contender.absent is None
        }
        for lane in lanes.values():
            lane.attempt(lambda lane=lane: _open(lane, plan))  # type: ignore[misc] # the default binds the lane
            step()
        for turn in range(plan.warmup + plan.runs):
            order = list(lanes.values()) if turn % 2 == 0 else list(lanes.values())[::-1]
            for lane in order:
                lane.attempt(lambda lane=lane: _run(lane))  # type: ignore[misc]
                step()
        return tuple(
            _result(lanes[number], plan) if contender.absent is None else contender.absent
            for number, contender in enumerate(contenders)
        )


def _open(lane: _Lane, plan: Plan) -> None:
    path = str(lane.contender.path)
    lane.opened = lane.worker.ask("open", path=path, provider=plan.provider, threads=plan.threads)
    lane.reset = bool(lane.worker.ask("feed", folder=str(lane.contender.folder))["reset"])


def _run(lane: _Lane) -> None:
    answer = lane.worker.ask("run")
    if not lane.seconds:
        lane.first_peak = answer["peak"]
    lane.seconds.append(answer["seconds"])


def _result(lane: _Lane, plan: Plan) -> Measurement | NotMeasured:
    memory: dict[str, Any] = {}
    lane.attempt(lambda: memory.update(lane.worker.ask("memory")))
    if lane.failure is not None:
        return lane.failure
    return Measurement(
        latency=Sample(tuple(lane.seconds[plan.warmup :])),
        creation_seconds=lane.opened["seconds"],
        loaded_bytes=lane.opened["resident"],
        load_peak_bytes=lane.opened["peak"],
        peak_bytes=memory["peak"],
        anonymous_bytes=memory["anonymous"],
        peak_of_runs=lane.reset,
        first_peak_bytes=lane.first_peak,
    )


def creation_seconds(path: Path, plan: Plan, start: Callable[[], Worker]) -> float:
    """How long one session takes to be made, in a process of its own.

    Raises:
        WorkerError: the model does not load.
    """
    with start() as worker:
        seconds: float = worker.ask("open", path=str(path), provider=plan.provider, threads=plan.threads)["seconds"]
    return seconds
