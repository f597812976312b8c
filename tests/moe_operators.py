"""Attributes of com.microsoft::MoE and QMoE that several tests use."""

from __future__ import annotations

from typing import Any

__all__ = ["GPT_OSS"]

GPT_OSS: dict[str, Any] = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "activation_alpha": 1.702,
    "activation_beta": 1.0,
    "swiglu_limit": 0.8,
    "normalize_routing_weights": 1,
}
"""The gated activation of gpt-oss, with its clamp."""
