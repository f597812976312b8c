"""bound-context and local functions: layers stay bounded when they are extracted, and are bounded inside functions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from graphsurgery.equivalence.verify import verify_models
from graphsurgery.model_io import load, save
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.passes.test_bound_context import A08, FIXTURES, LLAMA, PLAIN, close, fed
from tests.strategies.static_caches import build, feeds_of

if TYPE_CHECKING:
    from pathlib import Path

GPT_OSS = FIXTURES / "gpt_oss_static" / "model.onnx"


def return_scores(model: ir.Model) -> list[str]:
    """Let every call of a function with a softmax return the product of queries and keys inside; their names."""
    found: list[str] = []
    for function in model.functions.values():
        softmax = next((node for node in function if node.op_type == "Softmax"), None)
        if softmax is None:
            continue
        value = softmax.inputs[0]
        while value is not None and (maker := value.producer()) is not None and maker.op_type != "MatMul":
            value = maker.inputs[1 if maker.op_type == "Where" else 0]
        assert value is not None
        function.outputs.append(value)
        calls = [node for node in model.graph if node.op_identifier() == function.identifier()]
        for call in calls:
            call.resize_outputs(len(function.outputs))
            output = call.outputs[-1]
            output.name, output.type = f"scores_{len(found)}", ir.TensorType(ir.DataType.FLOAT)
            model.graph.outputs.append(output)
            found.append(output.name)
    return found


@pytest.mark.parametrize(("path", "slots", "layers"), [(LLAMA, 20, 3), (A08, 16, 2)], ids=["llama_static", "a08"])
def test_the_scores_inside_functions_have_so_many_columns(path: Path, slots: int, layers: int) -> None:
    model = load(path)
    reports = Pipeline(["bound-context", "extract-functions"], check=True)(model).passes
    assert [report.count("rewritten") for report in reports] == [layers, 1]
    assert len(model.functions) == 1
    scores = return_scores(model)
    assert len(scores) == layers
    before, after = session(load(path)), session(model)
    for length, past, bound in ((1, 0, 1), (5, 0, 6), (3, 4, 9), (1, 9, slots)):
        feeds = fed(path, slots, length, past)
        found = run(after, feeds | {"comp_ctx_lengths": np.zeros(bound, np.int64)})
        close(run(before, feeds), found)
        assert [found[name].shape[-1] for name in scores] == [bound] * layers


def test_a_bound_from_positions_inside_functions() -> None:
    model = load(LLAMA)
    Pipeline(["bound-context{source=positions,multiple=4}", "extract-functions"], check=True)(model)
    scores = return_scores(model)
    feeds = fed(LLAMA, 20, 2, 5)
    found = run(session(model), feeds)
    close(run(session(load(LLAMA)), feeds), found)
    assert [found[name].shape[-1] for name in scores] == [8] * 3


# ---- functions first ----------------------------------------------------------------------------------------------


def fed_two(length: int, past: int, window: int, slots: int) -> dict[str, np.ndarray]:
    """Feeds of the export with full and sliding layers, which have fewer slots; the others hold noise."""
    rng = np.random.default_rng(length + past)
    feeds: dict[str, np.ndarray] = {}
    for value in session(load(GPT_OSS)).get_inputs():
        size = window if "sliding" in value.name or any(f"layers.{layer}." in value.name for layer in (0, 2)) else slots
        if value.name == "input_ids":
            feeds[value.name] = rng.integers(0, 40, (2, length))
        elif value.name == "position_ids":
            feeds[value.name] = np.tile(np.arange(past, past + length), (2, 1))
        elif value.name.startswith("attention_mask"):
            allowed = np.arange(size)[None, :] <= np.arange(past, past + length)[:, None]
            added = np.where(allowed, 0, np.finfo(np.float32).min).astype(np.float32)
            feeds[value.name] = np.broadcast_to(added, (2, 1, length, size)).copy()
        elif value.name.endswith("cumulative_length"):
            feeds[value.name] = np.asarray(past)
        else:
            heads, features = int(value.shape[1]), int(value.shape[3])
            feeds[value.name] = rng.standard_normal((2, heads, size, features)).astype(np.float32)
    return feeds


def extracted(path: Path, directory: Path) -> ir.Model:
    """The model whose layers an earlier run has made functions, as read from its file."""
    model = load(path)
    Pipeline(["extract-functions"], check=True)(model)
    save(model, directory / "functions.onnx", weights="copy")
    return load(directory / "functions.onnx")


def main_slices(model: ir.Model) -> list[str]:
    return [node.inputs[0].name or "" for node in model.graph if node.op_type == "Slice" and node.inputs[0] is not None]


@pytest.mark.parametrize(("path", "slots", "layers"), [(LLAMA, 20, 3), (A08, 16, 2)], ids=["llama_static", "a08"])
def test_layers_that_are_functions_already(tmp_path: Path, path: Path, slots: int, layers: int) -> None:
    model = extracted(path, tmp_path)
    before = session(load(tmp_path / "functions.onnx"))
    report = Pipeline(["bound-context"], check=True)(model).passes[0]
    (site,) = report.sites
    name = next(iter(model.functions.values())).name
    assert site.status == "rewritten"
    assert site.reason.endswith(f"slots; in function {name!r}, for its {layers} calls")
    assert len(site.detail["caches"]) == 2 * layers  # type: ignore[arg-type]
    assert [boundary.scope for boundary in site.boundaries] == [name]
    scores = return_scores(model)
    after = session(model)
    for length, past in ((1, 0), (5, 0), (3, 4), (1, 9)):
        feeds = fed(path, slots, length, past)
        reference = run(before, feeds)
        for bound in {past + length, past + length + 1, slots, slots + 5}:
            found = run(after, feeds | {"comp_ctx_lengths": np.full(bound, -3)})
            close(reference, found)
            assert [found[name].shape[-1] for name in scores] == [min(bound, slots)] * layers
            first = [name for name in reference if ("key" in name or "value" in name) and ".0" in name]
            assert len(first) == 2
            assert all(reference[name].tobytes() == found[name].tobytes() for name in first)
            assert all(found[name].shape[2] == slots for name in first)


def test_one_function_for_layers_with_few_and_with_many_slots(tmp_path: Path) -> None:
    model = extracted(GPT_OSS, tmp_path)
    assert len(model.functions) == 1
    before = session(load(tmp_path / "functions.onnx"))
    (site,) = Pipeline(["bound-context"], check=True)(model).passes[0].sites
    assert site.status == "rewritten"
    assert site.detail["slots"] == "s12 or s31"
    scores = return_scores(model)
    after = session(model)
    window, slots = 8, 20
    for length, past in ((1, 0), (4, 1), (1, 6)):
        feeds = fed_two(length, past, window, slots)
        reference = run(before, feeds)
        for bound in (past + length, slots, slots + 1):
            found = run(after, feeds | {"comp_ctx_lengths": np.zeros(bound, np.int64)})
            close(reference, found)
            assert [found[name].shape[-1] for name in scores] == [min(bound, size) for size in (window, slots) * 2]
            assert all(
                found[f"output.cache.layers.{layer}.keys"].shape[2] == (window, slots)[layer % 2] for layer in range(4)
            )
            for kind in ("keys", "values"):
                name = f"output.cache.layers.0.{kind}"
                assert reference[name].tobytes() == found[name].tobytes()


def test_callers_cut_a_mask_once_and_hand_it_over(tmp_path: Path) -> None:
    model = extracted(GPT_OSS, tmp_path)
    Pipeline(["bound-context"], check=True)(model)
    slices = main_slices(model)
    assert sorted(name for name in slices if name.startswith("attention_mask")) == [
        "attention_mask.full_attention",
        "attention_mask.sliding_attention",
    ]
    (function,) = model.functions.values()
    calls = [node for node in model.graph if node.op_identifier() == function.identifier()]
    # No call takes a whole mask any more, and the function has no parameter for one.
    assert not any((value.name or "").startswith("attention_mask") for call in calls for value in call.inputs if value)
    assert [len(call.inputs) for call in calls] == [len(function.inputs)] * 4
    assert all(formal.uses() for formal in function.inputs)


@pytest.mark.parametrize("path", [LLAMA, A08, GPT_OSS], ids=["llama_static", "a08", "gpt_oss_static"])
def test_a_bound_from_positions_that_bodies_write(tmp_path: Path, path: Path) -> None:
    model = extracted(path, tmp_path)
    before = session(load(tmp_path / "functions.onnx"))
    report = Pipeline(["bound-context{source=positions,multiple=4}"], check=True)(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten"]
    scores = return_scores(model)
    after = session(model)
    for length, past in ((2, 1), (2, 4)):
        feeds = fed_two(length, past, 8, 20) if path == GPT_OSS else fed(path, 16, length, past)
        if path == LLAMA:
            # Where positions are not slots, the write tells.
            feeds["position_ids"] += 40
        reference = run(before, feeds)
        found = run(after, feeds)
        close(reference, found)
        assert [found[name].shape[-1] for name in scores] == [-(-(past + length) // 4) * 4] * len(scores)


def test_both_in_one_pipeline_in_either_order() -> None:
    model = load(LLAMA)
    reports = Pipeline(["extract-functions", "bound-context"], check=True)(model).passes
    assert [[site.status for site in report.sites] for report in reports] == [["rewritten"], ["rewritten"]]
    other = load(LLAMA)
    reports = Pipeline(["bound-context", "extract-functions"], check=True)(other).passes
    assert [[site.status for site in report.sites] for report in reports] == [["rewritten"] * 3, ["rewritten"]]
    feeds = fed(LLAMA, 20, 3, 4) | {"comp_ctx_lengths": np.zeros(9, np.int64)}
    close(run(session(other), feeds), run(session(model), feeds))


def test_twice_and_either_way_around(tmp_path: Path) -> None:
    model = extracted(GPT_OSS, tmp_path)
    Pipeline(["bound-context"], check=True)(model)
    nodes = [len(model.graph), *(len(function) for function in model.functions.values())]
    (site,) = Pipeline(["bound-context"], check=True)(model).passes[0].sites
    assert (site.status, site.reason) == ("refused", "already bounded: an earlier run cut its keys")
    assert nodes == [len(model.graph), *(len(function) for function in model.functions.values())]
    model = load(GPT_OSS)
    Pipeline(["bound-context", "extract-functions"], check=True)(model)
    (site,) = Pipeline(["bound-context"], check=True)(model).passes[0].sites
    assert (site.status, site.reason) == ("refused", "already bounded: an earlier run cut its keys")


def test_verified_with_functions_first(tmp_path: Path) -> None:
    model = extracted(LLAMA, tmp_path)
    Pipeline(["bound-context"], check=True)(model)
    save(model, tmp_path / "bounded.onnx", weights="copy")
    result = verify_models(LLAMA, tmp_path / "bounded.onnx", depth="outputs")
    assert (result.status, result.reasons) == ("equal", ())


# ---- functions within functions, and parts of layers --------------------------------------------------------------


@pytest.mark.parametrize("mask", ["range", "padding"])
def test_writes_and_reads_that_are_functions_inside_layer_functions(mask: str) -> None:
    spec = dataclasses.replace(PLAIN, write="function", read="function", mask=mask)
    model = ir.from_proto(build(spec))
    Pipeline(["extract-functions"], check=True)(model)
    assert sorted(function.name for function in model.functions.values()) == ["CtxGather", "CtxScatter", "DecoderLayer"]
    report = Pipeline(["bound-context"], check=True)(model).passes[0]
    assert [site.status for site in report.sites] == ["rewritten"]
    # The write goes on filling all slots; the read is replayed on what is left, in place of its call.
    layer = next(function for function in model.functions.values() if function.name == "DecoderLayer")
    assert [node.op_type for node in layer if node.domain] == ["CtxScatter", "CtxScatter"]
    scores = return_scores(model)
    before, after = session(build(spec)), session(model)
    for length, past, bound in ((1, 0, 1), (3, 4, 7), (2, 4, 9), (1, 11, 12)):
        feeds = feeds_of(spec, 2, length, past, 12, bound)
        reference = run(before, feeds)
        found = run(after, feeds | {"comp_ctx_lengths": np.zeros(bound, np.int64)})
        close(reference, found)
        assert [found[name].shape[-1] for name in scores] == [bound] * 2
        for kind in ("key", "value"):
            name = f"past_{kind}.0_RetainedState"
            assert reference[name].tobytes() == found[name].tobytes()


ATTENTION_ALONE = """
<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
calls (float[b, 1, s, 4] x, int64[b, s] position_ids, float[b, 1, n, 4] past_key_0, float[b, 1, w, 4] past_key_1)
    => (float[b, 1, s, 4] y, float[b, 1, n, 4] past_key_0_RetainedState, float[b, 1, w, 4] past_key_1_RetainedState)
<int64[2] middle = {1, 3}, int64[1] two = {2}, int64 zero = {0}, int64 one = {1}, int64[3] lead = {0, 1, 2}>
{
    index = Unsqueeze (position_ids, middle)
    shape = Shape (x)
    spread = Expand (index, shape)
    past_key_0_RetainedState = ScatterElements <axis = 2> (past_key_0, spread, x)
    size_0 = Shape <start = 2, end = 3> (past_key_0)
    slots_0 = Squeeze (size_0)
    range_0 = Range (zero, slots_0, one)
    columns_0 = Unsqueeze (range_0, lead)
    allowed_0 = LessOrEqual (columns_0, index)
    h = own.Attend (x, past_key_0_RetainedState, allowed_0)
    past_key_1_RetainedState = SECOND
    size_1 = Shape (past_key_1_RetainedState)
    length_1 = Gather <axis = 0> (size_1, two)
    slots_1 = Squeeze (length_1)
    range_1 = Range (zero, slots_1, one)
    columns_1 = Unsqueeze (range_1, lead)
    allowed_1 = LessOrEqual (columns_1, index)
    y = own.Attend (h, past_key_1_RetainedState, allowed_1)
}
<domain: "own", opset_import: ["" : 18]>
Attend (query, keys, allowed) => (attended)
{
    low = Constant <value_float = -1e30> ()
    turned = Transpose <perm = [0, 1, 3, 2]> (keys)
    product = MatMul (query, turned)
    masked = Where (allowed, product, low)
    weights = Softmax <axis = -1> (masked)
    attended = MatMul (weights, keys)
}
"""
FIXED = "ScatterElements <axis = 2> (past_key_1, spread, h)"
GROWING = "Concat <axis = 2> (past_key_1, h)"


def test_a_function_that_is_the_attention_alone_takes_keys_that_are_cut() -> None:
    text = ATTENTION_ALONE.replace("SECOND", FIXED)
    proto = onnx.parser.parse_model(text)
    model = ir.from_proto(proto)
    (site,) = Pipeline(["bound-context"], check=True)(model).passes[0].sites
    assert (site.status, site.detail["slots"]) == ("rewritten", "n or w")
    (function,) = model.functions.values()
    # Nothing is left to cut inside: no bound comes in, and what was whole does not.
    assert len(function.inputs) == 3
    assert "Slice" not in [node.op_type for node in function]
    scores = return_scores(model)
    before, after = session(proto), session(model)
    rng = np.random.default_rng(3)
    feeds = {
        "x": rng.standard_normal((2, 1, 2, 4)).astype(np.float32),
        "position_ids": np.asarray([[1, 2], [1, 2]]),
        "past_key_0": rng.standard_normal((2, 1, 9, 4)).astype(np.float32),
        "past_key_1": rng.standard_normal((2, 1, 5, 4)).astype(np.float32),
    }
    for bound in (3, 7, 12):
        found = run(after, feeds | {"comp_ctx_lengths": np.zeros(bound, np.int64)})
        close(run(before, feeds), found)
        assert [found[name].shape[-1] for name in scores] == [min(bound, 9), min(bound, 5)]


def test_a_function_for_caches_of_both_kinds_is_refused() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(ATTENTION_ALONE.replace("SECOND", GROWING).replace("w] past_key_1_", "m] past_key_1_"))
    )
    (site,) = Pipeline(["bound-context"], check=True)(model).passes[0].sites
    assert site.status == "refused"
    assert site.reason.startswith("some calls of function 'Attend' hand over a cache of a fixed size for 'keys'")
    assert "'past_key_1' grows with each call" in site.reason
    assert site.reason.endswith("run inline-functions first")


def test_a_function_that_dead_code_calls_too_is_refused() -> None:
    text = ATTENTION_ALONE.replace("SECOND", FIXED)
    text += """
<domain: "own", opset_import: ["" : 18, "own" : 1]>
Unused (query, keys, allowed) => (attended) { attended = own.Attend (query, keys, allowed) }
"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    (site,) = Pipeline(["bound-context"], check=True)(model).passes[0].sites
    assert site.status == "refused"
    assert "inside function 'Attend', which a function without calls calls too" in site.reason
    assert site.reason.endswith("run inline-functions first")


def test_scores_that_a_function_returns_are_refused() -> None:
    spec = dataclasses.replace(PLAIN, shape_reader=True)
    model = ir.from_proto(build(spec))
    Pipeline(["extract-functions"], check=True)(model)
    refused = [
        site for site in Pipeline(["bound-context"], check=True)(model).passes[0].sites if site.status == "refused"
    ]
    assert len(refused) == 1
    assert refused[0].reason.endswith("a caller may want them whole; run inline-functions first")
