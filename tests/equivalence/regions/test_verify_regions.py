"""What depth regions runs, what it needs, and what it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphsurgery.equivalence import verify as verify_module
from graphsurgery.equivalence.verify import chosen_depth, verify_models
from graphsurgery.errors import UsageError
from graphsurgery.model_io import load, save
from graphsurgery.pipeline import PROVENANCE_KEY, Pipeline
from graphsurgery.rewrite import PASS_KEY
from graphsurgery.workflow import ApplyRequest, apply_passes

if TYPE_CHECKING:
    from pathlib import Path


def _made(fixture: Path, folder: Path, specs: list[str], *, data: bool = True) -> tuple[Path, Path]:
    source = folder / "model.onnx"
    shutil.copy(fixture / "model.onnx", source)
    if data and (fixture / "model.onnx.data").exists():
        shutil.copy(fixture / "model.onnx.data", folder)
    model = load(source)
    Pipeline(specs)(model)
    return source, save(model, folder / "out.onnx").path


# ---- what is run ------------------------------------------------------------------------------------------------------


def test_a_model_against_itself_has_no_region(fixtures_dir):
    path = fixtures_dir / "llama_external" / "model.onnx"
    report = verify_models(path, path, depth="regions")
    assert (report.status, report.regions) == ("equal", ())
    assert report.summary() == "equal: every output is the same expression of the same inputs and weights"


@pytest.mark.parametrize("data", [True, False])
def test_one_region_of_each_kind(fixtures_dir, tmp_path, data):
    specs = ["prune-last-token", "block-attention{q_blocks=2,skip=none}"]
    source, result = _made(fixtures_dir / "llama_external", tmp_path, specs, data=data)
    report = verify_models(source, result, depth="regions")
    assert report.status == "equal"
    assert [(region.passes[0], region.sites[0]) for region in report.regions][-1] == (
        "prune-last-token",
        "lm_head:logits",
    )
    assert sum(region.alike for region in report.regions) == 4
    assert all(0 < region.error < 1e-6 for region in report.regions[:-1])
    # Query, keys and values are cut; the mask is computed from the inputs.
    assert [region.cuts for region in report.regions] == [3] * (len(report.regions) - 1) + [1]


@pytest.mark.parametrize("name", ["qwen3_moe_grouped", "gpt_oss_batched", "optimum_qwen3_moe"])
def test_what_experts_count_of_fewer_rows_is_no_counterpart(fixtures_dir, tmp_path, name):
    """A pruned expert block keeps its nodes, and sorts and counts other rows with them."""
    source, result = _made(fixtures_dir / name, tmp_path, ["prune-last-token{depth=layer}"])
    report = verify_models(source, result, depth="regions")
    assert report.status == "equal", report.reasons
    assert report.regions[-1].sites == ("lm_head:logits",)


def test_what_is_computed_anew_from_further_up_is_not_fed_beside_it(tmp_path):
    """One piece reads a value, the other computes it again too: fed at random, the two would seem to differ."""
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal((16, 16)).astype(np.float32) / 4 for _ in range(2))

    def path_of(name: str, anew: list[onnx.NodeProto], read: str) -> Path:
        nodes = [
            helper.make_node("MatMul", ["x", "first"], ["hidden"], "hidden"),
            helper.make_node("Tanh", ["hidden"], ["bent"], "bent"),
            *anew,
            helper.make_node("MatMul", [read, "second"], ["turned"], f"{read}_turned"),
            helper.make_node("Add", ["turned", "bent"], ["y"], f"{read}_sum"),
        ]
        for node in nodes[-2:] if anew else ():
            node.metadata_props.add(key=PASS_KEY, value="some-pass")
        path: Path = tmp_path / name
        values = [helper.make_tensor_value_info(item, TensorProto.FLOAT, ["B", "S", 16]) for item in "xy"]
        stored = [onnx.numpy_helper.from_array(first, "first"), onnx.numpy_helper.from_array(second, "second")]
        graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
        return path

    def again(node: str) -> list[onnx.NodeProto]:
        return [
            helper.make_node("Unsqueeze", ["hidden", "bend_axis"], ["apart"], "apart"),
            helper.make_node(node, ["apart"], ["apart_bent"], "apart_bent"),
            helper.make_node("Squeeze", ["apart_bent", "bend_axis"], ["again"], "again"),
        ]

    axis = helper.make_node("Constant", [], ["bend_axis"], "bend_axis", value_ints=[2])
    source = path_of("a.onnx", [], "bent")
    right = path_of("b.onnx", [axis, *again("Tanh")], "again")
    report = verify_models(source, right, depth="regions")
    assert report.status == "equal", report.reasons
    assert [(region.cuts, region.nodes) for region in report.regions] == [(0, (4, 8))]
    wrong = path_of("c.onnx", [axis, *again("Softsign")], "again")
    assert verify_models(source, wrong, depth="regions").status == "different"


def test_real_weights_are_read(fixtures_dir, tmp_path):
    specs = ["prune-last-token{depth=layer}"]
    source, result = _made(fixtures_dir / "llama_external", tmp_path, specs)
    drawn = verify_models(source, result, depth="regions")
    real = verify_models(source, result, depth="regions", real_weights=True)
    assert (drawn.status, real.status) == ("equal", "equal")
    assert drawn.regions[0].error != real.regions[0].error
    assert "regions: weights are read from the data files" in real.notes
    assert "regions: weights are random numbers where they are in data files" in drawn.notes
    (tmp_path / "model.onnx.data").unlink()
    absent = verify_models(source, result, depth="regions", real_weights=True)
    assert absent.status == "unchecked"
    assert "the data of weight" in absent.reasons[0]


def test_functions_are_looked_into(fixtures_dir, tmp_path):
    specs = ["block-attention{q_blocks=2}", "extract-functions"]
    source, result = _made(fixtures_dir / "llama_external", tmp_path, specs, data=False)
    assert load(result).functions
    report = verify_models(source, result, depth="regions")
    assert (report.status, sum(region.alike for region in report.regions)) == ("equal", 3)


def test_the_number_of_runs_grows_with_kinds_of_layers_and_not_with_layers(fixtures_dir, tmp_path, monkeypatch):
    from graphsurgery.equivalence.regions import checking, standalone

    opened: list[int] = []
    kept = standalone.standalone

    def counted(*given: Any, **how: Any) -> Any:
        opened.append(0)
        return kept(*given, **how)

    monkeypatch.setattr(checking, "standalone", counted)
    counts = []
    for layers in (4, 12):
        folder = tmp_path / str(layers)
        folder.mkdir()
        grown = folder / "model.onnx"
        script = [sys.executable, fixtures_dir / "grow.py", "llama/model.onnx", "-o", grown]
        subprocess.run([*script, "--layers", str(layers), "--external", "--no-data"], check=True, capture_output=True)
        model = load(grown)
        Pipeline(["prune-last-token", "block-attention{q_blocks=2}"])(model)
        result = save(model, folder / "out.onnx").path
        opened.clear()
        report = verify_models(grown, result, depth="regions")
        assert report.status == "equal"
        assert sum(region.alike for region in report.regions) == layers + 1
        counts.append(len(opened))
    assert counts[0] == counts[1] == 2 * len(report.regions)


# ---- what it needs ----------------------------------------------------------------------------------------------------


def test_memory_is_kept_to(fixtures_dir, tmp_path):
    source, result = _made(fixtures_dir / "llama_external", tmp_path, ["prune-last-token{depth=layer}"], data=False)
    report = verify_models(source, result, depth="regions", memory=1000)
    assert report.status == "unchecked"
    assert "of memory and 0.0 GB may be used" in report.reasons[0]


def _product(path: Path, weight: str, *, external: bool) -> Path:
    array = np.random.default_rng(5).standard_normal((16, 16)).astype(np.float32)
    tensor = TensorProto(name=weight, data_type=TensorProto.FLOAT, dims=array.shape)
    if external:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.data")
        (path.parent / "w.data").write_bytes(array.tobytes())
    else:
        tensor.raw_data = array.tobytes()
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", weight], [f"{weight}/y"], f"{weight}/node"),
            helper.make_node("Relu", [f"{weight}/y"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [tensor],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def test_weights_under_other_names_are_told_by_their_contents(tmp_path):
    one, other = _product(tmp_path / "a.onnx", "w", external=False), _product(tmp_path / "b.onnx", "v", external=False)
    assert verify_models(one, other, depth="regions").status == "equal"


def test_where_regions_cannot_be_told_whole_models_are_run(tmp_path):
    one, other = _product(tmp_path / "a.onnx", "w", external=True), _product(tmp_path / "b.onnx", "v", external=True)
    report = verify_models(one, other, depth="regions")
    assert (report.status, report.depth) == ("equal", "outputs")
    assert report.notes[0].startswith("regions could not be checked (no pass is known to have been here: ")
    assert report.notes[0].endswith("whole models were run instead")
    (tmp_path / "w.data").unlink()
    report = verify_models(one, other, depth="regions")
    assert (report.status, report.depth) == ("unchecked", "regions")
    assert "what weight 'v' holds is not known" in report.reasons[0]


# ---- the depth that fits ------------------------------------------------------------------------------------------------


def test_the_depth_follows_from_size_and_data(fixtures_dir, tmp_path):
    source, result = _made(fixtures_dir / "llama_external", tmp_path, ["prune-last-token"])
    assert chosen_depth(source, result, None) == ("outputs", "both models fit into memory")
    depth, why = chosen_depth(source, result, 1000)
    assert depth == "regions"
    assert why.endswith("0.0 GB may be used")
    (tmp_path / "model.onnx.data").unlink()
    depth, why = chosen_depth(source, result, None)
    assert depth == "regions"
    assert "the data of tensor model.embed_tokens.weight is missing" in why
    report = verify_models(source, result, depth="auto")
    assert report.depth == "regions"
    assert report.notes[0] == f"depth regions was taken: {why}"


@pytest.mark.parametrize("data", [True, False])
def test_apply_takes_the_depth_that_fits(fixtures_dir, tmp_path, data):
    source, _ = _made(fixtures_dir / "llama_external", tmp_path, ["prune-last-token"], data=data)
    done = apply_passes(
        ApplyRequest(input=source, specs=("prune-last-token",), output=tmp_path / "r.onnx", verify="auto")
    )
    assert done.verification is not None
    assert (done.verification.status, done.verification.depth) == ("equal", "outputs" if data else "regions")
    assert done.output == tmp_path / "r.onnx"


def test_apply_at_depth_regions_on_the_command_line(fixtures_dir, tmp_path):
    from graphsurgery.cli import main

    source, _ = _made(fixtures_dir / "llama_external", tmp_path, ["prune-last-token"], data=False)
    out = tmp_path / "r.onnx"
    with pytest.raises(SystemExit) as left:
        main(
            [
                "apply",
                str(source),
                "-p",
                "block-attention{q_blocks=2}",
                "-o",
                str(out),
                "--verify=regions",
                "--report-file",
                str(tmp_path / "r.json"),
            ]
        )
    assert left.value.code == 0
    found = json.loads((tmp_path / "r.json").read_text())["verification"]
    assert (found["depth"], found["status"], found["rewritten"]) == ("regions", "equal", str(out))
    assert next(region["passes"] for region in found["regions"]) == ["block-attention"]
    with pytest.raises(SystemExit) as left:
        main(
            [
                "verify",
                str(source),
                str(out),
                "--depth",
                "regions",
                "--bisect",
                "--report-file",
                str(tmp_path / "v.json"),
            ]
        )
    assert left.value.code == 0
    assert json.loads((tmp_path / "v.json").read_text())["bisected"] == [
        {"spec": "block-attention{q_blocks=2}", "status": "equal", "reason": ""}
    ]


# ---- bisection ----------------------------------------------------------------------------------------------------------


def test_the_first_pass_that_differs_is_named(fixtures_dir, tmp_path, monkeypatch):
    from graphsurgery.passes.block_attention import BlockAttention

    right = BlockAttention.rewrite

    def wrong(self, model, sites, report):
        done = right(self, model, sites, report)
        node = next(node for node in model.graph if (node.name or "").endswith("/scaled_query"))
        value = ir.Value(name="wrong_scale", const_value=ir.tensor(np.float32(0.1)))
        model.graph.register_initializer(value)
        node.replace_input_with(1, value)
        return done

    monkeypatch.setattr(BlockAttention, "rewrite", wrong)
    specs = ["prune-last-token", "block-attention{q_blocks=2}", "tidy"]
    source, result = _made(fixtures_dir / "llama_external", tmp_path, specs, data=False)
    before = sorted(path.name for path in tmp_path.iterdir())
    report = verify_models(source, result, depth="regions", bisect=True)
    assert [(each.spec, each.status) for each in report.bisected] == [
        ("prune-last-token", "equal"),
        ("block-attention{q_blocks=2}", "different"),
    ]
    assert report.bisect_summary().startswith(
        "first difference: block-attention{q_blocks=2}: block-attention at attention:0"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    # Right passes, and a file that is what wrong ones made.
    monkeypatch.setattr(BlockAttention, "rewrite", right)
    report = verify_models(source, result, depth="regions", bisect=True)
    assert {each.status for each in report.bisected} == {"equal"}
    assert report.bisect_summary().startswith("first difference: no pass differs when it is run again")


def test_bisection_needs_passes_that_are_known(fixtures_dir, tmp_path):
    source, result = _made(fixtures_dir / "llama_external", tmp_path, ["prune-last-token"])
    with pytest.raises(UsageError, match="its metadata tells of none"):
        verify_models(source, source, depth="regions", bisect=True)
    with pytest.raises(UsageError, match="choose depth outputs or regions"):
        verify_models(source, result, depth="generate", bisect=True)
    model = load(result)
    model.metadata_props[PROVENANCE_KEY] = json.dumps([{"version": "0", "passes": ["OtherPass"], "input": None}])
    other = save(model, tmp_path / "other.onnx").path
    report = verify_models(source, other, depth="regions", bisect=True)
    assert [(each.spec, each.status) for each in report.bisected] == [("OtherPass", "unchecked")]
    assert "cannot be run again" in report.bisected[0].reason


def test_options_of_other_depths(fixtures_dir):
    path = fixtures_dir / "llama" / "model.onnx"
    with pytest.raises(UsageError, match="Real weights are what depth outputs runs on anyway"):
        verify_models(path, path, real_weights=True)
    assert verify_module.DEPTHS == ("auto", "outputs", "generate", "regions")
