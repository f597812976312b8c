"""Pages in a real browser: they fit, load nothing, can be read by key and in the dark."""

from __future__ import annotations

import pytest

from graphsurgery.html_report import report_page
from tests.browser import browser, browser_path
from tests.html_helpers import moe_report

PATH = browser_path()
pytestmark = pytest.mark.skipif(PATH is None, reason="there is no Chromium: apt-get install chromium, or set CHROMIUM")

_CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (item) => {
    for (; item; item = item.parentElement) {
      const found = parse(getComputedStyle(item).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  let worst = [99, ''];
  for (const item of document.querySelectorAll('p, li, td, th, h1, h2, h3, summary, small, .badge, a, code')) {
    if (!item.textContent.trim() || item.closest('svg')) continue;
    const pair = [light(parse(getComputedStyle(item).color)), light(ground(item))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < worst[0]) worst = [ratio, item.outerHTML.slice(0, 80)];
  }
  return worst;
})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("browser") / "report.html"
    path.write_text(report_page(moe_report(layers=48, experts=128, name="<b>x</b>")), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shown():
    assert PATH is not None
    with browser(PATH) as found:
        yield found


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_can_be_read(shown, page, width, dark):
    shown.open(page, width=width, dark=dark)
    assert shown.run("document.documentElement.scrollWidth") == width
    assert shown.run("document.querySelectorAll('details').forEach((item) => { item.open = true })") is None
    assert shown.run("document.documentElement.scrollWidth") == width
    ratio, where = shown.run(_CONTRAST)
    assert ratio >= 4.5, where
    # Text in drawings is not shrunk beyond reading.
    assert (
        shown.run(
            "Math.min(...[...document.querySelectorAll('svg[role=img]')].map((i) => i.getBoundingClientRect().width / i.viewBox.baseVal.width))"
        )
        > 0.8
    )


def test_nothing_is_loaded_and_nothing_runs(shown, page):
    shown.requests.clear()
    shown.messages.clear()
    shown.open(page)
    assert set(shown.requests) == {page.as_uri()}
    assert shown.messages == []
    assert shown.run("document.scripts.length") == 0


def test_the_policy_holds_even_where_a_name_got_through(shown, page, tmp_path):
    """The page forbids itself scripts and addresses: a second wall behind escaping."""
    broken = tmp_path / "broken.html"
    text = page.read_text(encoding="utf-8")
    broken.write_text(text.replace("</main>", "<script>window.ran = 1</script><img src='http://127.0.0.1:9/x'></main>"))
    shown.blocked.clear()
    shown.open(broken)
    assert shown.run("window.ran") is None
    assert shown.blocked == ["csp"]


def test_all_by_key(shown, page):
    shown.open(page)
    shown.press("Tab")
    assert shown.run("document.activeElement.textContent") == "Skip to the report"
    assert shown.run("document.activeElement.getBoundingClientRect().left") >= 0
    outline = "getComputedStyle(document.activeElement).outlineWidth"
    seen = []
    for _ in range(30):
        shown.press("Tab")
        seen.append(shown.run("document.activeElement.tagName"))
        assert shown.run(outline) == "3px"
        if seen[-1] == "SUMMARY":
            break
    assert seen[:6] == ["A"] * 6
    assert "SUMMARY" in seen
    state = "document.activeElement.parentElement.open"
    before = shown.run(state)
    shown.press("Enter")
    assert shown.run(state) is not before
    shown.press("Space")
    assert shown.run(state) is before


def test_links_lead_to_their_sections(shown, page):
    shown.open(page)
    for _ in range(4):
        shown.press("Tab")
    assert shown.run("document.activeElement.textContent") == "Attention"
    shown.press("Enter")
    assert shown.run("location.hash") == "#attention"


def test_drawings_have_names(shown, page):
    shown.open(page)
    names = shown.run(
        "[...document.querySelectorAll('svg[role=img]')].map((i) => i.getAttribute('aria-labelledby').split(' ')"
        ".map((id) => document.getElementById(id).textContent).join('|'))"
    )
    assert len(names) > 10
    assert all(len(item.split("|")) == 2 and all(item.split("|")) for item in names)
