"""The examples run as their pages say, and give the exporter's own tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def _tokens(text: str) -> list[int]:
    line = next(line for line in text.splitlines() if line.startswith("tokens:"))
    return [int(token) for token in line.split()[1:]]


def test_gpt_oss():
    run = _run("disaggregated_gpt_oss.py")
    assert run.returncode == 0, run.stderr
    assert len(_tokens(run.stdout)) == 40
    # 4 layers, keys and values, 2 heads of 8 float32, 40 positions; two widths of windows with each of 5 messages.
    assert f"5 messages with {4 * 2 * 2 * 8 * 4 * 40 + 5 * 2 * 8} bytes of cache" in run.stdout
    assert "the exporter's own file gives the same tokens" in run.stdout


def test_qwen3_vl_moe():
    run = _run("disaggregated_qwen3_vl_moe.py")
    assert run.returncode == 0, run.stderr
    assert len(_tokens(run.stdout)) == 40
    assert "prefill.onnx: hidden states [1, 1, 32]" in run.stdout
    assert f"4 messages with {3 * 2 * 2 * 8 * 4 * 32} bytes of cache" in run.stdout
    assert "the exporter's own files give the same tokens" in run.stdout


@pytest.fixture
def handover(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _handover

    return _handover


def test_chunks_are_joined_in_any_order_and_a_gap_is_an_error(handover):
    caches = {"k": np.arange(2 * 7, dtype=np.float32).reshape(1, 2, 7, 1), "width": np.array(8)}
    chunks = list(handover.chunks_of(caches, 3))
    assert [chunk.start for chunk in chunks] == [0, 3, 6]
    joined = handover._joined(chunks[::-1])
    assert np.array_equal(joined["k"], caches["k"])
    assert joined["width"] == 8
    with pytest.raises(ValueError, match="positions 3 to 6 of the cache were not handed over"):
        handover._joined([chunks[0], chunks[2]])


def test_only_what_is_new_is_sent(handover):
    caches = {"k": np.zeros((1, 2, 7, 1), np.float32)}
    assert [chunk.start for chunk in handover.chunks_of(caches, 4, start=5)] == [5]
