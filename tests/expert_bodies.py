"""An expert block computed from what its recogniser says of it, apart from any pass.

The tokens, the chosen experts, their weights and what else the body reads are taken from a run of the model; each expert
then puts its rows through the body, one small model that is fed that expert's parameters. What comes out must be what
the model's own block gave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from graphsurgery.patterns.experts.sites import ROUTE_WEIGHT, TOKEN_ROW, ExpertTensor, StepOutput
from tests.oracle import run, session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphsurgery.patterns.experts.sites import ExpertSite, ExpertStep, Operand

__all__ = ["assert_bodies_compute", "body_results"]

_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare")


def assert_bodies_compute(
    model: ir.Model,
    sites: Sequence[ExpertSite],
    feeds: Sequence[Mapping[str, np.ndarray]],
    folder: Path | None = None,
    tolerance: float | None = None,
) -> None:
    """Each site's body gives what the model's own block gives, for every feed."""
    for site, ours, wanted in body_results(model, sites, feeds, folder):
        assert ours.shape == wanted.shape, site.id
        assert np.isfinite(wanted).all()
        bound = tolerance or (2e-3 if wanted.dtype == np.float16 else 1e-5)
        scale = max(1.0, float(np.max(np.abs(wanted), initial=0.0)))
        np.testing.assert_allclose(
            ours.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=bound * scale, err_msg=site.id
        )
        assert wanted.size == 0 or float(np.std(wanted)) > 1e-6, "a block that gives one number shows nothing"


def body_results(
    model: ir.Model, sites: Sequence[ExpertSite], feeds: Sequence[Mapping[str, np.ndarray]], folder: Path | None = None
) -> list[tuple[ExpertSite, np.ndarray, np.ndarray]]:
    """For each feed and site: what its body gives, and what the model's own block gives."""
    wanted: dict[str, None] = {}
    for site in sites:
        for value in _values_of(site):
            assert value.name
            wanted[value.name] = None
    proto = ir.to_proto(model)
    held = {tensor.name: tensor for tensor in proto.graph.initializer}
    outputs = {value.name for value in proto.graph.output}
    for name in wanted:
        if name not in held and name not in outputs and name not in {value.name for value in proto.graph.input}:
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
    known = {name: onnx.numpy_helper.to_array(held[name], str(folder or "")) for name in wanted if name in held}
    opened = session(proto, folder)
    results = []
    for feed in feeds:
        values = {**known, **{name: array for name, array in feed.items() if name in wanted}, **run(opened, feed)}
        for site in sites:
            ours = _compute(model, site, values)
            results.append((site, ours, values[site.output.name or ""]))
    return results


def _values_of(site: ExpertSite) -> list[ir.Value]:
    found = [site.tokens, site.indices, site.output]
    if site.weights is not None:
        found.append(site.weights)
    for step in site.body:
        for item in step.operands:
            if isinstance(item, ir.Value):
                found.append(item)
            elif isinstance(item, ExpertTensor):
                found += item.values
    return found


def _compute(model: ir.Model, site: ExpertSite, values: Mapping[str, np.ndarray]) -> np.ndarray:
    tokens = values[site.tokens.name or ""]
    rows = tokens.reshape(-1, tokens.shape[-1])
    indices = values[site.indices.name or ""].reshape(-1, site.top_k)
    assert indices.shape[0] == rows.shape[0]
    assert rows.shape[1] == site.hidden
    weights = None if site.weights is None else values[site.weights.name or ""]
    if weights is not None and not site.weights_by_expert:
        weights = weights.reshape(-1, site.top_k)
    if weights is not None and site.weights_by_expert:
        weights = np.take_along_axis(weights.reshape(len(rows), site.experts), indices.astype(np.int64), 1)
    opened, fed = _body_session(model, site, values)
    total: np.ndarray | None = None
    for expert in range(site.experts):
        token, choice = np.nonzero(indices == expert)
        feed: dict[str, Any] = {name: part(expert) for name, part in fed.items()}
        feed["token_row"] = rows[token]
        if weights is not None:
            feed["route_weight"] = weights[token, choice][:, None]
        result = run(opened, feed)["result"]
        if total is None:
            total = np.zeros((rows.shape[0], result.shape[-1]), result.dtype)
        assert result.shape == (len(token), site.hidden)
        np.add.at(total, token, result)
    assert total is not None
    return total.reshape(values[site.output.name or ""].shape)


def _body_session(model: ir.Model, site: ExpertSite, values: Mapping[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
    """The body as a model, and what feeds its parameters for an expert."""
    nodes: list[onnx.NodeProto] = []
    fed: dict[str, Any] = {}
    names: dict[int, str] = {}

    def read(item: Operand) -> str:
        if item is None:
            return ""
        if item is TOKEN_ROW:
            return "token_row"
        if item is ROUTE_WEIGHT:
            return "route_weight"
        if isinstance(item, StepOutput):
            return f"step{item.step}"
        if id(item) not in names:
            names[id(item)] = f"operand{len(names)}"
            if isinstance(item, ir.Value):
                array = _unpadded(values[item.name or ""])
                fed[names[id(item)]] = lambda _, array=array: array
            elif isinstance(item, ExpertTensor):
                fed[names[id(item)]] = lambda expert, item=item: _unpadded(_part(item, expert, values))
        return names[id(item)]

    keep = []
    for number, step in enumerate(site.body):
        keep += list(step.operands)
        nodes += _node(step, [read(item) for item in step.operands], f"step{number}", site)
    nodes.append(helper.make_node("Identity", [f"step{len(site.body) - 1}"], ["result"]))
    dtype = helper.np_dtype_to_tensor_dtype
    inputs = [helper.make_tensor_value_info(name, dtype(part(0).dtype), part(0).shape) for name, part in fed.items()]
    row = values[site.tokens.name or ""].dtype
    inputs.append(helper.make_tensor_value_info("token_row", dtype(row), ["N", site.hidden]))
    if site.weights is not None:
        weight = values[site.weights.name or ""].dtype
        inputs.append(helper.make_tensor_value_info("route_weight", dtype(weight), ["N", 1]))
    graph = helper.make_graph(nodes, "body", inputs, [onnx.ValueInfoProto(name="result")])
    imports = [helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    return session(helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version)), fed


def _unpadded(array: np.ndarray) -> np.ndarray:
    """Without leading axes of one."""
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    return array


def _part(tensor: ExpertTensor, expert: int, values: Mapping[str, np.ndarray]) -> np.ndarray:
    array = values[tensor.values[0].name or ""][expert] if tensor.stacked else values[tensor.values[expert].name or ""]
    assert array.shape == tensor.shape
    return array


def _node(step: ExpertStep, reads: list[str], result: str, site: ExpertSite) -> list[onnx.NodeProto]:
    kind = step.node.op_type
    attributes = [ir.to_proto(attribute) for attribute in step.node.attributes.values()]
    made: list[onnx.NodeProto] = []
    outputs = [f"{result}_{place}" for place in range(max(1, len(step.node.outputs)))]
    outputs[step.output] = result
    if kind == "MatMul" and _is_parameter(step.operands[0], site):
        made.append(helper.make_node("Transpose", [reads[0]], [f"{result}_turned"], perm=[1, 0]))
        reads = [reads[1], f"{result}_turned"]
    if kind == "Transpose":
        attributes = [helper.make_attribute("perm", list(step.axes))]
    elif step.axes:
        (axis,) = step.axes
        place = {"Slice": 3, **dict.fromkeys(_REDUCTIONS, 1)}.get(kind)
        if place is not None and (len(reads) > place or kind == "Slice"):
            shape = (helper.make_tensor("", TensorProto.INT64, [1], [axis]),)[0]
            made.append(helper.make_node("Constant", [], [f"{result}_axis"], value=shape))
            reads = [*reads[:place], f"{result}_axis", *reads[place + 1 :]]
        else:
            name = "axes" if kind in _REDUCTIONS else "axis"
            attributes = [item for item in attributes if item.name != name]
            attributes.append(helper.make_attribute(name, [axis] if name == "axes" else axis))
    node = helper.make_node(kind, reads, outputs, domain=step.node.domain)
    node.attribute.extend(attributes)
    return [*made, node]


def _is_parameter(operand: Operand, site: ExpertSite) -> bool:
    if isinstance(operand, StepOutput):
        return not site.body[operand.step].per_row
    return isinstance(operand, ExpertTensor | ir.Value)
