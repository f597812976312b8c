"""Where the layers of a stack begin and end: cuts of the stream that every layer passes on.

The nodes that depend on a source (token ids, embeddings, pixels) form its *cone*; shapes of its values are left out, so
that masks and rotary tables are not part of it. A node of the cone that all paths from the source to the deepest node pass
through is a *cut*: the residual stream gives one behind every attention and every feed-forward block. Values that leap over
many layers (a first layer's values mixed into all others, keys shared by several layers) would hide the cuts, so edges
that leap over more than a part of the depth are left out step by step until the stack shows.

The regions between cuts are *letters*, equal where they compute the same; the word that they form is split where a
region that mixes positions (it attends, or keeps a state) follows one that does not.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

from graphsurgery.patterns.layers.words import Letter, split_word
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    import onnx_ir as ir

    from graphsurgery.patterns.layers.flow import Flow

__all__ = ["PRODUCTS", "Chain", "Segment", "find_chain", "forward_cone", "mixing_nodes"]

_ENOUGH = 0.75  # of a cone in repeated layers: no shorter leaps are tried
_SHORTEST_LEAP = 8
PRODUCTS = frozenset(
    {
        *(
            "MatMul",
            "Gemm",
            "Einsum",
            "Conv",
            "MatMulInteger",
            "QLinearMatMul",
            "MatMulNBits",
            "MatMulBnb4",
            "FusedMatMul",
        ),
        *("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QGemm", "FusedGemm", "MoE", "QMoE", "If", "Loop"),
    }
)
_WITHOUT_DATA = frozenset({"Shape", "Size"})


@dataclasses.dataclass(frozen=True)
class Segment:
    """What may be one layer: from the cut ``entry`` (not part of it) to the cut ``exit``.

    Attributes:
        entry: the node whose outputs the layer reads as its hidden state; None where it reads the source itself.
        exit: the node that makes the next hidden state.
        word: what its regions are.
    """

    entry: ir.Node | None
    exit: ir.Node
    word: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Chain:
    """A stack of layers over one source.

    Attributes:
        source: what the stack starts from.
        segments: the layers, in order; none where nothing repeats.
        cone: the nodes that depend on the source, with their depth.
        covered: how many nodes of the cone are in layers that occur more than once.
    """

    source: ir.Value
    segments: tuple[Segment, ...]
    cone: dict[ir.Node, int]
    covered: int = 0


def forward_cone(flow: Flow, source: ir.Value, without: Collection[ir.Node]) -> dict[ir.Node, int]:
    """The nodes that depend on ``source``, with their depth, in order; not by way of Shape, nor of nodes in ``without``."""
    depths: dict[ir.Node, int] = {}
    for node in flow.nodes:
        if node in without or (node.op_type in _WITHOUT_DATA and not node.domain):
            continue
        depth = 0
        for value in flow.slots[node]:
            producer = value.producer() if value is not None else None
            before = 1 if value is source else depths.get(producer, 0) if producer is not None else 0
            depth = max(depth, before)
        if depth:
            depths[node] = depth + 1
    return depths


def find_chain(flow: Flow, source: ir.Value, without: Collection[ir.Node], mixers: Collection[ir.Node]) -> Chain:
    """The stack over ``source``; it has no segments where nothing repeats.

    Args:
        flow: the graph.
        source: what the stack starts from.
        without: nodes of stacks that are known already.
        mixers: nodes that mix positions.
    """
    cone = forward_cone(flow, source, without)
    if not cone:
        return Chain(source, (), cone)
    sink = max(cone, key=lambda node: cone[node])
    best: tuple[int, list[Segment]] = (0, [])
    leap = cone[sink] + 1
    while leap >= _SHORTEST_LEAP:
        covered, segments = _segments(flow, source, cone, sink, leap, mixers)
        if covered > best[0] * 1.1:
            best = (covered, segments)
        if best[0] >= _ENOUGH * len(cone):
            break
        leap //= 2
    return Chain(source, tuple(best[1]), cone, best[0])


def _segments(
    flow: Flow,
    source: ir.Value,
    cone: Mapping[ir.Node, int],
    sink: ir.Node,
    leap: int,
    mixers: Collection[ir.Node],
) -> tuple[int, list[Segment]]:
    """The layers that show when edges longer than ``leap`` are left out, and how many nodes repeated ones hold."""
    spans = _Spans(flow, cone, leap)
    path = _path(flow, source, cone, sink, spans)
    position = {node: number for number, node in enumerate(path)}
    furthest = [0] * len(path)
    for node, own in position.items():
        for value in flow.slots[node]:
            producer = value.producer() if value is not None else None
            if producer in position and spans.is_short(value, node):
                furthest[position[producer]] = max(furthest[position[producer]], own)
    # The source is the first cut.
    cuts: list[int] = [-1]
    reach = max(
        (own for node, own in position.items() if cone[node] - 1 <= leap and source in flow.slots[node]), default=0
    )
    for number in range(len(path)):
        if reach <= number:
            cuts.append(number)
        reach = max(reach, furthest[number])
    letters = [
        _letter(flow, path[start + 1 : end + 1], path[start] if start >= 0 else None, source, mixers)
        for start, end in itertools.pairwise(cuts)
    ]
    mixing = any(node in mixers for node in cone)
    found: list[Segment] = []
    counts: collections.Counter[tuple[Hashable, ...]] = collections.Counter()
    sizes: dict[tuple[Hashable, ...], int] = {}
    for factor in split_word(letters, mixing=mixing):
        start = cuts[factor.start]
        found.append(Segment(path[start] if start >= 0 else None, path[cuts[factor.end]], factor.word))
        counts[factor.word] += 1
        sizes[factor.word] = sum(letter.size for letter in letters[factor.start : factor.end])
    covered = sum(count * sizes[word] for word, count in counts.items() if count > 1)
    return covered, found


class _Spans:
    """Which edges count: those no longer than ``leap``, and of values that leap further only the first few."""

    def __init__(self, flow: Flow, cone: Mapping[ir.Node, int], leap: int) -> None:
        self._cone = cone
        self._leap = leap
        self._far: set[ir.Value] = set()
        for node, depth in cone.items():
            for value in flow.slots[node]:
                producer = value.producer() if value is not None else None
                if value is not None and producer is not None and depth - cone.get(producer, depth) > leap:
                    self._far.add(value)

    def is_short(self, value: ir.Value | None, node: ir.Node) -> bool:
        """Whether the edge from ``value``, which a node of the cone makes, to ``node`` counts."""
        producer = value.producer() if value is not None else None
        if value is None or producer is None or producer not in self._cone:
            return False
        span = self._cone[node] - self._cone[producer]
        return span <= (self._leap // 3 if value in self._far else self._leap)


def _path(flow: Flow, source: ir.Value, cone: Mapping[ir.Node, int], sink: ir.Node, spans: _Spans) -> list[ir.Node]:
    """The nodes between ``source`` and ``sink``, by edges that count, in order."""
    ahead: set[ir.Node] = set()
    for node in cone:
        for value in flow.slots[node]:
            producer = value.producer() if value is not None else None
            if value is source or (producer in ahead and spans.is_short(value, node)):
                ahead.add(node)
                break
    if sink not in ahead:
        return []
    behind = {sink}
    pending = [sink]
    while pending:
        node = pending.pop()
        for value in flow.slots[node]:
            producer = value.producer() if value is not None else None
            if producer in ahead and producer not in behind and spans.is_short(value, node):
                behind.add(producer)
                pending.append(producer)
    return [node for node in cone if node in behind]


def _letter(
    flow: Flow,
    region: Sequence[ir.Node],
    cut: ir.Node | None,
    source: ir.Value,
    mixers: Collection[ir.Node],
) -> Letter:
    numbers: dict[ir.Node, int] = {}
    for node in region:
        reads: list[Hashable] = []
        for value in flow.slots[node]:
            producer = value.producer() if value is not None else None
            if value is None:
                reads.append(None)
            elif producer in numbers:
                reads.append((numbers[producer], value.index()))
            elif value is source if cut is None else producer is cut:
                reads.append("state")
            else:
                reads.append(("outside", flow.marker(value)))
        numbers[node] = flow.intern((flow.signature(node), tuple(reads)))
    operators = collections.Counter(f"{node.domain}::{node.op_type}" for node in region)
    mixes = any(node in mixers for node in region)
    multiplies = any(node.op_type in PRODUCTS for node in region)
    return Letter(numbers[region[-1]], mixes, multiplies, len(region), operators)


# ---- what mixes positions -----------------------------------------------------------------------------------------

_MIXING = frozenset(
    {
        *("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention", "PagedAttention"),
        *("DecoderMaskedMultiHeadAttention", "SparseAttention", "PackedAttention", "QAttention", "LongformerAttention"),
        *("LinearAttention", "CausalConvWithState", "RNN", "LSTM", "GRU", "Scan", "TensorScatter", "Conv"),
    }
)
_PASSING = frozenset({"Cast", "CastLike", "Where", "Dropout", "Identity", "Slice", "Transpose", "Reshape", "Mul"})
_FAR = 12


def mixing_nodes(flow: Flow, states: Iterable[ir.Value]) -> set[ir.Node]:
    """Nodes that mix positions: fused attention, a Softmax behind which two computed values are multiplied, recurrence,
    and what reads or makes a cache or state.
    """
    found: set[ir.Node] = set()
    for value in states:
        found.update(node for node, _ in flow.users.get(value, ()))
        producer = value.producer()
        if producer is not None:
            found.add(producer)
    for node in flow.nodes:
        if (
            node.op_type in _MIXING
            or (is_op(node, "Softmax") and _is_attention(flow, node))
            or node.metadata_props.get("graphsurgery.pass") == "block-attention"
        ):
            found.add(node)
    return found


def _is_attention(flow: Flow, softmax: ir.Node) -> bool:
    pending = [softmax.outputs[0]]
    for _ in range(_FAR):
        if not pending:
            return False
        value = pending.pop()
        for node, slot in flow.users.get(value, ()):
            if is_op(node, "MatMul", "Einsum") and len(node.inputs) == 2:
                other = node.inputs[1 - slot] if slot < 2 else None
                if other is not None and not flow.is_leaf(other) and slot == 0:
                    return True
            elif is_op(node, *_PASSING):
                pending.append(node.outputs[0])
    return False
