"""Metadata that extracted functions carry, so that inlining gives back what was there."""

from __future__ import annotations

__all__ = ["LAYER_KEY", "OWN", "SHARED_KEY", "STORED_KEY"]

STORED_KEY = "graphsurgery.initializer"
"""Of a Constant node in a function: the name of the initializer that it stands for."""

SHARED_KEY = "graphsurgery.constant"
"""Of a Constant node in a function: the name of the value of the one Constant node that all calls read."""

LAYER_KEY = "graphsurgery.layer"
"""Of a call: the number of its layer."""

OWN = "*"
"""In place of a name: every call had a constant of its own. In place of a number: that of the layer of the call."""
