"""Surgery on exported ONNX language models: recognise, rewrite, prove with ONNX Runtime.

Example::

    import graphsurgery

    model = graphsurgery.load("model.onnx")
    report = graphsurgery.Pipeline(["prune-last-token{index=mask}"])(model)
    graphsurgery.save(model, "pruned.onnx")
    print(graphsurgery.verify("model.onnx", "pruned.onnx").status)

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphsurgery.benchmark import bench_models as bench
    from graphsurgery.compare import diff_models as diff
    from graphsurgery.equivalence.verify import verify_models as verify
    from graphsurgery.errors import (
        CannotCheckError,
        DifferenceError,
        GraphSurgeryError,
        InputRefusedError,
        InternalError,
        NothingChangedError,
        SaveError,
        UsageError,
    )
    from graphsurgery.inspection import inspect_model as inspect
    from graphsurgery.model_io import load, save
    from graphsurgery.pass_base import Pass, PassResult
    from graphsurgery.pipeline import Pipeline
    from graphsurgery.site_report import PassReport, Report, SiteReport
    from graphsurgery.version import __version__

__all__ = [
    "CannotCheckError",
    "DifferenceError",
    "GraphSurgeryError",
    "InputRefusedError",
    "InternalError",
    "NothingChangedError",
    "Pass",
    "PassReport",
    "PassResult",
    "Pipeline",
    "Report",
    "SaveError",
    "SiteReport",
    "UsageError",
    "__version__",
    "bench",
    "diff",
    "inspect",
    "load",
    "save",
    "verify",
]

_ERRORS = "graphsurgery.errors"
_HOMES = {
    "CannotCheckError": (_ERRORS, "CannotCheckError"),
    "DifferenceError": (_ERRORS, "DifferenceError"),
    "GraphSurgeryError": (_ERRORS, "GraphSurgeryError"),
    "InputRefusedError": (_ERRORS, "InputRefusedError"),
    "InternalError": (_ERRORS, "InternalError"),
    "NothingChangedError": (_ERRORS, "NothingChangedError"),
    "SaveError": (_ERRORS, "SaveError"),
    "UsageError": (_ERRORS, "UsageError"),
    "Pass": ("graphsurgery.pass_base", "Pass"),
    "PassResult": ("graphsurgery.pass_base", "PassResult"),
    "Pipeline": ("graphsurgery.pipeline", "Pipeline"),
    "PassReport": ("graphsurgery.site_report", "PassReport"),
    "Report": ("graphsurgery.site_report", "Report"),
    "SiteReport": ("graphsurgery.site_report", "SiteReport"),
    "__version__": ("graphsurgery.version", "__version__"),
    "bench": ("graphsurgery.benchmark", "bench_models"),
    "diff": ("graphsurgery.compare", "diff_models"),
    "inspect": ("graphsurgery.inspection", "inspect_model"),
    "load": ("graphsurgery.model_io", "load"),
    "save": ("graphsurgery.model_io", "save"),
    "verify": ("graphsurgery.equivalence.verify", "verify_models"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home[0]), home[1])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
