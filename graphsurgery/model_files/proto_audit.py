"""One walk over a parsed model: unsafe locations, and everything that the IR would lose on a round trip.

What the IR cannot hold is either *kept* beside it (value_info of values that do not exist, extra keys of external
tensors; see :class:`GraphExtras`) or *refused*; nothing is lost silently.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_files.locations import unsafe_location
from graphsurgery.model_files.tensor_sizes import tensor_is_whole
from graphsurgery.model_files.unknown_fields import discard_unknown_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Audit", "audit", "extra_entries"]

_ATTRIBUTE = onnx.AttributeProto
_TENSOR_KINDS = frozenset({_ATTRIBUTE.TENSOR, _ATTRIBUTE.TENSORS})
_GRAPH_KINDS = frozenset({_ATTRIBUTE.GRAPH, _ATTRIBUTE.GRAPHS})
_SPARSE_KINDS = frozenset({_ATTRIBUTE.SPARSE_TENSOR, _ATTRIBUTE.SPARSE_TENSORS})
_HELD_TYPES = frozenset({"tensor_type", "sparse_tensor_type", "sequence_type", "optional_type", None})
_DEVICES_VERSION = 11  # IR version from which nodes may be placed on devices
_ELEMENT_TYPES = frozenset(int(kind) for kind in ir.DataType) - {int(ir.DataType.UNDEFINED)}
_IR_EXTERNAL_KEYS = frozenset({"location", "offset", "length"})


@dataclasses.dataclass
class Audit:
    """What the walk found.

    Attributes:
        external: the external tensors in the order of ``_tensor_slots.survey``: per graph its initializers, then its
            nodes' attributes with the subgraphs in place; then the functions.
        nested_external: how many of them are not initializers of the main graph.
        with_metadata: inline tensors that carry metadata.
        graphs: every graph, the main one first, in the same order.
        types: for each value_info of the main graph its serialised type.
    """

    path: Path
    external: list[onnx.TensorProto] = dataclasses.field(default_factory=list)
    nested_external: int = 0
    with_metadata: list[onnx.TensorProto] = dataclasses.field(default_factory=list)
    graphs: list[onnx.GraphProto] = dataclasses.field(default_factory=list)
    types: list[bytes] = dataclasses.field(default_factory=list)

    def refuse(self, what: str, remedy: str) -> InputRefusedError:
        """The error for something in this file that cannot be kept."""
        return InputRefusedError(f"{self.path}: {what}; {remedy}.")


def audit(proto: onnx.ModelProto, path: Path) -> Audit:
    """Walk ``proto``.

    Raises:
        InputRefusedError: a location is unsafe, or the model holds what the IR cannot represent.
    """
    found = Audit(path)
    try:
        _audit_model(found, proto)
    except (UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise found.refuse(f"the file is damaged ({error})", "fetch or export it again") from error
    return found


def _audit_model(found: Audit, proto: onnx.ModelProto) -> None:
    _audit_graph(found, proto.graph, nested=False)
    for function in proto.functions:
        _audit_nodes(found, function.node)
        _audit_attributes(found, function.attribute_proto, f"function {function.name!r}")
        _audit_types(found, function.value_info)
        _refuse_twins(found, (*function.attribute, *(item.name for item in function.attribute_proto)), "attributes")
    identities = [(function.domain, function.name, function.overload) for function in proto.functions]
    _refuse_twins(found, identities, "functions")
    for imports in (proto.opset_import, *(function.opset_import for function in proto.functions)):
        _merge_default_domain(imports)
        _refuse_twins(found, [entry.domain for entry in imports], "imports of the operator set")
    if proto.training_info:
        raise found.refuse("it holds training information, which would be lost", "export it for inference")
    if proto.configuration and proto.ir_version < _DEVICES_VERSION:
        what = f"it places nodes on devices, which IR version {proto.ir_version} does not have"
        raise found.refuse(what, "re-export it for one device")
    if discard_unknown_fields(proto):
        raise found.refuse(
            f"it holds fields that onnx {onnx.__version__} does not know", "upgrade onnx, or re-export it"
        )


def _merge_default_domain(imports: object) -> None:
    """Spell the default operator set ``""``: ``ai.onnx`` is its other name, and the IR renames nodes but not imports."""
    for entry in imports:  # type: ignore[attr-defined]
        if entry.domain == "ai.onnx":
            entry.domain = ""


def _audit_graph(found: Audit, graph: onnx.GraphProto, *, nested: bool) -> None:
    found.graphs.append(graph)
    for tensor in graph.initializer:
        if not tensor.name:
            raise found.refuse(f"graph {graph.name!r} has an initializer without a name", "re-export it")
    _refuse_twins(found, [tensor.name for tensor in graph.initializer], "initializers")
    for tensor in graph.initializer:
        _audit_tensor(found, tensor, tensor.name, nested=nested)
    for sparse in graph.sparse_initializer:
        _refuse_sparse(found, sparse)
    for infos in (graph.input, graph.output):
        _audit_types(found, infos)
    types = _audit_types(found, graph.value_info)
    if not nested:
        found.types = types
    _refuse_twins(found, [info.name for info in graph.input], "inputs")
    _audit_nodes(found, graph.node)


def _audit_nodes(found: Audit, nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        attributes = node.attribute
        if attributes:
            _audit_attributes(found, attributes, node)


def _audit_attributes(found: Audit, attributes: Sequence[onnx.AttributeProto], owner: onnx.NodeProto | str) -> None:
    for attribute in attributes:
        kind = attribute.type
        if kind in _TENSOR_KINDS:
            for tensor in (attribute.t,) if kind == _ATTRIBUTE.TENSOR else attribute.tensors:
                if not attribute.ref_attr_name:
                    _audit_tensor(found, tensor, tensor.name or f"{attribute.name} of {_call(owner)}", nested=True)
        elif kind in _GRAPH_KINDS:
            for graph in (attribute.g,) if kind == _ATTRIBUTE.GRAPH else attribute.graphs:
                if not attribute.ref_attr_name:
                    _audit_graph(found, graph, nested=True)
        elif kind in _SPARSE_KINDS:
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                _refuse_sparse(found, sparse)
        elif not kind and not attribute.ref_attr_name:
            what = f"attribute {attribute.name!r} of {_call(owner)} has no type"
            raise found.refuse(what, "re-export it with a current exporter")
    if len(attributes) > 1 and len({attribute.name for attribute in attributes}) != len(attributes):
        raise found.refuse(f"{_call(owner)} has two attributes of one name", "the file is damaged: export it again")


def _audit_tensor(found: Audit, tensor: onnx.TensorProto, name: str, *, nested: bool) -> None:
    if tensor.HasField("segment"):
        raise found.refuse(f"tensor {name!r} is stored in segments, which nothing reads", "re-export it")
    if tensor.data_type not in _ELEMENT_TYPES:
        raise found.refuse(f"tensor {name!r} has the unknown element type {tensor.data_type}", "re-export it")
    if any(dim < 0 for dim in tensor.dims):
        raise found.refuse(f"tensor {name!r} has a negative dimension", "re-export it")
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        if tensor.metadata_props:
            found.with_metadata.append(tensor)
        if not tensor_is_whole(tensor):
            what = f"the bytes of tensor {name!r} are not as many as its shape {list(tensor.dims)} asks for"
            raise found.refuse(what, "the file is damaged: export it again")
        return
    found.external.append(tensor)
    found.nested_external += nested
    _check_external(found, tensor, name)


def _check_external(found: Audit, tensor: onnx.TensorProto, name: str) -> None:
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in entries:
            raise found.refuse(f"external tensor {name!r} states its {entry.key} twice", "re-export it")
        entries[entry.key] = entry.value
    location = entries.get("location", "")
    reason = unsafe_location(location)
    if reason is not None:
        remedy = "move the data beside the model and re-export it with a relative location"
        raise found.refuse(f"the external data location {location!r} of tensor {name!r} {reason}", remedy)
    if location == found.path.name:
        raise found.refuse(f"tensor {name!r} takes its data from the model file itself", "re-export it")
    for key in ("offset", "length"):
        text = entries.get(key)
        if text is not None and not (text.isascii() and text.isdigit() and len(text) < 20):
            raise found.refuse(f"external tensor {name!r} has the {key} {text!r}, not a byte count", "re-export it")
    if tensor.data_type == onnx.TensorProto.STRING:
        raise found.refuse(f"external tensor {name!r} holds strings, which must be inline", "re-export it")
    # A tensor that is both cannot be told apart from one that is half written.
    if tensor.raw_data or tensor.float_data or tensor.int32_data or tensor.int64_data:
        raise found.refuse(f"tensor {name!r} has its data both inline and external", "re-export it")


def extra_entries(tensor: onnx.TensorProto) -> tuple[tuple[str, str], ...]:
    """The external data entries that the IR does not hold, such as ``checksum``."""
    entries = tensor.external_data
    if len(entries) <= len(_IR_EXTERNAL_KEYS) and all(entry.key in _IR_EXTERNAL_KEYS for entry in entries):
        return ()
    return tuple((entry.key, entry.value) for entry in entries if entry.key not in _IR_EXTERNAL_KEYS)


def _refuse_sparse(found: Audit, sparse: onnx.SparseTensorProto) -> None:
    name = sparse.values.name or sparse.indices.name
    for tensor in (sparse.values, sparse.indices):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external(found, tensor, tensor.name or name)
    raise found.refuse(f"tensor {name!r} is sparse, which is not supported", "re-export it with dense weights")


def _audit_types(found: Audit, infos: Iterable[onnx.ValueInfoProto]) -> list[bytes]:
    """Check the types of ``infos``, each distinct one once; how they are serialised."""
    good: set[bytes] = set()
    types = []
    for info in infos:
        declared = info.type
        text = declared.SerializeToString()
        if text not in good:
            _audit_type(found, info.name, declared)
            text = declared.SerializeToString()
            good.add(text)
        types.append(text)
    return types


def _audit_type(found: Audit, name: str, declared: onnx.TypeProto) -> None:
    kind = declared.WhichOneof("value")
    if kind == "tensor_type":
        tensor_type = declared.tensor_type
        if not tensor_type.HasField("elem_type"):
            # Spelled out, since the IR drops the shape of a tensor whose element type is not stated.
            tensor_type.elem_type = onnx.TensorProto.UNDEFINED
    elif kind not in _HELD_TYPES:
        what = f"value {name!r} is a {kind.removesuffix('_type')}, which is not supported"
        raise found.refuse(what, "export the model without it (scikit-learn: the option zipmap=False)")


def _refuse_twins(found: Audit, names: Sequence[object], what: str) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise found.refuse(f"it has two {what} named {name!r}", "the file is damaged: export it again")
        seen.add(name)


def _call(owner: onnx.NodeProto | str) -> str:
    if isinstance(owner, str):
        return owner
    return f"node {owner.name!r} ({owner.op_type})"
