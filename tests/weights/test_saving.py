"""Weights that surgery makes, in the files: what they hold, what is stored, and when nothing is written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.errors import SaveError, UsageError
from graphsurgery.model_files import serialising
from graphsurgery.model_io import load, save
from graphsurgery.pipeline import Pipeline
from graphsurgery.rewrite import Rewrite
from graphsurgery.weights import (
    WEIGHT_KEY,
    Stack,
    Transpose,
    View,
    evaluate,
    obstacle,
    parse_record,
    sources_of,
)
from tests.strategies.weight_trees import ELEMENT_TYPES, draw_array, expressions, write_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphsurgery.weights import Part

FLOAT = ir.DataType.FLOAT


def _arrays(count: int = 4, shape: tuple[int, ...] = (8, 64), dtype: ir.DataType = FLOAT) -> dict[Any, np.ndarray]:
    generator = np.random.default_rng(11)
    return {f"w{number}": draw_array(generator, dtype, shape) for number in range(count)}


def _edit(model: ir.Model, expressions: Sequence[Part], *, drop: Sequence[str] = ()) -> list[Any]:
    """Let each expression be an output through Identity, and take away the readers of sources in ``drop``."""
    edit = Rewrite(model, "test-pass", "site:0", scope="made")
    made = [edit.weight(expression, f"m{number}") for number, expression in enumerate(expressions)]
    for number, value in enumerate(made):
        edit.before(model.graph[0])
        output = edit.emit(
            "Identity",
            [value],
            name=f"out{number}",
            dtype=value.dtype,
            shape=[int(str(size)) for size in value.shape or ()],
        )
        model.graph.outputs.append(output)
    for name in drop:
        value = model.graph.initializers[name]
        for use in list(value.uses()):
            outputs = model.graph.outputs
            position = next((n for n, item in enumerate(outputs) if item.producer() is use.node), None)
            if position is not None:
                del outputs[position]
            edit.reroute(use.node, use.idx, None)
            model.graph.remove(use.node)
        model.graph.initializers.pop(name, None)
    edit.commit()
    return made


def _contents(path: Path) -> dict[Any, bytes]:
    """The bytes of each initializer as a reader of the file finds them."""
    return {name: _bytes_of(value.const_value) for name, value in load(path).graph.initializers.items()}


def _bytes_of(tensor: Any) -> bytes:
    if not isinstance(tensor, ir.ExternalTensor):
        return bytes(tensor.tobytes())
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset or 0)
        return file.read(tensor.nbytes)


def _run(path: Path) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(None, {"fed": np.zeros(2, np.float32)}), strict=True))


# ---- what a file holds ---------------------------------------------------------------------------------------------


@given(data=st.data(), dtype=st.sampled_from(ELEMENT_TYPES), external=st.booleans(), kept=st.booleans())
def test_a_saved_file_holds_what_numpy_says(data, dtype, external, kept, tmp_path_factory):
    shape = data.draw(st.sampled_from([(4, 2, 8), (6, 16), (2, 6)]))
    weights = data.draw(st.sampled_from(["reference", "copy", "hardlink", "repack"]))
    arrays = _arrays(3, shape, dtype)
    directory = tmp_path_factory.mktemp("made")
    path = write_model(directory / "model.onnx", arrays, external=external, readers=kept)
    model = load(path)
    values = [model.graph.initializers[name] for name in arrays]
    wanted = data.draw(st.lists(expressions(values, 2), min_size=1, max_size=3))
    wanted = [item for item in wanted if obstacle(item) is None]
    expected = [evaluate(item, {value: arrays[value.name] for value in values}) for item in wanted]
    before = {file: (file.stat().st_size, file.read_bytes()) for file in directory.iterdir()}
    made = _edit(model, wanted, drop=() if kept else [])
    results = [save(model, directory / f"out{number}.onnx", weights=weights) for number in range(2)]
    held = _contents(results[0].path)
    for value, array in zip(made, expected, strict=True):
        assert held[value.name] == ir.Tensor(array).tobytes()
    for name, array in arrays.items():
        assert held.get(name, ir.Tensor(array).tobytes()) == ir.Tensor(array).tobytes()
    assert before == {file: (file.stat().st_size, file.read_bytes()) for file in before}
    for file, again in zip(*(result.data_files for result in results), strict=True):
        assert file.read_bytes() == again.read_bytes()


def test_two_runs_give_the_same_bytes(tmp_path):
    arrays = _arrays()
    outputs = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        model = load(write_model(directory / "model.onnx", arrays, external=True, readers=True))
        values = [model.graph.initializers[name] for name in arrays]
        _edit(model, [Transpose(values[0], (1, 0)), Stack((values[2], values[0])), View(values[1], 64, (64,))])
        result = save(model, directory / "out.onnx")
        outputs.append([file.read_bytes() for file in sorted(directory.iterdir())])
        assert [file.name for file in result.data_files] == ["model.onnx.data", "out.onnx.data"]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("weights", ["reference", "copy", "hardlink", "repack"])
def test_runtimes_read_it(tmp_path, weights):
    arrays = _arrays()
    model = load(write_model(tmp_path / "model.onnx", arrays, external=True, readers=True))
    values = [model.graph.initializers[name] for name in arrays]
    wanted: list[Part] = [
        Transpose(values[0], (1, 0)),
        Stack((values[2], values[0])),
        View(values[1], 65, (3, 7)),
        Stack(tuple(values)),
    ]
    expected = [evaluate(item, {value: arrays[value.name] for value in values}) for item in wanted]
    made = _edit(model, wanted)
    assert [isinstance(value.const_value, ir.ExternalTensor) for value in made] == [False, False, True, True]
    result = save(model, tmp_path / "out.onnx", weights=weights)
    found = _run(result.path)
    for number, array in enumerate(expected):
        np.testing.assert_array_equal(found[f"made/out{number}"], array)
    laid_out = expected[0].nbytes + expected[1].nbytes
    source = {"reference": 0, "copy": 8192, "hardlink": 0, "repack": 8192}[weights]
    assert result.bytes_copied == laid_out + source
    assert any(
        note.startswith(f"weights of {laid_out} bytes were laid out anew, in out.onnx.") for note in result.notes
    )


def test_views_of_a_file_cost_no_byte(tmp_path):
    arrays = _arrays()
    path = write_model(tmp_path / "model.onnx", arrays, external=True)
    model = load(path)
    values = [model.graph.initializers[name] for name in arrays]
    made = _edit(model, [View(values[1], 64 * number, (64,)) for number in range(8)], drop=["w1"])
    result = save(model, tmp_path / "out.onnx")
    assert (result.bytes_copied, result.data_files) == (0, (tmp_path / "model.onnx.data",))
    held = _contents(result.path)
    assert "w1" not in held
    assert [held[value.name] for value in made] == [row.tobytes() for row in arrays["w1"]]


def test_views_are_saved_and_read_back_without_the_data_file(tmp_path):
    path = write_model(tmp_path / "model.onnx", _arrays(), external=True)
    path.with_name("model.onnx.data").unlink()
    model = load(path)
    (made,) = _edit(model, [View(model.graph.initializers["w2"], 64, (2, 64))])
    result = save(model, tmp_path / "out.onnx")
    tensor: Any = load(result.path).graph.initializers[made.name].const_value
    assert (tensor.offset, tensor.length, os.fspath(tensor.location)) == (2 * 2048 + 256, 512, "model.onnx.data")


def test_a_layout_of_absent_bytes_is_refused(tmp_path):
    path = write_model(tmp_path / "model.onnx", _arrays(), external=True)
    data = path.with_name("model.onnx.data")
    content = data.read_bytes()
    data.unlink()
    model = load(path)
    value = model.graph.initializers["w2"]
    with pytest.raises(UsageError, match=r"made/m0 cannot be made: the bytes of 'w2' would have to be laid out anew"):
        _edit(model, [Transpose(value, (1, 0))])
    data.write_bytes(content)
    _edit(model, [Transpose(value, (1, 0))])
    data.unlink()
    with pytest.raises(SaveError, match=r"the data file .* is absent and weights are to be laid out"):
        save(model, tmp_path / "out.onnx", weights="reference")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx"]


# ---- nothing is stored twice ---------------------------------------------------------------------------------------


def test_views_that_replace_an_inline_source_stay_inline(tmp_path):
    arrays = _arrays(1, (64, 64))
    path = write_model(tmp_path / "model.onnx", arrays, external=False, readers=True)
    model = load(path)
    source = model.graph.initializers["w0"]
    _edit(model, [View(source, 64 * number, (64,)) for number in range(64)], drop=["w0"])
    result = save(model, tmp_path / "out.onnx")
    assert result.data_files == ()
    assert 64 * 64 * 4 < result.path.stat().st_size < 64 * 64 * 4 + 64 * 450


def test_an_inline_source_that_stays_moves_out_and_is_stored_once(tmp_path):
    arrays = _arrays(2, (64, 64))
    model = load(write_model(tmp_path / "model.onnx", arrays, external=False, readers=True))
    source = model.graph.initializers["w0"]
    made = _edit(model, [View(source, 64 * number, (64,)) for number in range(64)])
    result = save(model, tmp_path / "out.onnx")
    (data,) = result.data_files
    assert data.stat().st_size == 64 * 64 * 4
    assert data.read_bytes() == arrays["w0"].tobytes()
    assert isinstance(source.const_value, ir.TensorProtoTensor), "the model stays as it was"
    held = _contents(result.path)
    assert held["w0"] == arrays["w0"].tobytes()
    assert [held[value.name] for value in made] == [row.tobytes() for row in arrays["w0"]]
    assert isinstance(load(result.path).graph.initializers["w1"].const_value, ir.TensorProtoTensor)
    assert any("inline weights of 16384 bytes were moved to out.onnx.data" in note for note in result.notes)
    assert len(_run(result.path)) == 67


def test_two_layouts_of_an_inline_weight_are_a_view_and_one_copy(tmp_path):
    arrays = _arrays(1, (64, 64))
    model = load(write_model(tmp_path / "model.onnx", arrays, external=False, readers=True))
    source = model.graph.initializers["w0"]
    _edit(model, [View(source, 0, (32, 64)), View(source, 0, (2, 64)), Transpose(source, (1, 0))], drop=["w0"])
    result = save(model, tmp_path / "out.onnx")
    (data,) = result.data_files
    # The 32 rows that are used, once, and the other layout.
    assert data.read_bytes() == arrays["w0"][:32].tobytes() + arrays["w0"].T.tobytes()
    found = _run(result.path)
    np.testing.assert_array_equal(found["made/out0"], arrays["w0"][:32])
    np.testing.assert_array_equal(found["made/out1"], arrays["w0"][:2])
    np.testing.assert_array_equal(found["made/out2"], arrays["w0"].T)


def test_a_layout_that_replaces_an_inline_weight_stays_inline(tmp_path):
    arrays = _arrays(2, (64, 64))
    model = load(write_model(tmp_path / "model.onnx", arrays, external=False, readers=True))
    values = [model.graph.initializers[name] for name in arrays]
    _edit(model, [Stack(tuple(Transpose(value, (1, 0)) for value in values))], drop=["w0", "w1"])
    result = save(model, tmp_path / "out.onnx")
    assert result.data_files == ()
    np.testing.assert_array_equal(_run(result.path)["made/out0"], np.stack([item.T for item in arrays.values()]))


def test_a_stack_of_inline_weights_that_stay_is_a_view_of_them(tmp_path):
    arrays = _arrays(4, (64, 64))
    model = load(write_model(tmp_path / "model.onnx", arrays, external=False, readers=True))
    values = [model.graph.initializers[name] for name in arrays]
    order = (2, 0, 3, 1)
    made = _edit(model, [Stack(tuple(values[number] for number in order))])
    result = save(model, tmp_path / "out.onnx")
    (data,) = result.data_files
    assert data.stat().st_size == 4 * 64 * 64 * 4
    held = _contents(result.path)
    assert held[made[0].name] == np.stack([arrays[f"w{number}"] for number in order]).tobytes()
    assert all(held[name] == array.tobytes() for name, array in arrays.items())


def test_small_integers_stay_inline_whatever_reads_them(tmp_path):
    arrays = {"axes": np.arange(6, dtype=np.int64)}
    model = load(write_model(tmp_path / "model.onnx", arrays, external=False, readers=True))
    _edit(model, [View(model.graph.initializers["axes"], 2, (2,))])
    result = save(model, tmp_path / "out.onnx")
    assert result.data_files == ()
    np.testing.assert_array_equal(_run(result.path)["made/out0"], [2, 3])


def test_a_protobuf_that_would_be_too_large_moves_the_rest_too(tmp_path, monkeypatch):
    monkeypatch.setattr(serialising, "MAX_PROTO_BYTES", 30000)
    arrays = _arrays(4, (64, 64))
    model = load(write_model(tmp_path / "model.onnx", arrays, external=False, readers=True))
    values = [model.graph.initializers[name] for name in arrays]
    made = _edit(
        model,
        [Transpose(values[0], (1, 0)), View(values[1], 0, (64,)), View(values[2], 64, (63, 64))],
        drop=["w0", "w2"],
    )
    result = save(model, tmp_path / "out.onnx")
    (data,) = result.data_files
    assert data.stat().st_size == (4 * 64 * 64 - 64) * 4
    held = _contents(result.path)
    assert held[made[0].name] == arrays["w0"].T.tobytes()
    assert held[made[1].name] == arrays["w1"][0].tobytes()
    assert held[made[2].name] == arrays["w2"][1:].tobytes()
    assert held["w3"] == arrays["w3"].tobytes()
    assert result.path.stat().st_size < 30000


# ---- in a model ----------------------------------------------------------------------------------------------------


def test_equal_expressions_are_one_initializer(tmp_path):
    model = load(write_model(tmp_path / "model.onnx", _arrays(), external=True))
    values = list(model.graph.initializers.values())
    edit = Rewrite(model, "test-pass", "site:0", scope="a")
    first = edit.weight(View(View(values[0], 64, (4, 64)), 64, (64,)), "row")
    other = Rewrite(model, "test-pass", "site:1", scope="b")
    assert other.weight(View(values[0], 128, (64,)), "other") is first
    assert first.name == "a/row"
    assert edit.weight(View(values[0], 0, (8, 64)), "all") is values[0]
    assert edit.weight(Stack((values[1], values[0])), "s") is other.weight(Stack((values[1], values[0])), "s")
    assert len(model.graph.initializers) == 6
    model.graph.initializers.pop("a/row")
    assert other.weight(View(values[0], 128, (64,)), "other").name == "b/other"


def test_the_record_survives_a_save_and_names_the_first_sources(tmp_path):
    arrays = _arrays()
    model = load(write_model(tmp_path / "model.onnx", arrays, external=True))
    values = list(model.graph.initializers.values())
    edit = Rewrite(model, "test-pass", "site:0", scope="a")
    stack = edit.weight(Stack((values[1], values[0])), "s")
    # A weight that is not written yet, and then one that was read from a file.
    inner = edit.weight(View(stack, 8 * 64, (8, 64)), "back")
    assert inner is values[0]
    edit.weight(Transpose(stack, (0, 2, 1)), "t")
    first = save(model, tmp_path / "first.onnx")
    again = load(first.path)
    edit = Rewrite(again, "test-pass", "site:0", scope="b")
    made = edit.weight(View(again.graph.initializers["a/t"], 8, (64, 8)), "v")
    second = save(again, tmp_path / "second.onnx")
    tensor: Any = load(second.path).graph.initializers[str(made.name)].const_value
    record = tensor.metadata_props[WEIGHT_KEY]
    expression = parse_record(record)
    assert [source.name for source in sources_of(expression)] == ["w1", "w0"]
    value = evaluate(expression, {source: arrays[source.name] for source in sources_of(expression)})
    assert value.tobytes() == _contents(second.path)[made.name]


@pytest.mark.parametrize("external", [False, True])
def test_passes_run_on_models_that_hold_such_weights(tmp_path, external):
    model = load(write_model(tmp_path / "model.onnx", _arrays(), external=external, readers=True))
    values = list(model.graph.initializers.values())
    _edit(model, [View(values[0], 0, (4, 64)), Transpose(values[1], (1, 0))])
    before = _run(save(model, tmp_path / "before.onnx").path)
    report = Pipeline(["tidy", "strip-metadata", "weights-to-inputs"])(model)
    sites = {site.id: (site.status, site.reason) for site in report.passes[2].sites}
    if external:
        assert sites["weights:made"] == (
            "refused",
            (
                "weight 'made/m1' is laid out when the model is saved, so that no file can be named yet: save the model and run "
                "this pass on the result"
            ),
        )
        assert {value.name for value in model.graph.inputs} >= {"w0", "w1", "made/m0"}
        assert "made/m1" in model.graph.initializers
    result = save(model, tmp_path / "out.onnx")
    if not external:
        found = _run(result.path)
        assert before.keys() == found.keys()
        assert all(np.array_equal(before[name], found[name]) for name in before)
