"""Correcting the shapes that a file declares once sizes are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.dims import free_names, parse_dim, substitute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphsurgery.analysis.dims import Dim

__all__ = ["redeclare"]


def redeclare(
    value: ir.Value, inferred: Sequence[tuple[Dim, ...] | None], numbers: Mapping[str, int], *, create: bool = False
) -> None:
    """Correct the declared shape of ``value``.

    A size that is inferred as one number is declared so, whatever was declared before; else names in ``numbers`` become
    numbers in what was declared.

    Args:
        value: the value.
        inferred: its shape, once for each context that it occurs in (a function body occurs in several).
        numbers: the number of each symbolic size that is known.
        create: declare a shape where the file declares none.
    """
    known = [shape for shape in inferred if shape is not None]
    same_rank = len(known) == len(inferred) and len({len(shape) for shape in known}) == 1
    if value.shape is None:
        if create and same_rank:
            value.shape = ir.Shape([_agreed([shape[axis] for shape in known]) for axis in range(len(known[0]))])
        return
    declared = [_renamed(size, numbers) for size in value.shape]
    if same_rank:
        if len(known[0]) != len(declared):
            declared = [None] * len(known[0])
        sizes = [_agreed([shape[axis] for shape in known]) for axis in range(len(declared))]
        declared = [own if size is None else size for own, size in zip(declared, sizes, strict=True)]
    if declared != [size if isinstance(size, int) else size.value for size in value.shape]:
        value.shape = ir.Shape(declared)


def _agreed(sizes: Sequence[Dim]) -> int | None:
    first = sizes[0]
    return first if isinstance(first, int) and all(size == first for size in sizes) else None


def _renamed(size: int | ir.SymbolicDimProtocol, numbers: Mapping[str, int]) -> int | str | None:
    if isinstance(size, int):
        return size
    parsed = None if size.value is None else parse_dim(size.value)
    if parsed is None or isinstance(parsed, int):
        return parsed
    bound = substitute(parsed, numbers)
    if bound == parsed:
        return size.value
    # A size that came out negative, or that divides by zero, was wrong to begin with.
    if isinstance(bound, int):
        return bound if bound >= 0 else None
    return str(bound) if free_names(bound) else None
