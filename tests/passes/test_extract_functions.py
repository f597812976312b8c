"""extract-functions on every committed export: which functions, how large, the same outputs, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.compare import diff_models
from graphsurgery.model_io import load
from graphsurgery.pipeline import Pipeline
from tests.interface_helpers import assert_same_outputs, interface

FIXTURES = Path(__file__).parents[2] / "fixtures"

# Nodes left in the main graph; then each function with its layers, nodes, constants, parameters, of these weights, and
# outputs, or the layer that is like no other.
EXPECTED: dict[str, tuple[int, list[tuple[Any, ...]]]] = {
    "deepseek_v3_batched/model.onnx": (
        162,
        [("layer:decoder_0",), ("DeepseekV3DecoderLayer", (1, 2), 151, 28, 32, 16, 3)],
    ),
    "deepseek_v3_grouped/model.onnx": (
        166,
        [("layer:decoder_0",), ("DeepseekV3DecoderLayer", (1, 2), 240, 33, 34, 17, 3)],
    ),
    "gemma2/model.onnx": (69, [("Gemma2DecoderLayer", (0, 1, 2, 3), 78, 11, 21, 11, 3)]),
    "gemma4_moe_batched/model.onnx": (
        103,
        [
            ("Gemma4TextDecoderLayer", (0, 2), 160, 17, 38, 25, 3),
            ("Gemma4TextDecoderLayer_2", (1, 3), 161, 17, 39, 26, 3),
        ],
    ),
    "gemma4_moe_grouped/model.onnx": (
        107,
        [
            ("Gemma4TextDecoderLayer", (0, 2), 249, 24, 40, 26, 3),
            ("Gemma4TextDecoderLayer_2", (1, 3), 250, 24, 41, 27, 3),
        ],
    ),
    "genai_gptoss/model.onnx": (32, [("layer:decoder_0",), ("layer:decoder_1",)]),
    "genai_llama/model.onnx": (13, [("DecoderLayer", (0, 1), 11, 0, 15, 9, 4)]),
    "gpt2/model.onnx": (39, [("GPT2Block", (0, 1, 2), 50, 13, 21, 12, 3)]),
    "gpt_oss_batched/model.onnx": (72, [("GptOssDecoderLayer", (0, 1, 2, 3), 106, 16, 28, 16, 3)]),
    "gpt_oss_grouped/model.onnx": (76, [("GptOssDecoderLayer", (0, 1, 2, 3), 160, 22, 30, 17, 3)]),
    "gpt_oss_static/model.onnx": (80, [("GptOssDecoderLayer", (0, 1, 2, 3), 113, 16, 31, 16, 3)]),
    "llama/model.onnx": (47, [("LlamaDecoderLayer", (0, 1, 2), 72, 13, 20, 9, 3)]),
    "llama_external/model.onnx": (47, [("LlamaDecoderLayer", (0, 1, 2), 72, 13, 20, 9, 3)]),
    "llama_fp16/model.onnx": (54, [("LlamaDecoderLayer", (0, 1, 2), 76, 13, 20, 9, 3)]),
    "llama_matmulnbits/model.onnx": (47, [("LlamaDecoderLayer", (0, 1, 2), 72, 13, 27, 16, 3)]),
    "llama_merged/model.onnx": (47, [("LlamaDecoderLayer", (0, 1, 2), 72, 13, 19, 8, 3)]),
    "llama_opset23/model.onnx": (48, [("LlamaDecoderLayer", (0, 1, 2), 34, 2, 22, 9, 3)]),
    "llama_opset_newest/model.onnx": (47, [("LlamaDecoderLayer", (0, 1, 2), 58, 10, 20, 9, 3)]),
    "llama_qdq/model.onnx": (48, [("LlamaDecoderLayer", (0, 1, 2), 79, 20, 27, 16, 3)]),
    "llama_qdq4/model.onnx": (48, [("LlamaDecoderLayer", (0, 1, 2), 79, 13, 27, 16, 3)]),
    "llama_static/model.onnx": (65, [("LlamaDecoderLayer", (0, 1, 2), 79, 13, 23, 9, 3)]),
    "mixtral_batched/model.onnx": (48, [("MixtralDecoderLayer", (0, 1, 2), 96, 16, 21, 9, 3)]),
    "mixtral_grouped/model.onnx": (52, [("MixtralDecoderLayer", (0, 1, 2), 153, 23, 23, 10, 3)]),
    "optimum_gpt_oss/model.onnx": (168, [("DecoderLayer", (0, 1), 217, 123, 23, 17, 3)]),
    "optimum_llama/model.onnx": (137, [("DecoderLayer", (0, 1), 154, 89, 15, 9, 3)]),
    "optimum_qwen3_moe/model.onnx": (137, [("DecoderLayer", (0, 1), 522, 216, 39, 33, 3)]),
    "qwen3/model.onnx": (47, [("Qwen3DecoderLayer", (0, 1, 2), 86, 13, 22, 11, 3)]),
    "qwen3_5_moe/model.onnx": (
        327,
        [("Qwen3_5MoeDecoderLayer", (0, 1, 2), 1567, 149, 35, 21, 3), ("layer:decoder_3",)],
    ),
    "qwen3_moe_batched/model.onnx": (48, [("Qwen3MoeDecoderLayer", (0, 1, 2), 110, 16, 23, 11, 3)]),
    "qwen3_moe_grouped/model.onnx": (52, [("Qwen3MoeDecoderLayer", (0, 1, 2), 199, 23, 25, 12, 3)]),
    "qwen3_moe_grouped_external/model.onnx": (52, [("Qwen3MoeDecoderLayer", (0, 1, 2), 199, 23, 25, 12, 3)]),
    "qwen3_moe_matmulnbits/model.onnx": (52, [("Qwen3MoeDecoderLayer", (0, 1, 2), 199, 23, 29, 16, 3)]),
    "qwen3_vl_moe/decode.onnx": (121, [("Qwen3VLMoeTextDecoderLayer", (0, 1, 2), 167, 23, 25, 12, 3)]),
    "qwen3_vl_moe/language_model.onnx": (143, [("Qwen3VLMoeTextDecoderLayer", (0, 1, 2), 165, 23, 23, 12, 3)]),
    "qwen3_vl_moe/lm_head.onnx": (1, []),
}
LARGE = ("qwen3_5_moe/model.onnx",)
"""Functions are made of it by default; they are inlined again with the whole product only."""


def extracted(path: str, spec: str = "extract-functions") -> ir.Model:
    model = load(FIXTURES / path)
    Pipeline([spec], check=True)(model)
    return model


def test_the_table_is_complete() -> None:
    assert sorted(path.relative_to(FIXTURES).as_posix() for path in FIXTURES.glob("*/*.onnx")) == sorted(EXPECTED)


@pytest.mark.parametrize("path", EXPECTED)
def test_functions_and_outputs(path: str) -> None:
    nodes, expected = EXPECTED[path]
    model = load(FIXTURES / path)
    names = interface(model)
    report = Pipeline(["extract-functions"], check=True)(model).passes[0]
    found: list[tuple[Any, ...]] = []
    for site in report.sites:
        if site.status != "rewritten":
            found.append((site.id,))
            assert site.reason.startswith(f"layer {site.layer} is like no other (min_repeats=2)")
            continue
        detail = site.detail
        assert isinstance(detail["layers"], list)
        counts: list[Any] = [detail[key] for key in ("nodes", "constants", "parameters", "weights", "outputs")]
        found.append((site.id.removeprefix("layers:"), tuple(detail["layers"]), *counts))
        function = next(item for item in model.functions.values() if item.name == site.id.removeprefix("layers:"))
        assert detail["function"] == f"graphsurgery::{function.name}"
        assert len(function) == counts[0] + counts[1]
        assert (len(function.inputs), len(function.outputs)) == (counts[2], counts[4])
        calls = [node for node in model.graph if node.op_type == function.name]
        assert len(calls) == len(detail["layers"]) == detail["instances"]
        # Weights are parameters, and no output of a body is a parameter.
        assert not function.graph.initializers
        assert not {value.name for value in function.inputs} & {value.name for value in function.outputs}
        assert all(
            node.attributes["value"].as_tensor().size <= 64
            for node in function
            if node.op_type == "Constant" and "value" in node.attributes
        )
        assert function.opset_imports == model.opset_imports
    assert (len(model.graph), found) == (nodes, expected)
    assert interface(model) == names
    assert_same_outputs(load(FIXTURES / path), model, (FIXTURES / path).parent)


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.full] if path in LARGE else []) for path in EXPECTED]
)
def test_inlining_gives_the_graph_back(path: str) -> None:
    model = extracted(path)
    original = load(FIXTURES / path)
    assert diff_models(original, model).severity == "none"
    report = Pipeline(["inline-functions"], check=True)(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten"] * sum(len(row) > 1 for row in EXPECTED[path][1])
    assert not model.functions
    assert "graphsurgery" not in model.opset_imports
    assert len(model.graph) == len(original.graph)
    found = diff_models(original, model)
    assert found.severity == "none"
    assert found.models[0].sizes["initializers"].before == found.models[0].sizes["initializers"].after


@pytest.mark.parametrize("path", ["llama/model.onnx", "gemma4_moe_grouped/model.onnx", "optimum_qwen3_moe/model.onnx"])
def test_a_second_run_changes_nothing(path: str) -> None:
    model = extracted(path)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    report = Pipeline(["extract-functions"], check=True)(model)
    assert not report.changed
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("path", ["llama/model.onnx", "optimum_gpt_oss/model.onnx"])
def test_two_runs_give_one_file(path: str) -> None:
    one, other = (ir.to_proto(extracted(path)).SerializeToString(deterministic=True) for _ in range(2))
    assert one == other


@pytest.mark.full
@pytest.mark.parametrize("path", sorted({*EXPECTED} - {"qwen3_vl_moe/lm_head.onnx", "genai_gptoss/model.onnx"}))
def test_names_decide_nothing(path: str) -> None:
    """Without scopes, and with names that tell nothing, the same layers are found."""
    model = load(FIXTURES / path)
    inputs = set(model.graph.inputs)
    for number, node in enumerate(model.graph):
        node.metadata_props.clear()
        node.name = f"n{number}"
        for index, value in enumerate(node.outputs):
            if value.name and not value.is_graph_output():
                value.name = f"v{number}_{index}"
    for number, value in enumerate(list(model.graph.initializers.values())):
        if value not in inputs:
            value.name = f"w{number}"
    report = Pipeline(["extract-functions"], check=True)(model).passes[0]
    found = [
        (len(site.detail["layers"]), *(site.detail[key] for key in ("nodes", "constants", "parameters", "outputs")))
        for site in report.sites
        if site.status == "rewritten" and isinstance(site.detail["layers"], list)
    ]
    expected = [(len(row[1]), *row[2:5], row[6]) for row in EXPECTED[path][1] if len(row) > 1]
    assert found == expected
    assert len(model.graph) == EXPECTED[path][0]


INNER = {
    "optimum_qwen3_moe/model.onnx": [("DecoderLayer_inner", 8)],
    "qwen3_moe_grouped/model.onnx": [("Qwen3MoeDecoderLayer_inner_2", 8), ("Qwen3MoeDecoderLayer_inner", 8)],
    "gpt_oss_grouped/model.onnx": [("GptOssDecoderLayer_inner_2", 4), ("GptOssDecoderLayer_inner", 4)],
    "llama/model.onnx": [],
}


@pytest.mark.parametrize("path", INNER)
def test_experts_become_functions_of_their_own(path: str) -> None:
    model = extracted(path, "extract-functions{inner=true}")
    functions = list(model.functions.values())
    *inner, layer = functions
    calls = [(function.name, sum(node.op_type == function.name for node in layer)) for function in inner]
    assert calls == INNER[path]
    original = load(FIXTURES / path)
    assert_same_outputs(original, model, FIXTURES)
    assert diff_models(original, model).severity == "none"
    Pipeline(["inline-functions"], check=True)(model)
    assert diff_models(original, model).severity == "none"


@pytest.mark.parametrize("blocks", ["q_blocks=2,kv_blocks=2,lowering=unroll", "q_block_size=16,lowering=loop"])
@pytest.mark.parametrize(
    "path", ["llama/model.onnx", "gemma2/model.onnx", "optimum_llama/model.onnx", "gpt2/model.onnx"]
)
def test_blocked_layers_are_still_one_function_a_kind(path: str, blocks: str) -> None:
    model = load(FIXTURES / path)
    Pipeline([f"block-attention{{{blocks}}}"])(model)
    blocked = ir.from_proto(ir.to_proto(model))
    Pipeline(["extract-functions"], check=True)(model)
    layers = len(EXPECTED[path][1][0][1])
    # In a loop the columns that a window leaves out are not computed: sliding layers are another function.
    windows = path.startswith("gemma2") and "loop" in blocks
    assert [sum(node.op_type == item.name for node in model.graph) for item in model.functions.values()] == (
        [layers // 2, layers // 2] if windows else [layers]
    )
    assert_same_outputs(blocked, model, FIXTURES)
    assert diff_models(blocked, model).severity == "none"


def test_layers_are_selected_by_number() -> None:
    model = load(FIXTURES / "gemma2/model.onnx")
    report = Pipeline(["extract-functions{exclude=1}"], check=True)(model).passes[0]
    assert [(site.id, site.status, site.reason.split(":")[0]) for site in report.sites] == [
        (
            "layers:Gemma2DecoderLayer",
            "rewritten",
            "layers 0, 2-3 are 3 calls of graphsurgery",
        ),
        ("layers:Gemma2DecoderLayer:1", "skipped", "not selected"),
    ]
    assert sum(node.op_type == "Gemma2DecoderLayer" for node in model.graph) == 3
    model = load(FIXTURES / "gemma2/model.onnx")
    report = Pipeline(["extract-functions{sites=3}"], check=True)(model).passes[0]
    assert [(site.status, site.reason) for site in report.sites] == [
        ("refused", "only layer 3 of this kind is selected (min_repeats=2)"),
        ("skipped", "not selected"),
    ]


def test_boundaries_name_values_that_are_there() -> None:
    model = load(FIXTURES / "llama/model.onnx")
    before = {value.name for node in model.graph for value in node.outputs}
    report = Pipeline(["extract-functions"], check=True)(model).passes[0]
    (site,) = report.sites
    assert len(site.boundaries) == 3
    after = {value.name for node in model.graph for value in node.outputs}
    for boundary, call in zip(
        site.boundaries, (n for n in model.graph if n.op_type == "LlamaDecoderLayer"), strict=True
    ):
        assert boundary.inputs_after == tuple(value.name for value in call.inputs if value is not None)
        assert boundary.outputs_after == tuple(value.name for value in call.outputs)
        assert set(boundary.outputs_before) <= before
        assert set(boundary.outputs_after) <= after


def test_min_repeats_leaves_rarer_layers() -> None:
    model = load(FIXTURES / "llama/model.onnx")
    report = Pipeline(["extract-functions{min_repeats=4}"])(model).passes[0]
    assert [site.reason for site in report.sites] == ["layers 0, 1, 2 are alike and no others (min_repeats=4)"]
    assert not model.functions


def test_results_at_the_default_level_stay_the_same() -> None:
    import onnxruntime as ort

    original, model = load(FIXTURES / "qwen3/model.onnx"), extracted("qwen3/model.onnx")
    from tests.interface_helpers import feeds_of

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    sessions = [
        ort.InferenceSession(ir.to_proto(item).SerializeToString(), options, providers=["CPUExecutionProvider"])
        for item in (original, model)
    ]
    for feed in feeds_of(original):
        one, other = (item.run(None, feed) for item in sessions)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, float(np.abs(a).max(initial=0))))
