"""From the IR to the bytes of an .onnx file, with moved data re-located and large inline weights moved out."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir
from google.protobuf.message import EncodeError

from graphsurgery.errors import SaveError
from graphsurgery.model_files import graph_extras
from graphsurgery.model_files.new_weights import NewData, Reference, is_index, plan_new_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import onnx

    from graphsurgery.model_files.placement import NewPlace
    from graphsurgery.model_files.survey import InlineWeight, Survey

__all__ = ["MAX_PROTO_BYTES", "Serialised", "root_cause", "serialise"]

MAX_PROTO_BYTES = int(1.9 * 2**30)
"""Protobufs beyond this get their inline weights moved out; at 2 GiB nothing would read them."""


@dataclasses.dataclass(frozen=True)
class Serialised:
    """The bytes of an .onnx file, and what must be written to the new data file ``location`` besides.

    Attributes:
        data: the .onnx.
        location: the new data file; None where there is none.
        new_data: what it holds.
        notes: sentences that the user should read.
    """

    data: bytes
    location: str | None = None
    new_data: NewData = dataclasses.field(default_factory=NewData)
    notes: tuple[str, ...] = ()


def root_cause(error: BaseException) -> str:
    """What went wrong first, in one line: onnx-ir wraps an error once a level, with the whole protobuf in it."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = " ".join(str(error).split())
    return line if len(line) <= 300 else f"{line[:300]}..."


def serialise(
    model: ir.Model, walked: Survey, places: Mapping[int, NewPlace], fresh_name: Callable[[str | None], str]
) -> Serialised:
    """Serialise ``model``, which stays as it is.

    Args:
        model: the model.
        walked: its survey.
        places: by number of the external tensor, where its data is in the output, if not where it was.
        fresh_name: gives the location of a new data file, should one be needed for inline weights.

    Raises:
        SaveError: the model cannot be serialised, or is over MAX_PROTO_BYTES without its weights.
    """
    plan = plan_new_data(walked)
    location = fresh_name(None) if plan.references else None
    moved = {reference.value for reference in plan.references}
    staying = [weight for weight in walked.inline_weights if weight.value not in moved]
    gone = sum(weight.nbytes for weight in walked.inline_weights if weight.value in moved)
    notes = _notes(plan, location)
    if walked.inline_bytes - gone <= MAX_PROTO_BYTES:
        with _swapped(plan, location):
            data = _to_bytes(model, walked, places)
        if data is not None and len(data) <= MAX_PROTO_BYTES:
            return Serialised(data, location, plan, notes)
    weights = [weight for weight in staying if not is_index(_tensor(weight).dtype, weight.nbytes)]
    if weights:
        location = location if location is not None else fresh_name(None)
        spilled = sum(_move_out(plan, weight) for weight in weights)
        with _swapped(plan, location):
            data = _to_bytes(model, walked, places)
        if data is not None and len(data) <= MAX_PROTO_BYTES:
            note = f"inline weights of {spilled} bytes were moved to {location}, for a protobuf is limited"
            return Serialised(data, location, plan, (*notes, note))
    message = (
        f"the model is over {MAX_PROTO_BYTES} bytes as a protobuf even with its weights in a data file, and nothing "
        f"reads that: make its large constants initializers, or split it."
    )
    raise SaveError(message)


def _to_bytes(model: ir.Model, walked: Survey, places: Mapping[int, NewPlace]) -> bytes | None:
    """The serialised model; None where it is too large to be a protobuf at all."""
    try:
        proto = ir.serde.serialize_model(model)
    except ir.serde.SerdeError as error:
        raise SaveError(f"the model cannot be serialised: {root_cause(error)}.") from error
    graph_extras.restore(model, proto, walked)
    for number, slot in enumerate(walked.external):
        place = places.get(number)
        extras = graph_extras.extra_entries_of(slot.tensor)
        if place is not None or extras:
            _relocate(slot.locate(proto), place, extras)
    try:
        return proto.SerializeToString(deterministic=True)  # type: ignore[no-any-return]
    except (EncodeError, ValueError):
        return None


def _relocate(tensor: onnx.TensorProto, place: NewPlace | None, extras: tuple[tuple[str, str], ...]) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if place is not None:
        entries["location"] = place.location
        if place.offset is not None:
            entries["offset"] = str(place.offset)
        if place.length is not None:
            entries["length"] = str(place.length)
        if place.repacked:
            # The sum was that of the old file.
            extras = tuple(entry for entry in extras if entry[0] != "checksum")
    entries.update(extras)
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def _tensor(weight: InlineWeight) -> ir.TensorProtocol:
    tensor = weight.value.const_value
    assert tensor is not None
    return tensor


def _move_out(plan: NewData, weight: InlineWeight) -> int:
    tensor = _tensor(weight)
    # The dense size: a typed protobuf field may take another number of bytes than the elements do.
    offset = plan.append(tensor, tensor.nbytes)
    plan.references.append(Reference(weight.value, offset, tensor.nbytes))
    return tensor.nbytes


def _notes(plan: NewData, location: str | None) -> tuple[str, ...]:
    notes = []
    if plan.made:
        notes.append(f"weights of {plan.made} bytes were laid out anew, in {location}")
    if plan.moved:
        notes.append(
            f"inline weights of {plan.moved} bytes were moved to {location}, for they are used in several parts"
        )
    return tuple(notes)


@contextlib.contextmanager
def _swapped(plan: NewData, location: str | None) -> Iterator[None]:
    """Within, initializers of which the new data file will hold the bytes are references to it."""
    before = [(reference.value, reference.value.const_value) for reference in plan.references]
    try:
        for reference, (value, tensor) in zip(plan.references, before, strict=True):
            assert tensor is not None
            assert location is not None
            value.const_value = ir.ExternalTensor(
                location,
                reference.offset,
                reference.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=value.name or "",
                doc_string=tensor.doc_string,
                metadata_props=dict(tensor.metadata_props),
            )
        yield
    finally:
        for value, tensor in before:
            value.const_value = tensor
