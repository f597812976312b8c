"""Which regions are alike: of the same nodes on the same kinds of values, as those of equal layers are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.equivalence.regions.numbering import content_key, node_form, weight_record
from graphsurgery.equivalence.regions.sides import element_count, reads
from graphsurgery.weights import parse_record, sources_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from graphsurgery.equivalence.regions.cutting import Piece, Region
    from graphsurgery.equivalence.regions.numbering import Matching

__all__ = ["likeness"]

_COMPARED_ELEMENTS = 64
"""Constants of more elements are weights, which differ between equal layers; integers are always compared."""


def likeness(region: Region, matching: Matching) -> Hashable:
    """A key that regions share if checking one checks the other: all but the contents of large weights is in it."""
    writer = _Writer(matching)
    return (
        writer.piece(region.reference, matching.reference),
        writer.piece(region.rewritten, matching.rewritten),
        tuple(map(str, region.obligation.contracts)),
    )


class _Writer:
    def __init__(self, matching: Matching) -> None:
        self._matching = matching
        self._numbers: dict[Hashable, int] = {}

    def _local(self, key: Hashable) -> int:
        """The place at which ``key`` was first met: equal in both pieces, and in regions that are alike."""
        return self._numbers.setdefault(key, len(self._numbers))

    def piece(self, piece: Piece, table: object) -> Hashable:
        known: dict[ir.Value, Hashable] = {}
        assert isinstance(table, dict)
        for value, number in piece.cuts:
            known[value] = ("cut", self._local(number), str(piece.side.dtype(value)), piece.side.sizes(value))
        for value in piece.shaped:
            known[value] = ("shape", piece.side.sizes(value))
        for value in piece.inputs:
            known[value] = (
                "input",
                self._local(table.get(value, -1)),
                str(piece.side.dtype(value)),
                piece.side.sizes(value),
            )
        for value in piece.weights:
            assert value.const_value is not None
            known[value] = self._weight(value.name or "", value.const_value)
        rows: list[Hashable] = []
        for place, node in enumerate(piece.nodes):
            rows.append((node_form(node), tuple(known.get(value) for value in reads(node))))
            for slot, value in enumerate(node.outputs):
                known.setdefault(value, ("made", place, slot))
        return (tuple(rows), known.get(piece.root))

    def _weight(self, name: str, tensor: ir.TensorProtocol) -> Hashable:
        record = weight_record(tensor)
        if record is not None:
            form = record
            for source in sorted(sources_of(parse_record(record)), key=lambda item: -len(item.name or "")):
                form = form.replace(f'"{source.name}"', f"#{self._local(('source', source.name))}")
            return ("made", form)
        plain = (self._local(("source", name)), int(tensor.dtype), tuple(tensor.shape.numpy()))
        if isinstance(tensor, ir.ExternalTensor):
            return plain
        if tensor.dtype.is_integer() or tensor.dtype == ir.DataType.BOOL or element_count(tensor) <= _COMPARED_ELEMENTS:
            return (*plain, content_key(tensor))
        return plain
