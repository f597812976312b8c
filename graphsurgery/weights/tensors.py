"""The tensors that weight expressions become: references to a file, or values computed when they are asked for."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import onnx_ir as ir

from graphsurgery.weights.evaluating import evaluate
from graphsurgery.weights.expressions import (
    SourceName,
    Stack,
    View,
    dtype_of,
    shape_of,
    simplify,
    sources_of,
    tensor_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphsurgery.weights.expressions import Expression, Part
    from graphsurgery.weights.streaming import Piece

__all__ = ["WeightTensor", "bytes_moved", "external_path", "is_reference", "realise"]


class WeightTensor(ir.LazyTensor):
    """A tensor that an expression gives; nothing is read before its contents are asked for.

    Attributes:
        expression: in its simplest form.
        sources: the tensors of the sources, which stay what they are when the values that held them are gone.
    """

    __slots__ = ("expression", "sources")

    def __init__(self, expression: Expression, name: str, metadata: dict[str, str] | None = None) -> None:
        """The value of ``expression``, a simplest form without an obstacle."""
        shape = ir.Shape(shape_of(expression), frozen=True)
        super().__init__(self._whole, dtype_of(expression), shape, name=name, metadata_props=metadata)
        self.expression = expression
        self.sources = {source: tensor_of(source) for source in sources_of(expression)}

    def _whole(self) -> ir.TensorProtocol:
        arrays = {source: tensor.numpy() for source, tensor in self.sources.items()}
        value = np.array(evaluate(self.expression, arrays), order="C")
        return ir.Tensor(value, dtype=self.dtype, shape=self.shape, name=self.name)

    def pieces(self) -> Iterator[Piece]:
        """The bytes in order, each piece a range of a file or a chunk of bounded size."""
        from graphsurgery.weights.streaming import pieces

        return pieces(self.expression, self.sources)

    def tobytes(self) -> bytes:
        """All bytes; :meth:`tofile` needs less memory."""
        from graphsurgery.weights.streaming import chunks

        return b"".join(chunks(self.pieces()))

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes to ``file``, never holding more than a chunk of them."""
        from graphsurgery.weights.streaming import chunks

        for chunk in chunks(self.pieces()):
            file.write(chunk)

    def __repr__(self) -> str:
        return f"{type(self).__name__}<{self.dtype},{self.shape}>({self.name!r})"


def realise(simple: Part, name: str, metadata: dict[str, str] | None = None) -> ir.ExternalTensor | WeightTensor:
    """The tensor of ``simple``, a simplest form without an obstacle: a reference where its bytes are one run of a file.

    Args:
        simple: what it holds.
        name: its name.
        metadata: its metadata.
    """
    if isinstance(simple, ir.Value | SourceName):
        simple = View(simple, 0, shape_of(simple))
    found = _run(simple)
    if found is None:
        return WeightTensor(simple, name, metadata)
    tensor, offset, length = found
    return ir.ExternalTensor(
        tensor.location,
        offset,
        length,
        tensor.dtype,
        shape=ir.Shape(shape_of(simple), frozen=True),
        name=name,
        metadata_props=metadata,
        base_dir=tensor.base_dir,
    )


def is_reference(simple: Part) -> bool:
    """Whether the bytes of ``simple``, a simplest form, are one run of a file or of a tensor in memory."""
    if isinstance(simple, View):
        return isinstance(simple.source, ir.Value)
    return isinstance(simple, Stack) and _run(simple) is not None


def bytes_moved(expression: Part) -> int:
    """How many bytes a save has to lay out anew for ``expression``: none for a view, else all."""
    simple = simplify(expression)
    if isinstance(simple, ir.Value) or is_reference(simple):
        return 0
    bits = dtype_of(simple).bitwidth * math.prod(shape_of(simple))
    return (bits + 7) // 8


def external_path(tensor: ir.ExternalTensor) -> Path:
    """The file that holds the bytes of ``tensor``."""
    return Path(os.fspath(tensor.base_dir)) / os.fspath(tensor.location)


def _run(part: Part) -> tuple[ir.ExternalTensor, int, int] | None:
    """The run of a file that ``part`` is: a tensor in the file, first byte and number of bytes."""
    if isinstance(part, Stack):
        runs = [_run(item) for item in part.parts]
        first = runs[0]
        if first is None or not first[2]:
            return None
        tensor, offset, each = first
        bits = dtype_of(part).bitwidth * math.prod(shape_of(part)[1:])
        where = (os.fspath(tensor.location), os.fspath(tensor.base_dir))
        for number, run in enumerate(runs):
            if run is None or (os.fspath(run[0].location), os.fspath(run[0].base_dir)) != where:
                return None
            if run[1] != offset + number * each or (bits % 8 and number):
                return None
        return tensor, offset, each * len(runs)
    source, start = (part.source, part.start) if isinstance(part, View) else (part, 0)
    held = source.const_value if isinstance(source, ir.Value) else None
    if not isinstance(held, ir.ExternalTensor):
        return None
    bits = held.dtype.bitwidth
    return held, (held.offset or 0) + start * bits // 8, (math.prod(shape_of(part)) * bits + 7) // 8
