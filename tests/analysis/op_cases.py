"""Tiny graphs of a few nodes: what is inferred for them, held against what ORT computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from graphsurgery.analysis import dims
from graphsurgery.analysis.shapes import Shapes
from tests.analysis.ort_truth import check_against_ort

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Case", "Const", "Fed", "bools", "const", "floats", "ints", "verify"]

SIZES = {"B": 2, "S": 5, "P": 3, "H": 4, "E": 6, "N": 7}


@dataclasses.dataclass(frozen=True)
class Fed:
    """A graph input: its dims as text (``B S 8``) and its element type, with ``data`` where it matters."""

    dims: str
    dtype: Any
    data: np.ndarray | None = None

    def shape(self) -> list[int]:
        return [dims.evaluate(_parsed(text), SIZES) or 0 for text in self.dims.split()]

    def array(self, rng: np.random.Generator) -> np.ndarray:
        if self.data is not None:
            return self.data
        shape = self.shape()
        if self.dtype == np.bool_:
            return rng.random(shape) > 0.4
        if np.dtype(self.dtype).kind in "iu":
            return np.asarray(rng.integers(0, 2, shape), self.dtype)
        return np.asarray(rng.standard_normal(shape) * 0.5, self.dtype)


@dataclasses.dataclass(frozen=True)
class Const:
    """An inline initializer."""

    data: np.ndarray


def _parsed(text: str) -> dims.Dim:
    parsed = dims.parse_dim(text)
    assert parsed is not None
    return parsed


def floats(text: str, dtype: Any = np.float32) -> Fed:
    return Fed(text, dtype)


def ints(text: str, data: Any = None, dtype: Any = np.int64) -> Fed:
    return Fed(text, dtype, None if data is None else np.asarray(data, dtype))


def bools(text: str, data: Any = None) -> Fed:
    return Fed(text, np.bool_, None if data is None else np.asarray(data, np.bool_))


def const(data: Any, dtype: Any = np.int64) -> Const:
    return Const(np.asarray(data, dtype))


@dataclasses.dataclass(frozen=True)
class Case:
    """One node (or a few), what its outputs should be inferred to be, and how many sizes may stay unknown.

    Attributes:
        op: op name; ``domain::op`` for a contrib op.
        inputs: in order; None for an absent one.
        expect: a text for each output: sizes, ``?`` for an unknown; ``-`` for an output not wanted.
        attrs: attributes of the node.
        opset: of the standard domain.
        contents: expected symbolic contents of the first output, as text.
    """

    op: str
    inputs: Sequence[Fed | Const | None]
    expect: Sequence[str]
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    opset: int = 20
    contents: str | None = None
    runs: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{self.opset}-{'/'.join(self.expect)}"


def verify(case: Case) -> None:
    """Infer, compare with the expectation, then with ORT on data drawn once."""
    domain, _, op = case.op.rpartition("::")
    names = ["" if given is None else f"in{position}" for position, given in enumerate(case.inputs)]
    outputs = [f"out{position}" if text != "-" else "" for position, text in enumerate(case.expect)]
    node = onnx.helper.make_node(op, names, outputs, domain=domain, name="node", **case.attrs)
    given = {name: value for name, value in zip(names, case.inputs, strict=True) if value is not None}
    proto = model_of([node], given, outputs, case.opset)
    model = ir.from_proto(proto)
    shapes = Shapes(model)
    by_name = {value.name: value for value in model.graph.node(0).outputs}
    for name, expected in zip(outputs, case.expect, strict=True):
        if not name:
            continue
        shape = shapes.shape(by_name[name])
        assert shape is not None, f"{name}: rank unknown"
        assert " ".join(_shown(size) for size in shape) == expected, name
    if case.contents is not None:
        assert str(shapes.shape_value(by_name[outputs[0]])) == case.contents
    if case.runs:
        rng = np.random.default_rng(7)
        feeds = {name: value.array(rng) for name, value in given.items() if isinstance(value, Fed)}
        agreement = check_against_ort(model, proto, Path(), feeds)
        assert agreement.errors == []
        assert agreement.open == 0


def _shown(size: dims.Dim) -> str:
    atom = size.atom if isinstance(size, dims.Expr) else None
    return "?" if isinstance(atom, dims.Unknown) else str(size).replace(" ", "")


def model_of(
    nodes: Sequence[onnx.NodeProto], given: Mapping[str, Fed | Const], outputs: Sequence[str], opset: int = 20
) -> onnx.ModelProto:
    """A model of ``nodes`` whose inputs have the dims, and whose initializers the data, of ``given``."""
    inputs = [
        onnx.helper.make_tensor_value_info(
            name,
            onnx.helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype)),
            [_declared(text) for text in value.dims.split()],
        )
        for name, value in given.items()
        if isinstance(value, Fed)
    ]
    initializers = [
        onnx.numpy_helper.from_array(value.data, name) for name, value in given.items() if isinstance(value, Const)
    ]
    graph = onnx.helper.make_graph(
        list(nodes),
        "case",
        inputs,
        [onnx.helper.make_empty_tensor_value_info(name) for name in outputs if name],
        initializers,
    )
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _declared(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
