"""New names for inputs and outputs: given to a model with all that follows, and told to whoever compares two files.

The model's ``graphsurgery.renamed`` metadata says, for every input and output that has another name than in the file
that was exported, what it was called there: ``{"inputs": {now: then}, "outputs": {now: then}}``. It is composed over
runs, and gone when every name is back.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.contracts import EXACT_OUTPUTS_KEY, parse_exact_outputs, read_contracts, write_contracts
from graphsurgery.errors import InputRefusedError
from graphsurgery.model_files import graph_extras
from graphsurgery.model_files.source import InterfaceNames
from graphsurgery.names import Names
from graphsurgery.patterns.matcher import all_graphs
from graphsurgery.weight_spec import rename_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["RENAMED_KEY", "Renames", "parse_renames", "read_renames", "rename_interface"]

RENAMED_KEY = "graphsurgery.renamed"
"""Metadata of a model whose inputs or outputs have other names than in the export; see the module."""

_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
# What was computed by whom is history; what this package records is followed entry by entry.
_HISTORY = ("pkg.", "graphsurgery.")


@dataclasses.dataclass(frozen=True)
class Renames:
    """What inputs and outputs were called: name now to name then; those that kept their name are left out."""

    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def input(self, name: str) -> str:
        """What the input ``name`` was called."""
        return self.inputs.get(name, name)

    def output(self, name: str) -> str:
        """What the output ``name`` was called."""
        return self.outputs.get(name, name)

    def then(self, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Renames:
        """These renames followed by others, old name to new."""
        return Renames(_composed(self.inputs, inputs), _composed(self.outputs, outputs))

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)


def _composed(known: Mapping[str, str], later: Mapping[str, str]) -> dict[str, str]:
    # What is not renamed again keeps its entry.
    result = {now: then for now, then in known.items() if now not in later}
    result |= {new: known.get(old, old) for old, new in later.items()}
    return {now: then for now, then in sorted(result.items()) if now != then}


def parse_renames(text: str | None) -> Renames:
    """Read the metadata entry; nothing is renamed where there is none.

    Raises:
        InputRefusedError: it is not what :func:`rename_interface` writes.
    """
    if not text:
        return Renames()
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    sides = [data.get(side) for side in ("inputs", "outputs")] if isinstance(data, dict) else []
    named = [side for side in sides if isinstance(side, dict) and all(isinstance(name, str) for name in side.values())]
    if len(named) != 2:
        raise InputRefusedError(f"The model's metadata {RENAMED_KEY!r} is not what graphsurgery writes: remove it.")
    return Renames(*named)


def read_renames(model: ir.Model) -> Renames:
    """What the inputs and outputs of ``model`` were called in the export."""
    return parse_renames(model.metadata_props.get(RENAMED_KEY))


def rename_interface(model: ir.Model, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
    """Rename inputs and outputs, old name to new, in place.

    With them go the contracts and other metadata that name them, what quantisation annotations say, and values of the
    same name inside functions, where the new name is free. The order of inputs, outputs and initializers stays. An
    output that is an input as well gets an Identity in front where the two are to have different names.

    Args:
        model: the model.
        inputs: old name to new; every old name is an input.
        outputs: old name to new; every old name is an output.

    The caller has made sure that the new names are distinct and not those of other values.
    """
    InterfaceNames.record(model, inputs, outputs)
    _part(model, inputs, outputs)
    by_value: dict[ir.Value, str] = {}
    for values, names in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        by_value |= {value: names[value.name] for value in values if value.name and value.name in names}
    _set_names(model, by_value)
    both = {**inputs, **outputs}
    for function in model.functions.values():
        _follow_inside(function, both)
    _follow_quantisation(model, both)
    graph_extras.rename(model, both)
    _follow_metadata(model, inputs, outputs)
    Names.forget(model)
    invalidate(model)


def _part(model: ir.Model, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
    """Give outputs that are inputs as well a value of their own where they are to be called differently."""
    graph = model.graph
    for position, value in enumerate(graph.outputs):
        name = value.name or ""
        if value.is_graph_input() and inputs.get(name, name) != outputs.get(name, name):
            names = Names.of(model)
            node = ir.node("Identity", [value], name=names.node(f"{name}/output"))
            node.outputs[0].name = name
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[position] = node.outputs[0]


def _set_names(model: ir.Model, by_value: Mapping[ir.Value, str]) -> None:
    initializers = model.graph.initializers
    # A rename puts an initializer last: all are taken out and put back in their order.
    ordered = list(initializers.values()) if any(value.is_initializer() for value in by_value) else []
    if ordered:
        initializers.clear()
    for value, name in by_value.items():
        value.name = name
    for value in ordered:
        initializers.add(value)


def _follow_inside(function: ir.Function, names: Mapping[str, str]) -> None:
    values = dict.fromkeys(
        (*function.inputs, *(value for node in function.graph.all_nodes() for value in node.outputs))
    )
    used = {value.name for value in values}
    moved = {value: names[value.name] for value in values if value.name and value.name in names}
    taken = used - set(names)
    for value, name in moved.items():
        if name not in taken:
            value.name = name


def _follow_quantisation(model: ir.Model, names: Mapping[str, str]) -> None:
    for value in _values(model):
        annotated = value.meta.get("quant_parameter_tensor_names") if value.meta else None
        if isinstance(annotated, dict):
            for key, name in annotated.items():
                annotated[key] = names.get(name, name)


def _values(model: ir.Model) -> Iterable[ir.Value]:
    for graph in all_graphs(model):
        # A weight may be an input too.
        yield from dict.fromkeys((*graph.inputs, *graph.initializers.values()))
        for node in graph:
            yield from node.outputs


# ---- metadata -----------------------------------------------------------------------------------------------------


def _follow_metadata(model: ir.Model, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
    contracts = read_contracts(model)
    moved = [
        dataclasses.replace(
            item,
            output=outputs.get(item.output, item.output),
            source=inputs.get(item.source, item.source) if item.source is not None else None,
            sequence=inputs.get(item.sequence, item.sequence),
        )
        for item in contracts
    ]
    renames = read_renames(model).then(inputs, outputs)
    exact = model.metadata_props.get(EXACT_OUTPUTS_KEY)
    both = {**inputs, **outputs}
    for store in _stores(model):
        _follow_store(store, both)
    write_contracts(model, moved)
    rename_weights(model, inputs)
    if exact is not None:
        # An input may have had the name of another output.
        named = sorted(outputs.get(name, name) for name in parse_exact_outputs(exact))
        model.metadata_props[EXACT_OUTPUTS_KEY] = json.dumps(named, separators=(",", ":"))
    if renames:
        data = {"inputs": dict(renames.inputs), "outputs": dict(renames.outputs)}
        model.metadata_props[RENAMED_KEY] = json.dumps(data, separators=(",", ":"))
    else:
        model.metadata_props.pop(RENAMED_KEY, None)


def _stores(model: ir.Model) -> Iterable[dict[str, str]]:
    yield model.metadata_props
    for graph in all_graphs(model):
        yield graph.metadata_props
        for node in graph:
            yield node.metadata_props
    for value in _values(model):
        yield value.metadata_props


def _follow_store(store: dict[str, str], names: Mapping[str, str]) -> None:
    for key, text in store.items():
        if key.startswith(_HISTORY):
            continue
        if text in names:
            store[key] = names[text]
        elif text[:1] in ("{", "[") and _is_json(text):
            store[key] = _JSON_TEXT.sub(_renaming(names), text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _renaming(names: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    def replace(found: re.Match[str]) -> str:
        content: Any = json.loads(found[0])
        return json.dumps(names[content]) if content in names else found[0]

    return replace
