"""Regions: what lies between two values that have to be equal and what both models have in common above them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.equivalence.regions.sides import initializer_tensor, reads

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphsurgery.equivalence.regions.numbering import Matching, Obligation
    from graphsurgery.equivalence.regions.sides import Side

__all__ = ["Piece", "Region", "Surgeon"]

_SELECTIONS = frozenset({"TopK", "ArgMax", "ArgMin"})
"""Operators whose integers choose among what they read: what they choose may be drawn."""

_ROUNDS = 50


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of one model that belongs to a region.

    Attributes:
        side: the model.
        root: what it gives.
        nodes: its nodes, in order of execution.
        cuts: values that are fed in place of being computed, with their numbers.
        shaped: values of which only the shape is read.
        inputs: graph inputs that it reads.
        weights: initializers that it reads.
    """

    side: Side
    root: ir.Value
    nodes: tuple[ir.Node, ...]
    cuts: tuple[tuple[ir.Value, int], ...]
    shaped: tuple[ir.Value, ...]
    inputs: tuple[ir.Value, ...]
    weights: tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True)
class Region:
    """Both pieces."""

    obligation: Obligation
    reference: Piece
    rewritten: Piece


class Surgeon:
    """Cuts regions out of two models.

    Args:
        sides: the reference and the rewritten model.
        matching: what they have in common.
        activations: values of the reference that depend on weights or float inputs: others are always computed.
    """

    def __init__(self, sides: tuple[Side, Side], matching: Matching, activations: frozenset[ir.Value]) -> None:
        self._sides, self._matching = sides, matching
        self._tables: tuple[Mapping[ir.Value, int], ...] = (matching.reference, matching.rewritten)
        self._order = tuple({node: place for place, node in enumerate(side.nodes)} for side in sides)
        shared = set(matching.rewritten.values())
        self._cuttable = {
            number
            for number, value in matching.values.items()
            if number in shared and value in activations and self._may_cut(value)
        }

    def _may_cut(self, value: ir.Value) -> bool:
        node = value.producer()
        side = self._sides[0]
        if node is None or side.sizes(value) is None:
            return False
        if side.is_float(value):
            return True
        return node.op_type in _SELECTIONS and side.sizes(reads(node)[0]) is not None

    def region(self, obligation: Obligation) -> Region:
        """The region above two values, cut at what both models read: what only one reads is computed further up."""
        roots = (obligation.reference, obligation.rewritten)
        own = self._matching.reference.get(obligation.reference, -1)
        dropped: set[int] = {own}
        for _ in range(_ROUNDS):
            pieces = [self._walk(place, root, dropped) for place, root in enumerate(roots)]
            first, second = ({number for _, number in piece.cuts} for piece in pieces)
            if first == second:
                break
            dropped |= first ^ second
        else:
            dropped = set(self._cuttable) | {own}
            pieces = [self._walk(place, root, dropped) for place, root in enumerate(roots)]
        return Region(obligation, pieces[0], pieces[1])

    def closed(self, region: Region, activations: tuple[frozenset[ir.Value], frozenset[ir.Value]]) -> Region | None:
        """``region`` without the cuts that depend on what its pieces compute or are fed; None where there are none.

        A cut is fed random numbers, as if nothing else told what it holds. A piece that computes the same anew from
        further up then differs from one that reads the cut, and both may be right: such a region proves no difference.
        """
        kept = {number for _, number in region.reference.cuts}
        pieces = [region.reference, region.rewritten]
        while kept:
            known = (self._entangled(piece, active) for piece, active in zip(pieces, activations, strict=True))
            entangled = set().union(*known)
            if not entangled:
                break
            kept -= entangled
            dropped = self._cuttable - kept
            pieces = [self._walk(place, piece.root, dropped) for place, piece in enumerate(pieces)]
        if len(kept) == len(region.reference.cuts):
            return None
        return Region(region.obligation, pieces[0], pieces[1])

    @staticmethod
    def _entangled(piece: Piece, activations: frozenset[ir.Value]) -> set[int]:
        """Numbers of the cuts below something that the piece computes or is fed."""
        leaves = {value for value, _ in piece.cuts}
        nodes = set(piece.nodes)
        found: set[int] = set()
        for cut, number in piece.cuts:
            pending, seen = [cut], {cut}
            while pending and number not in found:
                value = pending.pop()
                node = value.producer()
                if (value in leaves and value is not cut) or node in nodes:
                    found.add(number)
                above = reads(node) if node is not None else ()
                pending += [item for item in above if item in activations and item not in seen]
                seen.update(above)
        return found

    def _walk(self, place: int, root: ir.Value, dropped: set[int]) -> Piece:
        side, table = self._sides[place], self._tables[place]
        nodes: set[ir.Node] = set()
        cuts: dict[ir.Value, int] = {}
        shaped: dict[ir.Value, None] = {}
        inputs: dict[ir.Value, None] = {}
        weights: dict[ir.Value, None] = {}
        pending, seen = [root], {root}
        while pending:
            value = pending.pop()
            number = table.get(value, -1)
            node = value.producer()
            if node is None:
                (weights if initializer_tensor(value) is not None else inputs)[value] = None
                continue
            if value is not root and number in self._cuttable and number not in dropped:
                cuts[value] = number
                continue
            if node in nodes:
                continue
            nodes.add(node)
            for item in reads(node):
                if node.op_type in ("Shape", "Size") and item.producer() is not None and side.sizes(item) is not None:
                    shaped[item] = None
                elif item not in seen:
                    seen.add(item)
                    pending.append(item)
        order = self._order[place]
        ordered = tuple(sorted(nodes, key=order.__getitem__))
        made = {value for node in ordered for value in node.outputs}
        alone = tuple(value for value in shaped if value not in made and value not in cuts)
        # A node whose other output is computed here gives this one too.
        kept = tuple((value, number) for value, number in cuts.items() if value not in made)
        return Piece(side, root, ordered, kept, alone, tuple(inputs), tuple(weights))
