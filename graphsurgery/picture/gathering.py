"""GatherND over whole arrays: the reference evaluator walks over its rows one by one, a million in a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

__all__ = ["FAST_OPERATORS"]


class GatherND(OpRun):  # type: ignore[misc] # onnx is not followed by the checker
    """As in the ONNX operator set, from version 12 on."""

    op_domain = ""

    def _run(self, data: np.ndarray[Any, Any], indices: np.ndarray[Any, Any], batch_dims: int = 0) -> tuple[Any]:
        lead = np.indices(indices.shape[:-1], sparse=True)[:batch_dims] if batch_dims else ()
        return (data[(*lead, *np.moveaxis(indices, -1, 0))],)


FAST_OPERATORS: tuple[type[Any], ...] = (GatherND,)
