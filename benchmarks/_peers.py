"""Other tools, each as a function from file to file; what is heavy is imported before the clock starts.

A task returns ``seconds`` (load and save included), ``cpu``, ``peak`` bytes of the process, and ``nodes`` of the result.
"""

from __future__ import annotations

import gc
import runpy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from graphsurgery.benching.memory import read_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["OURS", "PACKAGES", "PEERS", "TASKS", "floor", "ours"]

OURS = ("prefill", "decode", "unified")

PACKAGES = {
    "transformers fuse_for_onnxruntime": "transformers",
    "onnxslim": "onnxslim",
    "onnxsim": "onnxsim",
    "ORT transformers optimizer": "onnxruntime",
    "onnxscript optimizer": "onnxscript",
    "ORT GenAI builder": "onnxruntime-genai",
}
"""The package of each tool."""


def _clocked(work: Callable[[], object], output: str) -> dict[str, float]:
    gc.collect()
    started, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, used = time.perf_counter() - started, time.process_time() - cpu
    return {"seconds": seconds, "cpu": used, "peak": read_memory().peak or 0, "nodes": _nodes(output)}


def _nodes(path: str) -> int:
    import onnx_ir as ir

    return len(ir.load(path).graph)


def _data(output: str) -> str:
    return f"{Path(output).name}.data"


def floor(model: str, output: str) -> dict[str, float]:
    """onnx-ir alone: the file loaded and saved, its data file shared."""
    import onnx_ir as ir

    return _clocked(lambda: ir.save(ir.load(model), output), output)


def ours(model: str, output: str, recipe: str) -> dict[str, float]:
    """This project, one recipe."""
    from graphsurgery import Pipeline
    from graphsurgery.workflow import ApplyRequest, apply_passes

    Pipeline.from_recipe(recipe)
    request = ApplyRequest(input=Path(model), output=Path(output), recipe=recipe, force=True)
    return _clocked(lambda: apply_passes(request), output)


def fuse_for_onnxruntime(model: str, output: str) -> dict[str, float]:
    """What transformers' exporter does when it is told that the graph is for ONNX Runtime's CPU provider."""
    import onnx_ir as ir
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime as fuse

    def work() -> None:
        loaded = ir.load(model)
        fuse(loaded, "cpu")
        ir.save(loaded, output, external_data=_data(output))

    return _clocked(work, output)


def onnxslim(model: str, output: str) -> dict[str, float]:
    """Run onnxslim with its defaults."""
    import onnxslim as tool

    return _clocked(lambda: tool.slim(model, output, save_as_external_data=True), output)


def onnxsim(model: str, output: str) -> dict[str, float]:
    """onnx-simplifier with its defaults; its own check is off."""
    import onnx
    import onnxsim as tool

    def work() -> None:
        simplified, _ = tool.simplify(model)
        onnx.save(simplified, output, save_as_external_data=True, location=_data(output))

    return _clocked(work, output)


def ort_transformers(model: str, output: str) -> dict[str, float]:
    """ONNX Runtime's transformers optimizer with the fusions that it has for decoders of this kind."""
    from onnxruntime.transformers.optimizer import optimize_model

    def work() -> None:
        # Heads and width are read from the graph where they are not told.
        optimized = optimize_model(model, model_type="qwen3", num_heads=0, hidden_size=0, opt_level=0)
        optimized.save_model_to_file(output, use_external_data_format=True)

    return _clocked(work, output)


def onnxscript(model: str, output: str) -> dict[str, float]:
    """Run onnxscript's optimizer with its defaults."""
    import onnx_ir as ir
    from onnxscript import optimizer

    def work() -> None:
        loaded = ir.load(model)
        optimizer.optimize(loaded)
        ir.save(loaded, output, external_data=_data(output))

    return _clocked(work, output)


def genai_builder(checkpoint: str, output: str) -> dict[str, float]:
    """ONNX Runtime GenAI's builder, which starts from a checkpoint: its time is that of an export."""
    import onnxruntime_genai.models.builder  # noqa: F401 - before the clock starts

    folder = Path(output).parent
    arguments = ["builder", "-i", checkpoint, "-o", str(folder), "-p", "fp32", "-e", "cpu", "-c", str(folder / "cache")]
    arguments += ["--extra_options", "prune_lm_head=true"]  # as the recipe does

    def work() -> None:
        # Its command line prepares what its functions need.
        sys.argv[:] = arguments
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")

    return _clocked(work, output)


TASKS: dict[str, Callable[..., Mapping[str, float]]] = {
    task.__name__: task
    for task in (
        floor,
        ours,
        fuse_for_onnxruntime,
        onnxslim,
        onnxsim,
        ort_transformers,
        onnxscript,
        genai_builder,
    )
}

PEERS = dict(zip(PACKAGES, list(TASKS)[2:], strict=True))
"""Names for the tables, and tasks."""
