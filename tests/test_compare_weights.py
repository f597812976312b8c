"""Diff tells weights by reference: type, shape and place, never by reading a data file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from graphsurgery.model_io import load
from tests.compare_helpers import HEAD, diff, lists
from tests.model_io_helpers import Weight, add_model, external_tensor

if TYPE_CHECKING:
    from pathlib import Path


def _external(offset: int = 0, location: str = "m.data", dims: tuple[int, ...] = (4,)) -> onnx.ModelProto:
    return add_model(
        [external_tensor(Weight("w", location, offset, dims)), external_tensor(Weight("v", location, 64, (4,)))]
    )


def test_external_tensors_are_compared_by_place_and_never_read():
    assert diff(_external(), _external()).severity == "none"
    found = diff(_external(), _external(offset=16))
    assert (found.severity, lists(found)) == ("minor", {"initializers": ["w place: m.data[0:16] -> m.data[16:32]"]})
    found = diff(_external(), _external(dims=(8,)))
    assert lists(found) == {"initializers": ["w shape: [4] -> [8]"]}


def test_the_name_of_a_data_file_does_not_count():
    assert diff(_external(), _external(location="elsewhere.data")).severity == "none"
    two = add_model([external_tensor(Weight("w", "a", 0, (4,))), external_tensor(Weight("v", "b", 0, (2, 2)))])
    renamed = add_model([external_tensor(Weight("w", "c", 0, (4,))), external_tensor(Weight("v", "d", 0, (2, 2)))])
    assert diff(two, renamed).severity == "none"
    one = add_model([external_tensor(Weight("w", "c", 0, (4,))), external_tensor(Weight("v", "c", 16, (2, 2)))])
    assert lists(diff(two, one)) == {"initializers": ["w place: a[0:16] -> c[0:16]", "v place: b[0:16] -> c[16:32]"]}


def test_inline_and_external_data_cannot_be_told_equal():
    inline = add_model(
        [numpy_helper.from_array(np.zeros(4, np.float32), "w"), external_tensor(Weight("v", "m.data", 64, (4,)))]
    )
    assert lists(diff(inline, _external())) == {"initializers": ["w place: inline -> m.data[0:16]"]}


def test_a_tied_weight_stored_twice_is_an_initializer_more():
    text = f"{HEAD} g (float[1] x) => (float[1] y) <float[1] w = {{3.0}}> {{ a = Mul(x, w) y = Add(a, w) }}"
    other = text.replace("w = {3.0}", "w = {3.0}, float[1] v = {3.0}").replace("Add(a, w)", "Add(a, v)")
    found = diff(text, other)
    assert (found.severity, lists(found)) == ("minor", {"initializers": ["v added: FLOAT [1]"]})
    assert found.notes == ("initializers: 1 -> 2",)
    assert lists(diff(other, text)) == {"initializers": ["v removed: FLOAT [1]"]}


def test_defaults_of_inputs(cases_dir: Path):
    path = cases_dir / "s07_weights_are_also_graph_inputs.onnx"
    other = load(path)
    name = other.graph.outputs[0].producer().inputs[1].name  # type: ignore[union-attr]
    other.graph.initializers[name].const_value = ir.tensor(np.zeros((16, 40), np.float32))  # type: ignore[index]
    found = diff(load(path), other)
    assert found.severity == "minor"
    assert [item.name for item in found.initializers.items] == [name]
    assert found.affected_outputs == (other.graph.outputs[0].name,)
