"""Pruning the rows before the head: options, ways to choose rows, depths, reports, refusals."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.contracts import RowSelection, read_contracts
from graphsurgery.errors import UsageError
from graphsurgery.passes.prune_last_token import PruneLastToken
from graphsurgery.pipeline import Pipeline
from tests.oracle import assert_pruned_equal, prune, run, session
from tests.strategies.decoders import Decoder, build, feeds_of

if TYPE_CHECKING:
    from graphsurgery.site_report import Report

FULL = Decoder(mask="int64", positions=0, past=True)
INDICES = ("last", "mask", "position", "runtime")


def pruned(decoder: Decoder, **options: Any) -> tuple[onnx.ModelProto, ir.Model, Report]:
    proto = build(decoder)
    model = ir.from_proto(proto)
    return proto, model, Pipeline([PruneLastToken(**options)], check=True)(model)


def held(decoder: Decoder, **options: Any) -> tuple[ir.Model, Report]:
    """Prune and hold to the contract."""
    proto, model, report = pruned(decoder, **options)
    assert report.passes[0].count("rewritten") >= 1, [site.reason for site in report.passes[0].sites]
    assert_pruned_equal(session(proto), session(model), model, feeds_of(decoder), lenient=decoder.half)
    return model, report


def inserted(proto: onnx.ModelProto, model: ir.Model) -> dict[str, int]:
    difference = collections.Counter(node.op_type for node in model.graph.all_nodes())
    difference.subtract(node.op_type for node in ir.from_proto(proto).graph.all_nodes())
    return {op_type: count for op_type, count in difference.items() if count}


def refusal(decoder: Decoder, **options: Any) -> str:
    _, _, report = pruned(decoder, **options)
    (site,) = report.passes[0].sites
    assert site.status == "refused"
    assert not report.changed
    return site.reason


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


# ---- tails and layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["concat", "expanded_mask", "slice_to_size", "if", "pad", "slice_all"])
@pytest.mark.parametrize("index", ["last", "runtime"])
@pytest.mark.parametrize("layout", ["plain", "flat_of_hidden", "flat_output"])
def test_shape_operands_of_the_tail_follow_the_rows(tail: str, index: str, layout: str):
    held(dataclasses.replace(FULL, tail=(tail,), layout=layout), index=index, keep=2)


def test_operands_become_constants_and_their_arithmetic_goes():
    decoder = dataclasses.replace(Decoder(), tail=("expanded_mask",), layout="flat_of_hidden", sizes="one")
    proto, model, _ = pruned(decoder)
    difference = inserted(proto, model)
    # The head's Shape nodes are gone: one for each of B and S of the flat and of the full form, one of the logits.
    assert difference["Shape"] <= -2
    assert difference["Slice"] == 1


@pytest.mark.parametrize("extra", ["rows_of_logits", "size_of_logits"])
@pytest.mark.parametrize("index", ["last", "runtime"])
def test_sizes_that_are_read_off_the_logits_stay(extra: str, index: str):
    proto, model, _ = pruned(dataclasses.replace(FULL, extras=(extra,)), index=index, keep=2)
    feeds = feeds_of(FULL)[0]
    length = feeds["input_ids"].shape[1]
    fed = feeds | {"last_token_indices": np.zeros((2, 1, 1), np.int32)}
    name = "row_numbers" if extra == "rows_of_logits" else "logits_shape"
    before, after = run(session(proto), feeds), run(session(model), fed)
    np.testing.assert_array_equal(after[name], before[name])
    assert after[name].tolist() == (list(range(length)) if extra == "rows_of_logits" else [2, length, 12])
    assert after["logits"].shape == (2, 2, 12)


def test_a_tail_that_is_the_same_for_all_batches_is_selected_for_each():
    held(dataclasses.replace(FULL, tail=("shared_row_scale",)), index="mask", keep=2)
    held(dataclasses.replace(FULL, tail=("shared_row_scale",)), index="last")


def test_what_is_declared_of_the_tail_is_corrected():
    decoder = dataclasses.replace(FULL, declared=True, tail=("bias", "softcap"))
    _, model, _ = pruned(decoder, keep=2)
    declared = [
        value for node in model.graph for value in node.outputs if value.shape is not None and len(value.shape) == 3
    ]
    tail = [value for value in declared if value.shape is not None and value.shape[-1] == 12]
    assert tail
    assert all(value.shape is not None and value.shape[1] == 2 for value in tail)


def test_logits_that_declare_nothing_declare_their_shape_after():
    proto = build(FULL)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    model = ir.from_proto(proto)
    prune(model, PruneLastToken(keep=2))
    assert str(model.graph.outputs[0].shape) == "[batch,2,12]"


def test_a_weight_behind_the_head_is_never_duplicated():
    proto, model, _ = pruned(dataclasses.replace(FULL, head="tied"))
    assert sum(value.name == "embed" for value in model.graph.initializers.values()) == 1
    added = set(model.graph.initializers) - {tensor.name for tensor in proto.graph.initializer}
    sizes = [model.graph.initializers[name].const_value for name in added]
    assert all(tensor is not None and tensor.size == 1 for tensor in sizes)


# ---- several heads ------------------------------------------------------------------------------------------------


def test_all_heads_on_one_hidden_state_are_pruned_from_one_selection():
    decoder = dataclasses.replace(FULL, extras=("second_head", "value_head"))
    model, report = held(decoder)
    assert [(site.id, site.status) for site in report.passes[0].sites] == [
        ("lm_head:logits", "rewritten"),
        ("lm_head:draft_logits", "rewritten"),
    ]
    assert sum(node.op_type == "GatherND" for node in model.graph) == 1
    assert [contract.output for contract in read_contracts(model)] == ["logits", "draft_logits"]
    assert [str(value.shape) for value in model.graph.outputs] == ["[batch,1,12]", "[batch,1,7]", "[batch,seq,1]"]


def test_one_of_several_heads_can_be_chosen():
    decoder = dataclasses.replace(FULL, extras=("second_head",))
    model, report = held(decoder, sites=("lm_head:draft_logits",))
    assert [(site.id, site.status) for site in report.passes[0].sites] == [
        ("lm_head:logits", "skipped"),
        ("lm_head:draft_logits", "rewritten"),
    ]
    assert [str(value.shape) for value in model.graph.outputs] == ["[batch,seq,12]", "[batch,1,7]"]


def test_two_heads_share_a_norm_that_only_they_read():
    decoder = dataclasses.replace(FULL, extras=("second_head",))
    _, report = held(decoder, depth="norm")
    for site in report.passes[0].sites:
        assert site.detail["selected_from"] == ["residual"]
    _, report = held(decoder, depth="norm", exclude=("lm_head:logits",))
    site = report.passes[0].sites[1]
    selected = site.detail["selected_from"]
    assert isinstance(selected, list)
    assert len(selected) == 1
    assert f"; stopped at the head: every row of {selected[0]!r} is needed by node 'node_" in site.reason
    assert site.reason.endswith("(MatMul)")


def test_outputs_made_of_one_another_are_pruned_together_or_not_at_all():
    decoder = dataclasses.replace(FULL, extras=("log_probs",))
    model, report = held(decoder, keep=2)
    assert report.passes[0].count("rewritten") == 2
    assert [str(value.shape) for value in model.graph.outputs] == ["[batch,2,12]"] * 2
    _, model, report = pruned(decoder, sites=("lm_head:logits",))
    assert [site.status for site in report.passes[0].sites] == ["refused", "skipped"]
    assert report.passes[0].sites[0].reason == (
        "every row of output 'logits' is needed by node 'node_logits_negated' (Neg)"
    )
    assert not report.changed


# ---- decoders in branches -------------------------------------------------------------------------------------------


def merged(decoder: Decoder) -> onnx.ModelProto:
    """Two decoders as the branches of an If, as exporters merge those with and without a cache."""
    proto = build(decoder)
    outer = {value.name for value in proto.graph.input}
    branches = []
    for prefix in ("cached", "first"):
        graph = onnx.GraphProto()
        graph.CopyFrom(proto.graph)
        graph.name = prefix
        del graph.input[:]

        def renamed(name: str, prefix: str = prefix) -> str:
            return name if not name or name in outer else f"{prefix}/{name}"

        for node in graph.node:
            node.name = renamed(node.name)
            for names in (node.input, node.output):
                renewed = [renamed(name) for name in names]
                del names[:]
                names.extend(renewed)
        for item in (*graph.initializer, *graph.output):
            item.name = renamed(item.name)
        branches.append(graph)
    outputs = [value.name for value in proto.graph.output]
    choice = helper.make_node(
        "If", ["use_cache"], outputs, then_branch=branches[0], else_branch=branches[1], name="merged"
    )
    inputs = [*proto.graph.input, helper.make_tensor_value_info("use_cache", TensorProto.BOOL, [])]
    graph = helper.make_graph([choice], "merged", inputs, list(proto.graph.output))
    return helper.make_model(
        graph, opset_imports=list(proto.opset_import), ir_version=10, functions=list(proto.functions)
    )


@pytest.mark.parametrize("options", [{}, {"index": "runtime", "keep": 2}, {"index": "last", "depth": "norm"}])
def test_merged_decoders_are_pruned_in_both_branches(options: dict[str, Any]):
    decoder = dataclasses.replace(FULL, extras=("hidden_output",), tail=("concat",), layout="flat_of_hidden")
    if options.get("depth") == "norm":
        decoder = dataclasses.replace(decoder, extras=())
    proto = merged(decoder)
    model = ir.from_proto(proto)
    (site,) = prune(model, PruneLastToken(**options))
    assert site.status == "rewritten", site.reason
    assert len(site.detail["products"]) == 2  # type: ignore[arg-type]
    assert len(site.detail["selected_from"]) == 2  # type: ignore[arg-type]
    assert "stopped" not in site.reason
    feeds = [feed | {"use_cache": np.array(flag)} for feed in feeds_of(decoder) for flag in (True, False)]
    assert_pruned_equal(session(proto), session(model), model, feeds)


# ---- a head in another file ---------------------------------------------------------------------------------------


def headless(**parts: Any) -> onnx.ModelProto:
    proto = build(dataclasses.replace(FULL, extras=("hidden_output",), **parts))
    del proto.graph.output[0]
    return proto


@pytest.mark.parametrize("options", [{}, {"output": "hidden_copy"}, {"depth": "norm"}, {"index": "runtime", "keep": 2}])
def test_hidden_states_are_pruned_where_the_head_is_another_file(options: dict[str, Any]):
    proto = headless()
    model = ir.from_proto(proto)
    (site,) = prune(model, PruneLastToken(**options))
    assert (site.id, site.kinds, site.status) == ("hidden:hidden_copy", ("hidden",), "rewritten")
    keep = options.get("keep", 1)
    assert str(model.graph.outputs[0].shape) == f"[batch,{keep},32]"
    assert_pruned_equal(session(proto), session(model), model, feeds_of(FULL))


def test_an_output_that_does_not_exist():
    with pytest.raises(UsageError) as caught:
        pruned(FULL, output="hidden")
    assert str(caught.value) == "Option output='hidden' of pass prune-last-token: the model's outputs are logits."


def test_an_output_that_a_head_ends_in_is_pruned_in_front_of_the_head():
    _, report = held(dataclasses.replace(FULL, extras=("second_head",)), output="draft_logits")
    (site,) = report.passes[0].sites
    assert site.id == "lm_head:draft_logits"
    assert site.detail["products"] == ["MatMul node_draft_logits"]


def test_no_output_to_prune():
    proto = headless()
    proto.graph.output.extend([helper.make_tensor_value_info("residual", TensorProto.FLOAT, ["batch", "seq", 32])])
    model = ir.from_proto(proto)
    (site,) = prune(model, PruneLastToken())
    assert (site.id, site.status) == ("lm_head", "refused")
    assert site.reason == (
        "no output looks like logits, and none is the result of a final normalisation; name it with output=NAME"
    )


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
