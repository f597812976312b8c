"""prune-last-token on generated decoders: tails, several heads, heads in branches and in other files."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.contracts import read_contracts
from graphsurgery.errors import UsageError
from graphsurgery.passes.prune_last_token import PruneLastToken
from tests.oracle import assert_pruned_equal, prune, run, session
from tests.passes.pruning import FULL, held, inserted, pruned
from tests.strategies.decoders import Decoder, build, feeds_of

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
