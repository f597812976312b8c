"""prune-last-token on generated decoders: which rows, by every index, and through which norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.contracts import RowSelection, read_contracts
from graphsurgery.passes.prune_last_token import PruneLastToken
from tests.oracle import assert_pruned_equal, prune, run, session
from tests.passes.pruning import FULL, INDICES, held, inserted, pruned
from tests.strategies.decoders import Decoder, build, feeds_of

# ---- which rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_every_way_to_choose_rows_and_every_number_of_them(index: str, keep: int):
    model, _ = held(FULL, index=index, keep=keep)
    (contract,) = read_contracts(model)
    sources = {"mask": "attention_mask", "position": "position_ids", "runtime": "last_token_indices"}
    assert contract == RowSelection("logits", index, keep, sources.get(index), "input_ids", 1, 1, 0)  # type: ignore[arg-type]
    assert str(model.graph.outputs[0].shape) == f"[batch,{keep},12]"


@pytest.mark.parametrize("mask", ["int64", "int32", "bool", "float32"])
def test_masks_of_every_type(mask: str):
    held(dataclasses.replace(FULL, mask=mask), index="mask", keep=2)


@pytest.mark.parametrize("planes", [0, 3, 4])
def test_positions_of_every_rank(planes: int):
    proto, model, _ = pruned(dataclasses.replace(FULL, positions=planes), index="position")
    extra = {0: {}, 3: {"ReduceMax": 1}, 4: {"Gather": 1}}[planes]
    assert inserted(proto, model) == {"ArgMax": 1, "Unsqueeze": 1, "GatherND": 1, **extra}
    held(dataclasses.replace(FULL, positions=planes), index="position", keep=3)


def rows_taken(model: ir.Model, proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[list[int]]:
    """For each batch row, which rows of the full logits came out."""
    full, got = run(session(proto), feeds)["logits"], run(session(model), feeds)["logits"]
    return [
        [int(np.argmin(np.abs(full[b] - row[None, :]).sum(axis=-1))) for row in got[b]] for b in range(full.shape[0])
    ]


def feeds_for(mask: list[list[int]] | None = None, positions: list[list[int]] | None = None) -> dict[str, np.ndarray]:
    """Feeds for ``FULL`` with S = 5 and P = 3, or what the mask says."""
    rng = np.random.default_rng(0)
    batch = len(mask or positions or [])
    width = len(mask[0]) if mask else 8
    return {
        "input_ids": np.stack([rng.permutation(16)[:5] for _ in range(batch)]),
        "past_key_values": rng.standard_normal((batch, width - 5, 32)).astype(np.float32),
        "attention_mask": np.array(mask if mask else np.ones((batch, width)), np.int64),
        "position_ids": np.array(positions if positions else [[0, 1, 2, 3, 4]] * batch, np.int64),
    }


def test_the_mask_counts_in_its_last_columns_only():
    proto, model, _ = pruned(FULL, index="mask")
    mask = [
        [1, 1, 1, 1, 1, 1, 1, 1],  # no padding
        [0, 1, 1, 0, 0, 1, 1, 1],  # left padding
        [1, 1, 1, 1, 1, 0, 0, 0],  # right padding
        [1, 1, 1, 1, 0, 0, 0, 0],  # one token
        [1, 1, 1, 0, 0, 0, 0, 0],  # nothing but padding in this call
        [0, 0, 0, 0, 1, 0, 1, 0],  # holes
    ]
    assert rows_taken(model, proto, feeds_for(mask)) == [[4], [4], [1], [0], [4], [3]]


def test_a_window_is_clamped_at_the_first_row():
    proto, model, _ = pruned(FULL, index="mask", keep=3)
    mask = [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert rows_taken(model, proto, feeds_for(mask)) == [[2, 3, 4], [0, 0, 1], [0, 0, 0]]


def test_more_rows_than_tokens_repeat_the_first():
    proto, model, _ = pruned(dataclasses.replace(FULL, mask=None, positions=None), index="last", keep=7)
    feeds = feeds_for([[1] * 8])
    assert rows_taken(model, proto, feeds) == [[0, 0, 0, 1, 2, 3, 4]]


def test_the_largest_position_is_the_last_token():
    proto, model, _ = pruned(FULL, index="position")
    positions = [
        [0, 1, 2, 3, 4],
        [-1, -1, 0, 1, 2],
        [0, 1, -1, -1, -1],
        [0, 1, 1, 1, 1],
        [7, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1],
    ]
    assert rows_taken(model, proto, feeds_for(positions=positions)) == [[4], [4], [1], [4], [0], [4]]


@pytest.mark.parametrize("opset", [11, 12, 13, 18, 21])
@pytest.mark.parametrize("index", INDICES)
def test_every_opset_that_a_selection_can_be_written_in(opset: int, index: str):
    decoder = dataclasses.replace(FULL, opset=opset)
    model, _ = held(decoder, index=index, keep=2)
    assert model.opset_imports[""] == opset


@pytest.mark.parametrize("opset", [7, 8, 9, 10])
def test_before_opset_11_only_the_last_row(opset: int):
    def old() -> ir.Model:
        table = onnx.numpy_helper.from_array(np.arange(32, dtype=np.float32).reshape(8, 4), "table")
        weight = onnx.numpy_helper.from_array(np.ones((4, 6), np.float32), "w")
        nodes = [
            helper.make_node("Gather", ["table", "input_ids"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "w"], ["logits"]),
        ]
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"])
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", 6])
        graph = helper.make_graph(nodes, "old", [ids], [logits], [table, weight])
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
        model: ir.Model = ir.from_proto(proto)
        return model

    before, model = old(), old()
    (site,) = prune(model, PruneLastToken())
    assert site.status == "rewritten"
    feeds = {"input_ids": np.array([[1, 2, 3], [4, 5, 6]])}
    assert_pruned_equal(session(before), session(model), model, [feeds])
    (site,) = prune(old(), PruneLastToken(index="runtime"))
    assert site.reason == f"the model imports opset {opset}; selecting rows by runtime needs 11: convert it first"


def test_before_ir_version_4_constants_are_nodes():
    proto = build(FULL)
    proto.ir_version = 3
    tensors = proto.graph.initializer
    proto.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors)
    model = ir.from_proto(proto)
    prune(model, PruneLastToken(index="runtime"))
    assert set(model.graph.initializers) == {tensor.name for tensor in tensors}
    assert model.graph.inputs[-1].name == "last_token_indices"
    onnx.checker.check_model(ir.to_proto(model))
    assert_pruned_equal(session(proto), session(model), model, feeds_of(FULL))


def test_auto_takes_the_mask_then_positions_then_the_last_row():
    def chosen(**parts: Any) -> tuple[Any, Any, list[str]]:
        _, report = held(dataclasses.replace(FULL, **parts))
        detail = report.passes[0].sites[0].detail
        return detail["index"], detail.get("index_source"), report.passes[0].warnings

    assert chosen() == ("mask", "attention_mask", [])
    assert chosen(mask=None) == ("position", "position_ids", [])
    index, source, warnings = chosen(mask=None, positions=None)
    assert (index, source) == ("last", None)
    assert warnings == [
        (
            "index=last (the model has neither a rank-2 attention mask nor position ids) takes row S-1 of every batch "
            "row: right for single prompts and left padding, wrong for right-padded batches."
        )
    ]


def test_one_prompt_needs_no_warning():
    _, report = held(dataclasses.replace(FULL, sizes="one"), index="last")
    assert report.passes[0].warnings == []


# ---- the runtime input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("input_type", "dtype", "shape"),
    [("int32_b11", ir.DataType.INT32, "[batch,1,1]"), ("int64_b", ir.DataType.INT64, "[batch]")],
)
def test_the_runtime_input_comes_last_and_is_warned_of(input_type: str, dtype: ir.DataType, shape: str):
    model, report = held(FULL, index="runtime", input_name="which", input_type=input_type)
    added = model.graph.inputs[-1]
    assert [value.name for value in model.graph.inputs] == [
        "input_ids",
        "position_ids",
        "attention_mask",
        "past_key_values",
        "which",
    ]
    assert (added.dtype, str(added.shape)) == (dtype, shape)
    assert added.doc_string == (
        "Row of the last token that is wanted of each batch row, relative to this call's tokens, 0 .. S-1."
    )
    assert report.passes[0].warnings == [
        (
            "Input 'which' must be set on every call, prefill and each decode step alike (0 .. S-1, relative to the "
            "tokens of that call); a generation runtime that does not know it, such as ONNX Runtime GenAI, must be "
            "told to."
        )
    ]


def test_a_packed_stream_takes_any_number_of_rows():
    proto, model, _ = pruned(Decoder(tokens="packed"), index="runtime", input_type="int64_b", keep=2)
    assert str(model.graph.inputs[-1].shape) == "[selected_rows]"
    assert str(model.graph.outputs[0].shape) == "[2*selected_rows,12]"
    feeds = {"input_ids": np.arange(9), "last_token_indices": np.array([2, 0, 8])}
    full, got = run(session(proto), feeds)["logits"], run(session(model), feeds)["logits"]
    np.testing.assert_allclose(got, full[[1, 2, 0, 0, 7, 8]], atol=1e-5)


def test_a_packed_stream_without_an_index_keeps_one_row_and_says_so():
    _, report = held(Decoder(tokens="packed"))
    assert report.passes[0].sites[0].reason == "only the last row of the stream is computed"
    assert report.passes[0].warnings == [
        (
            "index=last keeps the last row of the whole stream only: right for one sequence; where several are "
            "packed, use index=runtime and feed the last row of each."
        )
    ]


# ---- depth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["rms", "rms_casts", "layer", "layer_op", "simplified", "function"])
def test_the_norm_computes_the_wanted_rows_only(norm: str):
    decoder = dataclasses.replace(FULL, norm=norm)
    proto, model, report = pruned(decoder, depth="norm", index="last")
    assert inserted(proto, model) == {"Slice": 1}
    (site,) = report.passes[0].sites
    assert site.detail["selected_from"] == ["residual"]
    assert site.reason == "only the last row of every batch row is computed"
    held(decoder, depth="norm", index="last")


def test_a_norm_that_adds_the_residual_is_selected_from_on_both_sides():
    proto, model, report = pruned(dataclasses.replace(FULL, norm="skip"), depth="norm", index="last")
    assert inserted(proto, model) == {"Slice": 2}
    assert len(report.passes[0].sites[0].detail["selected_from"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"norm": "none"}, "no final normalisation was recognised above it"),
        ({"extras": ("hidden_output",)}, "every row of 'mul_27' is needed by node 'node_hidden_copy' (Identity)"),
        ({"head": "integer"}, "DynamicQuantizeLinear node '{quantize}' computes one scale from all rows"),
    ],
)
def test_where_the_norm_cannot_be_gone_through_it_stops_at_the_head_and_says_why(parts: dict[str, Any], why: str):
    decoder = dataclasses.replace(FULL, **parts)
    model, report = held(decoder, depth="norm", index="last")
    names = {node.op_type: node.name for node in model.graph}
    site = report.passes[0].sites[0]
    hidden = [
        edge.name for node in model.graph if node.op_type == "Slice" for edge in node.inputs[:1] if edge is not None
    ]
    assert site.detail["selected_from"] == hidden
    text = why.format(quantize=names.get("DynamicQuantizeLinear")).replace("mul_27", hidden[0] or "")
    assert site.reason == f"only the last row of every batch row is computed; stopped at the head: {text}"
