"""What a protobuf holds and the IR does not: kept beside the graphs at load, put back at save.

onnx-ir drops value_info of values that do not exist, value_info of graph inputs and outputs, quantization annotations
of values that do not exist, and unknown keys of external tensors; it adds value_info for every initializer, and writes
the metadata of inline tensors twice.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from graphsurgery.analysis._order import inner_graphs
from graphsurgery.model_files.proto_audit import extra_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphsurgery.model_files.proto_audit import Audit
    from graphsurgery.model_files.survey import Survey

__all__ = [
    "add_infos",
    "capture",
    "external_extras",
    "extra_entries_of",
    "infos",
    "orphan_names",
    "rename",
    "restore",
    "set_extra_entries",
]

_EXTRAS_KEY = "graphsurgery.extras"
_FUNCTION_INFO_VERSION = 10  # IR version from which functions hold their own value_info


@dataclasses.dataclass(frozen=True)
class _GraphExtras:
    """What one graph or function held that its IR does not.

    Attributes:
        orphans: value_info of values that do not exist, serialised.
        initializers: names of initializers that had a value_info.
        interface: names of graph inputs and outputs that had a value_info besides.
        annotations: quantization annotations of values that do not exist, serialised.
        annotated: whether there were any quantization annotations.
    """

    orphans: tuple[bytes, ...] = ()
    initializers: frozenset[str] = frozenset()
    interface: frozenset[str] = frozenset()
    annotations: tuple[bytes, ...] = ()
    annotated: bool = False


def capture(model: ir.Model, proto: onnx.ModelProto, found: Audit, walked: Survey | None) -> None:
    """Keep beside the graphs of ``model`` what it lost of ``proto``.

    Args:
        model: what ``proto`` was deserialised to.
        proto: the file's protobuf.
        found: its audit.
        walked: the survey of ``model``; None where there is nothing but one graph.
    """
    elsewhere = _experimental_names(model) if model.ir_version < _FUNCTION_INFO_VERSION and model.functions else set()
    graphs = [model.graph] if walked is None else [slot.graph for slot in walked.graphs]
    for graph, graph_proto in zip(graphs, found.graphs, strict=True):
        extras = _graph_extras(graph_proto, elsewhere if graph is model.graph else set())
        if extras != _GraphExtras():
            graph.meta[_EXTRAS_KEY] = extras
    for function, function_proto in zip(model.functions.values(), proto.functions, strict=True):
        names = set(itertools.chain(function_proto.input, *(node.output for node in function_proto.node)))
        orphans = tuple(i.SerializeToString() for i in function_proto.value_info if i.name not in names)
        if orphans:
            function.meta[_EXTRAS_KEY] = _GraphExtras(orphans)
    for tensor in found.with_metadata:
        # The IR has read them; in the protobuf that it keeps they would be written a second time.
        tensor.ClearField("metadata_props")


def _experimental_names(model: ir.Model) -> set[str]:
    """Names under which the main graph holds the value_info of functions before IR version 10."""
    return {
        f"{function.domain}::{function.name}/{value.name}"
        for function in model.functions.values()
        for value in itertools.chain(function.inputs, *(node.outputs for node in function))
        if value.name and "/" not in value.name
    }


def _graph_extras(graph: onnx.GraphProto, elsewhere: set[str]) -> _GraphExtras:
    if not graph.value_info and not graph.quantization_annotation:
        return _GraphExtras()
    initializers = {tensor.name for tensor in graph.initializer}
    inputs = {info.name for info in graph.input}
    interface = inputs | {info.name for info in graph.output}
    held_initializers, held_interface, others = set(), set(), []
    for info in graph.value_info:
        name = info.name
        if name in interface:
            held_interface.add(name)
        elif name in initializers:
            held_initializers.add(name)
        elif name not in elsewhere:
            others.append(info)
    # Nearly always there is nothing left to look up.
    looked_up = bool(others or graph.quantization_annotation)
    produced = set(itertools.chain.from_iterable(node.output for node in graph.node)) if looked_up else set()
    known = produced | initializers | inputs
    orphans = [info.SerializeToString() for info in others if info.name not in produced]
    annotations = [item.SerializeToString() for item in graph.quantization_annotation if item.tensor_name not in known]
    return _GraphExtras(
        tuple(orphans),
        frozenset(held_initializers),
        frozenset(held_interface),
        tuple(annotations),
        bool(graph.quantization_annotation),
    )


def orphan_names(model: ir.Model) -> frozenset[str]:
    """Names that the file uses for values that do not exist: taken, though the graph does not show them."""
    names: set[str] = set()
    roots: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in (*roots, *(inner for root in roots for inner in inner_graphs(root))):
        extras = graph.meta.get(_EXTRAS_KEY)
        if isinstance(extras, _GraphExtras):
            names.update(onnx.ValueInfoProto.FromString(info).name for info in extras.orphans)
            names.update(onnx.TensorAnnotation.FromString(item).tensor_name for item in extras.annotations)
    return frozenset(names)


def rename(model: ir.Model, names: Mapping[str, str]) -> None:
    """Let what is kept for the main graph speak of its inputs, outputs and initializers by their new ``names``."""
    extras = model.graph.meta.get(_EXTRAS_KEY)
    if isinstance(extras, _GraphExtras):
        model.graph.meta[_EXTRAS_KEY] = dataclasses.replace(
            extras,
            initializers=frozenset(names.get(name, name) for name in extras.initializers),
            interface=frozenset(names.get(name, name) for name in extras.interface),
        )


def infos(model: ir.Model) -> frozenset[str]:
    """Names of the main graph's initializers that had a value_info of their own in the file."""
    extras = model.graph.meta.get(_EXTRAS_KEY)
    return extras.initializers if isinstance(extras, _GraphExtras) else frozenset()


def add_infos(model: ir.Model, names: Iterable[str]) -> None:
    """Let the initializers ``names`` of the main graph have a value_info of their own when it is written."""
    extras = model.graph.meta.get(_EXTRAS_KEY)
    extras = extras if isinstance(extras, _GraphExtras) else _GraphExtras()
    initializers = extras.initializers | set(names)
    if initializers != extras.initializers:
        model.graph.meta[_EXTRAS_KEY] = dataclasses.replace(extras, initializers=initializers)


def set_extra_entries(tensor: ir.ExternalTensor, entries: tuple[tuple[str, str], ...]) -> None:
    """Keep external data entries such as ``checksum`` beside ``tensor``."""
    if entries:
        tensor.meta[_EXTRAS_KEY] = entries


def external_extras(tensors: Iterable[ir.ExternalTensor], found: Audit) -> None:
    """Keep entries such as ``checksum`` beside their IR tensors, which come in the order of the audit."""
    for tensor, tensor_proto in zip(tensors, found.external, strict=True):
        set_extra_entries(tensor, extra_entries(tensor_proto))


def extra_entries_of(tensor: ir.ExternalTensor) -> tuple[tuple[str, str], ...]:
    """The external data entries that were kept for ``tensor``."""
    entries = tensor.meta.get(_EXTRAS_KEY)
    return entries if isinstance(entries, tuple) else ()


def restore(model: ir.Model, proto: onnx.ModelProto, walked: Survey) -> None:
    """Make ``proto``, the plain serialisation of ``model``, say what the file said."""
    for slot in walked.graphs:
        extras = slot.graph.meta.get(_EXTRAS_KEY)
        extras = extras if isinstance(extras, _GraphExtras) else _GraphExtras()
        if slot.graph.initializers or extras != _GraphExtras():
            _restore_graph(slot.graph, slot.locate(proto), extras)
    if model.ir_version < _FUNCTION_INFO_VERSION:
        return
    for function, function_proto in zip(model.functions.values(), proto.functions, strict=True):
        extras = function.meta.get(_EXTRAS_KEY)
        if isinstance(extras, _GraphExtras):
            names = set(itertools.chain(function_proto.input, *(node.output for node in function_proto.node)))
            _append_orphans(function_proto.value_info, extras.orphans, names)


def _restore_graph(graph: ir.Graph, proto: onnx.GraphProto, extras: _GraphExtras) -> None:
    _drop_initializer_infos(graph, proto, extras.initializers)
    if extras.interface:
        for value in dict.fromkeys((*graph.inputs, *graph.outputs)):
            if value.name in extras.interface:
                # Written anew, so that it says what the graph says now.
                ir.serde.serialize_value_into(proto.value_info.add(), value)
    if extras.orphans or extras.annotations:
        names = set(itertools.chain.from_iterable(node.output for node in proto.node))
        names.update(graph.initializers, (info.name for info in proto.input))
        _append_orphans(proto.value_info, extras.orphans, names)
        for item in extras.annotations:
            annotation = onnx.TensorAnnotation.FromString(item)
            if annotation.tensor_name not in names:
                proto.quantization_annotation.append(annotation)
    if extras.annotated:
        _drop_repeated_annotations(proto)


def _append_orphans(infos: object, orphans: Iterable[bytes], names: set[str]) -> None:
    for orphan in orphans:
        info = onnx.ValueInfoProto.FromString(orphan)
        # A value of that name made since has its own type.
        if info.name not in names:
            infos.append(info)  # type: ignore[attr-defined]


def _drop_initializer_infos(graph: ir.Graph, proto: onnx.GraphProto, had_info: frozenset[str]) -> None:
    """Drop the value_info that onnx-ir writes for every initializer, and always first."""
    count = 0
    kept = []
    for info in proto.value_info:
        value = graph.initializers.get(info.name)
        if value is None:
            break
        count += 1
        if info.name in had_info or value.metadata_props or value.doc_string:
            kept.append(info.SerializeToString())
    del proto.value_info[:count]
    for info_bytes in kept:
        proto.value_info.append(onnx.ValueInfoProto.FromString(info_bytes))


def _drop_repeated_annotations(proto: onnx.GraphProto) -> None:
    """A value that is an input and an output, or two outputs, is annotated once a role by onnx-ir."""
    seen = set()
    for index in reversed(range(len(proto.quantization_annotation))):
        name = proto.quantization_annotation[index].tensor_name
        if name in seen:
            del proto.quantization_annotation[index]
        seen.add(name)
