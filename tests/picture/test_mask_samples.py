"""Masks computed by the graph's own nodes, held against ONNX Runtime and against what is known of the exports."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.model_io import load
from graphsurgery.picture import mask_samples
from graphsurgery.picture.gathering import GatherND
from graphsurgery.picture.mask_cone import MaskCone, UnclearMaskError
from graphsurgery.picture.mask_samples import mask_pictures
from graphsurgery.pipeline import Pipeline
from tests.small_models import parse

if TYPE_CHECKING:
    from pathlib import Path

CAUSAL = 1024 * 1025 // 2
WINDOW_OF_8 = 8 * 1024 - 28


@pytest.fixture
def short(monkeypatch):
    """Samples of 64 tokens."""
    monkeypatch.setattr(mask_samples, "LENGTHS", (64, 128))


def _told(path: Path) -> list[tuple[int, int | str]]:
    return [(len(item.sites), item.sample.live if item.sample else item.reason) for item in mask_pictures(load(path))]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama", [(3, CAUSAL)]),
        ("gemma2", [(2, WINDOW_OF_8), (2, CAUSAL)]),
        ("gpt_oss_grouped", [(2, WINDOW_OF_8), (2, CAUSAL)]),
        ("optimum_gpt_oss", [(1, WINDOW_OF_8), (1, CAUSAL)]),
        ("llama_opset23", [(3, CAUSAL)]),
        ("genai_llama", [(2, "the operator GroupQueryAttention masks within itself")]),
        ("llama_static", [(3, "the caller feeds it as input 'attention_mask'")]),
    ],
)
def test_exports(fixtures_dir, name, told):
    assert _told(fixtures_dir / name / "model.onnx") == told


def test_a_fixed_cache(cases_dir):
    (found,) = mask_pictures(load(cases_dir / "a08_static_cache_scatter_ctx16.onnx"))
    assert found.sample is not None
    assert (found.sample.length, found.sample.total, found.sample.live) == (16, 16, 136)
    assert found.sample.fed == ("position_ids",)


def test_a_mask_beside_a_past_is_computed_without_one(fixtures_dir):
    (found,) = mask_pictures(load(fixtures_dir / "optimum_llama" / "model.onnx"))[:1]
    assert found.sample is not None
    sample = found.sample
    assert (sample.length, sample.past, sample.total, sample.row_step, sample.column_step) == (1024, 0, 1024, 32, 32)
    assert sample.cells[0] == (round(33 / 64, 4), *[0.0] * 31)
    assert sample.cells[31][:31] == (1.0,) * 31
    assert sample.needed[:2] == ((0, 32), (0, 64))
    assert sample.fed == ("attention_mask",)


@pytest.mark.parametrize("name", ["llama", "gemma2", "optimum_llama", "gpt_oss_batched"])
def test_what_onnx_runtime_computes(fixtures_dir, name, short):
    """The whole model run on the same sample gives the same masks."""
    model = load(fixtures_dir / name / "model.onnx")
    pictures = mask_pictures(model)
    proto = ir.to_proto(model)
    proto.graph.output.extend(onnx.ValueInfoProto(name=item.mask) for item in pictures)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    feeds = {}
    for value in session.get_inputs():
        dtype = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(bool)": np.bool_}[value.type]
        if value.name == "attention_mask":
            feeds[value.name] = np.ones((1, 64), np.int64)
        elif value.name == "position_ids":
            axes = len(value.shape) - 2
            feeds[value.name] = np.broadcast_to(np.arange(64), (*value.shape[:axes], 1, 64)).astype(np.int64)
        elif value.name == "input_ids":
            feeds[value.name] = np.ones((1, 64), np.int64)
        else:
            # States of a fixed size, and caches without a past.
            first = [1 if axis == 0 and not isinstance(size, int) else size for axis, size in enumerate(value.shape)]
            feeds[value.name] = np.zeros([size if isinstance(size, int) else 0 for size in first], dtype)
    found = session.run([item.mask for item in pictures], feeds)
    for item, mask in zip(pictures, found, strict=True):
        assert item.sample is not None
        attended = mask if mask.dtype == np.bool_ else mask > -1e4
        attended = np.broadcast_to(attended, (*attended.shape[:-2], 64, attended.shape[-1])).reshape(
            -1, 64, attended.shape[-1]
        )
        shares = attended.any(axis=0).reshape(32, 2, 32, 2).mean(axis=(1, 3))
        assert item.sample.cells == tuple(tuple(row) for row in shares.tolist())


def test_a_window_that_a_short_sample_does_not_show(fixtures_dir, monkeypatch):
    monkeypatch.setattr(mask_samples, "LENGTHS", (4, 64))
    sliding, full = mask_pictures(load(fixtures_dir / "gemma2" / "model.onnx"))
    assert sliding.sample is not None
    assert full.sample is not None
    assert (sliding.sample.length, full.sample.length) == (64, 4)


def test_pruned_rows_are_one(fixtures_dir, short):
    model = load(fixtures_dir / "llama" / "model.onnx")
    Pipeline(["prune-last-token{depth=layer,index=last}"])(model)
    lengths = {item.layers: item.sample.length for item in mask_pictures(model) if item.sample}
    assert lengths == {(0, 1): 64, (2,): 1}


def test_no_data_file_is_read(fixtures_dir, tmp_path, monkeypatch):
    shutil.copy(fixtures_dir / "llama_external" / "model.onnx", tmp_path / "model.onnx")

    def read(self):
        raise AssertionError(f"tensor {self.name} was read")

    monkeypatch.setattr(ir.ExternalTensor, "_load", read)
    assert _told(tmp_path / "model.onnx") == [(3, CAUSAL)]


# ---- the cone ---------------------------------------------------------------------------------------------------------


def _cone(text: str, value: str, **sizes: int) -> MaskCone:
    model = parse(text)
    values = {item.name: item for node in model.graph for item in node.outputs}
    return MaskCone(model, values[value], shapes_of(model), sizes)


HEAD = '<ir_version: 9, opset_import: ["" : 18]>'


def test_sizes_cut_the_cone():
    """A length that is read off a hidden state needs no hidden state."""
    cone = _cone(
        f"""{HEAD} m (float[S,4] x, int64[S] keep) => (int64[S] y) {{
        h = Exp(x)  s = Shape <end = 1> (h)  n = Squeeze(s)  zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()  r = Range(zero, n, one)  y = Add(r, keep) }}""",
        "y",
        S=5,
    )
    assert cone.inputs == ("keep",)
    proto = cone.model_proto()
    assert [node.op_type for node in proto.graph.node][-1] == "Add"
    assert "Exp" not in {node.op_type for node in proto.graph.node}
    session = onnx.reference.ReferenceEvaluator(proto)
    (found,) = session.run(None, {"keep": np.full(5, 10)})
    assert found.tolist() == [10, 11, 12, 13, 14]


def test_a_branch_brings_what_it_reads():
    cone = _cone(
        f"""{HEAD} m (bool flag, int64[S] keep) => (int64[S] y) {{ k = Neg(keep)
        y = If (flag) < then_branch = a () => (int64[S] t) {{ t = Abs(k) }},
                        else_branch = b () => (int64[S] e) {{ e = Identity(k) }} > }}""",
        "y",
        S=2,
    )
    assert cone.inputs == ("flag", "keep")
    (found,) = onnx.reference.ReferenceEvaluator(cone.model_proto()).run(
        None, {"flag": np.array(True), "keep": np.array([1, 2])}
    )
    assert found.tolist() == [1, 2]


def test_weights_are_not_looked_at(tmp_path):
    model = parse(f"{HEAD} m (int64[S] keep) => (int64[S] y) <int64[1] w = {{3}}> {{ y = Mul(keep, w) }}")
    weight = model.graph.initializers["w"]
    weight.const_value = ir.ExternalTensor(
        "w.data", 0, 8, ir.DataType.INT64, shape=ir.Shape([1]), name="w", base_dir=tmp_path
    )
    with pytest.raises(UnclearMaskError, match="it depends on weight 'w'"):
        MaskCone(model, model.graph.outputs[0], shapes_of(model), {"S": 2})


@pytest.mark.parametrize("batch_dims", [0, 1, 2])
def test_gather_nd(batch_dims):
    rng = np.random.default_rng(0)
    data = rng.standard_normal((2, 3, 4, 5))
    lead = data.shape[:batch_dims]
    width = 4 - batch_dims
    indices = np.stack([rng.integers(0, data.shape[batch_dims + axis], (*lead, 6)) for axis in range(width)], axis=-1)
    node = onnx.helper.make_node("GatherND", ["data", "indices"], ["y"], batch_dims=batch_dims)
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [
            onnx.helper.make_tensor_value_info("data", 11, data.shape),
            onnx.helper.make_tensor_value_info("indices", 7, indices.shape),
        ],
        [onnx.helper.make_tensor_value_info("y", 11, None)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {"data": data, "indices": indices}
    (expected,) = session.run(None, feeds)
    (found,) = onnx.reference.ReferenceEvaluator(model, new_ops=[GatherND]).run(None, feeds)
    assert np.array_equal(found, expected)
