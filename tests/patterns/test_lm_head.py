"""Heads above outputs: which product, which rows, and what is no head."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.analysis.slices import RowAxis
from graphsurgery.patterns.interface import find_token_input
from graphsurgery.patterns.lm_head import HiddenOutput, LMHead, find_hidden_output, find_lm_heads, share_rows
from graphsurgery.patterns.matcher import GraphIndex
from graphsurgery.patterns.site import Refusal
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
    model = small(
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


# ---- no heads -----------------------------------------------------------------------------------------------------


def small(nodes: list[str], outputs: dict[str, list], inputs: dict[str, list] | None = None) -> ir.Model:
    """A graph on ``input_ids [B, S]``, ``hidden [B, S, 4]`` and ``w [4, 8]``, whose outputs are float."""
    text = ", ".join(f"float[{','.join(map(str, dims))}] {name}" for name, dims in outputs.items())
    more = "".join(f", float[{','.join(map(str, dims))}] {name}" for name, dims in (inputs or {}).items())
    return ir.from_onnx_text(
        '<ir_version: 9, opset_import: ["" : 18]> g (int64[B,S] input_ids, float[8,4] table, float[4,8] w'
        + more
        + f") => ({text}) <int64 zero = {{0}}, int64 last = {{-1}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] minus = {{-1}},"
        " int64[1] far = {9223372036854775807}> { hidden = Gather(table, input_ids) " + " ".join(nodes) + " }"
    )


@pytest.mark.parametrize(
    ("nodes", "dims", "selector"),
    [
        (["[cut] h = Slice(hidden, minus, far, one)", "logits = MatMul(h, w)"], ["B", 1, 8], "Slice node 'cut'"),
        (["[pick] h = Gather <axis = 1> (hidden, last)", "logits = MatMul(h, w)"], ["B", 8], "Gather node 'pick'"),
        (["p = MatMul(hidden, w)", "logits = Slice(p, minus, far, one)"], ["B", 1, 8], "the Slice of 'logits'"),
    ],
)
def test_an_output_that_is_pruned_already_names_the_node_that_selects(nodes: list[str], dims: list, selector: str):
    reason = reason_of(small(nodes, {"logits": dims}))
    sizes = ", ".join(map(str, dims))
    assert reason == (
        f"already pruned: output 'logits' [{sizes}] does not hold one row for each of the S tokens of 'input_ids', "
        f"{selector} selects them"
    )


def test_one_score_a_sequence_is_no_row_a_token():
    nodes = ["m = ReduceMean <keepdims = 0> (hidden, one)", "logits = MatMul(m, w)"]
    assert reason_of(small(nodes, {"logits": ["B", 8]})) == (
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
    model = small(["p = MatMul(hidden, w)", "logits = Identity(p)"], {"logits": ["B", "S", 8]})
    proto = ir.to_proto(model)
    proto.graph.node[-1].CopyFrom(helper.make_node("Loop", ["zero", "", "p"], ["logits"], name="steps", body=body))
    assert reason_of(ir.from_proto(proto)) == (
        "no head was found above output 'logits': operator Loop of node 'steps' is not known to keep rows apart"
    )


def test_an_unknown_operator_is_refused_by_name():
    nodes = ["p = MatMul(hidden, w)", "[mystery] logits = vendor.Sharpen(p)"]
    text = small(nodes, {"logits": ["B", "S", 8]})
    text.opset_imports["vendor"] = 1
    assert reason_of(text) == (
        "no head was found above output 'logits': operator vendor::Sharpen of node 'mystery' is not known to keep "
        "rows apart"
    )


def test_logits_that_no_product_makes():
    reason = reason_of(small(["logits = Relu(hidden)"], {"logits": ["B", "S", 4]}))
    assert reason == "no head was found above output 'logits': 'input_ids' is an input or a constant"


def test_one_token_a_step():
    model = small(["logits = MatMul(hidden, w)"], {"logits": ["B", "S", 8]})
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
    model = small(nodes, {"logits": ["rows", 8]})
    flat_shape = ir.Value(name="flat_shape", const_value=ir.tensor([-1, 4], name="flat_shape"))
    model.graph.register_initializer(flat_shape)
    for node in model.graph:
        if node.op_type == "Reshape":
            node.replace_input_with(1, flat_shape)
    assert reason_of(model) == (
        "output 'logits' is flattened with the batches inside: the rows of one do not lie behind one another"
    )


# ---- hidden states ------------------------------------------------------------------------------------------------


def hidden_of(model: ir.Model, name: str | None = None) -> HiddenOutput | Refusal | None:
    shapes = Shapes(model)
    tokens = find_token_input(model, shapes)
    assert tokens is not None
    return find_hidden_output(model, shapes, GraphIndex(model), tokens, name)


def headless(decoder: Decoder = PLAIN, extras: tuple[str, ...] = ("hidden_output",)) -> ir.Model:
    """The decoder with its hidden states in place of logits."""
    proto = build(dataclasses.replace(decoder, extras=extras))
    del proto.graph.output[0]
    return ir.from_proto(proto)


def test_the_only_output_that_a_normalisation_ends_in():
    found = hidden_of(headless())
    assert isinstance(found, HiddenOutput)
    assert (found.id, found.name, found.rows, found.batch_axis) == ("hidden:hidden_copy", "hidden_copy", RowAxis(1), 0)
    assert found.norm is not None


def test_caches_beside_it_do_not_hide_it():
    model = headless()
    cache = ir.Value(
        name="present.0.key", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 2, "seq", 4])
    )
    node = ir.node("Identity", [cache], name="cache")
    model.graph.inputs.append(cache)
    node.outputs[0].name, node.outputs[0].type = "present.0.out", ir.TensorType(ir.DataType.FLOAT)
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    found = hidden_of(model)
    assert isinstance(found, HiddenOutput)
    assert found.name == "hidden_copy"


def test_two_of_them_or_none_is_a_question_for_the_user():
    assert hidden_of(headless(extras=("hidden_output", "norm_input_output"))) is None
    assert hidden_of(headless(extras=("norm_input_output",))) is None
    found = hidden_of(headless(extras=("norm_input_output",)), "residual")
    assert isinstance(found, HiddenOutput)
    assert found.norm is None


def test_an_output_without_rows_is_refused():
    model = small(["m = ReduceMean <keepdims = 0> (hidden, one)", "y = Relu(m)"], {"y": ["B", 4]})
    refused = hidden_of(model, "y")
    assert isinstance(refused, Refusal)
    assert refused.reason == "output 'y' does not hold one row for each token of 'input_ids'"
