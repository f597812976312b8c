"""Routers of experts: the top-K choices of both models, compared as sets, and near-ties told from errors.

Alphabet: B batch, S query length, E experts, K chosen.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.inliner

from graphsurgery.equivalence.protos import Scope

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphsurgery.contracts import RowSelection
    from graphsurgery.equivalence.feeds import Array

__all__ = ["Flips", "Router", "compare_choices", "find_routers", "match_routers", "with_bodies_inlined"]

_PROJECTIONS = frozenset({"MatMul", "Gemm", "MatMulNBits", "FusedMatMul", "MatMulInteger", "QLinearMatMul"})
# Operators between a projection and the choice, with every input that may come from it.
_BETWEEN = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Neg", "Sqrt", "Exp", "Clip", "Max", "Min", "Where", "Cast", "Identity"),
        *("Softmax", "LogSoftmax", "Sigmoid", "Softplus", "Tanh", "Relu", "Reshape", "Unsqueeze", "Squeeze", "Flatten"),
        *("Transpose", "ReduceSum", "ReduceMax", "ReduceMean", "Expand", "TopK", "ScatterElements", "ScatterND"),
        *("DequantizeLinear", "QuantizeLinear", "Slice", "Concat", "Gather", "GatherElements", "CastLike"),
    }
)
_CHOICES = ("TopK", "ArgMax")
_REACH = 200


@dataclasses.dataclass(frozen=True)
class Router:
    """A top-K choice of experts, or a choice of one.

    Attributes:
        name: of the node that chooses, or of its indices where it has none.
        scores: value ``[.., E]`` that is chosen from.
        indices: value ``[.., K]`` that is chosen; ``[..]`` where ``lone``.
        lone: one expert is chosen, and the choice has no axis of its own.
        axis: of the scores that are chosen from.
    """

    name: str
    scores: str
    indices: str
    lone: bool = False
    axis: int = -1


def with_bodies_inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model, with functions inlined where a choice lies in one: a body's values cannot be returned."""
    if any(node.op_type in _CHOICES for function in proto.functions for node in function.node):
        inlined: onnx.ModelProto = onnx.inliner.inline_local_functions(proto)
        return inlined
    return proto


def find_routers(proto: onnx.ModelProto) -> tuple[list[Router], int]:
    """Routers of the main graph in execution order, and the number of TopK nodes in subgraphs, which are not looked at.

    A router is a TopK for the largest, with a constant K, of floats that a projection leads to; or an ArgMax of such,
    unless it is what the model gives.
    """
    scope = Scope.of(proto)
    given = {value.name for value in proto.graph.output}
    routers: list[Router] = []
    for node in _in_order(proto.graph.node):
        if node.op_type == "ArgMax" and node.output[0] not in given and _from_projection(scope, node.input[0]):
            numbers = {attribute.name: attribute.i for attribute in node.attribute}
            lone, axis = numbers.get("keepdims", 1) == 0, numbers.get("axis", 0)
            routers.append(Router(node.name or node.output[0], node.input[0], node.output[0], lone=lone, axis=axis))
        if node.op_type != "TopK" or not _largest(node) or not _constant(scope, node.input[1]):
            continue
        if len(node.output) > 1 and node.output[1] and _from_projection(scope, node.input[0]):
            routers.append(Router(node.name or node.output[1], node.input[0], node.output[1]))
    hidden = sum(
        inner.op_type == "TopK"
        for node in proto.graph.node
        for attribute in node.attribute
        if attribute.HasField("g")
        for inner in attribute.g.node
    )
    return routers, hidden


def _in_order(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes such that each comes behind those that it reads, whatever order the file has them in."""
    makers = {name: number for number, node in enumerate(nodes) for name in node.output if name}
    reads = [
        [makers[name] for name in [*node.input, *_captured(node)] if name in makers and name not in node.output]
        for node in nodes
    ]
    ordered: list[onnx.NodeProto] = []
    done, open_ = set[int](), set[int]()
    for first in range(len(nodes)):
        stack = [first]
        while stack:
            number = stack[-1]
            # What is open already lies on a cycle; such a file is no model, and no order is looked for.
            waiting = [] if number in open_ else [item for item in reads[number] if item not in done]
            open_.add(number)
            if waiting:
                stack += waiting
                continue
            stack.pop()
            if number not in done:
                done.add(number)
                ordered.append(nodes[number])
    return ordered


def _captured(node: onnx.NodeProto) -> Iterator[str]:
    """Names that the subgraphs of ``node`` read, their own among them."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            for inner in attribute.g.node:
                yield from inner.input
                yield from _captured(inner)


def _largest(node: onnx.NodeProto) -> bool:
    return all(attribute.i != 0 for attribute in node.attribute if attribute.name == "largest")


def _constant(scope: Scope, name: str) -> bool:
    while name not in scope.constants:
        node = scope.producers.get(name)
        if node is None or node.op_type not in {"Identity", "Reshape", "Unsqueeze", "Squeeze", "Cast"}:
            return False
        name = node.input[0]
    return True


def _from_projection(scope: Scope, name: str) -> bool:
    """Whether a projection leads to the value, not by way of earlier choices' indices."""
    stack, seen = [name], set[str]()
    while stack and len(seen) < _REACH:
        value = stack.pop()
        node = scope.producers.get(value)
        if node is None or value in seen:
            continue
        seen.add(value)
        if node.op_type in _PROJECTIONS:
            return True
        if node.op_type == "ArgMax" or (node.op_type == "TopK" and value != node.output[0]):
            continue
        if node.op_type in _BETWEEN:
            stack.extend(node.input)
    return False


def match_routers(reference: Sequence[Router], rewritten: Sequence[Router]) -> list[tuple[Router, Router]] | None:
    """Pairs of routers by the name of the chosen indices or of the node, else by order; None where counts differ."""
    by_name = {router.indices: router for router in rewritten} | {router.name: router for router in rewritten}
    named = [(router, by_name.get(router.indices) or by_name.get(router.name)) for router in reference]
    if all(other is not None for _, other in named) and len({id(other) for _, other in named}) == len(named):
        return [(router, other) for router, other in named if other is not None]
    if len(reference) != len(rewritten):
        return None
    return list(zip(reference, rewritten, strict=True))


@dataclasses.dataclass
class Flips:
    """What comparing the choices on one feed found.

    Attributes:
        first: batch row to the first position whose choice flipped at a tie.
        flipped: rows that flipped at a tie, over all routers.
        rows: rows compared, over all routers.
        problem: a choice that differs without a tie; None where there is none.
    """

    first: dict[int, int] = dataclasses.field(default_factory=dict)
    flipped: int = 0
    rows: int = 0
    problem: str | None = None


def compare_choices(
    flips: Flips,
    router: Router,
    scores: Array,
    reference: Array,
    rewritten: Array,
    sizes: Mapping[str, int],
    tie: float,
    kept: tuple[RowSelection | None, Mapping[str, Array]] = (None, {}),
) -> None:
    """Compare the experts that one router chose in both models, and add what was found to ``flips``.

    Rows that causally depend on an earlier flip are not looked at. A flip is a tie where the K-th and the next score
    are closer than ``tie`` times max(1, |score|).

    Args:
        flips: found so far on this feed; routers are to be compared in the order of the layers.
        router: of the reference.
        scores: its scores ``[.., E]``.
        reference: its choice ``[.., K]``.
        rewritten: the choice ``[.., K]`` of the rewritten model.
        sizes: B and S.
        tie: see above.
        kept: the selection through which the rewritten model computes fewer rows, and what was fed.
    """
    if router.axis not in (-1, scores.ndim - 1):
        return
    if router.lone:
        reference, rewritten = reference[..., None], rewritten[..., None]
    experts, chosen = scores.shape[-1], reference.shape[-1]
    flat_scores, flat = scores.reshape(-1, experts), reference.reshape(-1, chosen)
    other = rewritten.reshape(-1, chosen) if rewritten.size and rewritten.shape[-1] == chosen else rewritten
    tokens = sizes["B"] * sizes["S"]
    per_token = len(flat) // tokens if tokens and len(flat) % tokens == 0 else 0
    if other.shape != flat.shape:
        rows = _kept_rows(kept, sizes["S"], per_token)
        if rows is None or other.shape != (len(rows), chosen):
            shapes = f"{list(rewritten.shape)}, not {list(reference.shape)}"
            flips.problem = flips.problem or f"router {router.name} chooses for other rows: {shapes}"
            return
        flat_scores, flat = flat_scores[rows], flat[rows]
    else:
        rows = np.arange(len(flat))
    flips.rows += len(rows)
    # Rows of one layer do not depend on one another, so what flips here hides nothing else here.
    before = dict(flips.first)
    differs = (np.sort(flat, axis=1) != np.sort(other, axis=1)).any(axis=1)
    for place in np.flatnonzero(differs):
        batch, position = divmod(int(rows[place]) // per_token, sizes["S"]) if per_token else (0, 0)
        if before.get(batch, math.inf) <= position:
            continue
        ordered = np.sort(flat_scores[place].astype(np.float64))[::-1]
        gap = ordered[chosen - 1] - ordered[chosen] if chosen < experts else math.inf
        if not gap < tie * max(1.0, abs(float(ordered[chosen - 1]))):
            flips.problem = flips.problem or (
                f"router {router.name} chooses experts {sorted(other[place].tolist())}, not"
                f" {sorted(flat[place].tolist())}, for row {position} of batch row {batch}, with a gap of {gap:.1e}"
            )
            return
        flips.flipped += 1
        for row in range(sizes["B"]) if not per_token else (batch,):
            flips.first[row] = min(position, flips.first.get(row, position))


def _kept_rows(kept: tuple[RowSelection | None, Mapping[str, Array]], length: int, per_token: int) -> Array | None:
    selection, feeds = kept
    if selection is None or not per_token:
        return None
    rows = selection.rows(feeds)
    tokens = (rows + np.arange(len(rows))[:, None] * length).reshape(-1)
    return (tokens[:, None] * per_token + np.arange(per_token)).reshape(-1)
