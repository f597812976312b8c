"""Errors planted behind every pass are found at depth regions, with the data file or without, and named."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.contracts import CONTRACTS_KEY
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.model_io import load, save
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.site import Site
from graphsurgery.pipeline import Pipeline
from graphsurgery.rewrite import PASS_KEY, SITE_KEY, Rewrite
from graphsurgery.site_report import SiteReport
from graphsurgery.weight_spec import read_weights, write_weights
from graphsurgery.weights import Stack, Transpose, View

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphsurgery.equivalence.verify_report import VerifyReport


def _copied(fixture: Path, folder: Path, *, data: bool) -> Path:
    """The model of a fixture in ``folder``, without its data file unless ``data``."""
    model = folder / "model.onnx"
    shutil.copy(fixture / "model.onnx", model)
    if data and (fixture / "model.onnx.data").exists():
        shutil.copy(fixture / "model.onnx.data", folder / "model.onnx.data")
    return model


def _verified(source: Path, passes: Sequence[Any], mutation: Any = None, **options: Any) -> VerifyReport:
    model = load(source)
    report = Pipeline(passes)(model)
    assert report.changed
    if mutation is not None:
        mutation(model)
    result = save(model, source.with_name("result.onnx"), force=True)
    return verify_models(source, result.path, **{"depth": "regions", **options})


def _node(model: ir.Model, pass_name: str, site: str, ending: str) -> ir.Node:
    found = [
        node
        for node in model.graph.all_nodes()
        if node.metadata_props.get(PASS_KEY) == pass_name
        and node.metadata_props.get(SITE_KEY) == site
        and (node.name or "").endswith(ending)
    ]
    assert len(found) == 1, [node.name for node in found]
    return found[0]


# ---- errors in what passes insert ------------------------------------------------------------------------------------


def _scaled(model: ir.Model) -> None:
    node = _node(model, "block-attention", "attention:1", "/scaled_query")
    value = ir.Value(name="wrong_scale", const_value=ir.tensor(np.float32(0.6)))
    model.graph.register_initializer(value)
    node.replace_input_with(1, value)


def _blocks_in_wrong_order(model: ir.Model) -> None:
    node = _node(model, "block-attention", "attention:1", "/rows")
    first, second = node.inputs
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)


def _one_block_off(model: ir.Model) -> None:
    """The second block attends to what the first one may."""
    node = _node(model, "block-attention", "attention:1", "/query_1")
    other = _node(model, "block-attention", "attention:1", "/query")
    for slot in (1, 2):
        node.replace_input_with(slot, other.inputs[slot])


@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("mutation", [_scaled, _blocks_in_wrong_order, _one_block_off])
def test_errors_in_blocked_attention(fixtures_dir, tmp_path, mutation, data):
    source = _copied(fixtures_dir / "llama_external", tmp_path, data=data)
    report = _verified(source, ["block-attention{q_blocks=2}"], mutation)
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
    node = _node(model, "block-attention", "attention:0", "/le_part_1")
    node.replace_input_with(1, _node(model, "block-attention", "attention:0", "/unsqueeze_2_part").outputs[0])


def _a_needed_key_cut_off(model: ir.Model) -> None:
    node = _node(model, "block-attention", "attention:0", "/end_column")
    value = ir.Value(name="nothing", const_value=ir.tensor(np.zeros(1, np.int64)))
    model.graph.register_initializer(value)
    node.replace_input_with(1, value)


@pytest.mark.parametrize("mutation", [_mask_of_the_other_block, _a_needed_key_cut_off])
def test_errors_in_what_layers_share(fixtures_dir, tmp_path, mutation):
    """They have their mask in common, so all of them are wrong."""
    source = _copied(fixtures_dir / "llama_external", tmp_path, data=False)
    report = _verified(source, ["block-attention{q_blocks=2}"], mutation)
    assert report.status == "different"
    assert {region.status for region in report.regions} == {"different"}
    assert sum(region.alike for region in report.regions) == 3


def test_an_error_in_one_layer_of_many_is_found(fixtures_dir, tmp_path):
    """Regions are checked by kind; a layer that is unlike the others is a kind of its own."""
    source = _copied(fixtures_dir / "llama_external", tmp_path, data=False)
    report = _verified(source, ["block-attention{q_blocks=2}"], _scaled)
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
    source = _copied(fixtures_dir / "optimum_llama", tmp_path, data=False)
    right = load(source)
    Pipeline([f"prune-last-token{{index={told},depth={depth}}}"])(right)

    def mutation(model: ir.Model) -> None:
        model.metadata_props[CONTRACTS_KEY] = right.metadata_props[CONTRACTS_KEY]
        if told == "runtime":
            # The row is asked for, and nothing reads it.
            asked = next(value for value in right.graph.inputs if value.name == "last_token_indices")
            model.graph.inputs.append(ir.Value(name=asked.name, type=asked.type, shape=asked.shape))

    report = _verified(source, [f"prune-last-token{{index={done},depth={depth}}}"], mutation)
    assert report.status == "different"
    assert any(
        reason.startswith(
            "prune-last-token at lm_head:logits: 'logits', read by output logits, is not what 'logits' is: it"
        )
        for reason in report.reasons
    ), report.reasons


def test_the_first_row_in_place_of_the_last(fixtures_dir, tmp_path):
    source = _copied(fixtures_dir / "llama_external", tmp_path, data=False)

    def mutation(model: ir.Model) -> None:
        _node(model, "prune-last-token", "lm_head:logits", "/last_row").op_type = "ArgMin"

    assert _verified(source, ["prune-last-token"]).status == "equal"
    report = _verified(source, ["prune-last-token"], mutation)
    assert report.status == "different"
    assert "prune-last-token at lm_head:logits: 'logits'" in report.reasons[0]


# ---- errors in calls and in what cannot run ---------------------------------------------------------------------------


def test_weights_exchanged_between_two_calls(fixtures_dir, tmp_path):
    """Nothing that the pass made is in the region but the call, which is written out there."""
    source = _copied(fixtures_dir / "llama_static", tmp_path, data=True)

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

    report = _verified(source, ["extract-functions", "bound-context"], mutation)
    assert report.status == "different"
    assert all("extract-functions at layers:LlamaDecoderLayer" in reason for reason in report.reasons), report.reasons
    found = _verified(source, ["extract-functions", "bound-context"])
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
    source = _copied(fixtures_dir / "qwen3_moe_matmulnbits", tmp_path, data=True)
    report = _verified(source, ["gather-experts{strategy=grouped}"], mutation, depth=depth)
    assert report.status == "different"
    assert what in report.reasons[0]
    assert "(made by gather-experts at experts:0)" in report.reasons[0]


# ---- errors in what passes leave -------------------------------------------------------------------------------------


def test_a_folded_constant_one_off(fixtures_dir, tmp_path):
    source = _copied(fixtures_dir / "llama_external", tmp_path, data=False)
    before = set(load(source).graph.initializers)

    def mutation(model: ir.Model) -> None:
        made: list[Any] = [value for name, value in model.graph.initializers.items() if name not in before]
        value = next(item for item in made if item.dtype == ir.DataType.INT64 and item.const_value.size == 4)
        numbers = value.const_value.numpy().copy()
        numbers[[1, 2]] = numbers[[2, 1]]
        value.const_value = ir.tensor(numbers, name=value.name)

    spec = "bind-dims{batch=2,seq=3,past=4}"
    assert _verified(source, [spec]).status == "equal"
    report = _verified(source, [spec], mutation)
    assert report.status == "different"
    assert report.reasons[0].startswith("bind-dims: ")


def test_two_outputs_with_each_others_names(fixtures_dir, tmp_path):
    source = _copied(fixtures_dir / "llama_external", tmp_path, data=False)

    def mutation(model: ir.Model) -> None:
        one, other = model.graph.outputs[1], model.graph.outputs[2]
        one.name, other.name = other.name, one.name

    spec = "rename-io{to=genai}"
    assert _verified(source, [spec]).status == "equal"
    report = _verified(source, [spec], mutation)
    assert report.status == "different"
    assert len(report.reasons) == 2
    assert all(reason.startswith("rename-io: ") for reason in report.reasons)


def test_a_weight_of_a_skeleton_at_another_place(fixtures_dir, tmp_path):
    source = _copied(fixtures_dir / "llama_external", tmp_path, data=False)

    def mutation(model: ir.Model) -> None:
        entries = list(read_weights(model))
        entries[3] = dataclasses.replace(entries[3], offset=entries[3].start + 4)
        write_weights(model, entries)

    assert _verified(source, ["weights-to-inputs"]).status == "equal"
    report = _verified(source, ["weights-to-inputs"], mutation)
    assert report.status == "different"
    assert "begins at byte" in report.reasons[0]


def test_a_constant_that_tidying_changed(fixtures_dir, tmp_path):
    source = _copied(fixtures_dir / "optimum_llama", tmp_path, data=False)

    def mutation(model: ir.Model) -> None:
        node = next(item for item in model.graph if item.op_type == "Pow")
        value = ir.Value(name="wrong", const_value=ir.tensor(np.float32(3)))
        model.graph.register_initializer(value)
        node.replace_input_with(1, value)

    report = _verified(source, ["prune-last-token", "tidy"], mutation)
    assert report.status == "different"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith(
        "prune-last-token or tidy: '/model/layers.0/input_layernorm/Pow_output_0', read by "
    )


# ---- weights ---------------------------------------------------------------------------------------------------------

_E, _H, _I = 4, 6, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Experts(Site):
    node: ir.Node


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitExperts(Pass):
    """Let each product with one expert of a stack read a view of that expert; ``fault`` plants an error."""

    name: ClassVar[str] = "split-experts"
    summary: ClassVar[str] = "views of experts"

    fault: str = ""

    def find(self, model: ir.Model) -> list[_Experts]:
        nodes = [node for node in model.graph if node.op_type == "Gather"]
        return [_Experts(id=f"expert:{number}", kinds=("expert",), node=node) for number, node in enumerate(nodes)]

    def rewrite(self, model, sites, report):
        for number, site in enumerate(sites):
            edit = Rewrite(model, self.name, site.id, scope=f"experts.{number}")
            gather = site.node
            stack, product = gather.inputs[0], next(iter(gather.outputs[0].uses())).node
            chosen = number
            if self.fault == "swapped" and number in (1, 2):
                chosen = 3 - number
            start = chosen * _H * _I + (_I if self.fault == "row off" and number == 1 else 0)
            weight = edit.weight(View(stack, start, (_H, _I)), "weight")
            if self.fault == "turned" and number == 1:
                flipped = edit.weight(View(stack, start, (_I, _H)), "flipped")
                weight = edit.weight(Transpose(flipped, (1, 0)), "weight")
            edit.before(product)
            made = edit.emit("MatMul", [product.inputs[0], weight], name="product", dtype=weight.dtype)
            edit.replace_all_uses(product.outputs[0], made)
            edit.commit()
            report.sites.append(SiteReport(site.id, site.kinds, None, "rewritten", "split"))
        return frozenset(value.name for value in model.graph.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackExperts(SplitExperts):
    """Let one product read all experts of a list in one tensor."""

    name: ClassVar[str] = "stack-experts"

    def find(self, model):
        nodes = [node for node in model.graph if node.op_type == "MatMul"]
        return [_Experts(id="experts", kinds=("expert",), node=nodes[0])]

    def rewrite(self, model, sites, report):  # noqa: ARG002
        nodes = [node for node in model.graph if node.op_type == "MatMul"]
        edit = Rewrite(model, self.name, "experts", scope="experts")
        parts = [node.inputs[1] for node in nodes]
        if self.fault == "swapped":
            parts[1], parts[2] = parts[2], parts[1]
        if self.fault == "neighbours":
            parts = [parts[0], parts[0], *parts[2:]]
        stack = edit.weight(Stack(tuple(parts)), "stack")
        edit.before(nodes[0])
        made = edit.emit("MatMul", [nodes[0].inputs[0], stack], name="products", dtype=stack.dtype)
        for number, node in enumerate(nodes):
            index = edit.constant(np.array(number, np.int64))
            part = edit.emit("Gather", [made, index], {"axis": 0}, name="part", dtype=stack.dtype)
            edit.replace_all_uses(node.outputs[0], part)
        edit.commit()
        report.sites.append(SiteReport("experts", ("expert",), None, "rewritten", "stacked"))
        return frozenset(value.name for value in model.graph.outputs)


def _experts(path: Path, *, stacked: bool, external: bool, shuffled: bool = False) -> Path:
    """``y = sum over experts of tanh(x w_e)``, experts in one tensor ``[E, H, I]`` or in E tensors."""
    generator = np.random.default_rng(3)
    arrays = {f"w{number}": generator.standard_normal((_H, _I)).astype(np.float32) for number in range(_E)}
    nodes, initializers = [], []
    for number in range(_E):
        name = f"w{number}"
        if stacked:
            nodes.append(helper.make_node("Gather", ["w", f"i{number}"], [f"e{number}"], f"gather{number}", axis=0))
            initializers.append(helper.make_tensor(f"i{number}", TensorProto.INT64, [], [number]))
            name = f"e{number}"
        nodes.append(helper.make_node("MatMul", ["x", name], [f"p{number}"], f"product{number}"))
        nodes.append(helper.make_node("Tanh", [f"p{number}"], [f"t{number}"], f"tanh{number}"))
    nodes.append(helper.make_node("Sum", [f"t{number}" for number in range(_E)], ["y"], "sum"))
    stored = {"w": np.stack(list(arrays.values()))} if stacked else arrays
    data = bytearray()
    order = list(stored)[::-1] if shuffled else list(stored)
    places = {}
    for name in order:
        places[name] = len(data)
        data += stored[name].tobytes()
    for name, array in stored.items():
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=array.shape)
        if external:
            tensor.data_location = TensorProto.EXTERNAL
            for key, text in (("location", "m.data"), ("offset", places[name]), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(text))
        else:
            tensor.raw_data = array.tobytes()
        initializers.append(tensor)
    if external:
        path.with_name("m.data").write_bytes(bytes(data))
    graph = helper.make_graph(
        nodes,
        "experts",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", _H])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", _I])],
        initializers,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize(("external", "data"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("fault", ["", "swapped", "row off", "turned"])
def test_errors_in_views_of_experts(tmp_path, fault, external, data, real):
    source = _experts(tmp_path / "model.onnx", stacked=True, external=external)
    if external and not data:
        if fault == "turned" or real:
            return
        (tmp_path / "m.data").unlink()
    report = _verified(source, [SplitExperts(fault=fault)], real_weights=real)
    if not fault:
        assert (report.status, report.reasons) == ("equal", ())
        assert sum(region.alike for region in report.regions) == _E
        return
    assert report.status == "different"
    wrong = {"swapped": {"expert:1", "expert:2"}, "row off": {"expert:1"}, "turned": {"expert:1"}}[fault]
    assert {region.sites[0] for region in report.regions if region.status == "different"} == wrong
    assert {region.passes for region in report.regions} == {("split-experts",)}
    assert all(reason.startswith("split-experts at expert:") for reason in report.reasons)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("fault", ["", "swapped", "neighbours"])
def test_errors_in_stacks_of_experts(tmp_path, fault, external, shuffled):
    source = _experts(tmp_path / "model.onnx", stacked=False, external=external, shuffled=shuffled)
    report = _verified(source, [StackExperts(fault=fault)])
    assert report.status == ("different" if fault else "equal"), report.reasons
    if fault:
        assert all(reason.startswith("stack-experts at experts: ") for reason in report.reasons)


def test_a_view_that_does_not_lie_where_its_record_says(tmp_path):
    source = _experts(tmp_path / "model.onnx", stacked=True, external=True)

    def mutation(model: ir.Model) -> None:
        value = model.graph.initializers["experts.2/weight"]
        tensor: Any = value.const_value
        value.const_value = ir.ExternalTensor(
            tensor.location,
            tensor.offset + 4 * _I,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            metadata_props=dict(tensor.metadata_props),
            base_dir=tensor.base_dir,
        )

    report = _verified(source, [SplitExperts()], mutation)
    assert report.status == "different"
    assert report.reasons == (
        (
            f"weight 'experts.2/weight' begins at byte {(2 * _H + 1) * _I * 4} of m.data, and its elements at byte "
            f"{2 * _H * _I * 4}"
        ),
    )


def test_views_that_lie_too_far_apart_in_repacked_data(tmp_path):
    source = _experts(tmp_path / "model.onnx", stacked=True, external=True)
    model = load(source)
    Pipeline([SplitExperts()])(model)
    result = save(model, tmp_path / "result.onnx", weights="repack")
    proto = onnx.load(result.path, load_external_data=False)  # noqa: TID251
    tensor = next(item for item in proto.graph.initializer if item.name == "experts.2/weight")
    for entry in tensor.external_data:
        if entry.key == "offset":
            entry.value = str(int(entry.value) + 4)
    onnx.save(proto, result.path)
    report = verify_models(source, result.path, depth="regions")
    assert report.status == "different"
    assert report.reasons == (
        (
            "weights 'experts.1/weight' and 'experts.2/weight' are made of 'w' and lie 4 bytes too far apart in "
            "result.onnx.data"
        ),
    )


def test_a_layout_that_was_written_wrongly(tmp_path):
    source = _experts(tmp_path / "model.onnx", stacked=False, external=False)
    model = load(source)
    Pipeline([StackExperts()])(model)
    result = save(model, tmp_path / "result.onnx")
    proto = onnx.load(result.path)  # noqa: TID251
    tensor = next(item for item in proto.graph.initializer if item.name == "experts/stack")
    content = bytearray(tensor.raw_data)
    content[0] ^= 64
    tensor.raw_data = bytes(content)
    onnx.save(proto, result.path)
    report = verify_models(source, result.path, depth="regions")
    assert report.reasons == ("weight 'experts/stack' does not hold what it is to be made of",)


def _swap_two_experts(model: ir.Model) -> None:
    products: list[Any] = [
        node
        for node in model.graph.all_nodes()
        if node.op_type == "MatMul"
        and node.metadata_props.get(PASS_KEY) == "gather-experts"
        and node.inputs[1] is not None
        and node.inputs[1].is_initializer()
    ]
    shape = products[0].inputs[1].const_value.shape
    one, other = [node for node in products if node.inputs[1].const_value.shape == shape][:2]
    first, second = one.inputs[1], other.inputs[1]
    assert first is not second
    one.replace_input_with(1, second)
    other.replace_input_with(1, first)


def _routing_ignored(model: ir.Model) -> None:
    """Every expert's rows are weighted alike."""
    node = next(
        item for item in model.graph if item.op_type == "Mul" and item.metadata_props.get(PASS_KEY) == "gather-experts"
    )
    node.op_type = "Max"


@pytest.mark.parametrize("fixture", ["qwen3_moe_grouped_external", "optimum_qwen3_moe", "gpt_oss_batched"])
@pytest.mark.parametrize("mutation", [_swap_two_experts, _routing_ignored])
def test_errors_in_expert_blocks(fixtures_dir, tmp_path, fixture, mutation):
    source = _copied(fixtures_dir / fixture, tmp_path, data=False)
    spec = "gather-experts{strategy=grouped}"
    assert _verified(source, [spec]).status == "equal"
    report = _verified(source, [spec], mutation)
    assert report.status == "different"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith("gather-experts at ")


# ---- every node of a site ----------------------------------------------------------------------------------------------

_OTHER = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Add",
    "Div": "Mul",
    "Min": "Max",
    "Less": "Greater",
    "LessOrEqual": "Less",
    "ArgMax": "ArgMin",
    "ReduceMax": "ReduceMin",
    "ReduceSum": "ReduceMax",
    "Not": "Identity",
    "Exp": "Neg",
    "Max": "Min",
}


def _mutants(model: ir.Model) -> list[int]:
    """Positions of nodes that a pass inserted and for which there is an operator with the same inputs."""
    return [
        position
        for position, node in enumerate(model.graph)
        if PASS_KEY in node.metadata_props and (node.op_type in _OTHER or node.op_type in ("Where", "Concat"))
    ]


def _mutate(model: ir.Model, position: int) -> None:
    node = model.graph[position]
    if node.op_type in ("Where", "Concat"):
        slots = (1, 2) if node.op_type == "Where" else (0, 1)
        one, other = (node.inputs[slot] for slot in slots)
        node.replace_input_with(slots[0], other)
        node.replace_input_with(slots[1], one)
        return
    node.op_type = _OTHER[node.op_type]


def _disagreements(fixture: Path, folder: Path, specs: list[str], chosen: Any) -> list[str]:
    """Mutants of which one depth says that they are different and the other does not."""
    source = _copied(fixture, folder, data=True)
    model = load(source)
    Pipeline(specs)(model)
    positions = _mutants(model)
    assert positions
    wrong = []
    caught = 0
    for position in chosen(model, positions):

        def mutation(model: ir.Model, position: int = position) -> None:
            _mutate(model, position)

        deep = _verified(source, specs, mutation)
        whole = verify_models(source, source.with_name("result.onnx"), depth="outputs", opt_level_check=False)
        caught += whole.status != "equal"
        if (deep.status == "equal") != (whole.status == "equal"):
            node = model.graph[position]
            wrong.append(
                f"{node.op_type} {node.name}: regions {deep.status}, outputs {whole.status}: {deep.reasons} {whole.reasons}"
            )
    assert caught
    return wrong


@pytest.mark.parametrize(
    ("fixture", "specs"),
    [
        ("llama", ["prune-last-token{depth=layer}", "block-attention{q_blocks=2,kv_blocks=2}"]),
        ("gpt_oss_batched", ["block-attention{q_blocks=2,kv_blocks=2,headpar_split=2}"]),
    ],
)
def test_mutants_are_found_at_both_depths_or_at_none(fixtures_dir, tmp_path, sample_random, fixture, specs):
    assert _disagreements(fixtures_dir / fixture, tmp_path, specs, lambda _, all_: sample_random.sample(all_, 3)) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("fixture", "specs"),
    list(
        itertools.product(
            ("llama", "gemma2", "gpt_oss_batched", "optimum_qwen3_moe"),
            (
                ["prune-last-token{depth=layer}", "block-attention{q_blocks=2,kv_blocks=2}"],
                ["block-attention{q_blocks=2,head_blocks=2,headpar_split=2}"],
                ["prune-last-token{depth=norm,keep=2}"],
            ),
        )
    ),
)
def test_mutants_of_every_kind_are_found_at_both_depths_or_at_none(
    fixtures_dir, tmp_path, sample_random, fixture, specs
):
    def chosen(model: ir.Model, positions: list[int]) -> list[int]:
        """One of the nodes that have an operator and a name but for numbers, of layers and blocks, in common."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for position in positions:
            node = model.graph[position]
            kinds.setdefault((node.op_type, re.sub(r"\d+", "", node.name or "")), []).append(position)
        return [sample_random.choice(alike) for alike in kinds.values()]

    assert _disagreements(fixtures_dir / fixture, tmp_path, specs, chosen) == []
