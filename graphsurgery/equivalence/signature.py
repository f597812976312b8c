"""What each input and output of a language model stands for, read from its names, types, dims and graph.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache, H hidden size,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import TYPE_CHECKING

import onnx

from graphsurgery.equivalence.dims import Dim, declared_dims, evaluate
from graphsurgery.equivalence.protos import Scope

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FLOATS",
    "INTEGERS",
    "InputSpec",
    "OutputSpec",
    "Role",
    "Signature",
    "axis_letters",
    "cache_axis",
    "letter_of",
    "merge",
    "read_signature",
    "sequence_axis",
]

_T = onnx.TensorProto
FLOATS = frozenset({_T.FLOAT, _T.FLOAT16, _T.BFLOAT16, _T.DOUBLE})
INTEGERS = frozenset({_T.INT64, _T.INT32, _T.INT16, _T.INT8, _T.UINT8, _T.UINT16, _T.UINT32, _T.UINT64})

# Operators that hand ids, or a cache, on unchanged but for layout: type to the slots that come out again.
_LAYOUT = ("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose")
_IDS_THROUGH = dict.fromkeys((*_LAYOUT, "Flatten", "Clip"), (0,)) | {"Where": (1, 2)}
_CACHE_THROUGH = dict.fromkeys((*_LAYOUT, "Gather"), (0,))
_CACHE_WRITERS = frozenset({"ScatterND", "ScatterElements", "Scatter", "TensorScatter"})
_CACHE_READERS = frozenset(
    {"GroupQueryAttention", "MultiHeadAttention", "Attention", "DecoderMaskedMultiHeadAttention", "SparseAttention"}
)


class Role(enum.Enum):
    """What an input stands for."""

    TOKENS = "token ids"
    EMBEDS = "hidden states"
    MASK = "attention mask [B, T]"
    MASK_ND = "attention mask [.., S, T]"
    POSITIONS = "positions"
    CACHE = "growing cache"
    SLOTS = "fixed-size cache"
    STATE = "recurrent state"
    PAST_LENGTH = "number of cached positions"
    TOTAL_LENGTH = "number of positions"
    LAST_KEY = "index of the last key of each row"
    WINDOW = "sliding window"
    KEEP = "number of logits to keep"
    BEAMS = "batch rows to take caches from"
    BRANCH = "whether a cache is given"
    GRID = "image grid"
    ROW_INDEX = "rows to keep"
    MARKED = "which tokens are replaced [B, S]"
    MARKED_ROWS = "rows for the replaced tokens"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One input that must be fed.

    Attributes:
        name: its name.
        elem_type: its ``onnx.TensorProto`` element type.
        dims: declared dims.
        role: what it stands for.
        limit: number of rows of the table that it indexes, where it indexes one (V for token ids).
        size: what the graph says of a symbolic axis: axis to size.
    """

    name: str
    elem_type: int
    dims: tuple[Dim, ...]
    role: Role
    limit: int | None = None
    size: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """One output: its name, element type (0 where it is no tensor) and declared dims (None where unknown)."""

    name: str
    elem_type: int
    dims: tuple[Dim, ...] | None


@dataclasses.dataclass(frozen=True)
class Signature:
    """Inputs that must be fed, outputs, and which letter each symbolic dim stands for.

    Attributes:
        inputs: in the order of the graph, without inputs that have an initializer.
        outputs: in the order of the graph.
        letters: dim symbol to ``B``, ``S``, ``P``, ``T`` or ``N``.
        fixed: letter to size, for what is declared as a number.
        fused_attention: the model holds GroupQueryAttention, whose kernel takes fewer kinds of batch.
        half: the model computes in float16.
        rings: outputs ``[B, G, W, D]`` that hold the last positions and nothing defined beyond them.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    letters: Mapping[str, str]
    fixed: Mapping[str, int]
    fused_attention: bool = False
    half: bool = False
    rings: frozenset[str] = frozenset()

    def input(self, name: str) -> InputSpec | None:
        """The input of that name."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def having(self, *roles: Role) -> tuple[InputSpec, ...]:
        """The inputs of one of ``roles``."""
        return tuple(spec for spec in self.inputs if spec.role in roles)

    @property
    def sequence(self) -> tuple[InputSpec, int] | None:
        """The input that carries the sequence (token ids or hidden states) and its axis of size S."""
        for spec in self.having(Role.TOKENS) + self.having(Role.EMBEDS):
            axis = sequence_axis(spec)
            if axis is not None:
                return spec, axis
        return None


def sequence_axis(spec: InputSpec) -> int | None:
    """The axis of size S of token ids ``[S]``, ``[B, S]`` or hidden states ``[S, H]``, ``[B, S, H]``."""
    rank = len(spec.dims) - (spec.role is Role.EMBEDS)
    return rank - 1 if rank in (1, 2) else None


def read_signature(proto: onnx.ModelProto) -> Signature:
    """Read the signature of a model; weights are not looked at."""
    scope = Scope.of(proto)
    stored = {tensor.name for tensor in proto.graph.initializer}
    outputs = tuple(
        OutputSpec(value.name, value.type.tensor_type.elem_type, declared_dims(value)) for value in proto.graph.output
    )
    specs: list[InputSpec] = []
    for value in proto.graph.input:
        if value.name in stored or not value.type.HasField("tensor_type"):
            continue
        spec = InputSpec(value.name, value.type.tensor_type.elem_type, declared_dims(value) or (), Role.UNKNOWN)
        specs.append(_classify(_anonymous(spec), scope, outputs))
    specs = _with_marked(_with_sequence(specs))
    letters, fixed = _letters(specs)
    kinds = {node.op_type for node in proto.graph.node} | {n.op_type for f in proto.functions for n in f.node}
    rings = {
        name
        for node in proto.graph.node
        if node.op_type == "GroupQueryAttention" and _numbers(node).get("sliding_window_cache")
        for name in node.output[1:3]
    }
    return Signature(
        tuple(specs),
        outputs,
        letters,
        fixed,
        "GroupQueryAttention" in kinds,
        _computes_in_half(proto),
        frozenset(rings),
    )


def _numbers(node: onnx.NodeProto) -> dict[str, int]:
    return {attribute.name: attribute.i for attribute in node.attribute}


def _computes_in_half(proto: onnx.ModelProto) -> bool:
    if any(tensor.data_type == _T.FLOAT16 and tensor.dims for tensor in proto.graph.initializer):
        return True
    values = list(proto.graph.input) + list(proto.graph.output)
    return any(value.type.tensor_type.elem_type == _T.FLOAT16 for value in values)


def _anonymous(spec: InputSpec) -> InputSpec:
    """Give every undeclared dim a symbol of its own."""
    dims = tuple(f"?{spec.name}.{axis}" if dim == "?" else dim for axis, dim in enumerate(spec.dims))
    return dataclasses.replace(spec, dims=dims)


_SCALARS: tuple[tuple[str, Role], ...] = (
    (r"use_cache_branch", Role.BRANCH),
    (r"sliding_window", Role.WINDOW),
    (r"(num_)?logits_to_keep", Role.KEEP),
    (r"total_seq", Role.TOTAL_LENGTH),
    (r"seqlens_k", Role.LAST_KEY),
    (r"beam_idx", Role.BEAMS),
    (r"grid_thw", Role.GRID),
    (r"cumulative_length|past_len|past_seq", Role.PAST_LENGTH),
)


def _classify(spec: InputSpec, scope: Scope, outputs: tuple[OutputSpec, ...]) -> InputSpec:
    name, rank = spec.name.lower(), len(spec.dims)
    role = Role.UNKNOWN
    if "mask" in name and rank in (2, 3, 4):
        role = Role.MASK if rank == 2 else Role.MASK_ND
    elif spec.elem_type in INTEGERS or spec.elem_type == _T.BOOL:
        role = next((role for pattern, role in _SCALARS if re.search(pattern, name)), Role.UNKNOWN)
        if role is Role.PAST_LENGTH and rank > 2:
            role = Role.UNKNOWN
        if role is Role.UNKNOWN and rank in (1, 2) and re.search(r"input_ids$|(^|\.)(token_)?ids$|tokens$", name):
            role = Role.TOKENS
        elif role is Role.UNKNOWN and rank in (1, 2, 3) and "position" in name:
            role = Role.POSITIONS
    elif spec.elem_type in FLOATS and re.search(r"inputs_embeds$|^hidden_states$", name) and rank in (2, 3):
        role = Role.EMBEDS
    elif spec.elem_type in FLOATS and rank >= 3:
        return _classify_cache(spec, scope, outputs)
    limit = _table_rows(spec, scope) if spec.elem_type in INTEGERS and rank else None
    return dataclasses.replace(spec, role=role, limit=limit)


def _table_rows(spec: InputSpec, scope: Scope) -> int | None:
    """Rows of the smallest stored table that the input indexes."""
    rows: list[int] = []
    for where, node, slot in scope.reached(spec.name, _IDS_THROUGH):
        if node.op_type not in {"Gather", "GatherBlockQuantized"} or slot != 1:
            continue
        dims = where.static_dims(node.input[0])
        axis = next((a.i for a in node.attribute if a.name in {"axis", "gather_axis"}), 0)
        if dims:
            rows.append(dims[axis])
    return min(rows, default=None)


def _classify_cache(spec: InputSpec, scope: Scope, outputs: tuple[OutputSpec, ...]) -> InputSpec:
    """Tell caches that grow, caches of a fixed size, and states from other floats, by what reads them."""
    role = Role.UNKNOWN
    size: tuple[tuple[int, int], ...] = ()
    same_dims = any(output.dims == spec.dims for output in outputs)
    for where, node, slot in scope.reached(spec.name, _CACHE_THROUGH):
        if node.op_type == "Concat" and (_reaches_output(where, node.output[0]) or not same_dims):
            return dataclasses.replace(spec, role=Role.CACHE)
        if node.op_type in _CACHE_WRITERS and slot == 0:
            role = Role.SLOTS
        elif node.op_type in _CACHE_READERS and slot >= 3:
            role, size = _fused_cache(spec, where, node)
    if role is Role.UNKNOWN and same_dims:
        role = Role.STATE
    return dataclasses.replace(spec, role=role, size=size)


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


def _with_sequence(specs: list[InputSpec]) -> list[InputSpec]:
    """Where no name tells the sequence input: the ids of the largest table, else the first float ``[B, S, H]``."""
    if any(spec.role in (Role.TOKENS, Role.EMBEDS) for spec in specs):
        return specs
    ids = [spec for spec in specs if spec.limit and spec.role is Role.UNKNOWN and len(spec.dims) <= 2]
    chosen, role = max(ids, key=lambda spec: spec.limit or 0, default=None), Role.TOKENS
    if chosen is None:
        role = Role.EMBEDS
        chosen = next(
            (
                spec
                for spec in specs
                if spec.role is Role.UNKNOWN
                and spec.elem_type in FLOATS
                and len(spec.dims) == 3
                and isinstance(spec.dims[2], int)
            ),
            None,
        )
    return [dataclasses.replace(spec, role=role) if spec is chosen else spec for spec in specs]


def _with_marked(specs: list[InputSpec]) -> list[InputSpec]:
    """A boolean ``[B, S]`` that is no attention mask says which tokens the float inputs ``[R, H]`` replace."""
    sequence = next((spec for spec in specs if spec.role is Role.EMBEDS), None)
    if sequence is None:
        return specs
    marked = [
        spec
        for spec in specs
        if spec.elem_type == _T.BOOL and spec.dims == sequence.dims[:-1] and "attention" not in spec.name.lower()
    ]
    if len(marked) != 1:
        return specs
    return [
        dataclasses.replace(spec, role=Role.MARKED)
        if spec is marked[0]
        else dataclasses.replace(spec, role=Role.MARKED_ROWS)
        if spec.role is Role.UNKNOWN and spec.elem_type in FLOATS and len(spec.dims) == 2
        else spec
        for spec in specs
    ]


def axis_letters(spec: InputSpec) -> tuple[str | None, ...]:
    """Which of B, S, P, T, N each axis is, as far as the role tells; None elsewhere."""
    rank = len(spec.dims)
    match spec.role:
        case Role.TOKENS:
            return ("S",) if rank == 1 else ("B", "S")
        case Role.EMBEDS:
            return ("S", None) if rank == 2 else ("B", "S", None)
        case Role.MARKED:
            return ("B", "S")
        case Role.MASK:
            return ("B", "T")
        case Role.MASK_ND:
            return ("B", *[None] * (rank - 3), "S", "T")
        case Role.POSITIONS:
            return (*[None] * (rank - 2), "B", "S")[-rank:]
        case Role.CACHE | Role.SLOTS:
            letter = "P" if spec.role is Role.CACHE else "N"
            return tuple(letter if axis == cache_axis(spec) else ("B" if axis == 0 else None) for axis in range(rank))
        case Role.STATE:
            return ("B", *[None] * (rank - 1))
        case _:
            return (None,) * rank


def cache_axis(spec: InputSpec) -> int | None:
    """The axis of a cache that counts positions: the symbolic one behind B, by custom the last but one."""
    known = {axis for axis, _ in spec.size}
    symbolic = [a for a, dim in enumerate(spec.dims) if a and isinstance(dim, str) and a not in known]
    if len(symbolic) == 1:
        return symbolic[0]
    custom = max(len(spec.dims) - 2, 1)
    return custom if not symbolic or custom in symbolic else symbolic[-1]


def _letters(specs: list[InputSpec]) -> tuple[dict[str, str], dict[str, int]]:
    letters: dict[str, str] = {}
    fixed: dict[str, int] = {}
    # The sequence input decides first: a mask as long as the sequence itself has no past.
    order = (Role.TOKENS, Role.EMBEDS, Role.POSITIONS, Role.SLOTS, Role.CACHE)
    for spec in sorted(specs, key=lambda spec: order.index(spec.role) if spec.role in order else len(order)):
        for dim, letter in zip(spec.dims, axis_letters(spec), strict=True):
            if letter is None:
                continue
            if isinstance(dim, str):
                letters.setdefault(dim, letter)
            elif dim == 1 and spec.role in (Role.POSITIONS, Role.MASK, Role.MASK_ND) and letter == "B":
                continue  # broadcast over the batch
            elif dim == 1 and spec.role is Role.MASK_ND and letter == "S":
                continue  # broadcast over query rows
            else:
                fixed.setdefault(letter, dim)
    slots = fixed.get("N")
    if slots is not None and fixed.get("T") == slots:
        del fixed["T"]
    return letters, fixed


def merge(reference: Signature, rewritten: Signature) -> Signature:
    """The reference's signature narrowed by the sizes that the rewritten model fixes, with the inputs it adds."""
    specs: list[InputSpec] = []
    for spec in reference.inputs:
        other = rewritten.input(spec.name)
        dims = spec.dims
        if other is not None and len(other.dims) == len(dims):
            dims = tuple(
                theirs if isinstance(theirs, int) else ours for ours, theirs in zip(dims, other.dims, strict=True)
            )
        specs.append(dataclasses.replace(spec, dims=dims))
    names = {spec.name for spec in specs}
    specs.extend(spec for spec in rewritten.inputs if spec.name not in names)
    letters, fixed = _letters(specs)
    return Signature(
        tuple(specs),
        reference.outputs,
        {**rewritten.letters, **reference.letters, **letters},
        fixed,
        reference.fused_attention or rewritten.fused_attention,
        reference.half or rewritten.half,
    )


def letter_of(dim: Dim, letters: Mapping[str, str]) -> str | None:
    """The letter (``B``, ``S``, ``P``, ``T``, ``N``, or ``BS`` for B*S rows) that a declared dim works out to."""
    sizes = {"B": 7, "S": 1009, "P": 100_003, "T": 101_012, "N": 1_000_003}
    value = evaluate(dim, {symbol: sizes[letter] for symbol, letter in letters.items()})
    if value is None or isinstance(dim, int):
        return None
    if value == sizes["B"] * sizes["S"]:
        return "BS"
    return next((letter for letter, size in sizes.items() if size == value), None)
