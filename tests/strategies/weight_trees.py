"""Models whose weights are read once each, and random weight expressions over them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import onnx
import onnx_ir as ir
from hypothesis import strategies as st
from onnx import TensorProto, helper

from graphsurgery.weights import Part, Stack, Transpose, View, shape_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np

ELEMENT_TYPES = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.INT8,
    ir.DataType.UINT8,
    ir.DataType.INT4,
    ir.DataType.UINT4,
)

_NUMPY: dict[ir.DataType, Any] = {
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
    ir.DataType.INT4: ml_dtypes.int4,
    ir.DataType.UINT4: ml_dtypes.uint4,
}


def draw_array(generator: np.random.Generator, dtype: ir.DataType, shape: Sequence[int]) -> np.ndarray:
    """Small random numbers that every element type can hold."""
    low = 0 if dtype.name.startswith("U") else -8
    return generator.integers(low, 8, shape).astype(_NUMPY.get(dtype, dtype.numpy()))


def write_model(path: Path, arrays: Mapping[str, np.ndarray], *, external: bool, readers: bool = False) -> Path:
    """A model with the given weights, one behind the other in a data file if ``external``.

    Args:
        path: the .onnx to write.
        arrays: the weights by name.
        external: whether they lie in a data file.
        readers: whether each is an output through Identity.
    """
    graph = helper.make_graph(
        [helper.make_node("Relu", ["fed"], ["passed"])],
        "weights",
        [helper.make_tensor_value_info("fed", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("passed", TensorProto.FLOAT, [2])],
    )
    offset = 0
    with open(path.with_name(f"{path.name}.data"), "wb") as data:
        for name, array in arrays.items():
            tensor = ir.Tensor(array, name=name)
            content = tensor.tobytes()
            proto = TensorProto(name=name, data_type=tensor.dtype.value, dims=array.shape)
            if external:
                proto.data_location = TensorProto.EXTERNAL
                for key, text in (("location", data.name), ("offset", str(offset)), ("length", str(len(content)))):
                    proto.external_data.add(key=key, value=text.rsplit("/", 1)[-1])
                data.write(content)
                offset += len(content)
            else:
                proto.raw_data = content
            graph.initializer.append(proto)
            if readers:
                graph.node.append(helper.make_node("Identity", [name], [f"{name}/out"]))
                graph.output.append(helper.make_tensor_value_info(f"{name}/out", proto.data_type, array.shape))
    if not external:
        path.with_name(f"{path.name}.data").unlink()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path)
    return path


@st.composite
def expressions(draw: st.DrawFn, values: Sequence[ir.Value], depth: int = 3) -> Part:
    """An expression over ``values``, which have one shape, that fits together."""
    kind = draw(st.sampled_from(("source", "view", "stack", "transpose"))) if depth else "source"
    if kind == "source":
        return draw(st.sampled_from(values))
    if kind == "stack":
        if draw(st.booleans()):
            each = draw(expressions(values, depth - 1))
            return Stack(tuple(replaced(draw, each, values) for _ in range(draw(st.integers(1, 3)))))
        whole = draw(expressions(values, depth - 1))
        shape = shape_of(whole)
        if len(shape) > 1 and 0 not in shape:
            step = math.prod(shape[1:])
            return Stack(tuple(View(whole, number * step, shape[1:]) for number in range(shape[0])))
        return Stack((whole,))
    part = draw(expressions(values, depth - 1))
    if kind == "transpose":
        return Transpose(part, tuple(draw(st.permutations(range(len(shape_of(part)))))))
    return draw(views(part))


def replaced(draw: st.DrawFn, part: Part, values: Sequence[ir.Value]) -> Part:
    """``part`` over other sources."""
    if isinstance(part, View):
        return View(replaced(draw, part.source, values), part.start, part.shape)
    if isinstance(part, Stack):
        return Stack(tuple(replaced(draw, item, values) for item in part.parts))
    if isinstance(part, Transpose):
        return Transpose(replaced(draw, part.part, values), part.perm)
    return draw(st.sampled_from(values))


@st.composite
def views(draw: st.DrawFn, part: Part) -> View:
    """A view of ``part``: some rows, some elements, or all of it in another shape."""
    shape = shape_of(part)
    size = math.prod(shape)
    rows = draw(st.booleans())
    if rows and shape and size:
        first = draw(st.integers(0, shape[0] - 1))
        count = draw(st.integers(1, shape[0] - first))
        step = size // shape[0]
        return View(part, first * step, (count, *shape[1:]))
    start = draw(st.integers(0, size))
    count = draw(st.integers(0, size - start))
    factor = draw(st.sampled_from([number for number in range(1, 7) if count % number == 0]))
    return View(part, start, (factor, count // factor))
