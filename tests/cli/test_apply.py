"""``graphsurgery apply``."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from graphsurgery.equivalence.verify_report import VerifyReport
from graphsurgery.model_io import load
from graphsurgery.pipeline import provenance
from tests.directories import digests

MASK = ("-p", "prune-last-token{index=mask}")
LAST = ("-p", "prune-last-token{index=last}")


def _shape(path) -> str:
    return str(load(path).graph.outputs[0].shape)


# ---- what is written --------------------------------------------------------------------------------------------------


def test_the_default_output_is_beside_the_input_and_shares_its_data(run, genai):
    before = digests(genai)
    done = run("apply", genai / "model.onnx", *MASK)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == f"wrote {genai / 'model.surgery.onnx'}"
    after = digests(genai)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"model.surgery.onnx"}
    assert _shape(genai / "model.surgery.onnx") == "[batch_size,1,512]"


def test_another_directory_gets_a_copy_of_the_data(run, genai, tmp_path):
    (tmp_path / "out").mkdir()
    done = run("apply", genai / "model.onnx", "-o", tmp_path / "out" / "pruned.onnx", *MASK, "--verify")
    assert (done.code, done.err) == (0, "")
    assert sorted(digests(tmp_path / "out")) == ["pruned.onnx", "pruned.onnx.data"]
    assert digests(tmp_path / "out")["pruned.onnx.data"] == digests(genai)["model.onnx.data"]
    assert "equal: 5 outputs on " in done.out


def test_directory_in_and_out(run, genai, tmp_path):
    (genai / "tokenizer.json").write_text("{}")
    config = json.loads((genai / "genai_config.json").read_text())
    done = run("apply", genai, "-o", f"{tmp_path / 'out'}/", *MASK, "--verify")
    assert (done.code, done.err) == (0, "")
    assert sorted(digests(tmp_path / "out")) == ["genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json"]
    assert json.loads((tmp_path / "out" / "genai_config.json").read_text()) == config
    assert _shape(tmp_path / "out" / "model.onnx") == "[batch_size,1,512]"
    assert _shape(genai / "model.onnx") == "[batch_size,sequence_length,512]"


def test_the_runtime_input_is_never_listed_in_the_configuration(run, genai, tmp_path):
    done = run("apply", genai, "-o", f"{tmp_path / 'out'}/", "-p", "prune-last-token{index=runtime}", "--verify")
    assert done.code == 0
    assert "'last_token_indices' must be set on every call" in done.err
    names = [value.name for value in load(tmp_path / "out").graph.inputs]
    assert names[-1] == "last_token_indices"
    text = (tmp_path / "out" / "genai_config.json").read_text()
    assert text == (genai / "genai_config.json").read_text()
    assert "last_token_indices" not in text


def test_a_pruned_directory_can_be_pruned_in_place_on_demand(run, genai):
    before = digests(genai)
    done = run("apply", genai, "-o", genai / "model.onnx", *MASK)
    assert (done.code, done.out) == (2, "")
    assert "is the input itself: choose another, or replace it with --force." in done.err
    assert digests(genai) == before
    assert run("apply", genai, "-o", genai / "model.onnx", *MASK, "--force", "--verify").code == 0
    after = digests(genai)
    assert {name for name in after if after[name] != before.get(name)} == {"model.onnx"}


def test_several_passes_and_recipes(run, llama, tmp_path):
    done = run("apply", llama, *LAST, "-p", "tidy", "-o", tmp_path / "out.onnx", "-q")
    assert (done.code, done.err) == (0, "")
    assert provenance(load(tmp_path / "out.onnx"))[0]["passes"] == ["prune-last-token{index=last}", "tidy"]
    done = run("apply", llama, "--recipe", "prefill", "-o", tmp_path / "recipe.onnx")
    assert (done.code, done.err) == (0, "")
    (tmp_path / "mine.toml").write_text('[[pass]]\nname = "prune-last-token"\nindex = "last"\n')
    done = run("apply", llama, "--recipe", tmp_path / "mine.toml", "-o", tmp_path / "mine.onnx", "-q")
    assert done.code == 0
    assert provenance(load(tmp_path / "mine.onnx"))[0]["passes"] == ["prune-last-token{index=last}"]


def test_reruns_give_the_same_bytes_wherever_they_run(run, genai, tmp_path, monkeypatch):
    reports = []
    for name in ("first", "second"):
        place = shutil.copytree(genai, tmp_path / name / "genai")
        monkeypatch.chdir(place.parent)
        done = run("apply", "genai", "-o", "out/", "--recipe", "prefill", "--report", "json", "--verify")
        assert done.code == 0
        reports.append(done.out)
    assert digests(tmp_path / "first" / "out") == digests(tmp_path / "second" / "out")
    assert reports[0] == reports[1]
    again = run("apply", "genai", "-o", "again/", "--recipe", "prefill", "--check")
    assert again.code == 0
    assert digests(tmp_path / "second" / "again") == digests(tmp_path / "second" / "out")


def test_the_model_after_each_pass(run, llama, tmp_path):
    done = run("apply", llama, *LAST, "-p", "tidy", "--dump-after", tmp_path / "dumps", "-q")
    assert done.code == 0
    assert sorted(digests(tmp_path / "dumps")) == ["00-prune-last-token.onnx", "01-tidy.onnx"]


# ---- what is not ------------------------------------------------------------------------------------------------------


def test_a_dry_run_reports_and_writes_nothing(run, genai):
    before = digests(genai)
    done = run("apply", genai, *MASK, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert "lm_head:logits" in done.out
    assert "wrote" not in done.out
    assert digests(genai) == before


def test_an_existing_output_needs_force(run, llama, tmp_path):
    output = tmp_path / "out.onnx"
    output.write_text("precious")
    done = run("apply", llama, *LAST, "-o", output)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"graphsurgery: the output {output} exists: choose another, or replace it with --force.\n"
    assert output.read_text() == "precious"
    assert run("apply", llama, *LAST, "-o", output, "--force").code == 0
    assert _shape(output).endswith(",1,64]")


def test_a_change_can_be_required(run, llama):
    done = run("apply", llama, "-p", "tidy", "--require-change")
    assert (done.code, done.out) == (4, "")
    assert done.err == f"graphsurgery: No pass changed {llama}.\n"
    assert not llama.with_name("llama.surgery.onnx").exists()
    assert run("apply", llama, "-p", "tidy").code == 0
    assert llama.with_name("llama.surgery.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Give either --recipe NAME or one or more -p SPEC: what is to be done?"),
        (["-p", "prune"], "Unknown pass: 'prune'; "),
        (["-p", "prune-last-token{indx=mask}"], "Unknown option of pass prune-last-token: 'indx'; did you mean index"),
        (["-p", "prune-last-token{index=first}"], "Option index='first' of pass prune-last-token is not valid: "),
        (["-p", "prune-last-token{index=mask"], "Cannot read pass spec 'prune-last-token{index=mask': expected "),
        (["-p", "prune-last-token{index=mask}"], "Option index=mask of pass prune-last-token: the model has no "),
        (["-p", "prune-last-token{sites=[9]}"], "Selector '9' matches no site; "),
        (["--recipe", "prefil"], "Unknown recipe: 'prefil'; did you mean prefill or npu-prefill?"),
        (
            ["--recipe", "prefill", "-p", "tidy"],
            "Give either --recipe NAME or one or more -p SPEC: what is to be done?",
        ),
        (["-p", "tidy", "--verify=all"], "Unknown depth of --verify: 'all'; "),
        (["-p", "tidy", "--dry-run", "--verify"], "--dry-run writes nothing, so --verify has nothing to work on: "),
        (["-p", "tidy", "--keep-unverified"], "--keep-unverified says what becomes of an output that --verify rejects"),
        (["-p", "tidy", "-o", "nowhere/out.onnx"], "the output's directory "),
        (["-p", "tidy", "--file", "model.onnx"], "--file 'model.onnx' chooses within a directory"),
    ],
)
def test_usage(run, llama, arguments, line):
    before = digests(llama.parent)
    done = run("apply", llama, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"graphsurgery: {line}")
    assert done.err.count("\n") == 1
    assert digests(llama.parent) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("s04_lfs_pointer_and_truncated.onnx", "Git LFS pointer"),
        ("s04_lfs_pointer_and_truncated.truncated.onnx", "cut short"),
        ("s04_lfs_pointer_and_truncated.empty.onnx", "is empty (0 bytes)"),
        ("gone.onnx", "does not exist"),
    ],
)
def test_an_input_that_is_no_model(run, cases_dir, tmp_path, name, words):
    done = run("apply", cases_dir / name, *LAST, "-o", tmp_path / "out.onnx")
    assert (done.code, done.out) == (3, "")
    assert done.err.count("\n") == 1
    assert f"{name} " in done.err
    assert words in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_nodes_in_a_circle(run, tmp_path):
    import onnx

    text = """<ir_version: 9, opset_import: ["" : 18]>
    round (float[B,4] x) => (float[B,4] y) { a = Add(x, b)  b = Neg(a)  y = Abs(b) }"""
    (tmp_path / "round.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    done = run("apply", tmp_path / "round.onnx", "-p", "tidy")
    assert (done.code, done.out) == (3, "")
    assert "depends on its own results" in done.err


# ---- reports ----------------------------------------------------------------------------------------------------------


def test_json_alone_is_on_stdout(run, llama, tmp_path):
    done = run("apply", llama, *LAST, "--report", "json", "--report-file", tmp_path / "report.json", "--verify")
    assert done.code == 0
    data = json.loads(done.out)
    assert (data["schema"], data["changed"]) == (1, True)
    assert data["output"] == str(llama.with_name("llama.surgery.onnx"))
    assert data["verification"]["status"] == "equal"
    assert {site["status"] for item in data["passes"] for site in item["sites"]} == {"rewritten"}
    assert (tmp_path / "report.json").read_text() == done.out
    assert all(line.startswith("warning: ") for line in done.err.splitlines())


def test_a_report_file_beside_the_table(run, llama, tmp_path):
    done = run("apply", llama, *LAST, "--report-file", tmp_path / "report.json")
    assert done.code == 0
    assert done.out.startswith("pass ")
    assert json.loads((tmp_path / "report.json").read_text())["changed"] is True


def test_a_report_file_that_cannot_be_is_refused_first(run, llama, tmp_path):
    done = run("apply", llama, *LAST, "--report-file", tmp_path / "deep" / "report.json")
    assert (done.code, done.out) == (2, "")
    assert not llama.with_name("llama.surgery.onnx").exists()


def test_quiet_and_verbose(run, llama, tmp_path):
    plain = run("apply", llama, *LAST, "-o", tmp_path / "plain.onnx")
    quiet = run("apply", llama, *LAST, "-o", tmp_path / "quiet.onnx", "-q")
    verbose = run("apply", llama, *LAST, "-o", tmp_path / "verbose.onnx", "-v")
    assert plain.err.startswith("warning: index=last takes row S-1 of every batch row")
    assert plain.err.count("\n") == 1
    assert quiet.err == ""
    assert quiet.out == plain.out.replace("plain", "quiet")
    assert "selected_from=" in verbose.out
    assert "selected_from=" not in plain.out
    assert verbose.err == plain.err


# ---- verification -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "between", "behind", "with value"])
def test_verify_takes_no_word_of_its_own(run, llama, order, monkeypatch):
    asked = []

    def verify(reference, rewritten, *, depth, seed, progress):
        asked.append((reference, depth))
        return VerifyReport(str(reference), str(rewritten), "equal")

    monkeypatch.setattr("graphsurgery.equivalence.verify.verify_models", verify)
    arguments = {
        "before": ["--verify", llama, *LAST],
        "between": [*LAST, "--verify", llama],
        "behind": [llama, *LAST, "--verify"],
        "with value": ["--verify=outputs", llama, *LAST],
    }[order]
    done = run("apply", *arguments)
    assert done.code == 0
    assert "equal: " in done.out
    assert asked == [(llama, "outputs" if order == "with value" else "auto")]


def test_a_broken_result_is_not_kept(run, llama, saboteur):
    output = llama.with_name("out.onnx")
    output.write_text("precious")
    done = run("apply", llama, "-p", "saboteur{how=values}", "-o", output, "--force", "--verify", "--report", "json")
    assert done.code == 1
    assert done.err.startswith(f"graphsurgery: The result does not compute the same as {llama}: output logits ")
    assert done.err.endswith("; no output was written.\n")
    assert done.err.count("\n") == 1
    data = json.loads(done.out)
    assert (data["output"], data["verification"]["status"]) == (None, "different")
    assert output.read_text() == "precious"
    assert sorted(path.name for path in llama.parent.iterdir()) == ["llama.onnx", "out.onnx"]


def test_a_broken_result_is_kept_on_demand(run, llama, saboteur):
    done = run("apply", llama, "-p", "saboteur{how=values}", "--verify", "--keep-unverified")
    assert done.code == 1
    assert f"wrote {llama.with_name('llama.surgery.onnx')}" in done.out
    assert "no output was written" not in done.err
    assert llama.with_name("llama.surgery.onnx").exists()


def test_a_broken_invariant_is_an_internal_error(run, llama, saboteur):
    done = run("apply", llama, "-p", "saboteur", "--check")
    assert (done.code, done.out) == (70, "")
    assert done.err.startswith("graphsurgery: Pass saboteur broke the model: two nodes of the main graph are called ")
    assert done.err.count("\n") == 1


def test_absent_weights(run, cases_dir, tmp_path):
    """The rewrite works with a warning; the proof is refused, and then there is no output."""
    name = "s03_external_data_missing_or_short"
    for file in (f"{name}.onnx", f"{name}.short.data"):
        shutil.copy(cases_dir / file, tmp_path)
    before = digests(tmp_path)
    done = run(
        "apply", tmp_path / f"{name}.onnx", "-p", "prune-last-token", "-o", tmp_path / "out.onnx", "--verify=outputs"
    )
    assert done.code == 5
    assert f"{name}.short.data" in done.last_line
    assert done.last_line.startswith("graphsurgery: The result could not be checked against ")
    assert digests(tmp_path) == before
    done = run("apply", tmp_path / f"{name}.onnx", "-p", "prune-last-token", "-o", tmp_path / "out.onnx")
    assert done.code == 0
    warnings = done.err.splitlines()
    assert all(line.startswith("warning: Weights are incomplete: the data file ") for line in warnings[:2])
    assert "holds 16 of the 2560 bytes that it should, so tensor 'model.embed_tokens.weight'" in warnings[0]
    assert f"{name}.missing.data is missing, so tensor 'lm_head.weight'" in warnings[1]
    after = digests(tmp_path)
    assert {key: after[key] for key in before} == before
    assert set(after) - set(before) == {"out.onnx"}


def test_an_operator_that_the_runtime_does_not_know(run, cases_dir, tmp_path):
    case = cases_dir / "s13_missing_contrib_opset_and_unknown_domain.onnx"
    done = run("apply", case, "-p", "prune-last-token", "-o", tmp_path / "out.onnx", "--verify")
    assert done.code == 5
    assert done.err.count("\n") == 1
    assert "vendor.ops::Scale" in done.err
    assert list(tmp_path.iterdir()) == []
    done = run("apply", case, "-p", "prune-last-token", "-o", tmp_path / "out.onnx", "--verify", "--keep-unverified")
    assert done.code == 5
    kept = load(tmp_path / "out.onnx")
    assert [node.op_type for node in kept.graph if node.domain == "vendor.ops"] == ["Scale"]


def test_without_the_runtime(run, llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = run("apply", llama, *LAST, "--verify", "-q")
    assert (done.code, done.out) == (5, "")
    assert done.err == (
        'graphsurgery: Verifying needs ONNX Runtime, which is not installed: pip install "graphsurgery[verify]".\n'
    )
    assert [path.name for path in llama.parent.iterdir()] == ["llama.onnx"]
    assert run("apply", llama, *LAST, "-q").code == 0


def test_unsorted_input(run, cases_dir, tmp_path):
    case = cases_dir / "s05_unnamed_unsorted_nodes.onnx"
    done = run("apply", case, "--recipe", "prefill", "-o", tmp_path / "out.onnx", "--check", "--verify")
    assert done.code == 0
    assert done.err == "warning: The nodes of the input were not in execution order; they were sorted.\n"
