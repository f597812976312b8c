"""Diff takes steps linear in nodes, whatever changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphsurgery import compare
from graphsurgery.comparison import unfolding
from tests.compare_helpers import diff
from tests.model_io_helpers import Weight, external_tensor

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.compare import ModelDiff
    from graphsurgery.comparison.cells import View


def _layers(count: int, *, extra: bool = False, inline: bool = False, without: int = -1) -> onnx.ModelProto:
    """``count`` layers of three heads each: ten nodes a layer, eleven with the extra one."""
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []
    hidden = "x"
    for layer in range(count):
        heads = []
        for head in range(3):
            name = f"l{layer}h{head}"
            if inline:
                weights.append(numpy_helper.from_array(np.zeros(4, np.float32), name))
            else:
                weights.append(external_tensor(Weight(name, "m.data", 16 * len(weights), (4,))))
            nodes.append(helper.make_node("MatMul", [hidden, name], [f"{name}m"]))
            nodes.append(helper.make_node("Softmax", [f"{name}m"], [f"{name}s"], axis=-1))
            nodes.append(helper.make_node("Mul", [f"{name}s", "x"], [f"{name}g"]))
            heads.append(f"{name}g")
        if extra:
            nodes.append(helper.make_node("Identity", [heads[0]], [f"l{layer}i"]))
            heads[0] = f"l{layer}i"
        if layer == without:
            del nodes[-9:]
            continue
        hidden = f"l{layer}"
        nodes.append(helper.make_node("Concat", heads, [hidden], axis=-1))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 4]) for name in ("x", hidden)]
    infos[1].name = "y"
    nodes.append(helper.make_node("Neg", [hidden], ["y"]))
    return helper.make_model(helper.make_graph(nodes, "g", infos[:1], infos[1:], weights), ir_version=10)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch):
    """Counts the steps that one comparison takes."""

    def count(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[int, ModelDiff]:
        views: list[View] = []

        def unfold(model: ir.Model, who: str) -> View:
            views.append(unfolding.unfold(model, who))
            return views[-1]

        monkeypatch.setattr(compare, "unfold", unfold)
        found = diff(a, b)
        return sum(view.visits for view in views), found

    return count


_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "no change"),
    "a node in every layer": ({"extra": True}, "+{layers} -0 nodes"),
    "a layer less": ({"without": 2}, "+0 -10 nodes"),
    "all weights, and a node in every layer": (
        {"inline": True, "extra": True},
        "+{layers} -0 nodes, {weights} of the initializers",
    ),
}


@pytest.mark.parametrize("change", list(_CHANGES))
def test_steps_are_linear_in_nodes(change: str, steps):
    options, text = _CHANGES[change]
    counted = []
    for layers in (25, 100):
        count, found = steps(_layers(layers), _layers(layers, **options))
        assert found.changes() == text.format(layers=layers, weights=3 * layers)
        counted.append(count)
    assert counted[1] <= 4.1 * counted[0]
    assert counted[1] <= 40 * 1000


@pytest.mark.full
@pytest.mark.parametrize("change", list(_CHANGES))
def test_fifty_thousand_nodes(change: str, steps):
    options, text = _CHANGES[change]
    count, found = steps(_layers(5000), _layers(5000, **options))
    assert found.sizes["nodes"].before == 50_001
    assert found.changes() == text.format(layers=5000, weights=15000)
    assert count <= 40 * 50_000
