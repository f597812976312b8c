"""Nodes that do not fit their operator, by inputs, outputs and attributes: every later rule counts on what it requires."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx import defs

from graphsurgery.errors import InputRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["refuse_wrong_signatures"]

_GRAPH_TYPES = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


def refuse_wrong_signatures(model: ir.Model, path: Path) -> None:
    """Check the nodes of default operators of ``model``, bodies and functions included; linear in nodes.

    Args:
        model: as it was read.
        path: its file, for the message.

    Raises:
        InputRefusedError: a node lacks an input or attribute that its operator requires, has more inputs or outputs than
            it takes, or an attribute of another type.
    """
    _check(model.graph, model.opset_imports, {}, path)
    for function in model.functions.values():
        _check(function, function.opset_imports, {}, path)


class _Signature:
    """What an operator takes.

    Attributes:
        required: positions of inputs that must be there.
        inputs: how many inputs there may be.
        outputs: how many outputs there may be.
        types: of its attributes.
        needed: attributes that must be there.
    """

    __slots__ = ("inputs", "needed", "outputs", "required", "types")

    def __init__(self, schema: defs.OpSchema) -> None:
        single = defs.OpSchema.FormalParameterOption.Single
        self.required = tuple(place for place, item in enumerate(schema.inputs) if item.option == single)
        self.inputs, self.outputs = schema.max_input, schema.max_output
        self.types = {name: int(item.type.value) for name, item in schema.attributes.items()}
        self.needed = tuple(name for name, item in schema.attributes.items() if item.required)


def _check(
    nodes: Iterable[ir.Node], imports: Mapping[str, int], known: dict[str, _Signature | None], path: Path
) -> None:
    for node in nodes:
        attributes = node.attributes.data
        if node.domain in ("", "ai.onnx"):
            if node.op_type not in known:
                known[node.op_type] = _signature(node.op_type, imports.get("", 1))
            signature = known[node.op_type]
            if signature is not None:
                _check_values(node, signature, path)
                if attributes or signature.needed:
                    _check_attributes(node, signature, path)
        for attribute in attributes.values():
            if attribute.type in _GRAPH_TYPES and not attribute.is_ref():
                bodies = attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else [attribute.as_graph()]
                for body in bodies:
                    _check(body, imports, known, path)


def _check_values(node: ir.Node, signature: _Signature, path: Path) -> None:
    inputs = node.inputs
    count = len(inputs)
    for place in signature.required:
        if place >= count or inputs[place] is None:
            raise _refused(node, f"lacks input {place}, which its operator requires", path)
    if count > signature.inputs or len(node.outputs) > signature.outputs:
        taken = f"{count} inputs and {len(node.outputs)} outputs"
        raise _refused(node, f"has {taken}, more than its operator takes", path)


def _check_attributes(node: ir.Node, signature: _Signature, path: Path) -> None:
    attributes = node.attributes.data
    for name, item in attributes.items():
        wanted = signature.types.get(name, item.type)
        if item.type != wanted:
            told = f"{item.type.name} and not {ir.AttributeType(wanted).name}"
            raise _refused(node, f"has an attribute {name!r} of type {told}", path)
    for name in signature.needed:
        if name not in attributes:
            raise _refused(node, f"lacks attribute {name!r}, which its operator requires", path)


def _signature(op_type: str, version: int) -> _Signature | None:
    try:
        return _Signature(defs.get_schema(op_type, max_inclusive_version=version, domain=""))
    except defs.SchemaError:
        return None  # ONNX Runtime tells what it makes of it.


def _refused(node: ir.Node, what: str, path: Path) -> InputRefusedError:
    name = node.name or (node.outputs[0].name if node.outputs else "")
    return InputRefusedError(f"{path}: node {name!r} ({node.op_type}) {what}; the file is damaged: export it again.")
