"""Which output of the rewritten model stands against which of the reference, and through which contract.

Alphabet: B batch, S query length, N rows kept.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.contracts import (
    CONTRACTS_KEY,
    EXACT_OUTPUTS_KEY,
    RowSelection,
    parse_contracts,
    parse_exact_outputs,
)
from graphsurgery.equivalence.roles import INTEGERS, Role, Signature, letter_of
from graphsurgery.renames import RENAMED_KEY, parse_renames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import onnx

    from graphsurgery.equivalence.feeds import Array

__all__ = [
    "Pair",
    "Pairing",
    "apply_contracts",
    "candidates",
    "misread_masks",
    "pair_outputs",
    "renamed_inputs",
    "with_row_inputs",
]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One output of the reference and its counterpart.

    Attributes:
        reference: name in the reference.
        rewritten: name in the rewritten model.
        contracts: what the rewritten output holds of the reference, applied in this order.
        exact: it must be bitwise equal.
    """

    reference: str
    rewritten: str
    contracts: tuple[RowSelection, ...] = ()
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class Pairing:
    """All pairs, what has no counterpart (one sentence each), and what was assumed."""

    pairs: tuple[Pair, ...]
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _metadata(proto: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def stated_contracts(proto: onnx.ModelProto) -> tuple[RowSelection, ...]:
    """The contracts in the metadata of a model.

    Raises:
        InputRefusedError: they are not what a pass writes.
    """
    return parse_contracts(_metadata(proto).get(CONTRACTS_KEY))


class _Names:
    """What the inputs and outputs of the rewritten model are called in the reference, as the metadata of both says.

    Names that the metadata does not tell of stand for themselves.
    """

    def __init__(self, reference: onnx.ModelProto, rewritten: onnx.ModelProto) -> None:
        theirs, ours = (parse_renames(_metadata(proto).get(RENAMED_KEY)) for proto in (reference, rewritten))
        self.inputs = _matched(reference.graph.input, rewritten.graph.input, theirs.input, ours.input)
        self.outputs = _matched(reference.graph.output, rewritten.graph.output, theirs.output, ours.output)

    def contract(self, item: RowSelection) -> RowSelection:
        """The contract with inputs as the reference calls them: so they are fed."""
        source = self.inputs.get(item.source, item.source) if item.source is not None else None
        return dataclasses.replace(item, source=source, sequence=self.inputs.get(item.sequence, item.sequence))

    def as_reference(self, item: RowSelection) -> RowSelection:
        """The contract in the words of the reference alone."""
        return dataclasses.replace(self.contract(item), output=self.outputs.get(item.output, item.output))


def _matched(
    theirs: Iterable[onnx.ValueInfoProto],
    ours: Iterable[onnx.ValueInfoProto],
    was: Callable[[str], str],
    is_: Callable[[str], str],
) -> dict[str, str]:
    """Name in the rewritten model to name in the reference: of one name in the export."""
    exported = {was(value.name): value.name for value in theirs}
    return {value.name: exported[is_(value.name)] for value in ours if is_(value.name) in exported}


def renamed_inputs(reference: onnx.ModelProto, rewritten: onnx.ModelProto) -> dict[str, str]:
    """Input of the rewritten model to the input of the reference that it stands for, as the metadata of both says."""
    return {ours: theirs for ours, theirs in _Names(reference, rewritten).inputs.items() if ours != theirs}


def pair_outputs(reference: onnx.ModelProto, rewritten: onnx.ModelProto) -> Pairing:
    """Pair outputs by what they were called in the export, those left over by order.

    Contracts that the reference already carries are part of what it computes: only later ones are applied. They speak
    of inputs by the names of the reference.
    """
    known = _Names(reference, rewritten)
    made, before = stated_contracts(rewritten), stated_contracts(reference)
    if tuple(map(known.as_reference, made[: len(before)])) == before:
        made = made[len(before) :]
    made = tuple(map(known.contract, made))
    exact = parse_exact_outputs(_metadata(rewritten).get(EXACT_OUTPUTS_KEY))
    theirs = [value.name for value in reference.graph.output]
    ours = [value.name for value in rewritten.graph.output]
    names = dict.fromkeys(theirs)
    matched = {their: our for our, their in known.outputs.items()}
    left, free = [n for n in theirs if n not in matched], [n for n in ours if n not in known.outputs]
    differences: list[str] = []
    notes: list[str] = []
    if len(left) == len(free):
        matched |= dict(zip(left, free, strict=True))
        notes += [
            f"output {a} of the reference has no namesake: compared with {b}, by order"
            for a, b in zip(left, free, strict=True)
        ]
    else:
        differences += [f"output {name} is missing in the rewritten model" for name in left]
        differences += [f"output {name} is not in the reference" for name in free]
    pairs = tuple(
        Pair(name, matched[name], tuple(c for c in made if c.output == matched[name]), matched[name] in exact)
        for name in names
        if name in matched
    )
    return Pairing(pairs, tuple(differences), tuple(notes))


def with_row_inputs(signature: Signature, reference: Signature, contracts: Sequence[RowSelection]) -> Signature:
    """The signature with the inputs that choose rows marked as such.

    They are the inputs that contracts name, and else inputs that only the rewritten model has: int32 ``[B, 1, 1]`` or
    int64 ``[B]``.
    """
    named = {contract.source for contract in contracts if contract.index == "runtime"}
    specs = []
    for spec in signature.inputs:
        added = reference.input(spec.name) is None and spec.role is Role.UNKNOWN and spec.elem_type in INTEGERS
        by_row = bool(spec.dims) and (isinstance(spec.dims[0], int) or signature.letters.get(spec.dims[0]) == "B")
        shaped = by_row and spec.dims[1:] in ((), (1, 1))
        chooses = spec.name in named or (added and shaped and not named)
        specs.append(dataclasses.replace(spec, role=Role.ROW_INDEX) if chooses else spec)
    return dataclasses.replace(signature, inputs=tuple(specs))


def misread_masks(contracts: Sequence[RowSelection], signature: Signature) -> list[str]:
    """One sentence for each contract that finds the last token in a mask that tells nothing of tokens."""
    wrong = {spec.name for spec in signature.having(Role.ENCODER_MASK)}
    return [
        f"output {contract.output} keeps the rows that {contract.source} tells, which is a mask of the encoder:"
        f" it says nothing of the tokens in {contract.sequence}"
        for contract in contracts
        if contract.index == "mask" and contract.source in wrong
    ]


def apply_contracts(contracts: Sequence[RowSelection], value: Array, feeds: Mapping[str, Array]) -> Array:
    """What the rewritten output must hold, from the reference output ``value``.

    Raises:
        ValueError: a mask has fewer columns than there are tokens.
    """
    for contract in contracts:
        length = feeds[contract.sequence].shape[contract.sequence_axis]
        if contract.index == "mask" and contract.source is not None and feeds[contract.source].shape[1] < length:
            columns = feeds[contract.source].shape[1]
            raise ValueError(f"{contract.source} has {columns} columns for {length} tokens")
        value = contract.apply(value, feeds)
    return value


def candidates(
    pair: Pair, signature: Signature, shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...], Mapping[str, int]]]
) -> list[RowSelection]:
    """Ways to read an output that has fewer rows than the reference and no contract that says which.

    Args:
        pair: the outputs.
        signature: of the inputs that are fed.
        shapes: for each feed the shape in the reference, in the rewritten model, and the sizes B and S.

    Returns:
        Selections to be tried in order; none where the shapes do not tell of kept rows.
    """
    sequence = signature.sequence
    changed = [(a, b, sizes) for a, b, sizes in shapes if a != b]
    if sequence is None or not changed or any(len(a) != len(b) for a, b, _ in changed):
        return []
    axes = {tuple(axis for axis, (m, n) in enumerate(zip(a, b, strict=True)) if m != n) for a, b, _ in changed}
    kept = {b[axis] for axes_ in axes for axis in axes_ for _, b, _ in changed}
    if len(axes) != 1 or len(next(iter(axes))) != 1 or len(kept) != 1:
        return []
    axis, keep = next(iter(axes))[0], kept.pop()
    if any(a[axis] != sizes["S"] for a, _, sizes in changed):
        return []
    spec, sequence_axis = sequence
    batch_axis = 0 if axis > 0 and len(spec.dims) > sequence_axis and sequence_axis > 0 else None
    common = {
        "output": pair.rewritten,
        "keep": keep,
        "sequence": spec.name,
        "sequence_axis": sequence_axis,
        "row_axis": axis,
        "batch_axis": batch_axis,
    }
    found = [RowSelection(index="last", source=None, **common)]  # type: ignore[arg-type]
    modes = (("mask", Role.MASK), ("position", Role.POSITIONS), ("runtime", Role.ROW_INDEX))
    found += [
        RowSelection(index=mode, source=source.name, **common)  # type: ignore[arg-type]
        for mode, role in modes
        for source in signature.having(role)
    ]
    return found


def row_axes(
    dims: Sequence[int | str] | None, shape: Sequence[int], signature: Signature, sizes: Mapping[str, int]
) -> tuple[int | None, int | None, str | None]:
    """Batch axis, row axis and the letter of the row axis (``S``, ``T`` or ``BS``) of a reference output.

    Declared symbols tell first, then the sizes that came out.
    """
    letters: list[str | None] = [None] * len(shape)
    if dims is not None and len(dims) == len(shape):
        letters = [letter_of(dim, signature.letters) for dim in dims]
    batch = next((axis for axis, letter in enumerate(letters) if letter == "B"), None)
    for letter in ("S", "T", "BS"):
        if letter in letters:
            return batch, letters.index(letter), letter
    if batch is None and shape and shape[0] == sizes["B"]:
        batch = 0
    for letter in ("T", "S"):
        for axis in range(len(shape) - 2, -1, -1) if len(shape) > 1 else range(0):
            if axis != batch and shape[axis] == sizes[letter]:
                return batch, axis, letter
    return batch, None, None


def excluded_elements(
    value_shape: tuple[int, ...],
    axes: tuple[int | None, int | None, str | None],
    first: Mapping[int, int],
    sizes: Mapping[str, int],
) -> Array:
    """Elements of a reference output that depend causally on flipped rows.

    Args:
        value_shape: shape of the output.
        axes: what :func:`row_axes` returned.
        first: batch row to the first flipped position (0 <= s < S); later positions depend on it.
        sizes: B, S and P.

    Returns:
        Booleans of the output's shape.
    """
    batch_axis, row_axis, letter = axes
    mask = np.zeros(value_shape, dtype=np.bool_)
    for row, position in first.items():
        index: list[slice | int] = [slice(None)] * len(value_shape)
        if letter == "BS" and row_axis is not None:
            index[row_axis] = slice(row * sizes["S"] + position, (row + 1) * sizes["S"])
        else:
            if batch_axis is not None:
                index[batch_axis] = row if value_shape[batch_axis] > 1 else 0
            if row_axis is not None:
                index[row_axis] = slice(position + (sizes["P"] if letter == "T" else 0), None)
        mask[tuple(index)] = True
    return mask
