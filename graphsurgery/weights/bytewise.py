"""Weight expressions in units that can be addressed: elements of whole bytes, else the bytes themselves.

ONNX packs elements of 4 and 2 bits with no regard to rows. What keeps whole bytes together can be said of the bytes:
anything whose last axis stays last and takes whole bytes, and runs that begin and end at a byte.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.weights.expressions import Stack, Transpose, View, dtype_of, shape_of

if TYPE_CHECKING:
    from graphsurgery.weights.expressions import Expression, Part

__all__ = ["Bytewise", "bytewise"]


@dataclasses.dataclass(frozen=True)
class Bytewise:
    """An expression in units of whole bytes.

    Attributes:
        part: the expression, over the same sources; every source is read through a view.
        unit: as what one element is moved.
    """

    part: Expression
    unit: np.dtype


def bytewise(part: Part) -> Bytewise | None:
    """``part`` in units of whole bytes; None where its elements would not begin at bytes."""
    bits = dtype_of(part).bitwidth
    if bits % 8 == 0:
        unit = np.dtype(f"u{bits // 8}") if bits <= 64 else np.dtype(f"V{bits // 8}")
        return Bytewise(_whole(part), unit)
    packed = _rows(part, bits) or _flat(part, bits, last=True)
    return None if packed is None else Bytewise(packed, np.dtype(np.uint8))


def _whole(part: Part) -> Expression:
    if isinstance(part, Stack):
        return Stack(tuple(_whole(item) for item in part.parts))
    if isinstance(part, Transpose):
        return Transpose(_whole(part.part), part.perm)
    view = _as_view(part)
    source = view.source
    return View(_whole(source), view.start, view.shape) if isinstance(source, View | Stack | Transpose) else view


def _as_view(part: Part) -> View:
    return part if isinstance(part, View) else View(part, 0, shape_of(part))


def _rows(part: Part, bits: int) -> Expression | None:
    """``part`` where each row of the last axis takes whole bytes: that axis counts bytes."""
    if isinstance(part, Stack):
        parts = [inner for item in part.parts if (inner := _rows(item, bits)) is not None]
        return Stack(tuple(parts)) if len(parts) == len(part.parts) else None
    if isinstance(part, Transpose):
        inner = _rows(part.part, bits)
        return None if inner is None or part.perm[-1] != len(part.perm) - 1 else Transpose(inner, part.perm)
    view = _as_view(part)
    if not view.shape or view.shape[-1] * bits % 8 or view.start * bits % 8:
        return None
    source: Part | None = view.source
    if isinstance(source, View | Stack | Transpose):
        source = _rows(source, bits)
    if source is None:
        return None
    return View(source, view.start * bits // 8, (*view.shape[:-1], view.shape[-1] * bits // 8))


def _flat(part: Part, bits: int, *, last: bool) -> View | Stack | None:
    """``part`` as a run of bytes where nothing is transposed; only the ``last`` run may end within a byte."""
    if isinstance(part, Stack):
        count = len(part.parts)
        if count > 1 and math.prod(shape_of(part)[1:]) * bits % 8:
            return None
        found = [_flat(item, bits, last=last and number == count - 1) for number, item in enumerate(part.parts)]
        parts = [item for item in found if item is not None]
        return Stack(tuple(parts)) if len(parts) == count else None
    if isinstance(part, Transpose):
        return None
    view = _as_view(part)
    if isinstance(view.source, View | Stack | Transpose):
        return None
    count = math.prod(view.shape)
    ends_whole = count * bits % 8 == 0 or (last and view.start + count == math.prod(shape_of(view.source)))
    if view.start * bits % 8 or not ends_whole:
        return None
    return View(view.source, view.start * bits // 8, ((count * bits + 7) // 8,))
