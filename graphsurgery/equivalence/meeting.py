"""How two models meet: which inputs and outputs stand for each other, and what both are fed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx

from graphsurgery.equivalence.feeds import Feed, LeftOut, make_feeds
from graphsurgery.equivalence.given import given_feeds
from graphsurgery.equivalence.pairing import Pairing, misread_masks, pair_outputs, renamed_inputs, with_row_inputs
from graphsurgery.equivalence.roles import Role, Signature
from graphsurgery.equivalence.signature import merge, read_signature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphsurgery.equivalence.feeds import Array

__all__ = ["Meeting"]


class Meeting:
    """The interfaces of two models side by side.

    Attributes:
        protos: content of the reference and of the rewritten model.
        pairing: which outputs stand for each other.
        reference: signature of the reference.
        rewritten: signature of the rewritten model, inputs under its own names.
        renamed: input of the rewritten model to the input of the reference that it stands for, where names differ.
        signature: what both are fed, under the names of the reference.
        feeds: what both are fed.
        left_out: feeds that are known not to be taken.
        notes: what was assumed.
        warnings: what deserves a look.
        reasons: why the two cannot be equal.
    """

    def __init__(
        self,
        protos: tuple[onnx.ModelProto, onnx.ModelProto],
        seed: int,
        given: Path | Mapping[str, Array] | None,
        notes: Sequence[str] = (),
        warnings: Sequence[str] = (),
    ) -> None:
        """Read both.

        Args:
            protos: the reference and the rewritten model.
            seed: what feeds are drawn from.
            given: feeds; None for drawn ones.
            notes: what was assumed before.
            warnings: what deserved a look before.

        Raises:
            UsageError: feeds do not fit.
        """
        self.protos, self._seed = protos, seed
        self.notes, self.warnings = list(notes), list(warnings)
        self.pairing: Pairing = pair_outputs(*protos)
        self.notes += self.pairing.notes
        self.reasons = list(self.pairing.differences)
        self.reference = read_signature(protos[0])
        self.rewritten = read_signature(protos[1])
        self.renamed: dict[str, str] = self._renamed_inputs()
        self.signature = self._signature()
        self.reasons += misread_masks([c for pair in self.pairing.pairs for c in pair.contracts], self.signature)
        self.feeds, self.left_out = self._feeds(given)

    def _renamed_inputs(self) -> dict[str, str]:
        """Input of the rewritten model to the input of the reference that it stands for: as told, else by order."""
        told = renamed_inputs(*self.protos)
        named = {c.source for pair in self.pairing.pairs for c in pair.contracts} | set(told)
        found = {told.get(spec.name, spec.name) for spec in self.rewritten.inputs}
        gone = [spec for spec in self.reference.inputs if spec.name not in found]
        new = [s for s in self.rewritten.inputs if self.reference.input(s.name) is None and s.name not in named]
        kinds = [(spec.elem_type, len(spec.dims)) for spec in gone]
        if gone and kinds == [(spec.elem_type, len(spec.dims)) for spec in new]:
            pairs = list(zip(new, gone, strict=True))
            self.notes += [
                f"input {b.name} has no namesake in the reference: fed as {a.name}, by order" for b, a in pairs
            ]
            return told | {b.name: a.name for b, a in pairs}
        self.warnings += [f"input {spec.name} of the reference is gone in the rewritten model" for spec in gone]
        return told

    def _signature(self) -> Signature:
        other = self.rewritten
        inputs = tuple(dataclasses.replace(spec, name=self.renamed.get(spec.name, spec.name)) for spec in other.inputs)
        merged = merge(self.reference, dataclasses.replace(other, inputs=inputs))
        contracts = [contract for pair in self.pairing.pairs for contract in pair.contracts]
        return with_row_inputs(merged, self.reference, contracts)

    def _feeds(self, given: Path | Mapping[str, Array] | None) -> tuple[list[Feed], list[LeftOut]]:
        if given is not None:
            added = {spec.name for spec in self.signature.inputs if self.reference.input(spec.name) is None}
            return given_feeds(given, self.signature, frozenset(added)), []
        self.notes += [
            f"input {spec.name}: what it stands for is not known, fed small random values"
            for spec in self.signature.having(Role.UNKNOWN)
        ]
        if self.signature.bounded and self.signature.having(Role.MASK_ND, Role.MASK):
            self.notes.append("rows of padding attend a key: the number of slots that are read must not tell")
        return make_feeds(self.signature, self._seed, pad_position=self._pad_position())

    def _pad_position(self) -> int | None:
        """-1 where positions alone can tell padding: the model has no mask, or a contract reads them."""
        masks = self.signature.having(Role.MASK, Role.MASK_ND, Role.LAST_KEY)
        reads = any(c.index == "position" for pair in self.pairing.pairs for c in pair.contracts)
        free = not self.signature.having(Role.SLOTS)
        return -1 if reads or (not masks and free) else None

    def changed_inputs(self) -> list[str]:
        """Inputs of another type or rank than the reference's: no feed fits both models."""
        changed: list[str] = []
        for spec in self.rewritten.inputs:
            other = self.reference.input(self.renamed.get(spec.name, spec.name))
            if other is None:
                continue
            kinds = [onnx.TensorProto.DataType.Name(each.elem_type).lower() for each in (spec, other)]
            if kinds[0] != kinds[1]:
                changed.append(f"input {spec.name} is {kinds[0]}, not {kinds[1]}")
            elif len(spec.dims) != len(other.dims):
                changed.append(f"input {spec.name} has {len(spec.dims)} axes, not {len(other.dims)}")
        return changed
