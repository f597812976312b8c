"""weights-to-inputs and weights-from-inputs: a skeleton, its spec, and the very same model back."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphsurgery.compare import diff_models
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.model_io import load, save
from graphsurgery.passes.rename_io import RenameIO
from graphsurgery.passes.tidy import Tidy
from graphsurgery.passes.weights_from_inputs import WeightsFromInputs
from graphsurgery.passes.weights_to_inputs import WeightsToInputs
from graphsurgery.pipeline import Pipeline
from graphsurgery.weight_spec import WEIGHTS_KEY, read_weights
from tests.interface_helpers import feeds_of, interface, serialised
from tests.oracle import run, session

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"
SAMPLE = ("llama_external", "genai_llama")
EXTERNAL = ("llama_external", "genai_llama", "genai_gptoss", "qwen3_moe_grouped_external")


@pytest.fixture
def folder(tmp_path):
    """A copy of a fixture's files."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name, tmp_path / name))

    return copy


def test_a_skeleton_and_what_it_says():
    model = load(FIXTURES / "llama_external" / "model.onnx")
    before = {value.name: value for value in model.graph.initializers.values()}
    inputs = interface(model)[0]
    report = WeightsToInputs(min_bytes=4096)(model).report
    (site,) = report.sites
    assert (site.id, site.status, site.reason) == (
        "weights:model.onnx.data",
        "rewritten",
        "17 weights of 96256 bytes in model.onnx.data became inputs",
    )
    entries = read_weights(model)
    assert [entry.name for entry in entries] == interface(model)[0][len(inputs) :]
    assert interface(model)[0][: len(inputs)] == inputs
    assert len(entries) == 17
    first = entries[0]
    assert (first.name, first.file, first.key, first.dtype, first.shape, first.start, first.nbytes) == (
        *("model.embed_tokens.weight", "model.onnx.data", "model.embed_tokens.weight", "float", (64, 32), 0, 8192),
    )
    assert first.sha256 is None
    for value in model.graph.inputs[len(inputs) :]:
        assert value is before[value.name]
        assert value.const_value is None
        assert value.dtype == ir.DataType.FLOAT
        assert all(isinstance(size, int) for size in value.shape or ())
    assert sum(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values()) == 6


def check_identity(name: str, tmp_path: Path) -> None:
    """There and back is the identity: in memory, over several runs, and over files."""
    model = load(FIXTURES / name / "model.onnx")
    before = serialised(model)
    WeightsToInputs(min_bytes=8192)(model)
    WeightsToInputs(min_bytes=1)(model)
    assert not any(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())
    skeleton = serialised(model)
    assert skeleton != before
    assert not WeightsToInputs(min_bytes=1)(model).modified
    assert WeightsFromInputs()(model).modified
    assert WEIGHTS_KEY not in model.metadata_props
    assert serialised(model) == before
    assert not WeightsFromInputs()(model).modified
    place = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    made = load(place / "model.onnx")
    save(made, place / "same.onnx")
    WeightsToInputs()(made)
    save(made, place / "skeleton.onnx")
    back = load(place / "skeleton.onnx")
    assert sum(isinstance(v.const_value, ir.ExternalTensor) for v in back.graph.initializers.values()) < 12
    WeightsFromInputs()(back)
    save(back, place / "back.onnx")
    assert (place / "back.onnx").read_bytes() == (place / "same.onnx").read_bytes()
    assert diff_models(place / "model.onnx", place / "back.onnx").severity == "none"


@pytest.mark.parametrize("name", SAMPLE)
def test_there_and_back_is_the_identity(name, tmp_path):
    check_identity(name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EXTERNAL if name not in SAMPLE])
def test_there_and_back_on_the_others(name, tmp_path):
    check_identity(name, tmp_path)


@pytest.mark.parametrize(
    "case",
    ["s01_everything_external_even_shapes", "s03_external_data_missing_or_short", "s07_weights_are_also_graph_inputs"],
)
def test_there_and_back_on_hostile_models(case):
    model = load(CASES / f"{case}.onnx")
    before = serialised(model)
    WeightsToInputs(min_bytes=1)(model)
    WeightsFromInputs()(model)
    assert serialised(model) == before


def test_defaults_stay_inputs_and_come_back_as_defaults():
    model = load(CASES / "s07_weights_are_also_graph_inputs.onnx")
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes >= 1024 and value.is_graph_input():
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                "w.data", None, None, tensor.dtype, shape=shape, name=value.name or ""
            )
    before, inputs = serialised(model), interface(model)[0]
    WeightsToInputs()(model)
    assert interface(model)[0] == inputs
    assert len(read_weights(model)) == 12
    assert all(entry.default and entry.offset is None and entry.length is None for entry in read_weights(model))
    WeightsFromInputs()(model)
    assert serialised(model) == before


def test_everything_that_a_tensor_says_comes_back():
    model = load(FIXTURES / "llama_external" / "model.onnx")
    value = model.graph.initializers["val_49"]
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    tensor.doc_string = "documentation"
    tensor.metadata_props["origin"] = "somewhere"
    value.metadata_props["more"] = "of the value"
    before = serialised(model)
    WeightsToInputs()(model)
    entry = next(entry for entry in read_weights(model) if entry.name == "val_49")
    assert (entry.doc, entry.metadata) == ("documentation", {"origin": "somewhere"})
    WeightsFromInputs()(model)
    assert serialised(model) == before


def test_what_is_fed_gives_the_same_outputs():
    place = FIXTURES / "llama_external"
    model, skeleton = load(place / "model.onnx"), load(place / "model.onnx")
    Pipeline([WeightsToInputs(min_bytes=1)], check=True)(skeleton)
    data = (place / "model.onnx.data").read_bytes()
    weights = {
        entry.name: np.frombuffer(data[entry.start : entry.start + entry.nbytes], np.float32).reshape(entry.shape)
        for entry in read_weights(skeleton)
    }
    first, second = session(model, place), session(skeleton)
    for feed in feeds_of(model, 2):
        reference, result = run(first, feed), run(second, feed | weights)
        assert list(reference) == list(result)
        assert all(np.array_equal(reference[name], result[name]) for name in reference)


def test_renamed_weights_are_found_again():
    model = load(FIXTURES / "llama_external" / "model.onnx")
    WeightsToInputs(min_bytes=8192)(model)
    names = [entry.name for entry in read_weights(model)]
    RenameIO(names=(f"{names[0]}=table", "input_ids=ids"))(model)
    assert [(entry.name, entry.key) for entry in read_weights(model)] == [("table", names[0]), (names[1], names[1])]
    WeightsFromInputs()(model)
    tensor = model.graph.initializers["table"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert (tensor.name, tensor.location, tensor.length) == ("table", "model.onnx.data", 8192)


def test_initializers_that_come_or_go_in_between():
    model = load(FIXTURES / "llama_external" / "model.onnx")
    order = list(model.graph.initializers)
    WeightsToInputs()(model)
    weights = [entry.name for entry in read_weights(model)]
    spare = ir.Value(name="spare", const_value=ir.tensor([1.0], name="spare"))
    model.graph.register_initializer(spare)
    gone = next(iter(model.graph.initializers))
    model.graph.initializers.pop(gone)
    others = list(model.graph.initializers)
    WeightsFromInputs()(model)
    now = list(model.graph.initializers)
    # Nothing is lost, and weights and others each keep their order.
    assert [name for name in now if name in set(weights)] == weights == [name for name in order if name in set(weights)]
    assert [name for name in now if name not in set(weights)] == others
    assert len(now) == len(order)
    Tidy()(model)
    assert "spare" not in model.graph.initializers


# ---- what is chosen, what stays -----------------------------------------------------------------------------------


def test_weights_inside_the_file_stay_and_are_reported():
    model = load(FIXTURES / "llama" / "model.onnx")
    before = serialised(model)
    report = WeightsToInputs()(model).report
    assert [(site.id, site.status, site.reason) for site in report.sites] == [
        (
            "weights:inline",
            "refused",
            (
                "23 weights of 108544 bytes, the first 'model.embed_tokens.weight', are inside the .onnx, so that no file can "
                "be named for them: save the model with external data first (onnx.save_model(..., save_as_external_data=True))"
            ),
        )
    ]
    assert serialised(model) == before


def test_external_tensors_of_attributes_stay_and_are_reported():
    model = load(CASES / "s01_everything_external_even_shapes.onnx")
    report = WeightsToInputs(min_bytes=1)(model).report
    assert [(site.id, site.status) for site in report.sites][1:] == [("weights:nested", "refused")]
    assert report.sites[1].reason == (
        "1 external tensors, the first 'head_scale_v', are in subgraphs or node attributes, which cannot be inputs: make "
        "them initializers of the main graph"
    )


def test_weights_by_name():
    model = load(FIXTURES / "llama_external" / "model.onnx")
    report = WeightsToInputs(names=("model.embed*", "val_49"))(model).report
    assert report.sites[0].detail == {"file": "model.onnx.data", "weights": 2, "bytes": 8192 + 4096}
    with pytest.raises(UsageError) as caught:
        WeightsToInputs(names=("*lora*", "x"))(model)
    assert str(caught.value) == "Option names of pass weights-to-inputs: no weight is called *lora* or x."
    with pytest.raises(UsageError) as caught:
        WeightsToInputs(min_bytes=-1)
    assert str(caught.value) == "Option min_bytes=-1 of pass weights-to-inputs must be 0 or more."


def test_it_runs_behind_the_passes_that_look_for_weights():
    with pytest.raises(UsageError) as caught:
        Pipeline(["weights-to-inputs", "prune-last-token"])
    assert str(caught.value) == (
        "Pass weights-to-inputs must run after prune-last-token; put prune-last-token before it."
    )


# ---- sha256 -------------------------------------------------------------------------------------------------------


def test_sha256_on_request(folder):
    place = folder("llama_external")
    model = load(place / "model.onnx")
    WeightsToInputs(sha256=True)(model)
    data = (place / "model.onnx.data").read_bytes()
    for entry in read_weights(model):
        assert entry.sha256 == hashlib.sha256(data[entry.start : entry.start + entry.nbytes]).hexdigest()
    save(model, place / "skeleton.onnx")
    skeleton = load(place / "skeleton.onnx")
    assert WeightsFromInputs(sha256=True)(skeleton).modified
    changed = bytearray(data)
    changed[8200] ^= 1
    (place / "model.onnx.data").write_bytes(changed)
    again = load(place / "skeleton.onnx")
    before = serialised(again)
    with pytest.raises(UsageError) as caught:
        WeightsFromInputs(sha256=True)(again)
    assert str(caught.value) == (
        f"The bytes of weight 'val_49' in {place / 'model.onnx.data'} are not those that the skeleton was made of: bring "
        "the data file that belongs to it."
    )
    assert serialised(again) == before
    (place / "model.onnx.data").write_bytes(data[:9000])
    with pytest.raises(UsageError) as caught:
        WeightsFromInputs(sha256=True)(again)
    assert str(caught.value) == (
        f"sha256=true reads {place / 'model.onnx.data'}, which ends before 'val_49' does: bring the data."
    )


def test_sha256_of_what_is_not_there():
    model = load(CASES / "s03_external_data_missing_or_short.onnx")
    with pytest.raises(
        UsageError, match=r"^sha256=true reads .*, which ends before 'model\.embed_tokens\.weight' does"
    ):
        WeightsToInputs(sha256=True)(model)
    with pytest.raises(UsageError, match=r"^sha256=true reads .*, which it cannot \(No such file or directory\)"):
        WeightsToInputs(sha256=True, names=("lm_head.weight",))(model)
    WeightsToInputs()(model)
    with pytest.raises(UsageError) as caught:
        WeightsFromInputs(sha256=True)(model)
    assert str(caught.value) == (
        "Option sha256 of pass weights-from-inputs: weight 'model.embed_tokens.weight' cannot be checked: no sha256 was "
        "recorded for it; leave sha256 out."
    )


def test_nothing_external_is_read_unless_asked_for(monkeypatch):
    def read(self):
        raise AssertionError(f"tensor {self.name} was read")

    monkeypatch.setattr(ir.ExternalTensor, "numpy", read)
    monkeypatch.setattr(ir.ExternalTensor, "_load", read)
    model = load(CASES / "s03_external_data_missing_or_short.onnx")
    before = serialised(model)
    WeightsToInputs()(model)
    WeightsFromInputs()(model)
    assert serialised(model) == before


# ---- files --------------------------------------------------------------------------------------------------------


def test_keys_of_a_safetensors_file(tmp_path):
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "layer.w": {"dtype": "F32", "shape": [2, 256], "data_offsets": [0, 2048]}}
    ).encode()
    content = np.arange(512, dtype=np.float32).tobytes()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N,2] x) => (float[N,256] y) { y = MatMul (x, w) }'.replace(
            "(float[N,2] x)", "(float[N,2] x, float[2,256] w)"
        )
    )
    value = model.graph.inputs.pop()
    start = 8 + len(header)
    value.const_value = ir.ExternalTensor(
        "w.safetensors", start, 2048, ir.DataType.FLOAT, shape=ir.Shape([2, 256]), name="w", base_dir=tmp_path
    )
    model.graph.register_initializer(value)
    WeightsToInputs()(model)
    (entry,) = read_weights(model)
    assert (entry.name, entry.key, entry.start, entry.nbytes) == ("w", "layer.w", start, 2048)


def test_data_that_lies_elsewhere(folder, tmp_path):
    place = folder("llama_external")
    model = load(place / "model.onnx")
    WeightsToInputs()(model)
    save(model, tmp_path / "skeleton.onnx")
    skeleton = load(tmp_path / "skeleton.onnx")
    WeightsFromInputs(directory=str(place))(skeleton)
    result = save(skeleton, tmp_path / "back.onnx")
    assert result.weights == "copy"
    assert (tmp_path / "back.onnx.data").read_bytes() == (place / "model.onnx.data").read_bytes()
    assert verify_models(place / "model.onnx", tmp_path / "back.onnx", opt_level_check=False).status == "equal"


def test_verify_feeds_a_skeleton_its_weights(folder, tmp_path):
    place = folder("llama_external")
    model = load(place / "model.onnx")
    Pipeline(["weights-to-inputs", "rename-io"])(model)
    save(model, place / "skeleton.onnx")
    report = verify_models(place / "model.onnx", place / "skeleton.onnx", opt_level_check=False)
    assert report.status == "equal"
    assert report.notes[0] == (
        f"{place / 'skeleton.onnx'}: 23 inputs are weights, which are taken from the files that its metadata names"
    )
    # Not beside its data: taken from where the reference has it.
    save(model, tmp_path / "alone.onnx")
    assert verify_models(place / "model.onnx", tmp_path / "alone.onnx", opt_level_check=False).status == "equal"
    assert verify_models(tmp_path / "alone.onnx", place / "model.onnx", opt_level_check=False).status == "equal"
    (place / "model.onnx.data").unlink()
    report = verify_models(tmp_path / "alone.onnx", place / "skeleton.onnx", opt_level_check=False)
    assert report.status == "unchecked"
    assert "the data of tensor model.embed_tokens.weight is missing" in report.reasons[0]
    # Other weights are another model.
    changed = bytearray((FIXTURES / "llama_external" / "model.onnx.data").read_bytes())
    changed[8192:12288] = bytes(4096)
    (place / "model.onnx.data").write_bytes(changed)
    shutil.copytree(FIXTURES / "llama_external", tmp_path / "whole")
    report = verify_models(tmp_path / "whole" / "model.onnx", place / "skeleton.onnx", opt_level_check=False)
    assert report.status == "different"


# ---- damaged skeletons --------------------------------------------------------------------------------------------


def test_inputs_that_are_gone_or_changed_are_refused():
    model = load(FIXTURES / "llama_external" / "model.onnx")
    WeightsToInputs(min_bytes=4096)(model)
    by_name = {value.name: value for value in model.graph.inputs}
    by_name["val_49"].name = "other"
    names = [entry.name for entry in read_weights(model)]
    by_name[names[2]].shape = ir.Shape([32, 31])
    by_name[names[0]].dtype = ir.DataType.FLOAT16
    report = WeightsFromInputs()(model).report
    reasons = {site.id: site.reason for site in report.sites if site.status == "refused"}
    assert reasons["weight:val_49"] == (
        "the model has no input 'val_49' that could become a weight: restore the skeleton as it was made"
    )
    assert reasons[f"weight:{names[0]}"] == (
        f"input '{names[0]}' is float16 and the weight is float: restore the skeleton as it was made"
    )
    assert reasons[f"weight:{names[2]}"].startswith(f"input '{names[2]}' has the shape [32,31] and the weight [")
    left = {entry.name for entry in read_weights(model)}
    assert left == {site.removeprefix("weight:") for site in reasons}


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"version": 2, "weights": []}',
        '{"version": 1, "weights": [{"name": "x"}]}',
        '{"version": 1, "weights": [{"name": "x", "file": "f", "key": "x", "dtype": "imaginary", "shape": [1]}]}',
        '{"version": 1, "weights": [{"name": "x", "file": 7, "key": "x", "dtype": "float", "shape": [1]}]}',
        '{"version": 1, "weights": [{"name": "x", "file": "f", "key": "x", "dtype": "float", "shape": [1], "new": 1}]}',
    ],
)
def test_metadata_of_another_make_is_refused(text):
    model = load(FIXTURES / "llama_external" / "model.onnx")
    model.metadata_props[WEIGHTS_KEY] = text
    with pytest.raises(InputRefusedError) as caught:
        WeightsFromInputs()(model)
    assert str(caught.value) == (
        "The model's metadata 'graphsurgery.weights' is not what this version of graphsurgery writes: remove it."
    )


@pytest.mark.parametrize(("file", "reason"), [("../w", "leaves"), ("/w", "absolute")])
def test_files_outside_the_directory_are_refused(file, reason):
    model = load(FIXTURES / "llama_external" / "model.onnx")
    entry = {"name": "w", "file": file, "key": "w", "dtype": "float", "shape": [1]}
    model.metadata_props[WEIGHTS_KEY] = json.dumps({"version": 1, "weights": [entry]})
    with pytest.raises(
        InputRefusedError, match=f"^The model's weight 'w' lies in '{file}', which .*{reason}.*: correct it"
    ):
        WeightsFromInputs()(model)
