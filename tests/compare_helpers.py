"""Diffs of small models given as text, and what they list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from graphsurgery.compare import diff_models

if TYPE_CHECKING:
    from graphsurgery.compare import ModelDiff

HEAD = '<ir_version: 9, opset_import: ["" : 18]>'


def diff(a: str | onnx.ModelProto | ir.Model, b: str | onnx.ModelProto | ir.Model) -> ModelDiff:
    """The diff of two models, each as ONNX text, protobuf or IR."""
    return diff_models(model_of(a), model_of(b)).models[0]


def model_of(given: str | onnx.ModelProto | ir.Model) -> ir.Model:
    if isinstance(given, ir.Model):
        return given
    model: ir.Model = ir.from_proto(onnx.parser.parse_model(given) if isinstance(given, str) else given)
    return model


def lists(found: ModelDiff) -> dict[str, list[str]]:
    """The lists that are not empty, as they are printed."""
    return {heading: [str(item) for item in listing.items] for heading, listing in found.lists()}
