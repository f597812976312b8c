"""A headless Chromium, spoken to over a pipe: Chromium's own protocol, without a driver or a port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Browser", "browser", "browser_path"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60


def browser_path() -> str | None:
    """The browser of this machine: ``CHROMIUM`` or the first of the usual names; None where there is none."""
    given = os.environ.get("CHROMIUM")
    return given or next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page.

    Attributes:
        requests: addresses that the page asked for.
        blocked: why requests were not made.
        messages: what it wrote to its console, and errors.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._number = write, read, b"", 0
        self.requests: list[str] = []
        self.blocked: list[str] = []
        self.messages: list[str] = []
        target = self._call("Target.createTarget", {"url": "about:blank"}, session=False)["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=False)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, parameters: dict[str, Any] | None = None, *, session: bool = True) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        result: dict[str, Any] = self._wait(lambda found: found.get("id") == self._number).get("result", {})
        return result

    def _wait(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            while b"\0" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\0")
                found: dict[str, Any] = json.loads(line)
                self._note(found)
                if wanted(found):
                    assert "error" not in found, found["error"]
                    return found
            piece = os.read(self._read, 2**16)
            assert piece, "the browser went away"
            self._buffer += piece
        raise AssertionError("the browser did not answer")

    def _note(self, found: dict[str, Any]) -> None:
        about = found.get("params", {})
        if found.get("method") == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif found.get("method") == "Network.loadingFailed":
            self.blocked.append(about.get("blockedReason", ""))
        elif found.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(about))

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file at a size of the window and a preference of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", {"features": scheme})
        self._call("Page.navigate", {"url": path.as_uri()})
        self._wait(lambda found: found.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", {"expression": script, "returnByValue": True})
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key: ``Tab``, ``Enter`` or ``Space``."""
        codes = {"Tab": ("Tab", 9, ""), "Enter": ("Enter", 13, "\r"), "Space": (" ", 32, " ")}
        name, code, text = codes[key]
        about = {"key": name, "code": key, "windowsVirtualKeyCode": code}
        self._call(
            "Input.dispatchKeyEvent",
            {"type": "keyDown", "text": text, **about} if text else {"type": "rawKeyDown", **about},
        )
        self._call("Input.dispatchKeyEvent", {"type": "keyUp", **about})

    def picture(self, path: Path, *, whole: bool = False, clip: dict[str, float] | None = None) -> None:
        """Keep a screenshot as PNG: of the window, of the whole page, or of a rectangle of it."""
        more: dict[str, Any] = {"captureBeyondViewport": whole or clip is not None}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        if clip is not None:
            more["clip"] = {**clip, "scale": 1}
        data = self._call("Page.captureScreenshot", {"format": "png", **more})["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(path: str) -> Iterator[Browser]:
    """A browser of its own profile, ended with the block."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def connect() -> None:
            # The protocol's pipe: the browser reads from 3 and writes to 4.
            held = os.dup(from_browser)
            os.dup2(to_browser, 3)
            os.dup2(held, 4)

        flags = ["--headless=new", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")
        process = subprocess.Popen(
            [path, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=connect,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(write, read)
        finally:
            process.terminate()
            process.wait(timeout=_SECONDS)
            os.close(write)
            os.close(read)
