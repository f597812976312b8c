"""The table of all shape rules: (domain, op) to rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis import (
    _rules_attention,
    _rules_contrib,
    _rules_control,
    _rules_elementwise,
    _rules_index,
    _rules_linear,
    _rules_reduce,
    _rules_shape,
)

if TYPE_CHECKING:
    from graphsurgery.analysis._facts import RuleTable

__all__ = ["RULES"]

RULES: RuleTable = {
    **_rules_elementwise.TABLE,
    **_rules_shape.TABLE,
    **_rules_index.TABLE,
    **_rules_reduce.TABLE,
    **_rules_linear.TABLE,
    **_rules_attention.TABLE,
    **_rules_control.TABLE,
    **_rules_contrib.TABLE,
}
