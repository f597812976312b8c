"""Products of matrices with batch axes: MatMul, and the FusedMatMul that ONNX Runtime's optimizer makes of its surroundings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.patterns.attention.key_value_sources import UnreadableError
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Product", "is_product", "read_product"]


@dataclasses.dataclass(frozen=True)
class Product:
    """What a product does besides multiplying.

    Attributes:
        scale: what the result is multiplied by.
        right_turned: whether the last two axes of the right operand are swapped first.
    """

    scale: float = 1.0
    right_turned: bool = False

    def axes(self, plain: tuple[int, int]) -> tuple[int, int]:
        """Two of the last axes of the right operand, given as they are where nothing is swapped."""
        return (plain[1], plain[0]) if self.right_turned else plain


def is_product(node: ir.Node | None) -> bool:
    """Whether ``node`` is a MatMul or FusedMatMul."""
    return is_op(node, "MatMul") or is_op(node, "FusedMatMul", domain="com.microsoft")


def read_product(node: ir.Node) -> Product:
    """What the product ``node`` does.

    Raises:
        UnreadableError: its left operand is transposed, or batch axes are.
    """
    if not node.domain:
        return Product()
    numbers = {name: attribute.as_int() for name, attribute in node.attributes.items() if name.startswith("trans")}
    for name in ("transA", "transBatchA", "transBatchB"):
        if numbers.get(name):
            raise UnreadableError(f"node {node.name!r} (FusedMatMul) has {name}, which is no layout of attention")
    alpha = node.attributes.get("alpha")
    return Product(1.0 if alpha is None else alpha.as_float(), bool(numbers.get("transB")))
