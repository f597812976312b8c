"""bound-context and local functions: layers that are extracted afterwards stay bounded, inside their bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.errors import UsageError
from graphsurgery.model_io import load
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.passes.test_bound_context import A08, LLAMA, close, fed

if TYPE_CHECKING:
    from pathlib import Path


def return_scores(model: ir.Model) -> list[str]:
    """Let every call of a function with a softmax return the product of queries and keys inside; their names."""
    found: list[str] = []
    for function in model.functions.values():
        softmax = next((node for node in function if node.op_type == "Softmax"), None)
        if softmax is None:
            continue
        value = softmax.inputs[0]
        while value is not None and (maker := value.producer()) is not None and maker.op_type != "MatMul":
            value = maker.inputs[0]
        assert value is not None
        function.outputs.append(value)
        calls = [node for node in model.graph if node.op_identifier() == function.identifier()]
        for call in calls:
            call.resize_outputs(len(function.outputs))
            output = call.outputs[-1]
            output.name, output.type = f"scores_{len(found)}", ir.TensorType(ir.DataType.FLOAT)
            model.graph.outputs.append(output)
            found.append(output.name)
    return found


@pytest.mark.parametrize(("path", "slots", "layers"), [(LLAMA, 20, 3), (A08, 16, 2)], ids=["llama_static", "a08"])
def test_the_scores_inside_functions_have_so_many_columns(path: Path, slots: int, layers: int) -> None:
    model = load(path)
    reports = Pipeline(["bound-context", "extract-functions"], check=True)(model).passes
    assert [report.count("rewritten") for report in reports] == [layers, 1]
    assert len(model.functions) == 1
    scores = return_scores(model)
    assert len(scores) == layers
    before, after = session(load(path)), session(model)
    for length, past, bound in ((1, 0, 1), (5, 0, 6), (3, 4, 9), (1, 9, slots)):
        feeds = fed(path, slots, length, past)
        found = run(after, feeds | {"comp_ctx_lengths": np.zeros(bound, np.int64)})
        close(run(before, feeds), found)
        assert [found[name].shape[-1] for name in scores] == [bound] * layers


def test_a_bound_from_positions_inside_functions() -> None:
    model = load(LLAMA)
    Pipeline(["bound-context{source=positions,multiple=4}", "extract-functions"], check=True)(model)
    scores = return_scores(model)
    feeds = fed(LLAMA, 20, 2, 5)
    found = run(session(model), feeds)
    close(run(session(load(LLAMA)), feeds), found)
    assert [found[name].shape[-1] for name in scores] == [8] * 3


def test_functions_first_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="extract-functions must run after bound-context"):
        Pipeline(["extract-functions", "bound-context"])
    model = load(LLAMA)
    Pipeline(["extract-functions"], check=True)(model)
    report = Pipeline(["bound-context"], check=True)(model).passes[0]
    assert report.sites
    for site in report.sites:
        assert site.status == "refused"
        assert "inside function" in site.reason or "inside a function" in site.reason
