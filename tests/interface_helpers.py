"""What tests of housekeeping share: bytes of a model, feeds for an export, and holding two models against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from graphsurgery.equivalence.feeds import make_feeds
from graphsurgery.equivalence.signature import read_signature
from tests.oracle import Arrays, run, session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["assert_same_outputs", "feeds_of", "interface", "serialised"]


def serialised(model: ir.Model) -> bytes:
    """The bytes of the model's protobuf."""
    content: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return content


def interface(model: ir.Model) -> tuple[list[str | None], list[str | None]]:
    """Names of inputs and outputs."""
    return [value.name for value in model.graph.inputs], [value.name for value in model.graph.outputs]


def feeds_of(model: ir.Model, count: int = 3) -> list[Arrays]:
    """Some feeds for an export, prompts first."""
    feeds, _ = make_feeds(read_signature(ir.to_proto(model)), 0)
    # The first are prompts without a past; ragged batches and a past come behind.
    return [dict(feed.build()) for feed in feeds[::2][:count]]


def assert_same_outputs(
    before: ir.Model,
    after: ir.Model,
    folder: Path,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
) -> None:
    """Every output is bitwise the same; ``inputs`` and ``outputs`` say what is called what in ``after``."""
    first, second = session(before, folder), session(after, folder)
    # Of a cache that is a ring some slots are not defined.
    rings = read_signature(ir.to_proto(before)).rings
    compared = 0
    for feed in feeds_of(before, 5):
        try:
            reference = run(first, feed)
        except InvalidArgument:
            continue  # a batch that a fused operator does not take
        compared += 1
        renamed = {(inputs or {}).get(name, name): array for name, array in feed.items()}
        result = run(second, renamed)
        assert list(result) == [(outputs or {}).get(name, name) for name in reference]
        for name, array in reference.items():
            other = result[(outputs or {}).get(name, name)]
            assert (array.dtype, array.shape) == (other.dtype, other.shape)
            assert name in rings or np.array_equal(array, other, equal_nan=array.dtype.kind == "f"), name
    assert compared
