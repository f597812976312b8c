"""How rewrites are proved: feeds from a signature, both models in ONNX Runtime, everything that they return compared."""

from __future__ import annotations

from graphsurgery.equivalence.verify import verify_models
from graphsurgery.equivalence.verify_report import VerifyReport

__all__ = ["VerifyReport", "verify_models"]
