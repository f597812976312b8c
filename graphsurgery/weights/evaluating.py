"""The value of a weight expression, given the values of its sources."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.weights.expressions import Stack, Transpose, View

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphsurgery.weights.expressions import Part, SourceName

__all__ = ["evaluate"]


def evaluate(expression: Part, arrays: Mapping[ir.Value | SourceName, np.ndarray]) -> np.ndarray:
    """The array that ``expression`` gives when its sources hold ``arrays``.

    Args:
        expression: over the keys of ``arrays``.
        arrays: one for each source, of the source's shape.

    Raises:
        KeyError: a source has no array.
    """
    if isinstance(expression, View):
        flat = evaluate(expression.source, arrays).reshape(-1)
        return flat[expression.start : expression.start + math.prod(expression.shape)].reshape(expression.shape)
    if isinstance(expression, Stack):
        return np.stack([evaluate(part, arrays) for part in expression.parts])
    if isinstance(expression, Transpose):
        return evaluate(expression.part, arrays).transpose(expression.perm)
    return arrays[expression]
