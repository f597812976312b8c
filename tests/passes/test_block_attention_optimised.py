"""block-attention on graphs that ONNX Runtime's optimizer has been through: FusedMatMul as score and value product."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphsurgery.equivalence.verify import verify_models
from graphsurgery.model_io import load, save
from graphsurgery.passes.block_attention import BlockAttention
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.strategies.attentions import PLAIN, AttentionSpec, build, feeds_of

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("name", ["llama", "gpt2", "optimum_gpt_oss"])
def test_exports_behind_the_optimizer(name: str, tmp_path: Path) -> None:
    optimised, output = tmp_path / "optimised.onnx", tmp_path / "blocked.onnx"
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(optimised)
    options.log_severity_level = 4
    ort.InferenceSession(str(FIXTURES / name / "model.onnx"), options, providers=["CPUExecutionProvider"])
    model = load(optimised)
    fused = [node for node in model.graph if node.op_type == "FusedMatMul"]
    assert fused
    report = Pipeline(["block-attention{q_block_size=4}"])(model).passes[0]
    assert {site.status for site in report.sites} == {"rewritten"}
    scores = [node for node in model.graph.all_nodes() if node.op_type == "FusedMatMul" and node in fused]
    assert len(scores) < len(fused)
    save(model, output, weights="copy", force=True)
    result = verify_models(optimised, output, opt_level_check=False)
    assert result.status == "equal", result.reasons


def fused(spec: AttentionSpec, *, values: bool = False, **attributes: int) -> onnx.ModelProto:
    """The generated attention with FusedMatMul in place of its products: the scale, and the turned keys, in the first."""
    proto = build(spec)
    products = [node for node in proto.graph.node if node.op_type == "MatMul"]
    makers = {output: node for node in proto.graph.node for output in node.output}
    turn = makers[products[0].input[1]]
    assert turn.op_type == "Transpose"
    products[0].input[1] = turn.input[0]
    scale = next(node for node in proto.graph.node if node.op_type == "Mul" and products[0].output[0] in node.input)
    factor = next(item for item in proto.graph.initializer if item.name == scale.input[1])
    alpha = float(onnx.numpy_helper.to_array(factor))
    products[0].attribute.extend([onnx.helper.make_attribute("transB", 1), onnx.helper.make_attribute("alpha", alpha)])
    products[0].output[0] = scale.output[0]
    proto.graph.node.remove(scale)
    proto.graph.node.remove(turn)
    if values:
        products[1].attribute.append(onnx.helper.make_attribute("alpha", 0.5))
    for node in products[: 2 if values else 1]:
        node.op_type, node.domain = "FusedMatMul", "com.microsoft"
        node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return proto


@pytest.mark.parametrize("options", [{"q_blocks": 3}, {"q_block_size": 4}, {"q_blocks": 2, "kv_blocks": 2}], ids=str)
@pytest.mark.parametrize("values", [False, True])
def test_scale_and_turned_keys_inside_the_product(options: dict[str, Any], values: bool) -> None:
    proto = fused(PLAIN, values=values)
    model = ir.from_proto(proto)
    report = Pipeline([BlockAttention(**options)], check=True)(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten"]
    assert not [node for node in model.graph.all_nodes() if node.op_type == "FusedMatMul"]
    for length, past in ((1, 5), (9, 2)):
        feeds = feeds_of(PLAIN, 2, length, past, seed=length)
        expected, got = run(session(proto), feeds), run(session(model), feeds)
        np.testing.assert_allclose(got["attended"], expected["attended"], rtol=0, atol=2e-6)


def test_batch_axes_in_another_order_are_refused() -> None:
    spec = dataclasses.replace(PLAIN, repeats=1, mask="none")
    model = ir.from_proto(fused(spec, transBatchB=1))
    report = Pipeline([BlockAttention(q_blocks=2)])(model).passes[0]
    assert [site.status for site in report.sites] == ["refused"]
    assert "(FusedMatMul) has transBatchB, which is no layout of attention" in report.sites[0].reason
