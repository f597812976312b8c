"""The pages: what they hold and in which order."""

from __future__ import annotations

import base64
import csv
import importlib.resources
import io
from pathlib import PurePath
from typing import TYPE_CHECKING

from graphsurgery.html_report.attention import attention
from graphsurgery.html_report.drawing import STATUSES, Ids
from graphsurgery.html_report.experts import experts
from graphsurgery.html_report.markup import Html, el
from graphsurgery.html_report.operators import operators
from graphsurgery.html_report.stack import site_lists, stack
from graphsurgery.html_report.verification import verification
from graphsurgery.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.benching.bench_report import BenchReport
    from graphsurgery.html_report.markup import Child
    from graphsurgery.inspection import Inspection, ValueInfo
    from graphsurgery.picture.parts import Picture
    from graphsurgery.site_report import PassReport, Report

__all__ = ["bench_page", "inspect_page", "report_page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Whatever a name in a model may try, a browser loads and runs nothing."""


def report_page(report: Report) -> str:
    """The report of ``apply`` as a page."""
    ids = Ids()
    picture = report.picture
    verdict = str(report.verification["status"]) if report.verification else "not verified"
    nodes = (report.passes[0].nodes_before, report.passes[-1].nodes_after) if report.passes else (0, 0)
    tiles = [
        *_status_tiles(report.passes),
        _tile(f"{nodes[0]} \u2192 {nodes[1]}", "nodes"),
        _tile(verdict, "verification", {"equal": "good", "different": "bad"}.get(verdict, "")),
    ]
    written = report.output or "nothing was written"
    about = [el("p", el("code", report.input or "?"), " \u2192 ", el("code", written), class_="paths")]
    sections = [
        _section(
            "layers",
            "Layers",
            "Each layer from the input down, and what each pass did there.",
            _sites(ids, report.passes, picture, {}),
        ),
        _section(
            "operators",
            "Operators",
            "How often each occurs, functions and branches included.",
            operators(ids, picture.operators, report.passes) if picture else _UNSEEN,
        ),
        _section("attention", "Attention", _ATTENTION, attention(ids, picture.attention) if picture else _UNSEEN),
        _section(
            "experts",
            "Experts",
            "What an expert block computes for a sample of tokens, by the form in which it is written.",
            experts(ids, picture.experts) if picture else _UNSEEN,
        ),
        _section(
            "verification",
            "Verification",
            "Both models in ONNX Runtime on the same inputs.",
            verification(ids, report.verification),
        ),
    ]
    sections += _warnings(report.all_warnings())
    return _page(f"apply: {PurePath(report.input or 'model').name}", "apply", about, tiles, sections)


def inspect_page(found: Inspection) -> str:
    """The report of ``inspect`` as a page."""
    ids = Ids()
    picture = found.picture
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in found.opsets.items())
    count, size = found.weights
    tiles = [
        *_status_tiles(found.passes, "would be "),
        _tile(f"{found.nodes}", "nodes"),
        _tile(f"{size / 2**20:.1f} MiB", f"in {count} initializers"),
    ]
    history = [f"made by graphsurgery {run['version']}: {', '.join(map(str, run['passes']))}" for run in found.runs]
    about = [
        el("p", el("code", found.path), class_="paths"),
        el(
            "p",
            f"IR version {found.ir_version}; opsets {opsets}; {len(found.functions)} local functions",
            class_="paths",
        ),
        *(el("p", text, class_="paths") for text in history),
    ]
    sections = [
        _section(
            "layers",
            "Layers",
            "Each layer from the input down, and what each pass would do there with its default options, each on its own.",
            _sites(ids, found.passes, picture, found.unusable),
        ),
        _section("interface", "Interface", "Inputs and outputs as declared.", _interface(found)),
        _section(
            "operators",
            "Operators",
            "How often each occurs, functions and branches included.",
            operators(ids, picture.operators, ()) if picture else _UNSEEN,
        ),
        _section("attention", "Attention", _ATTENTION, attention(ids, picture.attention) if picture else _UNSEEN),
        _section(
            "experts",
            "Experts",
            "What an expert block computes for a sample of tokens, by the form in which it is written.",
            experts(ids, picture.experts) if picture else _UNSEEN,
        ),
    ]
    sections += _warnings(found.problems)
    return _page(f"inspect: {PurePath(found.path).name}", "inspect", about, tiles, sections)


def bench_page(report: BenchReport) -> str:
    """The report of ``bench`` as a page: the plot, then the rows as they are printed."""
    about = (
        [el("p", el("code", report.a), " against ", el("code", report.b), class_="paths")]
        if report.b
        else [el("p", el("code", report.a), class_="paths")]
    )
    tiles = [
        _tile(str(len(report.rows)), "rows measured"),
        _tile(str(report.settings["threads"]), "threads"),
        _tile(str(report.settings["batch"]), "batch"),
    ]
    # As a picture of its own: its style must not reach the page.
    coded = base64.b64encode(report.to_svg().encode()).decode()
    told = "Latency and peak memory over the length of the prompt and of the past; the table below has the numbers."
    plot = el("img", src=f"data:image/svg+xml;base64,{coded}", alt=told, class_="plot")
    sections = [
        _section(
            "plot",
            "Plot",
            "Both axes are logarithmic; marks are medians, bars the range of the runs.",
            el("div", plot, class_="scroll"),
        ),
        _section("rows", "Rows", "One line for each model and point.", _bench_rows(report)),
    ]
    sections += _warnings(tuple(report.notes))
    return _page(f"bench: {PurePath(report.a).name}", "bench", about, tiles, sections)


_UNSEEN = el("p", "This was not looked at: the report was made without a picture.", class_="lede")

_COLUMNS = {
    "model": "model",
    "side": "side",
    "phase": "phase",
    "length": "S",
    "past": "P",
    "status": "status",
    "latency_median": "latency, s",
    "peak_bytes": "peak, bytes",
    "latency_ratio": "latency, B/A",
    "memory_ratio": "memory, B/A",
}
"""Columns of the table of ``bench``, by their name in its CSV form."""

_ATTENTION = "The graph's own masks, computed on a sample prompt: nothing is assumed of their form."


def _bench_rows(report: BenchReport) -> Html:
    read = csv.DictReader(io.StringIO(report.to_csv()))
    head = el("tr", [el("th", words, scope="col") for words in _COLUMNS.values()])
    rows = [el("tr", [el("td", row.get(name, "")) for name in _COLUMNS]) for row in read]
    return _scrolling(head, rows, "rows measured")


def _scrolling(head: Html, rows: Sequence[Html], label: str) -> Html:
    """A table that scrolls by itself where the page is narrow."""
    return el(
        "div",
        el("table", el("thead", head), el("tbody", list(rows))),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=label,
    )


def _sites(ids: Ids, passes: Sequence[PassReport], picture: Picture | None, unusable: dict[str, str]) -> Html:
    return el("div", stack(ids, passes, picture), site_lists(passes, unusable), class_="stackbox")


def _status_tiles(passes: Sequence[PassReport], tense: str = "") -> list[Html]:
    return [
        _tile(str(sum(item.count(status) for item in passes)), f"sites {tense}{status}", status) for status in STATUSES
    ]


def _tile(number: str, words: str, kind: str = "") -> Html:
    return el("li", el("b", number), el("span", words), class_=f"tile {kind}".rstrip())


def _section(name: str, title: str, lede: str, body: Child) -> tuple[str, str, Html]:
    heading = f"{name}-heading"
    return (
        name,
        title,
        el(
            "section", el("h2", title, id=heading), el("p", lede, class_="lede"), body, id=name, aria_labelledby=heading
        ),
    )


def _warnings(texts: Sequence[str]) -> list[tuple[str, str, Html]]:
    if not texts:
        return []
    listed = el("ul", [el("li", text) for text in texts], class_="plain")
    return [_section("warnings", "Warnings", "What must be known to use the file rightly.", listed)]


def _interface(found: Inspection) -> Html:
    def rows(kind: str, items: Sequence[ValueInfo]) -> list[Html]:
        return [
            el(
                "tr",
                el("td", kind),
                el("td", el("code", item.name)),
                el("td", item.dtype),
                el("td", el("code", "?" if item.shape is None else f"[{', '.join(item.shape)}]")),
                el("td", item.role),
            )
            for item in items
        ]

    head = el("tr", [el("th", name, scope="col") for name in ("", "name", "type", "shape", "role")])
    every = [*rows("in", found.inputs), *rows("out", found.outputs)]

    def table(lines: list[Html]) -> Html:
        return _scrolling(head, lines, "inputs and outputs")

    few = [*rows("in", found.inputs[:6]), *rows("out", found.outputs[:2])]
    if len(every) <= len(few):
        return table(every)
    return el(
        "div",
        table(few),
        el("details", el("summary", f"All {len(every)} inputs and outputs"), el("div", table(every), class_="inner")),
    )


def _page(title: str, command: str, about: list[Html], tiles: list[Html], sections: list[tuple[str, str, Html]]) -> str:
    style = importlib.resources.files("graphsurgery.html_report").joinpath("style.css").read_text(encoding="utf-8")
    jump = el("ul", [el("li", el("a", words, href=f"#{name}")) for name, words, _ in sections])
    body = el(
        "body",
        el("a", "Skip to the report", href="#report", class_="skip"),
        el(
            "header",
            el(
                "div",
                el("p", f"graphsurgery {command}", class_="brand"),
                el("h1", title.partition(": ")[2]),
                list(about),
                el("ul", list(tiles), class_="tiles"),
                class_="wrap",
            ),
            class_="top",
        ),
        el("nav", el("div", jump, class_="wrap"), class_="jump", aria_label="Sections"),
        el("main", [section for _, _, section in sections], id="report", class_="wrap", tabindex=-1),
        el(
            "footer",
            el(
                "p",
                f"Written by graphsurgery {__version__}. This file loads nothing and runs no script.",
                class_="wrap",
            ),
        ),
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("title", title),
        el("style", Html(style)),
    )
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"
