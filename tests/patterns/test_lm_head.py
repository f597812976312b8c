"""Heads above outputs: which product, which rows, and what is no head."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.analysis.slices import RowAxis
from graphsurgery.patterns.interface import find_token_input
from graphsurgery.patterns.lm_head import LMHead, find_lm_heads, share_rows
from graphsurgery.patterns.matcher import GraphIndex
from graphsurgery.patterns.site import Refusal
from tests.interface_text import small_decoder
from tests.strategies.decoders import TAILS, Decoder, build

PLAIN = Decoder(norm="rms")


def heads_of(model: ir.Model, outputs: list[str] | None = None) -> list[LMHead | Refusal]:
    shapes = Shapes(model)
    tokens = find_token_input(model, shapes)
    assert tokens is not None
    return find_lm_heads(model, shapes, GraphIndex(model), tokens, outputs)


def head_of(decoder: Decoder) -> LMHead:
    head = heads_of(ir.from_proto(build(decoder)))[0]
    assert isinstance(head, LMHead), head
    return head


def reason_of(model: ir.Model, output: str = "logits") -> str:
    site = next(site for site in heads_of(model) if site.id == f"lm_head:{output}")
    assert isinstance(site, Refusal)
    return site.reason


@pytest.mark.parametrize(
    ("head", "product", "vocabulary"),
    [
        ("matmul", "MatMul", 12),
        ("tied", "MatMul", 16),
        ("fused_matmul", "FusedMatMul", 12),
        ("nbits", "MatMulNBits", 12),
        ("integer", "MatMulInteger", 12),
        ("integer_to_float", "MatMulIntegerToFloat", 12),
        ("qdq_weight", "MatMul", 12),
        ("qdq_all", "MatMul", 12),
        ("qlinear", "QLinearMatMul", 12),
        ("einsum", "Einsum", 12),
        ("einsum_dots", "Einsum", 12),
        ("swapped", "MatMul", 12),
        ("conv", "Conv", 12),
        ("half_cast", "MatMul", 12),
    ],
)
def test_the_product_and_the_vocabulary(head: str, product: str, vocabulary: int):
    found = head_of(dataclasses.replace(PLAIN, head=head))
    assert [node.op_type for node in found.products] == [product]
    assert found.vocabulary == vocabulary
    assert (found.name, found.id, found.rows, found.batch_axis) == ("logits", "lm_head:logits", RowAxis(1), 0)
    assert len(found.cone.frontier) == 1


@pytest.mark.parametrize("tail", TAILS)
def test_the_product_is_found_behind_every_tail(tail: str):
    found = head_of(dataclasses.replace(PLAIN, tail=(tail,)))
    assert [node.op_type for node in found.products] == ["MatMul"]
    assert "lm_head.weight" in [value.name for value in found.products[0].inputs if value is not None]
    sources = {edge.value.name for edge in found.cone.frontier}
    assert len(sources) == (2 if "row_scale" in tail else 1)


@pytest.mark.parametrize(
    ("layout", "rows", "batch_axis", "frontier"),
    [
        ("plain", RowAxis(1), 0, RowAxis(1)),
        ("flat_const", RowAxis(1), 0, RowAxis(0, flat=True)),
        ("flat_of_ids", RowAxis(1), 0, RowAxis(0, flat=True)),
        ("flat_output", RowAxis(0, flat=True), None, RowAxis(0, flat=True)),
        ("seq_first", RowAxis(1), 0, RowAxis(0)),
        ("seq_first_output", RowAxis(0), 1, RowAxis(0)),
        ("four", RowAxis(2), 0, RowAxis(2)),
    ],
)
def test_where_rows_and_batch_are(layout: str, rows: RowAxis, batch_axis: int | None, frontier: RowAxis):
    found = head_of(dataclasses.replace(PLAIN, layout=layout))
    assert (found.rows, found.batch_axis) == (rows, batch_axis)
    assert [edge.rows for edge in found.cone.frontier] == [frontier]


def test_a_convolution_has_its_features_in_front():
    model = small_decoder(
        [
            "turned = Transpose <perm = [0, 2, 1]> (hidden)",
            "wide = Unsqueeze(turned, two)",
            "logits = Conv <kernel_shape = [1, 1]> (wide, kernel)",
        ],
        {"logits": ["B", 8, 1, "S"]},
        {"kernel": [8, 4, 1, 1]},
    )
    (found,) = heads_of(model)
    assert isinstance(found, LMHead)
    assert (found.rows, found.batch_axis, found.vocabulary) == (RowAxis(3), 0, 8)
    assert found.products[0].op_type == "Conv"


def test_a_vocabulary_in_chunks_has_two_products_and_one_source():
    found = head_of(dataclasses.replace(PLAIN, head="chunks"))
    assert len(found.products) == 2
    assert len({edge.value for edge in found.cone.frontier}) == 1
    assert found.norm is not None


def test_a_low_rank_path_is_taken_in():
    found = head_of(dataclasses.replace(PLAIN, head="lora"))
    assert len(found.products) == 2
    assert [edge.node.op_type for edge in found.cone.frontier] == ["MatMul", "MatMul"]
    (source,) = {edge.value for edge in found.cone.frontier}
    assert source.shape is None or source.shape[-1] == 32
    assert found.norm is not None
    assert [value.name for value in found.norm.entries] == ["residual"]


def test_a_packed_stream():
    found = head_of(Decoder(tokens="packed"))
    assert (found.rows, found.batch_axis) == (RowAxis(0), None)


def test_a_head_that_is_a_function():
    found = head_of(dataclasses.replace(PLAIN, layout="head_function"))
    assert [node.op_type for node in found.products] == ["Head"]


def test_several_heads_that_are_named_logits():
    model = ir.from_proto(build(dataclasses.replace(PLAIN, extras=("second_head", "value_head", "router_logits"))))
    found = heads_of(model)
    assert [site.id for site in found] == ["lm_head:logits", "lm_head:draft_logits"]
    heads = [site for site in found if isinstance(site, LMHead)]
    assert len(heads) == 2
    assert share_rows(heads)
    assert share_rows(heads[:1])


def test_logits_that_another_output_is_made_of_are_pruned_together_or_not_at_all():
    model = ir.from_proto(build(dataclasses.replace(PLAIN, extras=("log_probs",))))
    found = [site for site in heads_of(model) if isinstance(site, LMHead)]
    assert [head.name for head in found] == ["logits", "logits_negated"]
    assert share_rows(found)
    assert not share_rows(found[:1])
    (alone,) = heads_of(model, ["logits"])
    assert isinstance(alone, Refusal)
    assert alone.reason == "every row of output 'logits' is needed by node 'node_logits_negated' (Neg)"


def test_logits_under_another_name():
    proto = build(PLAIN)
    proto.graph.node[-1].output[0] = proto.graph.output[0].name = "output_0"
    (found,) = heads_of(ir.from_proto(proto))
    assert isinstance(found, LMHead)
    assert found.id == "lm_head:output_0"


def test_sizes_that_nobody_can_infer_are_believed_where_nothing_picks_rows():
    """The rows come out of a Reshape to a fed shape."""
    model = small_decoder(["flat = Reshape(hidden, form)", "logits = MatMul(flat, w)"], {"logits": ["B", "S", 8]})
    form = ir.Value(name="form", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([3]))
    model.graph.inputs.append(form)
    for node in model.graph:
        if node.op_type == "Reshape":
            node.replace_input_with(1, form)
    (found,) = heads_of(model)
    assert isinstance(found, LMHead)
    assert (found.rows, found.batch_axis) == (RowAxis(1), 0)


# ---- no heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "dims", "selector"),
    [
        (["[cut] h = Slice(hidden, minus, far, one)", "logits = MatMul(h, w)"], ["B", 1, 8], "Slice node 'cut'"),
        (["[pick] h = Gather <axis = 1> (hidden, last)", "logits = MatMul(h, w)"], ["B", 8], "Gather node 'pick'"),
        (["p = MatMul(hidden, w)", "logits = Slice(p, minus, far, one)"], ["B", 1, 8], "the Slice of 'logits'"),
    ],
)
def test_an_output_that_is_pruned_already_names_the_node_that_selects(nodes: list[str], dims: list[Any], selector: str):
    reason = reason_of(small_decoder(nodes, {"logits": dims}))
    sizes = ", ".join(map(str, dims))
    assert reason == (
        f"already pruned: output 'logits' [{sizes}] does not hold one row for each of the S tokens of 'input_ids', "
        f"{selector} selects them"
    )


def test_one_score_a_sequence_is_no_row_a_token():
    nodes = ["m = ReduceMean <keepdims = 0> (hidden, one)", "logits = MatMul(m, w)"]
    assert reason_of(small_decoder(nodes, {"logits": ["B", 8]})) == (
        "already pruned or not logits: output 'logits' [B, 8] does not hold one row for each of the S tokens of "
        "'input_ids'"
    )


def test_a_loop_is_refused_by_name():
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Tanh", ["state"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", T.INT64, []),
            helper.make_tensor_value_info("go", T.BOOL, []),
            helper.make_tensor_value_info("state", T.FLOAT, ["B", "S", 8]),
        ],
        [
            helper.make_tensor_value_info("go_on", T.BOOL, []),
            helper.make_tensor_value_info("next", T.FLOAT, ["B", "S", 8]),
        ],
    )
    model = small_decoder(["p = MatMul(hidden, w)", "logits = Identity(p)"], {"logits": ["B", "S", 8]})
    proto = ir.to_proto(model)
    proto.graph.node[-1].CopyFrom(helper.make_node("Loop", ["zero", "", "p"], ["logits"], name="steps", body=body))
    assert reason_of(ir.from_proto(proto)) == (
        "no head was found above output 'logits': operator Loop of node 'steps' is not known to keep rows apart"
    )


def test_an_unknown_operator_is_refused_by_name():
    nodes = ["p = MatMul(hidden, w)", "[mystery] logits = vendor.Sharpen(p)"]
    text = small_decoder(nodes, {"logits": ["B", "S", 8]})
    text.opset_imports["vendor"] = 1
    assert reason_of(text) == (
        "no head was found above output 'logits': operator vendor::Sharpen of node 'mystery' is not known to keep "
        "rows apart"
    )


def test_logits_that_no_product_makes():
    reason = reason_of(small_decoder(["logits = Relu(hidden)"], {"logits": ["B", "S", 4]}))
    assert reason == "no head was found above output 'logits': 'input_ids' is an input or a constant"


def test_scores_of_attention_are_no_logits():
    nodes = [
        "turned = Transpose <perm = [0, 2, 1]> (hidden)",
        "p = MatMul(hidden, turned)",
        "scores = Unsqueeze(p, one)",
    ]
    model = small_decoder(nodes, {"scores": ["B", 1, "S", "S"]})
    assert reason_of(model, "scores") == (
        "output 'scores' [B, 1, S, S] does not hold a number of scores that is known, as logits do"
    )


def test_rows_that_another_output_needs_behind_the_head():
    model = small_decoder(
        ["p = MatMul(hidden, w)", "plain = Identity(p)", "logits = Tanh(p)"],
        {"logits": ["B", "S", 8], "plain": ["B", "S", 8]},
    )
    assert reason_of(model) == (
        "no head was found above output 'logits': every row of 'p' is needed by a Identity node"
    )


def test_one_token_a_step():
    model = small_decoder(["logits = MatMul(hidden, w)"], {"logits": ["B", "S", 8]})
    for value in model.graph.inputs:
        if value.name == "input_ids":
            value.shape = ir.Shape(["B", 1])
    assert reason_of(model) == "the model computes one row a step ('input_ids' has one token): nothing to prune"


def test_batches_that_are_flattened_the_other_way_are_not_mistaken():
    nodes = [
        "turned = Transpose <perm = [1, 0, 2]> (hidden)",
        "flat = Reshape(turned, flat_shape)",
        "logits = MatMul(flat, w)",
    ]
    model = small_decoder(nodes, {"logits": ["rows", 8]})
    flat_shape = ir.Value(name="flat_shape", const_value=ir.tensor([-1, 4], name="flat_shape"))
    model.graph.register_initializer(flat_shape)
    for node in model.graph:
        if node.op_type == "Reshape":
            node.replace_input_with(1, flat_shape)
    assert reason_of(model) == (
        "output 'logits' is flattened with the batches inside: the rows of one do not lie behind one another"
    )
