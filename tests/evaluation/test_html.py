import math
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
