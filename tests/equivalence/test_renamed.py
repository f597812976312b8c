"""Renamed inputs and outputs are paired by what the metadata of both models says."""

from __future__ import annotations

import json

import onnx
import pytest

from graphsurgery.contracts import RowSelection
from graphsurgery.equivalence.pairing import pair_outputs, renamed_inputs
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.errors import InputRefusedError
from graphsurgery.renames import RENAMED_KEY, Renames, parse_renames
from tests.equivalence.builders import copy, decoder, prune, set_metadata


def renamed(proto: onnx.ModelProto, inputs: dict[str, str], outputs: dict[str, str]) -> onnx.ModelProto:
    """``proto`` with other names, old to new, and the metadata that tells of them."""
    changed = copy(proto)
    both = {**inputs, **outputs}
    for node in changed.graph.node:
        node.input[:] = [both.get(name, name) for name in node.input]
        node.output[:] = [both.get(name, name) for name in node.output]
    for values, names in ((changed.graph.input, inputs), (changed.graph.output, outputs)):
        for value in values:
            value.name = names.get(value.name, value.name)
    data = {
        side: {new: old for old, new in names.items()} for side, names in (("inputs", inputs), ("outputs", outputs))
    }
    set_metadata(changed, RENAMED_KEY, data)
    return changed


def test_outputs_pair_by_their_names_in_the_export():
    # By order the two caches would be exchanged.
    other = renamed(decoder(), {}, {"present.0.key": "b", "present.0.value": "a"})
    outputs = {value.name: value for value in other.graph.output}
    del other.graph.output[:]
    other.graph.output.extend(outputs[name] for name in ("logits", "a", "b"))
    pairing = pair_outputs(decoder(), other)
    assert [(pair.reference, pair.rewritten) for pair in pairing.pairs] == [
        ("logits", "logits"),
        ("present.0.key", "b"),
        ("present.0.value", "a"),
    ]
    assert (pairing.differences, pairing.notes) == ((), ())


def test_both_may_have_been_renamed():
    first = renamed(decoder(), {"input_ids": "ids"}, {"logits": "scores"})
    second = renamed(decoder(), {"input_ids": "tokens", "attention_mask": "ids"}, {"logits": "out"})
    assert next((pair.reference, pair.rewritten) for pair in pair_outputs(first, second).pairs) == ("scores", "out")
    assert renamed_inputs(first, second) == {"tokens": "ids", "ids": "attention_mask"}
    assert renamed_inputs(second, first) == {"ids": "tokens", "attention_mask": "ids"}


def test_contracts_speak_of_inputs_as_the_reference_calls_them():
    pruned = prune(decoder(), "mask", source="attention_mask")
    moved = renamed(pruned, {"attention_mask": "m", "input_ids": "ids"}, {"logits": "scores"})
    entries = json.loads(next(item.value for item in pruned.metadata_props if item.key == "graphsurgery.contracts"))
    contract = RowSelection(**(entries[0] | {"output": "scores", "source": "m", "sequence": "ids"}))
    set_metadata(moved, "graphsurgery.contracts", [contract.__dict__])
    (pair,) = [pair for pair in pair_outputs(decoder(), moved).pairs if pair.reference == "logits"]
    (read,) = pair.contracts
    assert (read.output, read.source, read.sequence) == ("scores", "attention_mask", "input_ids")
    # A reference that carries the contract itself needs it not again.
    (pair,) = [pair for pair in pair_outputs(pruned, moved).pairs if pair.reference == "logits"]
    assert pair.contracts == ()


def test_renamed_models_are_equal_and_exchanged_ones_are_not(tmp_path):
    onnx.save(decoder(), tmp_path / "a.onnx")
    inputs = {"input_ids": "attention_mask", "attention_mask": "input_ids", "past_key_values.0.key": "k"}
    onnx.save(renamed(decoder(), inputs, {"logits": "x", "present.0.key": "logits"}), tmp_path / "b.onnx")
    report = verify_models(tmp_path / "a.onnx", tmp_path / "b.onnx", opt_level_check=False)
    assert (report.status, report.reasons) == ("equal", ())
    assert not any("by order" in note for note in report.notes)
    # The metadata is wrong: what is called logits is not what the export calls so.
    wrong = renamed(decoder(), inputs, {"logits": "x", "present.0.key": "logits"})
    data = {"inputs": {new: old for old, new in inputs.items()}, "outputs": {}}
    set_metadata(wrong, RENAMED_KEY, data)
    onnx.save(wrong, tmp_path / "c.onnx")
    assert verify_models(tmp_path / "a.onnx", tmp_path / "c.onnx", opt_level_check=False).status == "different"


@pytest.mark.parametrize("text", ["no json", "[]", '{"inputs": {}}', '{"inputs": {"a": 1}, "outputs": {}}'])
def test_metadata_of_another_make_is_refused(text):
    with pytest.raises(InputRefusedError) as caught:
        parse_renames(text)
    assert str(caught.value) == (
        "The model's metadata 'graphsurgery.renamed' is not what graphsurgery writes: remove it."
    )


def test_renames_compose():
    known = Renames({"b": "a"}, {"y": "x"})
    later = known.then({"b": "c", "n": "b"}, {"y": "x"})
    assert (later.inputs, later.outputs) == ({"b": "n", "c": "a"}, {})
    assert (known.input("b"), known.input("z"), known.output("y")) == ("a", "z", "x")
    assert not Renames()
    assert parse_renames(None) == Renames()
    assert known
