"""Types and shapes that a file declares for what its nodes make, each distinct one read once.

Of the tens of thousands that a large model declares only a few dozen differ, and onnx-ir reads each of them anew, which
takes a third of the time in which it reads the model. They are taken out of the protobuf before, and given to the values
after; shapes are frozen, so that values may share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DeclaredTypes"]


class DeclaredTypes:
    """What the main graph of a model declares of types and shapes, as far as nothing else is said of the same value.

    Args:
        proto: the model; what is taken out of it comes back with :meth:`give_to`.
        encoded: for each value_info of its main graph the serialised type.
    """

    def __init__(self, proto: onnx.ModelProto, encoded: Sequence[bytes]) -> None:
        self._graph = proto.graph
        self._infos = list(proto.graph.value_info)
        self._types: dict[str, tuple[ir.Shape | None, ir.DataType]] = {}
        # Before IR version 10 the main graph speaks of values of functions too.
        if not self._infos or proto.functions:
            return
        read: dict[bytes, tuple[ir.Shape | None, ir.DataType] | None] = {}
        graph = proto.graph
        left = {item.name for items in (graph.input, graph.output, graph.initializer) for item in items}
        for info, text in zip(self._infos, encoded, strict=True):
            if text not in read:
                read[text] = _plain(text)
            found = read[text]
            name = info.name
            if found is None or info.metadata_props or info.HasField("doc_string") or not isinstance(name, str):
                left.add(name)
            else:
                self._types[name] = found
        for name in left:
            self._types.pop(name, None)
        if self._types:
            self._keep([info for info in self._infos if info.name not in self._types])

    def give_to(self, model: ir.Model) -> None:
        """Declare the types of the values of ``model``; what it has no value for is in the protobuf again."""
        types = self._types
        if not types:
            return
        met = set()
        for node in model.graph:
            for value in node.outputs:
                name = value.name
                found = types.get(name) if name else None
                if name and found is not None:
                    value.shape, dtype = found
                    value.type = ir.TensorType(dtype)
                    met.add(name)
        self._keep([info for info in self._infos if info.name not in met])

    def _keep(self, infos: Sequence[onnx.ValueInfoProto]) -> None:
        del self._graph.value_info[:]
        self._graph.value_info.extend(infos)


def _plain(text: bytes) -> tuple[ir.Shape | None, ir.DataType] | None:
    """Shape and element type of a tensor of which no more is said; None for anything else."""
    proto = onnx.TypeProto.FromString(text)
    if not proto.HasField("tensor_type") or proto.HasField("denotation"):
        return None
    if any(dim.HasField("denotation") for dim in proto.tensor_type.shape.dim):
        return None
    kind = ir.serde.deserialize_type_proto_for_type(proto)
    return None if kind is None else (ir.serde.deserialize_type_proto_for_shape(proto), kind.dtype)
