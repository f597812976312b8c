"""A piece of a model as a small model of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from graphsurgery.equivalence.running import Model
from graphsurgery.equivalence.twins import float32_twin, holds_bfloat16

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.regions.cutting import Piece

__all__ = ["Standalone", "standalone", "widened"]

_INLINE_BYTES = 256 << 20
"""Weights of more bytes are fed instead of stored: a protobuf is limited, and a copy less is made."""

_RESULT = "graphsurgery/region"


class Standalone:
    """A piece that can be run.

    Attributes:
        model: what is opened.
        names: the values that are fed by name in the piece: cuts, shapes and graph inputs.
        weights: arrays that are fed on every run.
    """

    def __init__(self, model: Model, names: Mapping[str, ir.Value], weights: Mapping[str, Array]) -> None:
        self.model, self.names, self.weights = model, names, weights

    @property
    def result(self) -> str:
        """Name of the output."""
        return _RESULT


def standalone(piece: Piece, array: Callable[[ir.Value], Array], *, twin: bool, folder: Path) -> Standalone:
    """Make it.

    Args:
        piece: what to lift out.
        array: what an initializer holds.
        twin: let bfloat16 be float32.
        folder: an empty directory.
    """
    side = piece.side
    graph = onnx.GraphProto(name="region")
    for node in piece.nodes:
        ir.serde.serialize_node_into(graph.node.add(), node)
    graph.node.add(op_type="Identity", input=[piece.root.name or ""], output=[_RESULT])
    graph.output.add(name=_RESULT)
    names = {value.name or "": value for value in (*(item for item, _ in piece.cuts), *piece.shaped, *piece.inputs)}
    for name, value in names.items():
        graph.input.append(_declared(name, side.dtype(value), side.shapes.rank(value)))
    arrays = {value.name or "": array(value) for value in piece.weights}
    proto = onnx.ModelProto(ir_version=max(side.model.ir_version, 8), graph=graph)
    for domain, version in side.model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    if twin and (holds_bfloat16(proto) or any(held.dtype == ml_dtypes.bfloat16 for held in arrays.values())):
        proto = float32_twin(proto, folder, folder)
        arrays = {name: widened(held) for name, held in arrays.items()}
    fed: dict[str, Array] = {}
    if sum(held.nbytes for held in arrays.values()) > _INLINE_BYTES:
        for name, held in list(arrays.items()):
            if held.nbytes > _INLINE_BYTES // 256 and held.dtype.kind in "fiub":
                fed[name] = np.ascontiguousarray(arrays.pop(name))
                kind = onnx.helper.np_dtype_to_tensor_dtype(held.dtype)
                proto.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, held.shape))
    for name, held in arrays.items():
        tensor = ir.Tensor(np.ascontiguousarray(held).reshape(held.shape), name=name)
        ir.serde.serialize_tensor_into(proto.graph.initializer.add(), tensor)
    return Standalone(Model(side.path, proto), names, fed)


def _declared(name: str, dtype: ir.DataType | None, rank: int | None) -> onnx.ValueInfoProto:
    kind = int(dtype) if dtype is not None else int(ir.DataType.FLOAT)
    return onnx.helper.make_tensor_value_info(name, kind, None if rank is None else [None] * rank)


def widened(array: Array) -> Array:
    """``array`` in float32 where it is bfloat16."""
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
