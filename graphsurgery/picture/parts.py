"""The parts of a picture. Alphabet: S query length, P past, T = P + S keys (tokens inside expert blocks), E experts, K chosen."""

from __future__ import annotations

import dataclasses

__all__ = [
    "ExpertLoad",
    "ExpertPicture",
    "Layer",
    "MaskDivision",
    "MaskPicture",
    "MaskSample",
    "OperatorCounts",
    "Picture",
]


@dataclasses.dataclass(frozen=True)
class OperatorCounts:
    """How often each operator occurs, subgraphs and function bodies included.

    Attributes:
        after: the pass behind which it was counted; ``input`` for the model as read.
        counts: by operator (``domain::name`` outside the default domain), most frequent first.
    """

    after: str
    counts: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is in one layer.

    Attributes:
        number: the layer.
        kinds: of the attentions in it: ``causal``, ``sliding``, ``full`` and the like.
    """

    number: int
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MaskSample:
    """A mask at one length, without padding.

    Attributes:
        length: S.
        past: P.
        total: columns of the mask.
        row_step: query rows of a cell.
        column_step: key columns of a cell.
        cells: for each row of cells the share of (query, key) pairs in each cell that the mask leaves, 0 to 1.
        needed: for each row of cells the first key that any of its queries attends, and the one behind the last.
        live: pairs that the mask leaves.
        pairs: all pairs.
        fed: inputs of the graph that the mask was computed from.
    """

    length: int
    past: int
    total: int
    row_step: int
    column_step: int
    cells: tuple[tuple[float, ...], ...]
    needed: tuple[tuple[int, int], ...]
    live: int
    pairs: int
    fed: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class QueryBlock:
    """A block of queries.

    Attributes:
        queries: its first query, and the one behind its last.
        keys: the blocks of keys that are computed for it, each as first key and the one behind the last.
    """

    queries: tuple[int, int]
    keys: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class MaskDivision:
    """Blocks that an attention is computed in, at the sample length.

    Attributes:
        skip: how keys that the mask leaves to no query of a block are passed over.
        blocks: in order.
        computed: pairs whose scores are computed.
    """

    skip: str
    blocks: tuple[QueryBlock, ...]
    computed: int


@dataclasses.dataclass(frozen=True)
class MaskPicture:
    """What one mask leaves to the attentions that read it.

    Attributes:
        mask: the value in the graph that is the mask; None where there is none, or it is not known.
        sites: ids of the attentions.
        layers: their layers, where they belong to one.
        kinds: of the attentions.
        sample: the mask at a sample length; None where it cannot be told.
        reason: why it cannot be told; else empty.
        division: blocks that the first of the attentions that were rewritten is computed in; None where none was.
    """

    mask: str | None
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    kinds: tuple[str, ...]
    sample: MaskSample | None
    reason: str = ""
    division: MaskDivision | None = None


@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """Tokens of a drawn sample by expert; no router was run.

    Attributes:
        name: ``even`` (every expert is as likely) or ``skewed`` (likelihood falls with the number of the expert).
        tokens: for each expert the tokens that chose it.
        rows: rows that each form computes for them: ``dense``, ``gather``, ``grouped``, ``packed``.
    """

    name: str
    tokens: tuple[int, ...]
    rows: dict[str, int]


@dataclasses.dataclass(frozen=True)
class ExpertPicture:
    """Expert blocks of one kind.

    Attributes:
        sites: ids of the blocks.
        layers: their layers, where they belong to one.
        form: how the exporter wrote them.
        strategy: how they are written now, as the pass says it.
        experts: E.
        top_k: K.
        tokens: T of the samples.
        chunk_size: rows of a chunk of the packed form.
        useful_rows: T * K.
        loads: the samples.
    """

    sites: tuple[str, ...]
    layers: tuple[int, ...]
    form: str
    strategy: str
    experts: int
    top_k: int
    tokens: int
    chunk_size: int
    useful_rows: int
    loads: tuple[ExpertLoad, ...]


@dataclasses.dataclass(frozen=True)
class Picture:
    """All of it.

    Attributes:
        operators: of the model as read, then behind each pass.
        layers: the layers that were found, in order.
        attention: one entry for each mask, in graph order; of the graph that blocks were made of.
        experts: one entry for each kind of expert block.
    """

    operators: tuple[OperatorCounts, ...]
    layers: tuple[Layer, ...]
    attention: tuple[MaskPicture, ...]
    experts: tuple[ExpertPicture, ...]
