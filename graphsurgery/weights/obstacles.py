"""Why a weight expression cannot be honoured; no byte is read to find out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.weights.bytewise import bytewise
from graphsurgery.weights.expressions import Stack, Transpose, View, dtype_of, shape_of, simplify, sources_of, tensor_of
from graphsurgery.weights.tensors import WeightTensor, external_path, is_reference

if TYPE_CHECKING:
    from graphsurgery.weights.expressions import Part, SourceName

__all__ = ["checked", "obstacle"]

_KNOWN = (ir.ExternalTensor, ir.Tensor, ir.TensorProtoTensor, ir.PackedTensor, WeightTensor)


def obstacle(expression: Part) -> str | None:
    """One sentence on why ``expression`` cannot be a weight of the result; None where it can.

    A view needs no bytes, so that it is possible where the data file is absent; whatever lays bytes out anew is not.
    """
    reason, _ = checked(expression)
    return reason


def checked(expression: Part) -> tuple[str | None, Part]:
    """What :func:`obstacle` says, and the simplest form of ``expression`` (itself where that cannot be known)."""
    for source in sources_of(expression):
        reason = _source_obstacle(source)
        if reason is not None:
            return reason, expression
    reason = _form_obstacle(expression)
    if reason is not None:
        return reason, expression
    simple = simplify(expression)
    bits = dtype_of(simple).bitwidth
    if bits % 8 and bytewise(simple) is None:
        return f"elements of {_named(expression)} are {bits} bits and would not begin at a byte.", simple
    return (None if isinstance(simple, ir.Value) or is_reference(simple) else _absence(simple)), simple


def _named(expression: Part) -> str:
    return repr(sources_of(expression)[0].name)


def _source_obstacle(source: ir.Value | SourceName) -> str | None:
    name = repr(source.name)
    if not isinstance(source, ir.Value) or source.const_value is None:
        return f"{name} has no stored value, so that no weight can be made of it."
    if source.producer() is not None:
        return f"{name} is made by a node, so that where its bytes lie is not known."
    if source.is_graph_input():
        return f"{name} is a graph input with a default, which callers may override."
    tensor = source.const_value
    if tensor.dtype == ir.DataType.STRING:
        return f"{name} holds strings, which have no fixed size."
    if not isinstance(tensor, _KNOWN):
        return f"{name} is a {type(tensor).__name__}, whose layout is not known."
    if isinstance(tensor, ir.ExternalTensor) and tensor.length not in (None, tensor.nbytes):
        return (
            f"{name} takes {tensor.nbytes} bytes and its external data states {tensor.length}: its layout is not known."
        )
    return None


def _form_obstacle(part: Part) -> str | None:
    """Whether shapes, bounds and element types fit together."""
    if isinstance(part, View):
        return _form_obstacle(part.source) or _view_obstacle(part)
    if isinstance(part, Transpose):
        reason = _form_obstacle(part.part)
        if reason is None and sorted(part.perm) != list(range(len(shape_of(part.part)))):
            return f"the axes {part.perm} are no permutation of those of {_named(part)}, {list(shape_of(part.part))}."
        return reason
    if isinstance(part, Stack):
        return _stack_obstacle(part)
    return None


def _view_obstacle(view: View) -> str | None:
    size = math.prod(shape_of(view.source))
    if view.start < 0 or min(view.shape, default=0) < 0 or view.start + math.prod(view.shape) > size:
        end = view.start + math.prod(view.shape)
        return f"a view of elements {view.start} to {end} leaves {_named(view)}, which has {size}."
    return None


def _stack_obstacle(stack: Stack) -> str | None:
    if not stack.parts:
        return "a stack has no parts."
    for part in stack.parts:
        reason = _form_obstacle(part)
        if reason is not None:
            return reason
        first = stack.parts[0]
        if shape_of(part) != shape_of(first):
            shapes = f"{list(shape_of(first))} and {list(shape_of(part))}"
            return f"{_named(first)} and {_named(part)} cannot be stacked: their shapes are {shapes}."
        if dtype_of(part) != dtype_of(first):
            names = f"{dtype_of(first).name} and {dtype_of(part).name}"
            return f"{_named(first)} and {_named(part)} cannot be stacked: their element types are {names}."
    return None


def _absence(simple: Part) -> str | None:
    for source in sources_of(simple):
        tensor = tensor_of(source)
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        path = external_path(tensor)
        end = (tensor.offset or 0) + tensor.nbytes
        try:
            size = path.stat().st_size
        except OSError:
            return f"the bytes of {source.name!r} would have to be laid out anew and their file {path} is absent."
        if size < end:
            return (
                f"the bytes of {source.name!r} would have to be laid out anew and their file {path} ends before them."
            )
    return None
