"""block-attention: the peak that a memory budget predicts, against the tensors that are alive at a time."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphsurgery.pipeline import Pipeline
from tests.passes.live_bytes import peak_bytes
from tests.strategies.attentions import AttentionSpec, build

LENGTH = 256


def peaks(mask: str, budget: str, *, softcap: bool = False) -> tuple[int, int, str]:
    """What was predicted, what is alive at most, and how the site was divided."""
    spec = AttentionSpec(
        2, 2, 4, 4, "scores_mul", "transpose", "unsqueeze", mask, "finite", softcap, False, "none", False, (LENGTH, 0)
    )
    proto = build(spec)
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "B":
                dim.dim_value = 1
    model = ir.from_proto(proto)
    report = Pipeline([f"block-attention{{memory_budget={budget},assume='S={LENGTH}',skip=none}}"])(model).passes[0]
    predicted = report.sites[0].detail["predicted_bytes"]
    assert isinstance(predicted, int)
    return predicted, peak_bytes(model, "block_attention"), report.sites[0].reason


@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "bool_where", "padding"])
@pytest.mark.parametrize("budget", ["1MiB", "256KiB", "64KiB"])
def test_the_prediction_is_within_half_as_much_again(budget: str, mask: str, softcap: bool) -> None:
    predicted, alive, _ = peaks(mask, budget, softcap=softcap)
    assert predicted / 1.5 <= alive <= predicted * 1.5


def test_smaller_budgets_mean_smaller_blocks() -> None:
    found = [peaks("causal", budget) for budget in ("1MiB", "256KiB", "64KiB")]
    assert [reason for _, _, reason in found] == [
        "4 query blocks, keys and values not expanded",
        "16 query blocks, keys and values not expanded",
        "16 query blocks, 4 key blocks, keys and values not expanded",
    ]
    assert [predicted for predicted, _, _ in found] == [788480, 197120, 49664]
    unblocked = 4 * LENGTH * LENGTH * 4
    assert all(alive < unblocked for _, alive, _ in found)
