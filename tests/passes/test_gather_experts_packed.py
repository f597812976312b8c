"""com.microsoft::QMoE written out: matrices in 4 and 8 bits, held against ONNX Runtime's own kernel."""

from __future__ import annotations

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

E, H, INNER = 4, 32, 48
STRATEGIES = {
    "grouped": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "dense": "gather-experts{strategy=dense}",
    "loop": "gather-experts{strategy=packed,chunk_size=3}",
    "lanes": "gather-experts{strategy=packed,chunk_size=3,lanes=2}",
}


def in_bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of the last axis in bytes, the lower half of each first."""
    if bits == 8:
        return numbers.astype(np.uint8)
    even = np.concatenate([numbers, np.zeros((*numbers.shape[:-1], numbers.shape[-1] % 2), numbers.dtype)], axis=-1)
    both: np.ndarray = even[..., 0::2] | (even[..., 1::2] << 4)
    return both.astype(np.uint8)


def qmoe(
    bits: int = 4, block: int = 16, *, zero: bool = False, dtype: str = "float32", **attributes: Any
) -> onnx.ModelProto:
    """A model of one operator; ``block`` 0: a scale for each row."""
    rng = np.random.default_rng(3)
    attributes = {"k": 2, "activation_type": "silu", "expert_weight_bits": bits, **attributes}
    if block:
        attributes.setdefault("block_size", block)
    width = 2 * INNER if attributes["activation_type"] == "swiglu" else INNER
    arrays: dict[str, np.ndarray] = {}
    for number, out, features in (("1", width, H), ("2", H, INNER)):
        blocks = features // block if block else 1
        arrays[f"w{number}"] = in_bytes(rng.integers(0, 2**bits, (E, out, features)), bits)
        scales = rng.uniform(0.5, 1.5, (E, out, blocks)) * 0.5 / 2**bits
        points = rng.integers(2 ** (bits - 1) - 2, 2 ** (bits - 1) + 3, (E, out, blocks))
        arrays[f"s{number}"] = (scales if block else scales[..., 0]).astype(dtype)
        if zero:
            arrays[f"z{number}"] = in_bytes(points if block else points[..., 0], bits)
        arrays[f"b{number}"] = rng.standard_normal((E, out)).astype(dtype)
    names = ["x", "scores", "w1", "s1", "b1", "w2", "s2", "b2", *(["", "", "", "z1", "z2"] if zero else [])]
    node = helper.make_node("QMoE", names, ["y"], name="experts", domain="com.microsoft", **attributes)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [helper.make_tensor_value_info(name, element, ["T", size]) for name, size in (("x", H), ("scores", E))]
    outputs = [helper.make_tensor_value_info("y", element, ["T", H])]
    initializers = [numpy_helper.from_array(item, name) for name, item in arrays.items()]
    graph = helper.make_graph([node], "qmoe", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return made


def feeds(tokens: int, dtype: str = "float32", *, ties: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)
    scores = rng.standard_normal((tokens, E))
    return {
        "x": rng.standard_normal((tokens, H)).astype(dtype),
        "scores": (np.round(scores) if ties else scores).astype(dtype),
    }


def assert_equal(
    proto: onnx.ModelProto, strategy: str, fed: list[dict[str, np.ndarray]], bound: float = 1e-5
) -> ir.Model:
    model: ir.Model = ir.from_proto(proto)
    (site,) = Pipeline([STRATEGIES[strategy]])(model).passes[0].sites
    assert site.status == "rewritten", site.reason
    assert not violations(model)
    if strategy == "grouped":
        assert site.detail["weight_bytes_moved"] == 0
    before, after = session(proto), session(model)
    for item in fed:
        wanted, ours = run(before, item)["y"], run(after, item)["y"]
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
        scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
        np.testing.assert_allclose(ours.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=bound * scale)
    return model


CASES: dict[str, dict[str, Any]] = {
    "blocks": {},
    "blocks_zero_points": {"zero": True, **GPT_OSS},
    "one_choice": {"k": 1, "activation_type": "relu", "zero": True},
    "rows": {"block": 0, **GPT_OSS},
    "rows_in_bytes": {"block": 0, "bits": 8, "activation_type": "gelu"},
    "rows_in_bytes_zero_points": {"block": 0, "bits": 8, "zero": True, "activation_type": "identity"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_like_the_kernel(case: str, strategy: str) -> None:
    assert_equal(qmoe(**CASES[case]), strategy, [feeds(1), feeds(7), feeds(8, ties=True), feeds(0)])


@pytest.mark.parametrize("strategy", ["grouped", "gather"])
@pytest.mark.parametrize("block", [0, 16])
def test_half_precision(strategy: str, block: int) -> None:
    assert_equal(qmoe(block=block, dtype="float16", **GPT_OSS), strategy, [feeds(7, "float16")], 2e-3)


@pytest.mark.parametrize(("bits", "level"), [(8, 0), (4, 4)])
def test_activations_in_bytes(bits: int, level: int) -> None:
    """The kernel computes so; MatMulNBits does the same for one expert at a time."""
    proto = qmoe(bits, accuracy_level=level)
    model = assert_equal(proto, "grouped", [feeds(1), feeds(7)])
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert {node.attributes["accuracy_level"].as_int() for node in products} == {4}
    assert len(products) == 2 * E
    reasons = {
        "gather": "of one expert at a time: accuracy_level=4 lets it compute on activations in 8 bits",
        "loop": "(accuracy_level=4), which it does for constant weights only",
    }
    for strategy, reason in reasons.items():
        (site,) = Pipeline([STRATEGIES[strategy]])(ir.from_proto(proto)).passes[0].sites
        assert site.status == "refused"
        assert site.reason.endswith(reason)


def test_no_weight_moves_and_none_is_dequantised_beforehand() -> None:
    model = assert_equal(qmoe(zero=True), "grouped", [feeds(3)])
    kinds = [value.dtype for value in model.graph.initializers.values() if (value.name or "").startswith("experts.0")]
    assert kinds.count(ir.DataType.UINT8) == 4 * E


PREFIX = "the expert block that is one operator, com.microsoft QMoE 'experts', cannot be read: "


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"expert_weight_bits": 2}, "its weights are stored in 2 bits, not in 4 or 8"),
        ({"quant_type": "fp8"}, "its quant_type='fp8' is not 'int'"),
        ({"weights_prepacked": 1}, "its weights are laid out for one provider (weights_prepacked=1)"),
        ({"block": 0, "zero": True}, "its zero points 'z1', one for each row, are two in a byte"),
        ({"block": 16, "block_size": 64}, "its blocks of 64 do not divide rows of 32"),
        ({"swiglu_limit_after_activation": 1}, "it clamps its gate behind the activation"),
    ],
)
def test_what_is_refused(options: dict[str, Any], reason: str) -> None:
    model = ir.from_proto(qmoe(**options))
    (site,) = Pipeline(["gather-experts"])(model).passes[0].sites
    assert (site.status, site.reason) == ("refused", PREFIX + reason)
    assert [node.op_type for node in model.graph] == ["QMoE"]
