"""Make the screenshots of docs/reading-reports.md anew, from a committed export: ``python docs/screenshots.py``.

Needs Chromium and the extra ``[test]``; run it from the root of a checkout.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from graphsurgery.cli import main  # noqa: E402 - the root must be on the path first
from tests.browser import Browser, browser, browser_path  # noqa: E402

IMAGES = ROOT / "docs" / "images"
_PLACE = """
(() => {
  const place = document.querySelector('%s').getBoundingClientRect();
  return [place.x + scrollX, place.y + scrollY, place.width, place.height];
})()
"""


def run(*arguments: str) -> None:
    """Run a command of graphsurgery; what it prints is dropped."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*arguments])


def take(page: Browser, name: str, selector: str) -> None:
    """Keep one element of the open page."""
    place = page.run(_PLACE % selector)
    page.picture(IMAGES / name, clip=dict(zip(("x", "y", "width", "height"), place, strict=True)))
    print(name, (IMAGES / name).stat().st_size, "bytes", file=sys.stderr)


def shoot() -> None:
    """Make all of them."""
    path = browser_path()
    assert path is not None, "there is no Chromium: install it, or name it in CHROMIUM"
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, browser(path) as page:
        os.chdir(directory)
        shutil.copy(ROOT / "fixtures" / "gemma2" / "model.onnx", "gemma2.onnx")
        passes = ("prune-last-token{depth=layer}", "block-attention{q_block_size=128,skip=trim}", "tidy")
        chosen = [word for spec in passes for word in ("-p", spec)]
        run("apply", "gemma2.onnx", "-o", "prefill.onnx", *chosen, "--verify", "-q", "--html", "apply.html")
        report = Path(directory, "apply.html")
        page.open(report, height=1000)
        page.picture(IMAGES / "apply-light.png")
        page.open(report, dark=True)
        take(page, "attention-dark.png", "#attention")
        take(page, "verification-dark.png", "#verification")
        page.open(report, width=400, height=1000)
        page.picture(IMAGES / "apply-narrow.png")
        page.open(report, height=1000, dark=True)
        for _ in range(8):
            page.press("Tab")
        page.picture(IMAGES / "focus-dark.png")
        shutil.copy(ROOT / "fixtures" / "qwen3_moe_grouped" / "model.onnx", "moe.onnx")
        run("apply", "moe.onnx", "-p", "gather-experts{strategy=packed,chunk_size=64}", "-q", "--html", "moe.html")
        page.open(Path(directory, "moe.html"))
        take(page, "experts-light.png", "#experts")


if __name__ == "__main__":
    shoot()
