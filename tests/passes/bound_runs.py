"""Running an export and what bind-dims made of it on the same inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from graphsurgery.equivalence.feeds import make_feeds
from graphsurgery.equivalence.signature import read_signature
from graphsurgery.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.site_report import PassReport

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


def proto_of(model: ir.Model) -> onnx.ModelProto:
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto


def run(model: ir.Model | onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """All outputs, without graph optimisations, on one thread."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    proto = model if isinstance(model, onnx.ModelProto) else proto_of(model)
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    return dict(
        zip(
            names,
            session.run(names, {name: array for name, array in feeds.items() if name in wanted}),
            strict=True,
        )
    )


def bind(model: ir.Model, spec: str) -> PassReport:
    """Run ``bind-dims{spec}`` on ``model``, with the invariants checked."""
    return Pipeline([f"bind-dims{{{spec}}}"], check=True)(model).passes[0]


def random_feeds(model: ir.Model, sizes: Mapping[str, int]) -> Arrays:
    """Small random arrays for every input; ``sizes`` of what is symbolic."""
    random = np.random.default_rng(7)
    feeds: Arrays = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        shape = [size if isinstance(size, int) else sizes[str(size.value)] for size in value.shape]
        if value.dtype == ir.DataType.INT64:
            feeds[value.name or ""] = random.integers(0, 4, shape)
        else:
            feeds[value.name or ""] = random.standard_normal(shape).astype(np.float32)
    return feeds


def assert_same(reference: ir.Model | onnx.ModelProto, bound: ir.Model, feeds: Mapping[str, np.ndarray]) -> None:
    """Every output is bitwise equal and has the shape that ``bound`` declares."""
    ours, theirs = run(reference, feeds), run(bound, feeds)
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        assert array.shape == theirs[name].shape, name
        assert array.tobytes() == theirs[name].tobytes(), name
    for value in bound.graph.outputs:
        declared = [size if isinstance(size, int) else None for size in value.shape or ()]
        actual = theirs[value.name or ""].shape
        assert len(declared) == len(actual)
        assert all(size in (None, number) for size, number in zip(declared, actual, strict=True)), value.name


def drawn_feeds(bound: ir.Model, count: int, seed: int = 0) -> list[Arrays]:
    """Inputs as the verifier draws them, for the sizes that ``bound`` fixes."""
    feeds, _ = make_feeds(read_signature(proto_of(bound)), seed)
    return [feed.build() for feed in feeds[:count]]


def shape_nodes(model: ir.Model) -> list[str | None]:
    """The outputs of Shape and Size nodes, wherever they are."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    return [node.outputs[0].name for graph in graphs for node in graph.all_nodes() if node.op_type in ("Shape", "Size")]


def dims_of(value: ir.Value) -> list[int | str | None]:
    """The declared sizes."""
    assert value.shape is not None
    return [size if isinstance(size, int) else size.value for size in value.shape]


def is_static(value: ir.Value) -> bool:
    """Whether the declared shape holds numbers only."""
    return value.shape is not None and all(isinstance(size, int) for size in value.shape)
