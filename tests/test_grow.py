"""`fixtures/grow.py`: grown exports are valid, run, and compute what clones of their last layer or expert must."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"
sys.path.insert(0, str(FIXTURES))

import grow  # noqa: E402 - a script beside the fixtures, not a package


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(path: Path, length: int = 7, past: int = 3) -> dict[str, np.ndarray]:
    model = session(path)
    random = np.random.default_rng(0)
    feeds = {}
    for given in model.get_inputs():
        if given.name == "input_ids":
            feeds[given.name] = random.integers(0, 64, (1, length))
        elif given.name == "position_ids":
            feeds[given.name] = np.arange(past, past + length)[None]
        elif given.name == "attention_mask":
            feeds[given.name] = np.ones((1, past + length), np.int64)
        else:
            feeds[given.name] = np.full((1, int(given.shape[1]), past, int(given.shape[3])), 0.1, np.float32)
    names = [output.name for output in model.get_outputs()]
    return dict(zip(names, model.run(None, feeds), strict=True))


def edit(path: Path, changes: dict[str, np.ndarray]) -> None:
    """Replace initializers of the model at ``path``."""
    model = ir.load(path)
    for name, array in changes.items():
        model.graph.initializers[name].const_value = ir.Tensor(array, name=name)
    ir.save(model, path)


def tensor(path: Path, name: str) -> np.ndarray:
    found = ir.load(path).graph.initializers[name].const_value
    assert found is not None
    return found.numpy()


def last_products(path: Path, layer: int) -> list[str]:
    """Weights of the two products of ``layer`` that end in the residual stream."""
    weights = []
    for node in ir.load(path).graph:
        scope = node.metadata_props.get("namespace", "") + (node.name or "")
        if node.op_type == "MatMul" and f"layers.{layer}" in scope and ("o_proj" in scope or "down_proj" in scope):
            assert node.inputs[1] is not None
            weights.append(node.inputs[1].name or "")
    return weights


# ---- layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes", "per_layer", "old"),
    [
        ("llama", 260, 72, 3),
        ("llama_merged", 260, 72, 3),
        ("qwen3_moe_grouped", 646, 199, 3),
        ("optimum_llama", 621, 227, 2),
    ],
)
def test_each_layer_adds_the_nodes_of_the_last_one(
    tmp_path: Path, name: str, nodes: int, per_layer: int, old: int
) -> None:
    grown = grow.grow(FIXTURES / name / "model.onnx", tmp_path / "grown.onnx", layers=7)
    assert (grown.nodes, grown.layers) == (nodes + per_layer * (7 - old), 7)
    assert np.isfinite(run(grown.path)["logits"]).all()


@pytest.mark.parametrize("name", ["llama", "optimum_llama"])
def test_cache_inputs_and_outputs_are_named_after_the_layer(tmp_path: Path, name: str) -> None:
    source = ir.load(FIXTURES / name / "model.onnx").graph
    layers = grow.count_layers(ir.load(FIXTURES / name / "model.onnx"))
    grown = ir.load(grow.grow(FIXTURES / name / "model.onnx", tmp_path / "grown.onnx", layers=5).path).graph
    for old, new in ((source.inputs, grown.inputs), (source.outputs, grown.outputs)):
        names = [value.name or "" for value in new]
        assert names[: len(old)] == [value.name for value in old]
        template = [value.name or "" for value in old][-2:]
        extra = [text.replace(f".{layers - 1}.", f".{n}.") for n in range(layers, 5) for text in template]
        assert names[len(old) :] == extra
    names = [node.name for node in grown if node.name]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["llama", "optimum_llama"])
def test_a_cloned_layer_that_adds_nothing_to_the_residual_stream_changes_nothing(tmp_path: Path, name: str) -> None:
    source = FIXTURES / name / "model.onnx"
    grown = grow.grow(source, tmp_path / "grown.onnx", layers=5).path
    before, after = run(source), run(grown)
    assert not np.allclose(before["logits"], after["logits"], atol=1e-3)
    silent = [
        weight for layer in range(grow.count_layers(ir.load(source)), 5) for weight in last_products(grown, layer)
    ]
    assert len(silent) == 2 * (5 - grow.count_layers(ir.load(source)))
    edit(grown, {weight: np.zeros_like(tensor(grown, weight)) for weight in silent})
    quiet = run(grown)
    for output, value in before.items():
        np.testing.assert_array_equal(value, quiet[output])


def test_a_cloned_layer_has_its_own_weights_and_shares_constants(tmp_path: Path) -> None:
    source = ir.load(FIXTURES / "llama" / "model.onnx").graph
    grown = ir.load(grow.grow(FIXTURES / "llama" / "model.onnx", tmp_path / "grown.onnx", layers=4).path).graph
    extra = {name: value for name, value in grown.initializers.items() if name not in source.initializers}
    assert len(extra) == 9
    assert all(value.dtype == ir.DataType.FLOAT for value in extra.values())
    assert "model.layers.3.input_layernorm.weight" in extra


def test_merged_weights_stay_shared(tmp_path: Path) -> None:
    source = ir.load(FIXTURES / "llama_merged" / "model.onnx").graph
    grown = ir.load(grow.grow(FIXTURES / "llama_merged" / "model.onnx", tmp_path / "grown.onnx", layers=4).path).graph
    assert len(grown.initializers) - len(source.initializers) == 7


# ---- experts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "old", "per_expert"), [("qwen3_moe_grouped", 8, 8), ("mixtral_grouped", 4, 8)])
def test_each_expert_adds_its_nodes_to_each_layer(tmp_path: Path, name: str, old: int, per_expert: int) -> None:
    source = FIXTURES / name / "model.onnx"
    grown = grow.grow(source, tmp_path / "grown.onnx", experts=13)
    assert grown.nodes == len(ir.load(source).graph) + 3 * per_expert * (13 - old)
    assert grown.experts == 13
    assert np.isfinite(run(grown.path)["logits"]).all()


def test_an_expert_that_repeats_another_computes_the_same(tmp_path: Path) -> None:
    """Tokens are sent to experts 3 and 5 of the source, and to their clones 11 and 13 of the grown model."""
    source, grown = tmp_path / "source.onnx", tmp_path / "grown.onnx"
    ir.save(ir.load(FIXTURES / "qwen3_moe_grouped" / "model.onnx"), source)
    grow.grow(source, grown, experts=16)
    direction = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    results = []
    for path, suffix, experts, chosen in ((source, "", 8, (3, 5)), (grown, "_grown", 16, (11, 13))):
        router = np.zeros((experts, 32), np.float32)
        router[chosen[0]], router[chosen[1]] = direction, -direction
        names = [f"model.layers.{layer}.mlp.gate.weight{suffix}" for layer in range(3)]
        assert all(tensor(path, name).shape == router.shape for name in names)
        edit(path, dict.fromkeys(names, router))
        results.append(run(path, length=20))
    for output, value in results[0].items():
        np.testing.assert_allclose(value, results[1][output], rtol=1e-5, atol=1e-5)


def test_a_large_skeleton_has_all_its_nodes(tmp_path: Path) -> None:
    source = FIXTURES / "qwen3_moe_grouped" / "model.onnx"
    grown = grow.grow(source, tmp_path / "grown.onnx", layers=6, experts=64, data=False)
    assert grown.nodes == 646 + 3 * 199 + 6 * 8 * 56
    assert grown.data_bytes > 0
    assert [item.name for item in tmp_path.iterdir()] == ["grown.onnx"]


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_moe_grouped", "optimum_llama"])
def test_sparse_weights_have_the_size_that_was_asked_for_and_run(tmp_path: Path, name: str) -> None:
    wanted = 40_000_000
    grown = grow.grow(FIXTURES / name / "model.onnx", tmp_path / "grown.onnx", layers=4, external_bytes=wanted)
    data = tmp_path / "grown.onnx.data"
    assert wanted <= grown.data_bytes == data.stat().st_size < wanted * 1.03
    assert data.stat().st_blocks * 512 < 1_000_000
    assert grown.path.stat().st_size < 3_000_000
    assert (run(grown.path)["logits"] == 0).all()


def test_weights_keep_their_dims_without_a_size(tmp_path: Path) -> None:
    grown = grow.grow(FIXTURES / "llama" / "model.onnx", tmp_path / "grown.onnx", external=True)
    before = ir.load(FIXTURES / "llama" / "model.onnx").graph.initializers
    for name, value in ir.load(grown.path).graph.initializers.items():
        assert value.shape == before[name].shape
        assert isinstance(value.const_value, ir.ExternalTensor) == (
            value.dtype == ir.DataType.FLOAT and len(value.shape or ()) > 1
        )


# ---- command line and refusals --------------------------------------------------------------------------------------


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "grown.onnx"
    assert (
        grow.main(["llama/model.onnx", "-o", str(output), "--layers", "4", "--external-bytes", "2MB", "--no-data"]) == 0
    )
    text = capsys.readouterr().out
    assert text.startswith(f"{output}: 332 nodes, 4 layers, ")
    assert text.endswith("bytes of external data\n")
    assert [item.name for item in output.parent.iterdir()] == ["grown.onnx"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("qwen3_vl_moe/lm_head.onnx", ["--layers", "4"], "Growing needs at least two layers"),
        ("llama/model.onnx", ["--layers", "2"], "The model already has 3 layers"),
        ("llama/model.onnx", ["--experts", "16"], "The model has no grouped expert block"),
        ("qwen3_moe_grouped/model.onnx", ["--experts", "8"], "The model already has 8 experts"),
        ("deepseek_v3_grouped/model.onnx", ["--experts", "16"], "are not chosen by one TopK"),
        ("llama/model.onnx", ["--external-bytes", "1KB"], "bytes already: ask for more than 1000"),
        ("gpt2/model.onnx", ["--external-bytes", "1GB"], "No gated MLP was recognised"),
    ],
)
def test_what_cannot_be_grown_is_said_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, options: list[str], message: str
) -> None:
    assert grow.main([source, "-o", str(tmp_path / "grown.onnx"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "size"), [("3GB", 3 * 10**9), ("1.5 MiB", 3 * 2**19), ("70", 70), ("2k", 2000)])
def test_sizes(text: str, size: int) -> None:
    assert grow.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "3TB", "GB", "-1GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 3GB"):
        grow.parse_size(text)
