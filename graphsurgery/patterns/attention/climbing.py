"""From a softmax up to the products that its scores come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

__all__ = ["MAX_CHAIN", "chain_above"]

MAX_CHAIN = 24
"""Nodes between the scores and the softmax, or between it and the values, that are followed at most."""


def chain_above(
    start: ir.Value, is_product: Callable[[ir.Node], bool], is_step: Callable[[ir.Node], bool]
) -> tuple[tuple[ir.Node, ...], tuple[ir.Node, ...]]:
    """The products above ``start``, and the nodes through which it comes from them, producers first.

    Args:
        start: what the softmax is taken of.
        is_product: whether a node is a product to stop at.
        is_step: whether another node may stand between.
    """
    leads: dict[ir.Value, bool] = {}
    products: dict[ir.Node, None] = {}
    chain: dict[ir.Node, None] = {}

    def climb(value: ir.Value, depth: int) -> bool:
        if value in leads:
            return leads[value]
        leads[value] = False
        node = value.producer()
        if node is None or depth > MAX_CHAIN:
            return False
        if is_product(node):
            products.setdefault(node)
            leads[value] = True
        elif is_step(node):
            found = [climb(item, depth + 1) for item in node.inputs if item is not None]
            if any(found):
                chain.setdefault(node)
                leads[value] = True
        return leads[value]

    climb(start, 0)
    return tuple(products), tuple(chain)
