"""bind-dims on stock exports: what is left of them, and the same bits as the export computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.model_io import load, save
from graphsurgery.patterns.roles import find_size_roles
from graphsurgery.pipeline import Pipeline
from tests.passes.bound_runs import assert_same, bind, dims_of, drawn_feeds, is_static, shape_nodes
from tests.small_models import op_types

if TYPE_CHECKING:
    import onnx_ir as ir

FIXTURES = Path(__file__).parents[2] / "fixtures"
INLINE = [
    "deepseek_v3_batched",
    "gemma2",
    "gpt2",
    "gpt_oss_grouped",
    "llama",
    "llama_opset23",
    "llama_static",
    "optimum_llama",
    "optimum_gpt_oss",
    "qwen3",
]
ALL = sorted(str(path.relative_to(FIXTURES)) for path in FIXTURES.rglob("*.onnx"))


def fixture(name: str) -> ir.Model:
    return load(FIXTURES / name / "model.onnx")


def spec_for(path: str, batch: int, seq: int, past: int) -> str:
    """Everything bound, with the options that the model has."""
    model = load(FIXTURES / path)
    roles = find_size_roles(model, shapes_of(model)).named()
    options = [f"batch={batch}", f"seq={seq}"]
    options += [f"past={past}"] if "past" in roles or past == 0 else []
    # A ring holds one window, which is 8.
    options += [f"context={8 if 'genai' in path else 32}"] if "context" in roles else []
    # Names that have no role: head sizes, and tokens that an image replaces, as many as the verifier draws.
    options += ["dims=[kv_cache_dim:16]"] if "genai" in path else []
    options += [f"dims=[s1:{batch * max(1, seq // 3)}]"] if "language_model" in path else []
    return ",".join(options)


# Nodes before, after, and Shape nodes before.
COUNTS = [
    ("llama", "batch=1,seq=16,past=0", 260, 230, 6),
    ("llama", "batch=2,seq=1,past=24", 260, 230, 6),
    ("llama_opset23", "batch=1,seq=16,past=0", 147, 135, 3),
    ("llama_static", "batch=1,seq=16,context=32", 299, 252, 15),
    ("gemma2", "batch=1,seq=16,past=0", 377, 358, 4),
    ("gpt2", "batch=1,seq=16,past=0", 186, 154, 6),
    ("gpt_oss_grouped", "batch=1,seq=1,past=24", 712, 664, 16),
    ("optimum_llama", "batch=1,seq=16,past=0", 621, 280, 39),
    ("optimum_llama", "batch=2,seq=1,past=24", 621, 280, 39),
    ("genai_llama", "batch=1,seq=16,past=0,dims=[kv_cache_dim:16]", 33, 29, 1),
]


@pytest.mark.parametrize(("name", "spec", "before", "after", "shapes"), COUNTS)
def test_counts(name, spec, before, after, shapes):
    model = fixture(name)
    assert len(shape_nodes(model)) == shapes
    report = bind(model, spec)
    assert (report.nodes_before, report.nodes_after) == (before, after)
    assert shape_nodes(model) == []
    assert all(is_static(value) for value in (*model.graph.inputs, *model.graph.outputs))
    assert report.warnings == []


def test_what_stays_of_llama_is_its_mathematics():
    model = fixture("llama")
    before = op_types(model)
    bind(model, "batch=1,seq=16,past=0")
    after = op_types(model)
    gone = {kind: before.count(kind) - after.count(kind) for kind in set(before)}
    assert {kind: count for kind, count in gone.items() if count} == {
        "Shape": 6,
        "Squeeze": 2,
        "Slice": 9,
        "Concat": 11,
        "Add": 1,
        "Reshape": 1,
    }
    # The mask is still made of ranges.
    assert after.count("Range") == before.count("Range") == 2


def test_sizes_that_depend_on_data_stay():
    model = fixture("optimum_qwen3_moe")
    bind(model, "batch=2,seq=5,past=3")
    assert len(shape_nodes(model)) == 32
    shapes = shapes_of(model)
    for node in model.graph:
        if node.op_type == "Shape":
            value = node.inputs[0]
            assert value is not None
            assert not all(isinstance(size, int) for size in shapes.shape(value) or ())


def test_more_tokens_than_the_exporter_fixed():
    model = fixture("qwen3_5_moe")
    with pytest.raises(
        Exception, match=r"^The graph cannot run with batch=1 and seq=100: node 'node_mul_\d+' \(Mul\) "
    ):
        bind(model, "batch=1,seq=100,past=0")


def test_every_past_of_sliding_layers_is_bound():
    report = bind(fixture("gpt_oss_grouped"), "past=24")
    assert [site.id for site in report.sites if site.status == "rewritten"] == ["dim:s39", "dim:s8"]


def test_prefill_then_decode_from_one_export():
    prefill, decode = fixture("llama"), fixture("llama")
    bind(prefill, "batch=1,seq=16,past=0")
    bind(decode, "batch=1,seq=1,past=16")
    handed_on = {str(value.name)[6:]: dims_of(value) for value in decode.graph.inputs if "cache" in str(value.name)}
    made = {str(value.name)[7:]: dims_of(value) for value in prefill.graph.outputs[1:]}
    assert handed_on == made


@given(
    st.sampled_from(INLINE),
    st.integers(1, 3),
    st.one_of(st.just(1), st.integers(2, 20)),
    st.one_of(st.just(0), st.integers(1, 20)),
    st.integers(0, 1000),
)
@settings(max_examples=6)
def test_random_sizes_on_exports(name, batch, seq, past, seed):
    model = fixture(name)
    bind(model, spec_for(f"{name}/model.onnx", batch, seq, past))
    assert shape_nodes(model) == []
    proto = onnx.load(str(FIXTURES / name / "model.onnx"))  # noqa: TID251 - a tiny model, as ONNX Runtime reads it
    for feeds in drawn_feeds(model, 2, seed):
        assert_same(proto, model, feeds)


@pytest.mark.full
@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(("batch", "seq", "past"), [(1, 16, 0), (2, 1, 24), (2, 5, 7)])
def test_every_export_is_verified(path, batch, seq, past, tmp_path):
    model = load(FIXTURES / path)
    spec = spec_for(path, batch, seq, past)
    if "genai" in path and batch > 1 and seq > 1 and past:
        pytest.skip(
            "ONNX Runtime's GroupQueryAttention refuses several prompt rows after a cache when the batch is over 1"
        )
    report = Pipeline([f"bind-dims{{{spec}}}"], check=True)(model)
    assert report.changed
    shapes = shapes_of(model)
    for node in model.graph.all_nodes():
        if node.op_type in ("Shape", "Size"):
            value = node.inputs[0]
            assert value is not None
            assert not all(isinstance(size, int) for size in shapes.shape(value) or ())
    assert all(is_static(value) for value in model.graph.outputs)
    save(model, tmp_path / "bound.onnx", weights="copy")
    verdict = verify_models(FIXTURES / path, tmp_path / "bound.onnx", opt_level_check=False)
    assert verdict.status == "equal", verdict.reasons
    assert all(output.tolerance == 0 for output in verdict.outputs)
    again = load(tmp_path / "bound.onnx")
    assert not Pipeline([f"bind-dims{{{spec}}}"])(again).changed


CASES = Path(__file__).parents[1] / "cases"


# The feeds of s01 go with an external file, which the runs here do not look for.
RUNNABLE = sorted(path.name.removesuffix(".feeds.npz") for path in CASES.glob("*.feeds.npz") if "s01" not in path.name)


@pytest.mark.parametrize("name", RUNNABLE)
def test_models_that_break_tools(name):
    proto = onnx.load(str(CASES / f"{name}.onnx"))  # noqa: TID251 - a tiny model, as ONNX Runtime reads it
    arrays = np.load(CASES / f"{name}.feeds.npz")
    feeds = {key.split("|")[2]: arrays[key] for key in arrays.files if key.startswith("f0|in|")}
    model = load(CASES / f"{name}.onnx")
    sizes: dict[str, int] = {}
    for value in model.graph.inputs:
        if value.name in feeds:
            sizes.update(zip(map(str, dims_of(value)), feeds[value.name].shape, strict=True))
    total = sizes.get("past_sequence_length + sequence_length")
    if total is not None:
        sizes.setdefault("past_sequence_length", total - sizes["sequence_length"])
    named = [f"{size}:{number}" for size, number in sizes.items() if size.isidentifier()]
    report = bind(model, f"dims=[{','.join(named)}]")
    assert {site.status for site in report.sites} == {"rewritten"}
    assert shape_nodes(model) == []
    # An input says how many logits there are.
    assert all(is_static(value) for value in model.graph.outputs) or "num_logits_to_keep" in name
    assert_same(proto, model, feeds)


# ---- time ---------------------------------------------------------------------------------------------------------


def _calls(path: Path) -> int:
    """How many Python functions bind-dims calls on the model at ``path``."""
    model = load(path)
    bind_dims = Pipeline(["bind-dims{batch=1,seq=16,past=0}"])
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        bind_dims(model)
    finally:
        sys.setprofile(None)
    return count


def _grown(folder: Path, name: str, layers: int, experts: int | None = None) -> Path:
    sys.path.insert(0, str(FIXTURES))
    from grow import grow

    target = folder / f"{layers}x{experts}.onnx"
    grow(FIXTURES / name / "model.onnx", target, layers=layers, experts=experts, data=False)
    return target


def test_work_is_linear_in_layers(tmp_path):
    small, large = (_calls(_grown(tmp_path, "llama", layers)) for layers in (4, 16))
    assert large < 4 * small


@pytest.mark.full
def test_work_is_linear_up_to_50k_nodes(tmp_path):
    small, deep, wide = (
        _calls(_grown(tmp_path, "qwen3_moe_grouped", *size)) for size in ((12, 32), (48, 32), (12, 128))
    )
    assert deep < 4.2 * small
    assert wide < 4.2 * small
    large = _calls(_grown(tmp_path, "qwen3_moe_grouped", 48, 128))
    assert large < 4.2 * deep
