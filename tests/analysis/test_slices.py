"""Row rules: what a node needs to give only chosen rows, each operator held against ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from graphsurgery.analysis import _row_rules
from graphsurgery.analysis.shapes import Shapes
from graphsurgery.analysis.slices import Blocked, Lift, RowAxis, lift
from tests.oracle import session
from tests.strategies.node_cases import CASES, NodeCase, node_cases

if TYPE_CHECKING:
    import onnxruntime as ort

# Operators that ONNX Runtime's CPU provider does not run: their rule is held to the same cases, not to numbers.
NOT_RUN = {("", "Swish"), ("com.microsoft", "MatMulFpQ4"), ("com.microsoft", "SimplifiedLayerNormalization")}


def model_of(case: NodeCase, *, fixed: bool) -> onnx.ModelProto:
    """The node as a model: with its sizes and known operands (``fixed``), or with every input free."""
    names = ["" if value is None else f"in{number}" for number, value in enumerate(case.inputs)]
    made = [f"out{number}" for number in range(case.outputs)]
    node = helper.make_node(case.op, names, made, domain=case.domain, name="node", **case.attributes)
    inputs, initializers = [], []
    for number, value in enumerate(case.inputs):
        if value is None:
            continue
        if fixed and number in case.known:
            initializers.append(onnx.numpy_helper.from_array(value, names[number]))
            continue
        elem = helper.np_dtype_to_tensor_dtype(value.dtype)
        inputs.append(helper.make_tensor_value_info(names[number], elem, value.shape if fixed else [None] * value.ndim))
    outputs = [helper.make_empty_tensor_value_info(name) for name in made]
    graph = helper.make_graph([node], "case", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def answers(case: NodeCase, shapes_of_outputs: list[tuple[int, ...]]) -> dict[tuple[int, int], Lift | Blocked]:
    """What the rule says of every axis of every output."""
    model = ir.from_proto(model_of(case, fixed=True))
    shapes, node = Shapes(model), model.graph.node(0)
    found = {}
    for output, shape in enumerate(shapes_of_outputs):
        for axis, size in enumerate(shape):
            if size > 1:
                found[output, axis] = lift(node, output, RowAxis(axis), shapes, model)
    return found


def reduced(case: NodeCase, step: Lift, rows: np.ndarray, size: int) -> dict[str, Any]:
    """The inputs with only ``rows`` of ``size``, those of each batch where an axis holds all batches, and shape operands with their number."""
    feeds = {f"in{number}": value for number, value in enumerate(case.inputs) if value is not None}
    for number, need in step.rows.items():
        value, chosen = feeds[f"in{number}"], rows
        if need.flat:
            chosen = np.concatenate([rows + first for first in range(0, value.shape[need.axis], size)])
        feeds[f"in{number}"] = np.take(value, chosen, axis=need.axis)
    for patch in step.patches:
        operand = feeds[f"in{patch.input}"].copy()
        operand[patch.position] = len(rows)
        feeds[f"in{patch.input}"] = operand
    return feeds


def hold(case: NodeCase, opened: ort.InferenceSession, rows_seed: int) -> None:
    feeds = {f"in{number}": value for number, value in enumerate(case.inputs) if value is not None}
    whole = opened.run(None, feeds)
    for (output, axis), step in answers(case, [array.shape for array in whole]).items():
        if isinstance(step, Blocked):
            assert step.reason
            continue
        size = whole[output].shape[axis]
        rows = np.random.default_rng(rows_seed).integers(0, size, size=max(1, size - 1))
        got = opened.run(None, reduced(case, step, rows, size))[output]
        wanted = np.take(whole[output], rows, axis=axis)
        what = f"{case} output {output} axis {axis}: {step}"
        assert got.shape == wanted.shape, what
        # Kernels work on several elements at once: the same number may differ in its last bit.
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), atol=1e-5, err_msg=what)


def test_every_operator_with_a_rule_has_cases():
    assert set(CASES) == set(_row_rules.operators())


@pytest.mark.parametrize(("domain", "op"), sorted(CASES))
@settings(max_examples=3)
@given(data=st.data())
def test_reducing_the_inputs_gives_the_rows_of_the_output(domain: str, op: str, data: st.DataObject):
    case = data.draw(node_cases(domain, op))
    if (domain, op) in NOT_RUN:
        return
    hold(case, session(model_of(case, fixed=False)), data.draw(st.integers(0, 9)))


@pytest.mark.full
@pytest.mark.parametrize(("domain", "op"), sorted(CASES))
@settings(max_examples=60)
@given(data=st.data())
def test_reducing_the_inputs_gives_the_rows_of_the_output_at_length(domain: str, op: str, data: st.DataObject):
    case = data.draw(node_cases(domain, op))
    if (domain, op) in NOT_RUN:
        return
    hold(case, session(model_of(case, fixed=False)), data.draw(st.integers(0, 9)))
