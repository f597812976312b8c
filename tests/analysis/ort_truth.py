"""Run a model in ONNX Runtime with every value of the main graph as output, and hold inferred shapes against it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

from graphsurgery.analysis import dims
from graphsurgery.analysis.shapes import Shapes, ShapeValue

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import onnx_ir as ir

__all__ = ["Agreement", "check_against_ort", "feeds_for", "run_with_all_values", "share_unknown"]

_SIZES = {"batch": 2, "rows": 5, "past": 3}


def run_with_all_values(proto: onnx.ModelProto, folder: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What ORT (unoptimised) computes for every named value of the main graph; sequences come as lists."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = proto.graph
    del graph.value_info[:]
    names = [name for node in graph.node for name in node.output if name]
    del graph.output[:]
    graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}
    results = session.run(names, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip(names, results, strict=True))


@dataclasses.dataclass
class Agreement:
    """How the inferred shapes of a model compare with one run.

    Attributes:
        bindings: numbers of named and anonymous sizes.
        errors: one line for each disagreement.
        checked: sizes and elements that were computed and found equal.
        bound: anonymous sizes and elements that this run gave a number for the first time.
        open: those that could be neither computed nor bound.
    """

    bindings: dict[str, int]
    errors: list[str] = dataclasses.field(default_factory=list)
    checked: int = 0
    bound: int = 0
    open: int = 0

    def expect(self, what: str, inferred: dims.Dim, actual: int) -> None:
        number = dims.evaluate(inferred, self.bindings)
        if number is None:
            missing = [name for name in dims.free_names(inferred) if name not in self.bindings]
            solution = self._solve(inferred, missing[0], actual) if len(missing) == 1 else None
            if solution is not None:
                self.bindings[missing[0]] = solution
                self.bound += 1
            else:
                self.open += 1
        elif number == actual:
            self.checked += 1
        else:
            self.errors.append(f"{what}: inferred {inferred} = {number}, computed {actual}")

    def _solve(self, inferred: dims.Dim, name: str, actual: int) -> int | None:
        """The number that makes a sum of plain names, such as ``past + seq``, equal to ``actual``."""
        if not isinstance(inferred, dims.Expr):
            return None
        if any(
            len(monomial) > 1 or any(isinstance(atom, dims.Call) for atom in monomial) for monomial, _ in inferred.terms
        ):
            return None
        at_zero = dims.evaluate(inferred, {**self.bindings, name: 0})
        at_one = dims.evaluate(inferred, {**self.bindings, name: 1})
        assert at_zero is not None
        assert at_one is not None
        solution, rest = divmod(actual - at_zero, at_one - at_zero)
        return solution if rest == 0 else None

    def expect_shape(self, what: str, shape: tuple[dims.Dim, ...], actual: np.ndarray) -> None:
        if len(shape) != actual.ndim:
            self.errors.append(f"{what}: inferred {[str(size) for size in shape]}, computed {list(actual.shape)}")
            return
        for axis, (size, number) in enumerate(zip(shape, actual.shape, strict=True)):
            self.expect(f"{what} axis {axis}", size, number)

    def expect_value(self, what: str, value: ShapeValue, actual: np.ndarray) -> None:
        if value.shape != actual.shape:
            self.errors.append(f"{what}: inferred contents of shape {value.shape}, computed {actual.shape}")
            return
        for position, (item, number) in enumerate(zip(value.items, actual.reshape(-1).tolist(), strict=True)):
            self.expect(f"{what} item {position}", item, int(number))


def check_against_ort(
    model: ir.Model, proto: onnx.ModelProto, folder: Path, feeds: Mapping[str, np.ndarray]
) -> Agreement:
    """Compare every inferred size, element type and content of the main graph with what ORT computes."""
    shapes = Shapes(model)
    computed = run_with_all_values(proto, folder, feeds)
    agreement = Agreement({})
    fed = [value for value in model.graph.inputs if value.name in feeds]
    # Bare names first: another input may have a size such as past + seq.
    for bare in (True, False):
        for value in fed:
            for axis, size in enumerate(shapes.shape(value) or ()):
                if bare == (isinstance(size, int) or size.atom is not None):
                    agreement.expect(f"{value.name} axis {axis}", size, feeds[str(value.name)].shape[axis])
    for value in fed:
        contents = shapes.shape_value(value)
        if contents is not None:
            agreement.expect_value(str(value.name), contents, feeds[str(value.name)])
    for value in model.graph.initializers.values():
        shape = shapes.shape(value)
        tensor = value.const_value
        assert tensor is not None
        assert shape == tuple(tensor.shape.numpy()), value.name
    for node in model.graph:
        for value in node.outputs:
            actual = computed.get(value.name or "")
            if isinstance(actual, np.ndarray):
                _check_value(agreement, shapes, node, value, actual)
    return agreement


def _check_value(agreement: Agreement, shapes: Shapes, node: ir.Node, value: ir.Value, actual: np.ndarray) -> None:
    what = f"{node.op_type} -> {value.name}"
    shape = shapes.shape(value)
    if shape is None:
        agreement.open += 1
    else:
        agreement.expect_shape(what, shape, actual)
    contents = shapes.shape_value(value)
    if contents is not None:
        agreement.expect_value(what, contents, actual)
    dtype = shapes.dtype(value)
    # ORT hands bfloat16 and the small floats and integers to numpy as raw bits: those types are not compared.
    native = actual.dtype.kind in "fiub" and actual.dtype not in (np.uint8, np.int8, np.uint16)
    if native and dtype is not None and dtype.numpy() not in (ml_dtypes.bfloat16, actual.dtype):
        agreement.errors.append(f"{what}: inferred type {dtype.name}, computed {actual.dtype}")
    if dtype is None:
        agreement.errors.append(f"{what}: no element type inferred, computed {actual.dtype}")


def share_unknown(model: ir.Model, shapes: Shapes) -> tuple[int, int, int]:
    """(sizes, sizes that hold an anonymous unknown, values of unknown rank) over the values of the main graph."""
    total = anonymous = rankless = 0
    for node in model.graph:
        for value in node.outputs:
            shape = shapes.shape(value)
            if shape is None:
                rankless += 1
                continue
            total += len(shape)
            anonymous += sum(any(name.startswith("?") for name in dims.free_names(size)) for size in shape)
    return total, anonymous, rankless


def feeds_for(model: ir.Model, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """Small feeds for a decoder (or one of its parts), from the names and axes of its inputs.

    Args:
        model: the model.
        seed: of the random data.
        sizes: ``batch``, ``rows`` (query length) and ``past`` where the defaults are not wanted.
    """
    chosen = {**_SIZES, **sizes}
    rng = np.random.default_rng(seed)
    numbers = _symbol_sizes(model, chosen)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        if value.is_initializer() or value.shape is None:
            continue
        shape = tuple(_size(size, numbers) for size in value.shape)
        feeds[value.name or ""] = _array(value, shape, chosen, rng)
    return feeds


def _size(size: int | ir.SymbolicDimProtocol, numbers: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    parsed = dims.parse_dim(str(size.value))
    number = None if parsed is None else dims.evaluate(parsed, numbers)
    assert number is not None, f"no size chosen for {size}"
    return number


def _symbol_sizes(model: ir.Model, chosen: Mapping[str, int]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    total = chosen["past"] + chosen["rows"]
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            name = None if isinstance(size, int) else str(size.value)
            if name is None or name in numbers or not isinstance(dims.parse_dim(name), dims.Expr):
                continue
            if "kv_cache_dim" in name:
                numbers[name] = 16
            elif "total" in name:
                numbers[name] = total
            elif "cache" in str(value.name) or "past" in str(value.name) or axis == 3:
                static = any("cumulative" in str(other.name) for other in model.graph.inputs)
                numbers[name] = chosen["batch"] if axis == 0 else total + 4 if static else chosen["past"]
            elif "position_ids" in str(value.name):
                numbers[name] = chosen["rows"] if axis == len(value.shape or ()) - 1 else chosen["batch"]
            elif "deepstack" in str(value.name):
                numbers[name] = chosen["batch"] * 2
            else:
                numbers[name] = chosen["batch"] if axis == 0 else chosen["rows"]
    return numbers


def _array(value: ir.Value, shape: tuple[int, ...], chosen: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    name = value.name or ""
    dtype = value.dtype.numpy() if value.dtype is not None else np.dtype(np.float32)
    if "visual_pos_masks" in name:
        mask = np.zeros(shape, dtype=bool)
        mask[:, :2] = True
        return mask
    if "sliding_window" in name or "cumulative_length" in name:
        return np.full(shape, chosen["past"], dtype=dtype)
    if "position_ids" in name:
        return np.broadcast_to(np.arange(chosen["past"], chosen["past"] + shape[-1]), shape).astype(dtype)
    if "mask" in name or "token_type" in name:
        return (np.ones if "mask" in name else np.zeros)(shape, dtype=dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 32, shape).astype(dtype)
    return (rng.standard_normal(shape) * 0.5).astype(dtype)
