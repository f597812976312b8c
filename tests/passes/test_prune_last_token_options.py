"""prune-last-token: refusals, options, the report, and names of what is inserted."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import pytest

from graphsurgery.errors import UsageError
from graphsurgery.passes.prune_last_token import PruneLastToken
from tests.oracle import prune
from tests.passes.pruning import FULL, INDICES, held, pruned
from tests.strategies.decoders import Decoder, build


def refusal(decoder: Decoder, **options: Any) -> str:
    _, _, report = pruned(decoder, **options)
    (site,) = report.passes[0].sites
    assert site.status == "refused"
    assert not report.changed
    return site.reason


# ---- refusals and usage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ("mask", "no rank-2 attention mask [B, T] of its tokens among its inputs"),
        ("position", "no position ids [B, S], [3, B, S] or [4, B, S]"),
    ],
)
def test_an_index_that_the_model_has_no_input_for(index: str, what: str):
    with pytest.raises(UsageError) as caught:
        pruned(Decoder(), index=index)
    assert str(caught.value) == (
        f"Option index={index} of pass prune-last-token: the model has {what}; use index=runtime or index=last."
    )


def test_an_input_name_that_is_taken():
    with pytest.raises(UsageError, match="the model already has a value of that name; choose another with input_name"):
        pruned(dataclasses.replace(FULL, taken=True), index="runtime")
    held(dataclasses.replace(FULL, taken=True), index="runtime", input_name="free")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "Option keep=0 of pass prune-last-token must be 1 or more."),
        ({"input_name": ""}, "Option input_name of pass prune-last-token must not be empty."),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str):
    with pytest.raises(UsageError) as caught:
        PruneLastToken(**options)
    assert str(caught.value) == message


def test_keeping_all_tokens_is_nothing_to_prune():
    static = dataclasses.replace(FULL, sizes="static")
    assert refusal(static, keep=5) == "keep=5 keeps all 5 tokens: nothing to prune"
    held(static, keep=4)


def test_a_model_without_tokens():
    model = ir.from_onnx_text(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[N] x) => (float[N] logits) { logits = Relu(x) }'
    )
    (site,) = prune(model, PruneLastToken())
    assert site.reason == "no input carries tokens (input_ids [B, S], inputs_embeds [B, S, H] or a packed stream)"


def test_a_second_run_is_refused_by_what_the_first_left():
    model, _ = held(FULL)
    (site,) = prune(model, PruneLastToken(keep=2))
    assert site.status == "refused"
    assert site.reason == (
        "already pruned: output 'logits' [batch, 1, 12] does not hold one row for each of the seq tokens of "
        "'input_ids', GatherND node 'lm_head/prune_last_token/rows' selects them"
    )


def test_options_round_trip_and_have_other_names():
    pass_ = PruneLastToken.from_options({"num_logits_to_keep": "3", "index": "runtime", "depth": "norm"})
    assert str(pass_) == "prune-last-token{index=runtime,keep=3,depth=norm}"
    with pytest.raises(UsageError, match="Option 'keep' of pass prune-last-token is given twice"):
        PruneLastToken.from_options({"logits_to_keep": 2, "keep": 3})


# ---- the report ---------------------------------------------------------------------------------------------------


def test_the_report_as_data():
    _, _, report = pruned(FULL, index="mask", keep=2)
    (data,) = report.to_data()["passes"]
    assert (data["name"], data["spec"], data["changed"]) == (
        "prune-last-token",
        "prune-last-token{index=mask,keep=2}",
        True,
    )
    (site,) = data["sites"]
    head = next(node for node in build(FULL).graph.node if "lm_head.weight" in node.input)
    assert site == {
        "id": "lm_head:logits",
        "kinds": ("lm_head",),
        "layer": None,
        "status": "rewritten",
        "reason": "only the last 2 rows that the mask attends are computed",
        "detail": {
            "index": "mask",
            "keep": 2,
            "selected_from": [head.input[0]],
            "index_source": "attention_mask",
            "assumes": "the mask is not zero where a token is, whichever side is padded; a row without any gives row S-1",
            "products": [f"MatMul {head.name}"],
            "vocabulary": "12",
        },
        "boundaries": (
            {
                "scope": "main",
                "inputs_before": (head.input[0],),
                "outputs_before": ("logits",),
                "inputs_after": (head.input[0], "attention_mask", "input_ids"),
                "outputs_after": ("logits",),
            },
        ),
    }
    assert data["nodes_after"] - data["nodes_before"] == 11


def value_names(model: ir.Model) -> set[str | None]:
    made = {value.name for node in model.graph.all_nodes() for value in node.outputs}
    return made | {value.name for value in model.graph.inputs}


@pytest.mark.parametrize("depth", ["head", "norm", "layer"])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("extras", [(), ("second_head",), ("hidden_output",)])
def test_boundaries_name_values_of_the_models_before_and_after(depth: str, index: str, extras: tuple[str, ...]):
    proto, model, report = pruned(dataclasses.replace(FULL, extras=extras), depth=depth, index=index)
    before, after = value_names(ir.from_proto(proto)), value_names(model)
    for site in report.passes[0].sites:
        (boundary,) = site.boundaries
        assert set(boundary.inputs_before) | set(boundary.outputs_before) <= before
        assert set(boundary.inputs_after) | set(boundary.outputs_after) <= after
        assert boundary.inputs_before
        if index == "runtime":
            assert "last_token_indices" in boundary.inputs_after


def test_what_is_inserted_is_tagged():
    proto, model, _ = pruned(FULL)
    known = {node.name for node in proto.graph.node}
    added = [node for node in model.graph if node.name not in known]
    assert len(added) == 9
    for node in added:
        assert node.name is not None
        assert node.name.startswith("lm_head/prune_last_token/")
        assert node.metadata_props["graphsurgery.pass"] == "prune-last-token"
        assert node.metadata_props["graphsurgery.site"] == "lm_head:logits"
    assert all(node.metadata_props == {} for node in model.graph if node.name in known)
