"""What the inputs of a decoder are: token ids or embeddings, the attention mask, positions.

Read from names where exporters agree on them, from structure and sizes otherwise, so that any decoder is understood
that takes tokens in one of the usual layouts. Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a
fixed-size cache.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.dims import free_names
from graphsurgery.analysis.slices import same_size
from graphsurgery.patterns.matcher import is_op
from graphsurgery.patterns.rows import batch_aliases, locate_output, may_be

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes

__all__ = [
    "FLOATS",
    "TokenInput",
    "fed_inputs",
    "find_attention_mask",
    "find_position_ids",
    "find_token_input",
    "has_past",
]

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
"""Element types of activations."""

# A model with an encoder and a decoder has both pairs of names: the decoder's come first.
_TOKEN_NAMES = (
    "decoder_input_ids",
    "input_ids",
    "decoder_inputs_embeds",
    "inputs_embeds",
    "input_embeds",
    "tokens",
    "hidden_states",
    "last_hidden_state",
)
_MASK_NAMES = ("decoder_attention_mask", "attention_mask", "decoder_mask", "attn_mask", "input_mask", "mask")
_CACHE = re.compile(r"past|cache|present|conv_state|recurrent|(?<!hidden)(^|[._])states?([._\d]|$)", re.IGNORECASE)
_NOT_TOKENS = re.compile(r"mask|position|type_ids|segment|weight|bias|lengths?$|indices$", re.IGNORECASE)
# Of another sequence than the one whose rows are pruned.
_ELSEWHERE = re.compile(r"(?<!de)encoder|cross|vision|visual|image|pixel|audio|video|speech", re.IGNORECASE)
_INTEGER = frozenset({ir.DataType.INT64, ir.DataType.INT32})
_MASK_TYPES = _INTEGER | FLOATS | {ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16}
_LAYOUT = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Clip", "Expand", "Slice")
_MAX_STEPS = 32


@dataclasses.dataclass(frozen=True)
class TokenInput:
    """The graph input that tells how many tokens there are.

    Attributes:
        value: ids ``[B, S]`` or embeddings ``[B, S, H]``; ``[T]`` or ``[T, H]`` for a packed stream.
        batch_axis: its batch axis; None for a packed stream.
        sequence_axis: its axis of size S.
        batch: B; None for a packed stream.
        length: S, or T.
        batch_aliases: sizes that cannot be inferred and that an output declares to be B.
    """

    value: ir.Value
    batch_axis: int | None
    sequence_axis: int
    batch: Dim | None
    length: Dim
    batch_aliases: tuple[Dim, ...] = ()


def fed_inputs(model: ir.Model) -> list[ir.Value]:
    """The inputs that a caller has to feed: those that have no default."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


# ---- tokens -------------------------------------------------------------------------------------------------------


def find_token_input(model: ir.Model, shapes: Shapes) -> TokenInput | None:
    """The input that carries the tokens; None where nothing looks like it.

    Of several that may, the first for which an output has a row for each token: a model of encoder and decoder has
    two sequences, and its logits belong to one.
    """
    found = list(_token_inputs(model, shapes))
    outputs = [value for value in model.graph.outputs if value.dtype in FLOATS or value.dtype is None]
    outputs = [value for value in outputs if shapes.rank(value) in (2, 3)]
    for tokens in found:
        located = [value for value in outputs if locate_output(value, shapes, tokens)]
        if located and tokens.batch is not None:
            aliases = [size for value in located for size in batch_aliases(value, shapes, tokens.batch)]
            return dataclasses.replace(tokens, batch_aliases=tuple(dict.fromkeys(aliases)))
        if located:
            return tokens
    return found[0] if found else None


def _token_inputs(model: ir.Model, shapes: Shapes) -> Iterator[TokenInput]:
    inputs = {value.name: value for value in fed_inputs(model)}
    named = [inputs[name] for name in _TOKEN_NAMES if name in inputs]
    others = [value for value in inputs.values() if value not in named and not _CACHE.search(value.name or "")]
    others = [value for value in others if not _NOT_TOKENS.search(value.name or "")]
    ids = [value for value in others if value.dtype in _INTEGER and _feeds_embedding(value, shapes)]
    # Weights may be fed too; they have no symbolic size.
    embeddings = [value for value in others if value.dtype in FLOATS]
    embeddings.sort(key=lambda value: all(isinstance(size, int) for size in shapes.shape(value) or ()))
    candidates = [*named, *ids] or embeddings
    here = [value for value in candidates if not _ELSEWHERE.search(value.name or "")]
    elsewhere = [value for value in candidates if value not in here]
    for value in [*here, *elsewhere]:
        tokens = _as_tokens(value, shapes)
        if tokens is not None:
            yield tokens


def _as_tokens(value: ir.Value, shapes: Shapes) -> TokenInput | None:
    shape = shapes.shape(value)
    if shape is None:
        return None
    inner = len(shape) - (1 if value.dtype in FLOATS else 0)
    if value.dtype not in _INTEGER | FLOATS or inner not in (1, 2):
        return None
    if inner == 1:
        return TokenInput(value, None, 0, None, shape[0])
    return TokenInput(value, 0, 1, shape[0], shape[1])


def _feeds_embedding(value: ir.Value, shapes: Shapes) -> bool:
    """Whether ``value``, behind casts and reshapes, picks rows of a table ``[V, H]``, plain or quantised."""
    pending, steps = [value], 0
    while pending and steps < _MAX_STEPS:
        current = pending.pop()
        steps += 1
        for use in current.uses():
            if use.node.op_type in ("Gather", "GatherBlockQuantized") and use.idx == 1:
                data = use.node.inputs[0]
                if data is not None and shapes.rank(data) == 2:
                    return True
            elif is_op(use.node, *_LAYOUT) and use.idx == 0:
                pending.append(use.node.outputs[0])
    return False


# ---- masks and positions ------------------------------------------------------------------------------------------


def find_attention_mask(model: ir.Model, shapes: Shapes, tokens: TokenInput | None = None) -> ir.Value | None:
    """The padding mask ``[B, T]``, non-zero where a token is attended: int, bool or float; None where there is none.

    Its last S columns must be those of ``tokens``. Left out are masks of another sequence (an encoder's), masks over
    the slots of a fixed-size cache (the tokens of a call are not its last columns), masks that are added to scores
    (zero where attended), and names that leave open which value means attended (``padding_mask``).
    """
    tokens = tokens or find_token_input(model, shapes)
    if tokens is None or tokens.batch is None:
        return None
    inputs = {value.name or "": value for value in fed_inputs(model)}
    names = [name for name in _MASK_NAMES if name in inputs]
    names += [name for name in inputs if name not in names and re.search(r"attention_?mask", name, re.IGNORECASE)]
    for name in names:
        value = inputs[name]
        if value.dtype not in _MASK_TYPES or shapes.rank(value) != 2 or _ELSEWHERE.search(name):
            continue
        if _covers(value, model, shapes, tokens) and not (value.dtype in FLOATS and _is_added(value)):
            return value
    return None


def _covers(mask: ir.Value, model: ir.Model, shapes: Shapes, tokens: TokenInput) -> bool:
    """Whether the last columns of ``mask [B, T]`` are the tokens."""
    batch, total = shapes.dim(mask, 0), shapes.dim(mask, 1)
    assert batch is not None
    assert total is not None
    assert tokens.batch is not None
    if not _fits(batch, tokens.batch, mask, model, shapes):
        return False
    if same_size(total, tokens.length):
        return True
    others = [item for item in _token_inputs(model, shapes) if item.value is not tokens.value]
    if any(same_size(total, item.length) for item in others):
        return False
    # A number of columns that does not grow with S is a number of slots, unless a cache of T - S is fed.
    caches = [shapes.shape(value) or () for value in fed_inputs(model) if _CACHE.search(value.name or "")]
    if isinstance(total, int):
        return isinstance(tokens.length, int) and any(total - tokens.length in shape[1:] for shape in caches)
    return not any(total in shape[1:] for shape in caches if len(shape) > 2)


def has_past(model: ir.Model) -> bool:
    """Whether a cache is fed: T may then be more than S, whatever the names of the sizes say."""
    return any(_CACHE.search(value.name or "") for value in fed_inputs(model))


def _is_added(mask: ir.Value) -> bool:
    """Whether ``mask``, behind casts and reshapes, is added to something: a bias of scores, 0 where attended."""
    pending, steps = [mask], 0
    while pending and steps < _MAX_STEPS:
        current = pending.pop()
        steps += 1
        for use in current.uses():
            if is_op(use.node, "Add"):
                return True
            if is_op(use.node, *_LAYOUT) and use.idx == 0:
                pending.append(use.node.outputs[0])
    return False


def find_position_ids(model: ir.Model, shapes: Shapes, tokens: TokenInput | None = None) -> ir.Value | None:
    """The positions of ``tokens``: ``[B, S]``, ``[3, B, S]`` or ``[4, B, S]`` integers; None where there are none."""
    tokens = tokens or find_token_input(model, shapes)
    if tokens is None or tokens.batch is None:
        return None
    for value in fed_inputs(model):
        name = (value.name or "").lower()
        shape = shapes.shape(value)
        if value.dtype not in _INTEGER or "position" not in name or _CACHE.search(name) or _ELSEWHERE.search(name):
            continue
        if shape is None or len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (3, 4)):
            continue
        wanted = (tokens.batch, tokens.length)
        if all(_fits(*pair, value, model, shapes) for pair in zip(shape[-2:], wanted, strict=True)):
            return value
    return None


def _fits(size: Dim, wanted: Dim, owner: ir.Value, model: ir.Model, shapes: Shapes) -> bool:
    """Whether ``size``, of input ``owner``, can be ``wanted``: it is, or nothing says what else it would be.

    Exporters that are told no better give the sizes of each input names of their own.
    """
    if may_be(size, wanted):
        return True
    if isinstance(size, int) or size.atom is None:
        return False
    others = [item for value in fed_inputs(model) if value is not owner for item in shapes.shape(value) or ()]
    return not any(free_names(size) & free_names(item) for item in others)
