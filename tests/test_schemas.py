"""docs/schemas: what is committed is what reports.md says, and real reports of every kind are valid."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from graphsurgery.compare import diff_models
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.inspection import inspect_model
from graphsurgery.listing import describe_passes, describe_recipe
from graphsurgery.workflow import ApplyRequest, apply_passes
from tests.bench_helpers import pair_report

ROOT = Path(__file__).parents[1]
SCHEMAS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "docs" / "schemas").glob("*.json")
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> dict[str, Any]:
    """Real reports by the name of their schema."""
    directory = tmp_path_factory.mktemp("documents")
    model = Path(shutil.copy(ROOT / "fixtures" / "optimum_llama" / "model.onnx", directory / "model.onnx"))
    result = apply_passes(ApplyRequest(input=model, specs=("prune-last-token{index=mask}",)))
    assert result.output is not None
    found = {
        "apply": result.report.to_json(),
        "inspect": inspect_model(result.output).to_json(),
        "verify": verify_models(model, result.output).dumps(),
        "passes": json.dumps(describe_passes()),
        "recipe": json.dumps(describe_recipe("prefill")),
        "diff": diff_models(model, result.output).to_json(),
        "bench": pair_report().to_json(),
    }
    return {name: json.loads(text) for name, text in found.items()}


def test_the_schemas_are_those_of_the_page():
    spec = importlib.util.spec_from_file_location("make_schemas", ROOT / "docs" / "make_schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.schemas((ROOT / "docs" / "reports.md").read_text(encoding="utf-8"))
    assert made == SCHEMAS, "reports.md has changed: run python docs/make_schemas.py"


@pytest.mark.parametrize("name", ["apply", "inspect", "verify", "passes", "recipe", "diff", "bench"])
def test_real_reports_are_valid(documents, name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(documents[name])


@pytest.mark.parametrize("name", ["apply", "inspect", "verify", "diff", "bench"])
def test_reports_with_a_field_too_few_too_many_or_of_another_type_are_not(documents, name):
    check = jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid
    document = documents[name]
    assert not check({key: value for key, value in document.items() if key != "schema"})
    assert not check(document | {"surplus": 1})
    assert not check(document | {"schema": "1"})
    deep = copy.deepcopy(document)
    lists = [value for value in deep.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    lists[0][0]["surplus"] = 1
    assert not check(deep)
