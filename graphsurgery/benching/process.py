"""The parent's end of a process that holds one model."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import graphsurgery

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Worker", "WorkerError", "WorkerProcess"]


class WorkerError(Exception):
    """A model could not be loaded or run; the message is the reason, without a full stop."""


class Worker(Protocol):
    """What answers requests about one model; :class:`WorkerProcess` is the real one."""

    def ask(self, what: str, **arguments: Any) -> Mapping[str, Any]:
        """The answer to one request.

        Raises:
            WorkerError: it cannot be answered.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class WorkerProcess:
    """A process of its own; use it in a ``with`` statement, the process ends with that."""

    def __init__(self) -> None:
        root = str(Path(graphsurgery.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        # A session of its own: Ctrl-C is the parent's to handle, who keeps what was measured. -P: the directory in which
        # the user happens to be is nothing to import from.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "graphsurgery.benching.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            WorkerError: the model refuses, or the process is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(self._death())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(str(answer["error"]).rstrip("."))
        return answer

    def _death(self) -> str:
        code = self._process.wait()
        if code == -9:
            return "its process was killed, as happens when memory runs out"
        self._errors.seek(0)
        written = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
        last = f": {written[-1][:300].rstrip('.')}" if written else ""
        return f"its process ended with code {code}{last}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                _close(stream)


def _close(stream: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # a request that nobody is left to read
        stream.close()
