"""The names of a model's graph outputs, read without parsing the rest of the file.

A directory may hold several models of a gigabyte each: only their top-level protobuf fields and those of the graph are
stepped over, and neither nodes nor weights are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["peek_output_names"]

# Field numbers of onnx.proto: ModelProto.graph, GraphProto.output, ValueInfoProto.name.
_MODEL_GRAPH = 7
_GRAPH_OUTPUT = 12
_VALUE_NAME = 1

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def peek_output_names(path: Path) -> tuple[str, ...]:
    """Names of the graph outputs of the model at ``path``; empty where it is not a readable ONNX protobuf."""
    names: list[str] = []
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            for _, graph_start, graph_end in _fields(file, 0, size, _MODEL_GRAPH):
                for _, start, end in _fields(file, graph_start, graph_end, _GRAPH_OUTPUT):
                    for _, name_start, name_end in _fields(file, start, end, _VALUE_NAME):
                        file.seek(name_start)
                        names.append(file.read(name_end - name_start).decode("utf-8"))
    except (OSError, ValueError):
        return ()
    return tuple(names)


def _fields(file: BinaryIO, start: int, end: int, wanted: int) -> Iterator[tuple[int, int, int]]:
    """The length-delimited fields numbered ``wanted`` in ``start:end``, as (number, first byte, end)."""
    position = start
    while position < end:
        file.seek(position)
        tag, position = _varint(file, position)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            _, position = _varint(file, position)
        elif wire == _FIXED64:
            position += 8
        elif wire == _FIXED32:
            position += 4
        elif wire == _LENGTH:
            length, position = _varint(file, position)
            if position + length > end:
                raise ValueError("a field ends behind the message that holds it")
            if number == wanted:
                yield number, position, position + length
            position += length
        else:
            raise ValueError(f"unknown wire type {wire}")


def _varint(file: BinaryIO, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise ValueError("the file ends within a number")
        position += 1
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value, position
    raise ValueError("a number of more than ten bytes")
