"""Caches of a fixed size after the write: which values hold them, in the main graph and in the bodies of functions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.bodies import bodies_of
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.kv_cache import CacheSite

__all__ = ["Written", "written_caches"]

_LAYOUT = (
    *("Identity", "Cast", "CastLike", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Dropout"),
    *("QuantizeLinear", "DequantizeLinear", "Slice"),
)


@dataclasses.dataclass(frozen=True)
class Written:
    """What a value holds.

    Attributes:
        caches: the caches; in the body of a function those of all its calls.
        same_layout: whether it is in the layout in which the caches are returned.
        node: the node that writes; None where none is seen.
    """

    caches: tuple[CacheSite, ...]
    same_layout: bool
    node: ir.Node | None


def written_caches(model: ir.Model, shapes: Shapes, caches: Iterable[CacheSite]) -> dict[Body, dict[ir.Value, Written]]:
    """The values of each body that hold a cache of a fixed size, in every layout between the write and the output.

    A value of a function's body is one where the function returns it, and every call makes a cache of it.
    """
    found: dict[Body, dict[ir.Value, Written]] = {}
    for body in bodies_of(model, shapes):
        values = found[body] = {}
        if body.function is None:
            for cache in caches:
                if cache.form == "scatter" and not cache.cross and cache.axis is not None:
                    _add(values, cache.output, (cache,), same_layout=True)
            continue
        for position, output in enumerate(body.function.outputs):
            held = [_returned(call.node, position, found[call.caller]) for call in body.calls]
            known = [item for item in held if item is not None]
            if known and len(known) == len(held):
                all_caches = tuple({cache.output: cache for item in known for cache in item.caches}.values())
                _add(values, output, all_caches, same_layout=all(item.same_layout for item in known))
    return found


def _returned(call: ir.Node, position: int, values: dict[ir.Value, Written]) -> Written | None:
    return values.get(call.outputs[position]) if position < len(call.outputs) else None


def _add(values: dict[ir.Value, Written], value: ir.Value, caches: tuple[CacheSite, ...], *, same_layout: bool) -> None:
    """Enter ``value``, and the values above it up to the write."""
    trail: list[ir.Value] = []
    current: ir.Value | None = value
    node = None
    while current is not None:
        trail.append(current)
        node = current.producer()
        if not is_op(node, *_LAYOUT):
            break
        assert node is not None
        current = node.inputs[0]
    for number, item in enumerate(trail):
        values[item] = Written(caches, same_layout and number == 0, node)
