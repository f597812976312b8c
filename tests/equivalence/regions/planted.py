"""Planting an error behind passes, and asking region verification about it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from graphsurgery.equivalence.verify import verify_models
from graphsurgery.model_io import load, save
from graphsurgery.pipeline import Pipeline
from graphsurgery.rewrite import PASS_KEY, SITE_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import onnx_ir as ir

    from graphsurgery.equivalence.verify_report import VerifyReport


def copied(fixture: Path, folder: Path, *, data: bool) -> Path:
    """The model of a fixture in ``folder``, without its data file unless ``data``."""
    model = folder / "model.onnx"
    shutil.copy(fixture / "model.onnx", model)
    if data and (fixture / "model.onnx.data").exists():
        shutil.copy(fixture / "model.onnx.data", folder / "model.onnx.data")
    return model


def verified(source: Path, passes: Sequence[Any], mutation: Any = None, **options: Any) -> VerifyReport:
    """What region verification says of the passes on ``source``, the result changed by ``mutation`` before it is saved."""
    model = load(source)
    report = Pipeline(passes)(model)
    assert report.changed
    if mutation is not None:
        mutation(model)
    result = save(model, source.with_name("result.onnx"), force=True)
    return verify_models(source, result.path, **{"depth": "regions", **options})


def planted_node(model: ir.Model, pass_name: str, site: str, ending: str) -> ir.Node:
    """The one node that a pass inserted at a site, by the end of its name."""
    found = [
        node
        for node in model.graph.all_nodes()
        if node.metadata_props.get(PASS_KEY) == pass_name
        and node.metadata_props.get(SITE_KEY) == site
        and (node.name or "").endswith(ending)
    ]
    assert len(found) == 1, [node.name for node in found]
    return found[0]
