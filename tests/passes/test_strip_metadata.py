"""strip-metadata: what exporters note for debugging goes, what somebody reads stays."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from graphsurgery.errors import UsageError
from graphsurgery.model_io import load, save
from graphsurgery.passes.prune_last_token import PruneLastToken
from graphsurgery.passes.strip_metadata import StripMetadata
from graphsurgery.pipeline import Pipeline
from tests.interface_helpers import assert_same_outputs, interface, serialised
from tests.small_models import parse

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"
SAMPLE = ("llama_external", "optimum_llama")


def notes(model: ir.Model) -> set[str]:
    """Keys of all metadata but the model's."""
    graphs = [model.graph, *model.graph.subgraphs(), *(function.graph for function in model.functions.values())]
    stores = [item.metadata_props for graph in graphs for item in (graph, *graph)]
    stores += [value.metadata_props for graph in graphs for node in graph for value in node.outputs]
    stores += [function.metadata_props for function in model.functions.values()]
    return {key for store in stores for key in store}


def test_metadata_of_an_export_is_removed():
    model = load(FIXTURES / "llama_external" / "model.onnx")
    before = len(serialised(model))
    (site,) = StripMetadata()(model).report.sites
    assert (site.id, site.status, site.reason) == (
        "metadata:nodes",
        "rewritten",
        "260 entries and 0 documentation strings, 80247 characters, were removed",
    )
    assert site.detail == {"entries": 260, "documented": 0, "characters": 80247}
    assert notes(model) == set()
    assert len(serialised(model)) < 0.3 * before
    assert not StripMetadata()(model).modified


def test_every_kind_of_object():
    model = load(CASES / "s09_metadata_symbols_ir_version.onnx")
    own = dict(model.metadata_props)
    before = interface(model)
    report = StripMetadata()(model).report
    assert {site.id: (site.detail["entries"], site.detail["documented"]) for site in report.sites} == {
        "metadata:graphs": (1, 1),
        "metadata:nodes": (179, 1),
        "metadata:values": (2, 0),
        "metadata:tensors": (0, 1),
    }
    # Applications read what the model says of itself.
    assert dict(model.metadata_props) == own
    assert model.doc_string
    assert interface(model) == before
    (site,) = StripMetadata(model=True)(model).report.sites
    assert (site.id, site.detail["entries"], site.detail["documented"]) == ("metadata:model", 3, 1)
    assert not model.doc_string


def test_what_is_to_stay():
    model = load(CASES / "s09_metadata_symbols_ir_version.onnx")
    keys = notes(model)
    kept = sorted(keys)[:1]
    StripMetadata(keep=(f"{kept[0][:-1]}?",), docs=False)(model)
    assert notes(model) == set(kept)
    assert model.graph.doc_string
    before = serialised(model)
    assert not StripMetadata(keep=("*",), docs=False)(model).modified
    assert serialised(model) == before


NOTED = """
<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (float[N] x, bool flag) => (float[N] y)
{
    a = local.twice (x)
    y = If (flag) <
        then_branch = then_part () => (float[N] t) { t = Neg (a) },
        else_branch = else_part () => (float[N] e) { k = Constant <value = float[1] {2}> ()  e = Mul (a, k) }
    >
}
<domain: "local", opset_import: ["" : 21]>
twice (v) => (w) { w = Add (v, v) }
"""


def test_functions_subgraphs_and_tensors_of_attributes():
    model = parse(NOTED)
    function = next(iter(model.functions.values()))
    function.metadata_props["origin"] = "f"
    function.graph[0].metadata_props["origin"] = "n"
    branch = model.graph[1].attributes["else_branch"].as_graph()
    branch.metadata_props["origin"] = "g"
    branch[0].outputs[0].metadata_props["origin"] = "v"
    branch[0].attributes["value"].as_tensor().metadata_props["origin"] = "t"
    report = StripMetadata()(model).report
    assert {site.id: site.detail["entries"] for site in report.sites} == {
        "metadata:graphs": 2,
        "metadata:nodes": 1,
        "metadata:values": 1,
        "metadata:tensors": 1,
    }
    assert notes(model) == set()


def test_what_this_package_records_stays_unless_asked_for():
    model = load(FIXTURES / "optimum_llama" / "model.onnx")
    Pipeline([PruneLastToken(index="last"), StripMetadata(model=True)])(model)
    assert {"graphsurgery.contracts", "graphsurgery.exact_outputs", "graphsurgery.pipeline"} == set(
        model.metadata_props
    )
    assert notes(model) == {"graphsurgery.pass", "graphsurgery.site"}
    assert StripMetadata(own=True, model=True)(model).modified
    assert notes(model) == set()
    assert "graphsurgery.contracts" in model.metadata_props


def test_places_can_be_chosen():
    model = load(CASES / "s09_metadata_symbols_ir_version.onnx")
    report = StripMetadata(sites=("nodes",))(model).report
    assert {site.id: site.status for site in report.sites} == {
        "metadata:graphs": "skipped",
        "metadata:nodes": "rewritten",
        "metadata:values": "skipped",
        "metadata:tensors": "skipped",
    }
    with pytest.raises(UsageError, match=r"^Selector 'edges' matches no site"):
        StripMetadata(sites=("edges",))(model)


def check_outputs(name: str, tmp_path: Path) -> None:
    model, stripped = (load(FIXTURES / name / "model.onnx") for _ in range(2))
    Pipeline([StripMetadata()], check=True)(stripped)
    assert_same_outputs(model, stripped, FIXTURES / name)
    assert notes(stripped) == set()
    assert interface(stripped) == interface(model)
    result = save(stripped, tmp_path / "stripped.onnx")
    assert notes(load(result.path)) == set()


@pytest.mark.parametrize("name", SAMPLE)
def test_outputs_stay_bitwise_the_same(name, tmp_path):
    check_outputs(name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", sorted(p.parent.name for p in FIXTURES.glob("*/model.onnx") if p.parent.name not in SAMPLE)
)
def test_outputs_of_all_exports(name, tmp_path):
    check_outputs(name, tmp_path)


def test_nothing_external_is_read(monkeypatch):
    def read(self):
        raise AssertionError(f"tensor {self.name} was read")

    monkeypatch.setattr(ir.ExternalTensor, "numpy", read)
    monkeypatch.setattr(ir.ExternalTensor, "_load", read)
    assert StripMetadata()(load(FIXTURES / "llama_external" / "model.onnx")).modified
