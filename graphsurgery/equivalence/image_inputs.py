"""Inputs of vision encoders: images, streams of patches, and what their graph tells of their sizes.

Alphabet: B batch, S patches of a stream, F numbers of a patch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from graphsurgery.analysis.input_names import is_image_name
from graphsurgery.equivalence.roles import Role

if TYPE_CHECKING:
    import onnx

    from graphsurgery.equivalence.dims import Dim
    from graphsurgery.equivalence.inferring import Inferred
    from graphsurgery.equivalence.protos import Scope
    from graphsurgery.equivalence.roles import InputSpec

__all__ = ["features", "image_size", "order_length", "with_patch_masks", "with_patches"]

_LAYOUT = dict.fromkeys(("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Flatten"), (0,))
# A token for the class may be joined in front of the patches.
_TO_POSITIONS = _LAYOUT | {"Concat": (0, 1, 2)}
_PATCHES_A_SIDE = 4


def image_size(spec: InputSpec, scope: Scope) -> tuple[tuple[int, int], ...]:
    """Rows and columns of images ``[.., rows, columns]`` whose sizes are symbols: as many patches as have a position."""
    found = _first_product(spec, scope)
    if found is None:
        return ()
    side, kernel = found
    axes = len(spec.dims) - 2, len(spec.dims) - 1
    return tuple(
        (axis, side * size) for axis, size in zip(axes, kernel, strict=True) if isinstance(spec.dims[axis], str)
    )


def _first_product(spec: InputSpec, scope: Scope) -> tuple[int, tuple[int, ...]] | None:
    """Patches along each side of the images of an input, and rows and columns of a patch."""
    for where, node, slot in scope.reached(spec.name, _LAYOUT):
        kernel = where.static_dims(node.input[1]) if node.op_type == "Conv" and slot == 0 else None
        if kernel and len(kernel) > 3:
            return _side(where, node), kernel[-2:]
    return None


def _side(scope: Scope, patches: onnx.NodeProto) -> int:
    """Patches along each side of an image whose positions are a stored table ``[.., N, H]``."""
    for where, node, slot in scope.reached(patches.output[0], _TO_POSITIONS):
        table = where.static_dims(node.input[1 - slot]) if node.op_type == "Add" and slot < 2 else None
        for count in (table[-2], table[-2] - 1) if table and len(table) > 1 else ():
            if count > 1 and math.isqrt(count) ** 2 == count:
                return math.isqrt(count)
    return _PATCHES_A_SIDE


def features(spec: InputSpec, scope: Scope, inferred: Inferred) -> tuple[tuple[int, int], ...]:
    """The size of the last axis of hidden states, where a reader tells what the file declares as a symbol."""
    last = len(spec.dims) - 1
    if isinstance(spec.dims[last], int):
        return ()
    for where, node, slot in scope.reached(spec.name, {"Identity": (0,), "Cast": (0,)}):
        known: tuple[int | None, ...] | None = None
        if node.op_type == "Reshape" and slot == 0:
            # Patches: [S, F] is seen as [S, channels, frames, rows, columns].
            known = (inferred.dims(where, node.output[0]) or ())[last:]
        elif node.op_type in ("MatMul", "Gemm") and slot == 0:
            known = (where.static_dims(node.input[1]) or ())[:1]
        sizes = [size for size in known or () if size is not None]
        if sizes and known is not None and len(sizes) == len(known):
            return ((last, math.prod(sizes)),)
    return ()


def order_length(spec: InputSpec, scope: Scope, inferred: Inferred) -> str | None:
    """How many rows a value has that the input puts in order, where it is called an index and the graph tells."""
    if not isinstance(spec.dims[0], str) or not spec.name.lower().endswith("index"):
        return None
    for where, node, slot in scope.reached(spec.name, _LAYOUT):
        if node.op_type in ("Gather", "GatherND") and slot == 1:
            return inferred.rows(where, node.input[0])
    return None


def with_patch_masks(specs: list[InputSpec], scope: Scope) -> list[InputSpec]:
    """Masks ``[B, rows, columns]`` of patches have a place for each patch of the images beside them."""
    images = [spec for spec in specs if len(spec.dims) > 3 and is_image_name(spec.name)]
    found = [(spec, product) for spec in images if (product := _first_product(spec, scope)) is not None]
    if not found:
        return specs
    image, (side, kernel) = found[0]
    declared = zip(image.dims[-2:], kernel, strict=True)
    sides = [dim // size if isinstance(dim, int) else side for dim, size in declared]
    return [
        dataclasses.replace(spec, role=Role.UNKNOWN, size=((1, sides[0]), (2, sides[1])))
        if spec.role is Role.MASK_ND and len(spec.dims) == 3 and "patch" in spec.name.lower()
        else spec
        for spec in specs
    ]


def with_patches(specs: list[InputSpec]) -> list[InputSpec]:
    """Positions ``[S, 2]`` beside a packed stream of S patches count rows and columns of an image."""
    stream = next((spec.dims[0] for spec in specs if spec.role is Role.EMBEDS and len(spec.dims) == 2), None)
    return [
        dataclasses.replace(spec, role=Role.PATCHES)
        if stream is not None and spec.role is Role.POSITIONS and len(spec.dims) == 2 and _is_pairs(spec, stream)
        else spec
        for spec in specs
    ]


def _is_pairs(spec: InputSpec, stream: Dim) -> bool:
    """Whether positions have a row for each patch: their first axis, and not their last, may be as long as the stream."""
    return spec.dims[0] == stream or (isinstance(spec.dims[0], str) and spec.dims[1] != stream)
