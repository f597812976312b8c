"""The report as CSV, Markdown, table, JSON and SVG, to the letter."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from graphsurgery.benching.bench_report import NotMeasured, Row
from graphsurgery.benching.csv_form import COLUMNS
from graphsurgery.benching.gates import parse_gates
from graphsurgery.benching.points import Point
from graphsurgery.benching.samples import NOISY
from tests.bench_helpers import MIB, measured, pair_report, report

_PAGE = (Path(__file__).parents[1] / "docs" / "reports.md").read_text(encoding="utf-8")
_SECTION = _PAGE[_PAGE.index("## `bench --report json`") :]
_SVG = "{http://www.w3.org/2000/svg}"


# ---- text -------------------------------------------------------------------------------------------------------------


def test_csv():
    lines = pair_report().to_csv().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    tail = f"{100 * MIB},{110 * MIB}"
    assert lines[1:3] == [
        f"1,m.onnx,a,prefill,1,128,0,measured,,0.01,0.01,0.011,0.1,false,12800.0,0.5,{tail},{150 * MIB},{50 * MIB},{40 * MIB},,,",
        f"1,m.onnx,b,prefill,1,128,0,measured,,0.005,0.005,0.005,0.0,false,25600.0,0.5,{tail},{125 * MIB},{25 * MIB},{40 * MIB},0.5,0.8333,0.5",
    ]
    assert lines[5] == "1,m.onnx,a,decode,1,1,64,not applicable,it takes no cache" + "," * 15
    assert len(lines) == 7
    rows = list(csv.DictReader(io.StringIO(pair_report().to_csv())))
    assert [row["noisy"] for row in rows] == ["false", "false", "true", "false", "", "false"]


def test_csv_of_one_model():
    lines = report(Row("m.onnx", Point("decode", 1, 1, 8), measured(1, 1)), b=None).to_csv().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("1,m.onnx,a,decode,1,1,8,measured,,0.001,")
    assert lines[1].endswith(",,,")


def test_markdown():
    assert pair_report(notes=("n",)).to_markdown() == (
        "## Benchmark\n"
        "\n"
        "A `a.onnx`, B `b.onnx`: cpu, 2 threads, batch 1, median of 3 runs after 1.\n"
        "\n"
        "| model | phase | S | P | A ms | A spread | B ms | B spread | ratio | A tok/s | B tok/s | A over MiB | B over MiB "
        "| A peak MiB | B peak MiB | peak ratio | |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|\n"
        "| m.onnx | prefill | 128 | 0 | 10.00 | 10% | 5.00 | 0% | 0.500 | 12800 | 25600 | 50.0 | 25.0 | 150.0 | 125.0 "
        "| 0.833 |  |\n"
        "| m.onnx | prefill | 512 | 0 | 50.00 | 80% | 60.00 | 0% | 1.200 | 10240 | 8533 | 50.0 | 75.0 | 150.0 | 175.0 "
        "| 1.167 | noisy |\n"
        "| m.onnx | decode | 1 | 64 | - | - | 2.00 | 0% | - | - | 500 | - | 50.0 | - | 150.0 | - | n/a |\n"
        "\n"
        "* session creation: A 500.0 ms (n=3), B 250.0 ms (n=3), ratio 0.500\n"
        "* not applicable: m.onnx (A) at decode P=64: it takes no cache\n"
        "* note: n\n"
    )


def _printed(found) -> list[str]:
    stream = io.StringIO()
    found.render(Console(file=stream, width=160, highlight=False, markup=False))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_table_of_one_model():
    rows = [
        Row("m.onnx", Point("prefill", 1, 4, 0), measured(1500, 1500)),
        Row("m.onnx", Point("decode", 1, 1, 8), measured(20, 20, loaded=None, peak=None)),
        Row("m.onnx", Point("decode", 1, 1, 9), NotMeasured("failed", "no [kernel]")),
    ]
    assert _printed(report(*rows, b=None, planned=5, interrupted=True)) == [
        "cpu, 2 threads, batch 1, median of 3 runs after 1",
        "model   phase    S  P     ms  spread  tok/s  over MiB  peak MiB",
        "m.onnx  prefill  4  0   1500      0%    2.7      50.0     150.0",
        "m.onnx  decode   1  8  20.00      0%   50.0         -         -",
        "m.onnx  decode   1  9      -       -      -         -         -  failed",
        "session creation: 500.0 ms (n=3)",
        "failed: m.onnx at decode P=9: no [kernel]",
        "interrupted: 3 of 5 rows were measured",
    ]


def test_table_of_two_models():
    lines = _printed(pair_report())
    assert lines[:2] == ["A a.onnx", "B b.onnx"]
    assert lines[5].split() == (
        [
            "m.onnx",
            "prefill",
            "512",
            "0",
            "50.00",
            "80%",
            "60.00",
            "0%",
            "1.200",
            "10240",
            "8533",
            "50.0",
            "75.0",
            "150.0",
            "175.0",
            "1.167",
            "noisy",
        ]
    )


# ---- JSON -------------------------------------------------------------------------------------------------------------


def _documented() -> dict[str, list[str]]:
    found = re.findall(r"<!-- bench fields: (\S+) -->\n(.*?)(?=\n#|\n<!--|\Z)", _SECTION, flags=re.S)
    return {path: re.findall(r"^\| `(\w+)` \|", rows, flags=re.M) for path, rows in found}


def _objects(path: str, value: object) -> dict[str, list[str]]:
    """Fields by path, of the first object of each list."""
    if isinstance(value, list):
        return _objects(path, value[0]) if value and isinstance(value[0], dict) else {}
    if not isinstance(value, dict):
        return {}
    found = {path: list(value)}
    for name, inner in value.items():
        found |= _objects(f"{path}.{name}", inner)
    return found


def test_every_field_is_documented():
    data = json.loads(pair_report(gates=parse_gates("latency=2")).to_json())
    objects = _objects("bench", data)
    # B and the samples of session creation have the fields of those that are listed.
    same = {path: fields for path, fields in objects.items() if path not in _documented()}
    assert {path: objects[path] for path in _documented()} == _documented()
    assert same == {
        "bench.rows.b": _documented()["bench.rows.a"],
        "bench.rows.b.latency": _documented()["bench.rows.a.latency"],
        "bench.creation.a": _documented()["bench.rows.a.latency"],
        "bench.creation.b": _documented()["bench.rows.a.latency"],
    }


def test_the_page_says_what_the_code_does():
    assert ",".join(COLUMNS) in _SECTION
    assert f"more than {NOISY:.0%} of".replace("%", " %") in _SECTION.replace("\n", " ")
    assert f"more than {NOISY:g} |" in _SECTION


def test_json_of_one_model():
    data = json.loads(report(Row("m.onnx", Point("prefill", 1, 4, 0), measured(1, 3)), b=None).to_json())
    assert (data["schema"], data["kind"], data["b"]) == (1, "bench", None)
    (row,) = data["rows"]
    assert (row["b"], row["ratios"], row["noisy"]) == (None, None, True)
    assert row["a"]["latency"] == {
        "median": 0.002,
        "min": 0.001,
        "max": 0.003,
        "spread": 1.0,
        "noisy": True,
        "values": [0.001, 0.003],
    }
    assert data["creation"][0]["b"] is None


# ---- SVG --------------------------------------------------------------------------------------------------------------


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{_SVG}text")]


def test_the_plot_is_labelled():
    svg = pair_report().to_svg()
    texts = _texts(svg)
    assert texts[:3] == ["Latency and peak memory: cpu, 2 threads, batch 1", "A a.onnx", "B b.onnx"]
    panels = [text for text in texts if text.startswith(("Latency, ", "Peak memory, "))]
    assert panels == ["Latency, prefill", "Peak memory, prefill", "Latency, decode", "Peak memory, decode"]
    assert {"S, tokens", "P, tokens", "ms", "MiB", "128", "512", "64"} <= set(texts)
    root = ET.fromstring(svg)
    marks = [element.find(f"{_SVG}title") for element in root.iter() if element.tag in (f"{_SVG}circle", f"{_SVG}rect")]
    told = [mark.text for mark in marks if mark is not None]
    assert told[:4] == ["A: 10 ms at 128", "A: 50 ms at 512", "B: 5 ms at 128", "B: 60 ms at 512"]
    # Four of A, six of B: the decode step of A was not measured.
    assert len(told) == 10
    assert "prefers-color-scheme: dark" in svg


def test_the_plot_needs_nothing_else():
    svg = pair_report().to_svg().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|href|url\(|@import|<script", svg)


def test_axes_are_logarithmic():
    rows = [Row("m", Point("prefill", 1, size, 0), measured(size, size)) for size in (10, 100, 1000)]
    root = ET.fromstring(report(*rows, b=None).to_svg())
    points = next(iter(root.iter(f"{_SVG}polyline"))).attrib["points"].split()
    x, y = zip(*(map(float, point.split(",")) for point in points), strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert x[0] < x[2]
    assert y[0] > y[2]


def test_names_are_escaped_and_models_are_named():
    point = Point("prefill", 1, 4, 0)
    rows = [Row(name, point, measured(1, 1, peak=None)) for name in ("<x>&.onnx", "y.onnx")]
    texts = _texts(report(*rows, b=None).to_svg())
    assert "Latency, <x>&.onnx, prefill" in texts
    assert "Latency, y.onnx, prefill" in texts
    assert not [text for text in texts if text.startswith("Peak memory, ")]


def test_a_plot_of_nothing():
    row = Row("m", Point("prefill", 1, 4, 0), NotMeasured("failed", "x"))
    assert "nothing was measured" in _texts(report(row, b=None).to_svg())
