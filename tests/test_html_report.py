"""Pages: what they hold, that they load nothing, and that no name in a model gets a word in."""

from __future__ import annotations

import base64
import dataclasses
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.cli import main
from graphsurgery.html_report import bench_page, report_page
from graphsurgery.html_report.markup import Html, el, percent, plural, ranges
from tests.bench_helpers import pair_report
from tests.html_helpers import moe_report, read

if TYPE_CHECKING:
    from tests.html_helpers import Element

HOSTILE = (
    "</code></style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x'&amp;\x00\x1b\u202e"
)
SECTIONS = ["layers", "operators", "attention", "experts", "verification", "warnings"]


def _run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(item) for item in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture(scope="module")
def made(fixtures_dir, tmp_path_factory) -> tuple[Path, Path]:
    """A verified result with its page, and the page of its input."""
    directory = tmp_path_factory.mktemp("pages")
    model = shutil.copy(fixtures_dir / "gemma2" / "model.onnx", directory / "gemma2.onnx")
    page, look = directory / "apply.html", directory / "inspect.html"
    assert _run("apply", model, "-p", "block-attention{q_blocks=4,kv_blocks=2}", "--verify", "--html", page, "-q") == 0
    assert _run("inspect", model, "--html", look) == 0
    return page, look


def _check(page: Element, text: str) -> None:
    """What holds of every page."""
    ids = [item.attributes["id"] for item in page.all() if "id" in item.attributes]
    assert len(ids) == len(set(ids)), "an id is there twice"
    for item in page.all():
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(item.attributes.get(name, "").split()) <= set(ids)
        assert not [name for name in item.attributes if name.startswith("on")]
    for link in page.all("a"):
        assert link.attributes["href"].removeprefix("#") in ids
    drawings = [item for item in page.all("svg") if item.attributes.get("aria-hidden") != "true"]
    for item in drawings:
        assert item.attributes["role"] == "img"
        assert [child.tag for child in item.all()[:2]] == ["title", "desc"]
        assert all(child.text for child in item.all()[:2])
    assert not page.all("script")
    assert not page.all("link")
    assert set(re.findall(r"https?://[^\s\"'<>]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|javascript:", text)
    assert len(page.all("h1")) == 1
    assert page.one("html").attributes == {"lang": "en"}
    assert all(cell.attributes.get("scope") == "col" for cell in page.all("th"))
    assert page.one("main").attributes["id"] == "report"
    for region in page.all(role="region"):
        assert (region.attributes["tabindex"], bool(region.attributes["aria-label"])) == ("0", True)
    for details in page.all("details"):
        first = details.children[0]
        assert not isinstance(first, str)
        assert first.tag == "summary"


def test_a_verified_result(made):
    text = made[0].read_text(encoding="utf-8")
    page = read(text)
    _check(page, text)
    assert page.one("head").one("title").text == "apply: gemma2.onnx"
    assert page.one("h1").text == "gemma2.onnx"
    assert [item.attributes["id"] for item in page.all("section")] == SECTIONS[:5]
    tiles = {item.one("span").text: item.one("b").text for item in page.all("li", class_="tile")}
    assert (tiles["sites rewritten"], tiles["sites refused"], tiles["verification"]) == ("4", "0", "equal")
    assert re.fullmatch("377 \u2192 \\d+", tiles["nodes"])
    stack = page.one("section", id="layers").all("svg", role="img")[0]
    assert "layer 0: block-attention 1 rewritten" in stack.one("desc").text
    assert [item.text for item in stack.all("text", class_="strong")][1:] == [f"layer {i}" for i in range(4)]
    attention = page.one("section", id="attention")
    assert [item.one("h3").text for item in attention.all("figure")] == [
        "causal sliding, layers 0, 2",
        "causal full, layers 1, 3",
    ]
    full = attention.all("figure")[1]
    assert "50\u00a0% of all pairs are attended" in full.text
    assert (
        "4 query blocks, at most 2 key blocks for each: 62\u00a0% of all scores are computed (skip=trim)." in full.text
    )
    assert [item.text for item in full.one("tbody").all("td")] == [
        *("0\u2013255", "0\u2013127, 128\u2013255"),
        *("256\u2013511", "0\u2013255, 256\u2013511"),
        *("512\u2013767", "0\u2013383, 384\u2013767"),
        *("768\u20131023", "0\u2013511, 512\u20131023"),
    ]
    # Three borders of query blocks, and one of key blocks in each.
    assert len(full.one("svg").all("line", class_="blocks")) == 7
    assert len(full.one("svg").all("rect", class_="needed")) == 4
    operators = page.one("section", id="operators")
    assert "Slice" in operators.text
    verification = page.one("section", id="verification")
    assert verification.one(class_="badge").text == "\u2713 equal"
    assert len(verification.all("td", class_="name")) == 22


def test_an_inspection(made):
    text = made[1].read_text(encoding="utf-8")
    page = read(text)
    _check(page, text)
    assert page.one("head").one("title").text == "inspect: gemma2.onnx"
    assert [item.attributes["id"] for item in page.all("section")] == ["layers", "interface", *SECTIONS[1:4]]
    assert "input_ids" in page.one("section", id="interface").text
    assert "sites would be rewritten" in page.one("header").text
    assert "under 1\u00a0% of all pairs are attended" in page.one("section", id="attention").text


def test_a_large_model_makes_a_small_page():
    text = report_page(moe_report())
    page = read(text)
    _check(page, text)
    assert len(text) < 100_000
    assert [item.attributes["id"] for item in page.all("section")] == SECTIONS
    stack = page.one("section", id="layers").all("svg", role="img")[0]
    labels = [item.text for item in stack.all("text", class_="strong")][3:]
    assert labels == ["layer 0", "layer 1", "layer 2", "layer 3", "layers 4\u201347", "outside layers"]
    assert "layer 3: block-attention 1 refused" in stack.one("desc").text
    assert "outside layers: prune-last-token 1 skipped" in stack.one("desc").text
    assert "Found no site of their kind: tidy." in page.one("section", id="layers").text


def test_statuses_are_words_and_marks_too():
    page = read(report_page(moe_report()))
    badges = {item.text for item in page.one("section", id="layers").all("span", class_="badge")}
    assert badges == {"\u2713 rewritten", "\u2013 skipped", "\u2715 refused"}
    legend = page.one("section", id="layers").one("ul", class_="legend")
    words = [item.all("span")[-1].text for item in legend.all("li")]
    assert words == ["rewritten", "skipped", "refused", "some of each", "no site"]


def test_experts():
    section = read(report_page(moe_report())).one("section", id="experts")
    assert section.all("h3")[0].text == "48 blocks of 128 experts, 8 chosen, layers 0\u201347"
    assert "drawn, not measured" in section.text
    rows = section.all("figure")[1].one("desc").text
    assert rows.startswith("dense: 65536 rows, every expert on every token; gather: 4096 rows, ")
    shown = [item.text for item in section.all("figure")[1].all("text", class_="strong")]
    assert shown == ["dense (exported)", "gather", "grouped", "packed (now)"]
    assert len(section.all("figure")[0].all("rect", class_="b")) == 128


def test_the_worst_output_comes_first():
    section = read(report_page(moe_report())).one("section", id="verification")
    names = [item.all("code")[0].text for item in section.all("td", class_="name")]
    assert names == ["worst", "logitsm", "present"]
    assert section.all("svg")[0].one("desc").text == "element [0, 1] differs m."
    assert section.all("svg")[0].all("rect")[0].attributes["class"] == "over"
    assert section.all("svg")[1].one("desc").text == "0.2 of its limit."
    assert section.all("svg")[2].one("desc").text == "bitwise equal."
    assert "now cache" in section.text


def test_regions_and_tokens():
    region = {"reference": "sum", "rewritten": "experts/sum", "sites": ["experts:0"], "status": "equal", "alike": 3}
    region |= {"nodes": [118, 44], "error": 2e-7, "tolerance": 1e-5, "problem": None}
    unknown = region | {
        "rewritten": "odd/sum",
        "status": "unchecked",
        "error": None,
        "alike": 1,
        "problem": "no weights",
    }
    token = {"prompt": "p", "row": 0, "token": 4, "tie": True, "gap": 0.5, "limit": 1.0}
    found = {"status": "equal", "depth": "regions", "regions": [region, unknown], "token_differences": [token]}
    section = read(report_page(moe_report(verification=found))).one("section", id="verification")
    assert "Depth regions (each rewritten region on its own)" in section.text
    rows = [[cell.text for cell in row.all("td")] for row in section.one("tbody").all("tr")]
    assert rows == [
        ["odd/sumexperts:0", "? unchecked", "118 \u2192 44", "\u2013", "1e-05", "no weights"],
        ["experts/sum3 regions alike: experts:0", "\u2713 equal", "118 \u2192 44", "2e-07", "1e-05"]
        + ["Error of experts/sum0.02 of its limit.0.02 of its limit"],
    ]
    assert "p, row 0, token 4: a tie, a gap of 0.5 where 1 is the limit" in section.text


def test_masks_that_cannot_be_told_say_why():
    section = read(report_page(moe_report())).one("section", id="attention")
    assert "cannot be told: the operator m masks within itself." in section.all("figure")[1].text
    assert not section.all("figure")[1].all("svg")


def test_hostile_names_are_text():
    text = report_page(moe_report(layers=8, experts=16, name=HOSTILE))
    page = read(text)
    _check(page, text)
    assert not page.all("img")
    assert len(page.all("style")) == 1
    assert "<script" not in text
    assert not set(text) & set("\x00\x1b\u202e")
    shown = page.one("section", id="layers").text
    assert "<script>alert(1)</script>" in shown
    assert "\\u0000\\u001b\\u202e" in shown


@given(st.text(max_size=40))
def test_any_name_is_text(name):
    element = el("p", name, title=name)
    page = read(element).one("p")
    kept = "".join(item for item in name if item.isprintable() or item == " ")
    assert [item for item in page.children if not isinstance(item, str)] == []
    assert all(item in page.text for item in kept)
    assert page.attributes["title"] == page.text


def test_markup():
    assert el("a", "x & y", None, [1, Html("<b>z</b>")], href="#q", class_="c", hidden=True, title=None) == (
        '<a href="#q" class="c" hidden>x &amp; y1<b>z</b></a>'
    )
    assert [percent(share) for share in (0, 0.004, 0.5, 0.999, 1)] == [
        "0\u00a0%",
        "under 1\u00a0%",
        "50\u00a0%",
        "over 99\u00a0%",
        "100\u00a0%",
    ]
    assert (plural(1, "site"), plural(1200, "site")) == ("1 site", "1\u202f200 sites")
    assert ranges([3, 0, 1, 2, 7]) == "0\u20133, 7"


def test_no_pass_and_no_picture():
    report = moe_report(verification=None, output=None, input=None)
    report = dataclasses.replace(report, passes=[], picture=None, warnings=[])
    page = read(report_page(report))
    assert "No pass found a site." in page.text
    assert "nothing was written" in page.text
    assert page.text.count("This was not looked at") == 3
    assert "The result was not verified" in page.text


def test_bench():
    text = bench_page(pair_report())
    page = read(text)
    image = page.one("img")
    assert image.attributes["alt"].startswith("Latency and peak memory")
    kind, _, coded = image.attributes["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(coded).decode() == pair_report().to_svg()
    assert len(page.one("section", id="rows").one("tbody").all("tr")) == 6
    _check(page, text)


# ---- files ------------------------------------------------------------------------------------------------------------


def test_two_runs_give_the_same_bytes(fixtures_dir, tmp_path, monkeypatch):
    shutil.copy(fixtures_dir / "llama" / "model.onnx", tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    command = ["apply", "m.onnx", "-p", "block-attention{q_blocks=2}", "-p", "tidy", "--force", "-q", "--html"]
    assert (_run(*command, "one.html"), _run(*command, "two.html")) == (0, 0)
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.surgery.onnx", "one.html", "two.html"]


def test_a_dry_run_has_a_page(fixtures_dir, tmp_path):
    model = fixtures_dir / "llama" / "model.onnx"
    assert _run("apply", model, "-p", "prune-last-token", "--dry-run", "-q", "--html", tmp_path / "r.html") == 0
    assert "nothing was written" in (tmp_path / "r.html").read_text()


def test_a_difference_is_shown(fixtures_dir, tmp_path, monkeypatch):
    from graphsurgery import registry

    monkeypatch.setattr(registry, "_PASSES", {**registry._PASSES, "saboteur": "tests.small_models:Saboteur"})
    shutil.copy(fixtures_dir / "llama" / "model.onnx", tmp_path / "m.onnx")
    command = ["apply", tmp_path / "m.onnx", "-p", "saboteur{how=values}", "--verify", "-q"]
    assert _run(*command, "--html", tmp_path / "r.html") == 1
    page = read((tmp_path / "r.html").read_text())
    assert page.one("section", id="verification").all(class_="badge")[0].text == "\u2715 different"
    assert not (tmp_path / "m.surgery.onnx").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [("r.txt", "does not end with .html"), ("deep/r.html", "does not exist: make it first"), ("m.onnx", ".html")],
)
def test_names_that_will_not_do_are_refused_first(fixtures_dir, tmp_path, capfd, name, words):
    model = fixtures_dir / "llama" / "model.onnx"
    for command in (["apply", model, "-p", "tidy", "-o", tmp_path / "o.onnx"], ["inspect", model], ["bench", model]):
        assert _run(*command, "--html", tmp_path / name) == 2
        assert words in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_leaves_the_old_one(fixtures_dir, tmp_path, monkeypatch, capfd):
    page = tmp_path / "r.html"
    page.write_text("precious")

    def replace(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    model = fixtures_dir / "llama" / "model.onnx"
    assert _run("apply", model, "-p", "tidy", "--dry-run", "-q", "--html", page) == 3
    assert "Cannot write" in capfd.readouterr().err
    assert page.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [page]
