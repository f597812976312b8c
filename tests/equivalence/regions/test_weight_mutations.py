"""Errors in weights that passes view, stack and lay out anew, and in experts that are exchanged, are found at depth regions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.equivalence.verify import verify_models
from graphsurgery.model_io import load, save
from graphsurgery.pass_base import Pass
from graphsurgery.patterns.site import Site
from graphsurgery.pipeline import Pipeline
from graphsurgery.rewrite import PASS_KEY, Rewrite
from graphsurgery.site_report import SiteReport
from graphsurgery.weights import Stack, Transpose, View
from tests.equivalence.regions.planted import copied, verified

if TYPE_CHECKING:
    from pathlib import Path


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
    report = verified(source, [SplitExperts(fault=fault)], real_weights=real)
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
    report = verified(source, [StackExperts(fault=fault)])
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

    report = verified(source, [SplitExperts()], mutation)
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
    source = copied(fixtures_dir / fixture, tmp_path, data=False)
    spec = "gather-experts{strategy=grouped}"
    assert verified(source, [spec]).status == "equal"
    report = verified(source, [spec], mutation)
    assert report.status == "different"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith("gather-experts at ")
