"""The models that are measured: their signatures, and arrays to feed them, the same for both where inputs agree.

Alphabet: B batch, S query length.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx

from graphsurgery.equivalence.drawing import Draw
from graphsurgery.equivalence.pairing import renamed_inputs, stated_contracts, with_row_inputs
from graphsurgery.equivalence.protos import missing_data, read_proto
from graphsurgery.equivalence.roles import Role
from graphsurgery.equivalence.signature import read_signature
from graphsurgery.weight_spec import restored_proto

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphsurgery.equivalence.feeds import Array, Sizes
    from graphsurgery.equivalence.roles import Signature

__all__ = ["Subject", "read_subjects"]

# Feeds are distinguished by number: of this one, row indices are the last rows and all logits are kept.
_NUMBER = 0

_BFLOAT16 = onnx.TensorProto.BFLOAT16


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to be measured.

    Attributes:
        path: its file.
        signature: what it takes, by the names under which arrays are drawn.
        names: the name under which an input is drawn to its own, where they differ.
        obstacle: why it cannot be run at all; empty where it can.
    """

    path: Path
    signature: Signature
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    obstacle: str = ""

    def feed(self, sizes: Sizes, seed: int, row: int) -> dict[str, Array]:
        """Arrays by input name.

        Args:
            sizes: B, S, P.
            seed: what they are drawn from.
            row: the row that is asked for where rows are chosen at run time, counted from the end if negative; the
                nearest there is where S is smaller.
        """
        arrays = Draw(self.signature, sizes, seed, _NUMBER, None)()
        chosen = min(max(row + sizes.length if row < 0 else row, 0), sizes.length - 1)
        for spec in self.signature.having(Role.ROW_INDEX):
            arrays[spec.name] = np.full_like(arrays[spec.name], chosen)
        return {self.names.get(name, name): array for name, array in arrays.items()}


def read_subjects(a: Path, b: Path | None) -> tuple[Subject, ...]:
    """Read one model or both; weights are not looked at.

    Raises:
        InputRefusedError: a file is no model.
    """
    first = read_proto(a)
    one = read_signature(first)
    subjects = [Subject(a, with_row_inputs(one, one, stated_contracts(first)), {}, _obstacle(first, a))]
    if b is not None:
        second = read_proto(b)
        told = renamed_inputs(first, second)
        own = read_signature(second)
        drawn = dataclasses.replace(
            own, inputs=tuple(dataclasses.replace(spec, name=told.get(spec.name, spec.name)) for spec in own.inputs)
        )
        contracts = [
            dataclasses.replace(item, source=told.get(item.source, item.source) if item.source else None)
            for item in stated_contracts(second)
        ]
        signature = with_row_inputs(drawn, one, contracts)
        subjects.append(Subject(b, signature, {theirs: ours for ours, theirs in told.items()}, _obstacle(second, b)))
    return tuple(subjects)


def _obstacle(proto: onnx.ModelProto, path: Path) -> str:
    if restored_proto(proto) is not None:
        return "its weights are inputs: measure the model that holds them"
    unfed = next((value.name for value in proto.graph.input if value.type.tensor_type.elem_type == _BFLOAT16), None)
    if unfed is not None:
        return f"its input {unfed} is bfloat16, which numpy cannot hold: export it with float16 or float32 inputs"
    return missing_data(proto, path.parent) or ""
