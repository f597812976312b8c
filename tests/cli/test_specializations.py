"""apply: the specialisations file and the spec of a skeleton's weights, written when the model is in place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def external(fixtures_dir, tmp_path) -> Path:
    return Path(shutil.copytree(fixtures_dir / "llama_external", tmp_path / "llama")) / "model.onnx"


def test_the_file_is_written(run, llama, tmp_path):
    path = tmp_path / "specializations.json"
    done = run(
        *("apply", llama, "-o", tmp_path / "out.onnx", "-p", "rename-io", "--specializations", path),
        *("--specialize", "seq=128,ctx=4096", "--specialize", "decode:seq=1,ctx=1024,batch=4"),
    )
    assert done.code == 0, done.err
    assert done.out.splitlines()[-2:] == [f"wrote {tmp_path / 'out.onnx'}", f"wrote {path}"]
    assert json.loads(path.read_text()) == {
        "specializations": [
            {"name": "Prefill", "symbols": {"s10": "1", "s70": "128", "s39": "3968"}},
            {"name": "Decode", "symbols": {"s10": "1", "s70": "1", "s39": "4095"}},
            {"name": "Decode", "symbols": {"s10": "4", "s70": "1", "s39": "1023"}},
        ]
    }
    assert sorted(item.name for item in tmp_path.iterdir()) == ["llama.onnx", "out.onnx", "specializations.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--specializations", "F.json"],
            "graphsurgery: --specializations needs sizes: add --specialize seq=128,ctx=4096 (a prefill and a decode).",
        ),
        (
            ["--specialize", "seq=1"],
            "graphsurgery: --specialize says what is to be in a file: name it with --specializations F.json.",
        ),
        (
            ["--specializations", "F.json", "--specialize", "seq"],
            "graphsurgery: --specialize 'seq' is not of the form NAME:ROLE=SIZE,...: e.g. prefill:seq=128,ctx=4096.",
        ),
        (
            ["--specializations", "F.json", "--specialize", "p:seq=4"],
            (
                "graphsurgery: --specialize 'p:seq=4' leaves P without a size for s39 (axis 2 of input "
                "'input.cache.layers.0.keys'): add past=SIZE."
            ),
        ),
        (
            ["--specializations", "missing/F.json", "--specialize", "seq=1"],
            "graphsurgery: The directory {tmp}/missing of --specializations does not exist: make it first.",
        ),
        (
            ["--specializations", "out.onnx", "--specialize", "seq=1,ctx=2"],
            "graphsurgery: {tmp}/out.onnx is the name of a model: give the file another.",
        ),
    ],
)
def test_refusals_leave_nothing_behind(run, llama, tmp_path, options, message):
    given = [tmp_path / item if item.endswith((".json", ".onnx")) else item for item in options]
    done = run("apply", llama, "-o", tmp_path / "out.onnx", "-p", "tidy", *given)
    assert (done.code, done.last_line) == (2, message.replace("{tmp}", str(tmp_path)))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["llama.onnx"]


def test_an_existing_file_needs_force(run, llama, tmp_path):
    path = tmp_path / "F.json"
    path.write_text("mine")
    call = ["apply", llama, "-o", tmp_path / "out.onnx", "-p", "tidy", "--specializations", path]
    call += ["--specialize", "p:seq=1,past=1"]
    done = run(*call)
    assert (done.code, done.last_line) == (
        2,
        f"graphsurgery: {path} exists: choose another, or replace it with --force.",
    )
    assert path.read_text() == "mine"
    assert not (tmp_path / "out.onnx").exists()
    assert run(*call, "--force").code == 0
    assert json.loads(path.read_text())["specializations"][0]["name"] == "P"


def test_a_dry_run_checks_and_writes_nothing(run, llama, tmp_path):
    path = tmp_path / "F.json"
    call = ["apply", llama, "-p", "tidy", "--dry-run", "--specializations", path, "--specialize"]
    assert run(*call, "seq=4,ctx=8").code == 0
    assert run(*call, "seq=4,ctx=2").code == 2
    assert sorted(item.name for item in tmp_path.iterdir()) == ["llama.onnx"]


def test_two_runs_give_the_same_file(run, llama, tmp_path):
    texts = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.json"
        call = ["apply", llama, "-o", tmp_path / f"{name}.onnx", "-p", "tidy", "--specializations", path]
        assert run(*call, "--specialize", "seq=4,ctx=8").code == 0
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]


# ---- skeletons ----------------------------------------------------------------------------------------------------


def test_a_skeleton_brings_the_spec_of_its_weights(run, external):
    place = external.parent
    done = run("apply", external, "-o", place / "skeleton.onnx", "-p", "weights-to-inputs{sha256=true}", "-q")
    assert done.code == 0, done.err
    spec = place / "skeleton.onnx.weights.json"
    assert done.out.splitlines()[-2:] == [f"wrote {place / 'skeleton.onnx'}", f"wrote {spec}"]
    content = json.loads(spec.read_text())
    assert (content["version"], content["model"]) == (1, "skeleton.onnx")
    assert content["files"] == [{"path": "model.onnx.data", "format": "raw"}]
    first = content["inputs"][0]
    assert list(first) == ["name", "location", "dtype", "shape", "sha256"]
    assert (first["name"], first["location"], first["dtype"], first["shape"]) == (
        "model.embed_tokens.weight",
        {"file": 0, "key": "model.embed_tokens.weight", "offset": 0, "length": 8192},
        "float",
        [64, 32],
    )
    assert len(content["inputs"]) == 23
    assert all(len(item["sha256"]) == 64 for item in content["inputs"])
    back = run("apply", place / "skeleton.onnx", "-o", place / "back.onnx", "-p", "weights-from-inputs{sha256=true}")
    assert back.code == 0, back.err
    assert sorted(item.name for item in place.iterdir()) == [
        *("back.onnx", "model.onnx", "model.onnx.data", "skeleton.onnx", "skeleton.onnx.weights.json")
    ]
    diff = run("diff", external, place / "back.onnx", "--fail-on", "minor")
    assert diff.code == 0, diff.out


def test_a_skeleton_elsewhere_says_where_its_weights_stay(run, external, tmp_path):
    output = tmp_path / "skeleton.onnx"
    done = run("apply", external, "-o", output, "-p", "weights-to-inputs", "--verify")
    assert done.code == 0, done.err
    assert (
        f"warning: {output} is a skeleton, and its weights stay in {external.parent}: skeleton.onnx.weights.json says "
        "where." in done.err.splitlines()
    )
    content = json.loads((tmp_path / "skeleton.onnx.weights.json").read_text())
    assert content["files"] == [{"path": "llama/model.onnx.data", "format": "raw"}]
    assert "equal: 7 outputs" in done.out


def test_an_existing_spec_needs_force(run, external):
    spec = external.parent / "s.onnx.weights.json"
    spec.write_text("mine")
    done = run("apply", external, "-o", external.parent / "s.onnx", "-p", "weights-to-inputs")
    assert (done.code, done.last_line) == (
        2,
        f"graphsurgery: {spec} exists: choose another, or replace it with --force.",
    )
    assert spec.read_text() == "mine"
    assert not (external.parent / "s.onnx").exists()


# ---- genai_config.json --------------------------------------------------------------------------------------------


def decoder(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
    return found


def test_the_configuration_follows_renames(run, genai, tmp_path):
    before = decoder(genai)
    call = ["-p", "rename-io{names=[input_ids->ids]}", "-p", "rename-io{to=retained-state,exclude=input}"]
    done = run("apply", genai, "-o", f"{tmp_path}/out/", *call)
    assert done.code == 0, done.err
    after = decoder(tmp_path / "out")
    assert after["inputs"] == {
        "input_ids": "ids",
        "attention_mask": "attention_mask",
        "past_key_names": "past_key.%d",
        "past_value_names": "past_value.%d",
    }
    assert after["outputs"] == {
        "logits": "logits",
        "present_key_names": "past_key.%d_RetainedState",
        "present_value_names": "past_value.%d_RetainedState",
    }
    # And back: the file is the same byte by byte.
    done = run("apply", tmp_path / "out", "-o", f"{tmp_path}/back/", "-p", "rename-io{to=genai}")
    assert done.code == 0, done.err
    assert decoder(tmp_path / "back") == before
    assert (tmp_path / "back" / "genai_config.json").read_bytes() == (genai / "genai_config.json").read_bytes()


def test_names_that_no_pattern_can_tell_are_said(run, genai, tmp_path):
    done = run("apply", genai, "-o", f"{tmp_path}/out/", "-p", "rename-io{names=[present.0.key->first]}")
    assert done.code == 0
    assert (
        f"warning: {genai / 'genai_config.json'}: model.decoder.outputs.present_key_names = 'present.%d.key' cannot follow "
        "the new names of all layers: edit it" in done.err.splitlines()
    )
    assert decoder(tmp_path / "out")["outputs"]["present_key_names"] == "present.%d.key"


def test_added_inputs_leave_the_configuration_alone(run, genai, tmp_path):
    done = run("apply", genai, "-o", f"{tmp_path}/out/", "-p", "prune-last-token{index=runtime}")
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "genai_config.json").read_bytes() == (genai / "genai_config.json").read_bytes()
