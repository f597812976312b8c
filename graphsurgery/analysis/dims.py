"""Symbolic tensor sizes: integer polynomials over named sizes, unknown sizes and a few opaque functions of them.

A :data:`Dim` is an ``int`` or an :class:`Expr`. An ``Expr`` is always in normal form and never a constant, so ``==`` is
structural equality after normalisation: ``(past + seq) - past == seq``. Symbols and unknowns stand for tensor sizes
and are never negative; only ``unknown(n, signed=True)``, an element of a tensor, may be. What polynomials cannot say
(floor division, ``min``, the clamping of a slice bound) stays an opaque atom that ``evaluate`` still computes.

Example::

    >>> past, seq = symbol("past"), symbol("seq")
    >>> str(past + seq), evaluate(2 * (past + seq), {"past": 3, "seq": 2})
    ('past + seq', 10)
    >>> str(minimum(past + seq, past)), str(floordiv(4 * seq + 1, 2))
    ('past', '2*seq')
"""

from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING

from graphsurgery.analysis._dim_ops import (
    absolute,
    broadcast,
    equal,
    floordiv,
    is_nonnegative,
    is_positive,
    less,
    maximum,
    minimum,
    mod,
    select,
    slice_index,
    slice_length,
    truncdiv,
)
from graphsurgery.analysis._expr import (
    Call,
    Dim,
    Expr,
    Symbol,
    Unknown,
    evaluate,
    free_names,
    product,
    substitute,
    symbol,
    total,
    unknown,
)
from graphsurgery.analysis._polynomials import bounds, exact_div

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Call",
    "Dim",
    "Expr",
    "Symbol",
    "Unknown",
    "absolute",
    "bounds",
    "broadcast",
    "equal",
    "evaluate",
    "exact_div",
    "floordiv",
    "free_names",
    "is_nonnegative",
    "is_positive",
    "less",
    "maximum",
    "minimum",
    "mod",
    "parse_dim",
    "product",
    "select",
    "slice_index",
    "slice_length",
    "substitute",
    "symbol",
    "total",
    "truncdiv",
    "unknown",
]

# ``batch-size`` is a name, ``s0 - 1`` is a difference: exporters that print differences put spaces around the sign.
_HYPHENATED = re.compile(r"[A-Za-z_][\w.]*(-[\w.]+)+")
_MAX_TEXT = 300
_FUNCTIONS: dict[str, Callable[..., Dim]] = {
    "max": maximum,
    "min": minimum,
    "mod": mod,
    "floordiv": floordiv,
    "floor": lambda a: a,
}
_OPERATORS: dict[type[ast.operator], Callable[[Dim, Dim], Dim]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: floordiv,
    ast.Div: floordiv,
    ast.Mod: mod,
}


@functools.lru_cache(maxsize=4096)
def parse_dim(text: str) -> Dim | None:
    """The size that a ``dim_param`` names, or None where it says nothing (empty, ``?``, ``None``, negative).

    Digits are a number, identifiers are symbols, arithmetic such as ``past + seq``, ``2*s0`` or ``Max(1, s0)`` is an
    expression over them; text that is none of these is one opaque symbol of that name.
    """
    text = text.strip()
    if text in {"", "?", "None", "-1"}:
        return None
    if text.isdecimal():
        return int(text)
    if text.isidentifier() or len(text) > _MAX_TEXT or _HYPHENATED.fullmatch(text):
        return symbol(text)
    try:
        return _parse_node(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return symbol(text)


def _parse_node(node: ast.expr) -> Dim:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_parse_node(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_parse_node(left), _parse_node(right))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 0 < power <= 8:
            return product([_parse_node(left)] * power)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name.lower() in _FUNCTIONS and args:
            function = _FUNCTIONS[name.lower()]
            parsed = [_parse_node(arg) for arg in args]
            return function(parsed[0]) if len(parsed) == 1 else functools.reduce(function, parsed)
    raise ValueError(f"{ast.dump(node)} is no arithmetic on sizes")
