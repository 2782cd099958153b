import base64
import json
import math
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import toys
from pyarrow import parquet

from hf_kvcache.evaluation import Grid, Protocol, evaluate, report
from hf_kvcache.evaluation.svg import Axis, Series, chart, heat_color


class Page(HTMLParser):
    """Counts elements, and checks that every one is closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.count, self.attributes, self.texts = [], {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, *of) for of in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    with toys.few_problems():
        results = evaluate(
            toys.loaded()._replace(name="<tiny> & co"),
            [toys.TEXT[:300], toys.TEXT[300:]],
            ["static", "toys:rounded"],
            tasks=["fidelity", "retrieval", "cost"],
            protocol=Protocol(60, 12, 8),
            max_tokens=150,
            grid=Grid((250,), (0.0, 1.0)),
            contexts=(20, 40),
            progress=False,
        )
    folder = tmp_path_factory.mktemp("report")
    report.write_report(results, folder)
    return results, folder


def test_the_page_is_whole_and_needs_nothing_else(written):
    text = (written[1] / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.count["table"] == 1 + len(report.tables(written[0])) + 1  # results, the others, the heat map
    assert page.count["svg"] == 5
    assert page.count["script"] == page.count["style"] == 1
    assert not [of for of in page.attributes if of[1] in ("src", "href")]
    assert "http" not in text
    assert "<tiny>" not in text
    assert "Cache evaluation: <tiny> & co" in page.texts


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUESTIONS = """<script>
{
const cells = () => [...document.querySelector("tbody").rows].map((row) => row.cells[0].textContent);
const found = { before: cells() };
const table = document.querySelector("table.sortable"), head = [...table.tHead.rows[0].cells];
const column = head.findIndex((of) => of.textContent === "KL mean");
const press = () => head[column].querySelector("button").click();
press(); found.up = cells(); press(); found.down = cells(); found.sorted = head[column].getAttribute("aria-sort");
const box = table.closest(".scroll"), name = table.querySelector("td"), left = () => name.getBoundingClientRect().left;
box.style.width = "300px"; const unmoved = left(); box.scrollLeft = 90;
found.stays = [box.scrollLeft, left() - unmoved];
const dot = document.querySelector("circle[data-tip]"), tip = document.getElementById("tip");
dot.dispatchEvent(new PointerEvent("pointermove", { clientX: 5, clientY: 5 }));
found.tip = [dot.dataset.tip, tip.textContent, getComputedStyle(tip).display];
dot.dispatchEvent(new PointerEvent("pointerleave")); found.gone = getComputedStyle(tip).display;
const legend = document.querySelector(".legend"), lines = legend.ownerSVGElement.querySelector(".series");
const shown = () => [legend.getAttribute("aria-pressed"), getComputedStyle(lines).display];
found.shown = shown(); legend.dispatchEvent(new MouseEvent("click")); found.hidden = shown();
legend.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" })); found.again = shown();
document.body.innerHTML = "<pre>" + btoa(unescape(encodeURIComponent(JSON.stringify(found)))) + "</pre>";
}
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_works_in_a_browser(written, tmp_path):
    page = tmp_path / "page.html"
    page.write_text((written[1] / "report.html").read_text().replace("</body>", f"{QUESTIONS}</body>"))
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
    arguments += ["--no-first-run", "--disable-background-networking"]
    done = subprocess.run([BROWSER, *arguments, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(base64.b64decode(done.stdout.split("<pre>")[1].split("</pre>")[0]))
    table = report.main_table(written[0])
    assert found["before"] == [row[0] for row in table.rows]
    exact = ["dynamic (reference)", "static"]
    assert set(found["up"][:2]) | {found["up"][2]} == {*exact, "no cache (noise floor)"}
    assert found["up"][3] == found["down"][0] == "toys:rounded"
    assert found["sorted"] == "descending"
    assert found["stays"] == [90, 0]  # the names of the caches, while figures are scrolled
    assert found["tip"] == [found["tip"][0], found["tip"][0], "block"]
    assert found["gone"] == "none"
    assert found["shown"] == found["again"] == ["true", "inline"]
    assert found["hidden"] == ["false", "none"]


def test_every_cell_stands_under_its_heading(written):
    rows = (written[1] / "report.html").read_text().split("<tbody>")[1].split("</tbody>")[0].split("<tr>")[1:]
    table = report.main_table(written[0])
    assert [row.count("<td>") for row in rows] == [len(table.columns)] * len(table.rows)


def test_every_point_can_be_asked_for_its_value(written):
    page = Page((written[1] / "report.html").read_text())
    tips = [value for tag, name, value in page.attributes if (tag, name) == ("circle", "data-tip")]
    assert len(tips) == page.count["circle"]
    found = written[0].caches[1]
    assert f"toys:rounded: MiB held after 59 tokens {found.bytes_held / 2**20:.4g}" in " ".join(tips)
    assert f"nats (zero: 1e-16) {found.fidelity.kl_mean.value:.4g}" in " ".join(tips)


def test_charts_place_values_and_leave_out_what_is_no_number():
    drawn = chart(
        "t", [Series("a&b", [(1.0, 1e-3), (10.0, 1e-1), (5.0, math.nan)], line=False)], Axis("x", True), Axis("y", True)
    )
    page = Page(drawn)
    places = [float(value) for tag, name, value in page.attributes if (tag, name) == ("circle", "cx")]
    assert len(places) == 2
    assert 70 < places[0] < places[1] < 640
    assert "a&amp;b" in drawn
    assert chart("t", [Series("a", [], line=True)], Axis("x", False), Axis("y", False)) == ""
    assert chart("t", [Series("a", [(0.0, 0.0)], line=True)], Axis("x", False), Axis("y", False)) != ""


def test_heat_runs_from_dark_to_light():
    assert (heat_color(0.0), heat_color(0.5), heat_color(1.0)) == ("#440154", "#21918c", "#fde725")
    assert heat_color(-1.0) == heat_color(0.0)


def test_samples_hold_every_position_of_every_cache(written):
    results, folder = written
    table = parquet.read_table(folder / "samples.parquet").to_pandas()
    assert len(table) == 4 * results.scored_tokens
    mine = table[table.cache == "toys:rounded"]
    assert mine.kl.mean() == pytest.approx(results.caches[1].fidelity.kl_mean.value)
    assert list(mine.window.value_counts(sort=False)) == results.positions.lengths.tolist()
    assert set(table.role) == {"reference", "noise floor", "candidate"}
