"""Errors planted behind every pass are found at depth regions, with the data file or without, and named."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.contracts import CONTRACTS_KEY
from graphsurgery.model_io import load
from graphsurgery.pipeline import Pipeline
from graphsurgery.rewrite import PASS_KEY
from graphsurgery.weight_spec import read_weights, write_weights
from tests.equivalence.regions.planted import copied, planted_node, verified

# ---- errors in what passes insert ------------------------------------------------------------------------------------


def _scaled(model: ir.Model) -> None:
    node = planted_node(model, "block-attention", "attention:1", "/scaled_query")
    value = ir.Value(name="wrong_scale", const_value=ir.tensor(np.float32(0.6)))
    model.graph.register_initializer(value)
    node.replace_input_with(1, value)


def _blocks_in_wrong_order(model: ir.Model) -> None:
    node = planted_node(model, "block-attention", "attention:1", "/rows")
    first, second = node.inputs
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)


def _one_block_off(model: ir.Model) -> None:
    """The second block attends to what the first one may."""
    node = planted_node(model, "block-attention", "attention:1", "/query_1")
    other = planted_node(model, "block-attention", "attention:1", "/query")
    for slot in (1, 2):
        node.replace_input_with(slot, other.inputs[slot])


@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("mutation", [_scaled, _blocks_in_wrong_order, _one_block_off])
def test_errors_in_blocked_attention(fixtures_dir, tmp_path, mutation, data):
    source = copied(fixtures_dir / "llama_external", tmp_path, data=data)
    report = verified(source, ["block-attention{q_blocks=2}"], mutation)
    assert report.status == "different"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith(
        "block-attention at attention:1 (with nodes of block-attention at attention:0): "
    )
    assert (
        "'layers.1.attention/block_attention/rows', read by node_transpose_7, is not what 'where_1' is"
        in report.reasons[0]
    )
    found = {region.sites[0]: region.status for region in report.regions}
    # The other layers stay as they are, and are told to be.
    assert found == {"attention:0": "equal", "attention:1": "different", "attention:2": "equal"}


def _mask_of_the_other_block(model: ir.Model) -> None:
    node = planted_node(model, "block-attention", "attention:0", "/le_part_1")
    node.replace_input_with(1, planted_node(model, "block-attention", "attention:0", "/unsqueeze_2_part").outputs[0])


def _a_needed_key_cut_off(model: ir.Model) -> None:
    node = planted_node(model, "block-attention", "attention:0", "/end_column")
    value = ir.Value(name="nothing", const_value=ir.tensor(np.zeros(1, np.int64)))
    model.graph.register_initializer(value)
    node.replace_input_with(1, value)


@pytest.mark.parametrize("mutation", [_mask_of_the_other_block, _a_needed_key_cut_off])
def test_errors_in_what_layers_share(fixtures_dir, tmp_path, mutation):
    """They have their mask in common, so all of them are wrong."""
    source = copied(fixtures_dir / "llama_external", tmp_path, data=False)
    report = verified(source, ["block-attention{q_blocks=2}"], mutation)
    assert report.status == "different"
    assert {region.status for region in report.regions} == {"different"}
    assert sum(region.alike for region in report.regions) == 3


def test_an_error_in_one_layer_of_many_is_found(fixtures_dir, tmp_path):
    """Regions are checked by kind; a layer that is unlike the others is a kind of its own."""
    source = copied(fixtures_dir / "llama_external", tmp_path, data=False)
    report = verified(source, ["block-attention{q_blocks=2}"], _scaled)
    assert [(region.sites[0], region.alike) for region in report.regions] == [
        ("attention:0", 1),
        ("attention:1", 1),
        ("attention:2", 1),
    ]


@pytest.mark.parametrize("depth", ["head", "layer"])
@pytest.mark.parametrize(
    ("told", "done"),
    [("mask", "last"), ("position", "last"), ("last", "mask"), ("runtime", "mask"), ("mask", "runtime")],
)
def test_an_index_mode_that_is_mixed_up(fixtures_dir, tmp_path, told, done, depth):
    """The rows that are kept are not those that the contract tells."""
    source = copied(fixtures_dir / "optimum_llama", tmp_path, data=False)
    right = load(source)
    Pipeline([f"prune-last-token{{index={told},depth={depth}}}"])(right)

    def mutation(model: ir.Model) -> None:
        model.metadata_props[CONTRACTS_KEY] = right.metadata_props[CONTRACTS_KEY]
        if told == "runtime":
            # The row is asked for, and nothing reads it.
            asked = next(value for value in right.graph.inputs if value.name == "last_token_indices")
            model.graph.inputs.append(ir.Value(name=asked.name, type=asked.type, shape=asked.shape))

    report = verified(source, [f"prune-last-token{{index={done},depth={depth}}}"], mutation)
    assert report.status == "different"
    assert any(
        reason.startswith(
            "prune-last-token at lm_head:logits: 'logits', read by output logits, is not what 'logits' is: it"
        )
        for reason in report.reasons
    ), report.reasons


def test_the_first_row_in_place_of_the_last(fixtures_dir, tmp_path):
    source = copied(fixtures_dir / "llama_external", tmp_path, data=False)

    def mutation(model: ir.Model) -> None:
        planted_node(model, "prune-last-token", "lm_head:logits", "/last_row").op_type = "ArgMin"

    assert verified(source, ["prune-last-token"]).status == "equal"
    report = verified(source, ["prune-last-token"], mutation)
    assert report.status == "different"
    assert "prune-last-token at lm_head:logits: 'logits'" in report.reasons[0]


# ---- errors in calls and in what cannot run ---------------------------------------------------------------------------


def test_weights_exchanged_between_two_calls(fixtures_dir, tmp_path):
    """Nothing that the pass made is in the region but the call, which is written out there."""
    source = copied(fixtures_dir / "llama_static", tmp_path, data=True)

    def mutation(model: ir.Model) -> None:
        calls = [node for node in model.graph if node.op_identifier() in model.functions]
        slot = next(
            slot
            for slot, (one, other) in enumerate(zip(calls[0].inputs, calls[1].inputs, strict=True))
            if one is not other and one is not None and one.is_initializer()
        )
        one, other = calls[0].inputs[slot], calls[1].inputs[slot]
        calls[0].replace_input_with(slot, other)
        calls[1].replace_input_with(slot, one)

    report = verified(source, ["extract-functions", "bound-context"], mutation)
    assert report.status == "different"
    assert all("extract-functions at layers:LlamaDecoderLayer" in reason for reason in report.reasons), report.reasons
    found = verified(source, ["extract-functions", "bound-context"])
    assert found.status == "equal"


def _beyond_the_end(model: ir.Model) -> None:
    node = next(item for item in model.graph if (item.name or "").endswith("gather_experts/choice_weights"))
    value = ir.Value(name="far", const_value=ir.tensor(np.array([7], np.int64)))
    model.graph.register_initializer(value)
    node.replace_input_with(1, value)


def _rows_that_are_not_there(model: ir.Model) -> None:
    node: Any = next(item for item in model.graph if item.op_type == "Gather" and PASS_KEY in item.metadata_props)
    shift = ir.Value(name="shift", const_value=ir.tensor(np.array(1000, node.inputs[1].dtype.numpy())))
    model.graph.register_initializer(shift)
    added = ir.node("Add", [node.inputs[1], shift])
    added.outputs[0].name = "shifted"
    model.graph.insert_before(node, added)
    node.replace_input_with(1, added.outputs[0])


@pytest.mark.parametrize(
    ("mutation", "what"),
    [
        (_beyond_the_end, "cannot be loaded by ONNX Runtime"),
        (_rows_that_are_not_there, ", in Gather 'layers.0.experts/gather_experts/token_rows'"),
    ],
)
@pytest.mark.parametrize("depth", ["outputs", "regions"])
def test_what_does_not_run_is_told_with_its_pass(fixtures_dir, tmp_path, mutation, what, depth):
    source = copied(fixtures_dir / "qwen3_moe_matmulnbits", tmp_path, data=True)
    report = verified(source, ["gather-experts{strategy=grouped}"], mutation, depth=depth)
    assert report.status == "different"
    assert what in report.reasons[0]
    assert "(made by gather-experts at experts:0)" in report.reasons[0]


# ---- errors in what passes leave -------------------------------------------------------------------------------------


def test_a_folded_constant_one_off(fixtures_dir, tmp_path):
    source = copied(fixtures_dir / "llama_external", tmp_path, data=False)
    before = set(load(source).graph.initializers)

    def mutation(model: ir.Model) -> None:
        made: list[Any] = [value for name, value in model.graph.initializers.items() if name not in before]
        value = next(item for item in made if item.dtype == ir.DataType.INT64 and item.const_value.size == 4)
        numbers = value.const_value.numpy().copy()
        numbers[[1, 2]] = numbers[[2, 1]]
        value.const_value = ir.tensor(numbers, name=value.name)

    spec = "bind-dims{batch=2,seq=3,past=4}"
    assert verified(source, [spec]).status == "equal"
    report = verified(source, [spec], mutation)
    assert report.status == "different"
    assert report.reasons[0].startswith("bind-dims: ")


def test_two_outputs_with_each_others_names(fixtures_dir, tmp_path):
    source = copied(fixtures_dir / "llama_external", tmp_path, data=False)

    def mutation(model: ir.Model) -> None:
        one, other = model.graph.outputs[1], model.graph.outputs[2]
        one.name, other.name = other.name, one.name

    spec = "rename-io{to=genai}"
    assert verified(source, [spec]).status == "equal"
    report = verified(source, [spec], mutation)
    assert report.status == "different"
    assert len(report.reasons) == 2
    assert all(reason.startswith("rename-io: ") for reason in report.reasons)


def test_a_weight_of_a_skeleton_at_another_place(fixtures_dir, tmp_path):
    source = copied(fixtures_dir / "llama_external", tmp_path, data=False)

    def mutation(model: ir.Model) -> None:
        entries = list(read_weights(model))
        entries[3] = dataclasses.replace(entries[3], offset=entries[3].start + 4)
        write_weights(model, entries)

    assert verified(source, ["weights-to-inputs"]).status == "equal"
    report = verified(source, ["weights-to-inputs"], mutation)
    assert report.status == "different"
    assert "begins at byte" in report.reasons[0]


def test_a_constant_that_tidying_changed(fixtures_dir, tmp_path):
    source = copied(fixtures_dir / "optimum_llama", tmp_path, data=False)

    def mutation(model: ir.Model) -> None:
        node = next(item for item in model.graph if item.op_type == "Pow")
        value = ir.Value(name="wrong", const_value=ir.tensor(np.float32(3)))
        model.graph.register_initializer(value)
        node.replace_input_with(1, value)

    report = verified(source, ["prune-last-token", "tidy"], mutation)
    assert report.status == "different"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith(
        "prune-last-token or tidy: '/model/layers.0/input_layernorm/Pow_output_0', read by "
    )
