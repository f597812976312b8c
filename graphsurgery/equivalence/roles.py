"""What inputs and outputs of a language model may stand for, and which of their axes are which.

Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache, C slots that are read of it,
E what an encoder has read, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import onnx

from graphsurgery.equivalence.dims import Dim, evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    "letters_and_sizes",
    "sequence_axis",
]

_T = onnx.TensorProto
FLOATS = frozenset({_T.FLOAT, _T.FLOAT16, _T.BFLOAT16, _T.DOUBLE})
INTEGERS = frozenset({_T.INT64, _T.INT32, _T.INT16, _T.INT8, _T.UINT8, _T.UINT16, _T.UINT32, _T.UINT64})


class Role(enum.Enum):
    """What an input stands for."""

    TOKENS = "token ids"
    EMBEDS = "hidden states"
    MASK = "attention mask [B, T]"
    MASK_ND = "attention mask [.., S, T]"
    POSITIONS = "positions"
    PATCHES = "row and column of each patch [S, 2]"
    BORDERS = "where the sequences of a packed stream begin and end"
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
    ENCODER_MASK = "attention mask of the encoder [B, E]"
    ENCODER_STATES = "hidden states of the encoder [B, E, H]"
    GRID = "image grid"
    ROW_INDEX = "rows to keep"
    ORDER = "each row of a value once, in another order"
    BOUND = "as long as the part of the caches to be read"
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
        letters: dim symbol to ``B``, ``S``, ``P``, ``T``, ``N``, ``C`` or ``E``.
        fixed: letter to size, for what is declared as a number.
        fused_attention: the model holds GroupQueryAttention, whose kernel takes fewer kinds of batch.
        half: the model computes in float16.
        rings: outputs ``[B, G, W, D]`` that hold the last positions and nothing defined beyond them.
        rotations: rows of the smallest stored table of rotations: no position is beyond; None without one.
        bounded: attention reads the first slots of caches only, so that each row of queries must attend a key.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    letters: Mapping[str, str]
    fixed: Mapping[str, int]
    fused_attention: bool = False
    half: bool = False
    rings: frozenset[str] = frozenset()
    rotations: int | None = None
    bounded: bool = False

    @property
    def positions(self) -> int | None:
        """How many positions the model has; None where the graph does not tell."""
        limits = [spec.limit for spec in self.having(Role.POSITIONS) if spec.limit]
        return min([*limits, *([self.rotations] if self.rotations else [])], default=None)

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


def axis_letters(spec: InputSpec) -> tuple[str | None, ...]:
    """Which of B, S, P, T, N, C, E each axis is, as far as the role tells; None elsewhere."""
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
        case Role.PATCHES:
            return ("S", *[None] * (rank - 1))
        case Role.POSITIONS:
            return (*[None] * (rank - 2), "B", "S")[-rank:]
        case Role.CACHE | Role.SLOTS:
            letter = "P" if spec.role is Role.CACHE else "N"
            return tuple(letter if axis == cache_axis(spec) else ("B" if axis == 0 else None) for axis in range(rank))
        case Role.STATE:
            return ("B", *[None] * (rank - 1))
        case Role.BOUND:
            return ("C",)
        case Role.ENCODER_MASK | Role.ENCODER_STATES:
            return ("B", "E", None)[:rank]
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


def letters_and_sizes(specs: Sequence[InputSpec]) -> tuple[dict[str, str], dict[str, int]]:
    """Dim symbol to letter, and letter to size for what is declared as a number."""
    letters: dict[str, str] = {}
    fixed: dict[str, int] = {}
    # The sequence input decides first: a mask as long as the sequence itself has no past.
    order = (
        *(Role.TOKENS, Role.EMBEDS, Role.POSITIONS, Role.ENCODER_MASK, Role.ENCODER_STATES),
        *(Role.SLOTS, Role.CACHE),
    )
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


def letter_of(dim: Dim, letters: Mapping[str, str]) -> str | None:
    """The letter (``B``, ``S``, ``P``, ``T``, ``N``, ``C``, ``E``, or ``BS`` for B*S rows) that a declared dim works out to."""
    sizes = {"B": 7, "S": 1009, "P": 100_003, "T": 101_012, "N": 1_000_003, "C": 10_000_019, "E": 20_000_003}
    value = evaluate(dim, {symbol: sizes[letter] for symbol, letter in letters.items()})
    if value is None or isinstance(dim, int):
        return None
    if value == sizes["B"] * sizes["S"]:
        return "BS"
    return next((letter for letter, size in sizes.items() if size == value), None)
