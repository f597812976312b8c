"""The JSON of a diff is what docs/reports.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from graphsurgery.compare import diff_models
from graphsurgery.comparison.diff_report import BLOCKING_PERCENT, LISTED, SEVERITIES, WARNING_PERCENT
from tests.compare_helpers import model_of

_PAGE = (Path(__file__).parents[1] / "docs" / "reports.md").read_text(encoding="utf-8")
_SECTION = _PAGE[_PAGE.index("## `diff --report json`") :]


def _documented() -> dict[str, list[str]]:
    """Field names by the path of the object that holds them."""
    found = re.findall(r"<!-- diff fields: (\S+) -->\n(.*?)(?=\n#|\n<!--|\Z)", _SECTION, flags=re.S)
    return {path: re.findall(r"^\| `(\w+)` \|", rows, flags=re.M) for path, rows in found}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A diff in which every list has an item."""
    a = """<ir_version: 6, opset_import: ["" : 11]>
    g (float[B,4] x) => (float[B,4] y) <float[1] w = {1.0}>
    { a = Softmax <axis = 1> (x) b = Add(a, w) c = Sub(b, a) y = Neg(c) }"""
    b = """<ir_version: 6, opset_import: ["" : 13]>
    g (float[B,4] x) => (float[1,4] y) <float[1] w = {2.0}>
    { a = Softmax <axis = 0> (x) b = Add(a, w) c = Sub(a, b) y = Abs(c) }"""
    data: dict[str, Any] = json.loads(diff_models(model_of(a), model_of(b)).to_json())
    return data


def _at(document: dict[str, Any], path: str) -> dict[str, Any]:
    found: Any = {"diff": document}
    for name in path.split("."):
        found = found[name]
        while isinstance(found, list):
            found = found[0]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", list(_documented()))
def test_the_documented_fields_are_the_real_ones(document: dict[str, Any], path: str):
    assert sorted(_at(document, path)) == sorted(_documented()[path])


def test_every_object_is_documented(document: dict[str, Any]):
    model = document["models"][0]
    listings = [name for name, value in model.items() if isinstance(value, dict) and set(value) == {"count", "items"}]
    assert all(model[name]["count"] for name in listings)
    shapes = {tuple(sorted(model[name]["items"][0])) for name in listings}
    assert shapes == {tuple(sorted(fields)) for path, fields in _documented().items() if path.endswith(".items")}


def test_the_numbers_are_those_of_the_code():
    assert f"`warning` from {WARNING_PERCENT:.0f} % more on" in _SECTION
    assert f"`blocking` from {BLOCKING_PERCENT:.0f} % more on" in _SECTION
    assert f"at most {LISTED} `items`" in _SECTION
    assert re.findall(r"^\| `(\w+)` \|", _SECTION.split("<!--")[0], flags=re.M) == list(SEVERITIES)
