"""What the inputs of a decoder are: token ids or embeddings, the attention mask, positions.

Read from names where exporters agree on them, from structure otherwise, so that any decoder is understood that takes
tokens in one of the usual layouts.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.patterns.matcher import is_op, through

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes

__all__ = ["TokenInput", "fed_inputs", "find_attention_mask", "find_position_ids", "find_token_input"]

_TOKEN_NAMES = (
    "input_ids",
    "decoder_input_ids",
    "inputs_embeds",
    "decoder_inputs_embeds",
    "input_embeds",
    "tokens",
    "hidden_states",
    "encoder_hidden_states",
    "last_hidden_state",
)
_CACHE = re.compile(r"past|cache|present|state\b|conv_state|recurrent", re.IGNORECASE)
_INTEGER = frozenset({ir.DataType.INT64, ir.DataType.INT32})
_FLOAT = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


@dataclasses.dataclass(frozen=True)
class TokenInput:
    """The graph input that tells how many tokens there are.

    Attributes:
        value: ids ``[B, S]`` or embeddings ``[B, S, H]``; ``[T]`` or ``[T, H]`` for a packed stream.
        batch_axis: its batch axis; None for a packed stream.
        sequence_axis: its axis of size S.
        batch: B; None for a packed stream.
        length: S, or T.
    """

    value: ir.Value
    batch_axis: int | None
    sequence_axis: int
    batch: Dim | None
    length: Dim


def fed_inputs(model: ir.Model) -> list[ir.Value]:
    """The inputs that a caller has to feed: those that have no default."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def find_token_input(model: ir.Model, shapes: Shapes) -> TokenInput | None:
    """The input that carries the tokens; None where nothing looks like it."""
    inputs = {value.name: value for value in fed_inputs(model)}
    for name in _TOKEN_NAMES:
        value = inputs.get(name)
        found = _as_tokens(value, shapes) if value is not None else None
        if found is not None:
            return found
    ranked = sorted(inputs.values(), key=lambda value: not _feeds_embedding(value))
    for value in ranked:
        if _CACHE.search(value.name or "") or "mask" in (value.name or "") or "position" in (value.name or ""):
            continue
        found = _as_tokens(value, shapes)
        if found is not None and (value.dtype in _FLOAT or _feeds_embedding(value)):
            return found
    return None


def _as_tokens(value: ir.Value, shapes: Shapes) -> TokenInput | None:
    shape = shapes.shape(value)
    if shape is None:
        return None
    inner = len(shape) - (1 if value.dtype in _FLOAT else 0)
    if value.dtype not in _INTEGER | _FLOAT or inner not in (1, 2):
        return None
    if inner == 1:
        return TokenInput(value, None, 0, None, shape[0])
    return TokenInput(value, 0, 1, shape[0], shape[1])


def _feeds_embedding(value: ir.Value) -> bool:
    """Whether ``value``, behind casts and reshapes, indexes a table of weights."""
    pending, steps = [value], 0
    while pending and steps < 32:
        current = pending.pop()
        steps += 1
        for use in current.uses():
            if is_op(use.node, "Gather") and use.idx == 1:
                data = use.node.inputs[0]
                if data is not None and through(data).is_initializer():
                    return True
            elif is_op(use.node, "Cast", "Identity", "Reshape", "Unsqueeze", "Flatten", "Clip") and use.idx == 0:
                pending.append(use.node.outputs[0])
    return False


def find_attention_mask(model: ir.Model, shapes: Shapes) -> ir.Value | None:
    """The padding mask ``[B, T]``, non-zero where a token is attended: int, bool or float; None where there is none."""
    candidates = [
        value
        for value in fed_inputs(model)
        if "mask" in (value.name or "").lower() and shapes.rank(value) == 2 and value.dtype is not None
    ]
    exact = [value for value in candidates if value.name in ("attention_mask", "decoder_attention_mask")]
    padding = [value for value in candidates if "attention" in (value.name or "").lower()]
    for group in (exact, padding):
        if group:
            return group[0]
    return None


def find_position_ids(model: ir.Model, shapes: Shapes) -> ir.Value | None:
    """The positions: ``[B, S]``, ``[3, B, S]`` or ``[4, B, S]`` integers; None where there are none."""
    for value in fed_inputs(model):
        name = (value.name or "").lower()
        if value.dtype not in _INTEGER or "position" not in name or _CACHE.search(name):
            continue
        if shapes.rank(value) in (2, 3):
            return value
    return None
