"""Nodes with fewer or more inputs and outputs than their operator has: every later rule counts on what it requires."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx import defs

from graphsurgery.errors import InputRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["refuse_wrong_arity"]

_GRAPH_TYPES = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


def refuse_wrong_arity(model: ir.Model, path: Path) -> None:
    """Check the nodes of default operators of ``model``, bodies and functions included; linear in nodes.

    Args:
        model: as it was read.
        path: its file, for the message.

    Raises:
        InputRefusedError: a node lacks an input that its operator requires, or has more inputs or outputs than it takes.
    """
    _check(model.graph, model.opset_imports, {}, path)
    for function in model.functions.values():
        _check(function, function.opset_imports, {}, path)


class _Arity:
    """What an operator takes.

    Attributes:
        required: positions of inputs that must be there.
        inputs: how many inputs there may be.
        outputs: how many outputs there may be.
    """

    __slots__ = ("inputs", "outputs", "required")

    def __init__(self, schema: defs.OpSchema) -> None:
        single = defs.OpSchema.FormalParameterOption.Single
        self.required = tuple(place for place, item in enumerate(schema.inputs) if item.option == single)
        self.inputs, self.outputs = schema.max_input, schema.max_output


def _check(nodes: Iterable[ir.Node], imports: Mapping[str, int], known: dict[str, _Arity | None], path: Path) -> None:
    for node in nodes:
        for attribute in node.attributes.data.values():
            if attribute.type in _GRAPH_TYPES and not attribute.is_ref():
                bodies = attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else [attribute.as_graph()]
                for body in bodies:
                    _check(body, imports, known, path)
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type not in known:
            known[node.op_type] = _arity(node.op_type, imports.get("", 1))
        arity = known[node.op_type]
        if arity is None:
            continue
        count = len(node.inputs)
        missing = next((place for place in arity.required if place >= count or node.inputs[place] is None), None)
        if missing is not None:
            raise _refused(node, f"lacks input {missing}, which its operator requires", path)
        if count > arity.inputs or len(node.outputs) > arity.outputs:
            taken = f"{count} inputs and {len(node.outputs)} outputs"
            raise _refused(node, f"has {taken}, more than its operator takes", path)


def _arity(op_type: str, version: int) -> _Arity | None:
    try:
        return _Arity(defs.get_schema(op_type, max_inclusive_version=version, domain=""))
    except defs.SchemaError:
        return None  # ONNX Runtime tells what it makes of it.


def _refused(node: ir.Node, what: str, path: Path) -> InputRefusedError:
    name = node.name or (node.outputs[0].name if node.outputs else "")
    return InputRefusedError(f"{path}: node {name!r} ({node.op_type}) {what}; the file is damaged: export it again.")
