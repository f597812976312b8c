"""Expert blocks that must not be read: each is refused by name, or is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from graphsurgery.patterns.experts.finding import find_experts
from graphsurgery.patterns.experts.sites import ExpertSite, ExpertTensor
from graphsurgery.patterns.site import Refusal
from tests.strategies.experts import Spec, build

CASES = Path(__file__).parents[1] / "cases"
LOOP = CASES / "m01_loop_over_experts_index_add.onnx"


def refusal_of(model: onnx.ModelProto | ir.Model) -> str:
    """The reason of the one refusal."""
    (found,) = find_experts(model if isinstance(model, ir.Model) else ir.from_proto(model))
    assert isinstance(found, Refusal)
    assert found.id == "experts:0"
    assert "experts" in found.kinds
    return found.reason


def makers(proto: onnx.ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.op_type == op_type]


def rewire(proto: onnx.ModelProto, old: str, new: str) -> None:
    """Everything that reads ``old`` reads ``new``."""
    for node in proto.graph.node:
        for place, name in enumerate(node.input):
            if name == old:
                node.input[place] = new


def node_of(model: ir.Model, op_type: str, place: int = 0) -> ir.Node:
    return [node for node in model.graph if node.op_type == op_type][place]


def test_a_missing_expert_is_not_renumbered() -> None:
    """An expert that tracing lost: its copy is there no more, the others keep their numbers."""
    model = ir.load(LOOP)
    lost = node_of(model, "ScatterND", 2)
    assert lost.inputs[0] is not None
    lost.outputs[0].replace_all_uses_with(lost.inputs[0])
    model.graph.remove(lost)
    reason = refusal_of(model)
    assert reason.endswith("cannot be read: of 4 experts, 2 is missing")
    assert "'/model/layers.0/mlp/experts.3/ScatterND_87'" in reason or "ScatterND" in reason


def test_an_expert_added_twice() -> None:
    model = ir.load(LOOP)
    number = [node for node in model.graph if node.op_type == "Gather" and "Transpose" in str(node.inputs[0])]
    number[2].replace_input_with(1, number[1].inputs[1])
    assert "of 4 experts, 2 is missing" in refusal_of(model)


def test_experts_that_differ() -> None:
    model = ir.load(LOOP)
    node = node_of(model, "Sigmoid", 1)
    node.op_type = "Tanh"
    assert "the experts do not all do the same: Sigmoid" in refusal_of(model)


def test_experts_whose_constants_differ() -> None:
    """Each expert cuts its gate from elsewhere: the numbers of a Slice are no parameter."""
    spec = Spec(form="selected", gate="slices", experts=3, inner=4)
    proto = build(spec)
    cut = makers(proto, "Slice")[2]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1], dtype=np.int64), "one"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([5], dtype=np.int64), "five"))
    cut.input[1], cut.input[2] = "one", "five"
    assert "do not all do the same" in refusal_of(proto)


def test_a_constant_of_each_expert_is_a_parameter() -> None:
    """A scale that each expert has of its own is one more parameter, of no axes."""
    spec = Spec(form="selected", activation="clamped", experts=3)
    proto = build(spec)
    for number, node in enumerate(node for node in makers(proto, "Mul") if "sigmoid" in "".join(node.output)):
        node.name = f"keep{number}"
    scales = makers(proto, "Sigmoid")
    for number, node in enumerate(scales):
        before = next(other for other in proto.graph.node if node.input[0] in other.output)
        name = f"alpha{number}"
        array = np.array(1.5 + number, dtype=np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        before.input[1] = name
    (site,) = find_experts(ir.from_proto(proto))
    assert isinstance(site, ExpertSite)
    shapes = [item.shape for step in site.body for item in step.operands if isinstance(item, ExpertTensor)]
    assert () in shapes


@pytest.mark.parametrize("form", ["dense", "selected", "grouped", "batched"])
def test_a_value_of_the_block_that_is_an_output(form: str) -> None:
    proto = build(Spec(form=form, gate="separate"))
    value = makers(proto, "Sigmoid")[-1].output[0]
    proto.graph.output.append(helper.make_empty_tensor_value_info(value))
    assert f"its value {value!r} is an output of the model" in refusal_of(proto)


@pytest.mark.parametrize("form", ["dense", "selected", "grouped", "batched"])
def test_a_value_of_the_block_that_is_read_elsewhere(form: str) -> None:
    proto = build(Spec(form=form, gate="separate"))
    value = makers(proto, "Sigmoid")[-1].output[0]
    proto.graph.node.append(helper.make_node("ReduceMax", [value], ["peak"], name="watcher", keepdims=0))
    proto.graph.output.append(helper.make_empty_tensor_value_info("peak"))
    assert "is read elsewhere, by ReduceMax 'watcher'" in refusal_of(proto)


def test_a_value_of_one_expert_that_is_read_elsewhere() -> None:
    """Where experts work on all tokens, a value that is read elsewhere looks like the tokens of that expert."""
    proto = build(Spec(form="masked", gate="separate"))
    proto.graph.output.append(helper.make_empty_tensor_value_info(makers(proto, "Sigmoid")[-1].output[0]))
    assert "the experts do not all do the same" in refusal_of(proto)
    for node in makers(proto, "Sigmoid")[:-1]:
        proto.graph.output.append(helper.make_empty_tensor_value_info(node.output[0]))
    assert "its rows start from different values" in refusal_of(proto)


def test_statistics_of_the_router_may_be_read() -> None:
    """Counts, choices and weights are not the block's: outputs of them disturb nothing."""
    proto = build(Spec(form="grouped", variant=1))
    counted = makers(proto, "ScatterElements")[0].output[0]
    chosen = makers(proto, "TopK")[0].output[1]
    for name in (counted, chosen):
        proto.graph.output.append(helper.make_empty_tensor_value_info(name))
    (site,) = find_experts(ir.from_proto(proto))
    assert isinstance(site, ExpertSite)


@pytest.mark.parametrize("bias", [False, True])
def test_experts_that_were_not_chosen_must_add_nothing(bias: bool) -> None:
    """Weights on the way in: a bias makes something of zeros, so that every expert adds its own."""
    proto = build(Spec(form="dense", weighted="input", bias=bias))
    if bias:
        assert "experts that are not chosen add something too" in refusal_of(proto)
    else:
        (site,) = find_experts(ir.from_proto(proto))
        assert isinstance(site, ExpertSite)
        assert site.form == "dense"


@pytest.mark.parametrize("bias", [False, True])
def test_nor_may_copies_whose_products_add_a_bias(bias: bool) -> None:
    proto = build(Spec(form="masked", weighted="input", bias=bias, variant=0))
    assert len(makers(proto, "Gemm")) == 8
    if bias:
        assert "experts that are not chosen add something too" in refusal_of(proto)
    else:
        (site,) = find_experts(ir.from_proto(proto))
        assert isinstance(site, ExpertSite)
        assert site.form == "loop"


def test_an_expert_that_passes_its_token_on() -> None:
    """Experts without parameters beside others."""
    proto = build(Spec(form="selected", experts=3, variant=1))
    inner, down = makers(proto, "MatMul")[-2:]
    rewire(proto, down.output[0], inner.input[0])
    assert "the experts do not all do the same: the token as it is in one and MatMul" in refusal_of(proto)


def test_a_choice_that_may_be_made_twice() -> None:
    """The second best is looked for where the best still is: weights that are scattered would lose one of the two."""
    proto = build(Spec(form="dense", router="one_by_one", top_k=2))
    first, second = makers(proto, "ArgMax")
    second.input[0] = first.input[0]
    assert "may choose an expert twice for a token" in refusal_of(proto)


def test_an_axis_of_one_that_is_read() -> None:
    """The product with the weights leaves it, and the sum is not taken out of it at once."""
    proto = build(Spec(form="einsum", variant=3))
    product = next(node for node in makers(proto, "MatMul") if node.output[0] in makers(proto, "Squeeze")[-1].input)
    kept = helper.make_node("Identity", [product.output[0]], ["kept"], name="/kept")
    proto.graph.node.append(kept)
    proto.graph.output.append(helper.make_empty_tensor_value_info("kept"))
    assert "the axis of one that MatMul" in refusal_of(proto)


def test_weights_that_are_not_zero_for_the_others() -> None:
    """Weights spread over ones: every expert counts."""
    proto = build(Spec(form="dense"))
    node = makers(proto, "ScatterElements")[0]
    base = next(other for other in proto.graph.node if node.input[0] in other.output)
    base.op_type, ones = "Pow", base.input[1]
    assert ones
    (found,) = find_experts(ir.from_proto(proto)) or (None,)
    assert found is None or isinstance(found, Refusal)


def test_runs_that_were_swapped() -> None:
    """Two experts work on each other's rows."""
    proto = build(Spec(form="grouped", experts=3, variant=1))
    joins = makers(proto, "Concat")
    first, second = joins[0].input[0], joins[0].input[1]
    joins[0].input[0], joins[0].input[1] = second, first
    assert "takes the rows of expert" in refusal_of(proto)


def test_parameters_that_were_swapped() -> None:
    proto = build(Spec(form="grouped", experts=3, variant=1))
    products = [node for node in makers(proto, "MatMul") if "squeeze" in node.input[1]]
    products[0].input[1], products[1].input[1] = products[1].input[1], products[0].input[1]
    assert "do not agree" in refusal_of(proto)


def test_one_projection_by_another_choice() -> None:
    """The second projection is picked by the experts in another order."""
    proto = build(Spec(form="batched", variant=1))
    picks = makers(proto, "GatherND")
    scores = makers(proto, "TopK")[0].input[0]
    count = makers(proto, "TopK")[0].input[1]
    place = list(proto.graph.node).index(picks[-1])
    extra = [
        helper.make_node("TopK", [scores, count], ["other_values", "other"], largest=0, name="other"),
        helper.make_node("Reshape", ["other", "flat"], ["other_flat"]),
        helper.make_node("Unsqueeze", ["other_flat", "flat"], ["other_column"]),
    ]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1], dtype=np.int64), "flat"))
    picks[-1].input[1] = "other_column"
    for node in reversed(extra):
        proto.graph.node.insert(place, node)
    assert "different choices of experts" in refusal_of(proto)


def test_membership_by_weight_is_no_choice() -> None:
    """Rows picked where a weight is above zero: nothing says who was chosen."""
    proto = build(Spec(form="selected", variant=0, experts=3))
    for node in makers(proto, "Equal"):
        node.op_type = "Greater"
        node.input[0] = next(item.output[0] for item in proto.graph.node if item.op_type == "Div")
        node.input[1] = "zero"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, dtype=np.float32), "zero"))
    assert not [site for site in find_experts(ir.from_proto(proto)) if isinstance(site, ExpertSite)]


def test_a_sum_that_cannot_be_found() -> None:
    """Matrices are picked by chosen experts, and what they give is not added up: said aloud."""
    proto = build(Spec(form="batched"))
    last = makers(proto, "ReduceSum")[-1]
    last.op_type = "ReduceMax"
    reason = refusal_of(proto)
    assert "for which Gather" in reason
    assert reason.endswith("cannot be found")
