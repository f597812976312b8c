"""block-attention on the attention operators of com.microsoft: written out as ONNX Runtime's kernel computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from graphsurgery.passes.block_attention import BlockAttention
from graphsurgery.pipeline import Pipeline
from tests.oracle import Arrays, run, session

if TYPE_CHECKING:
    from graphsurgery.site_report import SiteReport

HEADS, FEATURES, BATCH, LENGTH, PAST = 2, 4, 2, 7, 3
WIDTH = HEADS * FEATURES
INPUTS = {
    "MultiHeadAttention": (
        *("query", "key", "value", "bias", "mask", "score_bias", "past_key", "past_value"),
        "past_sequence_length",
    ),
    "Attention": ("query", "weight", "bias", "mask", "past", "score_bias"),
}
SYMBOLS = {
    "query": ("B", "S", None),
    "key": ("B", "S", None),
    "value": ("B", "S", None),
    "past_key": ("B", None, "P", None),
    "past_value": ("B", None, "P", None),
    "past": (None, "B", None, "P", None),
    "score_bias": (None, None, "S", "P + S"),
}
DRAW = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype(np.float32)


def model_of(operator: str, feeds: Arrays, outputs: int, symbols: dict[str, tuple[Any, ...]], **attributes: Any) -> Any:
    """One operator with these inputs, of symbolic sizes."""
    names = [name if name in feeds else "" for name in INPUTS[operator]]
    while not names[-1]:
        names.pop()
    results = ["output", "present_key" if operator != "Attention" else "present", "present_value", "scores"][:outputs]
    node = helper.make_node(operator, names, results, "attend", domain="com.microsoft", num_heads=HEADS, **attributes)
    infos = []
    for name in names:
        if name:
            sizes = {**SYMBOLS, **symbols}.get(name, (None,) * feeds[name].ndim)
            if len(sizes) != feeds[name].ndim:
                sizes = ("B", "S", *(None,) * (feeds[name].ndim - 2))
            shape = [symbol or size for symbol, size in zip(sizes, feeds[name].shape, strict=True)]
            infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), shape))
    outputs_info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in results]
    graph = helper.make_graph([node], "operator", infos, outputs_info)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def blocked(proto: onnx.ModelProto, **options: Any) -> tuple[ir.Model, SiteReport]:
    model = ir.from_proto(proto)
    report = Pipeline([BlockAttention(**options)], check=True)(model).passes[0]
    (site,) = report.sites
    return model, site


def held(proto: onnx.ModelProto, feeds: Arrays, reference: onnx.ModelProto | None = None, **options: Any) -> ir.Model:
    """The model is rewritten, and computes what the kernel computes (on ``feeds`` of ``reference``)."""
    model, site = blocked(proto, **options)
    assert site.status == "rewritten", site.reason
    assert not [node for node in model.graph.all_nodes() if node.domain == "com.microsoft"]
    expected = run(session(reference if reference is not None else proto), feeds)
    got = run(session(model), feeds)
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=0, atol=2e-6, err_msg=name)
    return model


def operands(length: int = LENGTH) -> Arrays:
    return {name: draw(BATCH, length, WIDTH) for name in ("query", "key", "value")}


def past() -> Arrays:
    return {name: draw(BATCH, HEADS, PAST, FEATURES) for name in ("past_key", "past_value")}


PADDING = np.asarray([[1, 1, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]], np.int32)
WITH_PAST = np.concatenate([np.ones((BATCH, PAST), np.int32), PADDING], axis=1)
MASKS: dict[str, tuple[Arrays, tuple[Any, ...]]] = {
    "lengths": ({"mask": np.asarray([5, 2], np.int32)}, ("B",)),
    "lengths and starts": ({"mask": np.asarray([5, 2, 0, 7, 14, 0, 7, 14], np.int32)}, ("3*B + 2",)),
    "padding": ({"mask": PADDING}, ("B", "S")),
    "rows": ({"mask": DRAW.integers(0, 2, (BATCH, LENGTH, LENGTH)).astype(np.int32)}, ("B", "S", "S")),
}
OPTIONS = [{"q_blocks": 3}, {"q_block_size": 3}, {"q_blocks": 2, "kv_blocks": 3}, {"kv_block_size": 4}]


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, causal: int) -> None:
    mask, sizes = MASKS[name]
    feeds = {**operands(), **mask}
    proto = model_of("MultiHeadAttention", feeds, 1, {"mask": sizes}, unidirectional=causal, mask_filter_value=-3e4)
    for options in OPTIONS:
        held(proto, feeds, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_past_a_bias_and_scores_added(options: dict[str, Any]) -> None:
    feeds = {**operands(), **past(), "mask": WITH_PAST, "bias": draw(3 * WIDTH)}
    feeds["score_bias"] = draw(1, HEADS, LENGTH, PAST + LENGTH)
    proto = model_of("MultiHeadAttention", feeds, 3, {"mask": ("B", "P + S")}, scale=0.3, unidirectional=1)
    model = held(proto, feeds, **options)
    assert [value.name for value in model.graph.outputs] == ["output", "present_key", "present_value"]


def test_only_the_causal_frontier() -> None:
    feeds = {**operands(), **past()}
    proto = model_of("MultiHeadAttention", feeds, 3, {}, unidirectional=1)
    _, site = blocked(proto, q_block_size=3)
    assert site.reason == "query blocks of 3 in a loop, keys trimmed by the mask"
    assert site.kinds == ("attention", "fused", "causal", "full")
    held(proto, feeds, q_block_size=3)


def test_keys_by_head() -> None:
    feeds = {**operands(), "score_bias": draw(1, 1, LENGTH, LENGTH)}
    for name in ("key", "value"):
        feeds[name] = draw(BATCH, HEADS, LENGTH, FEATURES)
    symbols = {"key": ("B", None, "S", None), "value": ("B", None, "S", None), "score_bias": (None, None, "S", "S")}
    held(model_of("MultiHeadAttention", feeds, 1, symbols), feeds, q_blocks=2)


def _packed(*operand: np.ndarray) -> np.ndarray:
    return np.stack([item.reshape(BATCH, LENGTH, HEADS, FEATURES) for item in operand], axis=3)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_operands_as_the_kernel_computes_unpacked_ones(packed: str, with_bias: bool) -> None:
    """The kernel of the CPU takes no packed operands, so the same numbers unpacked are the reference."""
    plain = {**operands(), "mask": PADDING}
    if with_bias:
        plain["bias"] = draw(3 * WIDTH)
    feeds = dict(plain)
    if packed == "qkv":
        feeds["query"] = _packed(plain["query"], plain["key"], plain["value"])
        del feeds["key"], feeds["value"]
    else:
        feeds["key"] = _packed(plain["key"], plain["value"])
        del feeds["value"]
    symbols = {"mask": ("B", "S")}
    proto = model_of("MultiHeadAttention", feeds, 1, symbols)
    model, site = blocked(proto, q_blocks=2)
    assert site.status == "rewritten", site.reason
    expected = run(session(model_of("MultiHeadAttention", plain, 1, symbols)), plain)
    np.testing.assert_allclose(run(session(model), feeds)["output"], expected["output"], rtol=0, atol=2e-6)


def refusal(feeds: Arrays, outputs: int = 1, operator: str = "MultiHeadAttention", **attributes: Any) -> str:
    _, site = blocked(model_of(operator, feeds, outputs, {}, **attributes), q_blocks=2)
    assert site.status == "refused"
    return site.reason


def test_refusals() -> None:
    assert refusal(operands()) == (
        "node 'attend' is a MultiHeadAttention without mask and past, which the runtime's own kernel streams"
    )
    assert refusal({**operands(), **past()}) == "node 'attend' has a past and no present"
    one = operands()
    fixed = {**one, **past(), "past_sequence_length": np.asarray([PAST], np.int32)}
    assert refusal(fixed, 3) == "node 'attend' writes into a cache of fixed length"
    assert refusal({**operands(), "mask": PADDING}, 4) == "the scores of node 'attend' are used as 'scores'"
    packed = {"query": draw(BATCH, LENGTH, WIDTH), "weight": draw(WIDTH, 3 * WIDTH)}
    assert refusal(packed, 1, "Attention", do_rotary=1) == "node 'attend' has do_rotary"


ATTENTION_MASKS: dict[str, tuple[Arrays, tuple[Any, ...]]] = {
    "none": ({}, ()),
    "ends": ({"mask": np.asarray([5, 2], np.int32)}, ("B",)),
    "ends and starts": ({"mask": np.asarray([5, 6, 1, 0], np.int32)}, ("2*B",)),
    "padding": ({"mask": PADDING}, ("B", "S")),
    "rows": ({"mask": DRAW.integers(0, 2, (BATCH, LENGTH, LENGTH)).astype(np.int32)}, ("B", "S", "S")),
}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("name", ATTENTION_MASKS)
def test_attention_with_one_projection(name: str, causal: int) -> None:
    mask, sizes = ATTENTION_MASKS[name]
    feeds = {"query": draw(BATCH, LENGTH, WIDTH), "weight": draw(WIDTH, 3 * WIDTH) / 3, "bias": draw(3 * WIDTH), **mask}
    symbols = {"mask": sizes} if mask else {}
    proto = model_of("Attention", feeds, 1, symbols, unidirectional=causal)
    for options in OPTIONS:
        held(proto, feeds, **options)


def test_attention_with_a_past() -> None:
    feeds = {
        "query": draw(BATCH, LENGTH, WIDTH),
        "weight": draw(WIDTH, 3 * WIDTH) / 3,
        "bias": draw(3 * WIDTH),
        "mask": WITH_PAST,
        "past": draw(2, BATCH, HEADS, PAST, FEATURES),
    }
    proto = model_of("Attention", feeds, 2, {"mask": ("B", "P + S")}, unidirectional=1)
    for options in OPTIONS:
        held(proto, feeds, **options)


def test_attention_with_scores_added() -> None:
    feeds = {"query": draw(BATCH, LENGTH, WIDTH), "weight": draw(WIDTH, 3 * WIDTH) / 3, "bias": draw(3 * WIDTH)}
    feeds["score_bias"] = draw(1, HEADS, LENGTH, LENGTH)
    held(model_of("Attention", feeds, 1, {"score_bias": (None, None, "S", "S")}), feeds, q_blocks=2, kv_blocks=2)
