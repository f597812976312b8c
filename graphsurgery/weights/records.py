"""Weight expressions as text, kept in the metadata of the tensors that they stand for.

A record is a JSON list: ``["source", name, shape, dtype]``, ``["view", record, start, shape]``, ``["stack", records]`` or
``["transpose", record, perm]``. Its sources are initializers of the model that surgery began with, through however many
runs: a source that is itself recorded is replaced by its record.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphsurgery.errors import InputRefusedError
from graphsurgery.weights.expressions import SourceName, Stack, Transpose, View, dtype_of, shape_of

if TYPE_CHECKING:
    from graphsurgery.weights.expressions import Part

__all__ = ["WEIGHT_KEY", "parse_record", "record_of"]

WEIGHT_KEY = "graphsurgery.weight"
"""Metadata of the tensor of an initializer that surgery made: its expression."""


def record_of(expression: Part) -> str:
    """The record of ``expression``: the same for equal expressions."""
    # Written by hand: there are as many as there are experts in all layers.
    if isinstance(expression, View):
        return f'["view",{record_of(expression.source)},{expression.start},{_list(expression.shape)}]'
    if isinstance(expression, Stack):
        return f'["stack",[{",".join(record_of(item) for item in expression.parts)}]]'
    if isinstance(expression, Transpose):
        return f'["transpose",{record_of(expression.part)},{_list(expression.perm)}]'
    if isinstance(expression, ir.Value) and expression.const_value is not None:
        earlier = expression.const_value.metadata_props.get(WEIGHT_KEY)
        if earlier:
            return earlier
    name, shape = json.dumps(expression.name or ""), _list(shape_of(expression))
    return f'["source",{name},{shape},"{dtype_of(expression).name}"]'


def _list(numbers: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def parse_record(text: str) -> Part:
    """The expression of a record, over :class:`SourceName`.

    Raises:
        InputRefusedError: it is not a record.
    """
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        message = f"The metadata {WEIGHT_KEY!r} of an initializer is not what graphsurgery writes: remove it."
        raise InputRefusedError(message) from error


def _parse(data: Any) -> Part:
    kind, *rest = data
    if kind == "view":
        part, start, shape = rest
        return View(_parse(part), int(start), _sizes(shape))
    if kind == "stack":
        return Stack(tuple(_parse(item) for item in rest[0]))
    if kind == "transpose":
        return Transpose(_parse(rest[0]), _sizes(rest[1]))
    if kind == "source":
        name, shape, dtype = rest
        return SourceName(str(name), _sizes(shape), ir.DataType[dtype])
    raise ValueError(kind)


def _sizes(data: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in data)
