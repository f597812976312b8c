"""The process that holds one model: ``python -m graphsurgery.benching.worker``.

It reads one JSON object a line from stdin and answers each with one on stdout:

* ``{"do": "open", "path", "provider", "threads"}``: ``{"seconds", "resident", "peak", "anonymous"}`` of the session;
* ``{"do": "feed", "folder"}``: takes the arrays there, and ``{"reset"}`` tells whether the peak counts from here;
* ``{"do": "run"}``: ``{"seconds", "peak"}`` of one run, the peak as far as it has come;
* ``{"do": "memory"}``: ``{"resident", "peak", "anonymous"}`` in bytes.

What goes wrong is answered with ``{"error"}``. It ends with stdin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphsurgery.benching.memory import read_memory, reset_peak

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]


class _Worker:
    """One session and what it is fed."""

    def __init__(self) -> None:
        self.session: Any = None
        self.arrays: dict[str, Any] = {}

    def open(self, path: str, provider: str, threads: int) -> dict[str, Any]:
        import onnxruntime

        options = onnxruntime.SessionOptions()  # its own default level of optimisation
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # Threads that wait busily for the next run would take the cores from the other model, whose turn it is.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        started = time.perf_counter()
        self.session = onnxruntime.InferenceSession(path, options, providers=[provider])
        seconds = time.perf_counter() - started
        if provider not in self.session.get_providers():
            return {"error": f"ONNX Runtime cannot use {provider} here: choose another provider"}
        return {"seconds": seconds, **dataclasses.asdict(read_memory())}

    def feed(self, folder: str) -> dict[str, Any]:
        names = json.loads((Path(folder) / "names.json").read_text(encoding="utf-8"))
        taken = {value.name for value in self.session.get_inputs()}
        self.arrays = {name: np.load(Path(folder) / file) for name, file in names.items() if name in taken}
        return {"reset": reset_peak()}

    def run(self) -> dict[str, Any]:
        started = time.perf_counter()
        self.session.run(None, self.arrays)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "peak": read_memory().peak}

    def memory(self) -> dict[str, Any]:
        return dataclasses.asdict(read_memory())


def main() -> None:
    """Answer requests until stdin ends."""
    # Answers have a descriptor of their own: what libraries print must not come between them.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker()
    actions: dict[str, Callable[..., dict[str, Any]]] = {
        "open": worker.open,
        "feed": worker.feed,
        "run": worker.run,
        "memory": worker.memory,
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = actions[request.pop("do")](**request)
        except Exception as error:  # the binding raises bare RuntimeError subclasses; the parent tells the user
            from graphsurgery.equivalence.running import one_line

            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
