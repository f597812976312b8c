"""Telling caches that grow, caches of a fixed size and recurrent states apart, by what reads them.

Alphabet: B batch, P past, G KV heads, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.equivalence.roles import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from graphsurgery.equivalence.inferring import Inferred
    from graphsurgery.equivalence.protos import Scope
    from graphsurgery.equivalence.roles import InputSpec, OutputSpec

__all__ = ["classify_cache", "ring_outputs"]

# Operators that hand a cache on unchanged but for layout or the order of batch rows: type to the slots.
_THROUGH = dict.fromkeys(("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Gather"), (0,))
_WRITERS = frozenset({"ScatterND", "ScatterElements", "Scatter", "TensorScatter"})
_READERS = frozenset(
    {"GroupQueryAttention", "MultiHeadAttention", "Attention", "DecoderMaskedMultiHeadAttention", "SparseAttention"}
)
# Operators with caches ``[B, G, P, D]`` to the slot of the keys'; that of the values' is the next.
_PAST_KEYS = {
    ("com.microsoft", "GroupQueryAttention"): 3,
    ("com.microsoft", "SparseAttention"): 3,
    ("com.microsoft", "MultiHeadAttention"): 6,
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): 5,
    ("", "Attention"): 4,
}


def classify_cache(spec: InputSpec, scope: Scope, outputs: Sequence[OutputSpec], inferred: Inferred) -> InputSpec:
    """Tell caches that grow, caches of a fixed size, and states from other floats, by what reads them."""
    role = Role.UNKNOWN
    size: tuple[tuple[int, int], ...] = ()
    same_dims = any(output.dims == spec.dims for output in outputs)
    for where, node, slot in scope.reached(spec.name, _THROUGH):
        if node.op_type == "Concat" and (_reaches_output(where, node.output[0]) or not same_dims):
            size = _joined_sizes(spec, where, node, slot, inferred)
            return dataclasses.replace(spec, role=Role.CACHE, size=size)
        if node.op_type in _WRITERS and slot == 0:
            role = Role.SLOTS
        elif node.op_type in _READERS and slot >= 3:
            role, size = _fused_cache(spec, where, node, slot, inferred)
    if role is Role.UNKNOWN and same_dims:
        role = Role.STATE
    return dataclasses.replace(spec, role=role, size=size)


def ring_outputs(proto: onnx.ModelProto) -> frozenset[str]:
    """Caches that a fused operator returns as a ring of one window, of which only written slots are defined."""
    return frozenset(
        name
        for node in proto.graph.node
        if node.op_type == "GroupQueryAttention" and _numbers(node).get("sliding_window_cache")
        for name in node.output[1:3]
    )


def _reaches_output(scope: Scope, name: str) -> bool:
    """Whether the value is an output, or handed on to one by layout operators alone."""
    stack, seen = [(scope, name)], set[str]()
    while stack:
        where, value = stack.pop()
        if value in where.outputs:
            if where.caller is None:
                return True
            outer, call = where.caller
            stack.append((outer, call.output[where.outputs[value]]))
        if value in seen:
            continue
        seen.add(value)
        stack.extend(
            (where, node.output[0])
            for node, slot in where.consumers.get(value, ())
            if slot == 0 and node.op_type in {"Identity", "Cast", "Transpose", "Reshape"}
        )
    return False


def _joined_sizes(
    spec: InputSpec, scope: Scope, node: onnx.NodeProto, slot: int, inferred: Inferred
) -> tuple[tuple[int, int], ...]:
    """Otherwise unknown sizes of a cache that a Concat grows: what is joined to it has the same, but for one axis."""
    along = _numbers(node).get("axis", 0) % max(len(spec.dims), 1)
    wanted = [axis for axis, dim in enumerate(spec.dims) if axis and axis != along and isinstance(dim, str)]
    if not wanted or not _is_laid_out_as(scope, node.input[slot], spec.name):
        return ()
    for place, name in enumerate(node.input):
        dims = inferred.dims(scope, name) if place != slot else None
        if dims is not None and len(dims) == len(spec.dims):
            return tuple((axis, size) for axis in wanted if (size := dims[axis]) is not None)
    return ()


def _is_laid_out_as(scope: Scope, value: str, name: str) -> bool:
    """Whether a value is the input ``name`` of the model, at most with batch rows in another order."""
    while True:
        outer = scope.formal(value)
        if outer is not None:
            scope, value = outer
            continue
        if scope.caller is None and value == name:
            return True
        node = scope.producers.get(value)
        rows = node is not None and node.op_type == "Gather" and not _numbers(node).get("axis", 0)
        if node is None or not (rows or node.op_type in {"Identity", "Cast"}):
            return False
        value = node.input[0]


def _fused_cache(
    spec: InputSpec, scope: Scope, node: onnx.NodeProto, slot: int, inferred: Inferred
) -> tuple[Role, tuple[tuple[int, int], ...]]:
    """Role and otherwise unknown sizes of a cache ``[B, G, P, D]`` that a fused attention operator reads."""
    numbers = _numbers(node)
    size: list[tuple[int, int]] = []
    role = Role.CACHE
    if isinstance(spec.dims[-1], str):
        head = _head_size(scope, node, slot, inferred)
        if head is not None:
            size.append((len(spec.dims) - 1, head))
    if numbers.get("sliding_window_cache") and numbers.get("local_window_size", -1) > 0 and len(spec.dims) == 4:
        # A ring of one window: the operator asks for at least that many slots, whatever is in them.
        role = Role.STATE
        size.append((2, numbers["local_window_size"]))
    return role, tuple(size)


def _head_size(scope: Scope, node: onnx.NodeProto, slot: int, inferred: Inferred) -> int | None:
    """D, from what becomes the new rows of the cache, else from the rotary table ``[.., D/2]``.

    The table comes last: where only a part of each head is rotated it is narrower.
    """
    numbers = _numbers(node)
    packed = len(node.input) < 2 or not node.input[1]
    is_value = slot == _PAST_KEYS.get((node.domain, node.op_type), slot) + 1
    dims = inferred.dims(scope, node.input[0 if packed else 2 if is_value else 1])
    width = dims[-1] if dims else None
    if dims is not None and width is not None and (node.domain, node.op_type) in _PAST_KEYS:
        if len(dims) > 3:
            return width
        heads = numbers.get("num_heads", 0)
        rows = numbers.get("kv_num_heads", heads)
        parts = heads + 2 * rows if packed else rows
        if parts and width % parts == 0:
            return width // parts
    if len(node.input) > 7 and node.input[7] and numbers.get("do_rotary"):
        table = scope.static_dims(node.input[7])
        return table[-1] * 2 if table else None
    return None


def _numbers(node: onnx.NodeProto) -> dict[str, int]:
    return {attribute.name: attribute.i for attribute in node.attribute}
