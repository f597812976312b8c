"""Reports: JSON that scripts can rely on, tables that people can read."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys

from rich.console import Console

from graphsurgery.pipeline import Pipeline
from graphsurgery.site_report import SCHEMA, Boundary, PassReport, Report, SiteReport
from graphsurgery.version import __version__
from tests.small_models import CHAIN, DoubleNegate, parse


def _report() -> Report:
    boundary = Boundary("main", ("h",), ("logits",), ("h", "mask"), ("logits",))
    sites = [
        SiteReport("lm_head:logits", ("lm_head",), None, "rewritten", "pruned", {"keep": 1}, (boundary,)),
        SiteReport("attention:3", ("attention", "full"), 3, "skipped", "not selected"),
        SiteReport("attention:4", ("attention",), 4, "refused", "its mask [B, 1] is :key: to nothing"),
    ]
    passes = [
        PassReport("prune-last-token", "prune-last-token{keep=2}", sites, ["Beware.", "Twice."], 10, 12, 0.25),
        PassReport("tidy", "tidy", [], ["Twice."], 12, 12, 0.5),
    ]
    return Report(passes, ["First.", "Beware."], "in.onnx", "out.onnx")


def _text(report: Report, *, verbose: bool = False, width: int = 160) -> str:
    text = io.StringIO()
    report.render(Console(file=text, width=width, highlight=False), verbose=verbose)
    return text.getvalue()


def test_the_json_form():
    data = json.loads(_report().to_json())
    assert data == {
        "schema": SCHEMA,
        "tool": f"graphsurgery {__version__}",
        "input": "in.onnx",
        "output": "out.onnx",
        "changed": True,
        "passes": [
            {
                "name": "prune-last-token",
                "spec": "prune-last-token{keep=2}",
                "sites": [
                    {
                        "id": "lm_head:logits",
                        "kinds": ["lm_head"],
                        "layer": None,
                        "status": "rewritten",
                        "reason": "pruned",
                        "detail": {"keep": 1},
                        "boundaries": [
                            {
                                "scope": "main",
                                "inputs_before": ["h"],
                                "outputs_before": ["logits"],
                                "inputs_after": ["h", "mask"],
                                "outputs_after": ["logits"],
                            }
                        ],
                    },
                    {
                        "id": "attention:3",
                        "kinds": ["attention", "full"],
                        "layer": 3,
                        "status": "skipped",
                        "reason": "not selected",
                        "detail": {},
                        "boundaries": [],
                    },
                    {
                        "id": "attention:4",
                        "kinds": ["attention"],
                        "layer": 4,
                        "status": "refused",
                        "reason": "its mask [B, 1] is :key: to nothing",
                        "detail": {},
                        "boundaries": [],
                    },
                ],
                "warnings": ["Beware.", "Twice."],
                "nodes_before": 10,
                "nodes_after": 12,
                "changed": True,
            },
            {
                "name": "tidy",
                "spec": "tidy",
                "sites": [],
                "warnings": ["Twice."],
                "nodes_before": 12,
                "nodes_after": 12,
                "changed": False,
            },
        ],
        "warnings": ["First.", "Beware."],
        "verification": None,
        "picture": None,
    }
    assert SCHEMA == 1


def test_times_are_in_the_json_on_request_only():
    assert "seconds" not in _report().to_json()
    timed = json.loads(_report().to_json(timings=True))
    assert [item["seconds"] for item in timed["passes"]] == [0.25, 0.5]


def test_warnings_come_once():
    assert _report().all_warnings() == ["First.", "Beware.", "Twice."]


def test_counts_and_change():
    report = _report()
    assert [report.passes[0].count(status) for status in ("rewritten", "skipped", "refused")] == [1, 1, 1]
    assert (report.changed, report.passes[0].changed, report.passes[1].changed) == (True, True, False)
    assert not Report().changed


def test_the_table():
    assert [line.rstrip() for line in _text(_report()).splitlines()] == [
        "pass              site            layer  status     what and why",
        "prune-last-token  lm_head:logits  -      rewritten  pruned",
        "prune-last-token  attention:3     3      skipped    not selected",
        "prune-last-token  attention:4     4      refused    its mask [B, 1] is :key: to nothing",
        "tidy              -               -      skipped    no site of this kind was found",
        "prune-last-token{keep=2}: 1 rewritten, 1 skipped, 1 refused; 10 -> 12 nodes",
        "tidy: 0 rewritten, 0 skipped, 0 refused; 12 -> 12 nodes",
    ]
    assert "keep=1" in _text(_report(), verbose=True)


def test_a_long_id_is_folded_and_nothing_is_lost():
    long = "lm_head:" + "".join(f"[{number}]" for number in range(60))
    report = Report([PassReport("prune-last-token", "x", [SiteReport(long, (), 7, "rewritten", "done")])])
    shown = _text(report, width=100)
    lines = shown.splitlines()
    assert "…" not in shown
    column = slice(lines[0].index("site"), lines[0].index("layer"))
    assert "".join(line[column].strip() for line in lines[1:-1]) == long
    assert lines[1].rstrip().endswith("7      rewritten  done")


def test_two_runs_give_the_same_bytes():
    texts = [Pipeline([DoubleNegate(times=2), "tidy"])(parse(CHAIN)).to_json() for _ in range(2)]
    assert texts[0] == texts[1]


def test_another_process_gives_the_same_bytes():
    code = (
        "import sys; from graphsurgery import Pipeline; from tests.small_models import *; "
        "sys.stdout.write(Pipeline([DoubleNegate(times=2), 'tidy'])(parse(CHAIN)).to_json())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == Pipeline([DoubleNegate(times=2), "tidy"])(parse(CHAIN)).to_json()


def test_a_boundary_is_between_names():
    report = Pipeline([DoubleNegate()])(parse(CHAIN))
    assert report.passes[0].sites[0].boundaries == (Boundary("main", ("a",), ("a",), ("a",), ("a/neg/neg_1",)),)
    assert [field.name for field in dataclasses.fields(Boundary)] == [
        "scope",
        "inputs_before",
        "outputs_before",
        "inputs_after",
        "outputs_after",
    ]
