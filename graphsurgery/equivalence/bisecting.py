"""``verify --bisect``: which of the passes that made a model is the first whose result differs from the export."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graphsurgery.errors import GraphSurgeryError, SaveError, UsageError
from graphsurgery.model_io import load, stage
from graphsurgery.pipeline import Pipeline, provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import onnx_ir as ir

    from graphsurgery.equivalence.verify_report import VerifyReport
    from graphsurgery.model_io import Staged

__all__ = ["BisectedPass", "bisect", "passes_between"]


@dataclasses.dataclass(frozen=True)
class BisectedPass:
    """How the model compares with the reference once a pass, and those before it, have run.

    Attributes:
        spec: the pass as it can be typed.
        status: ``equal``, ``different`` or ``unchecked``.
        reason: why it is not ``equal``; else empty.
    """

    spec: str
    status: Literal["equal", "different", "unchecked"]
    reason: str = ""


def passes_between(reference: Path, rewritten: Path) -> tuple[str, ...]:
    """The passes that made ``rewritten`` of ``reference``, as its metadata tells.

    Raises:
        UsageError: the metadata tells of none.
        InputRefusedError: a file is no model.
    """
    before, after = (provenance(load(path)) for path in (reference, rewritten))
    runs = after[len(before) :] if after[: len(before)] == before else after
    specs = tuple(spec for run in runs for spec in run["passes"])
    if not specs:
        raise UsageError(f"--bisect runs the passes again that made {rewritten}, and its metadata tells of none.")
    return specs


def bisect(reference: Path, specs: tuple[str, ...], verify: Callable[[Path], VerifyReport]) -> tuple[BisectedPass, ...]:
    """Run the passes on the reference, one more each time, until the result differs.

    Args:
        reference: the model as exported.
        specs: the passes, in order.
        verify: holds a file against the reference.

    Returns:
        What came of each pass, the first that differs, or that cannot be run again, last.
    """
    found: list[BisectedPass] = []
    for count in range(1, len(specs) + 1):
        try:
            pipeline = Pipeline(specs[:count])
            model = load(reference)
            pipeline(model)
        except GraphSurgeryError as error:
            found.append(BisectedPass(specs[count - 1], "unchecked", f"it cannot be run again: {error}"))
            break
        with contextlib.ExitStack() as stack:
            staged = stack.enter_context(_staged(model, reference))
            report = verify(staged.model_path)
        reason = "; ".join(report.reasons).replace(str(staged.model_path), "the result")
        found.append(BisectedPass(specs[count - 1], report.status, reason))
        if report.status == "different":
            break
    return tuple(found)


@contextlib.contextmanager
def _staged(model: ir.Model, reference: Path) -> Iterator[Staged]:
    """The model beside the reference, where it shares the data; elsewhere, with a copy, if nothing can be written there."""
    with contextlib.ExitStack() as stack:
        try:
            target = reference.absolute().parent / f".{reference.name}.bisect.onnx"
            staged = stack.enter_context(stage(model, target))
        except SaveError:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="graphsurgery-bisect-"))
            staged = stack.enter_context(stage(model, Path(folder) / reference.name))
        yield staged
