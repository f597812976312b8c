"""com.microsoft::MoE written out: held against ONNX Runtime's own kernel, and where it has none against the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.moe_operators import GPT_OSS
from tests.oracle import run, session

E, H, INNER = 5, 8, 6
STRATEGIES = {
    "grouped": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "dense": "gather-experts{strategy=dense}",
    "loop": "gather-experts{strategy=packed,chunk_size=3,lanes=2}",
    "npu": "gather-experts{target=npu,threshold=3,chunk_size=2}",
}


def moe(
    *,
    dtype: str = "float32",
    bias: bool = True,
    batch: bool = False,
    third: bool = False,
    opset: int = 17,
    swap: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one operator; ``swap``: the matrices are stored with their axes swapped."""
    rng = np.random.default_rng(3)
    kind = attributes.get("activation_type", "relu")
    width = 2 * INNER if kind == "swiglu" and attributes.get("swiglu_fusion", 0) else INNER
    arrays = {
        "w1": rng.standard_normal((E, width, H)),
        "b1": rng.standard_normal((E, width)),
        "w2": rng.standard_normal((E, H, INNER)),
        "b2": rng.standard_normal((E, H)),
        "w3": rng.standard_normal((E, INNER, H)),
        "b3": rng.standard_normal((E, INNER)),
    }
    if swap:
        arrays["w1"], arrays["w2"] = arrays["w1"].reshape(E, H, width), arrays["w2"].reshape(E, INNER, H)
    names = ["x", "scores", "w1", "b1" if bias else "", "w2", "b2" if bias else ""]
    names += ["w3", "b3" if bias else ""] if third else []
    attributes = {"k": 2, **attributes}
    node = helper.make_node("MoE", names, ["y"], name="experts", domain="com.microsoft", **attributes)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    lead: list[Any] = ["B", "S"] if batch else ["T"]
    inputs = [
        helper.make_tensor_value_info("x", element, [*lead, H]),
        helper.make_tensor_value_info("scores", element, ["T", E]),
    ]
    outputs = [helper.make_tensor_value_info("y", element, [*lead, H])]
    initializers = [numpy_helper.from_array(item.astype(dtype), name) for name, item in arrays.items() if name in names]
    graph = helper.make_graph([node], "moe", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=imports, ir_version=8)
    return made


def feeds(tokens: int, dtype: str = "float32", *, batch: bool = False, ties: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((2, tokens // 2, H) if batch else (tokens, H)).astype(dtype)
    scores = rng.standard_normal((tokens, E))
    if ties:
        # Ties from the start, and ties of shares that are too small for a float.
        scores = np.round(scores)
        scores[::2, 1:] -= 500
    return {"x": x, "scores": scores.astype(dtype)}


def rewritten(proto: onnx.ModelProto, spec: str) -> ir.Model:
    model: ir.Model = ir.from_proto(proto)
    (site,) = Pipeline([spec])(model).passes[0].sites
    assert site.status == "rewritten", site.reason
    assert site.reason.startswith(f"op form of {E} experts")
    assert not violations(model)
    assert not any(node.domain for node in model.graph.all_nodes())
    return model


def refusal(proto: onnx.ModelProto) -> str:
    model = ir.from_proto(proto)
    (site,) = Pipeline(["gather-experts"])(model).passes[0].sites
    assert site.status == "refused"
    assert [node.op_type for node in model.graph] == [proto.graph.node[0].op_type]
    return site.reason


def assert_equal(proto: onnx.ModelProto, spec: str, fed: list[dict[str, np.ndarray]], bound: float = 1e-5) -> None:
    before, after = session(proto), session(rewritten(proto, spec))
    for item in fed:
        wanted, ours = run(before, item)["y"], run(after, item)["y"]
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
        scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
        np.testing.assert_allclose(ours.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=bound * scale)


CASES: dict[str, dict[str, Any]] = {
    "relu": {},
    "gelu_normalised": {"activation_type": "gelu", "normalize_routing_weights": 1},
    "silu_one_choice": {"activation_type": "silu", "k": 1},
    "silu_all_chosen": {"activation_type": "silu", "k": E, "bias": False},
    "identity_sparse_mixer": {"activation_type": "identity", "use_sparse_mixer": 1},
    "swiglu": {"activation_type": "swiglu", "swiglu_fusion": 1, "bias": False},
    "gpt_oss": GPT_OSS,
    "old_opset": {**GPT_OSS, "opset": 11},
    "new_opset": {**GPT_OSS, "opset": 21},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_like_the_kernel(case: str, strategy: str) -> None:
    fed = [feeds(tokens) for tokens in (1, 7)] + [feeds(8, ties=True)]
    assert_equal(moe(**CASES[case]), STRATEGIES[strategy], fed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_and_no_token_at_all(strategy: str) -> None:
    assert_equal(moe(batch=True, **GPT_OSS), STRATEGIES[strategy], [feeds(6, batch=True), feeds(0, batch=True)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision(strategy: str) -> None:
    fed = [feeds(7, "float16")]
    assert_equal(moe(dtype="float16", **GPT_OSS), STRATEGIES[strategy], fed, 2e-3)
    assert_equal(moe(dtype="float16", activation_type="gelu"), STRATEGIES[strategy], fed, 2e-3)


def test_equal_shares_go_to_the_higher_number() -> None:
    """The tie matters: the experts differ, so that taking the others would give another result."""
    proto = moe(activation_type="silu", k=1)
    fed = {"x": feeds(3)["x"], "scores": np.zeros((3, E), np.float32)}
    last = {"x": fed["x"], "scores": np.eye(E, dtype=np.float32)[[E - 1] * 3] * 50}
    ours = run(session(rewritten(proto, "gather-experts")), fed)["y"]
    only_last = run(session(proto), last)["y"]
    np.testing.assert_allclose(ours * E, only_last, rtol=0, atol=1e-5 * np.max(np.abs(only_last)))


@pytest.mark.parametrize("strategy", ["grouped", "gather", "loop"])
@pytest.mark.parametrize(("fusion", "third"), [(0, True), (2, False)])
def test_layouts_of_other_kernels(fusion: int, third: bool, strategy: str) -> None:
    """Two matrices, or gate and up side by side: the CPU kernel has neither; the interleaved layout says the same."""
    proto = moe(third=third, **{**GPT_OSS, "swiglu_fusion": fusion})
    arrays = {item.name: numpy_helper.to_array(item) for item in proto.graph.initializer}
    reference = moe(**GPT_OSS)
    for item in reference.graph.initializer:
        array = arrays[item.name].copy()
        if item.name in ("w1", "b1"):
            gate, up = (array, arrays["w3" if item.name == "w1" else "b3"]) if third else np.split(array, 2, axis=1)
            array = np.stack([gate, up], axis=2).reshape(E, 2 * INNER, *array.shape[2:])
        item.CopyFrom(numpy_helper.from_array(array, item.name))
    fed = feeds(7)
    wanted = run(session(reference), fed)["y"]
    ours = run(session(rewritten(proto, STRATEGIES[strategy])), fed)["y"]
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * np.max(np.abs(wanted)))


UNROLL = "gather-experts{strategy=packed,lowering=unroll,chunk_size=2,lanes=2}"


@pytest.mark.parametrize("second", ["gather-experts", "gather-experts{strategy=dense}"])
@pytest.mark.parametrize("first", [*STRATEGIES.values(), UNROLL])
def test_a_second_run_finds_what_the_first_has_written(first: str, second: str) -> None:
    proto = moe(**GPT_OSS)
    if first == UNROLL:
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 6
    # As from a file: what a run keeps in memory is gone.
    model = ir.from_proto(ir.to_proto(rewritten(proto, first)))
    before = ir.to_proto(model).SerializeToString()
    report = Pipeline([second])(model).passes[0]
    assert [(site.id, site.kinds, site.status, site.reason) for site in report.sites] == [
        ("experts:0", ("experts",), "skipped", "already written by an earlier run of this pass")
    ]
    assert not report.changed
    assert ir.to_proto(model).SerializeToString() == before


def test_the_report_names_the_operator() -> None:
    model = ir.from_proto(moe(**GPT_OSS))
    (site,) = Pipeline(["gather-experts"])(model).passes[0].sites
    assert site.reason == f"op form of {E} experts, 2 chosen, is now grouped; no weight is moved"
    assert site.detail["nodes_before"] == 1
    assert site.detail["nodes_after"] == len(list(model.graph.all_nodes()))
    (boundary,) = site.boundaries
    assert (boundary.inputs_before, boundary.outputs_before) == (("x", "scores"), ("y",))


PREFIX = "the expert block that is one operator, com.microsoft MoE 'experts', cannot be read: "


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"k": 6}, "it chooses 6 of 5 experts"),
        ({"k": 1, "use_sparse_mixer": 1}, "its sparse mixer chooses 1 experts, and it is for 2"),
        ({"activation_type": "geglu"}, "its activation 'geglu' is not one of relu, gelu, silu, identity, swiglu"),
        ({**GPT_OSS, "swiglu_fusion": 3}, "its swiglu_fusion=3 is not one of 0, 1, 2"),
        ({**GPT_OSS, "swiglu_fusion": 0}, "it has no third matrix for its gate"),
        ({"third": True}, "it has a third matrix besides activation 'relu'"),
        ({"swap": True}, f"the sizes of 'w1' are [{E}, {H}, {INNER}], not [{E}, {H}, {H}]"),
    ],
)
def test_what_is_refused(options: dict[str, Any], reason: str) -> None:
    assert refusal(moe(**options)) == PREFIX + reason


def test_the_limit_is_felt() -> None:
    """The feeds of these tests reach the clamp, else it would not be tested."""
    free = run(session(moe(**{**GPT_OSS, "swiglu_limit": math.inf})), feeds(7))["y"]
    assert np.max(np.abs(free - run(session(moe(**GPT_OSS)), feeds(7))["y"])) > 0.1
