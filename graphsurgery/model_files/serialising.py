"""From the IR to the bytes of an .onnx file, with moved data re-located and large inline weights moved out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import TYPE_CHECKING

import onnx_ir as ir
from google.protobuf.message import EncodeError

from graphsurgery.errors import SaveError
from graphsurgery.model_files import graph_extras

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import onnx

    from graphsurgery.model_files.placement import NewPlace
    from graphsurgery.model_files.survey import InlineWeight, Survey

__all__ = ["MAX_PROTO_BYTES", "Serialised", "SpilledTensor", "paused_gc", "root_cause", "serialise"]

MAX_PROTO_BYTES = int(1.9 * 2**30)
"""Protobufs beyond this get their inline weights moved out; at 2 GiB nothing would read them."""

# Integer tensors below this are shapes and indices, which ONNX Runtime must find inline.
_INTEGER_WEIGHT_BYTES = 2**20
_INDEX_TYPES = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


@dataclasses.dataclass(frozen=True)
class SpilledTensor:
    """An inline weight that the new data file holds from ``offset`` on."""

    tensor: ir.TensorProtocol
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Serialised:
    """The bytes of an .onnx file and the inline weights that must be written to ``location`` besides."""

    data: bytes
    location: str | None = None
    spilled: tuple[SpilledTensor, ...] = ()


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collection within: a model makes millions of objects, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # What was made goes to the oldest generation unseen: the next collection of the young would walk all of it.
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


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
    if walked.inline_bytes <= MAX_PROTO_BYTES:
        data = _to_bytes(model, walked, places)
        if data is not None and len(data) <= MAX_PROTO_BYTES:
            return Serialised(data)
    weights = [weight for weight in walked.inline_weights if _is_weight(weight)]
    if weights:
        location = fresh_name(None)
        spilled = tuple(_laid_out(weights))
        with _swapped(weights, spilled, location):
            data = _to_bytes(model, walked, places)
        if data is not None and len(data) <= MAX_PROTO_BYTES:
            return Serialised(data, location, spilled)
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


def _is_weight(weight: InlineWeight) -> bool:
    tensor = weight.value.const_value
    assert tensor is not None
    return tensor.dtype not in _INDEX_TYPES or weight.nbytes >= _INTEGER_WEIGHT_BYTES


def _laid_out(weights: list[InlineWeight]) -> Iterator[SpilledTensor]:
    offset = 0
    for weight in weights:
        tensor = weight.value.const_value
        assert tensor is not None
        # The dense size: a typed protobuf field may take another number of bytes than the elements do.
        yield SpilledTensor(tensor, offset, tensor.nbytes)
        offset += tensor.nbytes


@contextlib.contextmanager
def _swapped(weights: list[InlineWeight], spilled: tuple[SpilledTensor, ...], location: str) -> Iterator[None]:
    """Within, the weights are references to the data file that is yet to be written."""
    try:
        for weight, item in zip(weights, spilled, strict=True):
            tensor = item.tensor
            weight.value.const_value = ir.ExternalTensor(
                location,
                item.offset,
                item.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=weight.value.name or "",
                doc_string=tensor.doc_string,
                metadata_props=dict(tensor.metadata_props),
            )
        yield
    finally:
        for weight, item in zip(weights, spilled, strict=True):
            weight.value.const_value = item.tensor
