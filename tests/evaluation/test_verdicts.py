import math

import pytest
import toys

from hf_kvcache.evaluation import Grid, Prompts, Protocol, evaluate, report
from hf_kvcache.evaluation.verdicts import grade, pareto_front, verdict_line


@pytest.fixture(scope="module")
def everything():
    with toys.few_problems():
        return evaluate(
            toys.loaded(),
            [toys.TEXT],
            ["static", "toys:rounded", "toys:random_eviction"],
            tasks=["all"],
            protocol=Protocol(60, 12, 8),
            max_tokens=94,
            grid=Grid((250,), (0.0,)),
            prompts=Prompts(2, 30, 10),
            contexts=(30,),
            progress=False,
        )


def test_one_line_says_everything(everything):
    static, rounded, _ = (verdict_line(of, everything.reference) for of in everything.caches)
    assert static.startswith("static: exact up to rounding")  # the oldest transformers refuses it a mode
    for part in (
        "; KL ",
        "[",
        "perplexity ",
        "x the bytes after 59 tokens",
        "ms a token after 30",
        "x the peak",
        "gold p",
    ):
        assert part in static
    assert "100% of texts the same" in static
    assert rounded.startswith("toys:rounded: approximate, ")


def test_the_report_of_everything_has_every_part(everything, tmp_path):
    files = report.write_report(everything, tmp_path)
    names = [of.name for of in files]
    assert {"kl.png", "bytes.png", "speed.png", "perplexity.png", "retrieval.png"} <= set(names)
    text = files[1].read_text()
    assert all(verdict_line(of, everything.reference) in text for of in everything.caches)


def test_random_eviction_is_damaged_and_an_exact_cache_is_close(everything):
    static, rounded, evicting = (of.fidelity for of in everything.caches)
    assert grade(static) == "close"
    assert grade(evicting) == "damaged"
    assert evicting.kl_mean.value > 10 * rounded.kl_mean.value


def test_nothing_beats_the_front():
    points = [(3.0, 1.0), (1.0, 5.0), (2.0, 5.0), (2.0, 2.0), (4.0, 0.5), (5.0, 0.5), (0.5, math.nan)]
    assert pareto_front(points) == [1, 3, 0, 4]
    assert pareto_front([]) == []
