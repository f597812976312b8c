"""The attention recogniser on every committed export and on the hostile cases."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.patterns.attention.axes import Factor, trace_axes
from graphsurgery.patterns.attention.finding import find_attentions
from graphsurgery.patterns.attention.sites import AttentionSite, FusedAttention
from graphsurgery.patterns.matcher import GraphIndex
from graphsurgery.patterns.site import Refusal

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"

# file: number of attentions, G, R, operators of the chain, operators of the tail, layers
DECOMPOSED = {
    "llama": (3, 2, 2, "Add", "", (0, 1, 2)),
    "llama_fp16": (3, 2, 2, "Add", "", (0, 1, 2)),
    "llama_static": (3, 2, 2, "Add", "", (0, 1, 2)),
    "llama_matmulnbits": (3, 2, 2, "Add", "", (0, 1, 2)),
    "llama_qdq": (3, 2, 2, "Add", "", (0, 1, 2)),
    "qwen3": (3, 2, 2, "Add", "", (0, 1, 2)),
    "gemma2": (4, 2, 2, "Mul Div Tanh Mul Add", "", (0, 1, 2, 3)),
    "gpt2": (3, 4, 1, "Add", "", (0, 1, 2)),
    "gpt_oss_grouped": (4, 2, 2, "Mul Add Concat ReduceMax Sub", "Slice", (0, 1, 2, 3)),
    "gemma4_moe_grouped": (4, 2, 2, "Add", "", (0, 1, 2, 3)),
    "deepseek_v3_batched": (3, 4, 1, "Add", "", (0, 1, 2)),
    "qwen3_5_moe": (1, 2, 2, "Add", "", (3,)),
    "mixtral_grouped": (3, 2, 2, "Add", "", (0, 1, 2)),
    "optimum_llama": (2, 2, 2, "Add", "IsNaN Where", (0, 1)),
    "optimum_gpt_oss": (2, 2, 2, "Mul Add Concat ReduceMax Sub", "Cast Slice", (0, 1)),
    "optimum_qwen3_moe": (2, 2, 2, "Add", "IsNaN Where", (0, 1)),
}
FUSED = {
    "genai_llama": (2, "GroupQueryAttention"),
    "genai_gptoss": (2, "GroupQueryAttention"),
    "llama_opset23": (3, "Attention"),
    "llama_opset_newest": (3, "Attention"),
}


def read(path: Path) -> list[AttentionSite | FusedAttention | Refusal]:
    model = ir.load(path)
    return find_attentions(model, Shapes(model), GraphIndex(model))


def operators(nodes: tuple[ir.Node, ...]) -> str:
    return " ".join(node.op_type for node in nodes)


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed_exports(name: str) -> None:
    count, groups, repeats, chain, tail, layers = DECOMPOSED[name]
    sites = read(FIXTURES / name / "model.onnx")
    assert len(sites) == count
    assert tuple(site.layer for site in sites) == layers
    for site in sites:
        assert isinstance(site, AttentionSite)
        assert (site.key.heads, site.key.repeats) == (groups, repeats)
        assert (site.value.heads, site.value.repeats) == (groups, repeats)
        assert operators(site.chain) == chain
        assert operators(site.tail) == tail
        assert (site.sink is not None) == ("gpt_oss" in name)
        assert len(site.stabiliser) == (2 if "gpt_oss" in name else 0)
        assert site.probabilities_read is None


@pytest.mark.parametrize("name", FUSED)
def test_fused_exports(name: str) -> None:
    count, operator = FUSED[name]
    sites = read(FIXTURES / name / "model.onnx")
    assert [site.operator for site in sites if isinstance(site, FusedAttention)] == [operator] * count
    assert len(sites) == count


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*.onnx")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_softmax_over_keys_is_read(path: Path) -> None:
    """None is missed and none invented: routers' softmaxes lead to no product with values."""
    model = ir.load(path)
    index = GraphIndex(model)
    sites = find_attentions(model, Shapes(model), index)
    assert not [site for site in sites if isinstance(site, Refusal)]
    found = [site.softmax for site in sites if isinstance(site, AttentionSite)]
    assert found == [node for node in index.nodes("Softmax") if _in_attention(node)]


def _in_attention(node: ir.Node) -> bool:
    text = node.metadata_props.get("namespace", "") + (node.name or "")
    return "Attention" in text or "self_attn" in text


def test_keys_and_values_are_traced_to_the_cache() -> None:
    """Whatever lies between: expansion, flattening transposes with computed shapes, scaling."""
    for site in read(FIXTURES / "llama" / "model.onnx"):
        assert isinstance(site, AttentionSite)
        assert site.key.base.name == f"output.cache.layers.{site.layer}.keys"
        assert site.value.base.name == f"output.cache.layers.{site.layer}.values"
        assert operators(site.key.steps) == "Unsqueeze Expand Reshape Reshape Transpose Reshape Mul"
        assert operators(site.key.scales) == "Mul"
        assert operators(site.value.steps) == "Unsqueeze Expand Reshape"
        assert (site.key.batch_axis, site.key.head_axis, site.key.length_axis, site.key.feature_axis) == (0, 1, 2, 3)


def test_different_head_sizes_of_keys_and_values() -> None:
    """Latent attention: keys of 12 features, values of 10."""
    model = ir.load(FIXTURES / "deepseek_v3_batched" / "model.onnx")
    shapes = Shapes(model)
    site = find_attentions(model, shapes, GraphIndex(model))[0]
    assert isinstance(site, AttentionSite)
    assert shapes.dim(site.key.base, site.key.feature_axis) == 12
    assert shapes.dim(site.value.base, site.value.feature_axis) == 10


def test_probabilities_that_are_an_output_are_told() -> None:
    sites = read(CASES / "a04_attention_probs_are_graph_output.onnx")
    read_by = [site.probabilities_read for site in sites if isinstance(site, AttentionSite)]
    assert read_by == ["graph output 'attentions.0'", None]


def test_spellings_in_one_model() -> None:
    sites = read(CASES / "a05_attention_spellings.onnx")
    chains = [operators(site.chain) for site in sites if isinstance(site, AttentionSite)]
    assert chains == ["Mul Add", "Div Add", "Add", "Mul Where", "Mul"]
    tails = [operators(site.tail) for site in sites if isinstance(site, AttentionSite)]
    assert tails == ["", "", "", "", "Identity Cast Dropout"]


def test_a_head_over_rows_is_no_attention() -> None:
    """A softmax along another axis, in front of a product, is refused by name."""
    nodes = [
        helper.make_node("MatMul", ["q", "k"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], name="over_rows", axis=2),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("q", TensorProto.FLOAT, [1, 2, "S", 4]), value("k", TensorProto.FLOAT, [1, 2, 4, "T"])]
        + [value("v", TensorProto.FLOAT, [1, 2, "T", 4])],
        [value("y", TensorProto.FLOAT, [1, 2, "S", 4])],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    sites = find_attentions(model, Shapes(model), GraphIndex(model))
    assert [site.reason for site in sites if isinstance(site, Refusal)] == [
        "softmax 'over_rows' runs over axis 2, not over the keys"
    ]


def test_axes_are_followed_through_layout_operators() -> None:
    """[B, G, T, D] -> expand -> [B, G*R, T, D] -> [B*G*R, D, T]."""
    model = ir.load(FIXTURES / "llama" / "model.onnx")
    shapes = Shapes(model)
    site = find_attentions(model, shapes, GraphIndex(model))[0]
    assert isinstance(site, AttentionSite)
    trace = trace_axes(site.key.base, site.key.steps[:3], shapes)
    assert trace is not None
    assert [[factor.axis for factor in axis] for axis in trace] == [[0], [1, -1], [2], [3]]
    assert trace[1] == (Factor(1, 2), Factor(-1, 2))
