"""Models that were dropped are collected, though no collection runs while one is made."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from graphsurgery import garbage
from graphsurgery.garbage import paused_gc
from graphsurgery.model_io import load

LLAMA = Path(__file__).parents[1] / "fixtures" / "llama" / "model.onnx"


@pytest.fixture(autouse=True)
def _counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_followed", garbage._Followed())
    gc.collect()


def _rings(count: int) -> None:
    """Lists that hold themselves: garbage that only a collection frees."""
    for _ in range(count):
        ring: list[object] = []
        ring.append(ring)


def test_models_that_were_dropped_do_not_pile_up() -> None:
    loaded = []
    alive = []
    for _ in range(2 + 3 * len(gc.get_objects()) // 10_000):
        loaded.append(weakref.ref(load(LLAMA).graph))
        alive.append(sum(item() is not None for item in loaded))
    # Each holds 10 000 objects or more.
    assert max(alive) * 10_000 < 2 * len(gc.get_objects())
    assert alive[-1] < len(loaded) // 2


def test_a_first_model_and_what_passes_add_is_not_walked() -> None:
    collected = []

    def heard(phase: str, info: dict[str, int]) -> None:
        collected.append((phase, info["generation"]))

    gc.callbacks.append(heard)
    try:
        for size in (len(gc.get_objects()), 100):
            with paused_gc():
                _rings(size)
        assert not [item for item in collected if item[1] == 2]
        with paused_gc():
            _rings(3 * len(gc.get_objects()) // 4)
        with paused_gc():
            pass
        assert collected.count(("start", 2)) == 1
    finally:
        gc.callbacks.remove(heard)


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with paused_gc():
            _rings(10)
        assert abs(gc.get_freeze_count() - frozen) < 100
    finally:
        gc.unfreeze()


def test_nothing_happens_where_collection_is_off() -> None:
    gc.disable()
    try:
        with paused_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert garbage._followed.now == 0
    finally:
        gc.enable()
