"""Telling caches that grow, caches of a fixed size and recurrent states apart, by what reads them.

Alphabet: B batch, P past, G KV heads, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.equivalence.roles import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx

    from graphsurgery.equivalence.protos import Scope
    from graphsurgery.equivalence.roles import InputSpec, OutputSpec

__all__ = ["classify_cache", "ring_outputs"]

# Operators that hand a cache on unchanged but for layout or the order of batch rows: type to the slots.
_THROUGH = dict.fromkeys(("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Gather"), (0,))
_WRITERS = frozenset({"ScatterND", "ScatterElements", "Scatter", "TensorScatter"})
_READERS = frozenset(
    {"GroupQueryAttention", "MultiHeadAttention", "Attention", "DecoderMaskedMultiHeadAttention", "SparseAttention"}
)


def classify_cache(spec: InputSpec, scope: Scope, outputs: Sequence[OutputSpec]) -> InputSpec:
    """Tell caches that grow, caches of a fixed size, and states from other floats, by what reads them."""
    role = Role.UNKNOWN
    size: tuple[tuple[int, int], ...] = ()
    same_dims = any(output.dims == spec.dims for output in outputs)
    for where, node, slot in scope.reached(spec.name, _THROUGH):
        if node.op_type == "Concat" and (_reaches_output(where, node.output[0]) or not same_dims):
            return dataclasses.replace(spec, role=Role.CACHE)
        if node.op_type in _WRITERS and slot == 0:
            role = Role.SLOTS
        elif node.op_type in _READERS and slot >= 3:
            role, size = _fused_cache(spec, where, node)
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


def _fused_cache(spec: InputSpec, scope: Scope, node: onnx.NodeProto) -> tuple[Role, tuple[tuple[int, int], ...]]:
    """Role and otherwise unknown sizes of a cache ``[B, G, P, D]`` that a fused attention operator reads."""
    numbers = _numbers(node)
    size: list[tuple[int, int]] = []
    role = Role.CACHE
    if isinstance(spec.dims[-1], str):
        head = _head_size(scope, node, numbers)
        if head is not None:
            size.append((len(spec.dims) - 1, head))
    if numbers.get("sliding_window_cache") and numbers.get("local_window_size", -1) > 0 and len(spec.dims) == 4:
        # A ring of one window: the operator asks for at least that many slots, whatever is in them.
        role = Role.STATE
        size.append((2, numbers["local_window_size"]))
    return role, tuple(size)


def _head_size(scope: Scope, node: onnx.NodeProto, numbers: Mapping[str, int]) -> int | None:
    """D, from the rotary table ``[.., D/2]`` or from the width of the projection before the operator."""
    if len(node.input) > 7 and node.input[7]:
        table = scope.static_dims(node.input[7])
        if table and numbers.get("do_rotary"):
            return table[-1] * 2
    heads, kv_heads = numbers.get("num_heads", 0), numbers.get("kv_num_heads", 0)
    packed = len(node.input) < 2 or not node.input[1]
    source = node.input[0] if packed else node.input[1]
    producer = scope.producers.get(source)
    while producer is not None and producer.op_type in {"Add", "Reshape", "Identity", "Cast"}:
        producer = scope.producers.get(producer.input[0])
    if producer is None or not kv_heads:
        return None
    width = next((attribute.i for attribute in producer.attribute if attribute.name == "N"), None)
    if width is None and len(producer.input) > 1:
        weight = scope.static_dims(producer.input[1])
        width = weight[-1] if weight else None
    return width // (heads + 2 * kv_heads if packed else kv_heads) if width else None


def _numbers(node: onnx.NodeProto) -> dict[str, int]:
    return {attribute.name: attribute.i for attribute in node.attribute}
