"""Exports to rename."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphsurgery.model_io import load

if TYPE_CHECKING:
    import onnx_ir as ir

FIXTURES = Path(__file__).parents[2] / "fixtures"


def fixture(name: str) -> ir.Model:
    return load(FIXTURES / name / "model.onnx")
