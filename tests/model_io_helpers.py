"""Small models with external data, protobufs in a comparable form, and bytes read without any ONNX library."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphsurgery.errors import InputRefusedError
from graphsurgery.model_io import load

REPOSITORY = Path(__file__).parents[1]
CASES = REPOSITORY / "tests" / "cases"
FIXTURES = REPOSITORY / "fixtures"


@dataclasses.dataclass(frozen=True)
class Weight:
    """An initializer, its place in a data file, and whether offset and length are stated."""

    name: str
    location: str
    offset: int
    dims: tuple[int, ...]
    data_type: int = TensorProto.FLOAT
    state_offset: bool = True
    state_length: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.dims) * int(helper.tensor_dtype_to_np_dtype(self.data_type).itemsize)


def external_tensor(weight: Weight, **extra: str) -> TensorProto:
    tensor = TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": weight.location}
    if weight.state_offset:
        entries["offset"] = str(weight.offset)
    if weight.state_length:
        entries["length"] = str(weight.nbytes)
    for key, value in {**entries, **extra}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def add_model(initializers: list[TensorProto], rows: int = 4, **graph_fields: Any) -> onnx.ModelProto:
    """x [rows] plus every initializer, one Add after the other; the output is ``logits``."""
    nodes, value = [], "x"
    for number, tensor in enumerate(initializers):
        result = "logits" if number == len(initializers) - 1 else f"sum_{number}"
        nodes.append(helper.make_node("Add", [value, tensor.name], [result], name=f"add_{number}"))
        value = result
    if not nodes:
        nodes.append(helper.make_node("Identity", ["x"], ["logits"], name="same"))
    graph = helper.make_graph(
        nodes,
        "adds",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [rows])],
        initializers,
        **graph_fields,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write_model(
    directory: Path, weights: int = 3, rows: int = 4, name: str = "model.onnx", data: str | None = None
) -> Path:
    """A model of ``weights`` external float vectors of ``rows`` elements, all different, in one data file."""
    directory.mkdir(parents=True, exist_ok=True)
    location = data or f"{name}.data"
    values = np.arange(weights * rows, dtype=np.float32)
    (directory / location).parent.mkdir(parents=True, exist_ok=True)
    (directory / location).write_bytes(values.tobytes())
    tensors = [external_tensor(Weight(f"w{i}", location, 4 * rows * i, (rows,))) for i in range(weights)]
    path = directory / name
    path.write_bytes(add_model(tensors, rows).SerializeToString())
    return path


def read_proto(path: Path) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(path.read_bytes())


def entries_of(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """The bytes of every external tensor of the model at ``path``, by name, read by hand."""
    return dict(tensor_byte_list(path))


def tensor_byte_list(path: Path) -> list[tuple[str, bytes]]:
    """Name and bytes of every external tensor, in the order of the protobuf, names that occur twice included."""
    tensors = all_tensors(read_proto(path))
    external = [tensor for tensor in tensors if tensor.data_location == TensorProto.EXTERNAL]
    return [(tensor.name, _bytes_of(tensor, path.parent)) for tensor in external]


def _bytes_of(tensor: TensorProto, directory: Path) -> bytes:
    entries = entries_of(tensor)
    itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    length = int(entries.get("length", int(np.prod(tensor.dims, dtype=np.int64)) * itemsize))
    if not length:
        return b""
    with open(directory / entries["location"], "rb") as file:
        file.seek(int(entries.get("offset", 0)))
        data = file.read(length)
    assert len(data) == length
    return data


def all_tensors(message: Any) -> list[TensorProto]:
    if isinstance(message, TensorProto):
        return [message]
    found = []
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if field.is_repeated else (value,):
                found += all_tensors(item)
    return found


_SORT_KEYS = {
    "value_info": lambda item: item.name,
    "metadata_props": lambda item: item.key,
    "external_data": lambda item: item.key,
    "quantization_annotation": lambda item: item.tensor_name,
    "quant_parameter_tensor_names": lambda item: item.key,
}


def canonical(message: Any) -> Any:
    """Nested tuples that are equal where two protobufs say the same: default values and the order of maps do not count."""
    fields = []
    for field, value in message.ListFields():
        name = field.name
        if field.is_repeated:
            if name in _SORT_KEYS:
                value = sorted(value, key=_SORT_KEYS[name])
            items = list(value) if field.message_type is None else [canonical(item) for item in value]
            if name == "output" and field.message_type is None:
                while items and items[-1] == "":
                    items.pop()
            if items:
                fields.append((name, tuple(items)))
        elif field.message_type is not None:
            fields.append((name, canonical(value)))
        elif value != field.default_value:
            fields.append((name, value))
    return tuple(fields)


def refusal(path: Path, file: str | None = None) -> str:
    with pytest.raises(InputRefusedError) as caught:
        load(path, file=file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def files_below(directory: Path) -> dict[str, bytes | str]:
    """Every file below ``directory``; links as what they point to."""
    return {
        path.relative_to(directory).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def run_saved(path: Path, rows: int = 4) -> np.ndarray:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": np.zeros(rows, np.float32)})
    return np.asarray(logits)
