"""Declared dims of inputs and outputs: numbers, symbols, and sums and products of symbols.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache.
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import onnx

__all__ = ["Dim", "declared_dims", "evaluate"]

Dim = int | str

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def declared_dims(value: onnx.ValueInfoProto) -> tuple[Dim, ...] | None:
    """Dims of a tensor value: ints, symbols, ``?`` where nothing is declared; None without a shape or for no tensor.

    Symbols whose name is digits are numbers: some exporters write fixed sizes so.
    """
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        return None
    dims: list[Dim] = []
    for dim in value.type.tensor_type.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(dim.dim_value)
        elif dim.dim_param.isdecimal():
            dims.append(int(dim.dim_param))
        else:
            dims.append(dim.dim_param or "?")
    return tuple(dims)


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """The size that ``dim`` stands for, from the sizes of symbols; None where it depends on an unknown one."""
    if isinstance(dim, int):
        return dim
    if dim in sizes:
        return sizes[dim]
    try:
        tree = ast.parse(dim, mode="eval")
    except SyntaxError:
        return None
    return _evaluate(tree.body, sizes)


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int | None:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes.get(name)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _evaluate(left, sizes), _evaluate(right, sizes)
            apply = _OPERATORS.get(type(op))
            if first is None or second is None or apply is None:
                return None
            if second == 0 and isinstance(op, ast.FloorDiv | ast.Div | ast.Mod):
                return None
            return apply(first, second)
        case _:
            return None
