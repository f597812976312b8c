"""Running models from memory in ONNX Runtime, and holding a pruned one to its contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as binding

from graphsurgery.contracts import read_contracts
from graphsurgery.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphsurgery.pass_base import Pass
    from graphsurgery.site_report import SiteReport

__all__ = ["REFUSALS", "Arrays", "assert_pruned_equal", "prune", "run", "session", "tolerance_of"]

Arrays = dict[str, Any]

REFUSALS = tuple(kind for kind in vars(binding).values() if isinstance(kind, type) and issubclass(kind, Exception))
"""What ONNX Runtime raises for a model or feeds that it does not take; they have no base of their own."""


def session(model: onnx.ModelProto | ir.Model, folder: Path | None = None) -> ort.InferenceSession:
    """A session without graph optimisations, on one thread; ``folder`` is where external data lies."""
    proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(opened: ort.InferenceSession, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """All outputs by name; feeds that the model does not take are left out."""
    taken = {value.name for value in (*opened.get_inputs(), *opened.get_overridable_initializers())}
    values = opened.run(None, {name: array for name, array in feeds.items() if name in taken})
    return {value.name: array for value, array in zip(opened.get_outputs(), values, strict=True)}


def prune(model: ir.Model, pass_: Pass) -> list[SiteReport]:
    """Run one pass with the invariants of the model checked; what happened to each site."""
    report = Pipeline([pass_], check=True)(model)
    return report.passes[0].sites


def tolerance_of(array: np.ndarray) -> float:
    return 2e-3 if array.dtype == np.float16 else 1e-5


def assert_pruned_equal(
    before: ort.InferenceSession,
    after: ort.InferenceSession,
    pruned: ir.Model,
    feeds: Sequence[Arrays],
    *,
    lenient: bool = False,
    seed: int = 0,
    written: Sequence[Mapping[str, int]] = (),
) -> None:
    """Pruned outputs are the wanted rows of the full ones, declared so; every other output is bitwise equal.

    Args:
        before: the model as it was.
        after: the pruned one.
        pruned: the same, for its contracts and declared shapes.
        feeds: for the model as it was; an index that is fed at run time is drawn.
        lenient: half precision computes inside, whatever the outputs are declared as.
        seed: of that index.
        written: for each feed, outputs ``[B, G, W, D]`` of which only so many of the W slots hold something.
    """
    contracts = {contract.output: contract for contract in read_contracts(pruned)}
    declared = {value.name: value for value in pruned.graph.outputs}
    rng = np.random.default_rng(seed)
    for number, given in enumerate(feeds):
        fed = dict(given)
        slots = written[number] if written else {}
        for contract in contracts.values():
            if contract.index == "runtime" and contract.source not in fed:
                fed[contract.source or ""] = _runtime_rows(pruned, contract.source, fed[contract.sequence], rng)
        reference, result = run(before, fed), run(after, fed)
        assert list(result) == list(reference)
        for name, whole in reference.items():
            held = contracts.get(name)
            if held is None:
                if name in slots:
                    whole, result[name] = whole[:, :, : slots[name]], result[name][:, :, : slots[name]]
                assert np.array_equal(result[name], whole, equal_nan=True), f"{name} changed"
                continue
            wanted = held.apply(whole, fed)
            assert result[name].shape == wanted.shape, name
            _assert_declared(declared[name], result[name].shape)
            bound = 2e-3 if lenient else tolerance_of(whole)
            scale = max(1.0, float(np.nanmax(np.abs(whole[np.isfinite(whole)]), initial=0.0)))
            np.testing.assert_allclose(
                result[name].astype(np.float64), wanted.astype(np.float64), rtol=0, atol=bound * scale, err_msg=name
            )


def _runtime_rows(model: ir.Model, name: str | None, sequence: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    value = next(value for value in model.graph.inputs if value.name == name)
    assert value.dtype is not None
    assert value.shape is not None
    packed = sequence.ndim - (sequence.dtype.kind == "f") == 1
    batch, length = (2, sequence.shape[0]) if packed else sequence.shape[:2]
    rows = rng.integers(0, length, (batch,)).astype(value.dtype.numpy())
    return rows.reshape(batch, 1, 1) if len(value.shape) == 3 else rows


def _assert_declared(value: ir.Value, shape: tuple[int, ...]) -> None:
    """The shape that an output declares allows ``shape``, and is a number wherever the pass knows one."""
    assert value.shape is not None, f"{value.name} declares no shape"
    assert len(value.shape) == len(shape)
    for size, actual in zip(value.shape, shape, strict=True):
        assert not isinstance(size, int) or size == actual, f"{value.name} declares {value.shape}, has {shape}"
